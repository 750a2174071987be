//! The calls of a connection for its log: counts, changes since the log was written, and calls that go on from a log.
//!
//! A log can have calls that wait for the driver, and requests whose bodies are arriving. Begin at
//! [`CallTable::visit_changed_calls`].

use std::sync::Arc;
use std::task::Waker;

use tokio::time::Instant;

use super::state::{CallDeadline, CallState, CallTable, ReceivingCall, Waiting};
use crate::coordination::{CallId, JobId};
use crate::grpc::decoded_call::ReplyFormat;
use crate::grpc::request_body::RequestBody;
use crate::grpc::request_meta::call_handler;
use crate::http2::{Http2Sender, StreamId};

/// A call that waits for the driver's answer.
pub(in crate::grpc) struct WaitingCallEntry<'a> {
    pub(in crate::grpc) stream: StreamId,
    pub(in crate::grpc) call: CallId,
    pub(in crate::grpc) job: JobId,
    pub(in crate::grpc) form: &'a ReplyFormat,
    pub(in crate::grpc) due: Option<Instant>,
}

/// A request whose body is arriving.
pub(in crate::grpc) struct ReceivingCallEntry<'a> {
    pub(in crate::grpc) stream: StreamId,
    pub(in crate::grpc) path: &'a str,
    pub(in crate::grpc) job: JobId,
    pub(in crate::grpc) due: Option<Instant>,
    pub(in crate::grpc) compresses: bool,
    /// Whether the peer has ended the request.
    pub(in crate::grpc) is_ended: bool,
    /// The number of received bytes that its stream's window does not have back.
    pub(in crate::grpc) unreleased: usize,
    /// The bytes that have arrived, but for those that the log has.
    pub(in crate::grpc) body: Vec<&'a [u8]>,
    /// The length of the whole body, as far as it is known.
    pub(in crate::grpc) whole_length: usize,
}

/// The change of a call.
pub(in crate::grpc) enum CallChange<'a> {
    /// The call of this stream has neither a request nor an answer to wait for.
    Ended(StreamId),
    Waiting(WaitingCallEntry<'a>),
    Receiving(ReceivingCallEntry<'a>),
}

/// The calls as the log of a kept connection has them.
#[derive(Default)]
pub(super) struct LoggedCalls {
    /// The number of calls that wait for the driver.
    waiting: usize,
    /// The number of requests whose bodies are arriving.
    receiving: usize,
    /// The number of them that the log cannot have.
    impossible: usize,
    /// The changes; `None`: the connection is not kept.
    changes: Option<Box<CallChanges>>,
}

#[derive(Default)]
struct CallChanges {
    /// The streams of the calls that have ended.
    ended: Vec<StreamId>,
    /// The slots of the others that have changed. A slot may be named several times.
    changed: Vec<u64>,
}

impl LoggedCalls {
    /// Records that the table has become empty.
    pub(super) fn forget_all(&mut self) {
        *self = Self::default();
    }

    fn record_change(&mut self, slot: u64) {
        if let Some(changes) = &mut self.changes
            && changes.changed.last() != Some(&slot)
        {
            changes.changed.push(slot);
        }
    }

    fn record_end(&mut self, stream: StreamId) {
        if let Some(changes) = &mut self.changes {
            changes.ended.push(stream);
        }
    }
}

impl Waiting {
    fn entry(&self) -> WaitingCallEntry<'_> {
        let Self { stream, call, job, form, due, .. } = self;
        WaitingCallEntry { stream: *stream, call: *call, job: *job, form, due: *due }
    }
}

impl ReceivingCall {
    /// Returns the entry for a log that has the first `skipped` bytes of the body.
    fn entry(&self, skipped: usize) -> Option<(ReceivingCallEntry<'_>, usize)> {
        let (parts, whole_length) = self.body.received_bytes()?;
        let length = parts.iter().map(|part| part.len()).sum();
        let mut skipped = skipped;
        let mut body = Vec::new();
        for part in parts {
            body.extend(part.get(skipped..).filter(|rest| !rest.is_empty()));
            skipped = skipped.saturating_sub(part.len());
        }
        let entry = ReceivingCallEntry {
            stream: self.stream,
            path: &self.path,
            job: self.job,
            due: self.due,
            compresses: self.body.compresses(),
            is_ended: self.body.is_ended(),
            unreleased: self.body.bytes_waiting_for_memory(),
            body,
            whole_length,
        };
        Some((entry, length))
    }
}

impl CallTable {
    // --- changes of state

    /// Stores a call that waits, and returns its slot.
    pub(super) fn insert_waiting_call(&mut self, waiting: Waiting) -> u64 {
        let slot = self.slots.insert(CallState::Waiting(waiting));
        self.logged.waiting += 1;
        self.logged.record_change(slot);
        slot
    }

    /// Removes a call that waits.
    pub(super) fn take_waiting_call(&mut self, slot: u64) -> Option<Waiting> {
        let Some(CallState::Waiting(_)) = self.slots.get_mut(slot) else { return None };
        let Some(CallState::Waiting(waiting)) = self.slots.remove(slot) else { return None };
        self.logged.waiting -= 1;
        self.logged.record_end(waiting.stream);
        Some(waiting)
    }

    /// Stores a request whose body is arriving, and returns its slot.
    pub(super) fn insert_receiving_call(&mut self, arriving: Box<ReceivingCall>) -> u64 {
        let slot = self.slots.insert(CallState::Receiving(arriving));
        self.logged.receiving += 1;
        self.logged.record_change(slot);
        slot
    }

    /// Removes a request whose body is arriving.
    pub(super) fn take_receiving_call(&mut self, slot: u64) -> Option<Box<ReceivingCall>> {
        let Some(CallState::Receiving(_)) = self.slots.get_mut(slot) else { return None };
        let Some(CallState::Receiving(arriving)) = self.slots.remove(slot) else { return None };
        self.logged.receiving -= 1;
        self.logged.impossible -= usize::from(arriving.log.is_impossible);
        self.logged.record_end(arriving.stream);
        Some(arriving)
    }

    /// Records that the body in this slot has changed.
    pub(super) fn record_body_change(&mut self, slot: u64) {
        self.logged.record_change(slot);
    }

    // --- the log

    /// Records changes from now on.
    pub(in crate::grpc) fn watch_changes(&mut self) {
        self.logged.changes = Some(Box::default());
    }

    /// Returns whether calls have changed.
    pub(in crate::grpc) fn has_changes(&self) -> bool {
        self.logged
            .changes
            .as_ref()
            .is_some_and(|changes| !changes.changed.is_empty() || !changes.ended.is_empty())
    }

    /// Returns whether bodies are arriving.
    pub(in crate::grpc) fn has_receiving_calls(&self) -> bool {
        self.logged.receiving > 0
    }

    pub(in crate::grpc) fn clear_changes(&mut self) {
        if let Some(changes) = &mut self.logged.changes {
            changes.ended.clear();
            changes.changed.clear();
        }
    }

    /// Returns the number of calls, if the log can have all of them.
    pub(in crate::grpc) fn loggable_count(&mut self) -> Option<usize> {
        let changed =
            self.logged.changes.as_ref().map(|changes| changes.changed.as_slice()).unwrap_or_default();
        for slot in changed {
            if let Some(CallState::Receiving(arriving)) = self.slots.get_mut(*slot)
                && !arriving.log.is_impossible
                && arriving.body.received_bytes().is_none()
            {
                arriving.log.is_impossible = true;
                self.logged.impossible += 1;
            }
        }
        let count = self.logged.waiting + self.logged.receiving;
        (self.logged.impossible == 0 && count == self.slots.len()).then_some(count)
    }

    /// Calls `visit` with each change, ends first, and takes the log to have them then.
    pub(in crate::grpc) fn visit_changed_calls(&mut self, mut visit: impl FnMut(CallChange<'_>)) {
        let Some(changes) = &self.logged.changes else { return };
        changes.ended.iter().for_each(|stream| visit(CallChange::Ended(*stream)));
        for slot in &changes.changed {
            match self.slots.get_mut(*slot) {
                Some(CallState::Waiting(waiting)) => visit(CallChange::Waiting(waiting.entry())),
                Some(CallState::Receiving(arriving)) => {
                    if let Some((entry, length)) = arriving.entry(arriving.log.bytes) {
                        visit(CallChange::Receiving(entry));
                        arriving.log.bytes = length;
                    }
                }
                _ => {}
            }
        }
    }

    /// Calls `visit` with each call, and takes the log to have them then.
    pub(in crate::grpc) fn visit_all_calls(&mut self, mut visit: impl FnMut(CallChange<'_>)) {
        for entry in self.slots.iter_mut() {
            match entry {
                CallState::Waiting(waiting) => visit(CallChange::Waiting(waiting.entry())),
                CallState::Receiving(arriving) => {
                    if let Some((entry, length)) = arriving.entry(0) {
                        visit(CallChange::Receiving(entry));
                        arriving.log.bytes = length;
                    }
                }
                CallState::Deferred(_) | CallState::Auxiliary(_) => {}
            }
        }
    }

    // --- going on from a log

    /// Stores a call that has waited in a former process.
    pub(in crate::grpc) fn continue_waiting_call(
        &mut self,
        sender: &mut Http2Sender,
        entry: &WaitingCallEntry<'_>,
    ) {
        let WaitingCallEntry { stream, call, job, form, due } = *entry;
        let (trace, since) = (None, self.turn_start());
        let waiting = Waiting { call, job, form: form.clone(), stream, trace, since, charged: 0, due };
        let slot = self.insert_waiting_call(waiting);
        sender.assign_slot(stream, slot);
        if let Some(due) = due {
            self.deadlines.add(due, slot);
        }
        if let Some(outcome) = self.server.engine.continue_waiting_call(call, &self.inbox, slot) {
            self.inbox.deliver(slot, outcome);
        }
    }

    /// Stores a request whose body has begun to arrive in a former process.
    ///
    /// # Errors
    /// In words, if this process does not take it.
    pub(in crate::grpc) fn continue_receiving_call(
        &mut self,
        sender: &mut Http2Sender,
        entry: &ReceivingCallEntry<'_>,
    ) -> Result<(), String> {
        let callee = call_handler(entry.path).ok_or("the method of a request is unknown")?;
        let mut body = RequestBody::new(entry.compresses);
        let (bytes, most) = (entry.body.concat(), self.server.limits.message_bytes);
        body.receive_data(&bytes, entry.is_ended, &mut self.quota, &self.server.sets, most)
            .map_err(|failure| failure.message.clone())?;
        // The windows have got back what was consumed then.
        let consumed = body.take_consumed_bytes();
        sender.release_stream_window(entry.stream, consumed.saturating_sub(bytes.len() - entry.unreleased));
        let (due, since) = (CallDeadline::At(entry.due), self.turn_start());
        let path = Arc::from(entry.path);
        self.store_receiving_call(sender, body, callee, path, entry.job, entry.stream, due, None, since);
        Ok(())
    }

    /// Returns a waker for a body that has no slot yet.
    pub(super) fn waker_of_next_slot(&self) -> Waker {
        crate::grpc::mailbox::slot_waker(&self.mailbox, self.slots.next_key())
    }
}
