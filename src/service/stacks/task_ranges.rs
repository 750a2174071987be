//! Sets of tasks as ranges. Parses the text of a request, such as `0-7,12`, and compresses lists of tasks in answers.
//!
//! Begin at [`TaskRanges`].

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::coordination::TaskId;

/// The maximum number of ranges in a request.
const RANGES_MAX: usize = 1000;

/// Consecutive tasks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, ToSchema)]
pub struct TaskRange {
    /// The first task.
    pub first: TaskId,
    /// The last task.
    pub last: TaskId,
}

impl TaskRange {
    /// Returns these tasks, which are in ascending order, as ranges.
    #[must_use]
    pub fn compress(tasks: impl IntoIterator<Item = TaskId>) -> Vec<Self> {
        let mut ranges: Vec<Self> = Vec::new();
        for task in tasks {
            match ranges.last_mut() {
                Some(range) if range.last.0.checked_add(1) == Some(task.0) => range.last = task,
                _ => ranges.push(Self { first: task, last: task }),
            }
        }
        ranges
    }

    /// Returns the tasks of these ranges.
    pub fn tasks(ranges: &[Self]) -> impl Iterator<Item = TaskId> + '_ {
        ranges.iter().flat_map(|range| range.first.0..=range.last.0).map(TaskId)
    }

    /// Returns the number of tasks of these ranges.
    #[must_use]
    pub fn count(ranges: &[Self]) -> usize {
        let length =
            |range: &Self| usize::try_from(range.last.0.saturating_sub(range.first.0)).unwrap_or(0) + 1;
        ranges.iter().map(length).sum()
    }
}

/// A set of tasks as ranges in ascending order that do not overlap. Its text is such as `0-7,12`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct TaskRanges(Vec<TaskRange>);

impl TaskRanges {
    /// Returns whether a task is in the set.
    #[must_use]
    pub fn contains(&self, task: TaskId) -> bool {
        let after = self.0.partition_point(|range| range.last < task);
        self.0.get(after).is_some_and(|range| range.first <= task)
    }

    /// Returns the ranges.
    #[must_use]
    pub fn ranges(&self) -> &[TaskRange] {
        &self.0
    }

    /// Returns the last task.
    #[must_use]
    pub fn last(&self) -> TaskId {
        // A set is not empty.
        self.0.last().map_or(TaskId(-1), |range| range.last)
    }
}

impl FromStr for TaskRanges {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let wrong = || "write task numbers and ranges, such as 0-7,12".to_owned();
        let number = |text: &str| match text.trim().parse::<i32>() {
            Ok(number) if number >= 0 => Ok(TaskId(number)),
            _ => Err(wrong()),
        };
        let mut ranges = Vec::new();
        for part in text.split(',') {
            if ranges.len() == RANGES_MAX {
                return Err(format!("write at most {RANGES_MAX} ranges of tasks"));
            }
            let (first, last) = part.split_once('-').unwrap_or((part, part));
            let range = TaskRange { first: number(first)?, last: number(last)? };
            if range.last < range.first {
                return Err(wrong());
            }
            ranges.push(range);
        }
        ranges.sort_unstable();
        let mut merged: Vec<TaskRange> = Vec::new();
        for range in ranges {
            match merged.last_mut() {
                Some(before) if range.first.0 <= before.last.0.saturating_add(1) => {
                    before.last = before.last.max(range.last);
                }
                _ => merged.push(range),
            }
        }
        Ok(Self(merged))
    }
}

impl TryFrom<String> for TaskRanges {
    type Error = String;

    fn try_from(text: String) -> Result<Self, String> {
        text.parse()
    }
}

impl From<TaskRanges> for String {
    fn from(tasks: TaskRanges) -> Self {
        tasks.to_string()
    }
}

impl fmt::Display for TaskRanges {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (at, TaskRange { first, last }) in self.0.iter().enumerate() {
            let comma = if at == 0 { "" } else { "," };
            if first == last {
                write!(f, "{comma}{first}")?;
            } else {
                write!(f, "{comma}{first}-{last}")?;
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_set_of_tasks_is_read_as_it_is_written() {
        let set: TaskRanges = "12, 0-3,4-7,5".parse().unwrap();
        assert_eq!(set.to_string(), "0-7,12");
        assert_eq!(set.to_string().parse(), Ok(set.clone()));
        assert!(set.contains(TaskId(0)) && set.contains(TaskId(7)) && set.contains(TaskId(12)));
        assert!(!set.contains(TaskId(8)) && !set.contains(TaskId(13)) && !set.contains(TaskId(-1)));
        assert_eq!((set.last(), TaskRange::count(set.ranges())), (TaskId(12), 9));
        for wrong in ["", "a", "-1", "3-1", "1,,2", "99999999999", "0-7-9"] {
            assert!(wrong.parse::<TaskRanges>().is_err(), "{wrong}");
        }
        assert!(vec!["1"; RANGES_MAX + 1].join(",").parse::<TaskRanges>().is_err());
        let whole: TaskRanges = "0-2147483647".parse().unwrap();
        assert_eq!(TaskRange::count(whole.ranges()), 1 << 31);
    }

    #[test]
    fn lists_of_tasks_become_ranges() {
        let ranges = TaskRange::compress([0, 1, 2, 5, 7, 8].map(TaskId));
        let pairs: Vec<(i32, i32)> = ranges.iter().map(|range| (range.first.0, range.last.0)).collect();
        assert_eq!(pairs, [(0, 2), (5, 5), (7, 8)]);
        assert_eq!(TaskRange::tasks(&ranges).count(), TaskRange::count(&ranges));
    }
}
