//! The view of a coordinated save, made from the keys and the barrier by which JAX programs agree on a step.
//!
//! `coordination/preemption.rs` writes the notice that begins a save if an operator requests it. Begin at
//! [`PreemptionView`].

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::coordination::barrier_table::{BarrierInstance, BarrierKey, EndedBarrier, MemberState};
use crate::coordination::command::DrainRequest;
use crate::coordination::failure::Code;
use crate::coordination::ids::{TaskId, Timestamp};
use crate::coordination::run::Run;
use crate::coordination::store_calls::PREEMPTION_NOTICE;

/// The directory in which each task writes its step when it learns of a preemption.
const PREEMPTION_STEPS: &[u8] = b"PREEMPTION_CURRENT_COUNTER";
/// The step at which the run began, which tasks of `muster.jax` write if the notice came before their first step.
const FIRST_STEP: &[u8] = b"muster/preemption/first_step";
/// The barrier at which the tasks wait until all have written their steps. If some tasks are missing, native workers meet at
/// a barrier of those that live, whose id is this one, a slash, and a hash of the members.
pub const PREEMPTION_BARRIER: &str = "PREEMPTION_SYNC_BARRIER";

/// A coordinated save.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct PreemptionView {
    /// The content of the notice: the time at which the machines will be gone, as text.
    pub notice: String,
    /// The time at which the notice was written.
    pub since: Timestamp,
    /// The operator who requested it, if one did.
    #[serde(default)]
    pub requested: Option<DrainRequest>,
    /// The step at which each task learned of the notice.
    pub acknowledged: Vec<(TaskId, i64)>,
    /// The number of tasks that have arrived at the barrier of the agreement.
    #[serde(default)]
    pub arrived: usize,
    /// The tasks that the agreement waits for: live ones that have not acknowledged, and members of that
    /// barrier that have not arrived. A task that restarted after it had acknowledged is among them.
    #[serde(default)]
    pub awaited: Vec<TaskId>,
    /// Whether the tasks have not agreed on a step and will not: that barrier failed, or the run has ended.
    #[serde(default)]
    pub failed: bool,
    /// The step at which all tasks save, once all have arrived at that barrier. If no task had begun a step by then, this
    /// is 1 until the first step of the run is known.
    pub agreed_step: Option<i64>,
}

/// Returns whether tasks agree on a step at the barrier with this id.
#[must_use]
pub fn is_preemption_barrier(id: &str) -> bool {
    id.strip_prefix(PREEMPTION_BARRIER).is_some_and(|rest| rest.is_empty() || rest.starts_with('/'))
}

fn is_preemption_key(key: &BarrierKey) -> bool {
    matches!(key, BarrierKey::Named(id) if is_preemption_barrier(id))
}

impl Run {
    pub(super) fn preemption(&self) -> Option<PreemptionView> {
        let notice = self.store.get(PREEMPTION_NOTICE)?;
        let mut acknowledged: Vec<(TaskId, i64)> = self
            .store
            .list_below(PREEMPTION_STEPS)
            .iter()
            .filter_map(|(key, value)| {
                let key = std::str::from_utf8(key).ok()?;
                // `…/job:jax_worker/replica:0/task:1` up to 0.8.3, `…/1` later.
                let task = key.rsplit(['/', ':']).next()?.parse().ok()?;
                Some((TaskId(task), std::str::from_utf8(value).ok()?.parse().ok()?))
            })
            .collect();
        acknowledged.sort_unstable();
        let instance = self.barriers.in_progress().find(|(key, _)| is_preemption_key(key));
        let instance = instance.map(|(_, instance)| instance);
        let ended = self.barriers.ended_with_name_start(PREEMPTION_BARRIER).into_iter();
        let ended: Vec<&EndedBarrier> =
            ended.filter(|(key, _)| is_preemption_key(key)).map(|(_, ended)| ended).collect();
        let agreement = ended.iter().find(|ended| ended.result.is_ok());
        let agreed = agreement.is_some();
        // Native workers cancel the barrier if a member is lost, and meet at another one.
        let has_failed = |ended: &&EndedBarrier| {
            ended.result.as_ref().is_err_and(|failure| failure.code != Code::Cancelled)
        };
        let has_acknowledged = |id: TaskId| acknowledged.binary_search_by_key(&id, |(task, _)| *task).is_ok();
        let is_awaited = |id: &TaskId| match instance.map(|instance| instance.member_state(*id)) {
            Some(Some(MemberState::Missing)) => true,
            Some(_) => false,
            // Before the barrier begins, no task has arrived: each writes its step first and then arrives.
            None => self.expect_task(*id).is_connected(),
        };
        let unheard = |id: &TaskId| self.expect_task(*id).is_connected() && !has_acknowledged(*id);
        let over = self.ended.is_some() || (instance.is_none() && ended.iter().any(has_failed));
        let failed = over && !agreed;
        let open = !agreed && !failed;
        let awaited = self.task_ids().filter(|id| open && (is_awaited(id) || unheard(id))).collect();
        let arrived = instance.map_or(0, BarrierInstance::arrived_count);
        // The steps of tasks that were lost before do not count.
        let is_member =
            |task: TaskId| agreement.is_none_or(|ended| ended.members.position_of(task).is_some());
        let last = acknowledged.iter().filter(|(task, _)| is_member(*task)).map(|(_, step)| *step).max();
        // If no task had begun a step, the common step is the first one of the run, as soon as that is known.
        let first_step = self.store.get(FIRST_STEP).filter(|_| last == Some(0));
        let first_step = first_step.and_then(|entry| std::str::from_utf8(&entry.value).ok()?.parse().ok());
        Some(PreemptionView {
            notice: String::from_utf8_lossy(&notice.value).into_owned(),
            since: notice.at,
            requested: self.drain.clone(),
            awaited,
            arrived,
            failed,
            acknowledged,
            agreed_step: last.filter(|_| agreed).map(|step| first_step.unwrap_or(step.saturating_add(1))),
        })
    }
}
