//! Measures how changes and failures of one task reach many other tasks.

use std::time::Duration;

use anyhow::{Context as _, Result, bail, ensure};
use bytes::Bytes;

use super::{Target, WorkFilter, count, registered};
use crate::client::Call;
use crate::cluster::{Cluster, Shape};
use crate::meter::{CpuMeter, Figure};
use crate::wire::{self, Method, Value};

/// The time after which waiting calls have reached their places, once a later call was answered.
const SETTLE: Duration = Duration::from_millis(50);

/// Waits until the server has processed all earlier calls on the first tasks' connections.
fn wait_until_quiet(cluster: &Cluster, tasks: u32) -> Result<()> {
    let heartbeat = |number: u64| {
        let speaker = cluster.speaker(number as u32);
        Ok((speaker.task, Method::Heartbeat, speaker.heartbeat()))
    };
    cluster.flood(64, tasks.into(), heartbeat, |_, _| Ok(()))?;
    std::thread::sleep(SETTLE);
    Ok(())
}

/// Measures a task that leaves and returns repeatedly, while all others watch it.
pub fn watch(target: Target, watchers: u32, wanted: &WorkFilter, figures: &mut Vec<Figure>) -> Result<()> {
    let cluster = registered(target, watchers + 1)?;
    let mut watched = FanOut::new(&cluster, watchers);
    let rounds = wanted.times(10) as u32;
    let mut measured = CpuMeter::stopped(target.pid);
    for life in 1..=rounds {
        for present in [false, true] {
            let waiting = watched.all_watch()?;
            wait_until_quiet(&cluster, watchers)?;
            measured.begin_counted()?;
            let change = watched.change(life, present)?;
            let tables = cluster.answers(waiting)?;
            measured.lap();
            measured.stop()?;
            cluster.answer(change).context("the change itself")?;
            watched.check(&tables)?;
        }
    }
    let work = format!("a change reaching {} watchers", count(watchers));
    let told = 2 * u64::from(rounds) * u64::from(watchers);
    figures.push(measured.finish(format!("watch.{watchers}"), work, "watcher", told)?);
    Ok(())
}

/// The last task, and its watchers.
pub(super) struct FanOut<'a> {
    cluster: &'a Cluster,
    watchers: u32,
    version: i64,
}

impl<'a> FanOut<'a> {
    pub(super) fn new(cluster: &'a Cluster, watchers: u32) -> Self {
        Self { cluster, watchers, version: -1 }
    }

    /// Lets all tasks watch for the next change.
    pub(super) fn all_watch(&mut self) -> Result<Vec<Call>> {
        let now = self.cluster.ask(0, Method::WatchTasks, self.cluster.speaker(0).watch(-1))?;
        self.version = self.table(&now)?;
        let mut calls = Vec::new();
        for task in 0..self.watchers {
            let request = self.cluster.speaker(task).watch(self.version);
            calls.push(self.cluster.call(task, Method::WatchTasks, request)?);
        }
        Ok(calls)
    }

    /// Lets the last task leave, or return with another incarnation.
    pub(super) fn change(&self, life: u32, present: bool) -> Result<Call> {
        let task = self.cluster.tasks() - 1;
        if present {
            let request = self.cluster.reborn(task, life).register();
            return self.cluster.call(task, Method::RegisterTask, request);
        }
        let request = self.cluster.reborn(task, life - 1).only_who();
        self.cluster.call(task, Method::ShutdownTask, request)
    }

    pub(super) fn check(&self, tables: &[Bytes]) -> Result<()> {
        for (index, table) in tables.iter().enumerate() {
            // Most answers are identical bytes.
            if index > 0 && table == &tables[0] {
                continue;
            }
            let version = self.table(table)?;
            ensure!(version > self.version, "version {version} after {}", self.version);
        }
        Ok(())
    }

    /// Returns the version of a table that must contain every task.
    fn table(&self, answer: &[u8]) -> Result<i64> {
        let (mut tasks, mut version) = (0, 0);
        for field in wire::fields(answer) {
            match field? {
                (1, Value::Bytes(_)) => tasks += 1,
                (2, Value::Varint(found)) => version = found.cast_signed(),
                other => bail!("a table of tasks with {other:?}"),
            }
        }
        ensure!(tasks == self.cluster.tasks(), "a table of {tasks} tasks");
        Ok(version)
    }
}

const CANCELLED: u32 = 1;

/// Waits until every poll has returned the failure.
fn all_polls_fail(cluster: &Cluster, polls: Vec<Call>) -> Result<()> {
    for poll in polls {
        let reply = cluster.reply(poll)?;
        let failed = reply.status != 0 && reply.status != CANCELLED;
        ensure!(failed, "a poll ended with status {}: {}", reply.status, reply.error);
    }
    Ok(())
}

/// Returns a fate-sharing job in which every task polls.
fn polling(target: Target, tasks: u32) -> Result<(Cluster, Vec<Call>)> {
    let cluster = registered(target, tasks)?;
    let polls = cluster.call_all(Method::PollForError, |speaker| Ok(speaker.only_who()))?;
    wait_until_quiet(&cluster, tasks)?;
    Ok((cluster, polls))
}

/// Measures a task that restarts in a fate-sharing job: from its registration until the last of all tasks has
/// the error.
pub fn restart(target: Target, tasks: u32, figures: &mut Vec<Figure>) -> Result<()> {
    let (cluster, mut polls) = polling(target, tasks)?;
    // The process that failed receives nothing.
    let own = polls.pop();
    let last = cluster.reborn(tasks - 1, 1);
    let process = Cluster::connect(target.address, 1, Shape::OneEach)?;
    let mut measured = CpuMeter::start(target.pid)?;
    let registering = process.call(0, Method::RegisterTask, last.register())?;
    process.flush()?;
    all_polls_fail(&cluster, polls)?;
    measured.lap();
    let _ = (registering, own);
    let work = format!("news of a restart reaching {} tasks", count(tasks));
    figures.push(measured.finish(format!("failure.restart.{tasks}"), work, "task", tasks.into())?);
    Ok(())
}

/// Measures a broken connection: from there until the last of the other tasks has the error.
pub fn broken(target: Target, tasks: u32, figures: &mut Vec<Figure>) -> Result<()> {
    let (cluster, mut polls) = polling(target, tasks)?;
    let own = polls.pop();
    let mut measured = CpuMeter::start(target.pid)?;
    cluster.kill(tasks - 1)?;
    all_polls_fail(&cluster, polls)?;
    measured.lap();
    let _ = own;
    let work = format!("news of a broken connection reaching {} tasks", count(tasks));
    figures.push(measured.finish(format!("failure.broken.{tasks}"), work, "task", tasks.into())?);
    Ok(())
}
