//! The work that is measured. A *session* is the life of one server process, which performs several pieces of work,
//! one after the other.

mod fan_out;
mod keys;
mod memory;
mod steady;

use std::fmt;
use std::net::SocketAddr;

use anyhow::{Result, ensure};
use clap::ValueEnum;

use crate::cluster::{Cluster, Shape};
use crate::meter::Figure;
use crate::servers::{Job, Kind};

/// A piece of work, as the command line names it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Work {
    /// Opening the tasks' connections.
    Connect,
    Registration,
    Heartbeat,
    Barrier,
    LiveSet,
    /// Key inserts, reads, waits and directories.
    Keys,
    /// A change of one task that reaches its watchers.
    Watch,
    /// The failure of one task that reaches all others.
    Failure,
    /// The most memory that the server holds, with every task connected.
    Memory,
}

/// The selected work, and its amount.
#[derive(Debug)]
pub struct WorkFilter {
    pub works: Vec<Work>,
    pub quick: bool,
}

impl WorkFilter {
    fn has(&self, work: Work) -> bool {
        self.works.contains(&work)
    }

    /// Returns the number of repetitions.
    fn times(&self, usually: u64) -> u64 {
        if self.quick { (usually / 5).max(2) } else { usually }
    }
}

/// One life of a server, and its work.
#[derive(Debug, Clone, Copy)]
pub enum Session {
    /// All work of a healthy job.
    Steady {
        tasks: u32,
        shape: Shape,
        keys: bool,
    },
    Watch {
        watchers: u32,
    },
    /// A task of a fate-sharing job restarts as another process.
    Restart {
        tasks: u32,
    },
    /// A task's connection breaks.
    Broken {
        tasks: u32,
    },
    Memory {
        tasks: u32,
    },
}

/// The server of a session.
#[derive(Debug, Clone, Copy)]
pub struct Target {
    pub address: SocketAddr,
    pub pid: u32,
}

impl Session {
    /// Returns the sessions of the selected work. Keys are measured at the size nearest to a thousand tasks.
    pub fn plan(wanted: &WorkFilter, tasks: &[u32], shared: u32, memory_tasks: u32) -> Vec<Self> {
        let mut plan = Vec::new();
        let middle = tasks.iter().copied().min_by_key(|tasks| tasks.abs_diff(1024)).unwrap_or(1024);
        let largest = tasks.iter().copied().max().unwrap_or(middle);
        let steady = [Work::Connect, Work::Registration, Work::Heartbeat, Work::Barrier, Work::LiveSet];
        for &tasks in tasks {
            let keys = tasks == middle && wanted.has(Work::Keys);
            if keys || steady.iter().any(|&work| wanted.has(work)) {
                plan.push(Self::Steady { tasks, shape: Shape::OneEach, keys });
            }
            if tasks > shared && steady.iter().any(|&work| wanted.has(work)) {
                plan.push(Self::Steady { tasks, shape: Shape::Shared(shared), keys: false });
            }
        }
        if wanted.has(Work::Watch) {
            plan.push(Self::Watch { watchers: middle });
        }
        if wanted.has(Work::Failure) {
            plan.extend([Self::Restart { tasks: largest }, Self::Broken { tasks: largest }]);
        }
        if wanted.has(Work::Memory) {
            plan.push(Self::Memory { tasks: memory_tasks });
        }
        plan
    }

    /// Returns the job for which the server is started.
    pub fn job(self) -> Job {
        match self {
            Self::Steady { tasks, .. } | Self::Restart { tasks } | Self::Broken { tasks } => {
                Job { tasks, recoverable: false }
            }
            // The additional task is the one whose state changes.
            Self::Watch { watchers } => Job { tasks: watchers + 1, recoverable: true },
            Self::Memory { tasks } => Job { tasks, recoverable: true },
        }
    }

    /// Returns why this server cannot be measured in the session, if it cannot.
    pub fn not_for(self, kind: Kind) -> Option<&'static str> {
        match (self, kind) {
            (Self::Broken { .. }, Kind::Cxx) => Some(
                "does not look at connections: it would notice by missing heartbeats, after 100 s in JAX",
            ),
            (Self::Broken { .. }, Kind::Baseline) => Some("does not look at connections"),
            _ => None,
        }
    }

    /// Returns the number of repetitions. Memory varies little between lives, and takes long to fill.
    pub fn repeat(self, wanted: u32) -> u32 {
        if matches!(self, Self::Memory { .. }) { wanted.min(1) } else { wanted }
    }

    pub fn run(self, target: Target, wanted: &WorkFilter) -> Result<Vec<Figure>> {
        let mut figures = Vec::new();
        match self {
            Self::Steady { tasks, shape, keys } => {
                let name = WorkloadName { tasks, shape };
                let cluster = steady::begin(target, name, wanted, &mut figures)?;
                steady::run(target, &cluster, name, wanted, &mut figures)?;
                if keys {
                    keys::run(target, &cluster, wanted, &mut figures)?;
                }
            }
            Self::Watch { watchers } => fan_out::watch(target, watchers, wanted, &mut figures)?,
            Self::Restart { tasks } => fan_out::restart(target, tasks, &mut figures)?,
            Self::Broken { tasks } => fan_out::broken(target, tasks, &mut figures)?,
            Self::Memory { tasks } => memory::run(target, tasks, &mut figures)?,
        }
        Ok(figures)
    }
}

impl fmt::Display for Session {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Steady { tasks, shape, .. } => write!(out, "{} tasks, {shape}", count(*tasks)),
            Self::Watch { watchers } => write!(out, "{} watchers", count(*watchers)),
            Self::Restart { tasks } => write!(out, "a restart among {} tasks", count(*tasks)),
            Self::Broken { tasks } => write!(out, "a broken connection among {} tasks", count(*tasks)),
            Self::Memory { tasks } => write!(out, "memory, {} tasks", count(*tasks)),
        }
    }
}

/// The name by which the figures of one session are distinguished from those of others.
#[derive(Debug, Clone, Copy)]
struct WorkloadName {
    tasks: u32,
    shape: Shape,
}

impl WorkloadName {
    fn id(self, work: &str) -> String {
        match self.shape {
            Shape::OneEach => format!("{work}.{}", self.tasks),
            Shape::Shared(connections) => format!("{work}.{}.on{connections}", self.tasks),
        }
    }

    fn work(self, work: &str) -> String {
        format!("{work}, {} tasks, {}", count(self.tasks), self.shape)
    }
}

/// Formats a number for people.
pub fn count(number: u32) -> String {
    let digits = number.to_string();
    let mut out = String::new();
    for (index, digit) in digits.chars().enumerate() {
        if index > 0 && (digits.len() - index).is_multiple_of(3) {
            out.push(',');
        }
        out.push(digit);
    }
    out
}

/// Connects and registers the tasks, without measuring that.
fn registered(target: Target, tasks: u32) -> Result<Cluster> {
    let mut cluster = Cluster::connect(target.address, tasks, Shape::OneEach)?;
    cluster.register()?;
    Ok(cluster)
}

/// Checks that the tasks of an answer are those of the job, each with its present incarnation.
fn ensure_all(cluster: &Cluster, mut found: Vec<(u32, u64)>) -> Result<()> {
    found.sort_unstable();
    ensure!(found.len() == cluster.tasks() as usize, "{} tasks of {}", found.len(), cluster.tasks());
    for (task, (found, incarnation)) in (0..).zip(found) {
        let expected = cluster.speaker(task).incarnation;
        ensure!(found == task && incarnation == expected, "task {found} as {incarnation}, not {expected}");
    }
    Ok(())
}
