//! Handles the requests of one connection whose bodies are still arriving: their memory, windows and deadlines. This
//! module also handles data and resets of every other request that has a slot, and the wake-ups of slots.
//!
//! `engine_calls.rs` passes a request to the driver once its body is complete. Begin at `CallTable::on_data`.

use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use tokio::time::Instant;

use super::state::{
    ANSWER_WORK, AUXILIARY_BYTES, BYTES_PER_STEP, CallDeadline, CallState, CallTable, LoggedBody,
    PendingTrace, ReceivingCall, deadline_exceeded_failure, over_budget_failure,
};
use crate::coordination::{Code, Failure, JobId};
use crate::grpc::mailbox::slot_waker;
use crate::grpc::request_body::{self, RequestBody};
use crate::grpc::request_meta::CallHandler;
use crate::http2::{Http2Sender, StreamId};
use crate::meter::Moment;

impl CallTable {
    #[expect(clippy::too_many_arguments, reason = "what a request is made of")]
    pub(super) fn store_receiving_call(
        &mut self,
        sender: &mut Http2Sender,
        body: RequestBody,
        callee: CallHandler,
        path: Arc<str>,
        job: JobId,
        stream: StreamId,
        due: CallDeadline,
        trace: PendingTrace,
        since: Moment,
    ) {
        let waker = slot_waker(&self.mailbox, self.slots.next_key());
        let due = due.instant();
        let stall = Instant::now() + self.server.limits.body_stall;
        let (parked, charged) = (false, body.bytes_waiting_for_memory());
        if let Err(over) = sender.budget.charge(charged) {
            return self.refuse_call(sender, stream, &over_budget_failure(over));
        }
        let check = due.map_or(stall, |due| due.min(stall));
        let arriving = Box::new(ReceivingCall {
            body,
            callee,
            job,
            stream,
            due,
            stall,
            check,
            waker,
            deferred: parked,
            is_whole: false,
            trace,
            since,
            charged,
            path,
            log: LoggedBody::default(),
        });
        let slot = self.insert_receiving_call(arriving);
        sender.assign_slot(stream, slot);
        self.deadlines.add(check, slot);
        self.poll_slot(sender, slot);
    }

    /// Receives more of the body of a request.
    pub(in crate::grpc) fn on_data(
        &mut self,
        sender: &mut Http2Sender,
        stream: StreamId,
        bytes: &[u8],
        ended: bool,
    ) {
        let slot = sender.slot_of_stream(stream);
        let Some((slot, entry)) = slot.and_then(|slot| Some((slot, self.slots.get_mut(slot)?))) else {
            return sender.release_windows(stream, bytes.len());
        };
        sender.count_work(bytes.len() / BYTES_PER_STEP);
        match entry {
            // Data after the end of a request does not reach this point.
            CallState::Waiting(_) => sender.release_windows(stream, bytes.len()),
            CallState::Deferred(parked) => {
                // The buffer grows by doubling.
                let charged = 2 * bytes.len();
                if let Err(over) = sender.budget.charge(charged) {
                    self.on_stream_reset(sender, slot);
                    sender.release_connection_window(bytes.len());
                    return self.refuse_call(sender, stream, &over_budget_failure(over));
                }
                parked.charged += charged;
                parked.bytes.extend_from_slice(bytes);
                parked.ended |= ended;
            }
            CallState::Auxiliary(call) => {
                sender.release_windows(stream, bytes.len());
                call.push_request_data(bytes, ended);
            }
            CallState::Receiving(arriving) => {
                sender.release_connection_window(bytes.len());
                sender.release_stream_window(stream, arriving.body.take_consumed_bytes());
                let charged = if arriving.body.bytes_waiting_for_memory() == 0 { 0 } else { 2 * bytes.len() };
                let most = self.server.limits.message_bytes;
                let pushed = match sender.budget.charge(charged) {
                    Ok(()) => {
                        arriving.charged += charged;
                        arriving.body.receive_data(bytes, ended, &mut self.quota, &self.server.sets, most)
                    }
                    Err(over) => Err(over_budget_failure(over)),
                };
                if let Err(why) = pushed {
                    self.remove_receiving_call(sender, slot);
                    return self.refuse_call(sender, stream, &why);
                }
                self.record_body_change(slot);
                self.poll_slot(sender, slot);
            }
        }
    }

    /// Returns the buffer for the next bytes of the body of `stream`, and the greatest number of them.
    pub(in crate::grpc) fn body_buffer(
        &mut self,
        sender: &Http2Sender,
        stream: StreamId,
    ) -> Option<(&mut Vec<u8>, usize)> {
        match self.slots.get_mut(sender.slot_of_stream(stream)?)? {
            CallState::Receiving(arriving) => arriving.body.body_buffer(),
            _ => None,
        }
    }

    /// Records that `bytes` of the body of `stream` were read into its buffer.
    pub(in crate::grpc) fn record_body_bytes_read(
        &mut self,
        sender: &mut Http2Sender,
        stream: StreamId,
        bytes: usize,
    ) {
        let slot = sender.slot_of_stream(stream);
        if let Some(CallState::Receiving(arriving)) = slot.and_then(|slot| self.slots.get_mut(slot)) {
            arriving.body.record_filled_bytes(bytes);
            sender.release_connection_window(bytes);
            sender.release_stream_window(stream, arriving.body.take_consumed_bytes());
        }
        if let Some(slot) = slot {
            self.set_request_end_deadline(slot);
        }
    }

    /// Sets the deadline for the end of a request whose message is complete.
    fn set_request_end_deadline(&mut self, slot: u64) {
        let Some(CallState::Receiving(arriving)) = self.slots.get_mut(slot) else { return };
        if !arriving.body.awaits_only_request_end() || std::mem::replace(&mut arriving.is_whole, true) {
            return;
        }
        arriving.stall = arriving.stall.min(Instant::now() + self.server.limits.handshake);
        if arriving.stall < arriving.check {
            arriving.check = arriving.stall;
            self.deadlines.add(arriving.check, slot);
        }
    }

    /// Checks a slot that was woken.
    pub(in crate::grpc) fn poll_slot(&mut self, sender: &mut Http2Sender, slot: u64) {
        let full = self.is_backpressured(sender);
        match self.slots.get_mut(slot) {
            None | Some(CallState::Waiting(_) | CallState::Deferred(_)) => {}
            Some(CallState::Auxiliary(call)) if full => {
                if !std::mem::replace(&mut call.deferred, true) {
                    self.deferred.push_back(slot);
                }
            }
            Some(CallState::Receiving(arriving)) if full => {
                if !std::mem::replace(&mut arriving.deferred, true) {
                    self.deferred.push_back(slot);
                }
            }
            Some(CallState::Auxiliary(call)) => {
                call.deferred = false;
                sender.count_work(ANSWER_WORK);
                if call.forward_response(sender) {
                    self.slots.remove(slot);
                    sender.budget.release(AUXILIARY_BYTES);
                }
            }
            Some(CallState::Receiving(_)) => self.poll_body_and_dispatch(sender, slot),
        }
    }

    /// Drops the request in this slot, because the peer has cancelled it.
    pub(in crate::grpc) fn on_stream_reset(&mut self, sender: &mut Http2Sender, slot: u64) {
        match self.slots.get_mut(slot) {
            None => {}
            Some(CallState::Waiting(_)) => {
                self.cancel_waiting_call(sender, slot, Code::Cancelled);
            }
            Some(CallState::Receiving(_)) => {
                self.remove_receiving_call(sender, slot);
            }
            Some(CallState::Auxiliary(_)) => {
                self.slots.remove(slot);
                sender.budget.release(AUXILIARY_BYTES);
            }
            Some(CallState::Deferred(_)) => {
                if let Some(CallState::Deferred(parked)) = self.slots.remove(slot) {
                    sender.release_connection_window(parked.bytes.len());
                    sender.budget.release(parked.charged);
                }
                self.sweep_removed_deferred_slots();
            }
        }
    }

    /// Removes deferred slots that no longer exist, if there are many.
    fn sweep_removed_deferred_slots(&mut self) {
        if self.deferred.len() > 2 * self.slots.len() + 64 {
            let Self { deferred: parked, slots, .. } = self;
            parked.retain(|slot| slots.get_mut(*slot).is_some());
            parked.shrink_to(2 * parked.len() + 64);
        }
    }

    /// Removes a request whose body is arriving.
    pub(super) fn remove_receiving_call(
        &mut self,
        sender: &mut Http2Sender,
        slot: u64,
    ) -> Option<Box<ReceivingCall>> {
        let arriving = self.take_receiving_call(slot)?;
        sender.budget.release(arriving.charged);
        Some(arriving)
    }

    /// Checks a body that was woken, and dispatches its request once the message is complete.
    pub(super) fn poll_body_and_dispatch(&mut self, sender: &mut Http2Sender, slot: u64) {
        let Some(CallState::Receiving(arriving)) = self.slots.get_mut(slot) else { return };
        let ReceivingCall { body, waker, stream, deferred: parked, .. } = &mut **arriving;
        *parked = false;
        let was_reserved = body.holds_reserve_memory();
        let most = self.server.limits.message_bytes;
        let polled = body.poll_message(&mut Context::from_waker(waker), &mut self.quota, most);
        sender.release_stream_window(*stream, body.take_consumed_bytes());
        if body.bytes_waiting_for_memory() == 0 {
            sender.budget.release(std::mem::take(&mut arriving.charged));
        }
        let Poll::Ready(result) = polled else {
            if !was_reserved && arriving.body.holds_reserve_memory() {
                arriving.check = arriving.check.min(Instant::now() + request_body::PACE_PERIOD);
                self.deadlines.add(arriving.check, slot);
            }
            self.record_body_change(slot);
            return self.set_request_end_deadline(slot);
        };
        let Some(arriving) = self.remove_receiving_call(sender, slot) else { return };
        let ReceivingCall { callee, job, stream, due, trace, since, .. } = *arriving;
        match result {
            Ok(message) => {
                self.dispatch_request(
                    sender,
                    job,
                    callee,
                    &message,
                    stream,
                    CallDeadline::At(due),
                    trace,
                    since,
                );
            }
            Err(why) => self.refuse_call(sender, stream, &why),
        }
    }

    /// Checks the progress of a body at its deadline.
    pub(super) fn check_body_progress(&mut self, sender: &mut Http2Sender, slot: u64, now: Instant) {
        let stall = self.server.limits.body_stall;
        let Some(CallState::Receiving(arriving)) = self.slots.get_mut(slot) else { return };
        if now < arriving.check {
            // A check since then has set a later deadline.
            return;
        }
        let why = if arriving.due.is_some_and(|due| due <= now) {
            deadline_exceeded_failure()
        } else if now >= arriving.stall && arriving.body.awaits_only_request_end() {
            not_ended_failure(self.server.limits.handshake)
        } else if now >= arriving.stall && !arriving.body.has_progressed_since_last_check() {
            stalled_failure(stall)
        } else if arriving.body.is_too_slow(&self.quota) {
            too_slow_failure()
        } else {
            if now >= arriving.stall {
                arriving.stall = now + stall;
            }
            let pace = arriving.body.holds_reserve_memory().then(|| now + request_body::PACE_PERIOD);
            let next = [Some(arriving.stall), arriving.due, pace].into_iter().flatten().min();
            arriving.check = next.unwrap_or(arriving.stall);
            return self.deadlines.add(arriving.check, slot);
        };
        if let Some(arriving) = self.remove_receiving_call(sender, slot) {
            self.refuse_call(sender, arriving.stream, &why);
        }
    }
}

fn too_slow_failure() -> Failure {
    let text = "the request's body arrives too slowly while others wait for the memory that it holds";
    Failure::without_details(Code::ResourceExhausted, text)
}

fn not_ended_failure(within: Duration) -> Failure {
    let text = format!("the request did not end within {} s after its message", within.as_secs());
    Failure::without_details(Code::DeadlineExceeded, text)
}

fn stalled_failure(stall: Duration) -> Failure {
    let text =
        format!("the request's body did not arrive, nor the next 4 MiB of it, within {} s", stall.as_secs());
    Failure::without_details(Code::DeadlineExceeded, text)
}
