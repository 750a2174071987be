//! Tests of what the state machine measures: heartbeats, late arrivals, and findings.

use std::time::Duration;

use bytes::Bytes;
use muster::coordination::{
    BarrierKind, BarrierOutcome, ConnectionEnd, EventKind, FindingChange, Input, Request, RunState, TaskId,
    TaskSet, Timestamp,
};

use muster::service::findings::{DetectorInput, run_detectors};

use crate::coordinator::JOB;
use crate::rules::{SimulatedJob, id_of_task};

const STEP: Duration = Duration::from_millis(100);

impl SimulatedJob {
    /// Lets every task arrive at a barrier, the late ones after the given number of steps.
    fn run_barrier_round(&mut self, counter: i64, late: &[(usize, u32)]) {
        let tasks = self.coordinator.job_view().run.tasks.len();
        for task in (0..tasks).filter(|task| late.iter().all(|(late, _)| late != task)) {
            self.call_barrier(task, "step", counter);
        }
        for (task, steps) in late {
            self.coordinator.advance_time(STEP * *steps);
            self.call_barrier(*task, "step", counter);
        }
    }

    fn send_heartbeat(&mut self, task: usize) {
        let incarnation = self.lives[task];
        self.call(task, Request::Heartbeat { task: id_of_task(task), incarnation });
    }
}

#[test]
fn an_ended_barrier_leaves_a_record_of_who_came_when() {
    let mut job = SimulatedJob::fate_sharing(3);
    job.run_barrier_round(0, &[(2, 1), (0, 2)]);
    let view = job.coordinator.job_view().run;
    let record = &view.recent_barriers[0];
    assert_eq!((record.id.as_ref(), record.counter, record.kind), ("step", 0, BarrierKind::Client));
    assert_eq!((record.first, record.last), (Some(TaskId(1)), Some(TaskId(0))));
    assert_eq!((record.skew_us, record.waited_us), (300_000, 500_000));
    assert_eq!(record.outcome, BarrierOutcome::Passed);
    let lateness: Vec<(i32, u64)> =
        record.latest.iter().map(|arrival| (arrival.task.0, record.lateness_us(arrival))).collect();
    assert_eq!(lateness, [(0, 300_000), (2, 100_000), (1, 0)]);
    assert_eq!(view.recent_barriers[1].kind, BarrierKind::Registration);
}

#[test]
fn a_barrier_in_progress_says_who_came_when() {
    let mut job = SimulatedJob::fate_sharing(3);
    let began = job.coordinator.now;
    job.call_barrier(1, "step", 0);
    job.coordinator.advance_time(STEP);
    job.call_barrier(0, "step", 0);
    let barrier = &job.coordinator.job_view().run.barriers[0];
    let arrivals: Vec<(i32, u64)> =
        barrier.arrivals.iter().map(|arrival| (arrival.task.0, arrival.at.0 - began.0)).collect();
    assert_eq!(arrivals, [(1, 0), (0, 100_000)]);
}

#[test]
fn records_are_bounded_and_the_oldest_go_first() {
    let mut job = SimulatedJob::fate_sharing(2);
    let bound = job.coordinator.job_view().settings.bounds.barriers_recent;
    for counter in 0..300 {
        job.run_barrier_round(counter, &[]);
    }
    let recent = job.coordinator.job_view().run.recent_barriers;
    assert_eq!((recent.len(), recent[0].counter), (bound, 299));
    assert_eq!(recent[bound - 1].counter, 300 - i64::try_from(bound).expect("a small bound"));
}

#[test]
fn straggling_counts_repeated_lateness_only() {
    let mut job = SimulatedJob::fate_sharing(4);
    for counter in 0..40 {
        let mut late = vec![(3, 2)];
        if counter == 20 {
            late.push((1, 5));
        }
        job.run_barrier_round(counter, &late);
    }
    let tasks = job.coordinator.job_view().run.tasks;
    let of = |task: usize| tasks[task].straggling.clone().expect("it took part");
    assert!(of(3).score > 0.9 && of(3).recent_last == 39, "{:?}", of(3));
    assert!(of(1).score < 0.1 && of(1).recent_last == 1, "{:?}", of(1));
    assert_eq!((of(0).score, of(0).held_up_us), (0.0, 0));
    assert_eq!(of(3).held_up_us, 39 * 200_000);
    assert_eq!((of(3).taken_part, of(3).recent), (40, 40));
}

#[test]
fn heartbeats_are_measured_within_one_life_and_not_while_the_service_was_away() {
    let mut job = SimulatedJob::recoverable(2);
    for _ in 0..4 {
        job.send_heartbeat(0);
        job.coordinator.advance_time(Duration::from_secs(10));
    }
    job.coordinator.apply_input(Input::DriverLagged);
    job.send_heartbeat(0);
    job.coordinator.advance_time(Duration::from_secs(10));
    job.restart_task(0);
    job.send_heartbeat(0);
    let task = &job.coordinator.job_view().run.tasks[0];
    let pulse = task.pulse.clone().expect("it beats");
    assert_eq!((pulse.gaps.gap_count(), pulse.gaps.sum_us), (3, 30_000_000));
    assert_eq!((pulse.interval_us, pulse.longest_recent_us), (10_000_000, 10_000_000));
    assert_eq!(task.live_since, Some(job.coordinator.now));
}

#[test]
fn keys_know_who_wrote_them() {
    let mut job = SimulatedJob::fate_sharing(2);
    for value in ["a", "bb"] {
        let (key, value) = (Bytes::from_static(b"d/k"), Bytes::from(value));
        job.call(1, Request::Insert { key, value, overwrite: true });
    }
    let lines = job.coordinator.core.job(JOB).expect("the job is there").list_keys(b"d", b"", false, 10);
    let [line] = &lines[..] else { panic!("{lines:?}") };
    assert_eq!((&line.key[..], line.value_bytes, line.written_by), (&b"d/k"[..], Some(2), Some(TaskId(1))));
}

#[test]
fn an_observation_says_what_the_view_says() {
    let mut job = SimulatedJob::fate_sharing(3);
    job.run_barrier_round(0, &[(2, 1)]);
    job.call_barrier(0, "next", 0);
    let (view, seen) = (
        job.coordinator.job_view(),
        job.coordinator.core.observe_job(JOB, job.coordinator.now).expect("the job is there"),
    );
    assert_eq!((seen.state, seen.live), (RunState::Running, 3));
    assert_eq!(seen.counts.connected, 3);
    assert_eq!((seen.barriers.len(), seen.barriers[0].missing), (1, 2));
    assert_eq!(seen.barriers[0].missing_tasks, view.run.barriers[0].missing);
    assert_eq!(seen.recent.len(), view.run.recent_barriers.len());
    assert_eq!(seen.waiting.barrier, 1);
    assert!(seen.tasks[0].is_waiting && !seen.tasks[1].is_waiting);
    let used = |name: &str| seen.bounds.iter().find(|bound| bound.name == name).and_then(|bound| bound.used);
    assert_eq!((used("waiters"), used("barriers-recent")), (Some(1), Some(2)));
    job.coordinator.close_connection(job.connections[0], ConnectionEnd::Reset);
    job.coordinator.advance_time(Duration::from_secs(5));
    let seen = job.coordinator.core.observe_job(JOB, job.coordinator.now).expect("the job is there");
    assert_eq!((seen.state, seen.counts.failed), (RunState::Failed, 3));
}

#[test]
fn a_finding_is_an_event_and_changes_no_other_state() {
    let mut job = SimulatedJob::fate_sharing(2);
    job.coordinator.record_start_of_replay();
    let before = job.coordinator.job_view().run;
    for open in [true, false] {
        let note = FindingChange {
            finding: "stalled-task".into(),
            open,
            tasks: vec![TaskId(1)],
            reason: "everybody waits for it".into(),
        };
        job.coordinator.apply_input(Input::FindingChanged { job: JOB, note });
    }
    assert_eq!(job.coordinator.job_view().run, before);
    let told: Vec<&EventKind> =
        job.coordinator.events.iter().rev().take(2).map(|event| &event.what).collect();
    assert!(
        matches!(told[..], [EventKind::FindingClosed { .. }, EventKind::FindingOpened { .. }]),
        "they are told in order: {told:?}"
    );
    job.coordinator.check_replay();
}

/// Returns the findings of the job now.
fn ids_of_findings(job: &SimulatedJob) -> Vec<&'static str> {
    let seen = job.coordinator.core.observe_job(JOB, job.coordinator.now).expect("the job is there");
    run_detectors(DetectorInput::without_reports(&seen)).iter().map(|(detector, _)| detector.id).collect()
}

#[test]
fn a_task_that_beats_and_does_not_come_is_found_until_it_comes() {
    let mut job = SimulatedJob::fate_sharing(4);
    job.run_barrier_round(0, &[]);
    for task in 0..3 {
        job.call_barrier(task, "step", 1);
    }
    let mut seen = Vec::new();
    for _ in 0..50 {
        job.coordinator.advance_time(Duration::from_secs(1));
        for task in 0..4 {
            job.send_heartbeat(task);
        }
        seen.push(ids_of_findings(&job));
    }
    assert!(seen[28].is_empty(), "{seen:?}");
    assert_eq!(seen[29], ["stalled-task"]);
    job.coordinator.advance_time(Duration::from_secs(9));
    assert_eq!(ids_of_findings(&job), ["stalled-task"]);
    job.call_barrier(3, "step", 1);
    assert!(ids_of_findings(&job).is_empty(), "it came");
}

#[test]
fn a_task_that_does_not_ask_who_is_alive_is_found_as_one_that_misses_a_barrier() {
    let mut job = SimulatedJob::recoverable(3);
    let everyone = TaskSet::new((0..3).map(TaskId).collect());
    let ask = |job: &mut SimulatedJob, task| {
        job.call(task, Request::LiveSet { task: id_of_task(task), tasks: everyone.clone() })
    };
    ask(&mut job, 0);
    job.coordinator.advance_time(Duration::from_secs(2));
    let began = job.coordinator.now;
    ask(&mut job, 2);
    for task in 0..3 {
        job.send_heartbeat(task);
    }
    job.coordinator.advance_time(Duration::from_secs(29));
    assert!(ids_of_findings(&job).is_empty());
    job.coordinator.advance_time(Duration::from_secs(1));
    assert_eq!(ids_of_findings(&job), ["stalled-task"]);
    let seen = job.coordinator.core.observe_job(JOB, job.coordinator.now).expect("the job is there");
    let (_, stalled) = run_detectors(DetectorInput::without_reports(&seen)).remove(0);
    assert_eq!((stalled.tasks, stalled.since), (vec![TaskId(1)], began));
    assert!(
        stalled.summary_without_tasks.contains("2 of 3 tasks wait at a live-set question"),
        "{}",
        stalled.summary_without_tasks
    );
    let question = &job.coordinator.job_view().run.live_sets[0];
    assert_eq!((question.first, question.last.task, question.last.at), (TaskId(0), TaskId(2), began));
    ask(&mut job, 1);
    assert!(ids_of_findings(&job).is_empty(), "it asked");
}

#[test]
fn a_task_that_waits_for_a_key_says_for_which_and_since_when() {
    let mut job = SimulatedJob::recoverable(2);
    let since = job.coordinator.now;
    let get = |key: &str| Request::Get { key: Bytes::copy_from_slice(key.as_bytes()) };
    job.call(0, get("RECEIVED_PREEMPTION_NOTICE"));
    job.call(1, get("nobody/writes/this"));
    job.coordinator.advance_time(Duration::from_secs(5));
    let waits = |job: &SimulatedJob, task: usize| -> Vec<(String, Timestamp)> {
        let tasks = job.coordinator.job_view().run.tasks;
        tasks[task].waits_for.iter().map(|wait| (wait.key.clone(), wait.since)).collect()
    };
    assert!(waits(&job, 0).is_empty(), "every JAX program waits for that one");
    assert_eq!(waits(&job, 1), [("nobody/writes/this".to_owned(), since)]);
    let (key, value) = (Bytes::from_static(b"nobody/writes/this"), Bytes::from_static(b"somebody does"));
    job.call(0, Request::Insert { key, value, overwrite: false });
    assert!(waits(&job, 1).is_empty());
}

#[test]
fn a_habit_is_found_after_eight_rounds() {
    let mut job = SimulatedJob::fate_sharing(4);
    for counter in 0..8 {
        assert!(ids_of_findings(&job).is_empty(), "after {counter} rounds");
        job.run_barrier_round(counter, &[(3, 2)]);
    }
    assert_eq!(ids_of_findings(&job), ["chronic-straggler"]);
}

#[test]
fn a_task_that_comes_back_again_and_again_is_found() {
    let mut job = SimulatedJob::recoverable(3);
    for _ in 0..3 {
        assert!(ids_of_findings(&job).is_empty());
        job.kill_task(1);
        job.coordinator.advance_time(Duration::from_secs(20));
        job.restart_task(1);
    }
    assert_eq!(ids_of_findings(&job), ["restart-storm"]);
    job.coordinator.advance_time(Duration::from_secs(700));
    assert!(!ids_of_findings(&job).contains(&"restart-storm"), "it has been back for long");
}
