//! The views of barriers and live-set requests in progress.
//!
//! Ended barriers are described in `barrier_record.rs`. Begin at [`BarrierView`].

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::coordination::barrier_record::{BarrierArrival, BarrierKind};
use crate::coordination::barrier_table::{BarrierInstance, BarrierKey};
use crate::coordination::ids::{TaskId, Timestamp};
use crate::coordination::live_set_request::LiveSetRequest;
use crate::coordination::request_reply::TaskSet;
use crate::coordination::run::Run;

/// The greatest number of arrivals shown for a barrier in progress.
const ARRIVALS_SHOWN: usize = 256;
/// The name under which a waiting live-set request is shown.
pub(super) const LIVE_SET_REQUEST: &str = "live-set question";

/// A barrier in progress.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct BarrierView {
    /// Its id.
    pub id: String,
    /// The counter of the instance.
    pub counter: i64,
    /// The kind of the barrier.
    pub kind: BarrierKind,
    /// The number of members.
    pub members: usize,
    /// The number of members that have arrived.
    pub arrived: usize,
    /// The members that it waits for.
    pub missing: Vec<TaskId>,
    /// The first member to arrive.
    pub first: TaskId,
    /// The time of the first arrival.
    pub since: Timestamp,
    /// The time at which it times out.
    pub deadline: Timestamp,
    /// The latest arrivals, in their order: 256 at most.
    #[serde(default)]
    pub arrivals: Vec<BarrierArrival>,
}

/// A live-set request in progress.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[schema(as = LiveSetView)]
pub struct LiveSetRequestView {
    /// The number of tasks that count: those that have called, and the live ones of the set that have not.
    pub members: usize,
    /// The number of these tasks that have called.
    pub arrived: usize,
    /// The live members that have not called.
    pub missing: Vec<TaskId>,
    /// The first task to call.
    pub first: TaskId,
    /// The time of the first call.
    pub since: Timestamp,
    /// The latest call: its task and time.
    pub last: BarrierArrival,
}

impl Run {
    pub(super) fn barrier_views(&self) -> Vec<BarrierView> {
        let view = |(key, instance): (&BarrierKey, &BarrierInstance)| BarrierView {
            id: key.barrier_id_for_clients(self.incarnation).as_ref().to_owned(),
            counter: instance.counter,
            kind: key.kind(),
            members: instance.members.len(),
            arrived: instance.arrived_count(),
            missing: instance.missing_tasks().collect(),
            first: instance.first,
            since: instance.began,
            deadline: instance.deadline,
            arrivals: latest_arrivals(instance),
        };
        self.barriers.in_progress().map(view).collect()
    }

    pub(super) fn live_set_views(&self) -> Vec<LiveSetRequestView> {
        let views = self.live_set_requests.iter().map(|(set, question)| {
            let missing = self.live_members_that_have_not_called(set, question);
            LiveSetRequestView {
                members: question.callers.len() + missing.len(),
                arrived: question.callers.len(),
                missing,
                first: question.first,
                since: question.since,
                last: BarrierArrival { task: question.last.0, at: question.last.1 },
            }
        });
        views.collect()
    }

    /// Returns the live members of a set that have not called for it yet.
    pub(super) fn live_members_that_have_not_called(
        &self,
        set: &TaskSet,
        question: &LiveSetRequest,
    ) -> Vec<TaskId> {
        let missing =
            |id: &TaskId| self.expect_task(*id).is_connected() && !question.callers.contains_key(id);
        set.ids().iter().copied().filter(missing).collect()
    }
}

/// Returns the latest arrivals at an instance, in their order.
fn latest_arrivals(instance: &BarrierInstance) -> Vec<BarrierArrival> {
    let mut arrivals: Vec<BarrierArrival> =
        instance.arrivals().map(|(task, arrival)| BarrierArrival { task, at: arrival.at }).collect();
    arrivals.sort_by_key(|arrival| (arrival.at, arrival.task));
    arrivals.split_off(arrivals.len().saturating_sub(ARRIVALS_SHOWN))
}
