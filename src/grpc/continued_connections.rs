//! Continues the connections of a process that died. Begin at [`ContinuedConnections::take_over`].
//!
//! The keeper hands over the sockets. The logs say what the former process knew ([`kept_log`](super::kept_log)), and the
//! counters of the kernel how far it came on each socket. A connection whose log and counters do not fit together ends.

use std::collections::BTreeMap;
use std::net::{Shutdown, SocketAddr, TcpStream};
use std::os::fd::{AsFd as _, OwnedFd};
use std::sync::Arc;

use muster_kept::{ConnectionLog, HeldSlot, KeptMemory, KeptMemoryError, LogRecord, stream_progress};
use serde::de::DeserializeOwned;

use super::connection_keeping::ConnectionKeeper;
use super::kept_log::{
    HeldLog, KeptGreeting, KeptLog, LogOrigin, SHORT_LOG, SavedCall, SavedQueue, SavedRequest, SavedTurn,
    append_value, append_value_with, record, write_greeting, write_new_area,
};
use crate::engine::KeptConnections;
use crate::http2::{RestoredFrames, SavedStream, SentFrames, StreamId};

/// The connections that go on from a former process.
pub struct ContinuedConnections {
    memory: Arc<KeptMemory>,
    connections: Vec<ContinuedConnection>,
    /// The connections that had not sent their whole preface.
    greetings: Vec<ContinuedGreeting>,
    /// The connections that were held and cannot go on.
    lost: usize,
}

/// A connection that goes on.
pub(super) struct ContinuedConnection {
    pub(super) socket: TcpStream,
    pub(super) saved: SavedConnection,
    log: ConnectionLog,
}

/// A connection that had not sent its whole preface.
pub(super) struct ContinuedGreeting {
    pub(super) socket: TcpStream,
    /// All that it has sent.
    pub(super) early: Vec<u8>,
    log: ConnectionLog,
}

/// The contents of a log.
enum SavedLog {
    Connection(Box<SavedConnection>),
    Greeting(Vec<u8>),
}

/// The state of a connection.
pub(super) struct SavedConnection {
    pub(super) origin: LogOrigin,
    pub(super) turn: SavedTurn,
    pub(super) input: Vec<u8>,
    /// The output that the socket has not taken.
    pub(super) output: Vec<u8>,
    pub(super) calls: BTreeMap<StreamId, SavedCall>,
    /// The requests that are arriving, each with the bytes of its body.
    pub(super) requests: BTreeMap<StreamId, (SavedRequest, Vec<u8>)>,
    /// The answered streams with frames that wait.
    pub(super) queues: BTreeMap<StreamId, (SavedStream, RestoredFrames)>,
}

impl ContinuedConnections {
    /// Takes over the memory and the sockets of a process that is dead. Without `continues`, all connections end.
    ///
    /// # Errors
    /// If the memory cannot be used. Then all connections end.
    pub fn take_over(
        memory: OwnedFd,
        sockets: Vec<(HeldSlot, OwnedFd)>,
        continues: bool,
    ) -> Result<Self, KeptMemoryError> {
        let held: Vec<HeldSlot> =
            if continues { sockets.iter().map(|(held, _)| *held).collect() } else { Vec::new() };
        let count = sockets.len();
        let (memory, logs) = KeptMemory::open(memory, &held)?;
        let mut sockets: BTreeMap<u64, OwnedFd> =
            sockets.into_iter().map(|(held, socket)| (held.serial, socket)).collect();
        let (mut connections, mut greetings) = (Vec::new(), Vec::new());
        for mut log in logs {
            let held = log.held_slot();
            let Some(socket) = sockets.remove(&held.serial) else { continue };
            let socket = TcpStream::from(socket);
            match SavedLog::take_over(&socket, &mut log) {
                Ok(SavedLog::Connection(saved)) => {
                    connections.push(ContinuedConnection { socket, saved: *saved, log });
                }
                Ok(SavedLog::Greeting(early)) => greetings.push(ContinuedGreeting { socket, early, log }),
                Err(why) => {
                    tracing::debug!(slot = held.slot, why, "a connection does not go on");
                    let _ = socket.shutdown(Shutdown::Both);
                }
            }
        }
        // The keeper's descriptors would keep the others open.
        sockets.into_values().for_each(|socket| _ = TcpStream::from(socket).shutdown(Shutdown::Both));
        // The logs have what was in the rooms.
        memory.clear_rooms();
        let lost = count - connections.len() - greetings.len();
        Ok(Self { memory, connections, greetings, lost })
    }

    /// Returns the memory for the logs of all connections.
    #[must_use]
    pub fn memory(&self) -> &Arc<KeptMemory> {
        &self.memory
    }

    /// Returns what the engine has to know of them.
    #[must_use]
    pub fn known_calls(&self) -> KeptConnections {
        let mut kept = KeptConnections::without(self.lost);
        for ContinuedConnection { saved, .. } in &self.connections {
            let calls = saved.calls.values().map(|call| call.call);
            let incomplete = saved.requests.keys().copied().collect();
            kept.add(saved.origin.connection, saved.turn.sender.last_stream(), incomplete, calls);
        }
        kept
    }

    /// Takes the connections that were accepted by the listener at this address.
    #[must_use]
    pub fn take_of_listener(&mut self, address: SocketAddr) -> Self {
        let is_of_listener = |socket: &TcpStream| {
            let local = socket.local_addr();
            local.is_ok_and(|local| {
                local.port() == address.port()
                    && (address.ip().is_unspecified() || local.ip() == address.ip())
            })
        };
        let connections =
            self.connections.extract_if(.., |connection| is_of_listener(&connection.socket)).collect();
        let greetings = self.greetings.extract_if(.., |greeting| is_of_listener(&greeting.socket)).collect();
        Self { memory: Arc::clone(&self.memory), connections, greetings, lost: 0 }
    }

    pub(super) fn into_parts(self) -> (Vec<ContinuedConnection>, Vec<ContinuedGreeting>) {
        (self.connections, self.greetings)
    }
}

impl ContinuedConnection {
    /// Returns the log, the socket and the state.
    pub(super) fn into_parts(
        self,
        keeper: &Arc<dyn ConnectionKeeper>,
    ) -> (Box<KeptLog>, TcpStream, SavedConnection) {
        let Self { socket, saved, log } = self;
        let output_end = saved.origin.output_offset + saved.output.len() as u64;
        let (read, input) = (saved.turn.read, saved.input.len());
        let held = HeldLog::continued(log, keeper);
        let log = KeptLog::continued(held, saved.origin.clone(), read, input, output_end);
        (log, socket, saved)
    }
}

impl ContinuedGreeting {
    /// Returns the log, the socket, and all that the connection has sent.
    pub(super) fn into_parts(self, keeper: &Arc<dyn ConnectionKeeper>) -> (KeptGreeting, TcpStream, Vec<u8>) {
        let Self { socket, early, log } = self;
        (KeptGreeting::continued(HeldLog::continued(log, keeper)), socket, early)
    }
}

impl SavedLog {
    /// Reads a log, adds what the counters of the kernel say, and writes the log anew.
    fn take_over(socket: &TcpStream, log: &mut ConnectionLog) -> Result<Self, String> {
        let progress = stream_progress(socket.as_fd()).map_err(|error| error.to_string())?;
        let progress = progress.ok_or("it has ended")?;
        let mut saved = Self::read(log)?;
        let known = match &saved {
            Self::Connection(saved) => saved.turn.read,
            Self::Greeting(early) => early.len() as u64,
        };
        let unread = progress.read.checked_sub(known).ok_or("more was read than the kernel has received")?;
        let mut found = Vec::new();
        if unread > 0 {
            let unread = usize::try_from(unread).map_err(|error| error.to_string())?;
            let in_rooms = log.memory().find_in_rooms(log.held_slot().serial, known, unread);
            found = in_rooms.ok_or("input is missing")?;
        }
        let is_written = match &mut saved {
            Self::Connection(saved) => {
                saved.input.extend(found);
                saved.turn.read = progress.read;
                let written = progress.written.checked_sub(saved.origin.output_offset);
                let written = written.and_then(|written| usize::try_from(written).ok());
                let written =
                    written.filter(|written| *written <= saved.output.len()).ok_or("output is missing")?;
                saved.output.drain(..written);
                saved.origin.output_offset = progress.written;
                saved.write(log)
            }
            Self::Greeting(_) if progress.written > 0 => return Err("output is missing".to_owned()),
            Self::Greeting(early) => {
                early.extend(found);
                write_greeting(log, early)
            }
        };
        if !is_written {
            return Err("there is no memory".to_owned());
        }
        log.commit();
        Ok(saved)
    }

    fn read(log: &ConnectionLog) -> Result<Self, String> {
        let records = log.records();
        if let [LogRecord { kind: record::GREETING, bytes }] = records.as_slice() {
            return Ok(Self::Greeting(bytes.clone()));
        }
        let mut read = PartialConnection::default();
        for entry in records {
            read.add_record(entry.kind, &entry.bytes)?;
        }
        let PartialConnection { origin, turn, input, output, calls, requests, queues } = read;
        let (Some(origin), Some(turn)) = (origin, turn) else { return Err("its log is empty".to_owned()) };
        let saved = SavedConnection { origin, turn, input, output, calls, requests, queues };
        Ok(Self::Connection(Box::new(saved)))
    }
}

impl SavedConnection {
    fn write(&self, log: &mut ConnectionLog) -> bool {
        let bodies: usize =
            self.requests.values().map(|(request, body)| 128 + request.path.len() + body.len()).sum();
        let keys: usize = self.calls.values().map(|call| 48 + call.form.key.len()).sum();
        let queues: usize = self.queues.values().map(|(_, frames)| 64 + frames.bytes()).sum();
        let bytes = SHORT_LOG + self.input.len() + self.output.len() + bodies + keys + queues;
        write_new_area(log, 2 * bytes, |log| {
            let has_calls = append_value(log, record::ORIGIN, &self.origin)
                && append_value(log, record::TURN, &self.turn)
                && log.append(record::INPUT, &self.input, std::iter::empty())
                && self.calls.values().all(|call| append_value(log, record::CALL, call));
            let has_requests = has_calls
                && self.requests.iter().all(|(stream, (request, body))| {
                    append_value(log, record::REQUEST, request)
                        && append_value_with(log, record::BODY, stream, std::iter::once(body.as_slice()))
                });
            let has_queues = has_requests
                && self.queues.iter().all(|(stream, (state, frames))| {
                    let (frames, parts) = frames.save();
                    let queue = SavedQueue { stream: *stream, state: state.clone(), frames };
                    append_value_with(log, record::QUEUE, &queue, parts.into_iter())
                });
            has_queues && log.append(record::OUTPUT, &self.output, std::iter::empty())
        })
    }
}

/// A connection of which a part of the log was read.
#[derive(Default)]
struct PartialConnection {
    origin: Option<LogOrigin>,
    turn: Option<SavedTurn>,
    input: Vec<u8>,
    output: Vec<u8>,
    calls: BTreeMap<StreamId, SavedCall>,
    requests: BTreeMap<StreamId, (SavedRequest, Vec<u8>)>,
    queues: BTreeMap<StreamId, (SavedStream, RestoredFrames)>,
}

impl PartialConnection {
    fn add_record(&mut self, kind: u32, bytes: &[u8]) -> Result<(), String> {
        match kind {
            record::ORIGIN => {
                let origin: LogOrigin = decode(bytes)?;
                if !origin.is_known() {
                    return Err("another version of the program has served it".to_owned());
                }
                self.origin = Some(origin);
            }
            record::TURN => {
                self.turn = Some(decode(bytes)?);
                self.input.clear();
            }
            record::INPUT => self.input.extend_from_slice(bytes),
            record::CALL => {
                let call: SavedCall = decode(bytes)?;
                self.calls.insert(call.stream, call);
            }
            record::REQUEST => {
                let request: SavedRequest = decode(bytes)?;
                let body = self.requests.remove(&request.stream).map(|(_, body)| body).unwrap_or_default();
                self.requests.insert(request.stream, (request, body));
            }
            record::BODY => {
                let (stream, bytes): (StreamId, _) = decode_first(bytes)?;
                let (_, body) = self.requests.get_mut(&stream).ok_or("it has the body of no request")?;
                body.extend_from_slice(bytes);
            }
            record::ENDED => {
                let stream: StreamId = decode(bytes)?;
                self.calls.remove(&stream);
                self.requests.remove(&stream);
            }
            record::WINDOW => {
                let (stream, state): (StreamId, SavedStream) = decode(bytes)?;
                let of_call = self.calls.get_mut(&stream).map(|call| &mut call.state);
                let of_request = self.requests.get_mut(&stream).map(|(request, _)| &mut request.state);
                let of_queue = self.queues.get_mut(&stream).map(|(state, _)| state);
                if let Some(present) = of_call.or(of_request).or(of_queue) {
                    *present = state;
                }
            }
            record::QUEUE => {
                let (SavedQueue { stream, state, frames }, bytes) = decode_first(bytes)?;
                let frames =
                    RestoredFrames::read(&frames, bytes).ok_or("its waiting frames are incomplete")?;
                self.queues.insert(stream, (state, frames));
            }
            record::QUEUE_SENT => {
                let (stream, sent, state): (StreamId, SentFrames, SavedStream) = decode(bytes)?;
                let queue = self.queues.get_mut(&stream).ok_or("it has sent frames of no stream")?;
                queue.0 = state;
                queue.1.remove_sent(sent);
            }
            record::QUEUE_ENDED => {
                let stream: StreamId = decode(bytes)?;
                self.queues.remove(&stream);
            }
            record::OUTPUT => self.output.extend_from_slice(bytes),
            other => return Err(format!("it has a record of the unknown kind {other}")),
        }
        Ok(())
    }
}

fn decode<T: DeserializeOwned>(bytes: &[u8]) -> Result<T, String> {
    postcard::from_bytes(bytes).map_err(|error| error.to_string())
}

/// Decodes a value, and returns it with the bytes after it.
fn decode_first<T: DeserializeOwned>(bytes: &[u8]) -> Result<(T, &[u8]), String> {
    postcard::take_from_bytes(bytes).map_err(|error| error.to_string())
}
