//! Tests of how findings are opened and closed, in the words of which moment they are shown, and how many tasks they count.

use super::*;

#[test]
fn a_flickering_condition_is_one_finding_with_two_events() {
    let board = FindingStore::default();
    let mut seen = healthy_job();
    let mut look = |seconds: u64, full: bool| {
        seen.seen_at = Timestamp(NOW.0 + seconds * 1_000_000);
        seen.bounds[0].used = Some(if full { 95 } else { 5 });
        board.update_with_detections(&seen, run_detectors_without_clocks(&seen))
    };
    assert!(matches!(look(0, true)[..], [FindingTransition::Opened(_)]));
    for second in 1..10 {
        assert!(look(second, second % 3 == 0).is_empty(), "after {second} s");
    }
    assert!(board.is_finding_open(JobId(0), "nearly-full-bounds"));
    assert!(look(18, false).is_empty());
    let closed = look(20, false);
    let [FindingTransition::Closed(finding)] = &closed[..] else { panic!("{closed:?}") };
    assert_eq!((finding.since, finding.closed_at), (NOW, Some(Timestamp(NOW.0 + 9_000_000))));
    assert!(
        !board.has_open_findings(JobId(0)) && board.ended_findings(JobId(0), &[], seen.seen_at).len() == 1
    );
    board.retain_jobs(|_| false);
    assert!(board.ended_findings(JobId(0), &[], seen.seen_at).is_empty(), "a job's findings go with it");
}

#[test]
fn the_end_of_a_finding_whose_task_has_failed_is_no_recovery() {
    let board = FindingStore::default();
    let mut seen = healthy_job();
    seen.tasks[3].longest_gap_us = 76_000_000;
    board.update_with_detections(&seen, run_detectors_without_clocks(&seen));
    seen.tasks[3].longest_gap_us = 0;
    seen.seen_at = Timestamp(NOW.0 + 11_000_000);
    let closed = board.update_with_detections(&seen, run_detectors_without_clocks(&seen));
    let [FindingTransition::Closed(finding)] = &closed[..] else { panic!("{closed:?}") };
    assert_eq!(finding_end_text(&seen, finding), "ended");
    seen.tasks[3].standing = TaskPhase::Failed;
    assert_eq!(finding_end_text(&seen, finding), "ended", "it had failed before the finding opened");
    seen.tasks[3].since = seen.seen_at;
    assert_eq!(finding_end_text(&seen, finding), "ended because its task has failed");
    // A finding lists the first of its tasks.
    let of_many = Finding { task_count: 9, ..finding.clone() };
    assert_eq!(finding_end_text(&seen, &of_many), "ended; of its 9 tasks, 1 or more have failed");
    let of_two = Finding { task_count: 2, tasks: vec![TaskId(3), TaskId(4)], ..finding.clone() };
    assert_eq!(finding_end_text(&seen, &of_two), "ended; of its 2 tasks, 1 has failed");
    // It has returned already.
    seen.tasks[3].standing = TaskPhase::Connected;
    seen.tasks[3].past_registrations = vec![seconds_ago(3000)];
    seen.tasks[3].registered_at = seen.seen_at;
    assert_eq!(finding_end_text(&seen, finding), "ended because its task has failed");
}

#[test]
fn the_end_of_a_run_ends_the_findings_about_its_tasks_at_once() {
    for next_run in [false, true] {
        let board = FindingStore::default();
        let mut seen = healthy_job();
        seen.tasks[3].longest_gap_us = 76_000_000;
        seen.bounds[0].used = Some(95);
        assert_eq!(board.update_with_detections(&seen, run_detectors_without_clocks(&seen)).len(), 2);
        seen.seen_at = Timestamp(NOW.0 + 1_000_000);
        if next_run {
            (seen.run, seen.state) = (RunNumber(5), RunState::Forming);
        } else {
            (seen.ended_at, seen.state) = (Some(seen.seen_at), RunState::Completed);
        }
        let closed = board.update_with_detections(&seen, run_detectors_without_clocks(&seen));
        let [FindingTransition::Closed(finding)] = &closed[..] else { panic!("{closed:?}") };
        assert_eq!(
            (&*finding.id, &finding_end_text(&seen, finding)[..]),
            ("heartbeat-gaps-widening", "ended with run 4")
        );
        // A finding about the job stays open.
        assert!(board.is_finding_open(JobId(0), "nearly-full-bounds"));
    }
}

#[test]
fn a_finding_that_lingers_is_shown_only_while_it_holds_and_in_the_words_of_now() {
    let board = FindingStore::default();
    let mut seen = healthy_job();
    seen.barriers = vec![barrier_observation(40, 35, &[6])];
    assert!(
        board.open_findings_among(&seen, run_detectors_without_clocks(&seen)).is_empty(),
        "it was not opened"
    );
    board.update_with_detections(&seen, run_detectors_without_clocks(&seen));
    seen.seen_at = Timestamp(NOW.0 + 2_000_000);
    (seen.tasks[6].interval_us, seen.tasks[6].last_heartbeat) = (5_000_000, Some(seconds_ago(41)));
    let [held] = &board.open_findings_among(&seen, run_detectors_without_clocks(&seen))[..] else {
        panic!("it holds")
    };
    assert!(held.summary_without_tasks.ends_with("has sent no heartbeat for 43 s"), "{held:?}");
    assert_eq!(held.summary, format!("{}: task 6 at 10.0.0.4:7000", held.summary_without_tasks));
    assert!(board.ended_findings(JobId(0), std::slice::from_ref(held), seen.seen_at).is_empty());
    // The process was killed: the finding stays open for ten more seconds and is not shown.
    seen.tasks[6].standing = TaskPhase::Failed;
    board.update_with_detections(&seen, run_detectors_without_clocks(&seen));
    assert!(board.is_finding_open(JobId(0), "stalled-task"));
    let held = board.open_findings_among(&seen, run_detectors_without_clocks(&seen));
    assert!(held.is_empty());
    // At every moment it is among those that hold or among those that have ended.
    let [ended] = &board.ended_findings(JobId(0), &held, seen.seen_at)[..] else { panic!("it has ended") };
    assert_eq!((&*ended.id, ended.closed_at), ("stalled-task", Some(NOW)));
}

#[test]
fn a_finding_counts_all_of_its_tasks_however_few_it_lists() {
    let board = FindingStore::default();
    let mut seen = healthy_job();
    seen.barriers = vec![BarrierObservation {
        members: 1000,
        arrived: 892,
        missing: 108,
        missing_tasks: (0..64).map(TaskId).collect(),
        ..barrier_observation(100, 100, &[])
    }];
    let opened = board.update_with_detections(&seen, run_detectors_without_clocks(&seen));
    let [FindingTransition::Opened(finding)] = &opened[..] else { panic!("{opened:?}") };
    assert_eq!((finding.task_count, finding.tasks.len()), (108, TASKS_NAMED));
    assert!(finding.summary_without_tasks.ends_with("108 tasks have not arrived"), "{finding:?}");
    assert!(finding.summary.ends_with("and 100 more (108 in all)"), "{finding:?}");
}
