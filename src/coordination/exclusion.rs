//! The table of a job's exclusions: the target, actor, reason and expiry of each one, and a record of ended
//! exclusions. Exclusions belong to the job and outlive its runs.
//!
//! `exclusion_rules.rs` has the effects of an exclusion on tasks. An excluded host is identified by its IP address.
//! The service knows the address of every task, but the host name only of a task whose process claimed its task id. A
//! name could also resolve to another host later. Exclusions can be looked up by number, by target and by expiry. No
//! number is used twice. Begin at [`ExclusionTable`].

use std::borrow::Cow;
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::fmt;
use std::net::IpAddr;

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use super::actor::{Actor, CommandReason};
use super::ids::{ExclusionId, TaskId, Timestamp};
use super::settings::JobBounds;

/// An exclusion in force and the tasks, ascending, that it has still to remove from the run.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct PendingEviction {
    pub exclusion: ExclusionId,
    pub tasks: VecDeque<TaskId>,
}

/// The target of an exclusion.
///
/// A host is an address, not a name: the service sees addresses, and if a name resolved to another address
/// tomorrow, the exclusion would silently move.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum ExclusionTarget {
    /// A task, wherever it runs.
    Task(TaskId),
    /// A host: any task that registers from it.
    Host(IpAddr),
}

impl ExclusionTarget {
    /// Returns a host in the canonical form that is compared: an IPv4 address that arrived on an IPv6 socket
    /// becomes IPv4.
    #[must_use]
    pub fn host(address: IpAddr) -> Self {
        Self::Host(address.to_canonical())
    }
}

/// The schema is written by hand: it must match the JSON, and the derive macro has none for addresses.
impl utoipa::PartialSchema for ExclusionTarget {
    fn schema() -> utoipa::openapi::RefOr<utoipa::openapi::Schema> {
        use utoipa::openapi::schema::{ObjectBuilder, OneOfBuilder};
        let of = |field: &str, value: utoipa::openapi::RefOr<utoipa::openapi::Schema>, what: &str| {
            ObjectBuilder::new().property(field, value).required(field).description(Some(what))
        };
        let whole = OneOfBuilder::new()
            .item(of("task", <TaskId as utoipa::PartialSchema>::schema(), "A task, wherever it runs."))
            .item(of(
                "host",
                <String as utoipa::PartialSchema>::schema(),
                "A host, by its IP address: whatever task registers from it.",
            ))
            .description(Some("Whom an exclusion is about."));
        whole.into()
    }
}

impl ToSchema for ExclusionTarget {
    fn name() -> Cow<'static, str> {
        "Target".into()
    }
}

impl fmt::Display for ExclusionTarget {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Task(task) => write!(f, "task {task}"),
            Self::Host(host) => write!(f, "host {host}"),
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
    by_target: BTreeMap<ExclusionTarget, ExclusionId>,
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

    pub fn find_for_target(&self, target: ExclusionTarget) -> Option<&Exclusion> {
        self.in_force.get(self.by_target.get(&target)?)
    }

    /// Returns the exclusion in force that matches the task or the host.
    pub fn find_matching(&self, task: TaskId, host: Option<IpAddr>) -> Option<&Exclusion> {
        // Every call passes here, and the usual table is empty.
        if self.in_force.is_empty() {
            return None;
        }
        let by_host = || self.find_for_target(ExclusionTarget::host(host?));
        self.find_for_target(ExclusionTarget::Task(task)).or_else(by_host)
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
        let exclusion =
            Exclusion { id, target, actor, reason, since, expires_at, refused: 0, last_refused_at: None };
        self.in_force.insert(id, exclusion);
        self.by_target.insert(target, id);
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
        self.by_target.remove(&exclusion.target);
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
        let targets: BTreeMap<ExclusionTarget, ExclusionId> =
            self.in_force.values().map(|exclusion| (exclusion.target, exclusion.id)).collect();
        if targets != self.by_target {
            return Err("the exclusions are not found by their targets".to_owned());
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
