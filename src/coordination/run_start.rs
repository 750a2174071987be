//! Starts a run: connects all tasks that wait at the registration barrier.
//!
//! `registration.rs` adds tasks to that barrier, and connects tasks that register after the start. Begin at
//! `Run::start_run`.

use std::collections::VecDeque;

use super::barrier_table::{ArrivalCallKind, BarrierInstance};
use super::context::TransitionContext;
use super::ids::TaskId;
use super::run::Run;
use super::task::ProtocolState;
use super::unpublished_events::TaskChange;
use super::waiters::{CallSelection, SharedAnswer};

impl Run {
    /// Starts the run: all tasks have registered, and those at the registration barrier become connected.
    pub(super) fn start_run(&mut self, cx: &mut TransitionContext<'_>, registration: &BarrierInstance) {
        self.started_at = Some(cx.now);
        let tasks = registration.arrived_count();
        let (mut calls, mut connected) = (VecDeque::with_capacity(tasks), VecDeque::with_capacity(tasks));
        self.tasks_without_timer.reserve(tasks);
        for (id, arrival) in registration.arrivals() {
            match arrival.purpose {
                ArrivalCallKind::Register(incarnation)
                    if self.expect_task(id).incarnation == Some(incarnation) =>
                {
                    calls.push_back(arrival.call);
                    if self.mark_connected(cx, id, false) {
                        connected.push_back((id, incarnation));
                    }
                }
                ArrivalCallKind::Register(incarnation) => {
                    self.waiters.remove(arrival.call);
                    cx.reply_to_call(arrival.call, Err(self.superseded_failure(id, incarnation, None)));
                }
                _ => {}
            }
        }
        self.recount_live_set_requests();
        cx.emit_event_for_each_task(TaskChange::Connected, "all tasks have registered", connected);
        self.waiters.queue_answer(CallSelection::List(calls), SharedAnswer::Registered(self.incarnation));
    }

    /// Marks a task as connected; returns whether it was not. `late`: the run has already started.
    pub(super) fn mark_connected(&mut self, cx: &TransitionContext<'_>, id: TaskId, late: bool) -> bool {
        let task = self.expect_task_mut(id);
        let entered = !task.is_connected();
        let unsynced = late && !task.unsynced;
        let watch = !task.has_heartbeat_timer;
        task.standing = ProtocolState::Connected;
        task.last_heartbeat = Some(cx.now);
        task.heartbeat_stats.skip_next_gap();
        task.has_heartbeat_timer = true;
        task.was_connected = true;
        task.unsynced |= late;
        task.is_excused = false;
        if entered {
            task.since = cx.now;
        }
        self.connected_tasks += usize::from(entered);
        self.unsynced_tasks += usize::from(unsynced);
        if watch {
            self.tasks_without_timer.push_back(id);
        }
        self.bump_task_states_version();
        entered
    }
}
