//! The log of a kept connection: what the next process needs to continue it when this one has died.
//!
//! A connection writes its log before it writes to its socket, and before it reads again ([`KeptLog::commit`]). So
//! whatever has left is in the log, and so is all input that is not in a read room. The log has the state of HTTP/2, the calls
//! that wait for the driver, the input that is not processed, and the output that the socket has not taken. A connection that
//! is in another state, for example one whose request is arriving, is not continued if the process dies just then.
//! `continued_connections.rs` reads logs. Begin at [`KeptLog::open`].

use std::io;
use std::net::SocketAddr;
use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::time::Duration;

use muster_kept::{ConnectionLog, HeldSlot, KeptMemory};
use serde::{Deserialize, Serialize};
use tokio::time::Instant;

use super::call_table::{CallTable, WaitingCallPlace};
use super::decoded_call::ReplyFormat;
use crate::clock::monotonic_nanoseconds;
use crate::coordination::{CallId, ConnectionId, JobId};
use crate::engine::AnswersTaken;
use crate::http2::{Http2Receiver, Http2Sender, SavedReceiver, SavedSender, StreamId};

/// The version of the records. It grows when a type changes that they contain. Connections with other records end with their
/// process.
const RECORDS_VERSION: u32 = 1;
/// An area that is longer, and that a sixteenth of it would do for, is replaced by a shorter one.
const LONG_AREA: usize = 64 << 10;

/// The kinds of records.
pub(super) mod record {
    /// [`LogOrigin`](super::LogOrigin), the first record of every area.
    pub const ORIGIN: u32 = 1;
    /// [`SavedTurn`](super::SavedTurn), which replaces the one before it. It empties the input.
    pub const TURN: u32 = 2;
    /// Input that is not processed.
    pub const INPUT: u32 = 3;
    /// [`SavedCall`](super::SavedCall), which waits from now on.
    pub const CALL: u32 = 4;
    /// The stream of a call that does not wait any more.
    pub const CALL_ENDED: u32 = 5;
    /// The stream of a call that waits, and its send window.
    pub const WINDOW: u32 = 6;
    /// Output, which follows the output before it.
    pub const OUTPUT: u32 = 7;
}

/// Holds a second descriptor of the sockets of kept connections, in another process.
pub trait ConnectionKeeper: Send + Sync {
    /// Gives the socket of the connection with this slot to the other process.
    ///
    /// # Errors
    /// If that does not take it. Then the connection is not kept.
    fn hold(&self, socket: BorrowedFd<'_>, slot: HeldSlot) -> io::Result<()>;

    /// Tells the other process that the connection has ended.
    fn release(&self, slot: HeldSlot);
}

/// The memory of the logs, and the keeper of the sockets.
#[derive(Clone)]
pub(super) struct ConnectionKeeping {
    pub(super) memory: Arc<KeptMemory>,
    pub(super) keeper: Arc<dyn ConnectionKeeper>,
}

/// What a connection is.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(super) struct LogOrigin {
    version: u32,
    pub(super) connection: ConnectionId,
    pub(super) peer: SocketAddr,
    /// The number of bytes of output before the first one in the area.
    pub(super) output_offset: u64,
}

impl LogOrigin {
    /// Returns whether this program knows the records.
    pub(super) fn is_known(&self) -> bool {
        self.version == RECORDS_VERSION
    }
}

/// The state of a connection after a turn.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct SavedTurn {
    pub(super) receiver: SavedReceiver,
    pub(super) sender: SavedSender,
    pub(super) has_peer_goaway: bool,
    /// The number of bytes that were read from the socket.
    pub(super) read: u64,
}

/// A call that waits for the driver.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(super) struct SavedCall {
    pub(super) stream: StreamId,
    pub(super) call: CallId,
    pub(super) job: JobId,
    pub(super) form: ReplyFormat,
    /// Its deadline on the monotonic clock of the host, in nanoseconds; 0: none.
    due: u64,
    pub(super) send_window: i64,
}

impl SavedCall {
    pub(super) fn new(place: &WaitingCallPlace<'_>, send_window: i64) -> Self {
        let WaitingCallPlace { stream, call, job, form, due } = *place;
        let due = due.map_or(0, |due| {
            let left = due.saturating_duration_since(Instant::now());
            monotonic_nanoseconds().saturating_add(u64::try_from(left.as_nanos()).unwrap_or(u64::MAX))
        });
        Self { stream, call, job, form: form.clone(), due, send_window }
    }

    /// Returns its deadline.
    pub(super) fn due(&self) -> Option<Instant> {
        let left = self.due.saturating_sub(monotonic_nanoseconds());
        (self.due > 0).then(|| Instant::now() + Duration::from_nanos(left))
    }
}

/// The log of a kept connection.
pub(super) struct KeptLog {
    log: ConnectionLog,
    keeper: Arc<dyn ConnectionKeeper>,
    origin: LogOrigin,
    /// The number of bytes that were read from the socket.
    read: u64,
    logged: LoggedProgress,
    /// Whether the log is valid: the next process can continue the connection.
    is_valid: bool,
    /// The requests to take up answers.
    taken: Vec<AnswersTaken>,
}

/// How far the log is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct LoggedProgress {
    read: u64,
    input: usize,
    output: u64,
}

/// The parts of a connection that its log has.
pub(super) struct ConnectionParts<'a> {
    pub(super) calls: &'a mut CallTable,
    pub(super) receiver: &'a Http2Receiver,
    pub(super) sender: &'a mut Http2Sender,
    pub(super) unread_input: &'a [u8],
    pub(super) has_peer_goaway: bool,
}

/// All that an area says, to begin it with.
pub(super) struct WholeLog<'a, C> {
    pub(super) origin: &'a LogOrigin,
    pub(super) turn: &'a SavedTurn,
    pub(super) input: [&'a [u8]; 2],
    /// All output that the socket has not taken.
    pub(super) output: C,
    pub(super) calls: Vec<SavedCall>,
}

impl<'a, C: Iterator<Item = &'a [u8]> + Clone> WholeLog<'a, C> {
    /// Writes everything to another area, without a commit. Returns `false` if there is no memory.
    #[must_use]
    pub(super) fn write(&self, log: &mut ConnectionLog) -> bool {
        let length = |parts: &mut dyn Iterator<Item = &'a [u8]>| parts.map(<[u8]>::len).sum::<usize>();
        let variable = length(&mut self.input.into_iter()) + length(&mut self.output.clone());
        let keys: usize = self.calls.iter().map(|call| call.form.key.len()).sum();
        // The records are a bit shorter, and as much again is free for those that follow.
        let mut bytes = 2 * (512 + variable + keys + 64 * self.calls.len());
        loop {
            if !log.begin(bytes) {
                return false;
            }
            if self.append_all(log) {
                return true;
            }
            bytes *= 2;
        }
    }

    fn append_all(&self, log: &mut ConnectionLog) -> bool {
        append_value(log, record::ORIGIN, self.origin)
            && append_value(log, record::TURN, self.turn)
            && log.append(record::INPUT, self.input.into_iter())
            && self.calls.iter().all(|call| append_value(log, record::CALL, call))
            && log.append(record::OUTPUT, self.output.clone())
    }
}

fn append_value(log: &mut ConnectionLog, kind: u32, value: &impl Serialize) -> bool {
    /// Enough for all records but those of a header table or of a long key.
    const SHORT: usize = 512;
    let mut space = [0; SHORT];
    match postcard::to_slice(value, &mut space) {
        Ok(bytes) => log.append(kind, std::iter::once(&*bytes)),
        Err(_) => postcard::to_allocvec(value)
            .is_ok_and(|bytes| log.append(kind, std::iter::once(bytes.as_slice()))),
    }
}

impl KeptLog {
    /// Begins the log of a new connection, of which `read` bytes were read, and lets the keeper hold its socket. Nothing is valid
    /// before the first commit. Returns `None` if the connection cannot be kept.
    pub(super) fn open(
        keeping: &ConnectionKeeping,
        socket: BorrowedFd<'_>,
        connection: ConnectionId,
        peer: SocketAddr,
        read: u64,
    ) -> Option<Box<Self>> {
        let (slot, log) = keeping.memory.begin_connection()?;
        if let Err(error) = keeping.keeper.hold(socket, slot) {
            tracing::debug!(%peer, %error, "a connection is not kept");
            return None;
        }
        let origin = LogOrigin { version: RECORDS_VERSION, connection, peer, output_offset: 0 };
        Some(Box::new(Self::new(log, &keeping.keeper, origin, read, None)))
    }

    /// Returns the log of a connection that another process has served, and that is valid.
    pub(super) fn continued(
        log: ConnectionLog,
        keeper: &Arc<dyn ConnectionKeeper>,
        origin: LogOrigin,
        read: u64,
        input: usize,
        output_end: u64,
    ) -> Box<Self> {
        let logged = LoggedProgress { read, input, output: output_end };
        Box::new(Self::new(log, keeper, origin, read, Some(logged)))
    }

    fn new(
        log: ConnectionLog,
        keeper: &Arc<dyn ConnectionKeeper>,
        origin: LogOrigin,
        read: u64,
        logged: Option<LoggedProgress>,
    ) -> Self {
        let is_valid = logged.is_some();
        let logged = logged.unwrap_or(LoggedProgress { read: 0, input: 0, output: 0 });
        Self { log, keeper: Arc::clone(keeper), origin, read, logged, is_valid, taken: Vec::new() }
    }

    /// Returns the memory of the log.
    pub(super) fn memory(&self) -> &Arc<KeptMemory> {
        self.log.memory()
    }

    /// Returns the serial number of the connection, and the number of bytes that were read.
    pub(super) fn serial_and_read(&self) -> (u64, u64) {
        (self.log.held_slot().serial, self.read)
    }

    /// Counts bytes that were read from the socket.
    pub(super) fn count_read(&mut self, bytes: usize) {
        self.read += bytes as u64;
    }

    /// Keeps a request to take up answers until the next commit.
    pub(super) fn keep_until_commit(&mut self, taken: AnswersTaken) {
        self.taken.push(taken);
    }

    /// Makes the log invalid: from now on, the connection ends with this process.
    pub(super) fn withdraw(&mut self) {
        if std::mem::take(&mut self.is_valid) {
            self.log.withdraw();
        }
    }

    /// Makes the present state valid, if it differs from that in the log.
    pub(super) fn commit(&mut self, connection: ConnectionParts<'_>) {
        let ConnectionParts { calls, receiver, sender, unread_input, has_peer_goaway } = connection;
        let input = receiver.incomplete_frame().len() + unread_input.len();
        let progress =
            LoggedProgress { read: self.read, input, output: sender.output.offset_after_last_waiting_byte() };
        if progress == self.logged && self.is_valid && !calls.has_waiting_changes() {
            return self.taken.clear();
        }
        let saved = if sender.stream_count() == calls.waiting_count() {
            receiver.save().zip(sender.save())
        } else {
            None
        };
        let Some((saved_receiver, saved_sender)) = saved else {
            calls.clear_waiting_changes();
            sender.take_window_changes();
            self.withdraw();
            self.logged = progress;
            return self.taken.clear();
        };
        let turn =
            SavedTurn { receiver: saved_receiver, sender: saved_sender, has_peer_goaway, read: self.read };
        let input = [receiver.incomplete_frame(), unread_input];
        if !self.try_append(&turn, input, calls, sender) && !self.write_anew(&turn, input, calls, sender) {
            tracing::debug!(peer = %self.origin.peer, "there is no memory to keep a connection");
            self.withdraw();
        } else {
            self.log.commit();
            self.is_valid = true;
        }
        calls.clear_waiting_changes();
        self.logged = progress;
        self.taken.clear();
    }

    /// Appends what has changed; returns `false` if everything must be said anew.
    fn try_append(
        &mut self,
        turn: &SavedTurn,
        input: [&[u8]; 2],
        calls: &mut CallTable,
        sender: &mut Http2Sender,
    ) -> bool {
        let windows = sender.take_window_changes();
        let area = self.log.area_bytes();
        let is_too_long = area > LONG_AREA && 16 * (sender.output.len() + 80 * calls.waiting_count()) < area;
        if !self.is_valid || windows.all || is_too_long || !append_value(&mut self.log, record::TURN, turn) {
            return false;
        }
        if input.iter().any(|part| !part.is_empty()) && !self.log.append(record::INPUT, input.into_iter()) {
            return false;
        }
        // Calls that began and ended within the turn are in neither list.
        let (log, mut is_appended) = (&mut self.log, true);
        calls.visit_waiting_changes(|stream, begun| {
            is_appended = is_appended
                && match begun {
                    None => append_value(log, record::CALL_ENDED, &stream),
                    Some(place) => {
                        let window = sender.send_window_of_stream(stream).unwrap_or_default();
                        append_value(log, record::CALL, &SavedCall::new(&place, window))
                    }
                };
        });
        for stream in windows.streams {
            if let Some(window) = sender.send_window_of_stream(stream) {
                is_appended = is_appended && append_value(&mut self.log, record::WINDOW, &(stream, window));
            }
        }
        let first = sender.output.offset_of_first_waiting_byte();
        let skipped = usize::try_from(self.logged.output.saturating_sub(first)).unwrap_or(usize::MAX);
        let has_output = self.logged.output < sender.output.offset_after_last_waiting_byte();
        is_appended && (!has_output || self.log.append(record::OUTPUT, sender.output.waiting_parts(skipped)))
    }

    fn write_anew(
        &mut self,
        turn: &SavedTurn,
        input: [&[u8]; 2],
        calls: &CallTable,
        sender: &Http2Sender,
    ) -> bool {
        self.origin.output_offset = sender.output.offset_of_first_waiting_byte();
        let window = |stream| sender.send_window_of_stream(stream).unwrap_or_default();
        let calls = calls.waiting_calls().map(|place| SavedCall::new(&place, window(place.stream))).collect();
        let output = sender.output.waiting_parts(0);
        WholeLog { origin: &self.origin, turn, input, output, calls }.write(&mut self.log)
    }
}

impl Drop for KeptLog {
    fn drop(&mut self) {
        self.log.withdraw();
        self.keeper.release(self.log.held_slot());
    }
}
