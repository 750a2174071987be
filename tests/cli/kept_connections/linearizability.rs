//! Checks that a recorded history of concurrent operations on one key is linearisable: each operation takes effect at
//! one moment between its call and its return, and each result is that of a key to which one operation happens at a time.
//!
//! The value of a key is a number. An operation that never returned may take effect at any moment after its call, or
//! never. The search is that of Wing and Gong with memoised configurations, and it goes through the history once: at
//! each return it keeps all configurations that explain the results so far, so a contradiction is found at the
//! first return that nothing explains. It knows no server. Begin at [`KeyHistory::check`].

use std::collections::{BTreeSet, HashSet};
use std::fmt;

/// The configurations that one check may visit.
const CONFIGURATIONS_MAX: usize = 2_000_000;
/// The operations before a contradiction that its description has.
const OPERATIONS_SHOWN: usize = 40;

/// An operation on a key.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum KeyOperation {
    /// Writes a number. Without `overwrites`, it is refused if the key exists.
    Insert { number: i64, overwrites: bool },
    /// Waits until the key exists, and returns its number.
    Get,
    /// Returns the number, if the key exists.
    TryGet,
    /// Adds 1, and returns the sum. A key that does not exist counts as 0.
    Increment,
    /// Removes the key, if it exists.
    Delete,
}

/// The result of an operation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum KeyResult {
    Done,
    Number(i64),
    AlreadyExists,
    NotFound,
}

impl KeyOperation {
    /// Applies the operation to a key, and returns the key's number afterwards with the result; `None`: it waits.
    fn apply(self, present: Option<i64>) -> Option<(Option<i64>, KeyResult)> {
        Some(match (self, present) {
            (Self::Insert { overwrites: false, .. }, Some(_)) => (present, KeyResult::AlreadyExists),
            (Self::Insert { number, .. }, _) => (Some(number), KeyResult::Done),
            (Self::Get | Self::TryGet, Some(number)) => (present, KeyResult::Number(number)),
            (Self::Get, None) => return None,
            (Self::TryGet, None) => (None, KeyResult::NotFound),
            (Self::Increment, _) => {
                let sum = present.unwrap_or(0) + 1;
                (Some(sum), KeyResult::Number(sum))
            }
            (Self::Delete, _) => (None, KeyResult::Done),
        })
    }

    /// Returns whether the operation may change the key.
    pub fn is_write(self) -> bool {
        !matches!(self, Self::Get | Self::TryGet)
    }
}

/// One operation of a history. Moments are positions in the order of all calls and returns.
#[derive(Debug, Clone)]
struct RecordedOperation {
    client: String,
    operation: KeyOperation,
    called: usize,
    returned: Option<(usize, KeyResult)>,
}

impl fmt::Display for RecordedOperation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { client, operation, called, returned } = self;
        match returned {
            Some((at, result)) => write!(f, "{called:>5}..{at:<5} {client}: {operation:?} = {result:?}"),
            None => write!(f, "{called:>5}..      {client}: {operation:?}, never returned"),
        }
    }
}

/// A call or a return.
#[derive(Debug, Clone, Copy)]
enum HistoryEvent {
    Call(usize),
    Return(usize),
}

/// The operations on one key.
#[derive(Debug, Default)]
pub struct KeyHistory {
    operations: Vec<RecordedOperation>,
    events: Vec<HistoryEvent>,
}

/// A way to explain the results so far: the key's number, and the operations in progress that have taken effect.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
struct Configuration {
    number: Option<i64>,
    effective: BTreeSet<usize>,
}

/// The reason for which a history is not accepted.
#[derive(Debug)]
pub enum HistoryError {
    /// No order of the operations explains the results.
    Contradiction(String),
    /// The search was too long.
    Undecided(String),
}

impl KeyHistory {
    /// Records a call, before its first byte is sent. Returns the number of the operation.
    pub fn record_call(&mut self, client: &str, operation: KeyOperation) -> usize {
        let (number, called) = (self.operations.len(), self.events.len());
        self.operations.push(RecordedOperation {
            client: client.to_owned(),
            operation,
            called,
            returned: None,
        });
        self.events.push(HistoryEvent::Call(number));
        number
    }

    /// Records a return, after the whole answer has arrived.
    pub fn record_return(&mut self, number: usize, result: KeyResult) {
        let previous = self.operations[number].returned.replace((self.events.len(), result));
        assert!(previous.is_none(), "{} returned again", self.operations[number]);
        self.events.push(HistoryEvent::Return(number));
    }

    /// Returns the number of operations.
    pub fn len(&self) -> usize {
        self.operations.len()
    }

    /// Returns the number of visited configurations if the history is linearisable.
    ///
    /// # Errors
    /// If no order of the operations explains their results, or the search is too long.
    pub fn check(&self) -> Result<usize, HistoryError> {
        self.check_within(CONFIGURATIONS_MAX)
    }

    fn check_within(&self, visits_max: usize) -> Result<usize, HistoryError> {
        let mut search =
            Search { operations: &self.operations, open: BTreeSet::new(), visited: 0, visits_max };
        let start = Configuration { number: None, effective: BTreeSet::new() };
        let mut configurations = HashSet::from([start]);
        for event in &self.events {
            let returning = match *event {
                HistoryEvent::Call(number) => {
                    let RecordedOperation { operation, returned, .. } = &self.operations[number];
                    if operation.is_write() || returned.is_some() {
                        search.open.insert(number);
                    }
                    continue;
                }
                HistoryEvent::Return(number) => number,
            };
            let explained = search.configurations_after_return(&configurations, returning);
            search.open.remove(&returning);
            if search.visited > visits_max {
                return Err(HistoryError::Undecided(self.describe(returning, &configurations)));
            }
            if explained.is_empty() {
                return Err(HistoryError::Contradiction(self.describe(returning, &configurations)));
            }
            configurations = explained;
        }
        Ok(search.visited)
    }

    /// Describes the state before a return, with the last operations before it.
    fn describe(&self, returning: usize, before: &HashSet<Configuration>) -> String {
        let returning = &self.operations[returning];
        let at = returning.returned.map_or(usize::MAX, |(at, _)| at);
        let numbers: BTreeSet<_> = before.iter().map(|configuration| configuration.number).collect();
        let mut seen: Vec<_> = self.operations.iter().filter(|operation| operation.called < at).collect();
        let end = |operation: &RecordedOperation| operation.returned.map_or(usize::MAX, |(at, _)| at);
        seen.sort_by_key(|operation| end(operation));
        let (returned, open): (Vec<_>, Vec<_>) = seen.into_iter().partition(|operation| end(operation) < at);
        let mut text =
            format!("{returning}\nThe key could be one of {numbers:?} before. In progress then:\n");
        for operation in open {
            text.push_str(&format!("  {operation}\n"));
        }
        text.push_str("Returned before, last first:\n");
        for operation in returned.iter().rev().take(OPERATIONS_SHOWN) {
            text.push_str(&format!("  {operation}\n"));
        }
        text
    }
}

/// The state of a search.
struct Search<'a> {
    operations: &'a [RecordedOperation],
    /// The operations that have been called and have not returned. Reads that never return are not among them.
    open: BTreeSet<usize>,
    /// The number of visited configurations, and the greatest one.
    visited: usize,
    visits_max: usize,
}

impl Search<'_> {
    /// Returns the configurations that explain the results up to a return. Other operations take effect only if the
    /// returning one needs it: if not, they can do so later.
    fn configurations_after_return(
        &mut self,
        before: &HashSet<Configuration>,
        returning: usize,
    ) -> HashSet<Configuration> {
        let mut explained = HashSet::new();
        let mut seen = HashSet::new();
        let mut unexplored: Vec<Configuration> = before.iter().cloned().collect();
        while let Some(mut configuration) = unexplored.pop() {
            self.add_operations_that_change_nothing(&mut configuration);
            if !seen.insert(configuration.clone()) {
                continue;
            }
            self.visited += 1;
            if self.visited > self.visits_max {
                break;
            }
            if configuration.effective.remove(&returning) {
                explained.insert(configuration);
                continue;
            }
            for number in self.open.difference(&configuration.effective) {
                let Some(after) = self.number_after(*number, configuration.number) else { continue };
                // An operation that never returned need not take effect.
                if after != configuration.number || self.operations[*number].returned.is_some() {
                    let mut effective = configuration.effective.clone();
                    effective.insert(*number);
                    unexplored.push(Configuration { number: after, effective });
                }
            }
        }
        explained
    }

    /// Lets the operations take effect that never change a key with the result that they have, if the result fits. This
    /// excludes no explanation: at another moment they would do the same, which is nothing.
    fn add_operations_that_change_nothing(&self, configuration: &mut Configuration) {
        for number in &self.open {
            let RecordedOperation { operation, returned, .. } = &self.operations[*number];
            let changes_nothing =
                !operation.is_write() || matches!(returned, Some((_, KeyResult::AlreadyExists)));
            if changes_nothing && self.number_after(*number, configuration.number).is_some() {
                configuration.effective.insert(*number);
            }
        }
    }

    /// Returns the key's number after an operation, if the operation's result fits.
    fn number_after(&self, operation: usize, present: Option<i64>) -> Option<Option<i64>> {
        let RecordedOperation { operation, returned, .. } = &self.operations[operation];
        let (after, result) = operation.apply(present)?;
        returned.is_none_or(|(_, recorded)| recorded == result).then_some(after)
    }
}

#[cfg(test)]
mod tests {
    use super::KeyOperation::{Delete, Get, Increment, TryGet};
    use super::KeyResult::{AlreadyExists, Done, NotFound, Number};
    use super::*;

    const INSERT_1: KeyOperation = KeyOperation::Insert { number: 1, overwrites: false };
    const INSERT_2: KeyOperation = KeyOperation::Insert { number: 2, overwrites: false };
    const OVERWRITE_3: KeyOperation = KeyOperation::Insert { number: 3, overwrites: true };
    const OVERWRITE_4: KeyOperation = KeyOperation::Insert { number: 4, overwrites: true };

    /// A step of a history: a call with the client's name, or the return of the client's last call.
    enum Step {
        Call(&'static str, KeyOperation),
        Return(&'static str, KeyResult),
    }
    use Step::{Call, Return};

    /// Returns the history of these steps.
    fn history(steps: impl IntoIterator<Item = Step>) -> KeyHistory {
        let mut history = KeyHistory::default();
        let mut last = std::collections::HashMap::new();
        for step in steps {
            match step {
                Call(client, operation) => {
                    last.insert(client, history.record_call(client, operation));
                }
                Return(client, result) => history.record_return(last[client], result),
            }
        }
        history
    }

    /// Returns the steps of operations that happen one after the other.
    fn in_turn(operations: &[(KeyOperation, KeyResult)]) -> Vec<Step> {
        operations
            .iter()
            .flat_map(|(operation, result)| [Call("one", *operation), Return("one", *result)])
            .collect()
    }

    #[track_caller]
    fn assert_linearizable(steps: impl IntoIterator<Item = Step>) {
        if let Err(HistoryError::Contradiction(why) | HistoryError::Undecided(why)) = history(steps).check() {
            panic!("{why}");
        }
    }

    /// Checks that the last return is the one that nothing explains.
    #[track_caller]
    fn assert_contradiction(steps: impl IntoIterator<Item = Step>) {
        let history = history(steps);
        let Err(HistoryError::Contradiction(why)) = history.check() else {
            panic!("the history was accepted: {history:?}");
        };
        let last = history.operations.iter().max_by_key(|operation| operation.returned.map(|(at, _)| at));
        let last = last.expect("an operation").to_string();
        assert!(why.starts_with(&last), "another contradiction was expected at {last}: {why}");
    }

    #[test]
    fn operations_one_after_the_other_have_the_results_of_a_key() {
        let right = [
            (TryGet, NotFound),
            (Delete, Done),
            (INSERT_1, Done),
            (INSERT_2, AlreadyExists),
            (TryGet, Number(1)),
            (Get, Number(1)),
            (OVERWRITE_3, Done),
            (Increment, Number(4)),
            (Increment, Number(5)),
            (TryGet, Number(5)),
            (Delete, Done),
            (TryGet, NotFound),
            (Increment, Number(1)),
            (OVERWRITE_4, Done),
            (Get, Number(4)),
        ];
        assert_linearizable(in_turn(&right));
        // Each result is replaced by each other one.
        for (position, (operation, result)) in right.iter().enumerate() {
            for wrong in [Done, AlreadyExists, NotFound, Number(1), Number(3), Number(4), Number(5)] {
                if wrong != *result {
                    let mut operations = right[..=position].to_vec();
                    operations[position] = (*operation, wrong);
                    assert_contradiction(in_turn(&operations));
                }
            }
        }
    }

    #[test]
    fn concurrent_operations_may_take_effect_in_any_order() {
        for (first, second) in [(Number(3), Number(4)), (Number(4), Number(3)), (Number(4), Number(4))] {
            let reads = [Call("r", TryGet), Return("r", first), Call("r", TryGet), Return("r", second)];
            let writes = [Call("a", OVERWRITE_3), Call("b", OVERWRITE_4)];
            let ends = [Return("a", Done), Return("b", Done)];
            assert_linearizable(writes.into_iter().chain(reads).chain(ends));
        }
    }

    #[test]
    fn a_value_that_was_overwritten_does_not_come_back() {
        let writes = in_turn(&[(OVERWRITE_3, Done), (OVERWRITE_4, Done), (TryGet, Number(3))]);
        assert_contradiction(writes);
        // Two concurrent readers do not see two writes in two orders.
        let steps = [
            Call("a", OVERWRITE_3),
            Call("b", OVERWRITE_4),
            Call("r", TryGet),
            Return("r", Number(3)),
            Call("r", TryGet),
            Return("r", Number(4)),
            Call("r", TryGet),
            Return("r", Number(3)),
        ];
        assert_contradiction(steps);
    }

    #[test]
    fn a_write_that_returned_is_seen_by_later_reads() {
        assert_contradiction(in_turn(&[(INSERT_1, Done), (TryGet, NotFound)]));
        let concurrent = [Call("r", TryGet), Call("a", INSERT_1), Return("a", Done), Return("r", NotFound)];
        assert_linearizable(concurrent);
        let waiting = [Call("r", Get), Call("a", INSERT_1), Return("a", Done), Return("r", Number(1))];
        assert_linearizable(waiting);
        assert_contradiction([Call("r", Get), Return("r", Number(1))]);
    }

    #[test]
    fn only_one_concurrent_insert_without_overwrite_is_done() {
        let inserts = || [Call("a", INSERT_1), Call("b", INSERT_2)];
        assert_linearizable(inserts().into_iter().chain([Return("a", AlreadyExists), Return("b", Done)]));
        assert_contradiction(inserts().into_iter().chain([Return("a", Done), Return("b", Done)]));
        let refused = [Return("a", AlreadyExists), Return("b", AlreadyExists)];
        assert!(history(inserts().into_iter().chain(refused)).check().is_err());
    }

    #[test]
    fn each_increment_counts_once() {
        let both = || [Call("a", Increment), Call("b", Increment)];
        assert_linearizable(both().into_iter().chain([Return("b", Number(2)), Return("a", Number(1))]));
        assert_contradiction(both().into_iter().chain([Return("a", Number(1)), Return("b", Number(1))]));
        assert_contradiction(in_turn(&[(Increment, Number(1)), (TryGet, Number(2))]));
    }

    #[test]
    fn a_deleted_key_is_gone_once() {
        let steps = || [Call("a", INSERT_1), Return("a", Done), Call("b", Delete), Call("r", TryGet)];
        for result in [Number(1), NotFound] {
            assert_linearizable(steps().into_iter().chain([Return("r", result), Return("b", Done)]));
        }
        let late = [Return("b", Done), Return("r", NotFound), Call("r", TryGet), Return("r", Number(1))];
        assert_contradiction(steps().into_iter().chain(late));
        // A key may be deleted before and after a concurrent insert.
        let concurrent = || [Call("a", INSERT_1), Call("b", Delete), Return("a", Done), Return("b", Done)];
        for result in [Number(1), NotFound] {
            assert_linearizable(concurrent().into_iter().chain(in_turn(&[(TryGet, result)])));
        }
    }

    #[test]
    fn an_operation_that_never_returned_takes_effect_at_most_once_and_not_before_its_call() {
        let lost = || [Call("lost", Increment)];
        for result in [NotFound, Number(1)] {
            assert_linearizable(lost().into_iter().chain(in_turn(&[(TryGet, result)])));
        }
        let late = in_turn(&[(TryGet, NotFound), (Increment, Number(1)), (TryGet, Number(2))]);
        assert_linearizable(lost().into_iter().chain(late));
        assert_contradiction(lost().into_iter().chain(in_turn(&[(TryGet, Number(1)), (TryGet, NotFound)])));
        assert_contradiction(lost().into_iter().chain(in_turn(&[(TryGet, Number(2))])));
        let twice = in_turn(&[(TryGet, Number(1)), (Delete, Done), (TryGet, NotFound), (TryGet, Number(1))]);
        assert_contradiction(lost().into_iter().chain(twice));
        assert_contradiction(in_turn(&[(TryGet, Number(1))]).into_iter().chain(lost()));
    }

    #[test]
    fn a_search_that_is_too_long_ends_undecided() {
        // Each set of these operations is an explanation to visit.
        let writes = (0..24).map(|bit| KeyOperation::Insert { number: 1000 << bit, overwrites: true });
        let calls = writes.flat_map(|write| [Call("lost", write), Call("lost", Increment)]);
        let result = history(calls.chain(in_turn(&[(TryGet, Number(7))]))).check_within(10_000);
        assert!(matches!(result, Err(HistoryError::Undecided(_))), "{result:?}");
    }
}
