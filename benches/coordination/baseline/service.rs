//! The calls of the baseline.

use std::collections::{BTreeMap, HashMap};
use std::io::Read as _;
use std::sync::{Mutex, PoisonError};

use anyhow::{Context as _, Result, bail};
use bytes::{BufMut as _, Bytes, BytesMut};
use flate2::read::GzDecoder;
use h2::server::SendResponse;
use http::{HeaderMap, HeaderValue, Response, header};

use crate::wire::{self, Value, Writer, pack};

type Respond = SendResponse<Bytes>;

const ABORTED: &str = "10";
const NOT_FOUND: &str = "5";
const CONNECTED: u64 = 3;
const DISCONNECTED: u64 = 2;

pub struct Service {
    tasks: usize,
    recoverable: bool,
    incarnation: u64,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    /// The incarnation of every task, 0 until it has registered.
    registered: Vec<u64>,
    connected: Vec<bool>,
    registering: Vec<Respond>,
    barrier: Vec<Respond>,
    /// The number of passed instances of the barrier; the benchmark uses one id at a time.
    rounds: HashMap<Bytes, u64>,
    live_set: Vec<Respond>,
    version: u64,
    watchers: Vec<Respond>,
    polls: Vec<Respond>,
    store: BTreeMap<Bytes, Bytes>,
    getters: HashMap<Bytes, Vec<Respond>>,
}

impl Service {
    pub fn new(tasks: u32, recoverable: bool) -> Self {
        let tasks = tasks as usize;
        let state = State { registered: vec![0; tasks], connected: vec![false; tasks], ..State::default() };
        Self { tasks, recoverable, incarnation: 0x666c_6f6f_7200_0001, state: Mutex::new(state) }
    }

    /// Answers a request, or keeps its caller until there is an answer.
    pub fn answer(&self, method: &str, body: Bytes, respond: Respond) -> Result<()> {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        match method {
            "Heartbeat" => answer(respond, self.own_incarnation()),
            "RegisterTask" => self.register(&mut state, &unframe(body)?, respond),
            "Barrier" => self.arrive(&mut state, &unframe(body)?, respond),
            "GetAliveTasks" => {
                state.live_set.push(respond);
                if state.live_set.len() == self.tasks {
                    let all = live_set(&state);
                    answer_all(&mut state.live_set, &all);
                }
                Ok(())
            }
            "WatchTasks" => {
                let Value::Varint(version) = field(&unframe(body)?, 2)?.unwrap_or(Value::Varint(0)) else {
                    bail!("a version that is no number")
                };
                if version == state.version {
                    state.watchers.push(respond);
                    return Ok(());
                }
                answer(respond, table(&state))
            }
            "PollForError" => {
                state.polls.push(respond);
                Ok(())
            }
            "ShutdownTask" => {
                let task = task_number(&unframe(body)?, 2)?;
                state.connected[task] = false;
                answer(respond, Bytes::from_static(&[0; wire::PREFIX]))?;
                changed(&mut state);
                Ok(())
            }
            "InsertKeyValue" => insert(&mut state, &unframe(body)?, respond),
            "GetKeyValue" | "TryGetKeyValue" => {
                let key = bytes_field(&unframe(body)?, 2)?;
                match state.store.get(&key) {
                    Some(value) => answer_value(respond, &key, value.clone()),
                    None if method == "TryGetKeyValue" => refuse(respond, NOT_FOUND),
                    None => {
                        state.getters.entry(key).or_default().push(respond);
                        Ok(())
                    }
                }
            }
            "GetKeyValueDir" => list(&state, &bytes_field(&unframe(body)?, 2)?, respond),
            "DeleteKeyValue" => {
                let key = bytes_field(&unframe(body)?, 2)?;
                state.store.retain(|name, _| !name.starts_with(&key));
                answer(respond, Bytes::from_static(&[0; wire::PREFIX]))
            }
            other => bail!("the floor does not know {other}"),
        }
    }

    fn own_incarnation(&self) -> Bytes {
        wire::frame(&Writer::default().fixed64(1, self.incarnation).finish())
    }

    fn register(&self, state: &mut State, request: &Bytes, respond: Respond) -> Result<()> {
        let task = task_number(request, 5)?;
        let Some(Value::Fixed64(incarnation)) = field(request, 3)? else { bail!("no incarnation") };
        if state.version == 0 {
            state.registered[task] = incarnation;
            state.registering.push(respond);
            if state.registering.len() == self.tasks {
                state.connected.fill(true);
                state.version = 1;
                answer_all(&mut state.registering, &self.own_incarnation());
            }
            return Ok(());
        }
        if self.recoverable || state.registered[task] == incarnation {
            state.registered[task] = incarnation;
            state.connected[task] = true;
            answer(respond, self.own_incarnation())?;
            changed(state);
            return Ok(());
        }
        for poll in state.polls.drain(..) {
            drop(refuse(poll, ABORTED));
        }
        refuse(respond, ABORTED)
    }

    fn arrive(&self, state: &mut State, request: &Bytes, respond: Respond) -> Result<()> {
        state.barrier.push(respond);
        if state.barrier.len() == self.tasks {
            let rounds = state.rounds.entry(bytes_field(request, 2)?).or_default();
            let passed = wire::frame(&Writer::default().varint(1, *rounds).finish());
            *rounds += 1;
            answer_all(&mut state.barrier, &passed);
        }
        Ok(())
    }
}

fn insert(state: &mut State, request: &Bytes, respond: Respond) -> Result<()> {
    let entry = bytes_field(request, 2)?;
    let (key, value) = (bytes_field(&entry, 1)?, bytes_field(&entry, 2)?);
    answer(respond, Bytes::from_static(&[0; wire::PREFIX]))?;
    for getter in state.getters.remove(&key).unwrap_or_default() {
        drop(answer_value(getter, &key, value.clone()));
    }
    state.store.insert(key, value);
    Ok(())
}

fn list(state: &State, directory: &Bytes, respond: Respond) -> Result<()> {
    let mut found = Writer::default();
    for (key, value) in state.store.range(directory.clone()..) {
        if !key.starts_with(directory) {
            break;
        }
        found = found.bytes(2, &Writer::default().bytes(1, key).bytes(2, value).finish());
    }
    answer(respond, wire::frame(&found.finish()))
}

fn live_set(state: &State) -> Bytes {
    let tasks = pack((0..state.connected.len() as u64).filter(|&task| state.connected[task as usize]));
    let mut incarnations = Vec::new();
    for (incarnation, _) in state.registered.iter().zip(&state.connected).filter(|(_, connected)| **connected)
    {
        incarnations.extend_from_slice(&incarnation.to_le_bytes());
    }
    wire::frame(&Writer::default().bytes(1, &tasks).bytes(2, &incarnations).finish())
}

fn table(state: &State) -> Bytes {
    let mut all = Writer::default();
    for (task, (&incarnation, &connected)) in state.registered.iter().zip(&state.connected).enumerate() {
        let task = Writer::default().varint(1, task as u64);
        let task = task.varint(2, if connected { CONNECTED } else { DISCONNECTED });
        all = all.bytes(1, &task.fixed64(6, incarnation).finish());
    }
    wire::frame(&all.varint(2, state.version).finish())
}

fn changed(state: &mut State) {
    state.version += 1;
    let table = table(state);
    answer_all(&mut state.watchers, &table);
}

fn unframe(body: Bytes) -> Result<Bytes> {
    if body.first() != Some(&1) {
        return wire::unframe(body);
    }
    let mut message = Vec::new();
    GzDecoder::new(&body[wire::PREFIX..]).read_to_end(&mut message)?;
    Ok(message.into())
}

fn field(message: &[u8], number: u32) -> Result<Option<Value<'_>>> {
    for field in wire::fields(message) {
        let (found, value) = field?;
        if found == number {
            return Ok(Some(value));
        }
    }
    Ok(None)
}

fn bytes_field(message: &Bytes, number: u32) -> Result<Bytes> {
    match field(message, number)? {
        Some(Value::Bytes(found)) => Ok(message.slice_ref(found)),
        _ => bail!("no field {number}"),
    }
}

fn task_number(message: &[u8], number: u32) -> Result<usize> {
    match field(message, number)? {
        Some(Value::Varint(task)) => usize::try_from(task).context("a task number"),
        _ => Ok(0),
    }
}

fn head() -> Result<Response<()>> {
    let mut head = Response::new(());
    head.headers_mut().insert(header::CONTENT_TYPE, HeaderValue::from_static("application/grpc"));
    Ok(head)
}

fn trailers(status: &'static str) -> HeaderMap {
    let mut trailers = HeaderMap::with_capacity(1);
    trailers.insert("grpc-status", HeaderValue::from_static(status));
    trailers
}

fn answer(mut respond: Respond, body: Bytes) -> Result<()> {
    let mut stream = respond.send_response(head()?, false)?;
    stream.send_data(body, false)?;
    stream.send_trailers(trailers("0"))?;
    Ok(())
}

/// Answers all waiting callers; one that is gone is skipped.
fn answer_all(waiting: &mut Vec<Respond>, body: &Bytes) {
    for respond in waiting.drain(..) {
        drop(answer(respond, body.clone()));
    }
}

/// Sends the value as it was received; only the bytes before it are new.
fn answer_value(mut respond: Respond, key: &[u8], value: Bytes) -> Result<()> {
    let around = Writer::default().bytes(1, key).bytes_head(2, value.len()).finish();
    let outer = Writer::default().bytes_head(1, around.len() + value.len()).finish();
    let mut start = BytesMut::with_capacity(wire::PREFIX + outer.len() + around.len());
    start.put_u8(0);
    start.put_u32(u32::try_from(outer.len() + around.len() + value.len())?);
    start.put_slice(&outer);
    start.put_slice(&around);
    let mut stream = respond.send_response(head()?, false)?;
    // A value that does not deserve its own frame.
    if value.len() <= 1024 {
        start.put_slice(&value);
        stream.send_data(start.freeze(), false)?;
    } else {
        stream.send_data(start.freeze(), false)?;
        stream.send_data(value, false)?;
    }
    stream.send_trailers(trailers("0"))?;
    Ok(())
}

fn refuse(mut respond: Respond, status: &'static str) -> Result<()> {
    let mut head = head()?;
    head.headers_mut().insert("grpc-status", HeaderValue::from_static(status));
    respond.send_response(head, true)?;
    Ok(())
}
