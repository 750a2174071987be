//! Requests for stacks, with their audit: by operators, and automatically when a finding says that tasks wait too long.
//!
//! `stacks/` collects the answers. A request changes nothing for a job, so it is no event and no command of the state
//! machine; the audit has a line for it. Begin at [`AuditedOperations::ask_for_stacks`], then [`request_stacks_for_findings`].

use std::collections::BTreeSet;
use std::sync::Arc;

use tokio::sync::broadcast::error::RecvError;

use super::operations::reason_from_finding_summary;
use super::stacks::{NewStackRequest, StackCollector, StackRequestRefusal, TaskRanges};
use super::{ActorContext, AuditOutcome, AuditedOperations};
use crate::coordination::{Actor, ActorOrigin, CommandReason, EventKind, JobEvent, JobId, JobName, RunState};

/// The findings whose opening requests stacks.
const ASKING_FINDINGS: [&str; 3] = ["barrier-stuck", "stalled-task", "collective-stuck"];

impl AuditedOperations {
    /// Requests the stacks of tasks, and records that in the audit. Returns the number of the request.
    ///
    /// # Errors
    /// If the request is refused. The audit has the refusal, unless it is that of a rule: a rule asks again and again.
    pub fn ask_for_stacks(
        &self,
        stacks: &StackCollector,
        (job, name): (JobId, &JobName),
        by: &ActorContext,
        reason: CommandReason,
        tasks: Option<TaskRanges>,
    ) -> Result<u64, StackRequestRefusal> {
        let subject = tasks.as_ref().map_or_else(|| "all tasks".to_owned(), |tasks| format!("tasks {tasks}"));
        let request = NewStackRequest { actor: by.actor.clone(), reason: reason.clone(), tasks };
        // Each request is a line of the audit, whose numbers go on after a restart.
        let number_min = self.audit.last_line_number() + 1;
        let asked = stacks.ask(&self.engine, job, request, number_min);
        let (outcome, detail) = match &asked {
            Ok(number) => (AuditOutcome::Done, format!("request {number}")),
            Err(_) if by.actor.means == ActorOrigin::Rule => return asked,
            Err(refusal) => (AuditOutcome::Refused, refusal.to_string()),
        };
        let entry = by.create_audit_entry(Some(name.clone()), "ask-for-stacks", subject, Some(reason));
        self.audit.record(self.engine.clock().now(), entry, outcome, detail);
        asked
    }

    /// Requests the stacks of all tasks of a job for a finding.
    fn ask_for_stacks_of_finding(&self, stacks: &StackCollector, event: &JobEvent, finding: &str) {
        let name = self.engine.read(|core, _| {
            let summary = core.job(event.job)?.summary();
            (summary.state == RunState::Running).then_some(summary.name)
        });
        let Some(name) = name.filter(|_| stacks.knows_sources(event.job)) else { return };
        let Ok(reason) = CommandReason::try_from(reason_from_finding_summary(&event.reason)) else { return };
        let actor = Actor { who: finding.into(), address: None, means: ActorOrigin::Rule };
        let by = ActorContext::new(actor, None, None);
        // A refusal means that there was a request a moment ago.
        let _ = self.ask_for_stacks(stacks, (event.job, &name), &by, reason, None);
    }
}

/// Requests stacks when a finding opens that calls for them, and drops the stacks of deleted jobs, for as long as it is
/// polled.
pub async fn request_stacks_for_findings(operations: Arc<AuditedOperations>, stacks: Arc<StackCollector>) {
    let mut events = operations.engine.subscribe_events(u64::MAX).1;
    loop {
        let is_deletion = match events.recv().await {
            Ok(numbered) => match &numbered.event.what {
                EventKind::FindingOpened { finding, .. } if ASKING_FINDINGS.contains(&&**finding) => {
                    operations.ask_for_stacks_of_finding(&stacks, &numbered.event, finding);
                    false
                }
                EventKind::JobDeleted { .. } => true,
                _ => false,
            },
            // Among the missed events may be a deletion.
            Err(RecvError::Lagged(_)) => true,
            Err(RecvError::Closed) => return,
        };
        if is_deletion {
            let present: BTreeSet<JobId> =
                operations.engine.read(|core, _| core.jobs().map(|(job, _)| job).collect());
            stacks.retain_jobs(|job| present.contains(&job));
        }
    }
}

#[cfg(test)]
mod tests {
    use std::net::SocketAddr;
    use std::time::Duration;

    use super::*;
    use crate::clock::Clock;
    use crate::coordination::{
        CallOutcome, Caller, FindingChange, JobSettings, Request, TaskId, TaskIncarnation,
    };
    use crate::engine::{AnswerInbox, Engine};
    use crate::service::AuditLog;
    use crate::service::stacks::HelperPoll;

    struct UnreadAnswers;

    impl AnswerInbox for UnreadAnswers {
        fn deliver(&self, _slot: u64, _outcome: CallOutcome) {}
    }

    #[tokio::test]
    async fn a_stuck_barrier_requests_stacks_once_and_the_audit_says_so() {
        let engine = Engine::new(Clock::start());
        let job = engine.declare_job("train".parse().unwrap(), JobSettings::new(2)).unwrap();
        let connection = engine.register_connection(SocketAddr::from(([127, 0, 0, 1], 1)));
        let inbox: Arc<dyn AnswerInbox> = Arc::new(UnreadAnswers);
        for task in [0, 1] {
            let incarnation = TaskIncarnation(5);
            let request = Request::Register { task: TaskId(task), incarnation, recoverable: false };
            engine.call(job, Caller { connection, claim: None }, request, &inbox, 0);
        }
        let audit = Arc::<AuditLog>::default();
        let operations =
            AuditedOperations { engine: Arc::clone(&engine), audit: Arc::clone(&audit), traces: None };
        let stacks = Arc::<StackCollector>::default();
        let following = tokio::spawn(request_stacks_for_findings(Arc::new(operations), Arc::clone(&stacks)));
        tokio::task::yield_now().await;
        let open_finding = |id: &str| {
            let reason = "A barrier is stuck: 1 of 2 tasks waits\nhere".to_owned();
            let note = FindingChange { finding: id.into(), open: true, tasks: vec![TaskId(1)], reason };
            engine.record_finding(job, note);
        };
        let lines = || audit.latest_lines(10, |line| line.act == "ask-for-stacks");
        let settle = || tokio::time::sleep(Duration::from_millis(50));
        open_finding("barrier-stuck");
        settle().await;
        assert_eq!(lines().len(), 0, "no task can answer");
        let poll = HelperPoll { task: TaskId(1), after: 0 };
        stacks.poll(&engine, job, poll).unwrap();
        open_finding("chronic-straggler");
        settle().await;
        assert_eq!(lines().len(), 0, "another finding");
        open_finding("barrier-stuck");
        open_finding("stalled-task");
        settle().await;
        let [line] = &lines()[..] else { panic!("{:?}", lines()) };
        assert_eq!((&*line.actor.who, line.actor.means), ("barrier-stuck", ActorOrigin::Rule));
        assert_eq!((&*line.subject, &*line.detail), ("all tasks", "request 1"));
        assert!(
            line.reason.as_ref().is_some_and(|reason| reason.as_str().contains("waits?here")),
            "{line:?}"
        );
        assert!(stacks.poll(&engine, job, poll).unwrap().request.is_some());
        following.abort();
    }
}
