//! Measures a healthy job: joining, heartbeats, barriers, the live set.

use anyhow::{Context as _, Result, bail, ensure};
use bytes::Bytes;

use super::{Target, Work, WorkFilter, WorkloadName, ensure_all};
use crate::cluster::{Cluster, service_incarnation};
use crate::meter::{CpuMeter, Figure};
use crate::wire::{self, Method, SharedEnd, Value, Writer};

/// The number of heartbeats in progress at the greatest load.
const WINDOW: u64 = 256;

/// Connects and registers a job, and measures both.
pub fn begin(
    target: Target,
    name: WorkloadName,
    wanted: &WorkFilter,
    figures: &mut Vec<Figure>,
) -> Result<Cluster> {
    let mut connecting = CpuMeter::start(target.pid)?;
    let mut cluster = Cluster::connect(target.address, name.tasks, name.shape)?;
    connecting.lap();
    let connections = name.shape.connections(name.tasks);
    let connected =
        connecting.finish(name.id("connect"), name.work("connecting"), "connection", connections.into())?;
    let mut registering = CpuMeter::start(target.pid)?;
    cluster.register().context("registering")?;
    registering.lap();
    let registered =
        registering.finish(name.id("registration"), name.work("registration"), "task", name.tasks.into())?;
    if wanted.has(Work::Connect) {
        figures.push(connected);
    }
    if wanted.has(Work::Registration) {
        figures.push(registered);
    }
    Ok(cluster)
}

pub fn run(
    target: Target,
    cluster: &Cluster,
    name: WorkloadName,
    wanted: &WorkFilter,
    figures: &mut Vec<Figure>,
) -> Result<()> {
    if wanted.has(Work::Heartbeat) {
        heartbeats(target, cluster, name, wanted, figures).context("heartbeats")?;
    }
    if wanted.has(Work::Barrier) {
        figures.push(barriers(target, cluster, name, wanted).context("barriers")?);
    }
    if wanted.has(Work::LiveSet) {
        figures.push(live_sets(target, cluster, name, wanted).context("live sets")?);
    }
    Ok(())
}

fn heartbeats(
    target: Target,
    cluster: &Cluster,
    name: WorkloadName,
    wanted: &WorkFilter,
    figures: &mut Vec<Figure>,
) -> Result<()> {
    let heartbeat = |number: u64| {
        let speaker = cluster.speaker((number % u64::from(name.tasks)) as u32);
        Ok((speaker.task, Method::Heartbeat, speaker.heartbeat()))
    };
    let service = cluster.speaker(0).service;
    let check = |_: u64, answer: &Bytes| {
        ensure!(service_incarnation(answer)? == service, "a heartbeat was answered by another service");
        Ok(())
    };
    // Work that every connection does once is not counted here.
    cluster.flood(WINDOW, name.tasks.into(), heartbeat, check)?;

    let many = wanted.times(20_000);
    let mut flat_out = CpuMeter::start(target.pid)?;
    cluster.flood(WINDOW, many, heartbeat, check)?;
    flat_out.lap_for_each_of(many);
    let work = name.work("heartbeats flat out");
    figures.push(flat_out.finish(name.id("heartbeat.flat"), work, "heartbeat", many)?);

    let few = wanted.times(2_000);
    let mut single = CpuMeter::start(target.pid)?;
    for number in 0..few {
        let (task, method, body) = heartbeat(number)?;
        single.begin();
        let answer = cluster.ask(task, method, body)?;
        single.lap();
        check(number, &answer)?;
    }
    let work = name.work("heartbeats one at a time");
    figures.push(single.finish(name.id("heartbeat.single"), work, "heartbeat", few)?);
    Ok(())
}

/// Measures rounds of one barrier of all tasks, after a first one that does not count.
fn barriers(target: Target, cluster: &Cluster, name: WorkloadName, wanted: &WorkFilter) -> Result<Figure> {
    let rounds = wanted.times((40_000 / u64::from(name.tasks)).clamp(5, 50));
    round(cluster, 0)?;
    let mut measured = CpuMeter::start(target.pid)?;
    for counter in 1..=rounds {
        measured.begin();
        let answers = round(cluster, counter)?;
        measured.lap();
        for answer in answers {
            let expected = Writer::default().varint(1, counter).finish();
            ensure!(*answer == expected, "round {counter} was answered {answer:?}");
        }
    }
    let arrivals = rounds * u64::from(name.tasks);
    measured.finish(name.id("barrier"), name.work("barrier round"), "arrival", arrivals)
}

/// Runs one instance of the barrier, whose counter every task knows.
pub(super) fn round(cluster: &Cluster, counter: u64) -> Result<Vec<Bytes>> {
    let arrival = |speaker: &wire::Speaker| Ok(speaker.barrier("step", 600_000, counter));
    cluster.answers(cluster.call_all(Method::Barrier, arrival)?)
}

fn live_sets(target: Target, cluster: &Cluster, name: WorkloadName, wanted: &WorkFilter) -> Result<Figure> {
    let rounds = wanted.times((8_192 / u64::from(name.tasks)).clamp(2, 10));
    let requests = live_set_requests(cluster)?;
    let mut measured = CpuMeter::start(target.pid)?;
    for _ in 0..rounds {
        measured.begin();
        let found = live_set(cluster, &requests)?;
        measured.lap();
        check_live_sets(cluster, &found)?;
    }
    let calls = rounds * u64::from(name.tasks);
    measured.finish(name.id("live-set"), name.work("live-set call by all"), "call", calls)
}

/// Returns every task's request for the live set of all. The requests are long, and encoded before the
/// measurement.
pub(super) fn live_set_requests(cluster: &Cluster) -> Result<Vec<Bytes>> {
    let tasks = wire::pack((0..cluster.tasks()).map(u64::from));
    let end = SharedEnd::new(Writer::default().bytes(3, &tasks).finish())?;
    Ok((0..cluster.tasks()).map(|task| cluster.speaker(task).live_set(&end)).collect())
}

pub(super) fn live_set(cluster: &Cluster, requests: &[Bytes]) -> Result<Vec<Bytes>> {
    let request = |speaker: &wire::Speaker| Ok(requests[speaker.task as usize].clone());
    cluster.answers(cluster.call_all(Method::GetAliveTasks, request)?)
}

pub(super) fn check_live_sets(cluster: &Cluster, found: &[Bytes]) -> Result<()> {
    let first = &found[0];
    ensure_all(cluster, live_tasks(first)?)?;
    for other in found {
        // Most answers are identical bytes; the order is free.
        if other != first {
            ensure_all(cluster, live_tasks(other)?)?;
        }
    }
    Ok(())
}

fn live_tasks(answer: &[u8]) -> Result<Vec<(u32, u64)>> {
    let mut tasks = Vec::new();
    let mut incarnations = Vec::new();
    for field in wire::fields(answer) {
        match field? {
            (1, Value::Bytes(packed)) => tasks.extend(wire::packed(packed)?),
            (2, Value::Bytes(packed)) => {
                for eight in packed.chunks_exact(8) {
                    incarnations.push(u64::from_le_bytes(eight.try_into()?));
                }
            }
            other => bail!("a live set with {other:?}"),
        }
    }
    ensure!(tasks.len() == incarnations.len(), "{} tasks, {} incarnations", tasks.len(), incarnations.len());
    Ok(tasks.into_iter().map(|task| task as u32).zip(incarnations).collect())
}
