//! How often which method ended how: one number for each pair, made beforehand, so that to count is one addition.

use std::sync::atomic::{AtomicU64, Ordering};

use super::call::Dialect;
use crate::coordination::{Code, Ending, Request};

/// How connections end, as they are counted.
pub const ENDINGS: [&str; 4] = ["closed", "reset", "timed-out", "broken"];

/// The place of an ending in [`ENDINGS`].
pub(super) fn place_of(ending: &Ending) -> usize {
    match ending {
        Ending::Closed => 0,
        Ending::Reset => 1,
        Ending::TimedOut => 2,
        Ending::Broken(_) => 3,
    }
}

/// The methods that are counted, by the names that generation C gives them, or else generation A.
const METHODS: [&str; 19] = [
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
];

/// A method, as it is counted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Method(u8);

impl Method {
    /// Its name.
    pub(super) fn name(self) -> &'static str {
        METHODS[usize::from(self.0)]
    }

    pub(super) fn of(request: &Request) -> Self {
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
        })
    }
}

/// How many codes there are: success, and those that gRPC knows by name.
const CODES: usize = 1 + Code::NAMED.len();

/// The name of the code with this number.
fn code_name(number: usize) -> &'static str {
    number.checked_sub(1).and_then(|place| Code::NAMED.get(place)).map_or("OK", |(_, _, name)| name)
}

/// The generations of the wire.
const GENERATIONS: [&str; 2] = ["a", "c"];

/// Calls that ended one way.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CallCount {
    /// The method.
    pub method: &'static str,
    /// The generation of the wire that it was called in: `a` or `c`.
    pub generation: &'static str,
    /// The code that it ended with.
    pub code: &'static str,
    /// How often.
    pub count: u64,
}

/// Every count.
pub(super) struct CallCounts([[[AtomicU64; CODES]; METHODS.len()]; GENERATIONS.len()]);

impl Default for CallCounts {
    fn default() -> Self {
        let zeros = || std::array::from_fn(|_| std::array::from_fn(|_| AtomicU64::new(0)));
        Self(std::array::from_fn(|_| zeros()))
    }
}

impl CallCounts {
    /// A call is answered; without a code it has succeeded.
    pub(super) fn add(&self, method: Method, dialect: Dialect, code: Option<Code>) {
        let generation = usize::from(dialect == Dialect::Number);
        let code = code.map_or(0, |code| usize::try_from(code.number()).unwrap_or(2));
        // What gRPC does not know is sent as UNKNOWN.
        let code = if code < CODES { code } else { 2 };
        self.0[generation][usize::from(method.0)][code].fetch_add(1, Ordering::Relaxed);
    }

    /// Every count that is not zero.
    pub(super) fn read(&self) -> Vec<CallCount> {
        let mut counts = Vec::new();
        for (methods, generation) in self.0.iter().zip(GENERATIONS) {
            for (codes, method) in methods.iter().zip(METHODS) {
                for (number, count) in codes.iter().enumerate() {
                    let count = count.load(Ordering::Relaxed);
                    if count > 0 {
                        counts.push(CallCount { method, generation, code: code_name(number), count });
                    }
                }
            }
        }
        counts
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn calls_are_counted_by_what_they_were_and_how_they_ended() {
        let counts = CallCounts::default();
        let method = Method::of(&Request::JobState);
        counts.add(method, Dialect::Number, None);
        counts.add(method, Dialect::Number, None);
        counts.add(method, Dialect::Named, Some(Code::Internal));
        counts.add(method, Dialect::Named, Some(Code::Other(99)));
        let read: Vec<_> = counts.read().iter().map(|c| (c.method, c.generation, c.code, c.count)).collect();
        assert_eq!(
            read,
            [
                ("GetJobState", "a", "UNKNOWN", 1),
                ("GetJobState", "a", "INTERNAL", 1),
                ("GetJobState", "c", "OK", 2)
            ]
        );
    }
}
