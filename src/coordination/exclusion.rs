//! The table of a job's exclusions: target, actor, reason, expiry, and the record of ended ones. Exclusions belong
//! to the job and outlive its runs.
//!
//! It does not say what an exclusion does to a task: `exclusion_rules.rs` does. Hosts are IP addresses, not names: the
//! service sees addresses, and a name could resolve to another host tomorrow. Exclusions are found by number, by
//! target and by expiry; numbers are never used twice. Begin at [`ExclusionTable`].

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::fmt;
use std::net::IpAddr;

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use super::actor::{Actor, Reason};
use super::ids::{ExclusionId, TaskId, Timestamp};
use super::settings::Bounds;

/// An exclusion that is in force, and the tasks, ascending, that it has still to take out of the run.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct PendingEviction {
    pub exclusion: ExclusionId,
    pub tasks: VecDeque<TaskId>,
}

/// Whom an exclusion is about.
///
/// A host is an address, not a name: the service sees addresses, and a name that resolves to another one tomorrow
/// would move the exclusion unseen.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum ExclusionTarget {
    /// A task, wherever it runs.
    Task(TaskId),
    /// A host: whatever task registers from it.
    Host(IpAddr),
}

impl ExclusionTarget {
    /// A host in the one form in which it is compared: IPv4 addresses that arrive on an IPv6 socket are IPv4.
    #[must_use]
    pub fn host(address: IpAddr) -> Self {
        Self::Host(address.to_canonical())
    }
}

/// As it stands in JSON; the derivation knows no addresses.
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
    fn name() -> std::borrow::Cow<'static, str> {
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

/// How an exclusion came to its end.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
#[schema(as = ExclusionEnd)]
pub enum ExclusionEndKind {
    /// Its time was over.
    Expired,
    /// Somebody lifted it.
    Lifted,
}

/// How, when and why an exclusion ended.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[schema(as = ExclusionEnded)]
pub struct ExclusionEndRecord {
    /// When.
    pub at: Timestamp,
    /// How.
    pub how: ExclusionEndKind,
    /// Who lifted it.
    pub actor: Option<Actor>,
    /// Why they did.
    pub reason: Option<Reason>,
}

/// One exclusion.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Exclusion {
    pub id: ExclusionId,
    pub target: ExclusionTarget,
    pub actor: Actor,
    pub reason: Reason,
    pub since: Timestamp,
    pub expires_at: Option<Timestamp>,
    /// How many registrations it has turned away.
    pub refused: u64,
    pub last_refused_at: Option<Timestamp>,
}

/// Every exclusion of a job that is in force, and the last of those that are over.
#[derive(Debug, Default, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct ExclusionTable {
    in_force: BTreeMap<ExclusionId, Exclusion>,
    by_target: BTreeMap<ExclusionTarget, ExclusionId>,
    /// The ends that are set, by time.
    expiries: BTreeSet<(Timestamp, ExclusionId)>,
    /// Those that are over, newest end first.
    past: VecDeque<(Exclusion, ExclusionEndRecord)>,
    /// How many there have been.
    last_issued: u64,
}

impl ExclusionTable {
    pub fn in_force(&self) -> impl Iterator<Item = &Exclusion> {
        self.in_force.values()
    }

    /// Those that are over, newest end first.
    pub fn over(&self) -> impl Iterator<Item = &(Exclusion, ExclusionEndRecord)> {
        self.past.iter()
    }

    pub fn len(&self) -> usize {
        self.in_force.len()
    }

    pub fn get(&self, id: ExclusionId) -> Option<&Exclusion> {
        self.in_force.get(&id)
    }

    pub fn for_target(&self, target: ExclusionTarget) -> Option<&Exclusion> {
        self.in_force.get(self.by_target.get(&target)?)
    }

    /// The exclusion that keeps a task out that speaks from, or sits at, this host.
    pub fn matching(&self, task: TaskId, host: Option<IpAddr>) -> Option<&Exclusion> {
        // The usual case, which every call passes through.
        if self.in_force.is_empty() {
            return None;
        }
        let by_host = || self.for_target(ExclusionTarget::host(host?));
        self.for_target(ExclusionTarget::Task(task)).or_else(by_host)
    }

    /// Whether there has ever been an exclusion of this number.
    pub fn has_issued(&self, id: ExclusionId) -> bool {
        (1..=self.last_issued).contains(&id.0)
    }

    pub fn add(
        &mut self,
        target: ExclusionTarget,
        actor: Actor,
        reason: Reason,
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

    /// Ends an exclusion and keeps it among those that are over.
    pub fn end(&mut self, id: ExclusionId, ended: ExclusionEndRecord, bounds: &Bounds) -> Option<Exclusion> {
        let exclusion = self.in_force.remove(&id)?;
        self.by_target.remove(&exclusion.target);
        if let Some(at) = exclusion.expires_at {
            self.expiries.remove(&(at, id));
        }
        self.past.push_front((exclusion.clone(), ended));
        self.past.truncate(bounds.exclusions_kept);
        Some(exclusion)
    }

    /// Forgets those that are over beyond the bound.
    pub fn trim_ended(&mut self, bounds: &Bounds) {
        self.past.truncate(bounds.exclusions_kept);
    }

    /// Notes that a registration was turned away; `true` for the first one.
    pub fn record_refusal(&mut self, id: ExclusionId, now: Timestamp) -> bool {
        let Some(exclusion) = self.in_force.get_mut(&id) else { return false };
        exclusion.refused += 1;
        exclusion.last_refused_at = Some(now);
        exclusion.refused == 1
    }

    /// When the next one expires.
    pub fn next_expiry(&self) -> Option<Timestamp> {
        self.expiries.first().map(|(at, _)| *at)
    }

    /// The first one whose time is over.
    pub fn next_expired(&self, now: Timestamp) -> Option<ExclusionId> {
        self.expiries.first().filter(|(at, _)| *at <= now).map(|(_, id)| *id)
    }

    /// Checks that the tables say the same, and their bounds.
    pub fn check_invariants(&self, bounds: &Bounds) -> Result<(), String> {
        let targets: BTreeMap<ExclusionTarget, ExclusionId> =
            self.in_force.values().map(|exclusion| (exclusion.target, exclusion.id)).collect();
        if targets != self.by_target {
            return Err("the exclusions are not found by their targets".to_owned());
        }
        let ends = self.in_force.values().filter_map(|e| Some((e.expires_at?, e.id)));
        if ends.collect::<BTreeSet<_>>() != self.expiries {
            return Err("an exclusion that expires has no deadline, or the other way round".to_owned());
        }
        if self.in_force.keys().any(|id| !self.has_issued(*id)) {
            return Err("an exclusion has a number that was not given".to_owned());
        }
        if self.len() > bounds.exclusions || self.past.len() > bounds.exclusions_kept {
            return Err("there are more exclusions than allowed".to_owned());
        }
        Ok(())
    }
}
