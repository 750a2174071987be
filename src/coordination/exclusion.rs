//! The table of a job's exclusions: the target, actor, reason and expiry of each one, and a record of ended
//! exclusions. Exclusions belong to the job and outlive its runs.
//!
//! `exclusion_rules.rs` has the effects of an exclusion on tasks. A registration tells the task and the address from
//! which it comes, and not the name of the host. So the exclusion of a host by name holds for the addresses and tasks
//! of the host at the time of the command ([`ExcludedHost`]). Exclusions can be looked up by number, by task or address
//! ([`ExclusionKey`]) and by expiry. No number is used twice. Begin at [`ExclusionTable`].

use std::borrow::Cow;
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::fmt;
use std::net::IpAddr;
use std::sync::Arc;

use serde::de::Error as _;
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use utoipa::ToSchema;

use super::actor::{Actor, CommandReason};
use super::ids::{ExclusionId, HostId, TaskId, Timestamp};
use super::settings::JobBounds;

/// An exclusion in force and the tasks, ascending, that it has still to remove from the run.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct PendingEviction {
    pub exclusion: ExclusionId,
    pub tasks: VecDeque<TaskId>,
}

/// The target of an exclusion.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ExclusionTarget {
    /// A task, wherever it runs.
    Task(TaskId),
    /// A host by its address: any task that registers from it.
    Host(IpAddr),
    /// A host by its name.
    NamedHost(Arc<ExcludedHost>),
}

/// The schema is that of the fields in JSON.
impl utoipa::PartialSchema for ExclusionTarget {
    fn schema() -> utoipa::openapi::RefOr<utoipa::openapi::Schema> {
        <ExclusionTargetFields as utoipa::PartialSchema>::schema()
    }
}

impl ToSchema for ExclusionTarget {
    fn name() -> Cow<'static, str> {
        "Target".into()
    }
}

/// A host that is excluded by its name, and what it is recognised by.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ExcludedHost {
    name: HostId,
    /// The addresses that are its own, ascending: any task that registers from them is excluded.
    addresses: Vec<IpAddr>,
    /// The tasks, ascending, that are excluded wherever they run, because their host shares its address with another
    /// one.
    tasks: Vec<TaskId>,
}

impl ExcludedHost {
    /// Returns the host with this name that is recognised by these addresses and tasks.
    pub(super) fn new(name: HostId, addresses: Vec<IpAddr>, tasks: Vec<TaskId>) -> Self {
        let mut addresses: Vec<IpAddr> = addresses.into_iter().map(|it| it.to_canonical()).collect();
        addresses.sort_unstable();
        let mut tasks = tasks;
        tasks.sort_unstable();
        Self { name, addresses, tasks }
    }

    /// Returns whether this address names the host and is all that it is recognised by.
    #[must_use]
    pub fn is_known_by_address_alone(&self, address: IpAddr) -> bool {
        self.tasks.is_empty()
            && self.addresses == [address.to_canonical()]
            && self.name.as_str() == address.to_string()
    }
}

/// The key of an exclusion: a task, or the address from which a task registers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub(super) enum ExclusionKey {
    Task(TaskId),
    Address(IpAddr),
}

impl ExclusionKey {
    /// Returns the key of an address in the canonical form that is compared: an IPv4 address that arrived on an IPv6
    /// socket becomes IPv4.
    pub fn address(address: IpAddr) -> Self {
        Self::Address(address.to_canonical())
    }
}

impl ExclusionTarget {
    /// Returns the target for a host's address, in its canonical form.
    #[must_use]
    pub fn host(address: IpAddr) -> Self {
        Self::Host(address.to_canonical())
    }

    /// Returns what the exclusion matches.
    pub(super) fn keys(&self) -> impl Iterator<Item = ExclusionKey> {
        let (task, address, host) = match self {
            Self::Task(task) => (Some(*task), None, None),
            Self::Host(address) => (None, Some(*address), None),
            Self::NamedHost(host) => (None, None, Some(host)),
        };
        let tasks = task.into_iter().chain(host.into_iter().flat_map(|host| host.tasks.iter().copied()));
        let addresses =
            address.into_iter().chain(host.into_iter().flat_map(|host| host.addresses.iter().copied()));
        tasks.map(ExclusionKey::Task).chain(addresses.map(ExclusionKey::address))
    }

    /// Returns the tasks that the exclusion matches by their numbers.
    pub(super) fn tasks(&self) -> impl Iterator<Item = TaskId> {
        self.keys().filter_map(|key| match key {
            ExclusionKey::Task(task) => Some(task),
            ExclusionKey::Address(_) => None,
        })
    }

    /// Returns the address or the name of the host, or an empty text if the target is a task.
    #[must_use]
    pub fn host_text(&self) -> String {
        match self {
            Self::Task(_) => String::new(),
            Self::Host(address) => address.to_string(),
            Self::NamedHost(host) => host.name.to_string(),
        }
    }

    /// Returns whether the exclusion matches a task by its number, wherever it runs.
    pub(super) fn covers_number(&self, task: TaskId) -> bool {
        match self {
            Self::Task(one) => *one == task,
            Self::Host(_) => false,
            Self::NamedHost(host) => host.tasks.binary_search(&task).is_ok(),
        }
    }

    /// Returns whether the exclusion matches a task by its number, or by the address from which it registered.
    #[must_use]
    pub fn covers(&self, task: TaskId, address: Option<IpAddr>) -> bool {
        let address = address.map(|address| address.to_canonical());
        let covers_address = |address: &IpAddr| match self {
            Self::Task(_) => false,
            Self::Host(one) => one == address,
            Self::NamedHost(host) => host.addresses.binary_search(address).is_ok(),
        };
        self.covers_number(task) || address.as_ref().is_some_and(covers_address)
    }
}

/// The target of an exclusion in a binary format, which cannot leave out fields.
#[derive(Serialize, Deserialize)]
enum BinaryExclusionTarget {
    Task(TaskId),
    Host(IpAddr),
    NamedHost(ExcludedHost),
}

impl Serialize for ExclusionTarget {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        if serializer.is_human_readable() {
            return ExclusionTargetFields::from(self.clone()).serialize(serializer);
        }
        let binary = match self {
            Self::Task(task) => BinaryExclusionTarget::Task(*task),
            Self::Host(address) => BinaryExclusionTarget::Host(*address),
            Self::NamedHost(host) => BinaryExclusionTarget::NamedHost(host.as_ref().clone()),
        };
        binary.serialize(serializer)
    }
}

impl<'de> Deserialize<'de> for ExclusionTarget {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        if deserializer.is_human_readable() {
            let fields = ExclusionTargetFields::deserialize(deserializer)?;
            return fields.try_into().map_err(D::Error::custom);
        }
        Ok(match BinaryExclusionTarget::deserialize(deserializer)? {
            BinaryExclusionTarget::Task(task) => Self::Task(task),
            BinaryExclusionTarget::Host(address) => Self::Host(address),
            BinaryExclusionTarget::NamedHost(host) => Self::NamedHost(Arc::new(host)),
        })
    }
}

/// The fields of an exclusion's target in JSON: either `task` or `host`.
#[derive(Debug, Default, Clone, Serialize, Deserialize, ToSchema)]
#[serde(default)]
pub struct ExclusionTargetFields {
    /// The task.
    #[serde(skip_serializing_if = "Option::is_none")]
    task: Option<TaskId>,
    /// The host: its IP address or its name.
    #[serde(skip_serializing_if = "Option::is_none")]
    host: Option<String>,
    /// The addresses of a host that is excluded by name.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    #[schema(value_type = Vec<String>)]
    host_addresses: Vec<IpAddr>,
    /// The tasks of a host that is excluded by name and shares its address with another host.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    host_tasks: Vec<TaskId>,
}

impl From<ExclusionTarget> for ExclusionTargetFields {
    fn from(target: ExclusionTarget) -> Self {
        match target {
            ExclusionTarget::Task(task) => Self { task: Some(task), ..Self::default() },
            ExclusionTarget::Host(address) => Self { host: Some(address.to_string()), ..Self::default() },
            ExclusionTarget::NamedHost(host) => Self {
                task: None,
                host: Some(host.name.to_string()),
                host_addresses: host.addresses.clone(),
                host_tasks: host.tasks.clone(),
            },
        }
    }
}

impl TryFrom<ExclusionTargetFields> for ExclusionTarget {
    type Error = &'static str;

    fn try_from(fields: ExclusionTargetFields) -> Result<Self, Self::Error> {
        match (fields.task, fields.host) {
            (Some(task), None) => Ok(Self::Task(task)),
            (None, Some(host)) if fields.host_addresses.is_empty() && fields.host_tasks.is_empty() => host
                .parse()
                .map(Self::host)
                .map_err(|_| "a host that is excluded by name has host_addresses or host_tasks"),
            (None, Some(name)) => {
                let (name, addresses) = (HostId::new(&name), fields.host_addresses);
                Ok(Self::NamedHost(Arc::new(ExcludedHost::new(name, addresses, fields.host_tasks))))
            }
            _ => Err("the target of an exclusion has either a task or a host"),
        }
    }
}

impl fmt::Display for ExclusionTarget {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Task(task) => write!(f, "task {task}"),
            Self::Host(address) => write!(f, "host {address}"),
            Self::NamedHost(host) => write!(f, "host {}", host.name),
        }
    }
}

/// The way in which an exclusion ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
#[schema(as = ExclusionEnd)]
pub enum ExclusionEndKind {
    /// It expired.
    Expired,
    /// An operator lifted it.
    Lifted,
}

/// The time, kind and reason of the end of an exclusion.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[schema(as = ExclusionEnded)]
pub struct ExclusionEndRecord {
    /// The time.
    pub at: Timestamp,
    /// The way in which it ended.
    pub how: ExclusionEndKind,
    /// The operator who lifted it.
    pub actor: Option<Actor>,
    /// The operator's reason.
    pub reason: Option<CommandReason>,
}

/// One exclusion.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Exclusion {
    pub id: ExclusionId,
    pub target: ExclusionTarget,
    pub actor: Actor,
    pub reason: CommandReason,
    pub since: Timestamp,
    pub expires_at: Option<Timestamp>,
    /// The number of registrations that it has refused.
    pub refused: u64,
    pub last_refused_at: Option<Timestamp>,
}

/// The exclusions of a job: all that are in force, and the latest that have ended.
#[derive(Debug, Default, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct ExclusionTable {
    in_force: BTreeMap<ExclusionId, Exclusion>,
    /// The exclusions in force that match a task or an address.
    by_key: BTreeMap<ExclusionKey, BTreeSet<ExclusionId>>,
    /// The expiry times, ascending.
    expiries: BTreeSet<(Timestamp, ExclusionId)>,
    /// The ended exclusions, newest end first.
    past: VecDeque<(Exclusion, ExclusionEndRecord)>,
    /// The greatest number issued so far.
    last_issued: u64,
}

impl ExclusionTable {
    pub fn in_force(&self) -> impl Iterator<Item = &Exclusion> {
        self.in_force.values()
    }

    /// Returns the ended exclusions, newest end first.
    pub fn ended(&self) -> impl Iterator<Item = &(Exclusion, ExclusionEndRecord)> {
        self.past.iter()
    }

    pub fn len(&self) -> usize {
        self.in_force.len()
    }

    pub fn get(&self, id: ExclusionId) -> Option<&Exclusion> {
        self.in_force.get(&id)
    }

    /// Returns the exclusions in force that match a task or an address, ascending.
    pub fn ids_for_key(&self, key: ExclusionKey) -> impl Iterator<Item = ExclusionId> {
        self.by_key.get(&key).into_iter().flatten().copied()
    }

    /// Returns the first exclusion in force that matches a task or an address.
    pub fn find_for_key(&self, key: ExclusionKey) -> Option<&Exclusion> {
        self.in_force.get(&self.ids_for_key(key).next()?)
    }

    /// Returns the exclusion in force that matches the task or its address.
    pub fn find_matching(&self, task: TaskId, address: Option<IpAddr>) -> Option<&Exclusion> {
        // Every call passes here, and the usual table is empty.
        if self.in_force.is_empty() {
            return None;
        }
        let by_address = || self.find_for_key(ExclusionKey::address(address?));
        self.find_for_key(ExclusionKey::Task(task)).or_else(by_address)
    }

    /// Returns whether an exclusion with this number ever existed.
    pub fn has_issued_id(&self, id: ExclusionId) -> bool {
        (1..=self.last_issued).contains(&id.0)
    }

    pub fn add(
        &mut self,
        target: ExclusionTarget,
        actor: Actor,
        reason: CommandReason,
        since: Timestamp,
        expires_at: Option<Timestamp>,
    ) -> ExclusionId {
        self.last_issued += 1;
        let id = ExclusionId(self.last_issued);
        for key in target.keys() {
            self.by_key.entry(key).or_default().insert(id);
        }
        let exclusion =
            Exclusion { id, target, actor, reason, since, expires_at, refused: 0, last_refused_at: None };
        self.in_force.insert(id, exclusion);
        if let Some(at) = expires_at {
            self.expiries.insert((at, id));
        }
        id
    }

    /// Ends an exclusion and keeps it among the ended ones.
    pub fn end(
        &mut self,
        id: ExclusionId,
        ended: ExclusionEndRecord,
        bounds: &JobBounds,
    ) -> Option<Exclusion> {
        let exclusion = self.in_force.remove(&id)?;
        for key in exclusion.target.keys() {
            if let Some(ids) = self.by_key.get_mut(&key) {
                ids.remove(&id);
                if ids.is_empty() {
                    self.by_key.remove(&key);
                }
            }
        }
        if let Some(at) = exclusion.expires_at {
            self.expiries.remove(&(at, id));
        }
        self.past.push_front((exclusion.clone(), ended));
        self.past.truncate(bounds.exclusions_kept);
        Some(exclusion)
    }

    /// Drops ended exclusions beyond the bound.
    pub fn trim_ended(&mut self, bounds: &JobBounds) {
        self.past.truncate(bounds.exclusions_kept);
    }

    /// Counts a refused registration; returns `true` for the first one.
    pub fn record_refusal(&mut self, id: ExclusionId, now: Timestamp) -> bool {
        let Some(exclusion) = self.in_force.get_mut(&id) else { return false };
        exclusion.refused += 1;
        exclusion.last_refused_at = Some(now);
        exclusion.refused == 1
    }

    /// Returns the time of the next expiry.
    pub fn next_expiry(&self) -> Option<Timestamp> {
        self.expiries.first().map(|(at, _)| *at)
    }

    /// Returns the first exclusion that is due to expire.
    pub fn first_expired(&self, now: Timestamp) -> Option<ExclusionId> {
        self.expiries.first().filter(|(at, _)| *at <= now).map(|(_, id)| *id)
    }

    /// Checks that the tables agree and are within their bounds.
    pub fn check_invariants(&self, bounds: &JobBounds) -> Result<(), String> {
        let mut by_key: BTreeMap<ExclusionKey, BTreeSet<ExclusionId>> = BTreeMap::new();
        for exclusion in self.in_force.values() {
            for key in exclusion.target.keys() {
                by_key.entry(key).or_default().insert(exclusion.id);
            }
        }
        if by_key != self.by_key {
            return Err("the exclusions are not found by the tasks and addresses that they match".to_owned());
        }
        let ends = self.in_force.values().filter_map(|e| Some((e.expires_at?, e.id)));
        if ends.collect::<BTreeSet<_>>() != self.expiries {
            return Err("an exclusion that expires has no deadline, or the other way round".to_owned());
        }
        if self.in_force.keys().any(|id| !self.has_issued_id(*id)) {
            return Err("an exclusion has a number that was not given".to_owned());
        }
        if self.len() > bounds.exclusions || self.past.len() > bounds.exclusions_kept {
            return Err("there are more exclusions than allowed".to_owned());
        }
        Ok(())
    }
}
