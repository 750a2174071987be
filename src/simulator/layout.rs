//! Divides the tasks of a simulated job among its hosts and among the connections that the tasks share, and names the
//! hosts.
//!
//! Both divisions are in blocks of consecutive tasks whose sizes differ by at most one. Begin at [`ClusterLayout`].

use std::collections::BTreeSet;
use std::net::Ipv4Addr;
use std::ops::Range;

/// The tasks and the hosts of a simulated job. Host `h` has the block `h` of the tasks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ClusterLayout {
    /// The number of tasks.
    pub tasks: u32,
    /// The number of hosts, which is at most the number of tasks.
    pub hosts: u32,
}

impl ClusterLayout {
    /// Returns the tasks of a host.
    #[must_use]
    pub fn tasks_of_host(self, host: u32) -> Range<u32> {
        block(self.tasks, self.hosts, host)
    }

    /// Returns the host of a task.
    #[must_use]
    pub fn host_of_task(self, task: u32) -> u32 {
        block_of(self.tasks, self.hosts, task)
    }

    /// Returns the number of a task among those of its host.
    #[must_use]
    pub fn local_number(self, task: u32) -> u32 {
        task - self.tasks_of_host(self.host_of_task(task)).start
    }

    /// Returns the hosts that have only these tasks, which are ascending.
    #[must_use]
    pub fn whole_hosts(self, tasks: &[u32]) -> Vec<u32> {
        let is_whole = |host: u32| {
            let own = self.tasks_of_host(host);
            let first = tasks.partition_point(|task| *task < own.start);
            tasks[first..].iter().take_while(|task| own.contains(task)).count() == own.len()
        };
        let mut hosts: Vec<u32> = tasks.iter().map(|task| self.host_of_task(*task)).collect();
        hosts.dedup();
        hosts.retain(|host| is_whole(*host));
        hosts
    }
}

/// Returns the name of a host.
#[must_use]
pub fn host_name(host: u32) -> String {
    format!("host-{host:04}")
}

/// Returns the identity of the boot of a host, which JAX processes publish with their devices.
#[must_use]
pub fn boot_id(host: u32) -> String {
    format!("simulated-boot-of-{}", host_name(host))
}

/// Returns the loopback address from which the tasks of a host connect. All addresses of 127.0.0.0/8 belong to a
/// Linux machine.
#[must_use]
pub fn loopback_address_of_host(host: u32) -> Ipv4Addr {
    // No address ends in 0 or 255, and none is 127.0.0.1, by which other programs connect.
    let (rest, last) = (host / 254, host % 254);
    let (high, third) = (rest / 256, rest % 256);
    Ipv4Addr::new(127, 10 + (high % 200) as u8, third as u8, 1 + last as u8)
}

/// The connections of a simulated job: which tasks share one.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ConnectionPlan {
    tasks: u32,
    shared: u32,
    /// The tasks that have a connection each, ascending.
    separate: Vec<u32>,
}

impl ConnectionPlan {
    /// Plans `shared` connections. `killed_together` are the sets of tasks that an event kills at the same time. The
    /// end of a shared connection ends all its tasks, so a task has a connection of its own if an event kills it
    /// without all the other tasks of its connection.
    #[must_use]
    pub fn new<'a>(tasks: u32, shared: u32, killed_together: impl IntoIterator<Item = &'a [u32]>) -> Self {
        let mut separate = BTreeSet::new();
        for killed in killed_together {
            let mut rest = killed;
            while let Some(first) = rest.first() {
                let own = block(tasks, shared, block_of(tasks, shared, *first));
                let (of_block, others) = rest.split_at(rest.partition_point(|task| own.contains(task)));
                if of_block.len() < own.len() {
                    separate.extend(of_block.iter().copied());
                }
                rest = others;
            }
        }
        Self { tasks, shared, separate: separate.into_iter().collect() }
    }

    /// Returns the number of connections.
    #[must_use]
    pub fn connections(&self) -> usize {
        self.shared as usize + self.separate.len()
    }

    /// Returns the number of the connection that a task uses.
    #[must_use]
    pub fn connection_of_task(&self, task: u32) -> usize {
        match self.separate.binary_search(&task) {
            Ok(place) => self.shared as usize + place,
            Err(_) => block_of(self.tasks, self.shared, task) as usize,
        }
    }

    /// Returns the first task of a connection.
    #[must_use]
    pub fn first_task(&self, connection: usize) -> u32 {
        match connection.checked_sub(self.shared as usize) {
            Some(place) => self.separate.get(place).copied().unwrap_or_default(),
            None => block(self.tasks, self.shared, connection as u32).start,
        }
    }
}

/// Returns the numbers of block `at`, if `all` numbers from 0 are divided into `blocks`.
fn block(all: u32, blocks: u32, at: u32) -> Range<u32> {
    let start = |at: u32| (u64::from(at) * u64::from(all) / u64::from(blocks.max(1))) as u32;
    start(at)..start(at + 1)
}

/// Returns the block that has `number`, if `all` numbers from 0 are divided into `blocks`.
fn block_of(all: u32, blocks: u32, number: u32) -> u32 {
    (((u64::from(number) + 1) * u64::from(blocks) - 1) / u64::from(all.max(1))) as u32
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn each_task_is_in_the_block_of_its_host(tasks in 1..3000_u32, part in 0.0..1.0_f64) {
            let hosts = 1 + (f64::from(tasks - 1) * part) as u32;
            let layout = ClusterLayout { tasks, hosts };
            let mut next = 0;
            for host in 0..hosts {
                let own = layout.tasks_of_host(host);
                prop_assert_eq!(own.start, next);
                prop_assert!(own.len() as u32 >= tasks / hosts && own.len() as u32 <= tasks.div_ceil(hosts));
                next = own.end;
                for task in own.clone() {
                    prop_assert_eq!(layout.host_of_task(task), host);
                    prop_assert_eq!(layout.local_number(task), task - own.start);
                }
            }
            prop_assert_eq!(next, tasks);
            let all: Vec<u32> = (0..tasks).collect();
            prop_assert_eq!(layout.whole_hosts(&all).len() as u32, hosts);
            prop_assert_eq!(layout.whole_hosts(&all[1..]).len() as u32, hosts - 1);
        }

        #[test]
        fn the_tasks_of_a_connection_that_an_event_kills_are_killed_together(
            tasks in 1..400_u32, shared in 1..50_u32, killed in proptest::collection::btree_set(0..400_u32, 0..60),
        ) {
            let shared = shared.min(tasks);
            let killed: Vec<u32> = killed.into_iter().filter(|task| *task < tasks).collect();
            let plan = ConnectionPlan::new(tasks, shared, [killed.as_slice()]);
            for task in 0..tasks {
                let connection = plan.connection_of_task(task);
                prop_assert!(connection < plan.connections());
                let dies = killed.contains(&task);
                for other in (0..tasks).filter(|other| plan.connection_of_task(*other) == connection) {
                    prop_assert_eq!(killed.contains(&other), dies, "{} and {}", task, other);
                }
            }
            for connection in shared as usize..plan.connections() {
                prop_assert_eq!(plan.connection_of_task(plan.first_task(connection)), connection);
            }
        }
    }

    #[test]
    fn blocks_are_those_that_a_person_expects() {
        let layout = ClusterLayout { tasks: 10_000, hosts: 1250 };
        assert_eq!(layout.tasks_of_host(3), 24..32);
        assert_eq!(layout.whole_hosts(&[23, 24, 25, 26, 27, 28, 29, 30, 31, 32]), [3]);
        assert_eq!(host_name(3), "host-0003");
    }

    #[test]
    fn each_host_has_an_address_of_its_own() {
        let all: BTreeSet<_> = (0..10_000).map(loopback_address_of_host).collect();
        assert_eq!(all.len(), 10_000);
        assert!(all.iter().all(|address| address.is_loopback() && *address != Ipv4Addr::LOCALHOST));
    }
}
