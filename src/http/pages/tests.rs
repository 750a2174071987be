//! Tests the texts of pages for jobs in virtual time, with the real state machine and the real detectors.
//!
//! `tests/guard` and `tests/browser` test the pages over HTTP. Begin at `PagesFixture`.

use std::collections::BTreeSet;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;

use super::fragment::Fragment;
use super::live_page::TaskTableQuery;
use super::snapshot::JobSnapshot;
use super::status::TaskStatus;
use super::{drain, issues, job, overview, times};
use crate::coordination::{
    Actor, ActorOrigin, CallId, Caller, ConnectionEnd, ConnectionId, Coordinator, Effect, FindingChange,
    Input, JobId, JobSettings, OperatorCommand, Reason, Request, ServiceIncarnation, TaskId, TaskIncarnation,
    Timestamp,
};
use crate::engine::Observer as _;
use crate::service::findings::{self, DetectorInput, FindingTransition, run_detectors};
use crate::service::{Timelines, reports};

const JOB: JobId = JobId(0);
const SECOND: Duration = Duration::from_secs(1);
/// A start time with enough room before it.
const BEGIN: Timestamp = Timestamp(1_700_000_000_000_000);

/// One job in virtual time.
struct PagesFixture {
    core: Coordinator,
    now: Timestamp,
    calls: u64,
    /// The present life of each task, from 1; 0 for none yet.
    lives: Vec<u64>,
    /// The tasks that send heartbeats, and their interval in seconds.
    beating: BTreeSet<TaskId>,
    beat: u64,
    recoverable: bool,
    findings: findings::FindingStore,
    timelines: Timelines,
    reports: Arc<reports::ReportStore>,
}

fn task(number: usize) -> TaskId {
    TaskId(i32::try_from(number).unwrap())
}

impl PagesFixture {
    /// Returns a job whose tasks have all registered.
    fn of(settings: JobSettings, beat: u64) -> Self {
        let mut rig = Self::empty(settings, beat);
        (0..rig.lives.len()).for_each(|number| rig.register(number));
        assert_eq!(rig.snapshot().view.run.live, rig.lives.len());
        rig
    }

    /// Returns a job without registered tasks.
    fn empty(settings: JobSettings, beat: u64) -> Self {
        let mut rig = Self {
            core: Coordinator::default(),
            now: BEGIN,
            calls: 0,
            lives: vec![0; settings.tasks as usize],
            beating: BTreeSet::new(),
            beat,
            recoverable: settings.recoverable,
            findings: findings::FindingStore::default(),
            timelines: Timelines::default(),
            reports: Arc::default(),
        };
        let name = "train".parse().unwrap();
        let incarnation = ServiceIncarnation(7);
        rig.apply(Input::DeclareJob {
            job: JOB,
            name,
            settings: Box::new(settings),
            incarnation,
            actor: None,
        });
        rig
    }

    fn apply(&mut self, input: Input) {
        let mut effects = Vec::new();
        self.core.apply(self.now, input, &mut effects);
        while self.core.has_pending_work() {
            self.core.apply(self.now, Input::Tick, &mut effects);
        }
        for effect in effects {
            match effect {
                Effect::Event(event) => self.timelines.on_event(&event),
                Effect::CommandDone(done) => assert!(done.is_ok(), "{done:?}"),
                Effect::RequestIncarnation(job) => {
                    self.calls += 1;
                    let incarnation = ServiceIncarnation(1000 + self.calls);
                    self.apply(Input::NextIncarnation { job, incarnation });
                }
                Effect::Reply(..)
                | Effect::ClaimAnswered(_)
                | Effect::BarrierEnded(_)
                | Effect::FreeLater(_) => {}
            }
        }
    }

    fn connection(&self, number: usize) -> ConnectionId {
        ConnectionId(self.lives[number] * 100_000 + number as u64)
    }

    fn call(&mut self, number: usize, request: Request) {
        self.calls += 1;
        let caller = Caller { connection: self.connection(number), claim: None };
        self.apply(Input::Call { job: JOB, call: CallId(self.calls), caller, request });
    }

    /// Registers a new life of a task; eight tasks share a host.
    fn register(&mut self, number: usize) {
        self.lives[number] += 1;
        let host = number / 8;
        let ip = [10, 0, u8::try_from(host / 250).unwrap(), u8::try_from(host % 250 + 1).unwrap()];
        let peer = SocketAddr::from((ip, u16::try_from(4000 + number).unwrap()));
        self.apply(Input::ConnectionOpened { connection: self.connection(number), peer });
        let incarnation = TaskIncarnation(self.lives[number] * 1_000_000 + number as u64 + 1);
        let recoverable = self.recoverable;
        self.call(number, Request::Register { task: task(number), incarnation, recoverable });
        self.beating.insert(task(number));
    }

    /// Kills the process of a task.
    fn kill(&mut self, number: usize) {
        self.beating.remove(&task(number));
        self.apply(Input::ConnectionClosed {
            connection: self.connection(number),
            ending: ConnectionEnd::Reset,
        });
    }

    fn arrive(&mut self, number: usize, barrier: &str, timeout_ms: i64) {
        let id = barrier.to_owned();
        self.call(number, Request::Barrier { id, counter: 0, timeout_ms, members: None, task: task(number) });
    }

    /// Makes a task acknowledge a preemption notice: it writes its step and goes to the barrier.
    fn acknowledge(&mut self, number: usize, arrives: bool) {
        let key = Bytes::from(format!("PREEMPTION_CURRENT_COUNTER/{number}"));
        self.call(number, Request::Insert { key, value: Bytes::from_static(b"41"), overwrite: true });
        if arrives {
            self.arrive(number, "PREEMPTION_SYNC_BARRIER", 180_000);
        }
    }

    /// Advances time by single seconds, with heartbeats and detection of findings.
    fn wait(&mut self, seconds: u64) {
        for _ in 0..seconds {
            self.now = self.now.after(SECOND);
            // The state machine does long work in steps.
            while self.core.next_wakeup().is_some_and(|due| due <= self.now) {
                self.apply(Input::Tick);
            }
            if self.now.since(BEGIN).as_secs().is_multiple_of(self.beat) {
                for id in self.beating.clone() {
                    let number = usize::try_from(id.0).unwrap();
                    let incarnation = TaskIncarnation(self.lives[number] * 1_000_000 + number as u64 + 1);
                    self.call(number, Request::Heartbeat { task: id, incarnation });
                }
            }
            let seen = self.core.observe_job(JOB, self.now).unwrap();
            for changed in
                self.findings.update(&seen, run_detectors(DetectorInput { job: &seen, clocks: &[] }))
            {
                let (open, finding) = match changed {
                    FindingTransition::Opened(finding) => (true, finding),
                    FindingTransition::Closed(finding) => (false, finding),
                };
                let note = FindingChange {
                    finding: finding.id,
                    open,
                    tasks: finding.tasks,
                    reason: finding.summary,
                };
                self.apply(Input::FindingChanged { job: JOB, note });
            }
        }
    }

    /// Returns the present snapshot of the job.
    fn snapshot(&self) -> JobSnapshot {
        let view = self.core.job_view(JOB, self.now).unwrap();
        let roster = self.core.job(JOB).unwrap().task_incarnations();
        let seen = self.core.observe_job(JOB, self.now).unwrap();
        let open = self
            .findings
            .open_findings_among(&seen, run_detectors(DetectorInput { job: &seen, clocks: &[] }));
        JobSnapshot::new(
            JOB,
            (view, roster),
            open,
            self.timelines.timeline_of(JOB),
            Arc::clone(&self.reports),
        )
    }

    /// Returns the text of one fragment of the job's page.
    fn says(&self, part: &str) -> String {
        let parts = job::render_fragments(&self.snapshot(), &TaskTableQuery::default())
            .unwrap_or_else(|_| panic!("it is made"));
        text(&parts, part, self.now)
    }

    /// Returns the headings of the issues in order.
    fn issues(&self) -> Vec<String> {
        issues::job_issues(&self.snapshot()).iter().map(|need| need.title.clone()).collect()
    }
}

/// Returns the text of a fragment as people read it.
fn text(parts: &[Fragment], id: &str, now: Timestamp) -> String {
    let part = parts.iter().find(|part| part.id == id).expect("the page has that part");
    let mut text = String::new();
    let mut within = false;
    for letter in times::fill_relative_times(&part.html, now).chars() {
        match letter {
            '<' => within = true,
            '>' => within = false,
            _ if !within => text.push(letter),
            _ => {}
        }
    }
    text.replace('\u{202f}', "").split_whitespace().collect::<Vec<_>>().join(" ")
}

#[track_caller]
fn has(text: &str, words: &str) {
    assert!(text.contains(words), "{words:?} is not in: {text}");
}

#[track_caller]
fn lacks(text: &str, words: &str) {
    assert!(!text.contains(words), "{words:?} is in: {text}");
}

fn recoverable(tasks: u32) -> JobSettings {
    JobSettings { recoverable: true, ..JobSettings::new(tasks) }
}

#[test]
fn the_failure_of_a_run_is_the_first_issue_and_what_does_not_hold_any_more_is_none() {
    let mut rig = PagesFixture::of(JobSettings::new(3), 5);
    (0..3).for_each(|number| rig.call(number, Request::PollForError { task: task(number) }));
    (0..2).for_each(|number| rig.arrive(number, "step", 3_600_000));
    rig.wait(40);
    assert_eq!(rig.issues(), ["1 task has not reached the barrier"]);
    rig.kill(2);
    // At once, and as long as the finding stays open.
    for _ in 0..12 {
        assert_eq!(rig.issues(), ["Run 1 failed"]);
        let said = rig.says("needs");
        has(&said, "First cause: task 2: connection reset while still registered; the process probably died");
        lacks(&said, "has not reached");
        rig.wait(1);
    }
}

#[test]
fn over_a_thousand_failed_tasks_stands_the_end_of_their_run() {
    let mut rig = PagesFixture::of(recoverable(1000), 20);
    (1..1000).for_each(|number| rig.arrive(number, "step", 3_600_000));
    rig.wait(40);
    assert_eq!(rig.issues(), ["1 task has not reached the barrier"]);
    (0..1000).for_each(|number| rig.kill(number));
    rig.wait(1);
    assert_eq!(rig.snapshot().count_with_status(TaskStatus::Failed), 1000);
    let issues = rig.issues();
    assert_eq!(issues[0], "Run 1 was abandoned", "{issues:?}");
    assert!(issues.iter().all(|issue| !issue.contains("reached the barrier")), "{issues:?}");
}

#[test]
fn a_finding_its_card_and_the_barrier_count_the_same_missing_tasks() {
    let mut rig = PagesFixture::of(recoverable(1000), 20);
    (108..1000).for_each(|number| rig.arrive(number, "train/step", 3_600_000));
    (0..100).for_each(|number| rig.kill(number));
    // First the page derives the issue itself, then the finding does.
    for waited in [10, 65] {
        rig.wait(waited);
        let (needs, waits) = (rig.says("needs"), rig.says("waits"));
        has(&waits, "108 tasks missing: 0–107");
        has(&waits, "892 of 1000");
        let more: Vec<&str> = needs.split(" in all)").collect();
        let totals: Vec<&str> =
            more[..more.len() - 1].iter().filter_map(|it| it.rsplit('(').next()).collect();
        assert!(totals.contains(&"108") && totals.contains(&"100"), "{totals:?}: {needs}");
        assert!(totals.iter().all(|total| ["100", "108"].contains(total)), "{totals:?}: {needs}");
        // Tasks that may still arrive are named before lost ones, which have an issue of their own.
        has(&needs, "Task 100 10.0.0.13:4100 connected, not at any barrier");
        has(&needs, "and 104 more (108 in all)");
    }
    has(&rig.says("needs"), "892 of 1000 tasks wait at barrier train/step");
    has(&rig.says("needs"), "108 tasks are missing.");
}

#[test]
fn a_drain_waits_for_the_task_that_restarted_after_it_had_acknowledged() {
    let mut rig = PagesFixture::of(recoverable(3), 5);
    let actor = Actor { who: "ops".into(), address: None, means: ActorOrigin::Cli };
    let reason = Reason::try_from("maintenance".to_owned()).unwrap();
    rig.apply(Input::Command { job: JOB, actor, reason, act: OperatorCommand::Drain { at: None } });
    let says = |rig: &PagesFixture| {
        let part = drain::render_status_fragment(&rig.snapshot()).unwrap_or_else(|_| panic!("it is made"));
        (text(std::slice::from_ref(&part), "drain", rig.now), part.html)
    };
    rig.acknowledge(2, false);
    has(&says(&rig).0, "1 of 3 live tasks have acknowledged");
    rig.kill(2);
    rig.wait(2);
    rig.register(2);
    (0..2).for_each(|number| rig.acknowledge(number, true));
    rig.wait(40);
    let (said, html) = says(&rig);
    has(
        &said,
        "All 3 live tasks have acknowledged; 2 of 3 have reached the barrier at which they agree on a step",
    );
    has(&said, "Waiting for 1 task Task 2 10.0.0.1:4002 restarted, has not completed a barrier since");
    assert!(html.contains("width=\"666\""), "the bar is not full: {html}");
    rig.acknowledge(2, true);
    let (said, html) = says(&rig);
    has(&said, "All save at step 42");
    lacks(&said, "Waiting");
    assert!(html.contains("class=\"i-info\" width=\"1000\""), "{html}");
}

#[test]
fn a_job_without_issues_does_not_claim_that_all_tasks_are_at_the_barrier() {
    let mut rig = PagesFixture::of(JobSettings::new(4), 5);
    assert_eq!(rig.says("needs"), "No action needed");
    rig.arrive(0, "step", 3_600_000);
    rig.wait(1);
    assert_eq!(rig.says("needs"), "No action needed yet: 1 of 4 tasks waits at step");
    has(&rig.says("waits"), "3 tasks still to arrive");
    rig.wait(4);
    assert_eq!(rig.issues(), ["1 of 4 tasks waits at step for 3 tasks"]);
    // The tasks that are done wait for the others. That may take long and needs no operator.
    let mut rig = PagesFixture::of(JobSettings::new(4), 5);
    rig.call(0, Request::Shutdown { task: task(0) });
    rig.wait(20);
    assert_eq!(rig.says("needs"), "No action needed yet: 1 of 4 tasks waits at shutdown");
}

#[test]
fn a_task_is_awaited_for_as_long_as_the_others_have_waited() {
    let mut rig = PagesFixture::of(recoverable(8), 5);
    rig.wait(52);
    (0..7).for_each(|number| rig.arrive(number, "step", 3_600_000));
    rig.wait(23);
    let snapshot = rig.snapshot();
    let awaited = snapshot.find_task(task(7)).unwrap();
    assert_eq!(snapshot.status_since(awaited), Timestamp(rig.now.0 - 23_000_000));
    // The table of tasks, the page of the task and the issue show the same.
    let row = rig.says("tasks");
    let row = row.rsplit("awaited").next().unwrap();
    assert!(row.trim_start().starts_with("23 s"), "{row}");
    has(&rig.says("needs"), "7 of 8 tasks wait at step for task 7 for 23 s");
    let waits = rig.says("waits");
    has(&waits, "first arrival: task 0; latest: task 6, 23 s ago; times out in 59 min 37 s");
}

#[test]
fn merged_issues_show_the_newest_time_and_the_failed_barrier() {
    let mut rig = PagesFixture::empty(recoverable(3), 5);
    (0..2).for_each(|number| rig.register(number));
    has(
        &rig.says("timeline"),
        "2 tasks: 0–1: latest, task 1: registered from 10.0.0.1:4001; 1 task is missing",
    );
    rig.register(2);
    has(&rig.says("timeline"), "latest, task 2: registered from 10.0.0.1:4002; no task is missing");
    lacks(&rig.says("timeline"), "2 tasks are missing");
    rig.arrive(0, "train/step", 5_000);
    rig.wait(6);
    has(
        &rig.says("timeline"),
        "barrier failed 1 s ago train/step: timed out with 1 of 3 tasks at the barrier; missing:",
    );
}

#[test]
fn a_restarted_healthy_task_is_not_shown_as_stuck() {
    let mut rig = PagesFixture::of(recoverable(8), 5);
    rig.wait(5);
    for number in 0..3 {
        rig.kill(number);
        rig.wait(2);
        rig.register(number);
    }
    rig.arrive(0, "step", 3_600_000);
    rig.wait(1);
    let said = rig.says("needs");
    has(&said, "3 tasks restarted in the last ten minutes; most often task 0: 1 restart in this run");
    has(&said, "Task 0 10.0.0.1:4000 waits at step;");
    has(&said, "Task 1 10.0.0.1:4001 restarted, has not completed a barrier since;");
    for words in ["1th", "instead", "stuck", "busy", "not at any barrier"] {
        lacks(&said, words);
    }
}

#[test]
fn a_silent_task_is_not_shown_as_sending_heartbeats() {
    let settings = JobSettings { heartbeat_timeout: Duration::from_secs(600), ..recoverable(3) };
    let mut rig = PagesFixture::of(settings, 5);
    rig.wait(20);
    (0..2).for_each(|number| rig.arrive(number, "step", 3_600_000));
    rig.wait(5);
    has(&rig.says("needs"), "Its heartbeats continue, so no heartbeat timeout will clear this.");
    rig.beating.remove(&task(2));
    // Before the finding and with it.
    for waited in [13, 30] {
        rig.wait(waited);
        let said = rig.says("needs");
        has(&said, if waited == 13 { "sent no heartbeat for 13 s" } else { "sent no heartbeat for 43 s" });
        has(&said, "Task 2 10.0.0.1:4002 connected, but its heartbeats are overdue; heartbeat");
        for words in ["Alive", "alive", "Its heartbeats continue", "missing task continue"] {
            lacks(&said, words);
        }
    }
    assert_eq!(rig.issues(), ["1 task has not reached the barrier"]);
}

#[test]
fn issues_are_ordered_alike_on_the_overview() {
    let mut rig = PagesFixture::of(JobSettings::new(3), 5);
    (0..3).for_each(|number| rig.call(number, Request::PollForError { task: task(number) }));
    rig.kill(1);
    let mut survey = overview::FleetSnapshot::empty(rig.now);
    let mut stuck = PagesFixture::of(recoverable(3), 5);
    (0..2).for_each(|number| stuck.arrive(number, "step", 3_600_000));
    stuck.wait(40);
    survey.add_job(&stuck.snapshot());
    survey.add_job(&rig.snapshot());
    let parts =
        overview::render_fragments(&survey.sorted_by_urgency()).unwrap_or_else(|_| panic!("it is made"));
    let said = text(&parts, "needs", stuck.now);
    assert!(said.starts_with("2 issues train: Run 1 failed"), "{said}");
}
