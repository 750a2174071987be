//! Tests the cliques of a job together, with reports at invented times. Begin at `JobFixture`.

use prost::Message as _;

use super::super::judged_cliques::{JudgedClique, TaskNames, judge};
use super::super::parse::ProcessCollectives;
use super::super::report_store::JobCollectives;
use super::super::wait_text::describe_wait;
use super::super::*;
use super::reports::report;
use crate::coordination::Timestamp;
use crate::proto::muster::v1 as pb;

/// The beginning of a window in which ranks are compared.
const START: u64 = 3_000_000_000;

fn at(seconds: u64) -> Timestamp {
    Timestamp(START + seconds * 1_000_000)
}

/// A job of which processes report at any times.
#[derive(Default)]
struct JobFixture {
    of_job: JobCollectives,
    sequence: u64,
}

impl JobFixture {
    fn accept(&mut self, seconds: u64, mut report: pb::CollectivesReport) {
        self.sequence += 1;
        report.sequence = self.sequence;
        let parsed = ProcessCollectives::parse(&report.encode_to_vec(), at(seconds)).unwrap();
        self.of_job.accept(parsed, SILENT_AFTER, at(seconds));
    }

    fn judge<T>(&self, seconds: u64, look: impl FnOnce(&TaskNames<'_>, &[JudgedClique<'_>]) -> T) -> T {
        let names = TaskNames::new(&self.of_job);
        look(&names, &judge(&self.of_job, &names, SILENT_AFTER, at(seconds)))
    }

    /// Returns the ranks that are waited for, of each clique that waits.
    fn waits(&self, seconds: u64) -> Vec<(WaitRole, Vec<u32>)> {
        self.judge(seconds, |_, judged| {
            let waits = judged.iter().filter_map(|it| it.wait.as_ref());
            waits.map(|(wait, role)| (*role, wait.ranks.clone())).collect()
        })
    }
}

/// Returns a communicator of a clique, whose latest collective was called at this age.
fn communicator(hash: u64, (rank, ranks): (u32, u32), called: u64, age_s: u64) -> pb::CommunicatorReport {
    let mut communicator = report(rank, called).communicators.remove(0);
    (communicator.hash, communicator.ranks) = (hash, ranks);
    communicator.changed_us = age_s * 1_000_000;
    communicator.operations[0].enqueued_us = age_s * 1_000_000;
    communicator
}

fn process(task: u32, communicators: Vec<pb::CommunicatorReport>) -> pb::CollectivesReport {
    pb::CollectivesReport { communicators, ..report(task, 1) }
}

#[test]
fn a_task_that_is_waited_for_does_not_wait_there_with_its_other_device() {
    let mut job = JobFixture::default();
    // Rank 1, a device of task 0, is behind in both cliques.
    let of_task = |first: u32, behind: Option<u32>| {
        let of_rank = move |hash| {
            (first..first + 2).map(move |rank| {
                let called = if behind == Some(rank) { 11 } else { 12 };
                communicator(hash, (rank, 4), called, 40)
            })
        };
        process(first / 2, [1, 2].into_iter().flat_map(of_rank).collect())
    };
    job.accept(1, of_task(0, Some(1)));
    job.accept(1, of_task(2, None));
    assert_eq!(job.waits(1), [(WaitRole::Cause, vec![1]), (WaitRole::Cause, vec![1])]);
    let text = job.judge(1, |names, judged| {
        let (wait, _) = judged[0].wait.as_ref().unwrap();
        describe_wait(names, &judged[0].clique, wait, false)
    });
    assert!(text.starts_with("a task has not called collective 11"), "{text}");
    assert!(text.contains("3 ranks wait"), "{text}");
}

#[test]
fn a_dead_task_waits_for_nobody() {
    let mut job = JobFixture::default();
    // Task 2 was ahead of task 1 in clique 1, and has died. Task 1 waits for it in clique 2, where it has called one more.
    job.accept(1, process(2, vec![communicator(1, (0, 3), 12, 5), communicator(2, (0, 2), 20, 5)]));
    job.accept(30, process(0, vec![communicator(1, (2, 3), 12, 20)]));
    job.accept(30, process(1, vec![communicator(1, (1, 3), 11, 20), communicator(2, (1, 2), 21, 20)]));
    assert_eq!(job.waits(30), [], "reports resumed just now");
    for seconds in [36, 41] {
        let age = seconds - 10;
        job.accept(seconds, process(0, vec![communicator(1, (2, 3), 12, age)]));
        let of_task_1 = vec![communicator(1, (1, 3), 11, age), communicator(2, (1, 2), 21, age)];
        job.accept(seconds, process(1, of_task_1));
    }
    let roles = [(WaitRole::Cause, vec![0]), (WaitRole::Consequence, vec![1])];
    assert_eq!(job.waits(41), roles);
}

#[test]
fn after_an_outage_a_clique_is_judged_when_all_ranks_had_time_to_report() {
    let mut job = JobFixture::default();
    let report = |rank, called| process(rank, vec![communicator(1, (rank, 3), called, 100)]);
    job.accept(1, report(0, 100));
    job.accept(2, report(1, 105));
    assert_eq!(job.waits(3), [], "rank 2 has not reported yet, and is behind");
    job.accept(4, report(2, 99));
    assert_eq!(job.waits(4), [(WaitRole::Cause, vec![2])]);
    // The network is lost for a while, and rank 2 does not return.
    job.accept(60, report(0, 100));
    job.accept(60, report(1, 105));
    assert_eq!(job.waits(61), []);
    job.accept(69, report(0, 100));
    job.accept(69, report(1, 105));
    assert_eq!(job.waits(70), [(WaitRole::Cause, vec![2])]);
}

#[test]
fn times_are_wanted_while_a_rank_is_not_heard() {
    let mut job = JobFixture::default();
    for seconds in 0..25 {
        job.accept(seconds, process(0, vec![communicator(1, (0, 2), 12, 1)]));
        job.of_job.judge(STUCK_AFTER, SILENT_AFTER, at(seconds));
        assert_eq!(job.of_job.is_timed(at(seconds)), seconds >= 10, "after {seconds} s");
    }
}

#[test]
fn the_size_of_a_clique_is_what_most_processes_report() {
    let mut job = JobFixture::default();
    let other_size = (0..3).map(|rank| communicator(1, (rank, 9), 12, 3)).collect();
    job.accept(1, pb::CollectivesReport { process: 1, ..process(7, other_size) });
    job.accept(1, process(0, vec![communicator(1, (0, 2), 12, 3)]));
    job.accept(1, process(1, vec![communicator(1, (1, 2), 11, 3)]));
    let cliques = job.of_job.cliques(at(1), SILENT_AFTER);
    assert_eq!((cliques[0].ranks, cliques[0].members.len()), (2, 2));
}

#[test]
fn waits_are_in_the_order_of_their_age_and_not_of_the_latest_reports() {
    let mut job = JobFixture::default();
    // The wait of clique 2 is older. That of clique 1 is known to last longer, as its ranks have reported later.
    let of = |hash, rank, called, age| communicator(hash, (rank, 2), called, age);
    job.accept(40, process(0, vec![of(2, 0, 12, 35)]));
    job.accept(40, process(1, vec![of(2, 1, 11, 35)]));
    job.accept(49, process(2, vec![of(1, 0, 12, 40)]));
    job.accept(49, process(3, vec![of(1, 1, 11, 40)]));
    let order = job.judge(49, |_, judged| judged.iter().map(|it| it.clique.hash).collect::<Vec<_>>());
    assert_eq!(order, [2, 1]);
}

#[test]
fn ranks_are_compared_over_equal_windows_of_timed_collectives() {
    let mut job = JobFixture::default();
    let report = |rank: u32, is_timed, timed: u64| {
        let mut communicator = communicator(1, (rank, 2), 1000 + timed, 1);
        communicator.functions[0].timed = timed;
        communicator.functions[0].gpu_ns = timed * 1_000_000 * u64::from(rank * 9 + 1);
        let received =
            pb::FunctionReport { function: "Recv".into(), gpu_ns: timed << 40, timed, ..Default::default() };
        communicator.functions.push(received);
        pb::CollectivesReport { timing: is_timed, ..process(rank, vec![communicator]) }
    };
    let windows = |job: &JobFixture, seconds| {
        let cliques = job.of_job.cliques(at(seconds), SILENT_AFTER);
        let windows = job.of_job.windows_of(&cliques[0]);
        windows.iter().map(|it| (it.collectives, it.gpu_ns / 1_000_000)).collect::<Vec<_>>()
    };
    for seconds in 20..=61 {
        job.accept(seconds, report(0, true, seconds * 10));
        job.accept(seconds, report(1, seconds >= 25, seconds * 10));
        assert_eq!(windows(&job, seconds).is_empty(), seconds < 60, "after {seconds} s");
    }
    assert_eq!(windows(&job, 61), [(300, 300), (300, 3000)]);
    job.accept(90, report(0, true, 900));
    assert_eq!(windows(&job, 90), [], "the other rank's window is an earlier one");
}

#[test]
fn keys_are_read_again_only_for_communicators_that_are_new() {
    let mut job = JobFixture::default();
    job.accept(1, process(0, vec![communicator(1, (0, 2), 12, 1)]));
    let unknown = job.of_job.hashes_to_look_up(at(1)).unwrap();
    assert_eq!(unknown, [1].into());
    job.of_job.note_look_up(at(1), &unknown);
    assert_eq!(job.of_job.hashes_to_look_up(at(3)), None);
    job.accept(4, process(0, vec![communicator(1, (0, 2), 12, 1), communicator(5, (0, 2), 12, 1)]));
    assert_eq!(job.of_job.hashes_to_look_up(at(4)), Some([1, 5].into()));
    assert_eq!(job.of_job.hashes_to_look_up(at(31)), Some([1, 5].into()));
}
