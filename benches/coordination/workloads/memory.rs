//! Measures the memory of a server while a large job makes the calls that JAX tasks make.

use anyhow::{Context as _, Result, ensure};
use bytes::Bytes;

use super::{Target, count, fan_out::FanOut, registered, steady};
use crate::cluster::Cluster;
use crate::meter::Figure;
use crate::process;
use crate::wire::Method;

/// The size of a task's own topology.
const LOCAL_TOPOLOGY: usize = 1 << 10;
/// The size of the global topology.
const GLOBAL_TOPOLOGY: usize = 64 << 10;

/// The number of watchers; not every program watches.
const WATCHERS: u32 = 1024;

pub fn run(target: Target, tasks: u32, figures: &mut Vec<Figure>) -> Result<()> {
    let mut peak = |step: &str, work: &str| -> Result<()> {
        let (most, _) = process::memory(target.pid)?;
        let work = format!("peak memory, {} tasks: {work}", count(tasks));
        figures.push(Figure::memory(format!("memory.{tasks}.{step}"), work, most));
        Ok(())
    };
    peak("start", "at the start")?;
    let cluster = registered(target, tasks)?;
    peak("registered", "registered")?;

    // Every JAX process keeps an error poll open all its life.
    let polls = cluster.call_all(Method::PollForError, |speaker| Ok(speaker.only_who()))?;
    let notice = |speaker: &crate::wire::Speaker| Ok(speaker.key("RECEIVED_PREEMPTION_NOTICE"));
    let notices = cluster.call_all(Method::GetKeyValue, notice)?;
    heartbeats(&cluster)?;
    peak("held", "two calls held by each")?;

    for counter in 0..3 {
        steady::round(&cluster, counter).context("a barrier")?;
    }
    peak("barriers", "after barriers")?;
    topology(&cluster).context("the topology")?;
    peak("topology", "after the exchange of topologies")?;
    heartbeats(&cluster)?;

    let requests = steady::live_set_requests(&cluster)?;
    let found = steady::live_set(&cluster, &requests).context("the live set")?;
    steady::check_live_sets(&cluster, &found)?;
    drop(found);
    peak("live-set", "after a live-set call by all")?;

    let mut watched = FanOut::new(&cluster, WATCHERS.min(tasks - 1));
    let waiting = watched.all_watch()?;
    heartbeats(&cluster)?;
    let change = watched.change(1, false)?;
    watched.check(&cluster.answers(waiting)?)?;
    cluster.answer(change)?;
    peak("all", "after a change reaching 1,024 watchers, which is all")?;
    drop((polls, notices));
    Ok(())
}

fn heartbeats(cluster: &Cluster) -> Result<()> {
    let calls = cluster.call_all(Method::Heartbeat, |speaker| Ok(speaker.heartbeat()))?;
    cluster.answers(calls).context("heartbeats").map(drop)
}

/// Each task inserts its local topology, the first task reads all of them, and then all read the global one.
fn topology(cluster: &Cluster) -> Result<()> {
    let local = vec![0x5a; LOCAL_TOPOLOGY];
    let key = |task: u32| format!("cpu:local_topology/cpu/{task}");
    let insert = |speaker: &crate::wire::Speaker| Ok(speaker.insert(&key(speaker.task), &local));
    cluster.answers(cluster.call_all(Method::InsertKeyValue, insert)?)?;
    let first = cluster.speaker(0);
    let read = |number: u64| Ok((0, Method::GetKeyValue, first.key(&key(number as u32))));
    let check = |_: u64, answer: &Bytes| {
        ensure!(answer.len() > LOCAL_TOPOLOGY, "a topology of {} bytes", answer.len());
        Ok(())
    };
    cluster.flood(64, cluster.tasks().into(), read, check)?;

    let global = "cpu:global_topology/cpu";
    let waiting = cluster.call_all(Method::GetKeyValue, |speaker| Ok(speaker.key(global)))?;
    let inserted =
        cluster.call(0, Method::InsertKeyValue, first.insert(global, &vec![0xa5; GLOBAL_TOPOLOGY]))?;
    cluster.answer(inserted)?;
    for answer in cluster.answers(waiting)? {
        ensure!(answer.len() > GLOBAL_TOPOLOGY, "a topology of {} bytes", answer.len());
    }
    Ok(())
}
