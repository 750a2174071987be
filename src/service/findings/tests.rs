//! Tests each detector on a job that has the condition and on a job that does not.
//!
//! Begin at `healthy_job`.

mod open_and_closed;

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use super::finding_store::TASKS_NAMED;
use super::*;
use crate::clock::Clock;
use crate::coordination::{
    AutoExcludeRule, BarrierArrival, BarrierKind, BarrierObservation, BarrierOutcome, BarrierRecord,
    BoundUsage, FatalGpuError, GapHistogram, HostAssignment, HostCounts, HostId, JobName, JobSettings,
    PastRunObservation, RunNumber, RunOutcome, RunState, StragglerView, TaskCounts, TaskObservation,
    TaskPhase, Timestamp, WaitingCallCounts,
};
use crate::service::collectives::{CliqueWaitView, StuckCliqueView, WaitKind, WaitRole};

const NOW: Timestamp = Timestamp(10_000_000_000);

fn seconds_ago(seconds: u64) -> Timestamp {
    Timestamp(NOW.0 - seconds * 1_000_000)
}

/// Returns a job of eight tasks with nothing to find.
fn healthy_job() -> JobObservation {
    let task = |id: i32| TaskObservation {
        task: TaskId(id),
        standing: TaskPhase::Connected,
        excluded: false,
        since: seconds_ago(3000),
        peer: Some(SocketAddr::from(([10, 0, 0, 1 + id as u8 / 2], 7000))),
        last_heartbeat: Some(seconds_ago(3)),
        is_waiting: false,
        past_registrations: Vec::new(),
        may_have_more_incarnations: false,
        was_unreachable: false,
        registered_at: seconds_ago(3000),
        interval_us: 50_000_000,
        longest_gap_us: 51_000_000,
        straggling: Some(StragglerView {
            taken_part: 100,
            last: 12,
            recent: 64,
            recent_last: 8,
            lateness_us: 200_000,
            lateness_best_us: Some(200_000),
            lateness_total_us: 0,
            held_up_us: 0,
            score: 0.2,
        }),
    };
    JobObservation {
        job: JobId(0),
        name: JobName::default(),
        seen_at: NOW,
        heartbeat_timeout: Duration::from_secs(100),
        run: RunNumber(4),
        state: RunState::Running,
        opened_at: seconds_ago(3010),
        started_at: Some(seconds_ago(3000)),
        ended_at: None,
        live: 8,
        counts: TaskCounts::default(),
        noticed_at: None,
        tasks: (0..8).map(task).collect(),
        hosts: HostAssignment::default(),
        host_counts: HostCounts::default(),
        barriers: vec![barrier_observation(20, 18, &[1, 2])],
        recent: Vec::new(),
        waiting: WaitingCallCounts::default(),
        gaps: GapHistogram::default(),
        store_bytes: 10,
        keys: 1,
        bounds: vec![
            BoundUsage { name: "keys", limit: 100, used: Some(89), is_rolling: false },
            BoundUsage { name: "barriers-recent", limit: 100, used: Some(100), is_rolling: true },
        ],
        fatal_gpu_error: None,
        exclusions: 0,
        past_runs: vec![past_run(1, 4000, RunOutcome::Failed), past_run(2, 3500, RunOutcome::Failed)],
    }
}

fn barrier_observation(since: u64, last: u64, missing: &[i32]) -> BarrierObservation {
    BarrierObservation {
        id: "step".into(),
        counter: 3,
        kind: BarrierKind::Client,
        since: seconds_ago(since),
        last_arrival: seconds_ago(last),
        deadline: NOW,
        members: 8,
        arrived: 8 - missing.len(),
        missing: missing.len(),
        missing_tasks: missing.iter().map(|id| TaskId(*id)).collect(),
    }
}

fn past_run(number: u64, ended: u64, outcome: RunOutcome) -> PastRunObservation {
    PastRunObservation {
        number: RunNumber(number),
        outcome,
        opened_at: seconds_ago(ended + 60),
        ended_at: seconds_ago(ended),
        first_cause_task: None,
        first_cause_host: None,
    }
}

fn barrier_record_of_duration(seconds: u64) -> BarrierRecord {
    BarrierRecord {
        id: "step".into(),
        counter: 2,
        kind: BarrierKind::Client,
        began: seconds_ago(500 + seconds),
        ended: seconds_ago(500),
        members: 8,
        arrived: 8,
        first: None,
        last: None,
        skew_us: 0,
        waited_us: 0,
        outcome: BarrierOutcome::Passed,
        without: Vec::new(),
        latest: Vec::new(),
    }
}

/// Runs all detectors on a job whose workers report no clock.
fn run_detectors_without_clocks(job: &JobObservation) -> Vec<(&'static Detector, Detection)> {
    run_detectors(DetectorInput::without_reports(job))
}

fn detected_finding_ids(seen: &JobObservation) -> Vec<&'static str> {
    run_detectors_without_clocks(seen).iter().map(|(detector, _)| detector.id).collect()
}

#[track_caller]
fn expect_only_finding(seen: &JobObservation, id: &str) -> Detection {
    assert_eq!(detected_finding_ids(seen), [id]);
    let (detector, found) = run_detectors_without_clocks(seen).remove(0);
    assert!(!found.evidence.is_empty() && !found.summary_without_tasks.is_empty(), "{found:?}");
    assert!(found.since <= NOW && !detector.advice.is_empty());
    found
}

#[test]
fn in_a_healthy_job_nothing_is_found() {
    assert!(detected_finding_ids(&healthy_job()).is_empty());
}

#[test]
fn tasks_that_are_missing_at_registration_are_named_after_a_minute() {
    let mut seen = healthy_job();
    seen.state = RunState::Forming;
    seen.barriers =
        vec![BarrierObservation { kind: BarrierKind::Registration, ..barrier_observation(59, 59, &[1, 5]) }];
    assert!(detected_finding_ids(&seen).is_empty());
    seen.barriers[0].since = seconds_ago(61);
    let found = expect_only_finding(&seen, "missing-at-registration");
    assert_eq!((found.tasks, found.since), (vec![TaskId(1), TaskId(5)], seconds_ago(61)));
    assert_eq!(found.summary_without_tasks, "2 of 8 tasks have not registered");
}

#[test]
fn a_barrier_is_stuck_measured_by_its_own_past() {
    let mut seen = healthy_job();
    seen.barriers = vec![barrier_observation(100, 100, &[1, 2, 3])];
    let found = expect_only_finding(&seen, "barrier-stuck");
    assert_eq!(
        found.summary_without_tasks,
        "5 of 8 tasks wait at barrier step (use 3); 3 tasks have not arrived"
    );
    assert_eq!((found.barrier, found.task_count), (Some(("step".into(), 3)), 3));
    seen.state = RunState::Failed;
    assert!(detected_finding_ids(&seen).is_empty(), "its run is over");
    seen.state = RunState::Running;
    seen.recent = vec![barrier_record_of_duration(30)];
    assert!(detected_finding_ids(&seen).is_empty(), "it took half a minute before, too");
    seen.barriers[0].since = seconds_ago(151);
    expect_only_finding(&seen, "barrier-stuck");
}

#[test]
fn a_task_that_lives_and_does_not_come_is_stalled() {
    let mut seen = healthy_job();
    seen.barriers = vec![barrier_observation(40, 35, &[6])];
    let found = expect_only_finding(&seen, "stalled-task");
    assert_eq!(
        (found.tasks, found.title.as_deref()),
        (vec![TaskId(6)], Some("1 task has not reached the barrier"))
    );
    assert!(
        found.summary_without_tasks.ends_with("the heartbeats of the awaited task continue"),
        "{}",
        found.summary_without_tasks
    );
    // With a long timeout a silent task still counts as silent: its own interval decides.
    (seen.tasks[6].interval_us, seen.tasks[6].last_heartbeat) = (5_000_000, Some(seconds_ago(43)));
    let found = expect_only_finding(&seen, "stalled-task");
    assert!(
        found.summary_without_tasks.ends_with("the awaited task has sent no heartbeat for 43 s"),
        "{}",
        found.summary_without_tasks
    );
    (seen.tasks[6].interval_us, seen.tasks[6].last_heartbeat) = (50_000_000, Some(seconds_ago(3)));
    seen.tasks[6].is_waiting = true;
    assert!(detected_finding_ids(&seen).is_empty(), "it waits elsewhere");
    seen.tasks[6].is_waiting = false;
    seen.tasks[6].standing = TaskPhase::Suspect;
    assert!(detected_finding_ids(&seen).is_empty(), "it may be dead");
    seen.tasks[6].standing = TaskPhase::Connected;
    seen.recent = vec![barrier_record_of_duration(30)];
    assert!(detected_finding_ids(&seen).is_empty(), "it was as slow before");
}

#[test]
fn a_chronic_straggler_is_found_and_a_negligible_delay_is_not() {
    let mut seen = healthy_job();
    let late = |seen: &mut JobObservation, task: usize, score: f64, lateness_us: u64| {
        let Some(it) = seen.tasks[task].straggling.as_mut() else { return };
        (it.score, it.lateness_us) = (score, lateness_us);
    };
    late(&mut seen, 2, 0.95, 40_000);
    assert!(detected_finding_ids(&seen).is_empty(), "it costs nothing");
    late(&mut seen, 2, 0.95, 400_000);
    late(&mut seen, 5, 0.9, 500_000);
    let found = expect_only_finding(&seen, "chronic-straggler");
    assert_eq!(found.tasks, [TaskId(5), TaskId(2)]);
    // The lateness is an average, so single arrivals may be later.
    assert!(
        found.summary_without_tasks.contains("the latest usually 500 ms after the first"),
        "{}",
        found.summary_without_tasks
    );
    for task in [2, 5] {
        seen.tasks[task].straggling.as_mut().unwrap().taken_part = 15;
    }
    assert!(detected_finding_ids(&seen).is_empty(), "it is too early to tell");
}

/// Returns the record of a barrier at which each of eight tasks arrived so many milliseconds after the first.
fn barrier_record_of_arrivals(after_ms: [u64; 8]) -> BarrierRecord {
    let began = seconds_ago(500);
    let at = |ms: u64| Timestamp(began.0 + ms * 1000);
    let last = after_ms.into_iter().max().unwrap_or_default();
    let mut latest: Vec<BarrierArrival> =
        (0..8).zip(after_ms).map(|(task, ms)| BarrierArrival { task: TaskId(task), at: at(ms) }).collect();
    latest.sort_by_key(|arrival| std::cmp::Reverse(arrival.at));
    BarrierRecord {
        began,
        ended: at(last),
        skew_us: last * 1000,
        waited_us: after_ms.iter().map(|ms| (last - ms) * 1000).sum(),
        latest,
        ..barrier_record_of_duration(0)
    }
}

#[test]
fn tasks_that_are_late_at_eight_of_nine_barriers_are_found_before_their_scores_tell() {
    let late = barrier_record_of_arrivals([0, 3, 7, 1, 1050, 1000, 2, 4]);
    let mut seen = healthy_job();
    seen.recent = vec![late.clone(); 7];
    assert!(detected_finding_ids(&seen).is_empty(), "it is too early to tell");
    seen.recent = vec![late.clone(); 8];
    let found = expect_only_finding(&seen, "chronic-straggler");
    assert_eq!(found.tasks, [TaskId(4), TaskId(5)]);
    assert!(
        found.summary_without_tasks.starts_with("2 tasks were late at 8 of the last 8 barriers, by 1050 ms"),
        "{}",
        found.summary_without_tasks
    );
    // An excluded task holds up no other task.
    seen.tasks[4].excluded = true;
    assert_eq!(expect_only_finding(&seen, "chronic-straggler").tasks, [TaskId(5)]);
    seen.tasks[4].excluded = false;
    seen.recent.insert(4, barrier_record_of_arrivals([5, 4, 3, 2, 1, 0, 0, 0]));
    assert_eq!(
        expect_only_finding(&seen, "chronic-straggler").tasks,
        [TaskId(4), TaskId(5)],
        "one exception"
    );
    for (arrivals, why) in [
        ([0, 3, 7, 1, 6, 5, 2, 4], "nobody was late at one of them"),
        ([0, 3, 7, 1, 6, 45, 2, 4], "it costs nothing"),
        ([0, 200, 400, 600, 700, 900, 1000, 100], "there is no group from which it stands out"),
        ([0, 3, 7, 1, 1000, 5, 2, 900], "another task was late at one of them"),
    ] {
        seen.recent[3] = barrier_record_of_arrivals(arrivals);
        let ids = detected_finding_ids(&seen);
        let expected = if arrivals[4] == 1000 { vec!["chronic-straggler"] } else { Vec::new() };
        assert_eq!(ids, expected, "{why}");
    }
    seen.recent = vec![BarrierRecord { arrived: 2, ..late }; 8];
    assert!(detected_finding_ids(&seen).is_empty(), "of two tasks one is always later");
}

#[test]
fn heartbeats_that_come_nearly_too_late_are_found() {
    let mut seen = healthy_job();
    seen.tasks[3].longest_gap_us = 76_000_000;
    assert_eq!(expect_only_finding(&seen, "heartbeat-gaps-widening").tasks, [TaskId(3)]);
    seen.tasks[3].interval_us = 74_000_000;
    assert!(detected_finding_ids(&seen).is_empty(), "it never came more often");
    seen.tasks[4].last_heartbeat = Some(seconds_ago(80));
    assert_eq!(expect_only_finding(&seen, "heartbeat-gaps-widening").tasks, [TaskId(4)]);
    seen = healthy_job();
    let half = seen.tasks.len() / 2;
    for task in &mut seen.tasks[..half] {
        task.last_heartbeat = Some(seconds_ago(80));
    }
    assert_eq!(expect_only_finding(&seen, "heartbeat-gaps-widening").tasks.len(), half);
    seen.tasks[half].last_heartbeat = Some(seconds_ago(80));
    let found = expect_only_finding(&seen, "heartbeat-gaps-widening");
    assert_eq!(found.title.as_deref(), Some("Heartbeats of most tasks come late"));
    assert!(found.tasks.is_empty() && !found.may_exclude, "no task is to blame, so none is excluded");
}

#[test]
fn a_storm_of_restarts_is_one_task_again_and_again_or_many_tasks() {
    let mut seen = healthy_job();
    seen.tasks[1].past_registrations = [70, 80, 3000].map(seconds_ago).to_vec();
    assert!(detected_finding_ids(&seen).is_empty(), "it has long been back");
    seen.tasks[1].registered_at = seconds_ago(60);
    let found = expect_only_finding(&seen, "restart-storm");
    assert_eq!(
        found.summary_without_tasks,
        "task 1 restarted in the last ten minutes, not after a timeout: 3 restarts in this run"
    );
    assert_eq!(found.tasks, [TaskId(1)]);
    assert_eq!(found.severity, Some(Severity::Critical));
    assert!(
        found.meaning_and_advice.is_some_and(|(means, _)| means.contains("the network worked")),
        "{found:?}"
    );
    seen.tasks[1].was_unreachable = true;
    seen.tasks[1].may_have_more_incarnations = true;
    // Two of the restarts were long ago.
    seen.tasks[1].past_registrations = [1500, 2000, 3000].map(seconds_ago).to_vec();
    let found = expect_only_finding(&seen, "restart-storm");
    assert_eq!(
        found.summary_without_tasks,
        "task 1 restarted in the last ten minutes, after a heartbeat or connection timeout: 3 or more restarts in this run"
    );
    assert!(found.meaning_and_advice.is_some_and(|(_, advice)| advice.contains("network")), "{found:?}");
    assert_eq!(found.severity, None);
    let mut seen = healthy_job();
    for task in 0..3 {
        seen.tasks[task].past_registrations = vec![seconds_ago(3000)];
        seen.tasks[task].registered_at = seconds_ago(30);
    }
    let found = expect_only_finding(&seen, "restart-storm");
    assert_eq!(found.tasks.len(), 3);
    assert!(
        found.summary_without_tasks.ends_with("; each has 1 restart in this run"),
        "{}",
        found.summary_without_tasks
    );
}

#[test]
fn runs_that_fail_one_after_another_are_churn_and_those_that_complete_are_not() {
    let mut seen = healthy_job();
    seen.past_runs.push(past_run(3, 3100, RunOutcome::Abandoned));
    assert!(detected_finding_ids(&seen).is_empty(), "one of them was long ago");
    seen.past_runs.push(past_run(3, 100, RunOutcome::Completed));
    assert!(detected_finding_ids(&seen).is_empty(), "one of them completed");
    seen.past_runs.push(past_run(3, 100, RunOutcome::Failed));
    let found = expect_only_finding(&seen, "generation-churn");
    assert!(found.summary_without_tasks.ends_with("the current run is run 4") && found.tasks.is_empty());
}

#[test]
fn failed_runs_name_what_their_first_causes_have_in_common() {
    let host = |name: &str| Some(HostId::new(name));
    let found = |causes: [(Option<i32>, Option<HostId>); 4]| {
        let mut seen = healthy_job();
        seen.past_runs = (1..)
            .zip(causes)
            .map(|(number, (task, first_cause_host))| PastRunObservation {
                first_cause_task: task.map(TaskId),
                first_cause_host,
                ..past_run(number, 100, RunOutcome::Failed)
            })
            .collect();
        let found = expect_only_finding(&seen, "generation-churn");
        assert!(!found.may_exclude, "it may be the program");
        let (_, common) = found.summary_without_tasks.split_once("is run 4").expect("the run");
        (common.to_owned(), found.tasks)
    };
    let same = |what: &str, tasks: &[i32]| (what.to_owned(), tasks.iter().copied().map(TaskId).collect());
    let two = || [(Some(1), host("a")), (Some(1), host("b")), (Some(2), host("a"))];
    let and = |task: i32, name: &str| {
        let [one, other, third] = two();
        [one, other, third, (Some(task), host(name))]
    };
    assert_eq!(found(and(2, "b")), same("", &[]), "half of them are not most");
    assert_eq!(found(and(1, "b")), same("; 3 times the first cause was the same task", &[1]));
    assert_eq!(
        found(and(3, "a")),
        same("; 3 times the first cause was a task of host a, which has no task in this run", &[])
    );
    assert_eq!(found([(None, None), (Some(1), None), (Some(1), None), (None, None)]), same("", &[]));
    let all = [(); 4].map(|()| (Some(6), host("a")));
    assert_eq!(found(all), same("; each time the first cause was the same task", &[6]));
}

#[test]
fn a_bound_that_is_nearly_reached_is_named() {
    let mut seen = healthy_job();
    seen.bounds[0].used = Some(90);
    assert!(expect_only_finding(&seen, "nearly-full-bounds").summary_without_tasks.contains("bounds.keys"));
}

#[test]
fn the_catalogue_is_whole_and_names_are_unique() {
    let mut names = std::collections::BTreeSet::new();
    for detector in CATALOGUE {
        assert!(names.insert(detector.id), "{} is there twice", detector.id);
        assert!(detector.means.ends_with('.') && detector.advice.ends_with('.'), "{}", detector.id);
    }
    let _: Arc<str> = CATALOGUE[0].id.into();
}

#[test]
fn lost_gpus_are_one_finding_from_jax_and_from_workers() {
    let mut job = healthy_job();
    let lost = |task: i32, gpu: u32, at: u64| {
        (TaskId(task), LostGpuView { gpu, error: "cuMemcpy: ECC (214)".into(), reported_at: Timestamp(at) })
    };
    let detect = |job: &JobObservation, lost_gpus: &[(TaskId, LostGpuView)]| {
        let mut found = run_detectors(DetectorInput { lost_gpus, ..DetectorInput::without_reports(job) });
        found.pop().map(|(detector, found)| (detector.id, found))
    };
    let at = job.seen_at.0;
    assert_eq!(detect(&job, &[]), None);
    let (id, found) = detect(&job, &[lost(2, 5, at)]).unwrap();
    assert_eq!(
        (id, found.tasks.as_slice(), found.since),
        ("fatal-gpu-error", &[TaskId(2)][..], Timestamp(at))
    );
    assert_eq!(found.summary_without_tasks, "GPU 5 of task 2 has a fatal error: cuMemcpy: ECC (214)");
    assert!(found.may_exclude);
    let (_, found) = detect(&job, &[lost(0, 1, at), lost(2, 5, at - 1)]).unwrap();
    assert_eq!((found.tasks.as_slice(), found.since), (&[TaskId(0), TaskId(2)][..], Timestamp(at - 1)));
    assert_eq!(
        found.summary_without_tasks,
        "GPUs of 2 tasks have fatal errors; first, GPU 5 of task 2 has a fatal error: cuMemcpy: ECC (214)"
    );
    let (task, device, status) = (TaskId(2), 5, "ECC".to_owned());
    job.fatal_gpu_error = Some(FatalGpuError { task, device, status, at: Timestamp(at) });
    let (_, found) = detect(&job, &[lost(2, 5, at + 1)]).unwrap();
    assert_eq!(found.tasks, [TaskId(2)], "JAX and the worker tell of the same GPU");
    assert_eq!(found.summary_without_tasks, "GPU 5 of task 2 has a fatal error: ECC");
    job.state = RunState::Failed;
    assert_eq!(detect(&job, &[lost(2, 5, at)]), None);
}

/// Runs all detectors on a job whose workers report these clocks: task, seconds ahead, and uncertainty.
fn run_detectors_with_clocks(
    job: &JobObservation,
    told: &[(i32, f64, f64)],
) -> Vec<(&'static Detector, Detection)> {
    let micros = |seconds: f64| (seconds * 1e6) as i64;
    let clock = |(task, ahead, within): &(i32, f64, f64)| {
        let reading = ClockReading { ahead_us: micros(*ahead), within_us: micros(*within).unsigned_abs() };
        (TaskId(*task), reading)
    };
    let clocks: Vec<_> = told.iter().map(clock).collect();
    run_detectors(DetectorInput { clocks: &clocks, ..DetectorInput::without_reports(job) })
}

#[test]
fn a_clock_that_is_surely_off_is_found_and_one_that_may_be_is_not() {
    let job = healthy_job();
    assert!(run_detectors_with_clocks(&job, &[]).is_empty());
    assert!(run_detectors_with_clocks(&job, &[(0, 0.999, 0.0), (1, -0.9, 0.0), (2, 3.0, 2.1)]).is_empty());
    let found = run_detectors_with_clocks(&job, &[(0, 0.0, 0.001), (3, -92.4, 0.001)]);
    let [(detector, found)] = found.as_slice() else { panic!("{found:?}") };
    assert_eq!((detector.id, found.tasks.as_slice()), ("worker-clock-off", [TaskId(3)].as_slice()));
    assert_eq!(found.summary_without_tasks, "the clock of 1 task is 1 min 32 s behind the server's");
    assert!((found.evidence[0].is + 92.4).abs() < 1e-9, "{found:?}");
    let found = run_detectors_with_clocks(&job, &[(0, 1.5, 0.0), (5, 9.0, 0.0), (6, 0.0, 0.0)]);
    assert_eq!(found[0].1.tasks, [TaskId(5), TaskId(0)], "the worst first");
    assert_eq!(
        found[0].1.summary_without_tasks,
        "the clocks of 2 tasks are off, one of them 9.0 s ahead of the server's"
    );
}

#[test]
fn a_majority_of_hosts_blames_the_service_clock() {
    let job = healthy_job();
    // Tasks 0 and 1 share a host, and so on: four hosts.
    let found =
        run_detectors_with_clocks(&job, &[(0, 60.0, 0.0), (2, 60.1, 0.0), (4, 59.9, 0.0), (6, 60.0, 0.0)]);
    assert!(found[0].1.tasks.is_empty(), "{found:?}");
    let said = "the clock of this server is 1 min 0 s behind those of most of 4 hosts";
    assert!(found[0].1.summary_without_tasks.starts_with(said), "{found:?}");
    // One host with many tasks has one vote, so these are too few hosts.
    let found =
        run_detectors_with_clocks(&job, &[(0, 60.0, 0.0), (1, 60.0, 0.0), (2, 0.0, 0.0), (4, 0.0, 0.0)]);
    assert_eq!(found[0].1.tasks, [TaskId(0), TaskId(1)]);
    assert_eq!(run_detectors_with_clocks(&job, &[(0, 60.0, 0.0), (2, 60.0, 0.0)])[0].1.tasks.len(), 2);
    // Hosts that agree with no other host are reported one by one.
    let found =
        run_detectors_with_clocks(&job, &[(0, 60.0, 0.0), (2, -90.0, 0.0), (4, 20.0, 0.0), (6, 300.0, 0.0)]);
    assert_eq!(found[0].1.tasks, [TaskId(6), TaskId(2), TaskId(0), TaskId(4)]);
}

/// Returns a clique that waits for tasks since then.
fn stuck_clique(clique: &str, kind: WaitKind, tasks: &[i32], seconds: u64) -> StuckCliqueView {
    let wait = CliqueWaitView {
        kind,
        role: WaitRole::Cause,
        since: seconds_ago(seconds),
        waited_s: seconds as f64,
        number: 3,
        collective: None,
        instead: None,
        waited_for: tasks.iter().map(|task| *task as u32).collect(),
        tasks: Vec::new(),
        certain: kind == WaitKind::NotBegun,
        summary: String::new(),
    };
    StuckCliqueView {
        clique: clique.to_owned(),
        may_exclude: wait.certain,
        wait,
        summary_without_tasks: "a task has not called a collective".to_owned(),
        tasks: tasks.iter().copied().map(TaskId).collect(),
        others: 1,
    }
}

#[test]
fn a_stuck_collective_names_the_tasks_of_all_causes() {
    let seen = healthy_job();
    let detect = |stuck: &[StuckCliqueView]| {
        let input = DetectorInput { stuck_cliques: stuck, ..DetectorInput::without_reports(&seen) };
        let (_, found) = run_detectors(input).remove(0);
        found
    };
    let by_times = stuck_clique("a", WaitKind::NotBegun, &[1], 60);
    // Programs that register nowhere are told of; those that register may report what was before.
    let found_of = |state, registering: usize| {
        let mut seen = healthy_job();
        seen.state = state;
        let missing = seen.tasks.len() - registering;
        seen.counts = TaskCounts { missing, registering, ..TaskCounts::default() };
        let stuck = std::slice::from_ref(&by_times);
        run_detectors(DetectorInput { stuck_cliques: stuck, ..DetectorInput::without_reports(&seen) })
    };
    let found = found_of(RunState::Forming, 0);
    let (_, found) = found.iter().find(|(detector, _)| detector.id == "collective-stuck").unwrap();
    assert_eq!((&found.tasks[..], found.may_exclude), (&[TaskId(1)][..], false));
    for (state, registering) in [(RunState::Forming, 1), (RunState::Failed, 0), (RunState::Completed, 0)] {
        let found = found_of(state, registering);
        assert!(found.iter().all(|(detector, _)| detector.id != "collective-stuck"), "{state}");
    }
    let found = detect(std::slice::from_ref(&by_times));
    assert_eq!((found.severity, found.may_exclude, &found.tasks[..]), (None, true, &[TaskId(1)][..]));
    let by_calls = stuck_clique("b", WaitKind::NotCalled, &[4], 40);
    let found = detect(std::slice::from_ref(&by_calls));
    assert_eq!((found.severity, found.may_exclude), (Some(Severity::Warning), false), "it may be well");
    let found = detect(&[by_times, by_calls]);
    assert_eq!(
        (found.may_exclude, &found.tasks[..]),
        (false, &[TaskId(1), TaskId(4)][..]),
        "which of the two?"
    );
    assert!(found.summary_without_tasks.ends_with("1 other clique waits too, 1 of them for other tasks"));
    // Nothing is excluded by a finding that lacks evidence, whatever the settings say.
    let engine = Engine::new(Clock::start());
    let settings =
        JobSettings { auto_exclude: [AutoExcludeRule::CollectiveStuck].into(), ..JobSettings::new(8) };
    let job = engine.declare_job("train".parse().unwrap(), settings).unwrap();
    let exclusion_by = |found: Detection| {
        let board = FindingStore::default();
        let opened = board.update_with_detections(&seen, vec![(&collective_stuck::DETECTOR, found)]);
        let [FindingTransition::Opened(finding)] = &opened[..] else { panic!("{opened:?}") };
        automatic_exclusion::automatic_exclusion_for_finding(&engine, job, finding).map(|it| it.task)
    };
    assert_eq!(exclusion_by(found), None);
    assert_eq!(exclusion_by(detect(&[stuck_clique("a", WaitKind::NotBegun, &[1], 60)])), Some(TaskId(1)));
}
