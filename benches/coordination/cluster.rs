//! A simulated job: its tasks, their connections and their incarnations.

use std::cell::RefCell;
use std::collections::VecDeque;
use std::fmt;
use std::net::SocketAddr;

use anyhow::{Context as _, Result, bail, ensure};
use bytes::Bytes;

use crate::client::{Call, Client, Reply};
use crate::wire::{self, Method, Speaker, Value};

/// The number of connections of the tasks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Shape {
    /// One for each task, as with JAX.
    OneEach,
    /// This number, shared by all tasks.
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
    client: RefCell<Client>,
    speakers: Vec<Speaker>,
}

impl Cluster {
    /// Opens the connections. The tasks are not registered yet.
    pub fn connect(address: SocketAddr, tasks: u32, shape: Shape) -> Result<Self> {
        let client = Client::connect(address, shape.connections(tasks) as usize)?;
        let speakers =
            (0..tasks).map(|task| Speaker { task, incarnation: incarnation(task, 0), service: 0 }).collect();
        Ok(Self { client: RefCell::new(client), speakers })
    }

    pub fn tasks(&self) -> u32 {
        self.speakers.len() as u32
    }

    pub fn speaker(&self, task: u32) -> Speaker {
        self.speakers[task as usize]
    }

    /// Returns a later incarnation of a task: another process with the same number.
    pub fn reborn(&self, task: u32, life: u32) -> Speaker {
        Speaker { incarnation: incarnation(task, life), ..self.speaker(task) }
    }

    /// Starts a call of a task.
    pub fn call(&self, task: u32, method: Method, body: Bytes) -> Result<Call> {
        let mut client = self.client.borrow_mut();
        let connection = task as usize % client.connections();
        client.call(connection, method, body)
    }

    /// Starts one call of every task.
    pub fn call_all(
        &self,
        method: Method,
        mut body: impl FnMut(&Speaker) -> Result<Bytes>,
    ) -> Result<Vec<Call>> {
        self.speakers.iter().map(|speaker| self.call(speaker.task, method, body(speaker)?)).collect()
    }

    /// Sends the started calls without waiting for an answer.
    pub fn flush(&self) -> Result<()> {
        self.client.borrow_mut().flush()
    }

    /// Waits for the answer to a call.
    pub fn reply(&self, call: Call) -> Result<Reply> {
        self.client.borrow_mut().reply(call)
    }

    /// Waits for the answer to a call that must succeed.
    pub fn answer(&self, call: Call) -> Result<Bytes> {
        self.reply(call)?.ok()
    }

    /// Waits for the answers to calls that must all succeed.
    pub fn answers(&self, calls: impl IntoIterator<Item = Call>) -> Result<Vec<Bytes>> {
        calls.into_iter().map(|call| self.answer(call)).collect()
    }

    /// Makes a call and waits for its answer.
    pub fn ask(&self, task: u32, method: Method, body: Bytes) -> Result<Bytes> {
        self.answer(self.call(task, method, body)?)
    }

    /// Makes many calls, `window` of them in progress at a time. `call` makes each, `check` checks its
    /// answer.
    pub fn flood(
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
                check(answered, &self.next_answer(&mut under_way)?)?;
                answered += 1;
            }
        }
        while !under_way.is_empty() {
            check(answered, &self.next_answer(&mut under_way)?)?;
            answered += 1;
        }
        Ok(())
    }

    fn next_answer(&self, under_way: &mut VecDeque<Call>) -> Result<Bytes> {
        self.answer(under_way.pop_front().context("nothing is under way")?)
    }

    /// Registers all tasks; no call is answered before the last task has registered.
    pub fn register(&mut self) -> Result<()> {
        let calls = self.call_all(Method::RegisterTask, |speaker| Ok(speaker.register()))?;
        let answers = self.answers(calls)?;
        let services =
            answers.iter().map(|answer| service_incarnation(answer)).collect::<Result<Vec<_>>>()?;
        let service = services[0];
        ensure!(services.iter().all(|&other| other == service), "tasks registered with different services");
        for speaker in &mut self.speakers {
            speaker.service = service;
        }
        Ok(())
    }

    /// Kills a task: its connection breaks. Only for [`Shape::OneEach`].
    pub fn kill(&self, task: u32) -> Result<()> {
        let mut client = self.client.borrow_mut();
        ensure!(client.connections() == self.speakers.len(), "tasks share connections");
        client.cut(task as usize)
    }
}

/// Returns the service incarnation in the answer to a registration or a heartbeat.
pub fn service_incarnation(answer: &[u8]) -> Result<u64> {
    match wire::fields(answer).next().transpose()? {
        Some((1, Value::Fixed64(incarnation))) if incarnation != 0 => Ok(incarnation),
        other => bail!("no service incarnation but {other:?}"),
    }
}

/// Returns a pseudo-random number, the same in every run.
fn incarnation(task: u32, life: u32) -> u64 {
    let mut mixed = (u64::from(life) << 32 | u64::from(task)).wrapping_add(0x9e37_79b9_7f4a_7c15);
    mixed = (mixed ^ mixed >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    mixed = (mixed ^ mixed >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
    mixed ^ mixed >> 31
}
