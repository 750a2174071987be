//! The calls of a connection for its log, and calls that go on from a log. Begin at [`CallTable::visit_changed_calls`].

use std::sync::Arc;

use super::logged_calls::{CallChange, ReceivingCallEntry, WaitingCallEntry};
use super::state::{CallDeadline, CallState, CallTable, ReceivingCall, Waiting};
use crate::grpc::request_body::RequestBody;
use crate::grpc::request_meta::call_handler;
use crate::http2::Http2Sender;

impl Waiting {
    fn entry(&self) -> WaitingCallEntry<'_> {
        let Self { stream, call, job, form, due, .. } = self;
        WaitingCallEntry { stream: *stream, call: *call, job: *job, form, due: *due }
    }
}

impl ReceivingCall {
    /// Returns the entry with the bytes of the body that the log does not have, and the number of all bytes.
    fn entry(&self) -> Option<(ReceivingCallEntry<'_>, usize)> {
        let parts = self.body.received_bytes()?;
        let length = parts.iter().map(|part| part.len()).sum();
        let mut skipped = self.log.bytes;
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
        };
        Some((entry, length))
    }
}

impl CallState {
    /// Calls `visit` with what the log does not have of a call, and takes the log to have it then.
    fn visit(&mut self, visit: &mut impl FnMut(CallChange<'_>)) {
        match self {
            Self::Waiting(waiting) => visit(CallChange::Waiting(waiting.entry())),
            Self::Receiving(arriving) => {
                if let Some((entry, length)) = arriving.entry() {
                    visit(CallChange::Receiving(entry));
                    arriving.log.bytes = length;
                }
            }
            Self::Deferred(_) | Self::Auxiliary(_) => {}
        }
    }
}

impl CallTable {
    // --- the log

    /// Records changes from now on.
    pub(in crate::grpc) fn watch_changes(&mut self) {
        self.logged.changes = Some(Box::default());
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
                && !arriving.log.is_unloggable
                && arriving.body.received_bytes().is_none()
            {
                arriving.log.is_unloggable = true;
                self.logged.unloggable += 1;
            }
        }
        let count = self.logged.waiting + self.logged.receiving;
        (self.logged.unloggable == 0 && count == self.slots.len()).then_some(count)
    }

    /// Calls `visit` with each change, ends first, and takes the log to have them then.
    pub(in crate::grpc) fn visit_changed_calls(&mut self, mut visit: impl FnMut(CallChange<'_>)) {
        let Some(changes) = &self.logged.changes else { return };
        changes.ended.iter().for_each(|stream| visit(CallChange::Ended(*stream)));
        for slot in &changes.changed {
            if let Some(call) = self.slots.get_mut(*slot) {
                call.visit(&mut visit);
            }
        }
    }

    /// Calls `visit` with each call, and takes the log to have them then.
    pub(in crate::grpc) fn visit_all_calls(&mut self, mut visit: impl FnMut(CallChange<'_>)) {
        for call in self.slots.iter_mut() {
            if let CallState::Receiving(arriving) = call {
                arriving.log.bytes = 0;
            }
            call.visit(&mut visit);
        }
    }

    /// Returns whether requests will be processed again that a former process has made calls of.
    pub(in crate::grpc) fn has_calls_to_repeat(&self) -> bool {
        self.server.engine.has_calls_to_repeat(self.id)
    }

    /// Returns the number of changes.
    pub(in crate::grpc) fn change_count(&self) -> usize {
        self.logged.changes.as_ref().map_or(0, |changes| changes.changed.len() + changes.ended.len())
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
        if let Some(outcome) = self.server.engine.continue_waiting_call(job, self.id, call, &self.inbox, slot)
        {
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
}
