//! Continues the connections of a process that died. Begin at [`ContinuedConnections::take_over`].
//!
//! The keeper hands over the sockets. The logs say what the former process knew ([`kept_log`](super::kept_log)), and the
//! counters of the kernel how far it came on each socket. A connection whose log and counters do not fit together ends.

use std::collections::BTreeMap;
use std::net::{SocketAddr, TcpStream};
use std::os::fd::{AsFd as _, OwnedFd};
use std::sync::Arc;

use muster_kept::{ConnectionLog, HeldSlot, KeptMemory, KeptMemoryError, stream_progress};

use super::kept_log::{ConnectionKeeper, KeptLog, LogOrigin, SavedCall, SavedTurn, WholeLog, record};
use crate::engine::KeptConnections;
use crate::http2::StreamId;

/// The connections that go on from a former process.
pub struct ContinuedConnections {
    memory: Arc<KeptMemory>,
    connections: Vec<ContinuedConnection>,
    /// The connections that were held and cannot go on.
    lost: usize,
}

/// A connection that goes on.
pub(super) struct ContinuedConnection {
    pub(super) socket: TcpStream,
    pub(super) saved: SavedConnection,
    log: ConnectionLog,
}

/// The state of a connection.
pub(super) struct SavedConnection {
    pub(super) origin: LogOrigin,
    pub(super) turn: SavedTurn,
    pub(super) input: Vec<u8>,
    /// The output that the socket has not taken.
    pub(super) output: Vec<u8>,
    pub(super) calls: BTreeMap<StreamId, SavedCall>,
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
        let mut connections = Vec::new();
        for (held, mut log) in logs {
            let Some(socket) = sockets.remove(&held.serial) else { continue };
            let socket = TcpStream::from(socket);
            match SavedConnection::take_over(&socket, &mut log) {
                Ok(saved) => connections.push(ContinuedConnection { socket, saved, log }),
                Err(why) => tracing::debug!(slot = held.slot, why, "a connection does not go on"),
            }
        }
        // The logs have what was in the rooms.
        memory.clear_rooms();
        let lost = count - connections.len();
        Ok(Self { memory, connections, lost })
    }

    /// Returns the memory for the logs of all connections.
    #[must_use]
    pub fn memory(&self) -> &Arc<KeptMemory> {
        &self.memory
    }

    /// Returns the number of connections that go on, and of those that were held and do not.
    #[must_use]
    pub fn counts(&self) -> (usize, usize) {
        (self.connections.len(), self.lost)
    }

    /// Returns what the engine has to know of them.
    #[must_use]
    pub fn known_calls(&self) -> KeptConnections {
        let mut kept = KeptConnections::default();
        for ContinuedConnection { saved, .. } in &self.connections {
            let calls = saved.calls.values().map(|call| call.call);
            kept.add(saved.origin.connection, saved.turn.sender.last_stream(), Vec::new(), calls);
        }
        kept
    }

    /// Takes the connections that were accepted by the listener at this address.
    #[must_use]
    pub fn take_of_listener(&mut self, address: SocketAddr) -> Self {
        let is_of_listener = |connection: &ContinuedConnection| {
            let local = connection.socket.local_addr();
            local.is_ok_and(|local| {
                local.port() == address.port()
                    && (address.ip().is_unspecified() || local.ip() == address.ip())
            })
        };
        let (own, others) = std::mem::take(&mut self.connections).into_iter().partition(is_of_listener);
        self.connections = others;
        Self { memory: Arc::clone(&self.memory), connections: own, lost: 0 }
    }

    pub(super) fn into_connections(self) -> Vec<ContinuedConnection> {
        self.connections
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
        let log = KeptLog::continued(log, keeper, saved.origin.clone(), read, input, output_end);
        (log, socket, saved)
    }
}

impl SavedConnection {
    /// Reads a log, adds what the counters of the kernel say, and writes the log anew.
    fn take_over(socket: &TcpStream, log: &mut ConnectionLog) -> Result<Self, String> {
        let mut saved = Self::read(log)?;
        let progress = stream_progress(socket.as_fd()).map_err(|error| error.to_string())?;
        let progress = progress.ok_or("it has ended")?;
        let unread =
            progress.read.checked_sub(saved.turn.read).ok_or("more was read than the kernel has received")?;
        if unread > 0 {
            let unread = usize::try_from(unread).map_err(|error| error.to_string())?;
            let found = log.memory().find_in_rooms(log.held_slot().serial, saved.turn.read, unread);
            saved.input.extend(found.ok_or("input is missing")?);
        }
        let written = progress.written.checked_sub(saved.origin.output_offset);
        let written = written.and_then(|written| usize::try_from(written).ok());
        let written = written.filter(|written| *written <= saved.output.len()).ok_or("output is missing")?;
        saved.output.drain(..written);
        saved.origin.output_offset = progress.written;
        saved.turn.read = progress.read;
        if !saved.write(log) {
            return Err("there is no memory".to_owned());
        }
        log.commit();
        Ok(saved)
    }

    fn write(&self, log: &mut ConnectionLog) -> bool {
        let whole = WholeLog {
            origin: &self.origin,
            turn: &self.turn,
            input: [&self.input, &[]],
            output: std::iter::once(self.output.as_slice()),
            calls: self.calls.values().cloned().collect(),
        };
        whole.write(log)
    }

    fn read(log: &ConnectionLog) -> Result<Self, String> {
        let (mut origin, mut turn): (Option<LogOrigin>, Option<SavedTurn>) = (None, None);
        let (mut input, mut output) = (Vec::new(), Vec::new());
        let mut calls: BTreeMap<StreamId, SavedCall> = BTreeMap::new();
        let undecodable = |error: postcard::Error| error.to_string();
        for entry in log.records() {
            let bytes = entry.bytes.as_slice();
            match entry.kind {
                record::ORIGIN => {
                    let first: LogOrigin = postcard::from_bytes(bytes).map_err(undecodable)?;
                    if !first.is_known() {
                        return Err("another version of the program has served it".to_owned());
                    }
                    origin = Some(first);
                }
                record::TURN => {
                    turn = Some(postcard::from_bytes(bytes).map_err(undecodable)?);
                    input.clear();
                }
                record::INPUT => input.extend_from_slice(bytes),
                record::CALL => {
                    let call: SavedCall = postcard::from_bytes(bytes).map_err(undecodable)?;
                    calls.insert(call.stream, call);
                }
                record::CALL_ENDED => {
                    let stream: StreamId = postcard::from_bytes(bytes).map_err(undecodable)?;
                    calls.remove(&stream);
                }
                record::WINDOW => {
                    let (stream, window): (StreamId, i64) =
                        postcard::from_bytes(bytes).map_err(undecodable)?;
                    if let Some(call) = calls.get_mut(&stream) {
                        call.send_window = window;
                    }
                }
                record::OUTPUT => output.extend_from_slice(bytes),
                other => return Err(format!("it has a record of the unknown kind {other}")),
            }
        }
        let (Some(origin), Some(turn)) = (origin, turn) else { return Err("its log is empty".to_owned()) };
        Ok(Self { origin, turn, input, output, calls })
    }
}
