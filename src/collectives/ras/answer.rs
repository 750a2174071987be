//! NCCL's JSON, which has one object for each rank of each communicator. Each object is reduced as it is read, so one
//! communicator with one small row for each of its ranks is in memory at a time. Begin at [`read_report`].

use std::collections::BTreeMap;
use std::fmt;
use std::io::Read;
use std::marker::PhantomData;

use serde::Deserialize;
use serde::de::{Deserializer, Error, IgnoredAny, MapAccess, SeqAccess, Visitor};

use super::{NOTABLE_RANKS_MAX, RasCommunicator, RasRank, RasRankState, RasReport};

/// `ncclSuccess`.
const SUCCESS: i32 = 0;
/// `ncclInProgress`.
const IN_PROGRESS: i32 = 7;
/// The most ranks of a communicator.
const RANKS_MAX: usize = 1 << 20;
/// The most communicators of a job.
const COMMUNICATORS_MAX: usize = 4096;
/// The most bytes of a text that are kept.
const TEXT_LENGTH_MAX: usize = 64;

/// Reads an answer.
///
/// # Errors
/// If it is not the JSON that NCCL 2.28.7 and newer write, or has more than the limits.
pub(super) fn read_report(answer: impl Read) -> Result<RasReport, serde_json::Error> {
    let Answer { nccl_version, communicators } = serde_json::from_reader(answer)?;
    Ok(RasReport { nccl_version: shorten(nccl_version), communicators })
}

#[derive(Deserialize)]
struct Answer {
    nccl_version: String,
    #[serde(deserialize_with = "read_communicators")]
    communicators: Vec<RasCommunicator>,
}

#[derive(Deserialize)]
struct CommunicatorAnswer {
    hash: String,
    size: u32,
    #[serde(default, deserialize_with = "read_ranks")]
    ranks: Vec<RasRank>,
    #[serde(default, deserialize_with = "read_missing_ranks")]
    missing_ranks: Vec<RasRank>,
}

#[derive(Deserialize)]
struct RankAnswer {
    rank: u32,
    host: String,
    pid: i64,
    status: RankStatus,
    #[serde(deserialize_with = "sum_counts")]
    collective_counts: u64,
}

#[derive(Deserialize)]
struct RankStatus {
    init_state: i32,
    async_error: i32,
    abort_flag: bool,
}

#[derive(Deserialize)]
struct MissingRankAnswer {
    rank: u32,
    host: String,
    pid: i64,
    status: MissingRankStatus,
}

#[derive(Deserialize)]
struct MissingRankStatus {
    unresponsive: bool,
    considered_dead: bool,
}

/// Reads a list, each element of which is reduced at once.
struct ReducedList<T, R> {
    reduce: fn(T) -> Result<R, String>,
    length_max: usize,
    element: PhantomData<T>,
}

impl<'de, T: Deserialize<'de>, R> Visitor<'de> for ReducedList<T, R> {
    type Value = Vec<R>;

    fn expecting(&self, to: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(to, "a list of at most {} elements", self.length_max)
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<Self::Value, A::Error> {
        let mut all = Vec::new();
        while let Some(element) = list.next_element()? {
            if all.len() == self.length_max {
                return Err(A::Error::invalid_length(all.len() + 1, &self));
            }
            all.push((self.reduce)(element).map_err(A::Error::custom)?);
        }
        Ok(all)
    }
}

fn read_list<'de, D: Deserializer<'de>, T: Deserialize<'de>, R>(
    from: D,
    length_max: usize,
    reduce: fn(T) -> Result<R, String>,
) -> Result<Vec<R>, D::Error> {
    from.deserialize_seq(ReducedList { reduce, length_max, element: PhantomData })
}

fn read_communicators<'de, D: Deserializer<'de>>(from: D) -> Result<Vec<RasCommunicator>, D::Error> {
    read_list(from, COMMUNICATORS_MAX, summarize)
}

fn read_ranks<'de, D: Deserializer<'de>>(from: D) -> Result<Vec<RasRank>, D::Error> {
    read_list(from, RANKS_MAX, |rank: RankAnswer| Ok(rank_that_answered(rank)))
}

fn read_missing_ranks<'de, D: Deserializer<'de>>(from: D) -> Result<Vec<RasRank>, D::Error> {
    read_list(from, RANKS_MAX, |rank: MissingRankAnswer| Ok(missing_rank(rank)))
}

/// Reads the counts of a rank, one for each function, as their sum.
fn sum_counts<'de, D: Deserializer<'de>>(from: D) -> Result<u64, D::Error> {
    struct Counts;
    impl<'de> Visitor<'de> for Counts {
        type Value = u64;

        fn expecting(&self, to: &mut fmt::Formatter<'_>) -> fmt::Result {
            to.write_str("a count for each function")
        }

        fn visit_map<A: MapAccess<'de>>(self, mut counts: A) -> Result<u64, A::Error> {
            let mut sum = 0_u64;
            while let Some((_, count)) = counts.next_entry::<IgnoredAny, u64>()? {
                sum = sum.saturating_add(count);
            }
            Ok(sum)
        }
    }
    from.deserialize_map(Counts)
}

#[expect(clippy::cast_possible_truncation, reason = "at most RANKS_MAX twice")]
fn summarize(one: CommunicatorAnswer) -> Result<RasCommunicator, String> {
    let CommunicatorAnswer { hash, size, ranks, missing_ranks } = one;
    let digits = hash.strip_prefix("0x").unwrap_or(&hash);
    let Ok(hash) = u64::from_str_radix(digits, 16) else {
        return Err(format!("a communicator has the hash {:?}", shorten(hash)));
    };
    if ranks.len() > size as usize || ranks.iter().chain(&missing_ranks).any(|it| it.rank >= size) {
        return Err(format!("a communicator of {size} ranks has others than these"));
    }
    let answered = ranks.len() as u32;
    let mut by_count: BTreeMap<u64, usize> = BTreeMap::new();
    for count in ranks.iter().filter_map(|rank| rank.called) {
        *by_count.entry(count).or_default() += 1;
    }
    let bound = |count: Option<(&u64, &usize)>| count.map_or(0, |(count, _)| *count);
    let (front, back) = (bound(by_count.last_key_value()), bound(by_count.first_key_value()));
    // Of two numbers that as many ranks have called, the larger one.
    let usual = by_count.iter().max_by_key(|(count, ranks)| (**ranks, **count)).map(|(count, _)| *count);
    let total_called = ranks.iter().filter_map(|rank| rank.called).fold(0, u64::wrapping_add);
    let is_usual = |rank: &RasRank| rank.state == RasRankState::Answers && rank.called == usual;
    let mut notable: Vec<RasRank> =
        ranks.into_iter().chain(missing_ranks).filter(|rank| !is_usual(rank)).collect();
    let notable_count = notable.len() as u32;
    notable.sort_by_key(|rank| (rank.state, rank.called, rank.rank));
    notable.truncate(NOTABLE_RANKS_MAX);
    Ok(RasCommunicator { hash, ranks: size, answered, front, back, total_called, notable, notable_count })
}

fn rank_that_answered(rank: RankAnswer) -> RasRank {
    let RankStatus { init_state, async_error, abort_flag } = rank.status;
    let is_error = |code: i32| code != SUCCESS && code != IN_PROGRESS;
    let state = match () {
        () if is_error(async_error) => RasRankState::Failed(async_error),
        () if abort_flag => RasRankState::Aborted,
        () if is_error(init_state) => RasRankState::Failed(init_state),
        () if init_state == IN_PROGRESS => RasRankState::Starting,
        () => RasRankState::Answers,
    };
    let (host, pid) = (shorten(rank.host), known_pid(rank.pid));
    RasRank { rank: rank.rank, host, pid, state, called: Some(rank.collective_counts) }
}

fn missing_rank(rank: MissingRankAnswer) -> RasRank {
    let state = match rank.status {
        MissingRankStatus { considered_dead: true, .. } => RasRankState::Dead,
        MissingRankStatus { unresponsive: true, .. } => RasRankState::Unresponsive,
        MissingRankStatus { .. } => RasRankState::Absent,
    };
    RasRank { rank: rank.rank, host: shorten(rank.host), pid: known_pid(rank.pid), state, called: None }
}

fn shorten(mut text: String) -> String {
    text.truncate(text.floor_char_boundary(TEXT_LENGTH_MAX));
    text.shrink_to_fit();
    text
}

/// RAS writes -1 for a process that it does not know.
fn known_pid(pid: i64) -> u32 {
    u32::try_from(pid).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns an answer about one communicator, in the form of NCCL 2.29.
    fn answer(ranks: &str, missing: &str) -> String {
        format!(
            r#"{{ "nccl_version": "2.29.1", "cuda_runtime_version": 13000, "timestamp": "2026-01-02 03:04:05",
            "communicators_count": 1, "communicators": [ {{ "hash": "0xae94423cfbb2ef4a", "secondary_hash": "0x1:0x2",
            "size": 4, "ranks_count": 2, "missing_ranks_count": 2, "ranks": [{ranks}], "missing_ranks": [{missing}] }} ],
            "ras": {{ "collection_time_sec": 0.000, "timeouts_count": 0 }} }}"#
        )
    }

    fn rank(rank: u32, status: &str, counts: &str) -> String {
        format!(
            r#"{{ "rank": {rank}, "host": "10.0.0.{rank}", "pid": {}, "cuda_dev": 0, "nvml_dev": 0,
            "status": {{ "finalize_called": false, "destroy_flag": false, {status} }}, "collective_counts": {{ {counts} }} }}"#,
            100 + rank
        )
    }

    fn missing(rank: u32, is_unresponsive: bool, is_dead: bool) -> String {
        format!(
            r#"{{ "rank": {rank}, "host": "10.0.0.{rank}", "pid": {}, "cuda_dev": 0, "nvml_dev": 0,
            "status": {{ "unresponsive": {is_unresponsive}, "considered_dead": {is_dead} }} }}"#,
            100 + rank
        )
    }

    const WELL: &str = r#""init_state": 0, "async_error": 0, "abort_flag": false"#;

    #[test]
    fn ranks_that_differ_are_kept_the_worst_first() {
        let ranks = [
            rank(0, WELL, r#""AllReduce": 40, "Broadcast": 2"#),
            rank(1, WELL, r#""AllReduce": 41, "Broadcast": 0"#),
        ];
        let text = answer(&ranks.join(","), &[missing(2, true, false), missing(3, true, true)].join(","));
        let report = read_report(text.as_bytes()).unwrap();
        assert_eq!(report.nccl_version, "2.29.1");
        let [found] = &report.communicators[..] else { panic!("{report:?}") };
        assert_eq!((found.hash, found.ranks, found.answered), (0xae94_423c_fbb2_ef4a, 4, 2));
        assert_eq!((found.front, found.back, found.total_called, found.notable_count), (42, 41, 83, 3));
        let notable: Vec<_> = found.notable.iter().map(|it| (it.rank, it.state, it.called, it.pid)).collect();
        assert_eq!(
            notable,
            [
                (3, RasRankState::Dead, None, 103),
                (2, RasRankState::Unresponsive, None, 102),
                (1, RasRankState::Answers, Some(41), 101)
            ]
        );
    }

    #[test]
    fn failed_ranks_differ_from_starting_ones() {
        let state_of = |status: &str| {
            let text = answer(&rank(0, status, ""), "");
            read_report(text.as_bytes()).unwrap().communicators[0].notable.first().map(|it| it.state)
        };
        let status = |init: i32, error: i32, is_aborted: bool| {
            format!(r#""init_state": {init}, "async_error": {error}, "abort_flag": {is_aborted}"#)
        };
        assert_eq!(state_of(&status(0, 0, false)), None);
        assert_eq!(state_of(&status(7, 7, false)), Some(RasRankState::Starting));
        assert_eq!(state_of(&status(0, 6, true)), Some(RasRankState::Failed(6)));
        assert_eq!(state_of(&status(0, 0, true)), Some(RasRankState::Aborted));
        assert_eq!(state_of(&status(2, 0, false)), Some(RasRankState::Failed(2)));
    }

    #[test]
    fn the_list_of_notable_ranks_is_bounded() {
        let many: Vec<String> = (0..500).map(|it| rank(it, WELL, &format!(r#""AllReduce": {it}"#))).collect();
        let text = answer(&many.join(","), "").replace(r#""size": 4"#, r#""size": 500"#);
        let found = &read_report(text.as_bytes()).unwrap().communicators[0];
        assert_eq!((found.notable.len(), found.notable_count), (NOTABLE_RANKS_MAX, 499));
        assert_eq!(found.notable[0].called, Some(0));
    }

    #[test]
    fn one_rank_ahead_of_all_others_is_the_notable_one() {
        let counts = [5, 6, 5, 5];
        let ranks: Vec<String> = (0..)
            .zip(counts)
            .map(|(it, count)| rank(it, WELL, &format!(r#""AllReduce": {count}"#)))
            .collect();
        let found = &read_report(answer(&ranks.join(","), "").as_bytes()).unwrap().communicators[0];
        assert_eq!(found.notable.iter().map(|it| it.rank).collect::<Vec<_>>(), [1]);
    }

    #[test]
    fn invalid_answers_are_refused() {
        let whole = answer(&rank(0, WELL, ""), "");
        for end in 0..whole.len() {
            assert!(read_report(&whole.as_bytes()[..end]).is_err(), "{end} bytes");
        }
        let impossible = answer(&rank(4, WELL, ""), "");
        let of_hash = |hash: &str| {
            format!(r#"{{"nccl_version": "2", "communicators": [{{"hash": "{hash}", "size": 1}}]}}"#)
        };
        for other in ["[]", "{}", &impossible, &of_hash(&"x".repeat(100_000))] {
            let error = read_report(other.as_bytes()).unwrap_err().to_string();
            assert!(error.len() < 200, "{error}");
        }
        let deep = format!("{}{}", r#"{"communicators":"#, "[".repeat(100_000));
        assert!(read_report(deep.as_bytes()).is_err());
    }
}
