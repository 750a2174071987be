//! Measures the key-value store: inserts and reads of values of several sizes, waits for keys, and directories.

use anyhow::{Context as _, Result, bail, ensure};
use bytes::Bytes;

use super::{Target, WorkFilter, count};
use crate::cluster::Cluster;
use crate::meter::{CpuMeter, Figure};
use crate::wire::{self, Method, Value, Writer};

struct Size {
    name: &'static str,
    bytes: usize,
    /// The number of inserts and reads.
    calls: u64,
    /// The number of calls in progress at a time.
    window: u64,
}

const SIZES: [Size; 3] = [
    Size { name: "64 B", bytes: 64, calls: 8_000, window: 64 },
    Size { name: "64 KiB", bytes: 64 << 10, calls: 1_000, window: 16 },
    Size { name: "1 MiB", bytes: 1 << 20, calls: 64, window: 4 },
];

pub fn run(target: Target, cluster: &Cluster, wanted: &WorkFilter, figures: &mut Vec<Figure>) -> Result<()> {
    for size in &SIZES {
        values(target, cluster, size, wanted, figures).with_context(|| format!("values of {}", size.name))?;
    }
    figures.push(compressed(target, cluster, wanted).context("compressed values")?);
    figures.push(woken(target, cluster, wanted).context("a get woken by its insert")?);
    figures.push(awaited_by_all(target, cluster, wanted).context("a key awaited by all")?);
    figures.push(directory(target, cluster, wanted).context("a directory")?);
    Ok(())
}

/// Values that do not compress and differ from each other.
struct Values(Vec<u8>);

impl Values {
    fn new(bytes: usize) -> Self {
        let mut state = 0x2545_f491_4f6c_dd1d_u64;
        let random = std::iter::repeat_with(|| {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            state.to_le_bytes()[3]
        });
        Self(random.take(bytes).collect())
    }

    fn stamp(&mut self, number: u64) -> &[u8] {
        self.0[..8].copy_from_slice(&number.to_le_bytes());
        &self.0
    }

    fn check(&self, number: u64, key: &str, answer: &[u8]) -> Result<()> {
        let (found, value) = entry(answer)?;
        ensure!(found == key.as_bytes(), "asked for {key}, got {}", String::from_utf8_lossy(found));
        ensure!(value.len() == self.0.len(), "{} bytes, not {}", value.len(), self.0.len());
        let same = value[..8] == number.to_le_bytes() && value[8..] == self.0[8..];
        ensure!(same, "the value of {key} is not what was inserted");
        Ok(())
    }
}

/// Returns the key and the value in the answer to a get.
fn entry(answer: &[u8]) -> Result<(&[u8], &[u8])> {
    let Some((1, Value::Bytes(entry))) = wire::fields(answer).next().transpose()? else {
        bail!("an answer without an entry")
    };
    let (mut key, mut value) = (&[][..], &[][..]);
    for field in wire::fields(entry) {
        match field? {
            (1, Value::Bytes(found)) => key = found,
            (2, Value::Bytes(found)) => value = found,
            other => bail!("an entry with {other:?}"),
        }
    }
    Ok((key, value))
}

fn nothing(_: u64, answer: &Bytes) -> Result<()> {
    ensure!(answer.is_empty(), "an answer of {} bytes where there is nothing to say", answer.len());
    Ok(())
}

fn delete(cluster: &Cluster, key: &str) -> Result<()> {
    let speaker = cluster.speaker(0);
    let deleted = cluster.ask(0, Method::DeleteKeyValue, speaker.delete(key))?;
    nothing(0, &deleted)
}

fn values(
    target: Target,
    cluster: &Cluster,
    size: &Size,
    wanted: &WorkFilter,
    figures: &mut Vec<Figure>,
) -> Result<()> {
    let calls = wanted.times(size.calls);
    let id = |work: &str| format!("keys.{work}.{}", size.bytes);
    let speaker = |number: u64| cluster.speaker((number % u64::from(cluster.tasks())) as u32);
    let key = |number: u64| format!("bench/values/{number:06}");
    let mut values = Values::new(size.bytes);

    // Encoded before the measurement: a client takes as long to encode a large value as a server to decode
    // it.
    let requests: Vec<_> = (0..calls)
        .map(|number| (speaker(number).task, speaker(number).insert(&key(number), values.stamp(number))))
        .collect();
    let mut inserting = CpuMeter::start(target.pid)?;
    let insert = |number| {
        let (task, request) = &requests[number as usize];
        Ok((*task, Method::InsertKeyValue, request.clone()))
    };
    cluster.flood(size.window, calls, insert, nothing).context("inserting")?;
    inserting.lap_for_each_of(calls);
    let work = format!("key insert, {}", size.name);
    figures.push(inserting.finish(id("insert"), work, "insert", calls)?);

    for (method, short, work) in [
        (Method::TryGetKeyValue, "try-get", "key read"),
        (Method::GetKeyValue, "get", "blocking get of a present key"),
    ] {
        let mut reading = CpuMeter::start(target.pid)?;
        let read = |number| {
            // The reader is not the task that wrote it.
            let speaker = speaker(number + 1);
            Ok((speaker.task, method, speaker.key(&key(number))))
        };
        let check = |number, answer: &Bytes| values.check(number, &key(number), answer);
        cluster.flood(size.window, calls, read, check).context(work)?;
        reading.lap_for_each_of(calls);
        let work = format!("{work}, {}", size.name);
        figures.push(reading.finish(id(short), work, "read", calls)?);
    }
    delete(cluster, "bench/values")
}

/// Measures values that compress well, as texts and much generated code do: clients send them compressed.
fn compressed(target: Target, cluster: &Cluster, wanted: &WorkFilter) -> Result<Figure> {
    let calls = wanted.times(300);
    let mut text = String::new();
    while text.len() < 64 << 10 {
        text.push_str(&format!(
            "%fusion.{0} = f32[128,{0}] fusion(%param.{0}), kind=kLoop\n",
            text.len() % 9973
        ));
    }
    let key = |number: u64| format!("bench/texts/{number:06}");
    let mut requests = Vec::new();
    for number in 0..calls {
        let speaker = cluster.speaker((number % u64::from(cluster.tasks())) as u32);
        requests.push((speaker.task, speaker.insert_compressed(&key(number), text.as_bytes())?));
    }
    let mut measured = CpuMeter::start(target.pid)?;
    let insert = |number| {
        let (task, request) = &requests[number as usize];
        Ok((*task, Method::InsertKeyValue, request.clone()))
    };
    cluster.flood(16, calls, insert, nothing)?;
    measured.lap_for_each_of(calls);
    let work = "key insert, 64 KiB sent compressed";
    let figure = measured.finish("keys.insert-compressed.65536", work, "insert", calls)?;

    let read = cluster.ask(0, Method::TryGetKeyValue, cluster.speaker(0).key(&key(calls - 1)))?;
    ensure!(entry(&read)?.1 == text.as_bytes(), "a compressed value did not come back as it was");
    delete(cluster, "bench/texts")?;
    Ok(figure)
}

/// Measures a task that waits for a key which another task inserts.
fn woken(target: Target, cluster: &Cluster, wanted: &WorkFilter) -> Result<Figure> {
    let pairs = wanted.times(500);
    let mut values = Values::new(64);
    let mut measured = CpuMeter::start(target.pid)?;
    for number in 0..pairs {
        let key = format!("bench/pairs/{number:06}");
        let (waits, writes) =
            (number % u64::from(cluster.tasks()), (number + 1) % u64::from(cluster.tasks()));
        let (waits, writes) = (cluster.speaker(waits as u32), cluster.speaker(writes as u32));
        let waiting = cluster.call(waits.task, Method::GetKeyValue, waits.key(&key))?;
        // The heartbeat's answer proves that the get waits: both use one connection.
        cluster.ask(waits.task, Method::Heartbeat, waits.heartbeat())?;
        measured.begin();
        let inserted =
            cluster.call(writes.task, Method::InsertKeyValue, writes.insert(&key, values.stamp(number)))?;
        let found = cluster.answer(waiting)?;
        measured.lap();
        nothing(number, &cluster.answer(inserted)?)?;
        values.check(number, &key, &found)?;
    }
    let work = "blocking get woken by its insert";
    let figure = measured.finish("keys.woken", work, "get, insert and heartbeat", pairs)?;
    delete(cluster, "bench/pairs")?;
    Ok(figure)
}

/// Measures all tasks waiting for one key, as they do for the job's topology.
fn awaited_by_all(target: Target, cluster: &Cluster, wanted: &WorkFilter) -> Result<Figure> {
    let rounds = wanted.times(10);
    let writer = cluster.speaker(0);
    let mut values = Values::new(1 << 10);
    let mut measured = CpuMeter::stopped(target.pid);
    for number in 0..rounds {
        let key = format!("bench/awaited/{number:06}");
        let waiting = cluster.call_all(Method::GetKeyValue, |speaker| Ok(speaker.key(&key)))?;
        cluster.answers(cluster.call_all(Method::Heartbeat, |speaker| Ok(speaker.heartbeat()))?)?;
        measured.begin_counted()?;
        let inserted = cluster.call(0, Method::InsertKeyValue, writer.insert(&key, values.stamp(number)))?;
        let found = cluster.answers(waiting)?;
        measured.lap();
        measured.stop()?;
        nothing(number, &cluster.answer(inserted)?)?;
        for answer in found {
            values.check(number, &key, &answer)?;
        }
    }
    let tasks = cluster.tasks();
    let work = format!("one key of 1 KiB reaching {} tasks that wait", count(tasks));
    let figure = measured.finish("keys.awaited", work, "task", rounds * u64::from(tasks))?;
    delete(cluster, "bench/awaited")?;
    Ok(figure)
}

fn directory(target: Target, cluster: &Cluster, wanted: &WorkFilter) -> Result<Figure> {
    const KEYS: u64 = 1_000;
    let reads = wanted.times(200);
    let writer = cluster.speaker(0);
    let mut values = Values::new(64);
    let key = |number: u64| format!("bench/directory/{number:06}");
    let insert = |number| Ok((0, Method::InsertKeyValue, writer.insert(&key(number), values.stamp(number))));
    cluster.flood(64, KEYS, insert, nothing)?;

    let mut measured = CpuMeter::start(target.pid)?;
    for number in 0..reads {
        let speaker = cluster.speaker((number % u64::from(cluster.tasks())) as u32);
        measured.begin();
        let call = cluster.call(speaker.task, Method::GetKeyValueDir, speaker.key("bench/directory"))?;
        let answer = cluster.answer(call)?;
        measured.lap();
        let mut found = 0;
        for field in wire::fields(&answer) {
            let (2, Value::Bytes(kv)) = field? else { continue };
            // Each entry has the form of the answer to a get.
            values.check(found, &key(found), &Writer::default().bytes(1, kv).finish())?;
            found += 1;
        }
        ensure!(found == KEYS, "{found} keys, not {KEYS}");
    }
    let figure = measured.finish("keys.directory", "directory of 1,000 keys of 64 B", "read", reads)?;
    delete(cluster, "bench/directory")?;
    Ok(figure)
}
