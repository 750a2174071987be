//! A bounded list of records of a job's latest runs.
//!
//! Timelines, ended barriers and state changes are such records. Begin at [`RecordsByRun::add`].
//!
//! Invariants, which also hold for a list that is restored from saved bytes:
//! - The runs ascend, and each has a record. The records of a run are in the order in which they were added.
//! - No run has more records than the bounds allow. All records together are no heavier than the bounds allow, unless
//!   the list has a single record.
//!
//! When the whole list is too heavy, the oldest records of the oldest run go first. So a run that has just ended is
//! complete as long as the present run leaves room for it. The newest record of the newest run is kept, whatever it
//! weighs.

use std::collections::VecDeque;

use serde::{Deserialize, Serialize};

use crate::coordination::RunNumber;

/// The bounds of a list.
#[derive(Debug, Clone, Copy)]
pub(super) struct RecordBounds {
    /// The maximum number of records of one run.
    pub records_of_run: usize,
    /// The maximum weight of all records of the job.
    pub weight: usize,
}

/// A record of a list.
pub(super) trait BoundedRecord {
    /// The bounds of the list.
    const BOUNDS: RecordBounds;

    /// Returns the weight of the record, which is at least 1. In a list, only [`RecordsByRun::change_newest`] may
    /// change it.
    fn weight(&self) -> usize {
        1
    }
}

/// The records of one run, the newest last.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct RecordsOfRun<T> {
    pub run: RunNumber,
    pub records: VecDeque<T>,
    /// Older records of this run were dropped.
    pub is_truncated: bool,
}

/// The records of a job's latest runs.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "UncheckedRecords<T>", bound(deserialize = "T: BoundedRecord + Deserialize<'de>"))]
pub(super) struct RecordsByRun<T> {
    /// The newest run is the last one.
    runs: VecDeque<RecordsOfRun<T>>,
    /// Whole runs were dropped.
    has_dropped_runs: bool,
    /// The weight of all records.
    #[serde(skip)]
    weight: usize,
}

/// A list as it is saved. Its fields are the saved fields of [`RecordsByRun`].
#[derive(Deserialize)]
struct UncheckedRecords<T> {
    runs: VecDeque<RecordsOfRun<T>>,
    has_dropped_runs: bool,
}

impl<T: BoundedRecord> TryFrom<UncheckedRecords<T>> for RecordsByRun<T> {
    type Error = &'static str;

    fn try_from(saved: UncheckedRecords<T>) -> Result<Self, Self::Error> {
        let UncheckedRecords { runs, has_dropped_runs } = saved;
        if !runs.iter().is_sorted_by(|older, newer| older.run < newer.run) {
            return Err("the runs do not ascend");
        }
        let lengths = 1..=T::BOUNDS.records_of_run;
        if !runs.iter().all(|of_run| lengths.contains(&of_run.records.len())) {
            return Err("a run has no record or too many");
        }
        let weight = total_weight(&runs);
        let list = Self { runs, has_dropped_runs, weight };
        if list.is_too_heavy() { Err("the records are too heavy") } else { Ok(list) }
    }
}

impl<T> Default for RecordsByRun<T> {
    fn default() -> Self {
        Self { runs: VecDeque::new(), has_dropped_runs: false, weight: 0 }
    }
}

fn total_weight<T: BoundedRecord>(runs: &VecDeque<RecordsOfRun<T>>) -> usize {
    runs.iter().flat_map(|of_run| &of_run.records).map(T::weight).sum()
}

impl<T: BoundedRecord> RecordsByRun<T> {
    /// Adds a record, and drops those that the bounds no longer allow.
    pub fn add(&mut self, run: RunNumber, record: T) {
        self.weight += record.weight();
        let place = self.runs.iter().rposition(|of_run| of_run.run == run).unwrap_or_else(|| {
            let place = self.runs.partition_point(|of_run| of_run.run < run);
            self.runs.insert(place, RecordsOfRun { run, records: VecDeque::new(), is_truncated: false });
            place
        });
        let of_run = &mut self.runs[place];
        of_run.records.push_back(record);
        if of_run.records.len() > T::BOUNDS.records_of_run
            && let Some(oldest) = of_run.records.pop_front()
        {
            self.weight -= oldest.weight();
            of_run.is_truncated = true;
        }
        self.drop_oldest_while_too_heavy();
    }

    /// Changes the newest record of a run, which may become heavier, and drops the records that the bounds no longer
    /// allow.
    pub fn change_newest(&mut self, run: RunNumber, change: impl FnOnce(&mut T)) {
        let Some(newest) = self.newest_mut(run) else { return };
        let before = newest.weight();
        change(newest);
        let after = newest.weight();
        self.weight = self.weight - before + after;
        self.drop_oldest_while_too_heavy();
    }

    fn is_too_heavy(&self) -> bool {
        let has_many = self.runs.len() > 1 || self.runs.front().is_some_and(|it| it.records.len() > 1);
        has_many && self.weight > T::BOUNDS.weight
    }

    fn drop_oldest_while_too_heavy(&mut self) {
        while self.is_too_heavy()
            && let Some(oldest_run) = self.runs.front_mut()
        {
            if let Some(oldest) = oldest_run.records.pop_front() {
                self.weight -= oldest.weight();
                oldest_run.is_truncated = true;
            }
            if oldest_run.records.is_empty() {
                self.runs.pop_front();
                self.has_dropped_runs = true;
            }
        }
    }

    /// Returns a list with the records of one run alone.
    pub fn only_run(&self, run: RunNumber) -> Self
    where
        T: Clone,
    {
        let runs: VecDeque<RecordsOfRun<T>> = self.of_run(run).into_iter().cloned().collect();
        let weight = total_weight(&runs);
        Self { runs, has_dropped_runs: self.has_dropped(run), weight }
    }
}

impl<T> RecordsByRun<T> {
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

    /// Returns whether older records were dropped.
    pub fn is_truncated(&self) -> bool {
        self.has_dropped_runs || self.runs.iter().any(|of_run| of_run.is_truncated)
    }

    /// Returns all records, the newest first.
    pub fn latest_first(&self) -> impl Iterator<Item = &T> + Clone {
        self.with_runs().map(|(_, record)| record)
    }

    /// Returns all records with their runs, the newest first.
    pub fn with_runs(&self) -> impl Iterator<Item = (RunNumber, &T)> + Clone {
        let newest_run_first = self.runs.iter().rev();
        newest_run_first.flat_map(|it| it.records.iter().rev().map(|record| (it.run, record)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A record that weighs this much.
    #[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
    struct Weighed(usize);

    impl BoundedRecord for Weighed {
        const BOUNDS: RecordBounds = RecordBounds { records_of_run: 3, weight: 10 };

        fn weight(&self) -> usize {
            self.0
        }
    }

    fn records(list: &RecordsByRun<Weighed>) -> Vec<(u64, Vec<usize>, bool)> {
        let of_run = |it: &RecordsOfRun<Weighed>| {
            (it.run.0, it.records.iter().map(Weighed::weight).collect(), it.is_truncated)
        };
        list.runs.iter().map(of_run).collect()
    }

    #[test]
    fn the_oldest_records_of_the_oldest_run_go_first_and_the_newest_stays() {
        let mut list = RecordsByRun::default();
        for (run, weight) in [(1, 2), (1, 3), (2, 1), (2, 1), (2, 1)] {
            list.add(RunNumber(run), Weighed(weight));
        }
        assert_eq!(records(&list), [(1, vec![2, 3], false), (2, vec![1, 1, 1], false)]);
        list.add(RunNumber(2), Weighed(4));
        assert_eq!(records(&list), [(1, vec![3], true), (2, vec![1, 1, 4], true)], "both bounds");
        list.change_newest(RunNumber(2), |record| record.0 = 6);
        assert_eq!(records(&list), [(2, vec![1, 1, 6], true)], "a record became heavier");
        list.add(RunNumber(3), Weighed(9));
        assert_eq!(records(&list), [(3, vec![9], false)]);
        list.add(RunNumber(2), Weighed(2));
        assert_eq!(records(&list), [(3, vec![9], false)], "a late record of an older run has no room");
        assert!(list.has_dropped(RunNumber(2)));
        list.add(RunNumber(3), Weighed(50));
        assert_eq!(records(&list), [(3, vec![50], true)], "the newest is kept, whatever it weighs");
        assert_eq!(list.latest_first().copied().collect::<Vec<_>>(), [Weighed(50)]);
    }

    #[test]
    fn a_saved_list_is_restored_only_if_it_keeps_the_bounds() {
        type Runs = Vec<(u64, Vec<usize>, bool)>;
        let restore = |runs: Runs| {
            let bytes = postcard::to_stdvec(&(runs.clone(), true)).unwrap();
            let list: RecordsByRun<Weighed> = postcard::from_bytes(&bytes).ok()?;
            assert_eq!((records(&list), list.has_dropped_runs), (runs, true));
            assert_eq!(list.weight, total_weight(&list.runs));
            assert_eq!(postcard::to_stdvec(&list).unwrap(), bytes);
            Some(list)
        };
        for allowed in [
            vec![],
            vec![(1, vec![2, 3], false), (4, vec![1, 1, 1], true)],
            vec![(1, vec![5], false), (2, vec![5], false)],
            vec![(7, vec![50], true)],
        ] {
            assert!(restore(allowed.clone()).is_some(), "{allowed:?}");
        }
        for refused in [
            vec![(1, vec![], false)],
            vec![(1, vec![1, 1, 1, 1], false)],
            vec![(1, vec![5], false), (2, vec![6], false)],
            vec![(1, vec![5, 6], false)],
            vec![(2, vec![1], false), (1, vec![1], false)],
            vec![(2, vec![1], false), (2, vec![1], false)],
        ] {
            assert!(restore(refused.clone()).is_none(), "{refused:?}");
        }
    }
}
