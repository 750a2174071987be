//! The admission of calls: decides which incarnations may make calls in the present run.
//!
//! A call is refused if its incarnation has been replaced by a newer one, or belongs to an earlier run. In generation
//! C, each call names its incarnations. In generation A, only registrations and heartbeats do, so the service
//! remembers which incarnations made such calls on each connection. `exclusion_rules.rs` refuses the calls of
//! excluded tasks. If the present run has ended, the registration of a new incarnation opens the next run
//! (`run_lifecycle.rs`). Begin at `Job::admit_call` and `Job::admit_registration`.

use super::event::{EventKind, RunOutcome};
use super::failure::{Code, Failure};
use super::ids::{ConnectionId, TaskId, TaskIncarnation, Timestamp};
use super::input::Effect;
use super::job::{Job, with_run};
use super::request_reply::{Caller, Request, StatedIncarnations};
use super::run_state::RunSummary;

impl Job {
    /// Refuses incarnations of ended runs, and opens the next run for a new incarnation if the present run
    /// has ended.
    pub(super) fn admit_registration(
        &mut self,
        now: Timestamp,
        effects: &mut Vec<Effect>,
        id: TaskId,
        incarnation: TaskIncarnation,
    ) -> Result<(), Failure> {
        if let Some(past) = self.past_run_with_incarnation(incarnation) {
            return Err(self.fenced_failure(
                Code::FailedPrecondition,
                &format!("incarnation {incarnation}"),
                past,
            ));
        }
        // The run itself refuses an unknown id, in whatever state it is.
        let Some(task) = self.run.task(id) else { return Ok(()) };
        let Some((outcome, _)) = self.run.ended else { return Ok(()) };
        let known = task.incarnation == Some(incarnation) || task.has_superseded(incarnation);
        match (known, outcome) {
            (false, _) => self.open_next_run(now, effects),
            (true, RunOutcome::Failed) => Ok(()),
            (true, _) => {
                let text = format!(
                    "Run {} of job {}, in which task {id} had incarnation {incarnation}, is over. A new process of the task \
                     opens the next run.",
                    self.run.number, self.name
                );
                Err(Failure::from_service(Code::FailedPrecondition, text))
            }
        }
    }

    /// Checks whether the present run admits a call other than registration.
    pub(super) fn admit_call(
        &mut self,
        now: Timestamp,
        effects: &mut Vec<Effect>,
        caller: Caller,
        request: &Request,
    ) -> Result<(), Failure> {
        let task = request.task();
        let refusal = match caller.claim {
            Some(claim) => self.check_stated_incarnations(claim, task),
            None => self.check_incarnation_of_connection(caller.connection, request),
        };
        if let Some(failure) = refusal {
            self.emit_fenced_event_once(now, effects, caller.connection, task, &failure);
            return Err(failure);
        }
        // A call with the present incarnation is a sign of life.
        let said = match (caller.claim, request) {
            (_, Request::Heartbeat { incarnation, .. }) => Some(*incarnation),
            (Some(claim), _) => Some(claim.task),
            (None, _) => None,
        };
        if let (Some(id), Some(incarnation)) = (task, said)
            && self.run.task(id).is_some_and(|t| t.incarnation == Some(incarnation) && t.is_connected())
        {
            self.bind_connection_to_incarnation(caller.connection, id, incarnation);
            with_run!(self, now, effects, |run, cx| run.record_call_on_connection(cx, caller.connection, id));
        }
        Ok(())
    }

    /// Returns the incarnations that a call of this task states; `None` if the run knows no incarnation of it.
    pub(super) fn present_incarnations(&self, task: TaskId) -> Option<StatedIncarnations> {
        let task = self.run.task(task)?.incarnation?;
        Some(StatedIncarnations { service: self.run.incarnation, task })
    }

    /// Checks the incarnations that a caller of generation C states.
    fn check_stated_incarnations(&self, claim: StatedIncarnations, task: Option<TaskId>) -> Option<Failure> {
        let current = self.run.incarnation;
        if claim.service != current {
            let mut text =
                format!("wrong service incarnation: requested {}, currently {}", claim.service.0, current.0);
            if let Some(past) = self.past.iter().find(|past| past.incarnation == claim.service) {
                let who = "this process";
                text = format!("{text}. {}", self.fenced_failure(Code::Internal, who, &past.summary).message);
            }
            let mut failure = Failure::from_service(Code::Internal, text);
            failure.service_mismatch = Some(current);
            return Some(failure);
        }
        self.check_not_superseded(task?, claim.task)
    }

    /// Checks a caller of generation A, which states no incarnation, by the earlier calls on its connection.
    fn check_incarnation_of_connection(
        &self,
        connection: ConnectionId,
        request: &Request,
    ) -> Option<Failure> {
        if let Request::Heartbeat { task, incarnation } = request {
            if let Some(past) = self.past_run_with_incarnation(*incarnation) {
                return Some(self.fenced_failure(Code::Aborted, &format!("incarnation {incarnation}"), past));
            }
            return self.check_not_superseded(*task, *incarnation);
        }
        let lives = &self.connections.get(&connection)?.known_incarnations;
        let number = match request.task() {
            Some(task) => {
                let (number, incarnation) = lives.get(&task)?;
                if *number == self.run.number {
                    return self.check_not_superseded(task, *incarnation);
                }
                *number
            }
            // The request names no task: admitted if any task of the present run uses this connection.
            None => lives.values().map(|(number, _)| *number).max().filter(|last| *last < self.run.number)?,
        };
        let past = self.past.find(number)?;
        Some(self.fenced_failure(Code::Aborted, "this connection", &past.summary))
    }

    fn check_not_superseded(&self, id: TaskId, incarnation: TaskIncarnation) -> Option<Failure> {
        let task = self.run.task(id).filter(|task| task.has_superseded(incarnation))?;
        let newer = task.incarnation.map_or_else(String::new, |newer| newer.to_string());
        let text = format!(
            "Fenced: incarnation {incarnation} of task {id} was taken over by incarnation {newer} ({}). End this process.",
            self.run.describe_task(id)
        );
        Some(Failure::from_service(Code::Aborted, text))
    }

    fn past_run_with_incarnation(&self, incarnation: TaskIncarnation) -> Option<&RunSummary> {
        let past =
            self.past.iter().find(|past| past.known_incarnations.binary_search(&incarnation).is_ok())?;
        Some(&past.summary)
    }

    /// Returns the failure for an incarnation of an ended run.
    fn fenced_failure(&self, code: Code, who: &str, past: &RunSummary) -> Failure {
        let why = match &past.first_cause {
            Some(cause) => format!("it failed first with: {}", cause.error),
            None => "it had come to its end".to_owned(),
        };
        let text = format!(
            "Fenced: {who} belongs to run {} of job {}, which is over ({why}). The job is in run {} now; end this process.",
            past.number, self.name, self.run.number,
        );
        Failure::from_service(code, text)
    }

    fn emit_fenced_event_once(
        &mut self,
        now: Timestamp,
        effects: &mut Vec<Effect>,
        connection: ConnectionId,
        task: Option<TaskId>,
        failure: &Failure,
    ) {
        if self.connections.get(&connection).is_none_or(|presence| presence.is_fence_reported) {
            return;
        }
        let Some(presence) = self.connections.get_mut(&connection) else { return };
        presence.is_fence_reported = true;
        let reason = format!("call from {} rejected: {}", presence.peer, failure.message);
        with_run!(self, now, effects, |_run, cx| cx.emit_event(EventKind::Fenced { task }, reason));
    }
}
