//! Tests the texts of pages for jobs in virtual time, with the real state machine and the real detectors.
//!
//! `tests/guard` and `tests/browser` test the pages over HTTP. Begin at `PagesFixture`.

mod issue_lists;

use std::collections::BTreeSet;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;

use super::fragment::Fragment;
use super::frame::PageUser;
use super::live_page::{BarriersPageQuery, HostsPageQuery, TaskTableQuery};
use super::snapshot::{CapturedState, JobRecords, JobSnapshot};
use super::status::TaskStatus;
use super::waterfall::{OpenedBarrier, Waterfall};
use super::{barriers, drain, host, hosts, issues, job, overview, times};
use crate::coordination::{
    Actor, ActorOrigin, CallId, Caller, CommandReason, ConnectionEnd, ConnectionId, Coordinator, Effect,
    ExclusionTarget, FindingChange, Input, JobId, JobSettings, OperatorCommand, Request, ServiceIncarnation,
    TaskId, TaskIncarnation, Timestamp,
};
use crate::engine::Observer as _;
use crate::http::page_times::{TimeStyle, fill_times};
use crate::service::findings::{self, DetectorInput, FindingTransition, run_detectors};
use crate::service::{BarrierHistory, JobActivity, StateHistory, Timelines, reports};

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
    barriers: BarrierHistory,
    states: StateHistory,
    reports: Arc<reports::TransferReportStore>,
}

fn task_id(number: usize) -> TaskId {
    TaskId(i32::try_from(number).unwrap())
}

impl PagesFixture {
    /// Returns a job whose tasks have all registered.
    fn with_registered_tasks(settings: JobSettings, beat: u64) -> Self {
        let mut rig = Self::without_registered_tasks(settings, beat);
        (0..rig.lives.len()).for_each(|number| rig.register_task(number));
        assert_eq!(rig.snapshot().view.run.live, rig.lives.len());
        rig
    }

    /// Returns a job without registered tasks.
    fn without_registered_tasks(settings: JobSettings, beat: u64) -> Self {
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
            barriers: BarrierHistory::default(),
            states: StateHistory::default(),
            reports: Arc::default(),
        };
        let name = "train".parse().unwrap();
        let incarnation = ServiceIncarnation(7);
        rig.apply_input(Input::DeclareJob {
            job: JOB,
            name,
            settings: Box::new(settings),
            incarnation,
            actor: None,
        });
        rig
    }

    fn apply_input(&mut self, input: Input) {
        let mut effects = Vec::new();
        self.core.apply(self.now, input, &mut effects);
        while self.core.has_pending_work() {
            self.core.apply(self.now, Input::Tick, &mut effects);
        }
        for effect in effects {
            match effect {
                Effect::Event(event) => {
                    self.timelines.on_event(&event);
                    self.barriers.on_event(&event);
                    self.states.on_event(&event);
                }
                Effect::CommandDone(done) => assert!(done.is_ok(), "{done:?}"),
                Effect::RequestIncarnation(job) => {
                    self.calls += 1;
                    let incarnation = ServiceIncarnation(1000 + self.calls);
                    self.apply_input(Input::NextIncarnation { job, incarnation });
                }
                Effect::BarrierEnded(ending) => self.barriers.on_barrier_ended(&ending),
                Effect::Reply(..) | Effect::ClaimAnswered(_) | Effect::FreeLater(_) => {}
            }
        }
    }

    fn connection(&self, number: usize) -> ConnectionId {
        ConnectionId(self.lives[number] * 100_000 + number as u64)
    }

    fn call_as_task(&mut self, number: usize, request: Request) {
        self.calls += 1;
        let caller = Caller { connection: self.connection(number), claim: None };
        self.apply_input(Input::Call { job: JOB, call: CallId(self.calls), caller, request });
    }

    /// Registers a new life of a task; eight tasks share a host.
    fn register_task(&mut self, number: usize) {
        self.lives[number] += 1;
        let host = number / 8;
        let ip = [10, 0, u8::try_from(host / 250).unwrap(), u8::try_from(host % 250 + 1).unwrap()];
        let peer = SocketAddr::from((ip, u16::try_from(4000 + number).unwrap()));
        self.apply_input(Input::ConnectionOpened { connection: self.connection(number), peer });
        let incarnation = TaskIncarnation(self.lives[number] * 1_000_000 + number as u64 + 1);
        let recoverable = self.recoverable;
        self.call_as_task(number, Request::Register { task: task_id(number), incarnation, recoverable });
        self.beating.insert(task_id(number));
    }

    /// Kills the process of a task.
    fn kill_task(&mut self, number: usize) {
        self.beating.remove(&task_id(number));
        self.apply_input(Input::ConnectionClosed {
            connection: self.connection(number),
            ending: ConnectionEnd::Reset,
        });
    }

    fn call_barrier(&mut self, number: usize, barrier: &str, timeout_ms: i64) {
        let id = barrier.to_owned();
        self.call_as_task(
            number,
            Request::Barrier { id, counter: 0, timeout_ms, members: None, task: task_id(number) },
        );
    }

    /// Makes a task acknowledge a preemption notice: it writes its step and goes to the barrier.
    fn acknowledge_preemption_notice(&mut self, number: usize, arrives: bool) {
        let key = Bytes::from(format!("PREEMPTION_CURRENT_COUNTER/{number}"));
        self.call_as_task(number, Request::Insert { key, value: Bytes::from_static(b"41"), overwrite: true });
        if arrives {
            self.call_barrier(number, "PREEMPTION_SYNC_BARRIER", 180_000);
        }
    }

    /// Advances time by single seconds, with heartbeats and detection of findings.
    fn advance_seconds(&mut self, seconds: u64) {
        for _ in 0..seconds {
            self.now = self.now.after(SECOND);
            // The state machine does long work in steps.
            while self.core.next_wakeup().is_some_and(|due| due <= self.now) {
                self.apply_input(Input::Tick);
            }
            if self.now.since(BEGIN).as_secs().is_multiple_of(self.beat) {
                for id in self.beating.clone() {
                    let number = usize::try_from(id.0).unwrap();
                    let incarnation = TaskIncarnation(self.lives[number] * 1_000_000 + number as u64 + 1);
                    self.call_as_task(number, Request::Heartbeat { task: id, incarnation });
                }
            }
            let seen = self.core.observe_job(JOB, self.now).unwrap();
            for changed in self
                .findings
                .update_with_detections(&seen, run_detectors(DetectorInput::without_reports(&seen)))
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
                self.apply_input(Input::FindingChanged { job: JOB, note });
            }
        }
    }

    /// Returns the present snapshot of the job.
    fn snapshot(&self) -> JobSnapshot {
        let state = CapturedState::capture(&self.core, JOB, self.now).unwrap();
        let seen = self.core.observe_job(JOB, self.now).unwrap();
        let open =
            self.findings.open_findings_among(&seen, run_detectors(DetectorInput::without_reports(&seen)));
        let records = JobRecords {
            timeline: self.timelines.timeline_of(JOB),
            ended_barriers: self.barriers.latest_first(JOB),
            state_history: self.states.of_run(JOB, state.run()),
            reports: Arc::clone(&self.reports),
        };
        JobSnapshot::new(JOB, state, open, records)
    }

    /// Returns the text of one fragment of the job's page.
    fn job_page_fragment_text(&self, part: &str) -> String {
        let parts = job::render_fragments(&self.snapshot(), &TaskTableQuery::default())
            .unwrap_or_else(|_| panic!("it is made"));
        visible_fragment_text(&parts, part, self.now)
    }

    /// Returns the headings of the issues in order.
    fn issue_titles(&self) -> Vec<String> {
        issues::job_issues(&self.snapshot()).iter().map(|need| need.title.clone()).collect()
    }
}

/// Returns the text of a fragment as people read it.
fn visible_fragment_text(parts: &[Fragment], id: &str, now: Timestamp) -> String {
    let part = parts.iter().find(|part| part.id == id).expect("the page has that part");
    let mut text = String::new();
    let mut within = false;
    for letter in fill_times(&part.html, now, TimeStyle::Relative).chars() {
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
fn assert_contains(text: &str, words: &str) {
    assert!(text.contains(words), "{words:?} is not in: {text}");
}

#[track_caller]
fn assert_lacks(text: &str, words: &str) {
    assert!(!text.contains(words), "{words:?} is in: {text}");
}

fn recoverable_job_settings(tasks: u32) -> JobSettings {
    JobSettings { recoverable: true, ..JobSettings::new(tasks) }
}

#[test]
fn the_failure_of_a_run_is_the_first_issue_and_what_does_not_hold_any_more_is_none() {
    let mut rig = PagesFixture::with_registered_tasks(JobSettings::new(3), 5);
    (0..3).for_each(|number| rig.call_as_task(number, Request::PollForError { task: task_id(number) }));
    (0..2).for_each(|number| rig.call_barrier(number, "step", 3_600_000));
    rig.advance_seconds(40);
    assert_eq!(rig.issue_titles(), ["1 task has not reached the barrier"]);
    rig.kill_task(2);
    // At once, and as long as the finding stays open.
    for _ in 0..12 {
        assert_eq!(rig.issue_titles(), ["Run 1 failed"]);
        let said = rig.job_page_fragment_text("needs");
        assert_contains(
            &said,
            "First cause: task 2: connection reset while still registered; the process probably died",
        );
        assert_lacks(&said, "has not reached");
        rig.advance_seconds(1);
    }
}

#[test]
fn over_a_thousand_failed_tasks_stands_the_end_of_their_run() {
    let mut rig = PagesFixture::with_registered_tasks(recoverable_job_settings(1000), 20);
    (1..1000).for_each(|number| rig.call_barrier(number, "step", 3_600_000));
    rig.advance_seconds(40);
    assert_eq!(rig.issue_titles(), ["1 task has not reached the barrier"]);
    (0..1000).for_each(|number| rig.kill_task(number));
    rig.advance_seconds(1);
    assert_eq!(rig.snapshot().status_counts(), [(TaskStatus::Failed, 1000)]);
    let issues = rig.issue_titles();
    assert_eq!(issues[0], "Run 1 was abandoned", "{issues:?}");
    assert!(issues.iter().all(|issue| !issue.contains("reached the barrier")), "{issues:?}");
}

#[test]
fn a_finding_its_card_and_the_barrier_count_the_same_missing_tasks() {
    let mut rig = PagesFixture::with_registered_tasks(recoverable_job_settings(1000), 20);
    (108..1000).for_each(|number| rig.call_barrier(number, "train/step", 3_600_000));
    (0..100).for_each(|number| rig.kill_task(number));
    // First the page derives the issue itself, then the finding does.
    for waited in [10, 65] {
        rig.advance_seconds(waited);
        let (needs, waits) = (rig.job_page_fragment_text("needs"), rig.job_page_fragment_text("waits"));
        assert_contains(&waits, "108 tasks have not arrived: 0–107");
        assert_contains(&waits, "892 of 1000");
        let more: Vec<&str> = needs.split(" in all)").collect();
        let totals: Vec<&str> =
            more[..more.len() - 1].iter().filter_map(|it| it.rsplit('(').next()).collect();
        assert!(totals.contains(&"108") && totals.contains(&"100"), "{totals:?}: {needs}");
        assert!(totals.iter().all(|total| ["100", "108"].contains(total)), "{totals:?}: {needs}");
        // Tasks that may still arrive are named before lost ones, which have an issue of their own.
        assert_contains(&needs, "Host 10.0.0.13 all 8 tasks (96–103): 4 failed, 4 awaited");
        assert_contains(&needs, "Task 104 10.0.0.14:4104 connected, not at any barrier");
        assert_contains(&needs, "and 97 more (108 in all)");
    }
    assert_contains(&rig.job_page_fragment_text("needs"), "892 of 1000 tasks wait at barrier train/step");
    assert_contains(&rig.job_page_fragment_text("needs"), "108 tasks have not arrived.");
}

#[test]
fn a_drain_waits_for_the_task_that_restarted_after_it_had_acknowledged() {
    let mut rig = PagesFixture::with_registered_tasks(recoverable_job_settings(3), 5);
    let actor = Actor { who: "ops".into(), address: None, means: ActorOrigin::Cli };
    let reason = CommandReason::try_from("maintenance".to_owned()).unwrap();
    rig.apply_input(Input::Command { job: JOB, actor, reason, act: OperatorCommand::Drain { at: None } });
    let says = |rig: &PagesFixture| {
        let part = drain::render_status_fragment(&rig.snapshot()).unwrap_or_else(|_| panic!("it is made"));
        (visible_fragment_text(std::slice::from_ref(&part), "drain", rig.now), part.html)
    };
    rig.acknowledge_preemption_notice(2, false);
    assert_contains(&says(&rig).0, "1 of 3 live tasks have acknowledged");
    rig.kill_task(2);
    rig.advance_seconds(2);
    rig.register_task(2);
    (0..2).for_each(|number| rig.acknowledge_preemption_notice(number, true));
    rig.advance_seconds(40);
    let (said, html) = says(&rig);
    assert_contains(
        &said,
        "All 3 live tasks have acknowledged; 2 of 3 have reached the barrier at which they agree on a step",
    );
    assert_contains(
        &said,
        "Waiting for 1 task Task 2 10.0.0.1:4002 restarted, has not completed a barrier since",
    );
    assert!(html.contains("width=\"666\""), "the bar is not full: {html}");
    rig.acknowledge_preemption_notice(2, true);
    let (said, html) = says(&rig);
    assert_contains(&said, "All save at step 42");
    assert_lacks(&said, "Waiting");
    assert!(html.contains("class=\"i-info\" width=\"1000\""), "{html}");
}

#[test]
fn a_job_without_issues_does_not_claim_that_all_tasks_are_at_the_barrier() {
    let mut rig = PagesFixture::with_registered_tasks(JobSettings::new(4), 5);
    assert_eq!(rig.job_page_fragment_text("needs"), "No action needed");
    rig.call_barrier(0, "step", 3_600_000);
    rig.advance_seconds(2);
    assert_eq!(rig.job_page_fragment_text("needs"), "No action needed");
    assert_contains(&rig.job_page_fragment_text("waits"), "step 1 of 4 arrived");
    rig.call_barrier(1, "step", 3_600_000);
    rig.advance_seconds(2);
    assert_eq!(rig.job_page_fragment_text("needs"), "No action needed yet: 2 of 4 tasks wait at step");
    rig.advance_seconds(2);
    assert_eq!(rig.issue_titles(), ["2 of 4 tasks wait at step for 2 tasks"]);
    // The tasks that are done wait for the others. That may take long and needs no operator.
    let mut rig = PagesFixture::with_registered_tasks(JobSettings::new(4), 5);
    rig.call_as_task(0, Request::Shutdown { task: task_id(0) });
    rig.advance_seconds(20);
    assert_eq!(rig.job_page_fragment_text("needs"), "No action needed yet: 1 of 4 tasks waits at shutdown");
}

#[test]
fn a_task_is_awaited_for_as_long_as_the_others_have_waited() {
    let mut rig = PagesFixture::with_registered_tasks(recoverable_job_settings(8), 5);
    rig.advance_seconds(52);
    (0..7).for_each(|number| rig.call_barrier(number, "step", 3_600_000));
    rig.advance_seconds(23);
    let snapshot = rig.snapshot();
    let awaited = snapshot.find_task(task_id(7)).unwrap();
    assert_eq!(snapshot.status_since(awaited), Timestamp(rig.now.0 - 23_000_000));
    // The table of tasks, the page of the task and the issue show the same.
    let row = rig.job_page_fragment_text("tasks");
    let row = row.rsplit("awaited").next().unwrap();
    assert!(row.trim_start().starts_with("23 s"), "{row}");
    assert_contains(&rig.job_page_fragment_text("needs"), "7 of 8 tasks wait at step for task 7 for 23 s");
    let waits = rig.job_page_fragment_text("waits");
    assert_contains(&waits, "first arrival: task 0; latest: task 6, 23 s ago; times out in 59 min 37 s");
}

#[test]
fn a_task_that_comes_late_is_named_after_three_barriers_and_is_a_finding_after_eight() {
    let mut rig = PagesFixture::with_registered_tasks(recoverable_job_settings(8), 5);
    let mut said = Vec::new();
    for counter in 0..12 {
        let late = counter >= 2;
        for number in (0..8).filter(|number| !late || *number != 5).chain(late.then_some(5)) {
            if late && number == 5 {
                rig.advance_seconds(1);
            }
            let (id, task) = ("step".to_owned(), task_id(number));
            let request = Request::Barrier { id, counter, timeout_ms: 60_000, members: None, task };
            rig.call_as_task(number, request);
        }
        rig.advance_seconds(1);
        said.push(rig.job_page_fragment_text("needs"));
    }
    let first = |words: &str| said.iter().position(|said| said.contains(words));
    assert_eq!(first("No action needed yet: task 5 was late at 3 of the last 4 barriers"), Some(4));
    assert_eq!(first("late at 4 of the last 4 barriers"), Some(5));
    assert_eq!(first("1 task is late at nearly every barrier"), Some(9), "{said:#?}");
    assert_contains(
        &said[9],
        "1 task was late at 8 of the last 9 barriers, by 1000 ms on average after the first arrival",
    );
}

#[test]
fn merged_issues_show_the_newest_time_and_the_failed_barrier() {
    let mut rig = PagesFixture::without_registered_tasks(recoverable_job_settings(3), 5);
    (0..2).for_each(|number| rig.register_task(number));
    assert_contains(
        &rig.job_page_fragment_text("timeline"),
        "2 tasks: 0–1: latest, task 1: registered from 10.0.0.1:4001; 1 task is missing",
    );
    rig.register_task(2);
    assert_contains(
        &rig.job_page_fragment_text("timeline"),
        "latest, task 2: registered from 10.0.0.1:4002; no task is missing",
    );
    assert_lacks(&rig.job_page_fragment_text("timeline"), "2 tasks are missing");
    rig.call_barrier(0, "train/step", 5_000);
    rig.advance_seconds(6);
    assert_contains(
        &rig.job_page_fragment_text("timeline"),
        "barrier failed 1 s ago train/step: timed out with 1 of 3 tasks at the barrier; missing:",
    );
}

#[test]
fn a_dead_host_is_one_issue_one_box_and_one_page() {
    let mut rig = PagesFixture::with_registered_tasks(recoverable_job_settings(32), 5);
    (8..16).for_each(|number| rig.kill_task(number));
    rig.advance_seconds(10);
    assert_eq!(rig.issue_titles(), ["8 tasks have failed: all tasks of host 10.0.0.2"]);
    let needs = rig.job_page_fragment_text("needs");
    assert_contains(&needs, "Host 10.0.0.2 all 8 tasks (8–15): 8 failed");
    assert_contains(&rig.job_page_fragment_text("timeline"), "8 tasks: 8–15 (on 10.0.0.2): ");
    assert_contains(&needs, "Exclude host…");
    assert_lacks(&needs, "Task 8 10.0.0.2");
    let hosts = hosts::render_fragments(&rig.snapshot(), &HostsPageQuery::default()).unwrap_or_default();
    let picture = visible_fragment_text(&hosts, "hosts", rig.now);
    assert_contains(&picture, "4 hosts 1 down3 healthy");
    assert_contains(&picture, "10.0.0.2, tasks 8–15: down, 8 failed");
    let table = visible_fragment_text(&hosts, "host-table", rig.now);
    assert_contains(&table, "10.0.0.2 down 8–150 of 8");
    let user = PageUser { operator: true, ..PageUser::default() };
    let page =
        host::render_fragments(&rig.snapshot(), &user, "10.0.0.2").unwrap_or_default().expect("a host");
    assert_contains(&visible_fragment_text(&page, "host", rig.now), "Tasks8–15 States8 failed");
    assert_contains(&visible_fragment_text(&page, "host-act", rig.now), "All 8 tasks leave the run at once");
    assert_contains(&visible_fragment_text(&page, "timeline", rig.now), "8 tasks: 8–15");
    assert!(host::render_fragments(&rig.snapshot(), &user, "10.0.0.9").unwrap_or_default().is_none());

    // Its address is its own, so that it is excluded by it. A host whose name is not its address behaves alike.
    let host = rig.core.job(JOB).unwrap().excluded_host("10.0.0.2").expect("a host");
    let target = ExclusionTarget::NamedHost(Arc::new(host));
    let actor = Actor { who: "ops".into(), address: None, means: ActorOrigin::Cli };
    let reason = CommandReason::try_from("ECC errors".to_owned()).unwrap();
    let act = OperatorCommand::Exclude { target, expires_in: None, end_run: false };
    rig.apply_input(Input::Command { job: JOB, actor, reason, act });
    let page =
        host::render_fragments(&rig.snapshot(), &user, "10.0.0.2").unwrap_or_default().expect("a host");
    assert_contains(&visible_fragment_text(&page, "host-act", rig.now), "host 10.0.0.2 is excluded");
    assert_contains(&visible_fragment_text(&page, "host", rig.now), "excluded");
    assert_eq!(rig.issue_titles(), [""; 0]);
}

#[test]
fn an_ended_barrier_tells_how_many_of_its_members_are_not_named() {
    let mut rig = PagesFixture::with_registered_tasks(recoverable_job_settings(24), 5);
    (0..12).for_each(|number| rig.call_barrier(number, "train/step", 1_000));
    rig.advance_seconds(2);
    let parts = barriers::render_fragments(&rig.snapshot(), &BarriersPageQuery::default());
    let text = visible_fragment_text(&parts.unwrap_or_else(|_| panic!("it is made")), "recent", rig.now);
    assert_contains(&text, "12/24 task 11 12–19 and 4 more");
}

#[test]
fn the_picture_of_a_barrier_has_the_numbers_of_its_record() {
    let mut rig = PagesFixture::with_registered_tasks(recoverable_job_settings(24), 5);
    for use_of_barrier in 0..3_u64 {
        for number in 0..24_usize {
            // The tasks of the second host come late.
            rig.now =
                rig.now.after(Duration::from_millis(if number / 8 == 1 { 50 + use_of_barrier } else { 1 }));
            let id = "train/step".to_owned();
            let counter = i64::try_from(use_of_barrier).unwrap();
            let request =
                Request::Barrier { id, counter, timeout_ms: 60_000, members: None, task: task_id(number) };
            rig.call_as_task(number, request);
        }
    }
    let snapshot = rig.snapshot();
    let records = &snapshot.view.run.recent_barriers;
    let query = BarriersPageQuery { barrier: "train/step".into(), ..BarriersPageQuery::default() };
    let waterfall = Waterfall::new(&snapshot, &query);
    let records: Vec<_> = records.iter().filter(|record| *record.id == *"train/step").collect();
    assert_eq!((waterfall.rows.len(), records.len()), (3, 3));
    for (row, record) in waterfall.rows.iter().zip(&records) {
        let (skew, waited) =
            (times::microseconds_text(&record.skew_us), times::microseconds_text(&record.waited_us));
        assert_contains(&row.description, &format!("24 of 24 arrived within {skew}"));
        assert_contains(
            &row.description,
            &format!("task {} was last; {waited} blocked", record.last.unwrap()),
        );
    }
    for by in ["host", "task"] {
        let opened = format!("1/{}/train/step", records[0].counter);
        let query = BarriersPageQuery { opened, by: by.into(), ..BarriersPageQuery::default() };
        let it = OpenedBarrier::new(&snapshot, &query).expect("it is kept");
        assert_eq!(it.rows.len(), if by == "host" { 3 } else { 24 });
        assert_eq!(it.rows.iter().map(|row| row.blocked_us).sum::<u64>(), records[0].waited_us, "{by}");
        let latest = it.rows.iter().map(|row| row.after_us.1).max();
        assert_eq!(latest, Some(records[0].skew_us), "{by}");
    }
    let gone = BarriersPageQuery { opened: "1/99/train/step".into(), ..BarriersPageQuery::default() };
    assert!(OpenedBarrier::new(&snapshot, &gone).is_none());
}
