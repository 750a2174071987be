//! The calls of a connection that wait for the engine: dispatched, answered, or cancelled.
//!
//! It receives no bodies: `request_bodies.rs` does. Begin at `CallTable::dispatch`. A transfer report is
//! handed to [`reports`](crate::reports) and answered at once; it never reaches the engine.

use http::HeaderMap;

use super::{ANSWER_WORK, CallDeadline, CallState, CallTable, over_budget};
use crate::coordination::{CallId, CallOutcome, Caller, Code, JobId, TaskId};
use crate::engine::CallStatus;
use crate::grpc::decoded_call::{Dialect, ReplyFormat};
use crate::grpc::frame::Message;
use crate::grpc::request_meta::{CallHandler, RequestMeta};
use crate::grpc::respond;
use crate::http2::{Sender, StreamId};
use crate::meter::Moment;
use crate::proto::muster::v1::TransferReportAck;
use crate::telemetry::traces::{CallEnd, CallSpan};

/// The trace of a call, with the calling task; `None` if calls are not traced.
pub(super) type PendingTrace = Option<Box<(CallSpan, Option<TaskId>)>>;

/// A call that waits for the engine's answer.
pub(super) struct Waiting {
    pub(super) call: CallId,
    job: JobId,
    form: ReplyFormat,
    stream: StreamId,
    trace: PendingTrace,
    since: Moment,
    /// The bytes charged for its stored data.
    charged: usize,
}

impl CallTable {
    /// Accepts a worker's transfer report and answers it at once.
    fn accept_report(&self, sender: &mut Sender, job: JobId, message: &Message, stream: StreamId) {
        match self.server.transfers.accept(&self.server.engine, job, &message.bytes()) {
            Ok(interval_ms) => {
                self.server.counts.local().calls.add();
                let now_us = self.server.engine.clock().now().0;
                respond::send_message(sender, stream, &TransferReportAck { interval_ms, now_us });
            }
            Err(refusal) => self.refuse(sender, stream, &refusal.into()),
        }
    }

    /// Dispatches a call: a transfer report to the reports, every other call to the engine.
    #[expect(clippy::too_many_arguments, reason = "what a request is made of")]
    pub(super) fn dispatch(
        &mut self,
        sender: &mut Sender,
        job: JobId,
        callee: CallHandler,
        message: &Message,
        stream: StreamId,
        due: CallDeadline,
        mut trace: PendingTrace,
        since: Moment,
    ) {
        let reader = match callee {
            CallHandler::Coordination(reader) => reader,
            CallHandler::Reports => return self.accept_report(sender, job, message, stream),
        };
        let call = match reader(message, &self.server.sets) {
            Ok(call) => call,
            Err(why) => return self.refuse(sender, stream, &why),
        };
        self.server.counts.local().calls.add();
        // The key is stored while the call waits, because its answer repeats it.
        let charged = call.form.key.len();
        if let Err(over) = sender.budget.charge(charged) {
            return self.refuse(sender, stream, &over_budget(over));
        }
        let caller = Caller { connection: self.id, claim: call.claim };
        let slot = self.slots.next_key();
        if let Some(trace) = &mut trace {
            trace.1 = call.request.task();
        }
        match self.server.engine.call(job, caller, call.request, &self.inbox, slot) {
            CallStatus::Now(outcome) => {
                sender.budget.release(charged);
                self.end_trace(trace, job, &call.form, outcome.as_ref().err().map(|failure| failure.code));
                self.send(sender, stream, &outcome, &call.form);
                let now = self.now();
                self.count(&call.form, outcome.as_ref().err().map(|failure| failure.code), (since, now));
            }
            CallStatus::Waiting(id) => {
                let form = call.form;
                self.slots.insert(CallState::Waiting(Waiting {
                    call: id,
                    job,
                    form,
                    stream,
                    trace,
                    since,
                    charged,
                }));
                sender.assign_slot(stream, slot);
                if let Some(due) = due.at() {
                    self.deadlines.add(due, slot);
                }
            }
        }
    }

    fn send(&self, sender: &mut Sender, stream: StreamId, outcome: &CallOutcome, form: &ReplyFormat) {
        respond::send_outcome(sender, stream, outcome, form, self.server.limits.message_bytes);
    }

    pub(super) fn begin_trace(&self, head: &RequestMeta) -> PendingTrace {
        let traces = self.server.traces.as_ref()?;
        let trace = traces
            .begin(head.trace.as_deref().unwrap_or(&HeaderMap::new()), self.server.engine.clock().now());
        Some(Box::new((trace, None)))
    }

    fn end_trace(&self, trace: PendingTrace, job: JobId, form: &ReplyFormat, code: Option<Code>) {
        let (Some(traces), Some(trace)) = (&self.server.traces, trace) else { return };
        let end = CallEnd {
            job,
            service: form.dialect.service(),
            method: form.method.name(),
            code: code.map_or(0, Code::number),
            at: self.server.engine.clock().now(),
        };
        traces.end(&trace.0, trace.1, &end);
    }

    /// Counts a call with its beginning and end; without a code it succeeded.
    fn count(&self, form: &ReplyFormat, code: Option<Code>, times: (Moment, Moment)) {
        if let Some(calls) = &self.server.calls {
            calls.local().add(form.method, form.dialect, code, times);
        }
    }

    /// Sends the answer of a call that waited.
    pub(in crate::grpc) fn answer(&mut self, sender: &mut Sender, slot: u64, outcome: &CallOutcome) {
        sender.count_work(ANSWER_WORK);
        if let Some(CallState::Waiting(mut waiting)) = self.slots.remove(slot) {
            sender.budget.release(waiting.charged);
            let code = outcome.as_ref().err().map(|failure| failure.code);
            self.end_trace(waiting.trace.take(), waiting.job, &waiting.form, code);
            self.send(sender, waiting.stream, outcome, &waiting.form);
            let now = self.turn_start();
            self.count(&waiting.form, code, (waiting.since, now));
        }
    }

    pub(super) fn cancel_waiting(
        &mut self,
        sender: &mut Sender,
        slot: u64,
        code: Code,
    ) -> Option<(StreamId, Dialect)> {
        let Some(CallState::Waiting(mut waiting)) = self.slots.remove(slot) else { return None };
        sender.budget.release(waiting.charged);
        self.server.engine.cancel_waiting_call(waiting.job, waiting.call);
        let now = self.turn_start();
        self.count(&waiting.form, Some(code), (waiting.since, now));
        self.end_trace(waiting.trace.take(), waiting.job, &waiting.form, Some(code));
        Some((waiting.stream, waiting.form.dialect))
    }
}
