//! The log of a kept connection: what the next process needs to continue it when this one has died.
//!
//! A connection writes its log before it writes to its socket, and before it reads again ([`KeptLog::commit`]). So
//! all sent output is in the log, and so is all input that is not in a read room. The log has the state of HTTP/2, the calls
//! that wait for the driver, the requests that are arriving, the input that is not processed, and the output that the socket has
//! not taken. A connection that is in another state is not continued if the process dies just then: while a call to health or
//! reflection is in progress, while a request is deferred or inflated, and within a header block of several frames.
//! `continued_connections.rs` reads logs. Begin at [`KeptLog::open`].

use std::net::SocketAddr;
use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::time::Duration;

use muster_kept::{ConnectionLog, KeptMemory, LAYOUT_VERSION};
use serde::{Deserialize, Serialize};
use tokio::time::Instant;

use super::call_table::{CallChange, CallTable, ReceivingCallEntry, WaitingCallEntry};
use super::connection_keeping::{ConnectionKeeper, ConnectionKeeping};
use super::decoded_call::ReplyFormat;
use crate::clock::monotonic_nanoseconds;
use crate::coordination::{CallId, ConnectionId, JobId};
use crate::engine::FlushToken;
use crate::http2::{
    Http2Receiver, Http2Sender, QueueChange, SavedFrames, SavedReceiver, SavedSender, SavedStream, StreamId,
};

/// The version of the records. It grows when a type changes that they contain. Connections with other records end with their
/// process.
const RECORDS_VERSION: u32 = 1;
/// A process can continue the connections of another one whose program has the same version.
pub const KEPT_CONNECTIONS_VERSION: u64 = LAYOUT_VERSION << 32 | RECORDS_VERSION as u64;
/// The length of the records of a connection without calls.
pub(super) const SHORT_LOG: usize = 176;
/// An area that is longer, and that an eighth of it would do for, is replaced by a shorter one.
const LONG_AREA: usize = 16 << 10;
/// The changes of each kind that are collected while the connection is in a state that its log cannot have.
const CHANGES_MAX: usize = 4096;
/// After there was no memory for a log, so many commits do not ask for it.
const COMMITS_WITHOUT_MEMORY: u32 = 64;

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
    /// [`SavedRequest`](super::SavedRequest), whose body arrives; it replaces the one of the same stream.
    pub const REQUEST: u32 = 5;
    /// The stream of a request, and bytes of its body that follow the bytes before them.
    pub const BODY: u32 = 6;
    /// The stream of a call or of a request that is neither any more.
    pub const ENDED: u32 = 7;
    /// The stream of a call or of waiting frames, and its send window.
    pub const WINDOW: u32 = 8;
    /// [`SavedQueue`](super::SavedQueue), and the bytes of the frames that wait; it replaces the one of the same stream.
    pub const QUEUE: u32 = 9;
    /// The stream of waiting frames, and what was sent of them since they were in the log.
    pub const QUEUE_SENT: u32 = 10;
    /// The stream of frames that wait no more.
    pub const QUEUE_ENDED: u32 = 11;
    /// Output, which follows the output before it.
    pub const OUTPUT: u32 = 12;
    /// All that a new connection has sent so far, in place of all other records. Its preface is incomplete.
    pub const GREETING: u32 = 13;
}

/// The first record of an area, with its connection.
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

/// A deadline on the monotonic clock of the host, in nanoseconds; 0: none.
#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
pub(super) struct SavedDeadline(u64);

impl SavedDeadline {
    fn new(due: Option<Instant>) -> Self {
        Self(due.map_or(0, |due| {
            let left = due.saturating_duration_since(Instant::now());
            monotonic_nanoseconds().saturating_add(u64::try_from(left.as_nanos()).unwrap_or(u64::MAX))
        }))
    }

    /// Returns the deadline.
    pub(super) fn instant(self) -> Option<Instant> {
        let left = self.0.saturating_sub(monotonic_nanoseconds());
        (self.0 > 0).then(|| Instant::now() + Duration::from_nanos(left))
    }
}

/// A call that waits for the driver.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(super) struct SavedCall {
    pub(super) stream: StreamId,
    pub(super) call: CallId,
    pub(super) job: JobId,
    pub(super) form: ReplyFormat,
    pub(super) due: SavedDeadline,
    pub(super) state: SavedStream,
}

/// A request whose body arrives.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(super) struct SavedRequest {
    pub(super) stream: StreamId,
    pub(super) path: String,
    pub(super) job: JobId,
    pub(super) due: SavedDeadline,
    pub(super) compresses: bool,
    pub(super) is_ended: bool,
    pub(super) unreleased: usize,
    pub(super) state: SavedStream,
}

/// An answered stream with frames that wait for a window.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(super) struct SavedQueue {
    pub(super) stream: StreamId,
    pub(super) state: SavedStream,
    pub(super) frames: SavedFrames,
}

/// A log, and the keeper that holds the socket until the log is dropped.
pub(super) struct HeldLog {
    log: ConnectionLog,
    keeper: Arc<dyn ConnectionKeeper>,
}

impl HeldLog {
    /// Begins a log, and lets the keeper hold the socket. Nothing is valid before the first commit. Returns `None` if the
    /// connection cannot be kept.
    fn open(keeping: &ConnectionKeeping, socket: BorrowedFd<'_>) -> Option<Self> {
        let log = keeping.memory.begin_connection()?;
        if let Err(error) = keeping.keeper.hold(socket, log.held_slot()) {
            tracing::debug!(%error, "a connection is not kept");
            return None;
        }
        Some(Self { log, keeper: Arc::clone(&keeping.keeper) })
    }

    /// Returns the log of a connection whose socket the keeper holds.
    pub(super) fn continued(log: ConnectionLog, keeper: &Arc<dyn ConnectionKeeper>) -> Self {
        Self { log, keeper: Arc::clone(keeper) }
    }
}

impl Drop for HeldLog {
    fn drop(&mut self) {
        self.log.withdraw();
        self.keeper.release(self.log.held_slot());
    }
}

/// The log of a connection that has not sent its whole preface.
pub(super) struct KeptGreeting(HeldLog);

impl KeptGreeting {
    /// Begins the log of a new connection. Returns `None` if it cannot be kept.
    pub(super) fn open(keeping: &ConnectionKeeping, socket: BorrowedFd<'_>) -> Option<Self> {
        let mut greeting = Self(HeldLog::open(keeping, socket)?);
        greeting.commit(&[]).then_some(greeting)
    }

    /// Returns the log of a connection of a former process.
    pub(super) fn continued(held: HeldLog) -> Self {
        Self(held)
    }

    /// Returns the memory of the log.
    pub(super) fn memory(&self) -> &Arc<KeptMemory> {
        self.0.log.memory()
    }

    /// Returns the serial number of the connection.
    pub(super) fn serial(&self) -> u64 {
        self.0.log.held_slot().serial
    }

    /// Makes all that the connection has sent valid. Returns `false` if there is no memory.
    pub(super) fn commit(&mut self, greeting: &[u8]) -> bool {
        let log = &mut self.0.log;
        let is_written = write_greeting(log, greeting);
        if is_written {
            log.commit();
        }
        is_written
    }
}

/// Writes what a new connection has sent to another area, without a commit.
pub(super) fn write_greeting(log: &mut ConnectionLog, greeting: &[u8]) -> bool {
    write_new_area(log, 64 + greeting.len(), |log| log.append(record::GREETING, greeting, std::iter::empty()))
}

/// The log of a kept connection.
pub(super) struct KeptLog {
    held: HeldLog,
    origin: LogOrigin,
    /// The number of bytes that were read from the socket.
    read: u64,
    logged: LoggedProgress,
    /// Whether the log is valid: the next process can continue the connection.
    is_valid: bool,
    /// Whether the next commit writes everything to another area.
    needs_new_area: bool,
    /// The number of commits until memory is asked for again.
    skipped_commits: u32,
    /// The length of the state when the present area was begun: the records without bodies and output.
    state_bytes: usize,
    /// Whether input that a former process has read is not processed.
    is_catching_up: bool,
    /// The length of the bodies that were arriving when the present area was begun.
    body_bytes: usize,
    /// Dropped when all answers so far are in the log.
    flush_tokens: Vec<FlushToken>,
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

/// Begins another area of at least `bytes`, and calls `append` with it; again with a longer one if the area is too short. Returns
/// `false` if there is no memory.
pub(super) fn write_new_area(
    log: &mut ConnectionLog,
    bytes: usize,
    mut append: impl FnMut(&mut ConnectionLog) -> bool,
) -> bool {
    let mut bytes = bytes;
    loop {
        if !log.begin(bytes) {
            return false;
        }
        if append(log) {
            return true;
        }
        bytes *= 2;
    }
}

/// Appends a record with a value.
pub(super) fn append_value(log: &mut ConnectionLog, kind: u32, value: &impl Serialize) -> bool {
    append_value_with(log, kind, value, std::iter::empty())
}

/// Appends a record with a value, and bytes after it.
pub(super) fn append_value_with<'a>(
    log: &mut ConnectionLog,
    kind: u32,
    value: &impl Serialize,
    bytes: impl Iterator<Item = &'a [u8]> + Clone,
) -> bool {
    /// Enough for all values but a header table and a long key.
    const SHORT: usize = 512;
    let mut space = [0; SHORT];
    let long;
    let value: &[u8] = match postcard::to_slice(value, &mut space) {
        Ok(value) => value,
        Err(_) => match postcard::to_allocvec(value) {
            Ok(value) => {
                long = value;
                &long
            }
            Err(_) => return false,
        },
    };
    log.append(kind, value, bytes)
}

fn append_change(log: &mut ConnectionLog, change: &CallChange<'_>, sender: &Http2Sender) -> bool {
    match change {
        CallChange::Ended(stream) => append_value(log, record::ENDED, stream),
        CallChange::Waiting(WaitingCallEntry { stream, call, job, form, due }) => {
            let Some(state) = sender.save_stream(*stream) else { return true };
            let (form, due) = ((*form).clone(), SavedDeadline::new(*due));
            let call = SavedCall { stream: *stream, call: *call, job: *job, form, due, state };
            append_value(log, record::CALL, &call)
        }
        CallChange::Receiving(entry) => {
            let ReceivingCallEntry { stream, path, job, due, compresses, is_ended, unreleased, body, .. } =
                entry;
            let Some(state) = sender.save_stream(*stream) else { return true };
            let request = SavedRequest {
                stream: *stream,
                path: (*path).to_owned(),
                job: *job,
                due: SavedDeadline::new(*due),
                compresses: *compresses,
                is_ended: *is_ended,
                unreleased: *unreleased,
                state,
            };
            append_value(log, record::REQUEST, &request)
                && (body.is_empty() || append_value_with(log, record::BODY, stream, body.iter().copied()))
        }
    }
}

/// Appends what the log does not have of the waiting frames of a stream, with `anew` all of them.
fn append_queue_change(
    log: &mut ConnectionLog,
    stream: StreamId,
    anew: bool,
    sender: &mut Http2Sender,
) -> bool {
    let is_appended = match (sender.queue_change(stream, anew), sender.save_stream(stream)) {
        (Some(QueueChange::All(frames, bytes)), Some(state)) => {
            let queue = SavedQueue { stream, state, frames };
            append_value_with(log, record::QUEUE, &queue, bytes.into_iter())
        }
        (Some(QueueChange::Sent(sent)), Some(state)) => {
            append_value(log, record::QUEUE_SENT, &(stream, sent, state))
        }
        (Some(QueueChange::None), _) => true,
        (None, _) | (_, None) => append_value(log, record::QUEUE_ENDED, &stream),
    };
    sender.mark_queue_logged(stream);
    is_appended
}

impl KeptLog {
    /// Returns the log of a connection that has sent its preface, and of which `read` bytes were read.
    pub(super) fn open(
        greeting: KeptGreeting,
        connection: ConnectionId,
        peer: SocketAddr,
        read: u64,
    ) -> Box<Self> {
        let origin = LogOrigin { version: RECORDS_VERSION, connection, peer, output_offset: 0 };
        let logged = LoggedProgress { read: 0, input: 0, output: 0 };
        let log = Self::new(greeting.0, origin, read, logged);
        Box::new(Self { needs_new_area: true, ..log })
    }

    /// Returns the log of a connection that another process has served.
    pub(super) fn continued(
        held: HeldLog,
        origin: LogOrigin,
        read: u64,
        input: usize,
        output_end: u64,
    ) -> Box<Self> {
        Box::new(Self::new(held, origin, read, LoggedProgress { read, input, output: output_end }))
    }

    fn new(held: HeldLog, origin: LogOrigin, read: u64, logged: LoggedProgress) -> Self {
        Self {
            held,
            origin,
            read,
            logged,
            is_valid: true,
            needs_new_area: false,
            skipped_commits: 0,
            state_bytes: SHORT_LOG,
            is_catching_up: false,
            body_bytes: 0,
            flush_tokens: Vec::new(),
        }
    }

    /// Returns the memory of the log.
    pub(super) fn memory(&self) -> &Arc<KeptMemory> {
        self.held.log.memory()
    }

    /// Returns the serial number of the connection, and the number of bytes that were read.
    pub(super) fn serial_and_read(&self) -> (u64, u64) {
        (self.held.log.held_slot().serial, self.read)
    }

    /// Counts bytes that were read from the socket.
    pub(super) fn count_read(&mut self, bytes: usize) {
        self.read += bytes as u64;
    }

    /// Holds a token until the answers so far are in the log.
    pub(super) fn hold_until_commit(&mut self, token: FlushToken) {
        self.flush_tokens.push(token);
    }

    /// Makes the next commit write everything to another area. Until then the log stays as it is. The connection has input
    /// that a former process has read.
    pub(super) fn begin_to_catch_up(&mut self) {
        (self.needs_new_area, self.is_catching_up) = (true, true);
    }

    /// Makes the present state valid, if it differs from that in the log.
    pub(super) fn commit(&mut self, connection: ConnectionParts<'_>) {
        let ConnectionParts { calls, receiver, sender, unread_input, has_peer_goaway } = connection;
        let input = [receiver.incomplete_frame(), unread_input];
        let progress = LoggedProgress {
            read: self.read,
            input: input.iter().map(|part| part.len()).sum(),
            output: sender.output.offset_after_last_waiting_byte(),
        };
        let is_same =
            progress == self.logged && self.is_valid && !self.needs_new_area && calls.change_count() == 0;
        if is_same && !self.is_too_long(sender) {
            return self.release_flush_tokens(calls);
        }
        let streams = calls.loggable_count().map(|calls| calls + sender.streams_with_frames());
        let saved = if streams == Some(sender.stream_count()) { receiver.save() } else { None };
        let Some(receiver) = saved else {
            self.suspend(calls, sender);
            return self.release_flush_tokens(calls);
        };
        let turn = SavedTurn { receiver, sender: sender.save(), has_peer_goaway, read: self.read };
        if self.try_append(&turn, input, calls, sender) || self.write_new_area(&turn, input, calls, sender) {
            self.held.log.commit();
            (self.is_valid, self.needs_new_area, self.logged) = (true, false, progress);
            self.skipped_commits = 0;
        } else {
            self.withdraw();
        }
        if !calls.has_receiving_calls() {
            self.body_bytes = 0;
        }
        calls.clear_changes();
        sender.take_changes();
        self.release_flush_tokens(calls);
    }

    /// Says that all answers so far are in the log. Those to calls that a former process has read come only once this process
    /// has processed them.
    fn release_flush_tokens(&mut self, calls: &CallTable) {
        self.is_catching_up = self.is_catching_up && calls.has_calls_to_repeat();
        if !self.is_catching_up {
            self.flush_tokens.clear();
        }
    }

    /// Ends the wait of a snapshot for a connection that cannot process what a former process has read, because its peer takes no
    /// answers or its body gets no memory. If the process dies now, the connection ends.
    pub(super) fn stop_catching_up(&mut self) {
        if self.is_catching_up && !self.flush_tokens.is_empty() {
            self.withdraw();
            self.flush_tokens.clear();
        }
    }

    /// Makes the log invalid while the connection is in a state that the log cannot have. The changes are collected, unless they
    /// are many.
    fn suspend(&mut self, calls: &mut CallTable, sender: &mut Http2Sender) {
        if self.needs_new_area {
            self.withdraw();
        } else if self.is_valid {
            self.held.log.suspend();
            self.is_valid = false;
        }
        if calls.change_count().max(sender.change_count()) > CHANGES_MAX {
            calls.clear_changes();
            sender.take_changes();
            self.withdraw();
        }
    }

    /// Makes the log invalid, and the next commit write everything to another area.
    fn withdraw(&mut self) {
        self.held.log.withdraw();
        (self.is_valid, self.needs_new_area) = (false, true);
    }

    /// Returns whether the area is much longer than it has to be: after a large answer was sent.
    pub(super) fn is_too_long(&self, sender: &Http2Sender) -> bool {
        let area = self.held.log.area_bytes();
        area > LONG_AREA && area > 8 * (self.state_bytes + self.body_bytes + sender.unsent_bytes())
    }

    /// Appends what has changed; returns `false` if everything must be written to another area.
    fn try_append(
        &mut self,
        turn: &SavedTurn,
        input: [&[u8]; 2],
        calls: &mut CallTable,
        sender: &mut Http2Sender,
    ) -> bool {
        let first = sender.output.offset_of_first_waiting_byte();
        // While the log was suspended, output may have left that it does not have.
        let is_continuous = self.is_valid || self.logged.output >= first;
        if self.needs_new_area || !is_continuous || sender.changes_all_windows() || self.is_too_long(sender) {
            return false;
        }
        let changes = sender.take_changes();
        let log = &mut self.held.log;
        if !append_value(log, record::TURN, turn) {
            return false;
        }
        if input.iter().any(|part| !part.is_empty()) && !log.append(record::INPUT, &[], input.into_iter()) {
            return false;
        }
        // A call that began and ended within the turn is an end only, which the log passes over.
        let mut is_appended = true;
        calls.visit_changed_calls(|change| {
            is_appended = is_appended && append_change(log, &change, sender);
        });
        for stream in changes.queues {
            is_appended = is_appended && append_queue_change(log, stream, false, sender);
        }
        for stream in changes.windows {
            if let Some(state) = sender.save_stream(stream) {
                is_appended = is_appended && append_value(log, record::WINDOW, &(stream, state));
            }
        }
        let skipped = usize::try_from(self.logged.output.saturating_sub(first)).unwrap_or(usize::MAX);
        let has_output = self.logged.output < sender.output.offset_after_last_waiting_byte();
        is_appended && (!has_output || log.append(record::OUTPUT, &[], sender.output.waiting_parts(skipped)))
    }

    /// Writes everything to another area; returns `false` if there is no memory.
    fn write_new_area(
        &mut self,
        turn: &SavedTurn,
        input: [&[u8]; 2],
        calls: &mut CallTable,
        sender: &mut Http2Sender,
    ) -> bool {
        // Without memory, not every commit tries anew.
        if self.skipped_commits > 0 {
            self.skipped_commits -= 1;
            return false;
        }
        self.origin.output_offset = sender.output.offset_of_first_waiting_byte();
        let mut state_bytes = SHORT_LOG + input.iter().map(|part| part.len()).sum::<usize>();
        self.body_bytes = 0;
        calls.visit_all_calls(|change| match change {
            CallChange::Ended(_) => {}
            CallChange::Waiting(entry) => state_bytes += 48 + entry.form.key.len(),
            CallChange::Receiving(entry) => {
                state_bytes += 128 + entry.path.len();
                self.body_bytes += entry.body.iter().map(|part| part.len()).sum::<usize>();
            }
        });
        let queued = sender.queued_streams();
        let (origin, log) = (&self.origin, &mut self.held.log);
        // As much again is free for the records that follow, but not for output: most is taken at once.
        let bytes = 2 * (state_bytes + self.body_bytes) + sender.unsent_bytes();
        self.state_bytes = state_bytes;
        let is_written = write_new_area(log, bytes, |log| {
            let mut is_appended = append_value(log, record::ORIGIN, origin)
                && append_value(log, record::TURN, turn)
                && log.append(record::INPUT, &[], input.into_iter());
            calls.visit_all_calls(|change| {
                is_appended = is_appended && append_change(log, &change, sender);
            });
            for stream in &queued {
                is_appended = is_appended && append_queue_change(log, *stream, true, sender);
            }
            is_appended && log.append(record::OUTPUT, &[], sender.output.waiting_parts(0))
        });
        if !is_written {
            tracing::debug!(peer = %self.origin.peer, "there is no memory to keep a connection");
            self.skipped_commits = COMMITS_WITHOUT_MEMORY;
        }
        is_written
    }
}
