//! Passes the calls of a connection to the driver, and answers or cancels the calls that wait.
//!
//! `request_bodies.rs` receives the bodies of requests. This module passes a transfer report not to the driver but
//! to [`reports`](crate::service::reports), what a worker says that it is doing to [`stacks`](crate::service::stacks), and
//! answers both at once. Begin at `CallTable::dispatch_request`.

use http::HeaderMap;

use super::state::{ANSWER_WORK, CallDeadline, CallTable, PendingTrace, Waiting, over_budget_failure};
use crate::coordination::{CallOutcome, Caller, Code, JobId};
use crate::engine::AnsweredOrWaiting;
use crate::grpc::decoded_call::ReplyFormat;
use crate::grpc::dialect::Dialect;
use crate::grpc::frame::RequestMessage;
use crate::grpc::request_meta::{CallHandler, RequestMeta};
use crate::grpc::responses;
use crate::grpc::{collectives_service, peer_jobs_service, stacks_service, task_claims_service};
use crate::http2::{Http2Sender, StreamId};
use crate::meter::Moment;
use crate::proto::muster::v1::TransferReportAck;
use crate::service::reports::AcceptedReport;
use crate::telemetry::traces::CallEnd;

impl CallTable {
    /// Accepts a worker's transfer report and answers it at once.
    fn accept_transfer_report(
        &self,
        sender: &mut Http2Sender,
        job: JobId,
        message: &RequestMessage,
        stream: StreamId,
    ) {
        match self.server.transfers.accept_report(&self.server.engine, job, &message.contents()) {
            Ok(AcceptedReport { task, incarnation, interval_ms }) => {
                self.server.counts.shard_of_this_thread().calls.increment();
                let (engine, stacks) = (&self.server.engine, &self.server.stacks);
                let stacks_request = stacks.request_for_worker(engine, job, task, incarnation);
                let now_us = engine.clock().now().0;
                let answer = TransferReportAck { interval_ms, now_us, stacks_request };
                responses::send_message(sender, stream, &answer);
            }
            Err(refusal) => self.refuse_call(sender, stream, &refusal.into()),
        }
    }

    /// Answers the claim of a process on a task id at once.
    fn answer_task_claim(
        &self,
        sender: &mut Http2Sender,
        job: JobId,
        message: &RequestMessage,
        stream: StreamId,
    ) {
        match task_claims_service::answer_task_claim(&self.server.engine, job, self.id, &message.contents()) {
            Ok(answer) => {
                self.server.counts.shard_of_this_thread().calls.increment();
                responses::send_message(sender, stream, &answer);
            }
            Err(failure) => self.refuse_call(sender, stream, &failure),
        }
    }

    /// Accepts what a worker says that it is doing, and answers at once.
    fn accept_stack_answer(
        &self,
        sender: &mut Http2Sender,
        job: JobId,
        message: &RequestMessage,
        stream: StreamId,
    ) {
        let (engine, stacks) = (&self.server.engine, &self.server.stacks);
        match stacks_service::accept_stack_answer(engine, stacks, job, &message.contents()) {
            Ok(answer) => {
                self.server.counts.shard_of_this_thread().calls.increment();
                responses::send_message(sender, stream, &answer);
            }
            Err(failure) => self.refuse_call(sender, stream, &failure),
        }
    }

    /// Accepts a process's report of its collectives, and answers at once.
    fn accept_collectives_report(
        &self,
        sender: &mut Http2Sender,
        job: JobId,
        message: &RequestMessage,
        stream: StreamId,
    ) {
        let (engine, reports) = (&self.server.engine, &self.server.collectives);
        match collectives_service::accept_report(engine, reports, job, &message.contents()) {
            Ok(answer) => {
                self.server.counts.shard_of_this_thread().calls.increment();
                responses::send_message(sender, stream, &answer);
            }
            Err(failure) => self.refuse_call(sender, stream, &failure),
        }
    }

    /// Dispatches a call: a transfer report to the reports, a claim and every other call to the engine. A question about
    /// another job is a call to that job.
    #[expect(clippy::too_many_arguments, reason = "what a request is made of")]
    pub(super) fn dispatch_request(
        &mut self,
        sender: &mut Http2Sender,
        job: JobId,
        callee: CallHandler,
        message: &RequestMessage,
        stream: StreamId,
        due: CallDeadline,
        mut trace: PendingTrace,
        since: Moment,
    ) {
        let decoded = match callee {
            CallHandler::Coordination(reader) => reader(message, &self.server.sets).map(|call| (job, call)),
            CallHandler::PeerJobs(reader) => {
                peer_jobs_service::decode_peer_call(&self.server.engine, job, reader, message)
            }
            CallHandler::Reports => return self.accept_transfer_report(sender, job, message, stream),
            CallHandler::Stacks => return self.accept_stack_answer(sender, job, message, stream),
            CallHandler::Collectives => {
                return self.accept_collectives_report(sender, job, message, stream);
            }
            CallHandler::Claims => return self.answer_task_claim(sender, job, message, stream),
        };
        let (job, call) = match decoded {
            Ok(decoded) => decoded,
            Err(why) => return self.refuse_call(sender, stream, &why),
        };
        self.server.counts.shard_of_this_thread().calls.increment();
        // The key is stored while the call waits, because its answer repeats it.
        let charged = call.form.key.len();
        if let Err(over) = sender.budget.charge(charged) {
            return self.refuse_call(sender, stream, &over_budget_failure(over));
        }
        let caller = Caller { connection: self.id, claim: call.claim };
        let slot = self.slots.next_key();
        if let Some(trace) = &mut trace {
            trace.1 = call.request.task();
        }
        match self.server.engine.call_in_stream(stream, job, caller, call.request, &self.inbox, slot) {
            AnsweredOrWaiting::Now(outcome) => {
                sender.budget.release(charged);
                self.end_call_trace(
                    trace,
                    job,
                    &call.form,
                    outcome.as_ref().err().map(|failure| failure.code),
                );
                self.send_call_outcome(sender, stream, &outcome, &call.form);
                let now = self.now();
                self.count_call(&call.form, outcome.as_ref().err().map(|failure| failure.code), (since, now));
            }
            AnsweredOrWaiting::Waiting(id) => {
                let (form, due) = (call.form, due.instant());
                self.insert_waiting_call(Waiting { call: id, job, form, stream, trace, since, charged, due });
                sender.assign_slot(stream, slot);
                if let Some(due) = due {
                    self.deadlines.add(due, slot);
                }
            }
        }
    }

    fn send_call_outcome(
        &self,
        sender: &mut Http2Sender,
        stream: StreamId,
        outcome: &CallOutcome,
        form: &ReplyFormat,
    ) {
        let server = &self.server;
        responses::send_outcome(sender, stream, outcome, form, &server.replies, server.limits.message_bytes);
    }

    pub(super) fn begin_call_trace(&self, head: &RequestMeta) -> PendingTrace {
        let traces = self.server.traces.as_ref()?;
        let trace = traces.begin_call_span(
            head.trace.as_deref().unwrap_or(&HeaderMap::new()),
            self.server.engine.clock().now(),
        );
        Some(Box::new((trace, None)))
    }

    fn end_call_trace(&self, trace: PendingTrace, job: JobId, form: &ReplyFormat, code: Option<Code>) {
        let (Some(traces), Some(trace)) = (&self.server.traces, trace) else { return };
        let end = CallEnd {
            job,
            service: form.service_name(),
            method: form.method.name(),
            code: code.map_or(0, Code::number),
            at: self.server.engine.clock().now(),
        };
        traces.end_call_span(&trace.0, trace.1, &end);
    }

    /// Counts a call with its beginning and end; without a code it succeeded.
    fn count_call(&self, form: &ReplyFormat, code: Option<Code>, times: (Moment, Moment)) {
        if let Some(calls) = &self.server.calls {
            calls.shard_of_this_thread().count_call(form.method, form.dialect, code, times);
        }
    }

    /// Sends the answer of a call that waited.
    pub(in crate::grpc) fn send_waiting_answer(
        &mut self,
        sender: &mut Http2Sender,
        slot: u64,
        outcome: &CallOutcome,
    ) {
        sender.count_work(ANSWER_WORK);
        if let Some(mut waiting) = self.take_waiting_call(slot) {
            sender.budget.release(waiting.charged);
            let code = outcome.as_ref().err().map(|failure| failure.code);
            self.end_call_trace(waiting.trace.take(), waiting.job, &waiting.form, code);
            self.send_call_outcome(sender, waiting.stream, outcome, &waiting.form);
            let now = self.turn_start();
            self.count_call(&waiting.form, code, (waiting.since, now));
        }
    }

    pub(super) fn cancel_waiting_call(
        &mut self,
        sender: &mut Http2Sender,
        slot: u64,
        code: Code,
    ) -> Option<(StreamId, Dialect)> {
        let mut waiting = self.take_waiting_call(slot)?;
        sender.budget.release(waiting.charged);
        self.server.engine.cancel_waiting_call(waiting.job, waiting.call);
        let now = self.turn_start();
        self.count_call(&waiting.form, Some(code), (waiting.since, now));
        self.end_call_trace(waiting.trace.take(), waiting.job, &waiting.form, Some(code));
        Some((waiting.stream, waiting.form.dialect))
    }
}
