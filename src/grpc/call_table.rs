//! The calls of one connection. Each call has one of four states: its body is arriving, it is deferred, it waits for
//! the driver, or an auxiliary service answers it.
//!
//! The [`GrpcConnection`](super::connection::GrpcConnection) reads the socket and passes requests to the table. The
//! table (`state.rs`) owns a slot for each request that was not answered at once, the deadlines of these requests,
//! and the connection's quota for bodies. `request_bodies.rs` handles requests whose bodies are arriving, and
//! `engine_calls.rs` handles calls that wait for the driver. Begin at [`CallTable::accept_request`].
//!
//! While a peer leaves more than 16 MiB of answers unread, its new requests are deferred. As long as the socket
//! accepts output, the frames of this peer are still processed, because the answers wait for its window updates.
//!
//! When the table is dropped, it reports the end of the connection to the driver. The driver then withdraws the
//! waiting calls of the connection.

use std::sync::Arc;
use std::task::{Context, Poll, Waker};

use http::HeaderMap;

use super::dialect::Dialect;
use super::frame::RequestMessage;
use super::mailbox::slot_waker;
use super::request_body::RequestBody;
use super::request_meta::{CallHandler, RequestMeta, RequestRefusal, RequestTarget};
use super::responses;
use crate::coordination::Code;
use crate::http2::{Http2Sender, StreamId};

mod call_log;
mod engine_calls;
mod logged_calls;
mod request_bodies;
mod state;

pub(super) use logged_calls::{CallChange, ReceivingCallEntry, WaitingCallEntry};
pub(super) use state::CallTable;
use state::{
    ANSWER_WORK, AUXILIARY_BYTES, BYTES_PER_STEP, CallDeadline, CallState, DeferredRequest,
    deadline_exceeded_failure, over_budget_failure,
};

/// The key of the deadline of an incomplete frame. The keys of a connection's own deadlines belong to no slot.
pub(super) const PARTIAL_FRAME_DEADLINE: u64 = u64::MAX;
/// The key of the deadline of an incomplete DATA frame.
pub(super) const BEGUN_DATA_DEADLINE: u64 = u64::MAX - 1;
/// The key of the deadline of output that the peer has not taken.
pub(super) const UNTAKEN_OUTPUT_DEADLINE: u64 = u64::MAX - 2;

/// The result of a check of the deadlines.
pub(super) enum ExpiredDeadlines {
    /// No deadline has passed.
    Nothing,
    /// Deadlines of calls have passed.
    Calls,
    /// This deadline of the connection has passed.
    Connection(u64),
}

/// The work of accepting a call, in steps.
const CALL_WORK: usize = 32;
/// The number of deadlines processed before answers are sent. The caller checks again while there were any.
const DEADLINES_PER_TURN: usize = 1 << 10;

impl CallTable {
    /// Accepts a new request with the received part of its body.
    pub(super) fn accept_request(
        &mut self,
        sender: &mut Http2Sender,
        stream: StreamId,
        head: Arc<RequestMeta>,
        bytes: &[u8],
        ended: bool,
    ) {
        sender.count_work(CALL_WORK + bytes.len() / BYTES_PER_STEP);
        if self.is_backpressured(sender) || !self.deferred.is_empty() {
            let charged = head.memory_bytes() + bytes.len();
            if let Err(over) = sender.budget.charge(charged) {
                sender.release_windows(stream, bytes.len());
                return self.refuse_call(sender, stream, &over_budget_failure(over));
            }
            let parked = DeferredRequest { head, stream, bytes: bytes.to_vec(), ended, charged };
            let slot = self.slots.insert(CallState::Deferred(parked));
            sender.assign_slot(stream, slot);
            return self.deferred.push_back(slot);
        }
        self.begin_request(sender, stream, &head, bytes, ended);
    }

    /// Continues deferred requests, as long as the peer takes its answers.
    pub(super) fn resume_deferred(&mut self, sender: &mut Http2Sender) {
        while !self.is_backpressured(sender) && !sender.should_yield() {
            let Some(slot) = self.deferred.pop_front() else { return };
            match self.slots.get_mut(slot) {
                Some(CallState::Deferred(_)) => {
                    if let Some(CallState::Deferred(DeferredRequest {
                        head,
                        stream,
                        bytes,
                        ended,
                        charged,
                    })) = self.slots.remove(slot)
                    {
                        sender.count_work(CALL_WORK + bytes.len() / BYTES_PER_STEP);
                        sender.budget.release(charged);
                        self.begin_request(sender, stream, &head, &bytes, ended);
                    }
                }
                _ => self.poll_slot(sender, slot),
            }
        }
    }

    fn begin_request(
        &mut self,
        sender: &mut Http2Sender,
        stream: StreamId,
        head: &Arc<RequestMeta>,
        bytes: &[u8],
        ended: bool,
    ) {
        let callee = match &head.target {
            Ok(RequestTarget::Call(callee)) => *callee,
            Ok(RequestTarget::Auxiliary(request)) => {
                return self.begin_auxiliary_call(sender, stream, &request.0, &request.1, bytes, ended);
            }
            Err(refused) => {
                sender.release_windows(stream, bytes.len());
                self.server.counts.shard_of_this_thread().calls.increment();
                self.server.counts.shard_of_this_thread().refused_calls.increment();
                return match refused {
                    RequestRefusal::Http(status, why) => {
                        responses::send_http_refusal(sender, stream, *status, why)
                    }
                    RequestRefusal::Call(why) => {
                        responses::send_failure(sender, stream, why, Dialect::Number)
                    }
                    RequestRefusal::Encoding(why) => responses::send_encoding_refusal(sender, stream, why),
                };
            }
        };
        let job =
            match self.route.resolve_job(&self.server.engine, &self.server.unroutable_log, &head.authority) {
                Ok(job) => job,
                Err(why) => {
                    sender.release_windows(stream, bytes.len());
                    return self.refuse_call(sender, stream, &why);
                }
            };
        let due = CallDeadline::After(head.timeout);
        let trace = match callee {
            CallHandler::Coordination(_) | CallHandler::PeerJobs(_) => self.begin_call_trace(head),
            CallHandler::Reports | CallHandler::Stacks | CallHandler::Collectives | CallHandler::Claims => {
                None
            }
        };
        let since = self.turn_start();
        let most = self.server.limits.message_bytes;
        if ended && let Some(message) = RequestMessage::of_short_body(bytes, most) {
            sender.release_windows(stream, bytes.len());
            return self.dispatch_request(sender, job, callee, &message, stream, due, trace, since);
        }
        let mut body = RequestBody::new(head.compresses);
        let pushed = body.receive_data(bytes, ended, &mut self.quota, &self.server.sets, most);
        // A body that is complete wakes no task.
        let polled = match pushed {
            Ok(()) => body.poll_message(&mut Context::from_waker(Waker::noop()), &mut self.quota, most),
            Err(why) => Poll::Ready(Err(why)),
        };
        match polled {
            Poll::Ready(result) => {
                sender.release_windows(stream, bytes.len());
                match result {
                    Ok(message) => {
                        self.dispatch_request(sender, job, callee, &message, stream, due, trace, since)
                    }
                    Err(why) => self.refuse_call(sender, stream, &why),
                }
            }
            Poll::Pending => {
                // Bytes that wait for memory stay charged to the budget, but do not use the connection's
                // window: otherwise the body whose turn it is could not continue.
                sender.release_connection_window(bytes.len());
                sender.release_stream_window(stream, body.take_consumed_bytes());
                let path = Arc::clone(&head.path);
                self.store_receiving_call(sender, body, callee, path, job, stream, due, trace, since);
            }
        }
    }

    fn begin_auxiliary_call(
        &mut self,
        sender: &mut Http2Sender,
        stream: StreamId,
        path: &str,
        fields: &HeaderMap,
        bytes: &[u8],
        ended: bool,
    ) {
        self.server.counts.shard_of_this_thread().calls.increment();
        sender.release_windows(stream, bytes.len());
        if let Err(over) = sender.budget.charge(AUXILIARY_BYTES) {
            return responses::send_failure(sender, stream, &over_budget_failure(over), Dialect::Number);
        }
        let waker = slot_waker(&self.mailbox, self.slots.next_key());
        match self.auxiliary.begin_call(&self.server.services, (path, fields), stream, waker) {
            Err(why) => {
                sender.budget.release(AUXILIARY_BYTES);
                responses::send_failure(sender, stream, &why, Dialect::Number);
            }
            Ok(mut call) => {
                call.push_request_data(bytes, ended);
                let slot = self.slots.insert(CallState::Auxiliary(Box::new(call)));
                sender.assign_slot(stream, slot);
                self.poll_slot(sender, slot);
            }
        }
    }

    /// Ends the calls whose deadlines have passed.
    pub(super) fn expire_deadlines(
        &mut self,
        cx: &mut Context<'_>,
        sender: &mut Http2Sender,
    ) -> ExpiredDeadlines {
        let mut elapsed = ExpiredDeadlines::Nothing;
        let live = self.slots.len();
        self.deadlines.sweep_removed_slots(live, |slot| {
            slot >= UNTAKEN_OUTPUT_DEADLINE || self.slots.get_mut(slot).is_some()
        });
        for _ in 0..DEADLINES_PER_TURN {
            let Poll::Ready((slot, now)) = self.deadlines.poll_expired(cx) else { break };
            if slot >= UNTAKEN_OUTPUT_DEADLINE {
                return ExpiredDeadlines::Connection(slot);
            }
            elapsed = ExpiredDeadlines::Calls;
            sender.count_work(ANSWER_WORK);
            match self.slots.get_mut(slot) {
                None | Some(CallState::Deferred(_) | CallState::Auxiliary(_)) => {}
                Some(CallState::Waiting(_)) => {
                    if let Some((stream, dialect)) =
                        self.cancel_waiting_call(sender, slot, Code::DeadlineExceeded)
                    {
                        responses::send_failure(sender, stream, &deadline_exceeded_failure(), dialect);
                    }
                }
                Some(CallState::Receiving(_)) => self.check_body_progress(sender, slot, now),
            }
        }
        elapsed
    }
}
