//! NCCL's JSON, which has one object for each rank of each communicator. A large job has millions of them, so only one
//! communicator is in memory at a time, and what is notable of it is kept. Begin at [`read_report`].

use std::collections::BTreeMap;
use std::fmt;
use std::io::Read;

use serde::de::{self, Deserializer, SeqAccess, Visitor};

use super::{NOTABLE_RANKS_MAX, RasCommunicator, RasRank, RasRankState, RasReport};

/// The codes of `ncclResult_t` that are no error.
const SUCCESS: i32 = 0;
const IN_PROGRESS: i32 = 7;
/// The most ranks of a communicator, and the most communicators of a job.
const RANKS_MAX: usize = 1 << 20;
const COMMUNICATORS_MAX: usize = 4096;
/// The most bytes of a host's name that are kept.
const HOST_LENGTH_MAX: usize = 64;

/// Reads an answer.
///
/// # Errors
/// If it is not the JSON that NCCL 2.28.7 and newer write, or has more than the limits.
pub(super) fn read_report(answer: impl Read) -> Result<RasReport, serde_json::Error> {
    let read: Answer = serde_json::from_reader(answer)?;
    Ok(RasReport { nccl_version: read.nccl_version, communicators: read.communicators })
}

#[derive(serde::Deserialize)]
struct Answer {
    nccl_version: String,
    #[serde(deserialize_with = "read_communicators")]
    communicators: Vec<RasCommunicator>,
}

#[derive(serde::Deserialize)]
struct CommunicatorAnswer {
    hash: String,
    size: u32,
    #[serde(default)]
    ranks: Vec<RankAnswer>,
    #[serde(default)]
    missing_ranks: Vec<MissingRankAnswer>,
}

#[derive(serde::Deserialize)]
struct RankAnswer {
    rank: u32,
    host: String,
    pid: i64,
    status: RankStatus,
    collective_counts: BTreeMap<String, u64>,
}

#[derive(serde::Deserialize)]
struct RankStatus {
    init_state: i32,
    async_error: i32,
    abort_flag: bool,
}

#[derive(serde::Deserialize)]
struct MissingRankAnswer {
    rank: u32,
    host: String,
    pid: i64,
    status: MissingRankStatus,
}

#[derive(serde::Deserialize)]
struct MissingRankStatus {
    unresponsive: bool,
    considered_dead: bool,
}

fn read_communicators<'de, D: Deserializer<'de>>(from: D) -> Result<Vec<RasCommunicator>, D::Error> {
    struct List;
    impl<'de> Visitor<'de> for List {
        type Value = Vec<RasCommunicator>;

        fn expecting(&self, to: &mut fmt::Formatter<'_>) -> fmt::Result {
            to.write_str("a list of communicators")
        }

        fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<Self::Value, A::Error> {
            let mut all = Vec::new();
            while let Some(one) = list.next_element::<CommunicatorAnswer>()? {
                if all.len() == COMMUNICATORS_MAX {
                    return Err(de::Error::custom(format_args!(
                        "more than {COMMUNICATORS_MAX} communicators"
                    )));
                }
                all.push(summarize::<A::Error>(one)?);
            }
            Ok(all)
        }
    }
    from.deserialize_seq(List)
}

fn summarize<E: de::Error>(one: CommunicatorAnswer) -> Result<RasCommunicator, E> {
    let CommunicatorAnswer { hash, size, ranks, missing_ranks } = one;
    if ranks.len() + missing_ranks.len() > RANKS_MAX {
        return Err(E::custom(format_args!("a communicator of more than {RANKS_MAX} ranks")));
    }
    let digits = hash.strip_prefix("0x").unwrap_or(&hash);
    let Ok(hash) = u64::from_str_radix(digits, 16) else {
        return Err(E::custom(format_args!("a communicator with the hash {hash:?}")));
    };
    let answered = ranks.len() as u32;
    let mut all: Vec<RasRank> = ranks.into_iter().map(rank_that_answered).collect();
    let counts = || all.iter().filter_map(|rank| rank.called);
    let (front, back) = (counts().max().unwrap_or_default(), counts().min().unwrap_or_default());
    let total_called = counts().fold(0, u64::wrapping_add);
    all.extend(missing_ranks.into_iter().map(missing_rank));
    let is_usual = |rank: &RasRank| rank.state == RasRankState::Answers && rank.called == Some(front);
    all.retain(|rank| !is_usual(rank));
    all.sort_by_key(|rank| (rank.state, rank.called, rank.rank));
    let notable_count = all.len() as u32;
    all.truncate(NOTABLE_RANKS_MAX);
    let notable = all;
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
    let called = rank.collective_counts.values().fold(0, |sum: u64, count| sum.saturating_add(*count));
    RasRank { rank: rank.rank, host: short(rank.host), pid: pid(rank.pid), state, called: Some(called) }
}

fn missing_rank(rank: MissingRankAnswer) -> RasRank {
    let state = match rank.status {
        MissingRankStatus { considered_dead: true, .. } => RasRankState::Dead,
        MissingRankStatus { unresponsive: true, .. } => RasRankState::Unresponsive,
        MissingRankStatus { .. } => RasRankState::Absent,
    };
    RasRank { rank: rank.rank, host: short(rank.host), pid: pid(rank.pid), state, called: None }
}

fn short(mut host: String) -> String {
    host.truncate(host.floor_char_boundary(HOST_LENGTH_MAX));
    host
}

/// RAS writes -1 for a process that it does not know.
fn pid(pid: i64) -> u32 {
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
    fn what_differs_is_kept_the_worst_first() {
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
    fn errors_and_starts_are_told_apart() {
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
    fn ranks_that_advance_fill_no_memory() {
        let many: Vec<String> = (0..500).map(|it| rank(it, WELL, &format!(r#""AllReduce": {it}"#))).collect();
        let report = read_report(answer(&many.join(","), "").as_bytes()).unwrap();
        let found = &report.communicators[0];
        assert_eq!((found.notable.len(), found.notable_count), (NOTABLE_RANKS_MAX, 499));
        assert_eq!(found.notable[0].called, Some(0));
    }

    #[test]
    fn what_is_no_answer_is_refused() {
        let whole = answer(&rank(0, WELL, ""), "");
        for end in 0..whole.len() {
            assert!(read_report(&whole.as_bytes()[..end]).is_err(), "{end} bytes");
        }
        for other in ["[]", "{}", r#"{"nccl_version": "2", "communicators": [{"hash": "x", "size": 1}]}"#] {
            assert!(read_report(other.as_bytes()).is_err(), "{other}");
        }
        let deep = format!("{}{}", r#"{"communicators":"#, "[".repeat(100_000));
        assert!(read_report(deep.as_bytes()).is_err());
    }
}
