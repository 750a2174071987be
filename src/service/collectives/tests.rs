//! Tests the analysis with invented ranks, and the store with an engine and encoded reports.
//!
//! `tests/collectives` has the same stories with real processes. Begin at `CliqueFixture`.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use muster_collectives::{Collective, CollectiveFunction, DataType};
use proptest::prelude::*;
use prost::Message as _;

use super::analysis::{CliqueWait, RankReport, RankWindow, WaitKind, find_slow_rank, find_wait};
use super::parse::{ProcessCollectives, ReportedCollective, ReportedCommunicator};
use super::*;
use crate::clock::Clock;
use crate::coordination::{
    CallOutcome, Caller, JobId, JobSettings, Request, TaskId, TaskIncarnation, Timestamp,
};
use crate::engine::{AnswerInbox, Engine};
use crate::proto::muster::v1 as pb;

/// The moment at which cliques are judged, and the age of what happened in them.
const NOW: Timestamp = Timestamp(1_000_000_000);

fn ago(seconds: u64) -> Timestamp {
    Timestamp(NOW.0 - seconds * 1_000_000)
}

fn all_reduce(count: u64) -> Collective {
    Collective {
        function: CollectiveFunction::AllReduce,
        data_type: DataType::Float32,
        count,
        root: 0,
        channels: 1,
    }
}

/// The ranks of a clique, each of which calls collectives of a program.
struct CliqueFixture {
    ranks: Vec<RankFixture>,
}

struct RankFixture {
    program: Vec<Collective>,
    is_timed: bool,
    /// How many have begun and ended.
    begun: usize,
    ended: usize,
    at: Timestamp,
    /// When it was heard, if it is not silent.
    heard_at: Timestamp,
    is_silent: bool,
    /// The number of its latest collectives that it reports.
    reported: usize,
}

impl CliqueFixture {
    /// Returns a clique whose ranks have called, begun and ended `collectives` equal ones, 60 s ago.
    fn level(ranks: usize, collectives: usize, is_timed: bool) -> Self {
        let rank = || RankFixture {
            program: (0..collectives as u64).map(|number| all_reduce(100 + number)).collect(),
            is_timed,
            begun: collectives,
            ended: collectives,
            at: ago(60),
            heard_at: NOW,
            is_silent: false,
            reported: 10,
        };
        Self { ranks: (0..ranks).map(|_| rank()).collect() }
    }

    /// Lets these ranks call further collectives `seconds` ago.
    fn call(&mut self, ranks: impl IntoIterator<Item = usize>, operation: Collective, seconds: u64) {
        for rank in ranks {
            self.ranks[rank].program.push(operation);
            self.ranks[rank].at = ago(seconds);
        }
    }

    fn wait(&self) -> Option<CliqueWait> {
        self.wait_among(self.ranks.len() as u32)
    }

    fn wait_among(&self, ranks: u32) -> Option<CliqueWait> {
        let communicators: Vec<ReportedCommunicator> =
            self.ranks.iter().enumerate().map(|(rank, it)| it.report(rank as u32, ranks)).collect();
        let reports: BTreeMap<u32, RankReport<'_>> = communicators
            .iter()
            .zip(&self.ranks)
            .map(|(communicator, rank)| {
                let heard_at = if rank.is_silent { ago(40) } else { rank.heard_at };
                (
                    communicator.rank,
                    RankReport { process: 0, communicator, heard_at, is_silent: rank.is_silent },
                )
            })
            .collect();
        find_wait(ranks, &reports)
    }
}

impl RankFixture {
    fn report(&self, rank: u32, ranks: u32) -> ReportedCommunicator {
        let mut chain = 0;
        let operations: Vec<ReportedCollective> = self
            .program
            .iter()
            .enumerate()
            .map(|(number, operation)| {
                chain = operation.chain(chain);
                let happened = |until: usize| (self.is_timed && number < until).then_some(self.at);
                ReportedCollective {
                    number: number as u64,
                    operation: *operation,
                    chain,
                    is_timed: self.is_timed,
                    enqueued_at: self.at,
                    begun_at: happened(self.begun),
                    ended_at: happened(self.ended),
                }
            })
            .collect();
        ReportedCommunicator {
            hash: 1,
            rank,
            ranks,
            nodes: 1,
            name: String::new(),
            changed_at: self.at,
            collectives: operations.len() as u64,
            functions: Vec::new(),
            // Reports have the latest ones.
            operations: operations.into_iter().rev().take(self.reported).rev().collect(),
        }
    }
}

fn summary(wait: Option<CliqueWait>) -> Option<(WaitKind, u64, Vec<u32>, bool)> {
    wait.map(|wait| (wait.kind, wait.number, wait.ranks, wait.is_timed))
}

#[test]
fn ranks_that_are_level_do_not_wait() {
    for is_timed in [false, true] {
        assert_eq!(CliqueFixture::level(4, 20, is_timed).wait(), None);
        assert_eq!(CliqueFixture::level(1, 0, is_timed).wait(), None);
    }
    // All have called one more, and no GPU has come to it: earlier kernels run.
    let mut busy = CliqueFixture::level(4, 20, true);
    busy.call(0..4, all_reduce(1), 30);
    assert_eq!(busy.wait(), None);
}

#[test]
fn a_rank_that_does_not_call_is_named_since_the_first_other_one_called() {
    for is_timed in [false, true] {
        let mut clique = CliqueFixture::level(4, 20, is_timed);
        clique.call([0, 1], all_reduce(1), 12);
        clique.call([3], all_reduce(1), 5);
        for rank in [0, 1, 3] {
            clique.ranks[rank].begun = 21;
        }
        let wait = clique.wait().unwrap();
        assert_eq!(wait.since, ago(12));
        assert_eq!(wait.operation, Some(all_reduce(1)));
        assert_eq!(summary(Some(wait)), Some((WaitKind::NotCalled, 20, vec![2], is_timed)));
        // The rank itself did something later than that.
        clique.ranks[2].at = ago(3);
        assert_eq!(clique.wait().map(|wait| wait.since), Some(ago(3)));
    }
}

#[test]
fn a_wait_lasts_until_the_last_report_of_a_rank_that_is_waited_for() {
    let mut clique = CliqueFixture::level(4, 20, false);
    clique.call([0, 1], all_reduce(1), 12);
    assert_eq!(clique.wait().unwrap().lasted(NOW), Duration::from_secs(12));
    // Rank 2 may have called it since it reported.
    clique.ranks[2].heard_at = ago(9);
    clique.ranks[3].heard_at = ago(10);
    assert_eq!(clique.wait().unwrap().lasted(NOW), Duration::from_secs(3));
    // It reported before the others called.
    clique.ranks[2].heard_at = ago(20);
    clique.ranks[3].heard_at = ago(20);
    assert_eq!(clique.wait().unwrap().lasted(NOW), Duration::ZERO);
    for rank in [2, 3] {
        clique.ranks[rank].is_silent = true;
    }
    assert_eq!(clique.wait().unwrap().lasted(NOW), Duration::from_secs(12), "no report is to come");
    let mut clique = CliqueFixture::level(3, 20, true);
    clique.call(0..3, all_reduce(1), 12);
    clique.ranks[0].begun = 21;
    clique.ranks[1].heard_at = ago(5);
    clique.ranks[2].heard_at = ago(4);
    let wait = clique.wait().unwrap();
    assert_eq!((wait.kind, wait.lasted(NOW)), (WaitKind::NotBegun, Duration::from_secs(8)));
}

#[test]
fn programs_are_compared_where_most_ranks_are_heard() {
    let mut clique = CliqueFixture::level(4, 20, false);
    clique.call([0, 1, 3], all_reduce(1), 12);
    clique.call([2], all_reduce(2), 12);
    (0..30).for_each(|_| clique.call(0..4, all_reduce(3), 11));
    let different = |number| Some((WaitKind::DifferentProgram, number, vec![2], false));
    assert_eq!(summary(clique.wait()), different(41), "the first that is reported");
    // Ranks 2 and 3 have reported the collective that differs, and the others not yet.
    for rank in [2, 3] {
        clique.ranks[rank].reported = 40;
    }
    assert_eq!(summary(clique.wait()), different(41));
    for rank in [0, 1] {
        clique.ranks[rank].reported = 40;
    }
    assert_eq!(summary(clique.wait()), different(20));
}

#[test]
fn without_times_most_ranks_are_not_blamed_for_a_gpu_that_is_stuck() {
    let mut clique = CliqueFixture::level(4, 20, false);
    clique.call(0..4, all_reduce(1), 12);
    clique.call([1], all_reduce(2), 11);
    assert_eq!(summary(clique.wait()), Some((WaitKind::NotCalled, 21, vec![], false)));
    clique.call([0, 2], all_reduce(2), 11);
    assert_eq!(summary(clique.wait()), Some((WaitKind::NotCalled, 21, vec![3], false)));
}

#[test]
fn a_gpu_that_has_not_begun_is_named_and_not_the_program_that_ran_ahead_least() {
    let mut clique = CliqueFixture::level(4, 20, true);
    // All have called number 20, and run ahead to different numbers.
    clique.call(0..4, all_reduce(1), 12);
    clique.call([0, 1, 3], all_reduce(2), 11);
    for rank in [0, 2, 3] {
        clique.ranks[rank].begun = 21;
    }
    assert_eq!(summary(clique.wait()), Some((WaitKind::NotBegun, 20, vec![1], true)));
    clique.ranks[1].begun = 21;
    assert_eq!(summary(clique.wait()), Some((WaitKind::NotEnded, 20, vec![], true)), "no rank differs");
    clique.ranks[3].ended = 21;
    assert_eq!(summary(clique.wait()), Some((WaitKind::NotEnded, 20, vec![0, 1, 2], true)));
}

#[test]
fn a_rank_that_is_silent_or_was_never_heard_is_named() {
    let mut clique = CliqueFixture::level(4, 20, false);
    clique.call([0, 1, 3], all_reduce(1), 12);
    clique.ranks[2].is_silent = true;
    assert_eq!(summary(clique.wait()), Some((WaitKind::NotHeard, 20, vec![2], false)));
    // Only its reports are lost: the others advance.
    clique.call([0, 1, 3], all_reduce(1), 1);
    assert_eq!(clique.wait().map(|wait| wait.since), Some(ago(1)));
    for rank in &mut clique.ranks {
        rank.is_silent = true;
    }
    assert_eq!(clique.wait(), None, "a clique that nobody reports is over");
    let mut clique = CliqueFixture::level(4, 20, true);
    clique.call(0..4, all_reduce(1), 45);
    for rank in [0, 1, 3] {
        clique.ranks[rank].begun = 21;
    }
    clique.ranks[2].is_silent = true;
    assert_eq!(summary(clique.wait()), Some((WaitKind::NotHeard, 20, vec![2], true)));
    for rank in [0, 1, 3] {
        clique.ranks[rank].ended = 21;
    }
    assert_eq!(clique.wait(), None, "it has ended for all that are heard");
    let mut clique = CliqueFixture::level(3, 20, true);
    clique.call(0..3, all_reduce(1), 12);
    for rank in &mut clique.ranks {
        rank.begun = 21;
    }
    let wait = clique.wait_among(5);
    assert_eq!(summary(wait), Some((WaitKind::NotHeard, 20, vec![3, 4], true)));
}

#[test]
fn programs_that_differ_are_told_apart_at_the_first_difference() {
    let gather = Collective { function: CollectiveFunction::AllGather, ..all_reduce(1) };
    let mut clique = CliqueFixture::level(4, 20, false);
    clique.call([0, 1, 3], all_reduce(1), 12);
    clique.call([2], gather, 12);
    clique.call(0..4, all_reduce(2), 12);
    let wait = clique.wait().unwrap();
    assert_eq!((wait.operation, wait.instead), (Some(all_reduce(1)), Some(gather)));
    assert_eq!(summary(Some(wait)), Some((WaitKind::DifferentProgram, 20, vec![2], false)));
    // The difference is older than everything that is reported.
    clique.call(0..4, all_reduce(3), 11);
    for _ in 0..20 {
        clique.call(0..4, all_reduce(3), 10);
    }
    let wait = clique.wait().unwrap();
    assert_eq!((wait.kind, wait.ranks, wait.instead), (WaitKind::DifferentProgram, vec![2], None));
}

#[test]
fn the_rank_whose_own_time_is_short_is_slow() {
    let window = |rank, gpu_ms: u64| RankWindow { rank, collectives: 100, gpu_ns: gpu_ms * 1_000_000 };
    let slow = find_slow_rank(&[window(0, 5_000), window(1, 5_100), window(2, 300)]).unwrap();
    assert_eq!(slow.rank, 2);
    assert!((slow.lateness_s - 0.047).abs() < 1e-9, "{slow:?}");
    assert_eq!(find_slow_rank(&[window(0, 5_000), window(1, 5_100), window(2, 4_000)]), None);
    assert_eq!(find_slow_rank(&[window(0, 5_000), window(1, 300), window(2, 300)]), None, "which of two?");
    assert_eq!(
        find_slow_rank(&[window(0, 50), window(1, 51), window(2, 3)]),
        None,
        "less than a millisecond"
    );
    let few = RankWindow { rank: 3, collectives: 3, gpu_ns: 1 };
    assert_eq!(find_slow_rank(&[window(0, 5_000), few]), None);
    assert_eq!(find_slow_rank(&[]), None);
}

proptest! {
    /// Ranks of one program at any points of it, with GPUs that obey NCCL: none ends what not all have begun.
    #[test]
    fn a_wait_names_ranks_that_are_behind(
        (called, begun) in (2_usize..6).prop_flat_map(|ranks| {
            (proptest::collection::vec(20_usize..28, ranks), proptest::collection::vec(0_usize..28, ranks))
        }),
        is_timed: bool,
    ) {
        let mut clique = CliqueFixture::level(called.len(), 20, is_timed);
        let back = *called.iter().min().unwrap();
        let begun: Vec<usize> = begun.iter().zip(&called).map(|(begun, called)| (*begun).clamp(20, *called)).collect();
        let ended = *begun.iter().min().unwrap();
        for (rank, count) in called.iter().enumerate() {
            for number in 20..*count {
                clique.call([rank], all_reduce(number as u64), 12);
            }
            // A GPU begins only what it comes to: one more than what has ended.
            clique.ranks[rank].begun = begun[rank].min(ended + 1);
            clique.ranks[rank].ended = ended;
        }
        match clique.wait() {
            None => {
                let is_level = called.iter().all(|count| *count == back);
                let none_begun = clique.ranks.iter().all(|rank| rank.begun == ended);
                prop_assert!(is_level || (is_timed && none_begun && ended < back));
            }
            Some(wait) => {
                prop_assert!(wait.ranks.is_sorted() && wait.ranks.len() < called.len());
                for rank in &wait.ranks {
                    let rank = *rank as usize;
                    match wait.kind {
                        WaitKind::NotCalled => prop_assert_eq!(called[rank], back),
                        WaitKind::NotBegun => prop_assert!(clique.ranks[rank].begun as u64 <= wait.number),
                        other => prop_assert!(false, "{other:?}"),
                    }
                }
            }
        }
    }
}

struct UnreadAnswers;

impl AnswerInbox for UnreadAnswers {
    fn deliver(&self, _slot: u64, _outcome: CallOutcome) {}
}

struct StoreFixture {
    engine: Arc<Engine>,
    reports: CollectiveReports,
    job: JobId,
}

impl StoreFixture {
    fn with_tasks(tasks: u32) -> Self {
        let engine = Engine::new(Clock::start());
        let job = engine.declare_job("train".parse().unwrap(), JobSettings::new(tasks)).unwrap();
        let connection = engine.register_connection(SocketAddr::from(([127, 0, 0, 1], 1)));
        let inbox: Arc<dyn AnswerInbox> = Arc::new(UnreadAnswers);
        for task in 0..i32::try_from(tasks).unwrap() {
            let incarnation = TaskIncarnation(7);
            let request = Request::Register { task: TaskId(task), incarnation, recoverable: false };
            engine.call(job, Caller { connection, claim: None }, request, &inbox, 0);
        }
        Self { engine, reports: CollectiveReports::default(), job }
    }

    fn send(&self, report: &pb::CollectivesReport) -> Result<CollectiveAnswer, CollectiveReportError> {
        self.reports.accept_report(&self.engine, self.job, &report.encode_to_vec())
    }
}

/// Returns the report of a process that is a task and has one communicator of two ranks.
fn report(task: u32, collectives: u64) -> pb::CollectivesReport {
    let reduced = pb::FunctionReport {
        function: "AllReduce".into(),
        enqueued: collectives,
        bytes: collectives * 400,
        timed_bytes: collectives * 400,
        gpu_ns: collectives * 1_000,
        ..Default::default()
    };
    let latest = pb::CollectiveReport {
        number: collectives - 1,
        function: "AllReduce".into(),
        data_type: "float32".into(),
        count: 100,
        chain: collectives,
        enqueued_us: 3_000_000,
        ..Default::default()
    };
    pb::CollectivesReport {
        process: u64::from(task) + 100,
        sequence: collectives,
        pid: 4711,
        host: "node\n7".into(),
        task: Some(task),
        communicators: vec![pb::CommunicatorReport {
            hash: 0xABCD,
            rank: task,
            ranks: 2,
            nodes: 1,
            changed_us: 3_000_000,
            collectives,
            functions: vec![reduced],
            operations: vec![latest],
            ..Default::default()
        }],
        ..Default::default()
    }
}

#[test]
fn the_view_names_the_task_that_has_not_called() {
    let fixture = StoreFixture::with_tasks(2);
    assert_eq!(fixture.reports.view(&fixture.engine, fixture.job, 2).clique_count, 0);
    fixture.send(&report(0, 12)).unwrap();
    let answer = fixture.send(&report(1, 11)).unwrap();
    assert_eq!(answer.interval_ms, 1_000);
    let view = fixture.reports.view(&fixture.engine, fixture.job, 2);
    assert_eq!((view.processes, view.clique_count, view.waiting_count), (2, 1, 1));
    let [clique] = &view.cliques[..] else { panic!("{view:?}") };
    assert_eq!((&*clique.clique, clique.front, clique.back), ("000000000000abcd", 12, 11));
    let wait = clique.wait.as_ref().unwrap();
    assert_eq!(
        (wait.kind, wait.role, &wait.waited_for[..]),
        (WaitKind::NotCalled, WaitRole::Cause, &[1][..])
    );
    assert!(
        wait.summary.starts_with("task 1 has not called collective 11 (AllReduce of 400 B float32)"),
        "{wait:?}"
    );
    assert!(!wait.certain && wait.waited_s >= 2.9, "{wait:?}");
    let clique = fixture.reports.clique(&fixture.engine, fixture.job, 2, 0xABCD).unwrap();
    let ranks: Vec<_> =
        clique.members.iter().map(|it| (it.rank, it.task, it.behind, it.waited_for)).collect();
    assert_eq!(ranks, [(0, Some(TaskId(0)), 0, false), (1, Some(TaskId(1)), 1, true)]);
    assert_eq!(clique.members[0].host, "node | 7");
    assert_eq!(fixture.reports.clique(&fixture.engine, fixture.job, 2, 0xABCE), None);
    assert!(
        fixture.reports.find_troubles(&fixture.engine, fixture.job, 2).stuck.is_empty(),
        "30 s have not passed"
    );
    fixture.reports.set_stuck_after(Duration::from_secs(2));
    let stuck = fixture.reports.find_troubles(&fixture.engine, fixture.job, 2).stuck;
    assert_eq!(stuck.iter().map(|it| &it.tasks[..]).collect::<Vec<_>>(), [[TaskId(1)]]);
    // The wait is old enough now that ranks are asked for more, and NCCL for times.
    std::thread::sleep(Duration::from_millis(600));
    let answer = fixture.send(&pb::CollectivesReport { sequence: 100, ..report(0, 12) }).unwrap();
    assert!(answer.is_timed);
    assert_eq!(answer.wanted, [WantedCollectives { hash: 0xABCD, rank: 0, first: 3 }]);
}

#[test]
fn totals_rise_by_what_is_new_and_a_repeated_report_changes_nothing() {
    let fixture = StoreFixture::with_tasks(2);
    let totals = || fixture.reports.counts(fixture.job).0[0].1;
    fixture.send(&report(0, 12)).unwrap();
    fixture.send(&report(0, 12)).unwrap();
    assert_eq!((totals().operations, totals().bytes), (12, 4_800));
    fixture.send(&report(0, 20)).unwrap();
    fixture.send(&report(0, 15)).unwrap();
    assert_eq!((totals().operations, totals().gpu_ns), (20, 20_000));
    // Another process of the same task begins again.
    fixture.send(&pb::CollectivesReport { process: 9, ..report(0, 5) }).unwrap();
    assert_eq!(totals().operations, 25);
    assert_eq!(fixture.reports.counts(fixture.job).1, [5, 0]);
}

#[test]
fn reports_that_are_no_reports_are_refused_and_counted() {
    let fixture = StoreFixture::with_tasks(1);
    let refuse =
        |bytes: Vec<u8>| fixture.reports.accept_report(&fixture.engine, fixture.job, &bytes).unwrap_err();
    let with_ranks = |rank, ranks| {
        let mut report = report(0, 5);
        report.communicators[0].rank = rank;
        report.communicators[0].ranks = ranks;
        report.encode_to_vec()
    };
    assert_eq!(refuse(vec![0; REPORT_BYTES_MAX + 1]), CollectiveReportError::TooLong(REPORT_BYTES_MAX + 1));
    assert_eq!(refuse(with_ranks(2, 2)), CollectiveReportError::NoSuchRank { rank: 2, ranks: 2 });
    assert_eq!(
        refuse(with_ranks(0, u32::MAX)),
        CollectiveReportError::NoSuchRank { rank: 0, ranks: u32::MAX }
    );
    assert!(matches!(refuse(vec![0xFF; 100]), CollectiveReportError::Unreadable(_)));
    // Empty rows take two bytes each.
    let many = |tag: u8, count: usize| [tag << 3 | 2, 0].repeat(count);
    assert!(matches!(refuse(many(8, 100_000)), CollectiveReportError::TooMany { what: "communicators", .. }));
    let nested = |tag, count| {
        let inner = many(tag, count);
        let mut message = vec![8 << 3 | 2];
        prost::encoding::encode_varint(inner.len() as u64, &mut message);
        [message, inner].concat()
    };
    for (tag, list) in [(8, "functions of a communicator"), (9, "collectives of a communicator")] {
        let CollectiveReportError::TooMany { what, .. } = refuse(nested(tag, 50_000)) else {
            panic!("{list}")
        };
        assert_eq!(what, list);
    }
    assert_eq!(fixture.reports.counts(fixture.job).1[1], 7);
    // A job has a bounded number of processes.
    for process in 0..PROCESSES_PER_TASK as u64 {
        fixture.send(&pb::CollectivesReport { process, ..report(0, 5) }).unwrap();
    }
    let one_more = pb::CollectivesReport { process: 99, ..report(0, 5) };
    assert_eq!(fixture.send(&one_more), Err(CollectiveReportError::NoRoom));
    let bytes = fixture.reports.bytes();
    assert!(bytes > 0);
    fixture.send(&pb::CollectivesReport { process: 0, sequence: 100, ..report(0, 5) }).unwrap();
    assert_eq!(fixture.reports.bytes(), bytes, "a report replaces the one before");
    fixture.reports.retain_jobs(|_| false);
    assert_eq!(fixture.reports.bytes(), 0);
    assert!(ProcessCollectives::parse(&[], NOW).unwrap().communicators.is_empty());
}
