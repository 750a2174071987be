//! Tests of the issues of a job, on its page and on the overview.

use super::*;

#[test]
fn a_restarted_healthy_task_is_not_shown_as_stuck() {
    let mut rig = PagesFixture::with_registered_tasks(recoverable_job_settings(8), 5);
    rig.advance_seconds(5);
    for number in 0..3 {
        rig.kill_task(number);
        rig.advance_seconds(2);
        rig.register_task(number);
    }
    rig.call_barrier(0, "step", 3_600_000);
    rig.advance_seconds(1);
    let said = rig.job_page_fragment_text("needs");
    assert_contains(
        &said,
        "3 tasks restarted in the last ten minutes, none of them after a timeout; each has 1 restart in this run",
    );
    assert_contains(&said, "Task 0 10.0.0.1:4000 waits at step;");
    assert_contains(&said, "Task 1 10.0.0.1:4001 restarted, has not completed a barrier since;");
    for words in ["1th", "instead", "stuck", "busy", "not at any barrier"] {
        assert_lacks(&said, words);
    }
}

#[test]
fn a_silent_task_is_not_shown_as_sending_heartbeats() {
    let settings = JobSettings { heartbeat_timeout: Duration::from_secs(600), ..recoverable_job_settings(3) };
    let mut rig = PagesFixture::with_registered_tasks(settings, 5);
    rig.advance_seconds(20);
    (0..2).for_each(|number| rig.call_barrier(number, "step", 3_600_000));
    rig.advance_seconds(5);
    assert_contains(
        &rig.job_page_fragment_text("needs"),
        "The heartbeats of the awaited task continue, so no heartbeat timeout will clear this.",
    );
    rig.beating.remove(&task_id(2));
    // Before the finding and with it.
    for waited in [13, 30] {
        rig.advance_seconds(waited);
        let said = rig.job_page_fragment_text("needs");
        assert_contains(
            &said,
            if waited == 13 { "sent no heartbeat for 13 s" } else { "sent no heartbeat for 43 s" },
        );
        assert_contains(&said, "Task 2 10.0.0.1:4002 connected, but its heartbeats are overdue; heartbeat");
        for words in ["Alive", "alive", "Its heartbeats continue", "awaited task continue"] {
            assert_lacks(&said, words);
        }
    }
    assert_eq!(rig.issue_titles(), ["1 task has not reached the barrier"]);
}

#[test]
fn late_heartbeats_of_the_task_that_others_wait_for_are_no_second_issue() {
    let mut rig = PagesFixture::with_registered_tasks(recoverable_job_settings(3), 5);
    rig.advance_seconds(20);
    rig.beating.remove(&task_id(2));
    rig.advance_seconds(72);
    // First the page derives the issue of the wait itself.
    (0..2).for_each(|number| rig.call_barrier(number, "step", 3_600_000));
    rig.advance_seconds(8);
    assert_eq!(rig.issue_titles(), ["2 of 3 tasks wait at step for task 2"]);
    let said = rig.job_page_fragment_text("needs");
    assert_contains(&said, "The awaited task has sent no heartbeat for");
    assert_contains(&said, "Look for what keeps the process from running");
    assert_contains(&said, "longest recent gap, in seconds");
}

#[test]
fn whether_heartbeats_continue_is_said_when_it_is_known() {
    let mut rig = PagesFixture::with_registered_tasks(recoverable_job_settings(3), 5);
    rig.beating.clear();
    (0..2).for_each(|number| rig.call_barrier(number, "step", 3_600_000));
    // No interval is known, so half of the timeout of 100 s is taken.
    for (seconds, expected) in [
        (5, "The next heartbeat of the awaited task is not overdue; a task fails after"),
        (50, "the next heartbeat of the awaited task is not overdue"),
        (10, "the awaited task has sent no heartbeat for"),
    ] {
        rig.advance_seconds(seconds);
        let said = rig.job_page_fragment_text("needs");
        assert_contains(&said, expected);
        assert_lacks(&said, "continue, so");
    }
}

#[test]
fn the_advice_about_failed_tasks_follows_from_the_reason_and_the_hosts() {
    let silenced = |tasks: std::ops::Range<usize>| {
        let mut rig = PagesFixture::with_registered_tasks(recoverable_job_settings(32), 5);
        tasks.for_each(|number| _ = rig.beating.remove(&task_id(number)));
        rig.advance_seconds(106);
        rig
    };
    let killed = |tasks: std::ops::Range<usize>| {
        let mut rig = PagesFixture::with_registered_tasks(recoverable_job_settings(32), 5);
        tasks.for_each(|number| rig.kill_task(number));
        rig.advance_seconds(1);
        rig
    };
    let mut rig = silenced(8..16);
    assert_eq!(rig.issue_titles(), ["8 tasks have failed: all tasks of host 10.0.0.2"]);
    let said = rig.job_page_fragment_text("needs");
    assert_contains(&said, "All 8 within a second: no heartbeat for");
    assert_contains(&said, "the host is down, or the network between it and this server is cut");
    // Another one, for another reason: most are unreachable still, but not whole hosts alone.
    rig.kill_task(1);
    rig.advance_seconds(1);
    let said = rig.job_page_fragment_text("needs");
    assert_contains(&said, "9 tasks have failed for");
    assert_contains(&said, "its host is down or cut off");
    assert_contains(&silenced(8..10).job_page_fragment_text("needs"), "its host is down or cut off");
    assert_contains(&killed(8..16).job_page_fragment_text("needs"), "have failed. Look at the host first");
    assert_contains(&killed(8..10).job_page_fragment_text("needs"), "and the kernel&#39;s log of its host");
    // The keepalive of TCP finds a cut before the heartbeat timeout does.
    let mut rig = PagesFixture::with_registered_tasks(recoverable_job_settings(32), 5);
    for number in 8..16 {
        rig.beating.remove(&task_id(number));
        let ending = ConnectionEnd::TimedOut;
        rig.apply_input(Input::ConnectionClosed { connection: rig.connection(number), ending });
    }
    rig.advance_seconds(1);
    assert_contains(&rig.job_page_fragment_text("needs"), "the network between it and this server is cut");
}

#[test]
fn a_barrier_that_waits_for_lost_tasks_alone_is_no_second_issue() {
    let with_waiting = |absent: &[usize]| {
        let mut rig = PagesFixture::with_registered_tasks(recoverable_job_settings(32), 5);
        (8..16).for_each(|number| rig.kill_task(number));
        rig.advance_seconds(1);
        let present = (0..8).chain(16..32).filter(|number| !absent.contains(number));
        present.for_each(|number| rig.call_barrier(number, "step", 3_600_000));
        rig.advance_seconds(70);
        assert!(rig.snapshot().findings.iter().any(|finding| finding.id.as_ref() == "barrier-stuck"));
        rig
    };
    let rig = with_waiting(&[]);
    let failed = "8 tasks have failed: all tasks of host 10.0.0.2";
    assert_eq!(rig.issue_titles(), [failed]);
    let said = rig.job_page_fragment_text("needs");
    assert_contains(&said, "no reconnect within 500 ms. 24 of 32 tasks wait for them at step.");
    assert_contains(&said, "members that have not arrived");
    // A wait for a connected task too is an issue of its own; the failures come first.
    let titles = with_waiting(&[20]).issue_titles();
    assert_eq!((titles.len(), &*titles[0]), (2, failed), "{titles:?}");
}

#[test]
fn runs_that_fail_by_the_same_host_each_time_say_so() {
    let mut rig = PagesFixture::with_registered_tasks(JobSettings::new(32), 5);
    for number in [9, 14, 12] {
        rig.kill_task(number);
        rig.advance_seconds(2);
        (0..32).for_each(|number| rig.register_task(number));
        rig.advance_seconds(2);
    }
    assert_eq!(rig.issue_titles(), ["Runs fail repeatedly: all tasks of host 10.0.0.2"]);
    let each_time = "the current run is run 4; each time the first cause was a task of the same host.";
    assert_contains(&rig.job_page_fragment_text("needs"), each_time);
    for number in [20, 28] {
        rig.kill_task(number);
        rig.advance_seconds(2);
        (0..32).for_each(|number| rig.register_task(number));
        rig.advance_seconds(2);
    }
    assert_contains(
        &rig.job_page_fragment_text("needs"),
        "run 6; 3 times the first cause was a task of the same host.",
    );
}

#[test]
fn tasks_that_restart_again_and_again_are_one_issue_while_they_are_down_too() {
    let mut rig = PagesFixture::with_registered_tasks(recoverable_job_settings(32), 5);
    for _ in 0..20 {
        rig.kill_task(3);
        rig.advance_seconds(2);
        rig.register_task(3);
        rig.advance_seconds(2);
    }
    assert_eq!(rig.issue_titles(), ["Tasks restart repeatedly"]);
    let said = rig.job_page_fragment_text("needs");
    assert_contains(
        &said,
        "Task 3 restarted in the last ten minutes, not after a timeout: 16 or more restarts in this run",
    );
    rig.kill_task(3);
    rig.advance_seconds(1);
    assert_eq!(rig.issue_titles(), ["1 task has failed again"]);
    assert_contains(
        &rig.job_page_fragment_text("needs"),
        "Task 3: connection reset; no reconnect within 500 ms. Task 3 restarted",
    );
    // One that had not restarted is an issue of its own.
    rig.kill_task(4);
    rig.advance_seconds(1);
    let mut titles = rig.issue_titles();
    titles.sort();
    assert_eq!(titles, ["1 task has failed", "1 task has failed again"]);
    // A failed task whose restart was long ago is an issue of its own, too.
    rig.register_task(4);
    rig.advance_seconds(700);
    rig.register_task(3);
    rig.kill_task(4);
    rig.advance_seconds(1);
    let mut titles = rig.issue_titles();
    titles.sort();
    assert_eq!(titles, ["1 task has failed", "Tasks restart repeatedly"]);
}

#[test]
fn of_many_tasks_that_restarted_the_one_that_is_down_is_named() {
    let mut rig = PagesFixture::with_registered_tasks(recoverable_job_settings(32), 5);
    for number in 0..6 {
        rig.kill_task(number);
        rig.advance_seconds(2);
        rig.register_task(number);
    }
    rig.kill_task(5);
    rig.advance_seconds(1);
    assert_eq!(rig.issue_titles(), ["1 task has failed again"]);
    let said = rig.job_page_fragment_text("needs");
    assert_contains(&said, "Task 5: connection reset; no reconnect within 500 ms. 6 tasks restarted");
    assert_contains(&said, "Task 5 10.0.0.1:4005 failed;");
}

#[test]
fn the_overview_has_the_details_of_the_first_issue_of_two_jobs() {
    let mut rig = PagesFixture::with_registered_tasks(recoverable_job_settings(3), 5);
    (0..2).for_each(|number| rig.call_barrier(number, "step", 3_600_000));
    rig.advance_seconds(40);
    rig.kill_task(1);
    rig.advance_seconds(1);
    let titles = rig.issue_titles();
    assert_eq!(titles.len(), 2, "{titles:?}");
    let mut issues = Vec::new();
    for job in ["a", "b", "c", "d", "e", "f"] {
        issues.extend(issues::job_issues(&rig.snapshot()).into_iter().map(|mut issue| {
            issue.job = job.parse().unwrap();
            issue
        }));
    }
    issues.sort_by_key(issues::urgency_key);
    let parts = [issues::render_issue_list_fragment(&issues, true, String::new())
        .unwrap_or_else(|_| panic!("it is made"))];
    let keys = parts[0].html.split("data-key=\"").skip(1).filter_map(|rest| rest.split('"').next());
    let keys: Vec<&str> = keys.filter(|key| !key.starts_with("task ")).collect();
    assert_eq!(parts[0].html.matches("<article").count(), 2);
    assert_eq!((keys.len(), keys.iter().collect::<BTreeSet<_>>().len()), (10, 10), "{keys:?}");
    let said = visible_fragment_text(&parts, "needs", rig.now);
    assert!(
        said.starts_with("12 issues a: ")
            && said.contains(" b: ")
            && said.ends_with("and 2 more, on the pages of the jobs below"),
        "{said}"
    );
    // On the page of a job, each issue has its details.
    let own = issues::render_issue_list_fragment(&issues, false, String::new())
        .unwrap_or_else(|_| panic!("it is made"));
    assert_eq!(own.html.matches("<article").count(), 12);
}

#[test]
fn issues_are_ordered_alike_on_the_overview() {
    let mut rig = PagesFixture::with_registered_tasks(JobSettings::new(3), 5);
    (0..3).for_each(|number| rig.call_as_task(number, Request::PollForError { task: task_id(number) }));
    rig.kill_task(1);
    let mut survey = overview::FleetSnapshot::empty(rig.now);
    let mut stuck = PagesFixture::with_registered_tasks(recoverable_job_settings(3), 5);
    (0..2).for_each(|number| stuck.call_barrier(number, "step", 3_600_000));
    stuck.advance_seconds(40);
    survey.add_job(&stuck.snapshot(), &JobActivity::default());
    survey.add_job(&rig.snapshot(), &JobActivity::default());
    let parts =
        overview::render_fragments(&survey.sorted_by_urgency()).unwrap_or_else(|_| panic!("it is made"));
    let said = visible_fragment_text(&parts, "needs", stuck.now);
    assert!(said.starts_with("2 issues train: Run 1 failed"), "{said}");
}
