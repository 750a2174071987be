//! The members of a clique. Begin at [`GpuCliqueKey::new`].

use std::sync::Arc;

/// The most members of a clique.
pub const MEMBERS_MAX: usize = 1024;

/// One device of one incarnation of a task.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct CliqueMember {
    /// The number of the task.
    pub task: u32,
    /// The incarnation of the task.
    pub incarnation: u64,
    /// The number of the device in its process.
    pub device: u32,
}

impl std::fmt::Display for CliqueMember {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "GPU {} of task {} ({:016x})", self.device, self.task, self.incarnation)
    }
}

/// The members of a clique in ascending order. The rank of a member is its index, so all processes agree on it.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct GpuCliqueKey(Arc<[CliqueMember]>);

/// The reason why some members are no clique.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum InvalidCliqueKey {
    /// There are none, or more than [`MEMBERS_MAX`].
    #[error("a clique has 1 to {MEMBERS_MAX} members, not {count}")]
    Count {
        /// Their number.
        count: usize,
    },
    /// A member occurs twice.
    #[error("{member} is named twice")]
    Duplicate {
        /// The member.
        member: CliqueMember,
    },
    /// A task has two incarnations.
    #[error("task {task} has two incarnations")]
    TwoIncarnations {
        /// The task.
        task: u32,
    },
}

impl GpuCliqueKey {
    /// Creates the key of members given in any order.
    ///
    /// # Errors
    /// Returns why they are no clique.
    pub fn new(members: impl IntoIterator<Item = CliqueMember>) -> Result<Self, InvalidCliqueKey> {
        let mut members: Vec<_> = members.into_iter().take(MEMBERS_MAX + 1).collect();
        if members.is_empty() || members.len() > MEMBERS_MAX {
            return Err(InvalidCliqueKey::Count { count: members.len() });
        }
        members.sort_unstable();
        for pair in members.windows(2) {
            if pair[0] == pair[1] {
                return Err(InvalidCliqueKey::Duplicate { member: pair[0] });
            }
            if pair[0].task == pair[1].task && pair[0].incarnation != pair[1].incarnation {
                return Err(InvalidCliqueKey::TwoIncarnations { task: pair[0].task });
            }
        }
        Ok(Self(members.into()))
    }

    /// Returns the members, in the order of their ranks.
    #[must_use]
    pub fn members(&self) -> &[CliqueMember] {
        &self.0
    }

    /// Returns the rank of a member, if it is one.
    #[must_use]
    pub fn rank_of(&self, member: &CliqueMember) -> Option<usize> {
        self.0.binary_search(member).ok()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn member(task: u32, incarnation: u64, device: u32) -> CliqueMember {
        CliqueMember { task, incarnation, device }
    }

    #[test]
    fn ranks_do_not_depend_on_the_order_of_the_members() {
        let [a, b, c] = [member(0, 9, 1), member(0, 9, 0), member(1, 3, 0)];
        let key = GpuCliqueKey::new([a, b, c]).unwrap();
        assert_eq!(key, GpuCliqueKey::new([c, a, b]).unwrap());
        assert_eq!([a, b, c].map(|member| key.rank_of(&member)), [Some(1), Some(0), Some(2)]);
        assert_eq!(key.rank_of(&member(1, 4, 0)), None, "another incarnation");
        assert_ne!(key, GpuCliqueKey::new([a, b, member(1, 4, 0)]).unwrap());
    }

    #[test]
    fn what_is_no_clique_is_refused() {
        let [a, b] = [member(0, 9, 1), member(0, 8, 0)];
        assert_eq!(GpuCliqueKey::new([]), Err(InvalidCliqueKey::Count { count: 0 }));
        assert_eq!(GpuCliqueKey::new([a, a]), Err(InvalidCliqueKey::Duplicate { member: a }));
        assert_eq!(GpuCliqueKey::new([a, b]), Err(InvalidCliqueKey::TwoIncarnations { task: 0 }));
        let many = (0..=MEMBERS_MAX as u32).map(|task| member(task, 1, 0));
        assert!(matches!(GpuCliqueKey::new(many), Err(InvalidCliqueKey::Count { .. })));
    }
}
