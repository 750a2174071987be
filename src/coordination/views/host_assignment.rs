//! Tells on which host each task of a run is.
//!
//! The service sees up to three properties of a task's host: the host in the identity of the task's process, the boot
//! id of the kernel among the topology values of JAX, and the IP address from which the task registered. The first of
//! them that is known names the host:
//!
//! 1. Tasks whose processes state the same host are on this host.
//! 2. A task with a boot id and no identity is on the host that the other tasks with the same boot id state, if they
//!    state one. Otherwise the boot id names its host.
//! 3. A task of which only the address is known is on the host of the other tasks at this address, if they are all on
//!    one. Otherwise the address names its host. Behind one address there may be many hosts, so equal addresses alone
//!    do not join tasks whose hosts are known.
//!
//! A task of which nothing is known is on no host. A restarted process need not publish its properties again, so those
//! of an earlier incarnation count as long as it registered from the same address.
//!
//! Begin at [`HostAssignment`], then `assign_hosts`.

use std::borrow::Cow;
use std::collections::{BTreeMap, BTreeSet};
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;

use prost::Message as _;
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::coordination::ids::{HostId, TaskId, Timestamp};
use crate::coordination::job::Job;
use crate::coordination::process_identity::ProcessIdentity;
use crate::coordination::run::Run;
use crate::coordination::topology::{
    PublishedHost, PublishedHostProperty, TopologyKey, TopologyValue, TopologyValues,
};

/// The property that names a host.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "kebab-case")]
pub enum HostIdSource {
    /// The host in the identity that its processes published. It stays when the host starts again.
    Identity,
    /// The boot id of its kernel. It changes when the host starts again.
    BootId,
    /// The IP address from which its tasks registered.
    Address,
}

/// A host and its tasks.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HostOfTasks {
    /// Its name.
    pub name: HostId,
    /// The property that names it.
    pub named_by: HostIdSource,
    /// The boot id that its tasks published, if they published one; if there are several, that of the last task.
    pub boot_id: Option<Arc<str>>,
    /// The addresses from which its tasks registered, ascending.
    pub addresses: BTreeSet<IpAddr>,
    /// Its tasks, ascending; at least one.
    pub tasks: Vec<TaskId>,
}

impl HostOfTasks {
    /// Describes all of its tasks for people.
    #[must_use]
    pub fn describe_all_tasks(&self) -> String {
        format!("all {} tasks of host {}", self.tasks.len(), self.name)
    }
}

/// The hosts of a run, in the order of their first task, and the host of each task.
#[derive(Debug, Default, Clone, PartialEq, Eq)]
pub struct HostAssignment {
    hosts: Vec<HostOfTasks>,
    /// The place in `hosts` of each task's host.
    of_task: Vec<Option<usize>>,
}

/// A host all of whose tasks are in a list, or a single task of the list.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum HostOrTask<'a> {
    /// All tasks of this host, which has at least two.
    Host(&'a HostOfTasks),
    /// A task of a host that has other tasks too, or of a host with one task: then the task says as much.
    Task(TaskId),
}

impl HostOrTask<'_> {
    /// Returns the number of its tasks.
    #[must_use]
    pub fn task_count(&self) -> usize {
        match self {
            Self::Host(host) => host.tasks.len(),
            Self::Task(_) => 1,
        }
    }
}

impl HostAssignment {
    /// Returns the hosts, in the order of their first task.
    #[must_use]
    pub fn hosts(&self) -> &[HostOfTasks] {
        &self.hosts
    }

    /// Returns the host of a task.
    #[must_use]
    pub fn host_of(&self, task: TaskId) -> Option<&HostOfTasks> {
        let place = *self.of_task.get(usize::try_from(task.0).ok()?)?;
        self.hosts.get(place?)
    }

    /// Returns the host with this name.
    #[must_use]
    pub fn find(&self, name: &str) -> Option<&HostOfTasks> {
        self.hosts.iter().find(|host| host.name.as_str() == name)
    }

    /// Groups the tasks of a list by host, in the order of the first task of each group.
    #[must_use]
    pub fn group_by_host(&self, tasks: &[TaskId]) -> Vec<HostOrTask<'_>> {
        let listed: BTreeSet<TaskId> = tasks.iter().copied().collect();
        let mut groups = Vec::new();
        // Whether each host that was seen is whole; a host is looked at once, at the first of its tasks.
        let mut is_whole: BTreeMap<&HostId, bool> = BTreeMap::new();
        for task in tasks {
            let Some(host) = self.host_of(*task).filter(|host| host.tasks.len() > 1) else {
                groups.push(HostOrTask::Task(*task));
                continue;
            };
            match is_whole.get(&host.name) {
                Some(true) => {}
                Some(false) => groups.push(HostOrTask::Task(*task)),
                None => {
                    let whole = host.tasks.iter().all(|task| listed.contains(task));
                    is_whole.insert(&host.name, whole);
                    groups.push(if whole { HostOrTask::Host(host) } else { HostOrTask::Task(*task) });
                }
            }
        }
        groups
    }
}

/// The evidence for the host of one task.
#[derive(Debug, Default, Clone, Copy)]
struct HostEvidence<'a> {
    /// The host in the identity of the task's process.
    identity: Option<&'a str>,
    boot_id: Option<&'a str>,
    address: Option<IpAddr>,
}

/// The process and the boot id of a `LocalTopologyProto`. Its devices are not decoded.
#[derive(Clone, PartialEq, prost::Message)]
struct ProcessAndBootId {
    #[prost(int32, tag = "1")]
    process_id: i32,
    #[prost(string, tag = "2")]
    boot_id: String,
}

impl Job {
    /// Returns the hosts of the present run and the host of each task.
    pub(super) fn assign_hosts(&self) -> HostAssignment {
        let run = &self.run;
        let published = run.published_hosts();
        let mut evidence: Vec<HostEvidence<'_>> = run
            .tasks
            .iter()
            .map(|task| HostEvidence { address: task.peer.map(ip_address), ..HostEvidence::default() })
            .collect();
        for PublishedHost { task, property, written_at } in published.iter() {
            // A value that was published from another address than that of the present incarnation tells of another host.
            if !run.is_of_present_host(*task, *written_at) {
                continue;
            }
            let Some(of_task) = usize::try_from(task.0).ok().and_then(|at| evidence.get_mut(at)) else {
                continue;
            };
            match property {
                PublishedHostProperty::Identity(identity) => of_task.identity = Some(identity.host()),
                PublishedHostProperty::BootId(boot_id) => of_task.boot_id = Some(boot_id),
            }
        }
        for (task, owner) in self.task_owners.owners().filter(|(_, owner)| owner.run == run.number) {
            let of_task = usize::try_from(task.0).ok().and_then(|at| evidence.get_mut(at));
            if let Some(of_task) = of_task.filter(|of_task| of_task.identity.is_none()) {
                of_task.identity = Some(owner.identity.host());
            }
        }
        assign_hosts(&evidence)
    }
}

impl Run {
    /// Returns what the tasks published of their hosts.
    fn published_hosts(&self) -> Arc<Vec<PublishedHost>> {
        self.store
            .decoded_topology()
            .hosts
            .get_or_compute(|| Arc::new(decode_published_hosts(self.store.topology_values())))
    }

    /// Returns whether a value that a task wrote at `at` tells of the host on which the task is now.
    fn is_of_present_host(&self, id: TaskId, at: Timestamp) -> bool {
        let Some(task) = self.task(id) else { return false };
        let host = |peer: Option<SocketAddr>| peer.map(ip_address);
        let writer = task.past_incarnations.iter().find(|life| life.registered_at <= at);
        at >= task.registered_at || writer.is_none_or(|life| host(life.peer) == host(task.peer))
    }
}

/// Returns the address of a peer; an IPv4 address that arrived on an IPv6 socket becomes IPv4.
fn ip_address(peer: SocketAddr) -> IpAddr {
    peer.ip().to_canonical()
}

/// Decodes what topology values tell of hosts.
fn decode_published_hosts(values: &TopologyValues) -> Vec<PublishedHost> {
    let decode = |TopologyValue { key, value, written_at }: &TopologyValue| {
        let (task, property) = match key {
            TopologyKey::Identity { task } => {
                (*task, PublishedHostProperty::Identity(ProcessIdentity::from_store_value(value)?))
            }
            TopologyKey::Local { .. } => {
                let process = ProcessAndBootId::decode(value.as_ref()).ok()?;
                let boot_id = Some(process.boot_id).filter(|boot_id| is_host_name(boot_id))?;
                (process.process_id, PublishedHostProperty::BootId(boot_id))
            }
            TopologyKey::Global { .. } => return None,
        };
        Some(PublishedHost { task: TaskId(task), property, written_at: *written_at })
    };
    values.values().filter_map(decode).collect()
}

/// Returns whether a text that a client published may name a host.
fn is_host_name(text: &str) -> bool {
    ProcessIdentity::new(text, 0).is_ok()
}

/// Assigns tasks, whose ids are the places in `evidence`, to hosts.
fn assign_hosts(evidence: &[HostEvidence<'_>]) -> HostAssignment {
    let host_of_boot_id =
        unambiguous_values(evidence.iter().filter_map(|it| Some((it.boot_id?, it.identity?))));
    let host_with_boot_id = |boot_id| match host_of_boot_id.get(boot_id) {
        Some(Some(identity)) => (*identity, HostIdSource::Identity),
        _ => (boot_id, HostIdSource::BootId),
    };
    let known_hosts: Vec<Option<(&str, HostIdSource)>> = evidence
        .iter()
        .map(|it| match (it.identity, it.boot_id) {
            (Some(identity), _) => Some((identity, HostIdSource::Identity)),
            (None, boot_id) => boot_id.map(host_with_boot_id),
        })
        .collect();
    let hosts_at_addresses =
        evidence.iter().zip(&known_hosts).filter_map(|(it, known)| Some((it.address?, (*known)?)));
    let host_at_address = unambiguous_values(hosts_at_addresses);
    let mut assigned = HostAssignment::default();
    let mut places: BTreeMap<Cow<'_, str>, usize> = BTreeMap::new();
    for ((task, it), known) in (0..).map(TaskId).zip(evidence).zip(&known_hosts) {
        let by_address = |address: IpAddr| match host_at_address.get(&address) {
            Some(Some((name, source))) => (Cow::Borrowed(*name), *source),
            _ => (Cow::Owned(address.to_string()), HostIdSource::Address),
        };
        let known = known.map(|(name, source)| (Cow::Borrowed(name), source));
        let Some((name, named_by)) = known.or_else(|| it.address.map(by_address)) else {
            assigned.of_task.push(None);
            continue;
        };
        let place = *places.entry(name).or_insert_with_key(|name| {
            assigned.hosts.push(HostOfTasks {
                name: HostId::new(name),
                named_by,
                boot_id: None,
                addresses: BTreeSet::new(),
                tasks: Vec::new(),
            });
            assigned.hosts.len() - 1
        });
        let host = &mut assigned.hosts[place];
        host.named_by = host.named_by.min(named_by);
        if let Some(boot_id) = it.boot_id.filter(|boot_id| host.boot_id.as_deref() != Some(*boot_id)) {
            host.boot_id = Some(boot_id.into());
        }
        host.addresses.extend(it.address);
        host.tasks.push(task);
        assigned.of_task.push(Some(place));
    }
    assigned
}

/// Returns the value of each key; `None` for a key with several values.
pub(super) fn unambiguous_values<K: Ord, V: PartialEq + Copy>(
    pairs: impl Iterator<Item = (K, V)>,
) -> BTreeMap<K, Option<V>> {
    let mut values: BTreeMap<K, Option<V>> = BTreeMap::new();
    for (key, value) in pairs {
        let known = values.entry(key).or_insert(Some(value));
        *known = known.filter(|known| *known == value);
    }
    values
}

#[cfg(test)]
mod tests {
    use super::*;

    fn evidence<'a>(identity: &'a str, boot_id: &'a str, address: &str) -> HostEvidence<'a> {
        let known = |text: &'a str| Some(text).filter(|text| !text.is_empty());
        HostEvidence { identity: known(identity), boot_id: known(boot_id), address: address.parse().ok() }
    }

    /// Returns the name of each task's host.
    fn names(evidence: &[HostEvidence<'_>]) -> Vec<String> {
        let assigned = assign_hosts(evidence);
        let tasks = (0..evidence.len()).map(|task| TaskId(i32::try_from(task).expect("few tasks")));
        tasks
            .map(|task| assigned.host_of(task).map_or_else(String::new, |host| host.name.to_string()))
            .collect()
    }

    #[test]
    fn the_first_known_property_names_the_host() {
        let found = names(&[
            evidence("node-a", "boot-1", "10.0.0.1"),
            evidence("", "boot-2", "10.0.0.2"),
            evidence("", "", "10.0.0.3"),
            evidence("", "", ""),
        ]);
        assert_eq!(found, ["node-a", "boot-2", "10.0.0.3", ""]);
    }

    #[test]
    fn a_task_that_tells_less_is_on_the_host_of_those_that_share_what_it_tells() {
        let found = names(&[
            evidence("", "", "10.0.0.1"),
            evidence("", "boot-1", "10.0.0.1"),
            evidence("node-a", "boot-1", ""),
        ]);
        assert_eq!(found, ["node-a", "node-a", "node-a"]);
    }

    #[test]
    fn what_several_hosts_share_joins_nobody() {
        let found = names(&[
            evidence("node-a", "boot-1", "10.0.0.1"),
            evidence("node-b", "boot-1", "10.0.0.1"),
            evidence("", "boot-1", "10.0.0.1"),
            evidence("", "", "10.0.0.1"),
        ]);
        assert_eq!(found, ["node-a", "node-b", "boot-1", "10.0.0.1"]);
    }

    #[test]
    fn a_host_is_whole_if_all_its_tasks_are_listed() {
        let assigned = assign_hosts(&[
            evidence("a", "", ""),
            evidence("a", "", ""),
            evidence("b", "", ""),
            evidence("b", "", ""),
            evidence("c", "", ""),
            evidence("", "", ""),
        ]);
        let groups = assigned.group_by_host(&[5, 2, 4, 1, 3].map(TaskId));
        let texts: Vec<String> = groups
            .iter()
            .map(|group| match group {
                HostOrTask::Host(host) => host.describe_all_tasks(),
                HostOrTask::Task(task) => format!("task {task}"),
            })
            .collect();
        assert_eq!(texts, ["task 5", "all 2 tasks of host b", "task 4", "task 1"]);
        assert_eq!(assigned.find("a").expect("a host").tasks, [0, 1].map(TaskId));
        assert_eq!(assigned.find("d"), None);
    }

    proptest::proptest! {
        /// Each task with evidence is on one host, and each host has the tasks that are assigned to it, ascending.
        #[test]
        fn hosts_and_tasks_agree(
            seen in proptest::collection::vec((0..4_usize, 0..4_usize, 0..4_u8), 0..24),
        ) {
            let texts = ["", "x", "y", "z"];
            let evidence: Vec<HostEvidence<'_>> = seen
                .iter()
                .map(|(identity, boot_id, address)| evidence(texts[*identity], texts[*boot_id], &match address {
                    0 => String::new(),
                    last => format!("10.0.0.{last}"),
                }))
                .collect();
            let assigned = assign_hosts(&evidence);
            let mut listed = 0;
            for host in assigned.hosts() {
                proptest::prop_assert!(!host.tasks.is_empty() && host.tasks.is_sorted());
                listed += host.tasks.len();
                for task in &host.tasks {
                    proptest::prop_assert_eq!(assigned.host_of(*task), Some(host));
                }
                proptest::prop_assert_eq!(assigned.find(host.name.as_str()), Some(host));
            }
            let known = seen.iter().filter(|one| **one != (0, 0, 0)).count();
            proptest::prop_assert_eq!(listed, known);
        }
    }
}
