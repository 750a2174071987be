//! Checks a recorded history of one barrier: no member passes a round before all members have arrived at it, each member
//! gets one result for each round, in order, and all members get the same. It knows no server. Begin at
//! [`BarrierHistory::check`].

use std::collections::HashMap;

/// The result of a round for one member.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RoundResult {
    /// The round passed, and the answer has this counter.
    Passed(i64),
    /// A member has cancelled the round.
    Cancelled,
}

#[derive(Debug, Clone, Copy)]
enum BarrierEvent {
    Arrival,
    Cancellation,
    Result(RoundResult),
}

/// The events of one barrier, in their order.
#[derive(Debug)]
pub struct BarrierHistory {
    members: Vec<i32>,
    /// The events, each with its task and its round.
    events: Vec<(i32, i64, BarrierEvent)>,
}

impl BarrierHistory {
    pub fn new(members: impl Into<Vec<i32>>) -> Self {
        Self { members: members.into(), events: Vec::new() }
    }

    /// Records that a task is about to arrive at a round. It may do so again if its call was cancelled.
    pub fn record_arrival(&mut self, task: i32, round: i64) {
        self.events.push((task, round, BarrierEvent::Arrival));
    }

    /// Records that a task is about to cancel a round.
    pub fn record_cancellation(&mut self, task: i32, round: i64) {
        self.events.push((task, round, BarrierEvent::Cancellation));
    }

    /// Records that a task got the result of a round.
    pub fn record_result(&mut self, task: i32, round: i64, result: RoundResult) {
        self.events.push((task, round, BarrierEvent::Result(result)));
    }

    /// Returns the number of rounds that every member has passed.
    ///
    /// # Errors
    /// If the history is not that of a barrier.
    pub fn check(&self) -> Result<i64, String> {
        let mut arrivals = HashMap::<i64, Vec<i32>>::new();
        let mut results = HashMap::<i64, RoundResult>::new();
        let mut cancelled = Vec::new();
        // The number of rounds that each member has finished, and passed.
        let mut finished: HashMap<i32, i64> = self.members.iter().map(|member| (*member, 0)).collect();
        let mut passed = finished.clone();
        for (position, (task, round, event)) in self.events.iter().enumerate() {
            let refuse = |why: &str| {
                let from = position.saturating_sub(20);
                Err(format!(
                    "round {round}, task {task}: {why}. The events: {:?}",
                    &self.events[from..=position]
                ))
            };
            let Some(finished) = finished.get_mut(task) else { return refuse("it is no member") };
            let arrived = arrivals.entry(*round).or_default();
            match event {
                BarrierEvent::Arrival if *round != *finished => {
                    return refuse("it arrived before it had the result of the round before");
                }
                BarrierEvent::Arrival => arrived.push(*task),
                BarrierEvent::Cancellation => cancelled.push(*round),
                BarrierEvent::Result(_) if *round != *finished => {
                    return refuse("it got a second result, or that of another round");
                }
                BarrierEvent::Result(result) => {
                    if results.get(round).is_some_and(|other| other != result) {
                        return refuse("another member got another result");
                    }
                    match result {
                        RoundResult::Passed(counter) if counter != round => {
                            return refuse("the counter in the answer is another one");
                        }
                        RoundResult::Passed(_) if !self.members.iter().all(|task| arrived.contains(task)) => {
                            return refuse("it passed before all members had arrived");
                        }
                        RoundResult::Passed(_) => *passed.entry(*task).or_default() += 1,
                        RoundResult::Cancelled if !cancelled.contains(round) => {
                            return refuse("nobody had cancelled the round");
                        }
                        RoundResult::Cancelled => {}
                    }
                    results.insert(*round, *result);
                    *finished += 1;
                }
            }
        }
        Ok(passed.into_values().min().unwrap_or(0))
    }
}

#[cfg(test)]
mod tests {
    use super::BarrierEvent::{Arrival, Cancellation, Result};
    use super::RoundResult::{Cancelled, Passed};
    use super::*;

    fn check(events: &[(i32, i64, BarrierEvent)]) -> std::result::Result<i64, String> {
        BarrierHistory { members: vec![0, 1], events: events.to_vec() }.check()
    }

    #[track_caller]
    fn assert_refused(events: &[(i32, i64, BarrierEvent)], why: &str) {
        let result = check(events);
        assert!(result.as_ref().is_err_and(|text| text.contains(why)), "{result:?}");
        // Nothing else was wrong.
        assert!(check(&events[..events.len() - 1]).is_ok());
    }

    const BOTH_ARRIVE: [(i32, i64, BarrierEvent); 2] = [(0, 0, Arrival), (1, 0, Arrival)];

    #[test]
    fn a_barrier_that_passes_and_is_cancelled_is_accepted() {
        let further = [
            // The first call of task 1 is repeated.
            (1, 0, Arrival),
            (1, 0, Result(Passed(0))),
            (1, 1, Arrival),
            (0, 0, Result(Passed(0))),
            (0, 1, Cancellation),
            (1, 1, Result(Cancelled)),
            (0, 1, Arrival),
            (0, 1, Result(Cancelled)),
            (0, 2, Arrival),
            (1, 2, Arrival),
            (0, 2, Result(Passed(2))),
            (1, 2, Result(Passed(2))),
        ];
        assert_eq!(check(&[&BOTH_ARRIVE[..], &further].concat()), Ok(2));
    }

    #[test]
    fn each_rule_is_noticed() {
        let after = |further: &[_]| [&BOTH_ARRIVE[..], further].concat();
        let passed = |task| (task, 0, Result(Passed(0)));
        assert_refused(&[(0, 0, Arrival), passed(0)], "before all members had arrived");
        assert_refused(&[(0, 0, Arrival), (0, 0, Arrival), passed(0)], "before all members had arrived");
        assert_refused(&after(&[(0, 0, Result(Passed(1)))]), "the counter");
        assert_refused(&after(&[passed(0), passed(0)]), "a second result");
        assert_refused(&after(&[(0, 1, Arrival)]), "before it had the result");
        assert_refused(&after(&[(0, 0, Result(Cancelled))]), "nobody had cancelled");
        let cancelled = [passed(0), (0, 0, Cancellation), (1, 0, Result(Cancelled))];
        assert_refused(&after(&cancelled), "another member got another result");
        assert_refused(&[(7, 0, Arrival)], "no member");
    }
}
