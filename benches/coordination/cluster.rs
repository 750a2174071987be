//! A simulated job: its tasks, the connections they speak on, and what they are sure of.

use std::collections::VecDeque;
use std::fmt;
use std::net::SocketAddr;
use std::time::Duration;

use anyhow::{Context as _, Result, bail, ensure};
use bytes::Bytes;

use crate::client::{Call, Connection, Dialect};
use crate::wire::{self, Method, Speaker, Value};

/// How long any step may take before the server counts as hung.
pub const PATIENCE: Duration = Duration::from_secs(120);

/// After so many calls are on their way, the connections get a turn to send them.
const BURST: usize = 64;

/// How many connections are being opened at once.
const OPENING: usize = 64;

/// On how many connections the tasks speak.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Shape {
    /// Each on its own, as JAX runs.
    OneEach,
    /// All on this many.
    Shared(u32),
}

impl Shape {
    pub fn connections(self, tasks: u32) -> u32 {
        match self {
            Self::OneEach => tasks,
            Self::Shared(connections) => connections.min(tasks),
        }
    }
}

impl fmt::Display for Shape {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::OneEach => write!(out, "one connection each"),
            Self::Shared(connections) => write!(out, "{connections} connections"),
        }
    }
}

/// The tasks of a job and their connections.
pub struct Cluster {
    dialect: Dialect,
    connections: Vec<Connection>,
    speakers: Vec<Speaker>,
}

impl Cluster {
    /// Opens the connections. The tasks still have to register.
    pub async fn connect(address: SocketAddr, tasks: u32, shape: Shape) -> Result<Self> {
        let count = shape.connections(tasks);
        let mut connections = Vec::with_capacity(count as usize);
        let mut opening = VecDeque::new();
        for _ in 0..count {
            if opening.len() == OPENING {
                connections.push(opened(opening.pop_front()).await?);
            }
            opening.push_back(tokio::spawn(Connection::open(address)));
        }
        while !opening.is_empty() {
            connections.push(opened(opening.pop_front()).await?);
        }
        let speakers =
            (0..tasks).map(|task| Speaker { task, incarnation: incarnation(task, 0), service: 0 }).collect();
        Ok(Self { dialect: Dialect::new(address)?, connections, speakers })
    }

    pub fn tasks(&self) -> u32 {
        self.speakers.len() as u32
    }

    pub fn speaker(&self, task: u32) -> Speaker {
        self.speakers[task as usize]
    }

    /// A task's next life: another process with the same number.
    pub fn reborn(&self, task: u32, life: u32) -> Speaker {
        Speaker { incarnation: incarnation(task, life), ..self.speaker(task) }
    }

    pub fn call(&self, task: u32, method: Method, body: Bytes) -> Result<Call> {
        self.connections[task as usize % self.connections.len()].call(&self.dialect, method, body)
    }

    /// Puts one call a task on its way, for all tasks.
    pub async fn call_all(
        &self,
        method: Method,
        mut body: impl FnMut(&Speaker) -> Result<Bytes>,
    ) -> Result<Vec<Call>> {
        let mut calls = Vec::with_capacity(self.speakers.len());
        for (index, speaker) in self.speakers.iter().enumerate() {
            calls.push(self.call(speaker.task, method, body(speaker)?)?);
            if index % BURST == BURST - 1 {
                tokio::task::yield_now().await;
            }
        }
        Ok(calls)
    }

    /// Makes many calls, `window` of them under way at a time. `call` says of each who makes it, `check` sees its answer.
    pub async fn flood(
        &self,
        window: u64,
        calls: u64,
        mut call: impl FnMut(u64) -> Result<(u32, Method, Bytes)>,
        mut check: impl FnMut(u64, &Bytes) -> Result<()>,
    ) -> Result<()> {
        let mut under_way = VecDeque::new();
        let mut answered = 0;
        for number in 0..calls {
            let (task, method, body) = call(number)?;
            under_way.push_back(self.call(task, method, body)?);
            if under_way.len() as u64 == window {
                check(answered, &next_answer(&mut under_way).await?)?;
                answered += 1;
            }
        }
        while !under_way.is_empty() {
            check(answered, &next_answer(&mut under_way).await?)?;
            answered += 1;
        }
        Ok(())
    }

    /// Registers all tasks, which none of them leaves before the last has come.
    pub async fn register(&mut self) -> Result<()> {
        let calls = self.call_all(Method::RegisterTask, |speaker| Ok(speaker.register())).await?;
        let mut services = Vec::with_capacity(calls.len());
        for answer in answers(calls).await? {
            services.push(service_incarnation(&answer)?);
        }
        let service = services[0];
        ensure!(services.iter().all(|&other| other == service), "tasks registered with different services");
        for speaker in &mut self.speakers {
            speaker.service = service;
        }
        Ok(())
    }

    /// Kills a task: its connection breaks. Only where each task has its own.
    pub fn kill(&mut self, task: u32) -> Result<()> {
        ensure!(self.connections.len() == self.speakers.len(), "tasks share connections");
        ensure!(task + 1 == self.tasks(), "only the last task's place is not needed for the others'");
        self.connections.pop().context("no connection")?.cut();
        Ok(())
    }
}

async fn next_answer(under_way: &mut VecDeque<Call>) -> Result<Bytes> {
    under_way.pop_front().context("nothing is under way")?.ok().await
}

async fn opened(opening: Option<tokio::task::JoinHandle<Result<Connection>>>) -> Result<Connection> {
    let opening = opening.context("nothing is being opened")?;
    in_time(async { opening.await? }).await
}

/// The service's incarnation, as registrations and heartbeats bring it.
pub fn service_incarnation(answer: &[u8]) -> Result<u64> {
    match wire::fields(answer).next().transpose()? {
        Some((1, Value::Fixed64(incarnation))) if incarnation != 0 => Ok(incarnation),
        other => bail!("no service incarnation but {other:?}"),
    }
}

/// The messages of calls that must all succeed, waited for in the order in which they were made: one task
/// wakes once for many answers.
pub async fn answers(calls: impl IntoIterator<Item = Call>) -> Result<Vec<Bytes>> {
    in_time(async {
        let mut messages = Vec::new();
        for call in calls {
            messages.push(call.ok().await?);
        }
        Ok(messages)
    })
    .await
}

/// Fails when the server takes longer than can be.
pub async fn in_time<T>(step: impl Future<Output = Result<T>>) -> Result<T> {
    tokio::time::timeout(PATIENCE, step)
        .await
        .unwrap_or_else(|_| bail!("the server has not answered within {PATIENCE:?}"))
}

/// A number that looks random, the same in every run.
fn incarnation(task: u32, life: u32) -> u64 {
    let mut mixed = (u64::from(life) << 32 | u64::from(task)).wrapping_add(0x9e37_79b9_7f4a_7c15);
    mixed = (mixed ^ mixed >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    mixed = (mixed ^ mixed >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
    mixed ^ mixed >> 31
}
