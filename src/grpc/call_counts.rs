//! Counts calls by method, wire generation and status code, and measures how long they take.
//!
//! `metrics.rs` writes the metrics. Begin at [`CallCounts::count_call`].

use serde::{Deserialize, Serialize};

use super::dialect::Dialect;
use crate::coordination::{Code, ConnectionEnd, PeerJobQuery, Request};
use crate::meter::{Counter, Histogram, HistogramSnapshot, Moment, Sharded};

/// The ways in which connections end, as they are counted.
pub const ENDINGS: [&str; 4] = ["closed", "reset", "timed-out", "broken"];

/// Returns the position of a connection's end in [`ENDINGS`].
pub(super) fn ending_index(ending: &ConnectionEnd) -> usize {
    match ending {
        ConnectionEnd::Closed => 0,
        ConnectionEnd::Reset => 1,
        ConnectionEnd::TimedOut => 2,
        ConnectionEnd::Broken(_) => 3,
    }
}

/// The counted methods, by their names in generation C, or in generation A if C has none.
const METHODS: [&str; 21] = [
    "RegisterTask",
    "Heartbeat",
    "PollForError",
    "ShutdownTask",
    "ResetTask",
    "ReportErrorToService",
    "WaitForAllTasks",
    "GetTaskState",
    "GetJobState",
    "WatchTasks",
    "Barrier",
    "CancelBarrier",
    "GetAliveTasks",
    "InsertKeyValue",
    "IncrementKeyValue",
    "GetKeyValue",
    "TryGetKeyValue",
    "GetKeyValueDir",
    "DeleteKeyValue",
    "WatchPeerTasks",
    "GetPeerEngine",
];

/// The first method of `muster.v1.PeerJobs`.
const FIRST_PEER_METHOD: u8 = 19;

/// A counted method.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct CountedMethod(u8);

impl CountedMethod {
    /// Returns its name.
    pub(super) fn name(self) -> &'static str {
        METHODS[usize::from(self.0)]
    }

    /// Returns whether it is a method of `muster.v1.PeerJobs`.
    pub(super) fn is_peer_jobs_method(self) -> bool {
        self.0 >= FIRST_PEER_METHOD
    }

    pub(super) fn of_request(request: &Request) -> Self {
        Self(match request {
            Request::Register { .. } => 0,
            Request::Heartbeat { .. } => 1,
            Request::PollForError { .. } => 2,
            Request::Shutdown { .. } => 3,
            Request::Reset { .. } => 4,
            Request::ReportError { .. } => 5,
            Request::WaitForAllTasks { .. } => 6,
            Request::TaskStates { .. } => 7,
            Request::JobState => 8,
            Request::Watch { .. } => 9,
            Request::Barrier { .. } => 10,
            Request::CancelBarrier { .. } => 11,
            Request::LiveSet { .. } => 12,
            Request::Insert { .. } => 13,
            Request::Increment { .. } => 14,
            Request::Get { .. } => 15,
            Request::TryGet { .. } => 16,
            Request::List { .. } => 17,
            Request::Delete { .. } => 18,
            Request::FromPeerJob { question: PeerJobQuery::TaskStates { .. }, .. } => 19,
            Request::FromPeerJob { question: PeerJobQuery::EngineRecord { .. }, .. } => 20,
        })
    }
}

/// The number of codes: success, and the named codes of gRPC.
const CODES: usize = 1 + Code::NAMED.len();

/// Returns the name of the code with this number.
fn code_name(number: usize) -> &'static str {
    number.checked_sub(1).and_then(|place| Code::NAMED.get(place)).map_or("OK", |(_, _, name)| name)
}

/// The generations of the wire.
const GENERATIONS: [&str; 2] = ["a", "c"];

/// The number of calls with the same method, generation and code.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CallCount {
    /// The method.
    pub method: &'static str,
    /// The wire generation of the calls: `a` or `c`.
    pub generation: &'static str,
    /// The code of the reply.
    pub code: &'static str,
    /// The number of calls.
    pub count: u64,
}

/// The durations of the calls of one method, from the turn in which they were read to their answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CallDurations {
    /// The method.
    pub method: &'static str,
    /// The wire generation of the calls: `a` or `c`.
    pub generation: &'static str,
    /// The durations.
    pub timed: HistogramSnapshot,
}

/// The statistics of one method in one generation.
#[derive(Default)]
struct MethodStats {
    codes: [Counter; CODES],
    times: Histogram,
}

/// The statistics of all methods in both generations.
#[derive(Default)]
pub(super) struct CallCounts([[MethodStats; METHODS.len()]; GENERATIONS.len()]);

impl CallCounts {
    /// Counts a call with its beginning and end; without a code it succeeded.
    pub(super) fn count_call(
        &self,
        method: CountedMethod,
        dialect: Dialect,
        code: Option<Code>,
        (from, to): (Moment, Moment),
    ) {
        let generation = usize::from(dialect == Dialect::Number);
        let code = code.map_or(0, |code| usize::try_from(code.number()).unwrap_or(2));
        // A code without a gRPC name is sent as UNKNOWN.
        let code = if code < CODES { code } else { 2 };
        let kept = &self.0[generation][usize::from(method.0)];
        kept.codes[code].increment();
        kept.times.add_interval(from, to);
    }

    fn generation_and_method_indexes() -> impl Iterator<Item = (usize, usize)> {
        (0..GENERATIONS.len())
            .flat_map(|generation| (0..METHODS.len()).map(move |method| (generation, method)))
    }

    /// Returns every count that is not zero, over all threads.
    pub(super) fn sum_counts_of_threads(all: &Sharded<Self>) -> Vec<CallCount> {
        let mut counts = Vec::new();
        for (generation, method) in Self::generation_and_method_indexes() {
            for code in 0..CODES {
                let count = all.all_shards().map(|shard| shard.0[generation][method].codes[code].get()).sum();
                if count > 0 {
                    let (method, generation) = (METHODS[method], GENERATIONS[generation]);
                    counts.push(CallCount { method, generation, code: code_name(code), count });
                }
            }
        }
        counts
    }

    /// Returns the durations of every called method, over all threads.
    pub(super) fn sum_durations_of_threads(all: &Sharded<Self>) -> Vec<CallDurations> {
        let times = Self::generation_and_method_indexes().map(|(generation, method)| {
            let mut timed = HistogramSnapshot::default();
            all.all_shards().for_each(|shard| timed += &shard.0[generation][method].times.snapshot());
            CallDurations { method: METHODS[method], generation: GENERATIONS[generation], timed }
        });
        times.filter(|times| !times.timed.is_empty()).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::clock::Clock;

    #[test]
    fn calls_are_counted_by_method_generation_and_code() {
        let counts = Sharded::<CallCounts>::default();
        let method = CountedMethod::of_request(&Request::JobState);
        let now = Moment::now(&Clock::start());
        counts.shard_of_this_thread().count_call(method, Dialect::Number, None, (now, now));
        counts.shard_of_this_thread().count_call(method, Dialect::Number, None, (now, now));
        counts.shard_of_this_thread().count_call(method, Dialect::Named, Some(Code::Internal), (now, now));
        counts.shard_of_this_thread().count_call(method, Dialect::Named, Some(Code::Other(99)), (now, now));
        let read: Vec<_> = CallCounts::sum_counts_of_threads(&counts)
            .iter()
            .map(|c| (c.method, c.generation, c.code, c.count))
            .collect();
        assert_eq!(
            read,
            [
                ("GetJobState", "a", "UNKNOWN", 1),
                ("GetJobState", "a", "INTERNAL", 1),
                ("GetJobState", "c", "OK", 2)
            ]
        );
        let times = CallCounts::sum_durations_of_threads(&counts);
        let read: Vec<_> = times.iter().map(|t| (t.method, t.generation, t.timed.counts[0])).collect();
        assert_eq!(read, [("GetJobState", "a", 2), ("GetJobState", "c", 2)]);
    }
}
