//! A bounded list of records of a job's latest runs.
//!
//! Timelines, ended barriers and state changes are such records. Begin at [`RecordsByRun::add`].
//!
//! Invariant: The records of a run are in the order in which they were added. The newest record is kept, whatever it
//! weighs. When the whole list is too heavy, the oldest records of the oldest run go first; so a run that has just
//! ended is complete as long as the present run leaves room for it.

use std::collections::VecDeque;

use crate::coordination::RunNumber;

/// The bounds of a list.
#[derive(Debug, Clone, Copy)]
pub(super) struct RecordBounds {
    /// The maximum number of records of one run.
    pub records_of_run: usize,
    /// The maximum weight of all records of the job.
    pub weight: usize,
}

/// The records of one run, the newest last.
#[derive(Debug, Clone)]
pub(super) struct RecordsOfRun<T> {
    pub run: RunNumber,
    pub records: VecDeque<T>,
    /// Older records of this run were dropped.
    pub is_truncated: bool,
}

/// The records of a job's latest runs.
#[derive(Debug, Clone)]
pub(super) struct RecordsByRun<T> {
    /// The newest run is the last one.
    runs: VecDeque<RecordsOfRun<T>>,
    /// Whole runs were dropped.
    has_dropped_runs: bool,
    weight: usize,
    weight_of: fn(&T) -> usize,
}

impl<T> RecordsByRun<T> {
    /// Returns an empty list of records that weigh as much as a function says. The weight of a record must not change.
    pub fn new(weight_of: fn(&T) -> usize) -> Self {
        Self { runs: VecDeque::new(), has_dropped_runs: false, weight: 0, weight_of }
    }

    /// Adds a record, and drops those that the bounds no longer allow.
    pub fn add(&mut self, run: RunNumber, record: T, bounds: RecordBounds) {
        self.weight += (self.weight_of)(&record);
        let place = self.runs.iter().rposition(|of_run| of_run.run == run).unwrap_or_else(|| {
            let place = self.runs.partition_point(|of_run| of_run.run < run);
            self.runs.insert(place, RecordsOfRun { run, records: VecDeque::new(), is_truncated: false });
            place
        });
        let of_run = &mut self.runs[place];
        of_run.records.push_back(record);
        if of_run.records.len() > bounds.records_of_run
            && let Some(oldest) = of_run.records.pop_front()
        {
            self.weight -= (self.weight_of)(&oldest);
            of_run.is_truncated = true;
        }
        while self.weight > bounds.weight
            && let Some(oldest_run) = self.runs.front_mut()
        {
            if oldest_run.run == run && oldest_run.records.len() == 1 {
                break;
            }
            if let Some(oldest) = oldest_run.records.pop_front() {
                self.weight -= (self.weight_of)(&oldest);
                oldest_run.is_truncated = true;
            }
            if oldest_run.records.is_empty() {
                self.runs.pop_front();
                self.has_dropped_runs = true;
            }
        }
    }

    /// Returns the newest record of a run.
    pub fn newest_mut(&mut self, run: RunNumber) -> Option<&mut T> {
        self.newest_records_mut(run).next()
    }

    /// Returns the records of a run, the newest first.
    pub fn newest_records_mut(&mut self, run: RunNumber) -> impl Iterator<Item = &mut T> {
        let of_run = self.runs.iter_mut().rev().find(|of_run| of_run.run == run);
        of_run.into_iter().flat_map(|of_run| of_run.records.iter_mut().rev())
    }

    /// Returns whether all records of a run may have been dropped.
    pub fn has_dropped(&self, run: RunNumber) -> bool {
        self.has_dropped_runs && self.runs.front().is_none_or(|oldest| run < oldest.run)
    }

    /// Returns the records of a run, if some are kept.
    pub fn of_run(&self, run: RunNumber) -> Option<&RecordsOfRun<T>> {
        self.runs.iter().rev().find(|of_run| of_run.run == run)
    }

    /// Returns a list with the records of one run alone.
    pub fn only_run(&self, run: RunNumber) -> Self
    where
        T: Clone,
    {
        let runs: VecDeque<RecordsOfRun<T>> = self.of_run(run).into_iter().cloned().collect();
        let weight = runs.iter().flat_map(|it| &it.records).map(self.weight_of).sum();
        Self { runs, has_dropped_runs: self.has_dropped(run), weight, weight_of: self.weight_of }
    }

    /// Returns whether older records were dropped.
    pub fn is_truncated(&self) -> bool {
        self.has_dropped_runs || self.runs.iter().any(|of_run| of_run.is_truncated)
    }

    /// Returns all records, the newest first.
    pub fn latest_first(&self) -> impl Iterator<Item = &T> + Clone {
        self.runs.iter().rev().flat_map(|of_run| of_run.records.iter().rev())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn records(list: &RecordsByRun<usize>) -> Vec<(u64, Vec<usize>, bool)> {
        let of_run =
            |it: &RecordsOfRun<usize>| (it.run.0, it.records.iter().copied().collect(), it.is_truncated);
        list.runs.iter().map(of_run).collect()
    }

    #[test]
    fn the_oldest_records_of_the_oldest_run_go_first_and_the_newest_stays() {
        let mut list = RecordsByRun::new(|weight: &usize| *weight);
        let bounds = RecordBounds { records_of_run: 3, weight: 10 };
        for (run, weight) in [(1, 2), (1, 3), (2, 1), (2, 1), (2, 1)] {
            list.add(RunNumber(run), weight, bounds);
        }
        assert_eq!(records(&list), [(1, vec![2, 3], false), (2, vec![1, 1, 1], false)]);
        list.add(RunNumber(2), 4, bounds);
        assert_eq!(records(&list), [(1, vec![3], true), (2, vec![1, 1, 4], true)], "both bounds");
        list.add(RunNumber(3), 9, bounds);
        assert_eq!(records(&list), [(3, vec![9], false)]);
        list.add(RunNumber(3), 50, bounds);
        assert_eq!(records(&list), [(3, vec![50], true)], "the newest is kept, whatever it weighs");
        assert_eq!(list.latest_first().copied().collect::<Vec<_>>(), [50]);
    }
}
