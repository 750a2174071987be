//! The state of a clique: whether its ranks wait, for which ranks, and how. A pure function of reports.
//!
//! The rules are those of PyTorch's flight recorder, with numbers in place of times: a collective was enqueued (*called*) by the
//! program, *begun* by the GPU, and *ended*. Begin at [`find_wait`].
//!
//! | kind | condition at the first collective that has not ended everywhere |
//! | --- | --- |
//! | different program | ranks have enqueued different collectives at one number |
//! | not begun | all have called it; some GPUs have begun, others have not |
//! | not ended | all GPUs have begun, and it does not end |
//! | not called | some ranks have called it, others have not |
//! | not heard | ranks that hold it up report nothing any more, or never did |
//!
//! Begin and end are known only of collectives that NCCL was asked to time. Without these times, a clique is judged by calls
//! alone: programs run ahead of their GPUs, so the rank that has called least is the likely cause and not the certain one.
//! A rank counts as beyond a collective only if its end, or a later begin, was reported. Without either it is neither named nor
//! evidence against others.

use std::collections::BTreeMap;
use std::time::Duration;

use muster_collectives::Collective;
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use super::parse::{ReportedCollective, ReportedCommunicator};
use crate::coordination::Timestamp;

/// One rank of a clique.
#[derive(Debug, Clone, Copy)]
pub(super) struct RankReport<'a> {
    pub process: u64,
    pub communicator: &'a ReportedCommunicator,
    /// When its process was heard last.
    pub heard_at: Timestamp,
    pub is_silent: bool,
}

/// How ranks hold up a clique.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "kebab-case")]
pub enum WaitKind {
    /// They have enqueued another collective than the others at one number.
    DifferentProgram,
    /// Their GPUs have not begun a collective that the GPUs of others have begun.
    NotBegun,
    /// All GPUs have begun, and it does not end: the network or a device.
    NotEnded,
    /// Their programs have not called a collective that others have called.
    NotCalled,
    /// They report nothing any more, or never did.
    NotHeard,
}

impl WaitKind {
    /// All kinds.
    pub const ALL: [Self; 5] =
        [Self::DifferentProgram, Self::NotBegun, Self::NotEnded, Self::NotCalled, Self::NotHeard];

    /// Returns its name, as in JSON and metrics.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::DifferentProgram => "different-program",
            Self::NotBegun => "not-begun",
            Self::NotEnded => "not-ended",
            Self::NotCalled => "not-called",
            Self::NotHeard => "not-heard",
        }
    }
}

/// A clique that waits.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct CliqueWait {
    pub kind: WaitKind,
    /// The number of the collective.
    pub number: u64,
    /// The collective of the ranks that wait, if it is known.
    pub operation: Option<Collective>,
    /// The ranks that hold it up, in order. Empty if no rank differs from the others.
    pub ranks: Vec<u32>,
    /// The collective that these ranks enqueued instead, for [`WaitKind::DifferentProgram`].
    pub instead: Option<Collective>,
    /// Since when nothing has happened that could end the wait.
    pub since: Timestamp,
    /// When a rank that holds it up was heard last: until then it is known that the wait lasted. `None` if these ranks are
    /// silent, or if none differs from the others: then it lasts until now.
    pub known_until: Option<Timestamp>,
    /// Whether begin and end are known, so that the ranks are the certain cause.
    pub is_timed: bool,
}

impl CliqueWait {
    /// Returns for how long the wait is known to last. A rank may have gone on since it reported.
    pub fn lasted(&self, now: Timestamp) -> Duration {
        self.known_until.unwrap_or(now).since(self.since)
    }
}

/// Returns when a rank of these was heard last that is not silent.
fn last_heard(reports: &BTreeMap<u32, RankReport<'_>>, ranks: &[u32]) -> Option<Timestamp> {
    let heard = ranks.iter().filter_map(|rank| reports.get(rank)).filter(|report| !report.is_silent);
    heard.map(|report| report.heard_at).max()
}

/// Returns the wait of a clique of `ranks` ranks, if its ranks wait. Whether that is long is for the caller to judge.
pub(super) fn find_wait(ranks: u32, reports: &BTreeMap<u32, RankReport<'_>>) -> Option<CliqueWait> {
    // A clique of which no rank is heard is over.
    if reports.values().all(|report| report.is_silent) {
        return None;
    }
    find_different_program(reports)
        .or_else(|| find_wait_on_gpus(ranks, reports))
        .or_else(|| find_wait_for_calls(reports))
}

/// Returns the collectives that were reported at each number.
fn collectives_by_number<'a>(
    reports: &BTreeMap<u32, RankReport<'a>>,
) -> BTreeMap<u64, Vec<(u32, &'a ReportedCollective)>> {
    let mut by_number: BTreeMap<u64, Vec<(u32, &ReportedCollective)>> = BTreeMap::new();
    for (rank, report) in reports {
        for operation in &report.communicator.operations {
            by_number.entry(operation.number).or_default().push((*rank, operation));
        }
    }
    by_number
}

fn find_different_program(reports: &BTreeMap<u32, RankReport<'_>>) -> Option<CliqueWait> {
    let by_number = collectives_by_number(reports);
    let differ = |at_number: &[(u32, &ReportedCollective)]| {
        at_number.iter().any(|(_, operation)| operation.chain != at_number[0].1.chain)
    };
    // Ranks do not report an earlier collective all at once. The reports of two ranks do not tell which one is right.
    let most_heard = by_number.values().filter(|it| differ(it)).map(Vec::len).max()?;
    let (number, at_number) = by_number.into_iter().find(|(_, it)| it.len() == most_heard && differ(it))?;
    let mut chains: BTreeMap<u64, usize> = BTreeMap::new();
    for (_, operation) in &at_number {
        *chains.entry(operation.chain).or_default() += 1;
    }
    // Most ranks are right, and of two halves the one with the first rank.
    let size = |chain: u64| chains.get(&chain).copied().unwrap_or_default();
    let most = at_number.iter().map(|(_, operation)| size(operation.chain)).max()?;
    let (_, usual) = at_number.iter().find(|(_, operation)| size(operation.chain) == most)?;
    let others: Vec<_> = at_number.iter().filter(|(_, operation)| operation.chain != usual.chain).collect();
    let is_other_here = |other: &Collective| *other != usual.operation;
    Some(CliqueWait {
        kind: WaitKind::DifferentProgram,
        number,
        operation: Some(usual.operation),
        ranks: others.iter().map(|(rank, _)| *rank).collect(),
        // Nothing that ranks do later makes their programs agree.
        known_until: None,
        // If the collectives at this number are equal, an earlier one differs, of which nothing is known any more.
        instead: others.iter().map(|(_, operation)| operation.operation).find(is_other_here),
        since: latest_change(reports)?,
        is_timed: usual.is_timed,
    })
}

/// Returns the time of the latest change of any rank that is heard.
fn latest_change(reports: &BTreeMap<u32, RankReport<'_>>) -> Option<Timestamp> {
    let heard = reports.values().filter(|report| !report.is_silent);
    heard.map(|report| report.communicator.changed_at).max()
}

/// Returns the first collective of a rank of which it is known that it has not ended.
///
/// A GPU runs the collectives of a communicator in order. So one that has shown no begin or end while a later one has is not timed
/// by NCCL, though its process asked for times.
fn first_unended<'a>(report: &RankReport<'a>) -> Option<&'a ReportedCollective> {
    let operations = &report.communicator.operations;
    let ended = operations.iter().filter(|it| it.ended_at.is_some()).map(|it| it.number).max();
    let begun = operations.iter().filter(|it| it.begun_at.is_some()).map(|it| it.number).max().max(ended);
    operations.iter().find(|it| {
        let after = if it.begun_at.is_some() { ended } else { begun };
        it.is_timed && it.ended_at.is_none() && Some(it.number) > after
    })
}

/// How far the GPU of a rank has come at a collective, and since when.
enum GpuProgress {
    NotBegun(Timestamp),
    Begun(Timestamp),
    Ended(Timestamp),
    /// No times of this collective are known.
    Unknown,
}

impl GpuProgress {
    fn of_rank(report: &RankReport<'_>, number: u64) -> Self {
        if let Some(unended) = first_unended(report).filter(|operation| operation.number == number) {
            return unended.begun_at.map_or(Self::NotBegun(unended.enqueued_at), Self::Begun);
        }
        // A later one that has begun shows that this one has ended.
        let is_evidence = |it: &&ReportedCollective| {
            it.number >= number && (it.ended_at.is_some() || (it.number > number && it.begun_at.is_some()))
        };
        match report.communicator.operations.iter().find(is_evidence) {
            Some(own) if own.number == number => Self::Ended(own.ended_at.unwrap_or(own.enqueued_at)),
            Some(_) => Self::Ended(report.communicator.changed_at),
            None => Self::Unknown,
        }
    }
}

/// Finds a collective that all ranks have called, and that has not ended everywhere though some GPUs have begun it.
///
/// The calls of a silent rank do not count: if only its reports are lost, it goes on.
fn find_wait_on_gpus(ranks: u32, reports: &BTreeMap<u32, RankReport<'_>>) -> Option<CliqueWait> {
    let heard = || reports.values().filter(|report| !report.is_silent);
    let back = heard().map(|report| report.communicator.collectives).min()?;
    let first = heard().filter_map(first_unended).min_by_key(|operation| operation.number)?;
    if first.number >= back {
        return None;
    }
    let number = first.number;
    let (mut not_begun, mut begun, mut silent) = (Vec::new(), Vec::new(), Vec::new());
    // Ranks of which nothing shows that they have come to it: those that are silent, and those that were never heard.
    let mut missing = ranks_without_report(ranks, reports);
    let (mut has_ended_somewhere, mut is_unknown_somewhere) = (false, false);
    let mut since = Timestamp(0);
    for (rank, report) in reports {
        let at = match (GpuProgress::of_rank(report, number), report.is_silent) {
            (GpuProgress::NotBegun(_), true) => {
                silent.push(*rank);
                continue;
            }
            (GpuProgress::Begun(_) | GpuProgress::Unknown, true) => {
                missing.push(*rank);
                continue;
            }
            (GpuProgress::Unknown, false) => {
                is_unknown_somewhere = true;
                continue;
            }
            (GpuProgress::Ended(at), _) => {
                has_ended_somewhere = true;
                at
            }
            (GpuProgress::NotBegun(at), false) => {
                not_begun.push(*rank);
                at
            }
            (GpuProgress::Begun(at), false) => {
                begun.push(*rank);
                at
            }
        };
        since = since.max(at);
    }
    missing.sort_unstable();
    let (kind, ranks) = match () {
        () if begun.is_empty() && !has_ended_somewhere => return None,
        () if !silent.is_empty() => (WaitKind::NotHeard, silent),
        () if !not_begun.is_empty() => (WaitKind::NotBegun, not_begun),
        () if !missing.is_empty() => (WaitKind::NotHeard, missing),
        // If it has ended for some, the others are named.
        () if has_ended_somewhere => (WaitKind::NotEnded, begun.clone()),
        () => (WaitKind::NotEnded, Vec::new()),
    };
    if kind == WaitKind::NotHeard {
        // The last report of a silent rank does not tell what it has done since. The others have waited since they changed last.
        let last_reports = ranks.iter().filter_map(|rank| reports.get(rank)).map(|report| report.heard_at);
        since = last_reports.fold(since, Timestamp::max).max(latest_change(reports)?);
    }
    let known_until = match kind {
        WaitKind::NotHeard => None,
        // Every rank that is not named would have to end it, too.
        _ if ranks.is_empty() => last_heard(reports, &begun),
        _ => last_heard(reports, &ranks),
    };
    // A rank of which no times are known may be the one that holds up the others.
    let is_timed = kind == WaitKind::NotBegun || !is_unknown_somewhere;
    let operation = Some(first.operation);
    Some(CliqueWait { kind, number, operation, ranks, instead: None, since, known_until, is_timed })
}

/// The most ranks without a report that are named.
const NAMED_MAX: usize = 1024;

fn ranks_without_report(ranks: u32, reports: &BTreeMap<u32, RankReport<'_>>) -> Vec<u32> {
    if reports.len() >= ranks as usize {
        return Vec::new();
    }
    (0..ranks).filter(|rank| !reports.contains_key(rank)).take(NAMED_MAX).collect()
}

/// Finds ranks that have not called a collective that others have called.
fn find_wait_for_calls(reports: &BTreeMap<u32, RankReport<'_>>) -> Option<CliqueWait> {
    let back = reports.values().map(|report| report.communicator.collectives).min()?;
    let is_behind = |report: &RankReport<'_>| report.communicator.collectives == back;
    let ahead: Vec<&RankReport<'_>> =
        reports.values().filter(|report| !is_behind(report) && !report.is_silent).collect();
    // Since the first rank has called it, as far as that is known; a later call shows that it was called before.
    let called = ahead.iter().filter_map(|report| {
        let operations = &report.communicator.operations;
        let known = operations.iter().find(|operation| operation.number >= back);
        known.map(|operation| operation.enqueued_at)
    });
    let called = called.min()?;
    let operation = ahead.iter().flat_map(|report| &report.communicator.operations);
    let operation = operation.into_iter().find(|operation| operation.number == back);
    let behind: Vec<(u32, &RankReport<'_>)> = reports
        .iter()
        .filter(|(_, report)| is_behind(report))
        .map(|(rank, report)| (*rank, report))
        .collect();
    let changed = behind.iter().map(|(_, report)| report.communicator.changed_at).max()?;
    let is_silent = behind.iter().all(|(_, report)| report.is_silent);
    let ranks: Vec<u32> = behind.iter().map(|(rank, _)| *rank).collect();
    let mut since = called.max(changed);
    if is_silent {
        // The last report of a silent rank does not tell what it has called since. Its process may be well, and only its reports
        // lost; then the others advance.
        since = since.max(latest_change(reports)?);
    }
    let known_until = last_heard(reports, &ranks);
    let is_timed = operation.is_some_and(|operation| operation.is_timed);
    // If a GPU is stuck, programs run ahead of it to different numbers, and most of them are behind the furthest. Then the calls
    // alone do not tell who holds up the others.
    let is_told_by_calls = is_timed || is_silent || ranks.len() * 2 <= reports.len();
    Some(CliqueWait {
        kind: if is_silent { WaitKind::NotHeard } else { WaitKind::NotCalled },
        number: back,
        operation: operation.map(|operation| operation.operation),
        instead: None,
        since,
        known_until,
        ranks: if is_told_by_calls { ranks } else { Vec::new() },
        is_timed,
    })
}

/// The totals of one rank over a time.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct RankWindow {
    pub rank: u32,
    /// The number of collectives that ended with known times on the GPU.
    pub collectives: u64,
    /// The time of the GPU in them, in nanoseconds.
    pub gpu_ns: u64,
}

/// A rank for which the others wait in most collectives.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct SlowRank {
    pub rank: u32,
    /// How much longer the others are in a collective, in seconds.
    pub lateness_s: f64,
}

/// The fewest collectives of which a rank is judged.
const JUDGED_MIN: u64 = 20;
/// The least lateness of a slow rank in a collective, in seconds.
pub const SLOW_RANK_LATENESS_MIN_S: f64 = 0.001;

/// Returns the rank for which the others wait, if there is one. In a collective, a GPU waits for the last one to begin. So the rank
/// that is always last is the one whose own time in collectives is short, while all others' times are long.
#[expect(clippy::cast_precision_loss, reason = "a figure for people")]
pub(super) fn find_slow_rank(windows: &[RankWindow]) -> Option<SlowRank> {
    let mut judged: Vec<&RankWindow> =
        windows.iter().filter(|window| window.collectives >= JUDGED_MIN && window.gpu_ns > 0).collect();
    if judged.len() < windows.len() || judged.len() < 2 {
        return None;
    }
    let mean_s = |window: &RankWindow| window.gpu_ns as f64 / 1e9 / window.collectives as f64;
    judged.sort_by(|one, other| mean_s(one).total_cmp(&mean_s(other)));
    // All others are long: so the second shortest is.
    let (shortest, second) = (mean_s(judged[0]), mean_s(judged[1]));
    let lateness_s = second - shortest;
    (shortest < second / 2.0 && lateness_s >= SLOW_RANK_LATENESS_MIN_S)
        .then_some(SlowRank { rank: judged[0].rank, lateness_s })
}
