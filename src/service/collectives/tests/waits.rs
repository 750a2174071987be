//! Tests the analysis of one clique with invented ranks. Begin at `CliqueFixture`.

use std::collections::BTreeMap;
use std::time::Duration;

use muster_collectives::{Collective, CollectiveFunction, DataType};
use proptest::prelude::*;

use super::super::analysis::{CliqueWait, RankReport, RankWindow, WaitKind, find_slow_rank, find_wait};
use super::super::parse::{ReportedCollective, ReportedCommunicator};
use crate::coordination::Timestamp;

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
    /// When collectives begin and end, if that is not when they are called.
    gpu_at: Option<Timestamp>,
    /// A collective that NCCL does not time.
    without_events: Option<usize>,
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
            gpu_at: None,
            without_events: None,
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
                let has_events = self.is_timed && self.without_events != Some(number);
                let at = self.gpu_at.unwrap_or(self.at);
                let happened = |until: usize| (has_events && number < until).then_some(at);
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
fn a_rank_without_times_is_neither_named_nor_evidence() {
    let mut clique = CliqueFixture::level(4, 20, true);
    clique.ranks[1].is_timed = false;
    clique.call(0..4, all_reduce(1), 40);
    assert_eq!(clique.wait(), None, "rank 1 may be at an earlier kernel, as all others are");
    for rank in [0, 2, 3] {
        clique.ranks[rank].begun = 21;
    }
    assert_eq!(
        summary(clique.wait()),
        Some((WaitKind::NotEnded, 20, vec![], false)),
        "rank 1 may hold it up"
    );
    // The times of the others are certain.
    clique.ranks[3].begun = 20;
    assert_eq!(summary(clique.wait()), Some((WaitKind::NotBegun, 20, vec![3], true)));
}

#[test]
fn a_rank_that_ran_far_ahead_has_ended_nothing_by_that() {
    let mut clique = CliqueFixture::level(4, 20, true);
    clique.call(0..4, all_reduce(1), 40);
    (0..15).for_each(|_| clique.call([1], all_reduce(2), 40));
    // The first collective that its report has is number 26, and it has not begun.
    assert_eq!(summary(clique.wait()), Some((WaitKind::NotCalled, 21, vec![], false)));
}

#[test]
fn a_wait_on_a_gpu_begins_when_the_other_gpus_come_to_it() {
    let mut clique = CliqueFixture::level(4, 20, true);
    // The programs called 40 s before the GPUs came to it, and rank 1 has not reported since.
    clique.call(0..4, all_reduce(1), 40);
    clique.ranks[1].heard_at = ago(2);
    for rank in [0, 2, 3] {
        (clique.ranks[rank].begun, clique.ranks[rank].ended) = (21, 21);
        clique.ranks[rank].gpu_at = Some(ago(1));
    }
    let wait = clique.wait().unwrap();
    assert_eq!((wait.kind, wait.since, wait.lasted(NOW)), (WaitKind::NotBegun, ago(1), Duration::ZERO));
}

#[test]
fn a_silent_rank_does_not_hide_the_rank_that_holds_up_the_others() {
    let mut clique = CliqueFixture::level(4, 20, true);
    clique.ranks[3].is_silent = true;
    for number in 0..10 {
        clique.call(0..3, all_reduce(number), 12);
    }
    for (rank, begun) in [30, 29, 30].into_iter().enumerate() {
        (clique.ranks[rank].begun, clique.ranks[rank].ended) = (begun, 29);
    }
    assert_eq!(summary(clique.wait()), Some((WaitKind::NotBegun, 29, vec![1], true)));
    clique.ranks[1].begun = 30;
    assert_eq!(summary(clique.wait()), Some((WaitKind::NotHeard, 29, vec![3], true)));
}

#[test]
fn a_collective_that_nccl_does_not_time_holds_up_nothing() {
    let mut clique = CliqueFixture::level(4, 20, true);
    clique.call(0..4, all_reduce(1), 12);
    clique.call(0..4, all_reduce(2), 11);
    clique.ranks[1].without_events = Some(20);
    for rank in &mut clique.ranks {
        (rank.begun, rank.ended) = (22, 21);
    }
    assert_eq!(summary(clique.wait()), Some((WaitKind::NotEnded, 21, vec![], true)));
    clique.ranks.iter_mut().for_each(|rank| rank.ended = 22);
    assert_eq!(clique.wait(), None);
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
