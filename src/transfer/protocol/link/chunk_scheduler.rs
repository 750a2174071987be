//! Chooses the group that sends the next chunk. While groups of several priority classes have chunks, each class gets
//! its share ([`PriorityClass`]).
//!
//! This module does not depend on the contents of chunks. Begin at [`ChunkSchedule::next`].

use std::collections::VecDeque;

/// A group: its channel, and its number on the channel.
pub type GroupId = (u32, u64);

/// The priority class of a launch.
#[derive(
    Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default, serde::Serialize, serde::Deserialize,
)]
#[serde(rename_all = "lowercase")]
#[repr(u8)]
pub enum PriorityClass {
    /// For small urgent launches: sixteen chunks for each bulk chunk.
    Latency = 0,
    /// The default: four chunks for each bulk chunk.
    #[default]
    Normal = 1,
    /// For launches that may be slow. They are never starved.
    Bulk = 2,
}

impl PriorityClass {
    /// All classes, the most urgent first.
    pub const ALL: [Self; 3] = [Self::Latency, Self::Normal, Self::Bulk];

    /// Returns the name as a metric's label.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Latency => "latency",
            Self::Normal => "normal",
            Self::Bulk => "bulk",
        }
    }
}

const SHARES: [u8; 3] = [16, 4, 1];

/// The groups with chunks to send.
#[derive(Debug, Default)]
pub struct ChunkSchedule {
    waiting: [VecDeque<GroupId>; 3],
    left: [u8; 3],
}

impl ChunkSchedule {
    /// Appends a group to the queue of its class.
    pub fn add(&mut self, class: PriorityClass, group: GroupId) {
        self.waiting[class as usize].push_back(group);
    }

    /// Returns whether no group is queued.
    pub fn is_empty(&self) -> bool {
        self.waiting.iter().all(VecDeque::is_empty)
    }

    /// Removes and returns the group whose turn it is; add it again if it has more chunks.
    pub fn next(&mut self) -> Option<(PriorityClass, GroupId)> {
        for _ in 0..2 {
            for class in PriorityClass::ALL {
                let at = class as usize;
                if self.left[at] > 0
                    && let Some(group) = self.waiting[at].pop_front()
                {
                    self.left[at] -= 1;
                    return Some((class, group));
                }
            }
            self.left = SHARES;
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn classes_share_and_none_starves() {
        let mut schedule = ChunkSchedule::default();
        for class in PriorityClass::ALL {
            schedule.add(class, (class as u32, 0));
        }
        let mut served = [0; 3];
        for _ in 0..210 {
            let (class, group) = schedule.next().unwrap();
            served[class as usize] += 1;
            schedule.add(class, group);
        }
        assert_eq!(served, [160, 40, 10]);
    }

    #[test]
    fn within_a_class_groups_take_turns() {
        let mut schedule = ChunkSchedule::default();
        for n in 0..3 {
            schedule.add(PriorityClass::Bulk, (0, n));
        }
        let order: Vec<_> = std::iter::from_fn(|| {
            let (class, group) = schedule.next()?;
            schedule.add(class, group);
            Some(group.1)
        })
        .take(6)
        .collect();
        assert_eq!(order, [0, 1, 2, 0, 1, 2]);
        assert!(ChunkSchedule::default().next().is_none());
    }
}
