//! One client connection: a tokio task that processes HTTP/2, the deadlines of the connection, and its mailbox.
//!
//! The calls of the connection are in `call_table.rs`. Begin at `GrpcConnection::poll`, then
//! `GrpcConnection::run_turn`.
//!
//! - *A turn.* When the body of a call is complete, one turn decodes the call, passes it to the driver, and answers
//!   it if the answer is known at once. After each read, one write sends all answers that are ready. The work that
//!   the peer causes is counted in steps. After about two thousand steps, the connection reads the clock for the
//!   first time. The turn ends when a later reading is more than 250 microseconds after the first one. The task then
//!   yields, so that other connections are served.
//! - *Memory.* An idle connection holds no buffer. Each thread has a buffer for input and a buffer for output,
//!   which its connections use one after another. A connection keeps the output buffer after its turn only while
//!   the socket does not accept all of the output. A large body is read directly into its own memory.
//! - *Deadlines.* Every wait for the peer has a deadline. The connection waits for SETTINGS, for the rest of a
//!   frame, for bodies, and for the peer to read its answers. The deadlines of incomplete DATA frames and of unread
//!   answers are long (10 minutes), because a process that is only stopped may continue later.
//! - *Silence.* After a large answer, `TCP_USER_TIMEOUT` is switched off until the peer sends again and all output
//!   is sent. The kernel cannot distinguish a host that has vanished from a stopped process whose receive buffer is
//!   full. If the timeout stayed on, the kernel would end the connection of a process that may continue later.
//! - *The end.* A peer that violates the protocol receives GOAWAY with the reason. The socket is closed only after
//!   the peer has had time to read the reason (`lingering_close.rs`).

use std::io;
use std::net::SocketAddr;
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use bytes::BufMut as _;
use tokio::io::{AsyncReadExt as _, ReadBuf};

use super::call_table::{
    BEGUN_DATA_DEADLINE, CallTable, ExpiredDeadlines, PARTIAL_FRAME_DEADLINE, UNTAKEN_OUTPUT_DEADLINE,
};
use super::connection_settings::announced_settings;
use super::connection_socket::{ConnectionSocket, connection_end_from_socket_error};
use super::job_resolver::ListenerJobRule;
use super::kept_log::{ConnectionParts, KeptGreeting, KeptLog};
use super::lingering_close::LingeringClose;
use super::mailbox::{Mailbox, MailboxMessage};
use super::open_connections::ConnectionGuard;
use super::peer_progress::{OutputSnapshot, PeerProgressSnapshot, UnfinishedInput};
use super::request_meta::RequestMeta;
use super::server::GrpcServer;
use super::thread_buffers::with_thread_buffers;
use crate::coordination::ConnectionEnd;
use crate::http2::{
    ConnectionError, ErrorCode, HeaderBlockCache, Http2Receiver, Http2Sender, IncompleteInput, PREFACE,
    ReceiveEvent, StreamId,
};

mod continued;

/// The number of bytes read in one turn before other connections get theirs.
const READ_PER_TURN: usize = 512 << 10;
/// The number of expected bytes from which on a body is read directly into its buffer.
const DIRECT_READ_MIN: usize = 16 << 10;
/// The number of messages processed before other connections get their turn.
const MESSAGES_PER_TURN: usize = 1 << 10;
/// The size of a connection's buffers up to which they are not charged to its budget.
const UNCHARGED_BUFFERS: usize = 32 << 10;

/// A request whose body has not begun.
struct NewRequest {
    stream: StreamId,
    head: Arc<RequestMeta>,
}

/// One client connection. Its log is the first field, so that it is dropped first: no other process continues a connection
/// whose end the state machine knows. Its calls are the second: the state machine learns at once of a connection that ended.
pub(super) struct GrpcConnection<T> {
    /// The log by which the next process continues the connection; `None`: the connection ends with this process.
    kept: Option<Box<KeptLog>>,
    calls: CallTable,
    socket: T,
    receiver: Http2Receiver,
    sender: Http2Sender,
    /// The received bytes that are not counted yet.
    received: u64,
    /// The bytes that were read and not processed.
    unread_input: Vec<u8>,
    /// The latest request, if its body may follow in the same input.
    new_request: Option<NewRequest>,
    /// Whether the peer has announced that it sends no further requests.
    has_peer_goaway: bool,
    mailbox: Arc<Mailbox>,
    /// The messages that were taken from the mailbox and not processed yet.
    messages: std::vec::IntoIter<MailboxMessage>,
    /// Whether the timeout for unacknowledged data is off.
    is_user_timeout_off: bool,
    /// The progress for which deadlines of the peer are set.
    watched: Option<Box<PeerProgressSnapshot>>,
    /// The number of sent bytes.
    sent: u64,
    /// The bytes of buffers that are charged to the budget.
    charged: usize,
    /// Whether nothing is read from the peer until it has taken its answers.
    declines: bool,
    /// The closing state of a connection whose peer is told the reason.
    lingering: Option<Box<LingeringClose>>,
    _place: ConnectionGuard,
}

/// The result of one turn of driving HTTP/2.
enum TurnOutcome {
    /// The connection waits.
    Idle,
    /// More work is ready.
    More,
    /// The connection has ended.
    Over(ConnectionEnd),
    /// The peer has violated the protocol or a bound.
    Broken(ConnectionError),
}

impl<T: ConnectionSocket> Future for GrpcConnection<T> {
    type Output = ();

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<()> {
        let this = self.get_mut();
        if this.lingering.is_some() {
            return this.poll_lingering_close(cx);
        }
        this.calls.begin_turn();
        this.sender.begin_turn();
        loop {
            if let Some(ending) = this.process_mailbox() {
                return this.end_connection(ending, cx);
            }
            let driven = this.run_turn(cx);
            let sent = this.sender.output.take_sent_bytes();
            this.sent += sent;
            this.calls.count_bytes(std::mem::take(&mut this.received), sent);
            match driven {
                TurnOutcome::Idle => match this.charge_buffers().and_then(|()| this.check_deadlines(cx)) {
                    Err(fault) => return this.close_with_fault(fault, cx),
                    Ok(true) => continue,
                    Ok(false) => {}
                },
                // A connection that is never idle has deadlines too.
                TurnOutcome::More => match this.check_deadlines(cx) {
                    Err(fault) => return this.close_with_fault(fault, cx),
                    Ok(_) => return yield_turn(cx),
                },
                TurnOutcome::Over(ending) => return this.end_connection(ending, cx),
                TurnOutcome::Broken(fault) => return this.close_with_fault(fault, cx),
            }
            if this.messages.len() > 0 {
                continue;
            }
            if let Some(kept) = &mut this.kept {
                kept.stop_catching_up();
            }
            if this.mailbox.try_sleep(cx.waker()) {
                return Poll::Pending;
            }
        }
    }
}

/// Yields to other tasks and lets the runtime poll for their input. Waking the task directly would run it
/// before both.
fn yield_turn(cx: &mut Context<'_>) -> Poll<()> {
    let polled = pin!(tokio::task::yield_now()).poll(cx);
    if polled.is_ready() {
        cx.waker().wake_by_ref();
    }
    Poll::Pending
}

impl<T: ConnectionSocket> GrpcConnection<T> {
    pub(super) fn open(
        server: Arc<GrpcServer>,
        socket: T,
        mut early: Vec<u8>,
        peer: SocketAddr,
        routing: ListenerJobRule,
        place: ConnectionGuard,
        greeting: Option<KeptGreeting>,
    ) -> Self {
        let (settings, pool) = (announced_settings(&server.limits), Arc::clone(&server.state));
        let received = early.len() as u64;
        early.drain(..PREFACE.len());
        let mut calls = CallTable::open(server, peer, routing, Arc::clone(place.mailbox()));
        let (receiver, mut sender) = (Http2Receiver::default(), Http2Sender::new(settings, pool));
        let kept = greeting.map(|greeting| KeptLog::open(greeting, calls.connection_id(), peer, received));
        if kept.is_some() {
            calls.watch_changes();
            sender.watch_changes();
        }
        Self {
            received,
            unread_input: early,
            kept,
            ..Self::with_parts(calls, socket, receiver, sender, place)
        }
    }

    fn with_parts(
        calls: CallTable,
        socket: T,
        receiver: Http2Receiver,
        sender: Http2Sender,
        place: ConnectionGuard,
    ) -> Self {
        Self {
            calls,
            socket,
            receiver,
            sender,
            received: 0,
            unread_input: Vec::new(),
            new_request: None,
            has_peer_goaway: false,
            mailbox: Arc::clone(place.mailbox()),
            messages: Vec::new().into_iter(),
            is_user_timeout_off: false,
            watched: None,
            sent: 0,
            charged: 0,
            declines: false,
            lingering: None,
            kept: None,
            _place: place,
        }
    }

    fn end_connection(&mut self, ending: ConnectionEnd, cx: &mut Context<'_>) -> Poll<()> {
        if self.kept.take().is_some() {
            // The keeper's descriptor would keep the connection open.
            self.socket.shut_down();
        }
        self.calls.record_connection_end(ending);
        self.socket.send_close_notify(cx);
        Poll::Ready(())
    }

    /// Ends a connection whose peer is told the reason.
    fn close_with_fault(&mut self, fault: ConnectionError, cx: &mut Context<'_>) -> Poll<()> {
        self.sender.send_goaway(fault);
        self.kept = None;
        self.calls.close_and_report_connection_end(ConnectionEnd::Broken(fault.to_string()));
        self.lingering = Some(Box::new(LingeringClose::begin()));
        self.poll_lingering_close(cx)
    }

    fn poll_lingering_close(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        let Some(lingering) = &mut self.lingering else { return Poll::Ready(()) };
        let polled = lingering.poll_close(cx, &mut self.socket, &mut self.sender.output, &mut self.received);
        self.calls.count_bytes(std::mem::take(&mut self.received), self.sender.output.take_sent_bytes());
        polled
    }

    fn process_mailbox(&mut self) -> Option<ConnectionEnd> {
        if self.messages.len() == 0 {
            self.messages = self.mailbox.take_messages().into_iter();
        }
        let sender = &mut self.sender;
        for note in self.messages.by_ref().take(MESSAGES_PER_TURN) {
            match note {
                MailboxMessage::Answer(slot, outcome) => {
                    self.calls.send_waiting_answer(sender, slot, &outcome)
                }
                MailboxMessage::SlotReady(slot) => self.calls.poll_slot(sender, slot),
                MailboxMessage::Flush(token) => {
                    if let Some(kept) = &mut self.kept {
                        kept.hold_until_commit(token);
                    }
                }
                MailboxMessage::Stop => sender.begin_shutdown(),
                MailboxMessage::Abort => return Some(ConnectionEnd::Broken("the server closed it".into())),
            }
        }
        None
    }

    /// Processes passed deadlines, and sets those for incomplete input and output; returns whether more work
    /// is ready.
    fn check_deadlines(&mut self, cx: &mut Context<'_>) -> Result<bool, ConnectionError> {
        self.set_deadlines();
        match self.calls.expire_deadlines(cx, &mut self.sender) {
            ExpiredDeadlines::Nothing => return Ok(false),
            ExpiredDeadlines::Calls => {}
            ExpiredDeadlines::Connection(key @ (PARTIAL_FRAME_DEADLINE | BEGUN_DATA_DEADLINE)) => {
                let watched = self.watched.get_or_insert_default();
                watched.set_reading_paused(self.declines);
                let watched =
                    if key == PARTIAL_FRAME_DEADLINE { &mut watched.input } else { &mut watched.passing };
                if let Some(was) = watched.take()
                    && self.receiver.incomplete_input() == Some(was.what)
                {
                    if was.declined.is_zero() {
                        return Err(ConnectionError::new(
                            ErrorCode::EnhanceYourCalm,
                            was.what.0.timeout_violation(),
                        ));
                    }
                    // The peer gets back the time during which this server did not read.
                    *watched = Some(UnfinishedInput { declined: Duration::ZERO, ..was });
                    self.calls.add_connection_deadline(key, was.declined);
                }
            }
            ExpiredDeadlines::Connection(_) => {
                if let Some(was) = self.watched.get_or_insert_default().output.take()
                    && was.has_stalled_until(&self.output_snapshot())
                {
                    return Err(ConnectionError::new(
                        ErrorCode::EnhanceYourCalm,
                        "answers were not taken in time",
                    ));
                }
            }
        }
        Ok(true)
    }

    /// Sets a deadline for every wait for the peer.
    fn set_deadlines(&mut self) {
        if let Some(unfinished) = self.receiver.incomplete_input() {
            let limits = self.calls.limits();
            let watched = self.watched.get_or_insert_default();
            let (key, watched, within) = match unfinished.0 {
                IncompleteInput::Settings | IncompleteInput::Frame => {
                    (PARTIAL_FRAME_DEADLINE, &mut watched.input, limits.handshake)
                }
                IncompleteInput::UnbufferedFrame => {
                    (BEGUN_DATA_DEADLINE, &mut watched.passing, limits.unread)
                }
            };
            if watched.is_none() {
                *watched = Some(UnfinishedInput { what: unfinished, declined: Duration::ZERO });
                self.calls.add_connection_deadline(key, within);
            }
        }
        if let Some(watched) = &mut self.watched {
            watched.set_reading_paused(self.declines);
        }
        if self.sender.unsent_bytes() > 0
            && self.watched.as_ref().is_none_or(|watched| watched.output.is_none())
        {
            let untaken = self.output_snapshot();
            self.watched.get_or_insert_default().output = Some(untaken);
            let within = self.calls.limits().unread;
            self.calls.add_connection_deadline(UNTAKEN_OUTPUT_DEADLINE, within);
        }
    }

    fn output_snapshot(&self) -> OutputSnapshot {
        let (waiting, gone) = self.sender.waiting_and_sent_data_bytes();
        OutputSnapshot { data: (waiting as u64, gone), bytes: (self.sender.output.len() as u64, self.sent) }
    }

    /// Charges the buffers that the connection keeps while it sleeps.
    fn charge_buffers(&mut self) -> Result<(), ConnectionError> {
        let held = (self.sender.output.waiting_copied_bytes() + self.unread_input.len())
            .saturating_sub(UNCHARGED_BUFFERS);
        if held > self.charged {
            let more = self.sender.budget.charge(held - self.charged);
            more.map_err(|_| {
                ConnectionError::new(ErrorCode::EnhanceYourCalm, "no memory is left for what is not taken")
            })?;
        } else if held < self.charged {
            self.sender.budget.release(self.charged - held);
        }
        self.charged = held;
        Ok(())
    }

    /// Returns whether the turn has lasted so long that other connections should have theirs.
    fn is_turn_over(&mut self) -> bool {
        end_turn_if_too_long(&mut self.sender, &mut self.calls);
        self.sender.is_turn_over()
    }

    /// Processes input and sends output until the connection waits or the turn ends.
    fn run_turn(&mut self, cx: &mut Context<'_>) -> TurnOutcome {
        let mut read = 0;
        self.declines = false;
        loop {
            let blocked = match self.send_output(cx) {
                Ok(blocked) => blocked,
                Err(error) => return TurnOutcome::Over(connection_end_from_socket_error(&error)),
            };
            self.adjust_tcp_user_timeout(read > 0);
            let idle = self.sender.stream_count() == 0 && self.sender.output.is_empty() && !blocked;
            if idle && (self.has_peer_goaway || self.sender.is_shut_down()) {
                return TurnOutcome::Over(ConnectionEnd::Closed);
            }
            if read >= READ_PER_TURN || self.is_turn_over() {
                return TurnOutcome::More;
            }
            if !blocked && (!self.sender.output.is_empty() || self.has_deferred_work()) {
                continue;
            }
            // Nothing is read from a peer that does not take its answers.
            self.declines =
                blocked && (self.calls.is_backpressured(&self.sender) || !self.unread_input.is_empty());
            if self.declines {
                return TurnOutcome::Idle;
            }
            if self.unread_input.is_empty()
                && self.receiver.has_pending_event()
                && !self.sender.should_yield()
            {
                match self.process_pending_event() {
                    Ok(()) => continue,
                    Err(fault) => return TurnOutcome::Broken(fault),
                }
            }
            match self.read_input(cx) {
                Poll::Pending => return TurnOutcome::Idle,
                Poll::Ready(Ok(Ok(0))) => return TurnOutcome::Over(ConnectionEnd::Closed),
                Poll::Ready(Ok(Ok(bytes))) => read += bytes,
                Poll::Ready(Ok(Err(fault))) => return TurnOutcome::Broken(fault),
                Poll::Ready(Err(error)) => {
                    return TurnOutcome::Over(connection_end_from_socket_error(&error));
                }
            }
            if self.sender.may_exceed_abuse_limit()
                && let Err(fault) = self.sender.check_abuse(self.calls.server_uptime())
            {
                return TurnOutcome::Broken(fault);
            }
        }
    }

    /// Sends output, and continues deferred work; returns whether the socket accepts no more.
    fn send_output(&mut self, cx: &mut Context<'_>) -> io::Result<bool> {
        self.sender.end_batch();
        self.commit_log();
        let blocked = self.sender.output.poll_send(cx, &mut self.socket);
        if let Poll::Ready(Err(error)) = blocked {
            return Err(error);
        }
        if self.kept.as_ref().is_some_and(|kept| kept.is_too_long(&self.sender)) {
            self.commit_log();
        }
        self.sender.release_sent_answers();
        self.calls.resume_deferred(&mut self.sender);
        self.sender.resume_sending();
        Ok(blocked.is_pending())
    }

    /// Makes the next process able to continue from the present state, before anything of it leaves.
    fn commit_log(&mut self) {
        if let Some(kept) = &mut self.kept {
            kept.commit(ConnectionParts {
                calls: &mut self.calls,
                receiver: &self.receiver,
                sender: &mut self.sender,
                unread_input: &self.unread_input,
                has_peer_goaway: self.has_peer_goaway,
            });
        }
    }

    /// Returns whether deferred work can continue.
    fn has_deferred_work(&self) -> bool {
        self.sender.can_resume_sending() || self.calls.can_resume_deferred(&self.sender)
    }

    /// Processes the event that needs no further input.
    fn process_pending_event(&mut self) -> Result<(), ConnectionError> {
        with_thread_buffers(|buffers| self.process_input(&[], &mut buffers.headers))
    }

    /// Reads once and processes the input; returns the number of bytes, or how the connection ended.
    fn read_input(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<Result<usize, ConnectionError>>> {
        if self.kept.is_some() && self.unread_input.is_empty() {
            return self.read_kept_input(cx);
        }
        if self.unread_input.is_empty()
            && let Some((stream, left)) =
                self.receiver.expected_data().filter(|(_, left)| *left >= DIRECT_READ_MIN)
            && let Some((body, room)) = self.calls.body_buffer(&self.sender, stream)
            && room > 0
        {
            let mut room = body.limit(room.min(left));
            let bytes = ready!(pin!(self.socket.read_buf(&mut room)).poll(cx))?;
            self.received += bytes as u64;
            self.receiver.consume_expected_data(bytes, &mut self.sender);
            self.calls.record_body_bytes_read(&mut self.sender, stream, bytes);
            return Poll::Ready(Ok(self.process_pending_event().map(|()| bytes)));
        }
        let early = std::mem::take(&mut self.unread_input);
        with_thread_buffers(|buffers| {
            let headers = &mut buffers.headers;
            if !early.is_empty() {
                return Poll::Ready(Ok(self.process_input(&early, headers).map(|()| early.len())));
            }
            let mut room = ReadBuf::new(&mut buffers.room);
            ready!(Pin::new(&mut self.socket).poll_read(cx, &mut room))?;
            let input = room.filled();
            self.received += input.len() as u64;
            Poll::Ready(Ok(self.process_input(input, headers).map(|()| input.len())))
        })
    }

    /// Does what [`Self::read_input`] does for a kept connection: reads to memory that outlives this process.
    fn read_kept_input(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<Result<usize, ConnectionError>>> {
        with_thread_buffers(|buffers| {
            let Some(kept) = &mut self.kept else { return Poll::Pending };
            let (serial, read) = kept.serial_and_read();
            let (kept_room, room, headers) = buffers.split(kept.memory());
            // If too many threads have a room, input read before the next commit is missing if the process dies.
            let room = match kept_room {
                Some(kept_room) => kept_room.claim(serial, read),
                None => room,
            };
            let mut room = ReadBuf::new(room);
            let polled = Pin::new(&mut self.socket).poll_read(cx, &mut room);
            let input = room.filled();
            kept.count_read(input.len());
            self.received += input.len() as u64;
            let processed = match polled {
                Poll::Ready(Ok(())) => {
                    Poll::Ready(Ok(self.process_input(input, headers).map(|()| input.len())))
                }
                Poll::Ready(Err(error)) => Poll::Ready(Err(error)),
                Poll::Pending => Poll::Pending,
            };
            // Before the room is marked as unowned, the log has what is left of its bytes. The log of a connection whose peer
            // violates the protocol stays as it is.
            if !matches!(processed, Poll::Ready(Ok(Err(_)))) {
                self.commit_log();
            }
            buffers.release_kept_room();
            processed
        })
    }

    /// Processes input.
    fn process_input(
        &mut self,
        mut input: &[u8],
        cache: &mut HeaderBlockCache<RequestMeta>,
    ) -> Result<(), ConnectionError> {
        let (calls, sender) = (&mut self.calls, &mut self.sender);
        while let Some(event) = self.receiver.next_event(&mut input, sender, cache)? {
            if let Some(NewRequest { stream, head }) = self.new_request.take() {
                // Most requests arrive complete in one input.
                if let ReceiveEvent::Data { stream: of, bytes, ended } = event
                    && of == stream
                {
                    calls.accept_request(sender, stream, head, bytes, ended);
                    continue;
                }
                if !matches!(event, ReceiveEvent::Reset { stream: of, .. } if of == stream) {
                    calls.accept_request(sender, stream, head, &[], false);
                }
            }
            match event {
                ReceiveEvent::Request { stream, head, ended: false } => {
                    self.new_request = Some(NewRequest { stream, head })
                }
                ReceiveEvent::Request { stream, head, ended: true } => {
                    calls.accept_request(sender, stream, head, &[], true)
                }
                ReceiveEvent::Data { stream, bytes, ended } => calls.on_data(sender, stream, bytes, ended),
                ReceiveEvent::Reset { slot: Some(slot), .. } => calls.on_stream_reset(sender, slot),
                ReceiveEvent::Reset { slot: None, .. } => {}
                ReceiveEvent::GoAway => self.has_peer_goaway = true,
            }
            end_turn_if_too_long(sender, calls);
        }
        if let Some(NewRequest { stream, head }) = self.new_request.take() {
            calls.accept_request(sender, stream, head, &[], false);
        }
        self.unread_input = input.to_vec();
        Ok(())
    }

    /// Adjusts the timeout for unacknowledged data. To the kernel, a stopped process whose host has no more
    /// room for it looks like a vanished host. So after a large answer the timeout is off until the peer
    /// sends again and all output is sent.
    fn adjust_tcp_user_timeout(&mut self, heard: bool) {
        if self.sender.take_large_answer_sent() {
            if !self.is_user_timeout_off {
                self.is_user_timeout_off = true;
                self.socket.set_tcp_user_timeout(None);
            }
        } else if self.is_user_timeout_off && heard && self.sender.unsent_bytes() == 0 {
            self.is_user_timeout_off = false;
            self.socket.set_tcp_user_timeout(Some(self.calls.unacknowledged_timeout()));
        }
    }
}

/// Ends the turn if the clock is to be checked, and other connections should have their turn.
fn end_turn_if_too_long(sender: &mut Http2Sender, calls: &mut CallTable) {
    if sender.is_clock_check_due() && calls.is_turn_over() {
        sender.end_turn();
    }
}
