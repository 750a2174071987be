//! Handles live-set requests. A request names a set of tasks. When every live task of this set has called, all
//! callers receive the same answer.
//!
//! The rules of registration, failure, shutdown and exclusion decide which tasks are live. A request stores the
//! number of live members that have not called yet, so a call needs no pass over the other members. Begin at
//! `Run::handle_live_set_call`.

use std::collections::BTreeSet;
use std::sync::Arc;

use super::context::TransitionContext;
use super::failure::{Code, Failure};
use super::ids::{CallId, ConnectionId, TaskId, TaskIncarnation};
use super::live_set_request::LiveSetRequest;
use super::request_reply::{LiveSet, TaskSet};
use super::run::Run;
use super::task::Task;
use super::waiters::{CallSelection, SharedAnswer, WaitTarget};
use crate::cow::CowMap;

impl Run {
    pub(super) fn handle_live_set_call(
        &mut self,
        cx: &mut TransitionContext<'_>,
        call: CallId,
        connection: ConnectionId,
        id: TaskId,
        set: TaskSet,
    ) {
        if !set.contains(id) {
            let text =
                format!("Requesting task {id} is not one of the tasks specified in a GetAliveTasks request.");
            return cx
                .reply_to_call(call, Err(Arc::new(Failure::without_details(Code::InvalidArgument, text))));
        }
        // Ids that the job does not have are never live, so they do not count.
        let set = self.known_tasks_of(set);
        if !self.live_set_requests.contains_key(&set)
            && self.live_set_requests.len() >= cx.settings.bounds.live_sets_in_progress
        {
            let text = format!(
                "{} live-set questions are in progress, the most allowed (setting bounds.live-sets-in-progress).",
                self.live_set_requests.len()
            );
            return cx
                .reply_to_call(call, Err(Arc::new(Failure::from_service(Code::ResourceExhausted, text))));
        }
        if !self.admit_waiter(cx, call, connection) {
            return;
        }
        let live = self.task(id).is_some_and(|task| task.is_connected());
        if !self.live_set_requests.contains_key(&set) {
            let awaited = set.ids().iter().filter(|id| self.expect_task(**id).is_connected()).count();
            let question = LiveSetRequest {
                since: cx.now,
                first: id,
                last: (id, cx.now),
                callers: CowMap::default(),
                awaited,
            };
            self.live_set_requests.insert(set.clone(), question);
        }
        let Some(question) = self.live_set_requests.get_mut(&set) else { return };
        match question.callers.get_mut(&id) {
            Some(calls) => drop(calls.insert(call)),
            None => {
                question.callers.insert(id, BTreeSet::from([call]));
                question.awaited -= usize::from(live);
                question.last = (id, cx.now);
            }
        }
        self.waiters.insert(call, connection, WaitTarget::LiveSet(set.clone(), id));
        self.answer_live_set_if_complete(&set);
    }

    fn answer_live_set_if_complete(&mut self, set: &TaskSet) {
        if self.live_set_requests.get(set).is_none_or(|question| question.awaited > 0) {
            return;
        }
        let Some(question) = self.live_set_requests.remove(set) else { return };
        let live: LiveSet = set
            .ids()
            .iter()
            .filter(|id| self.expect_task(**id).is_connected())
            .map(|id| (*id, self.expect_task(*id).incarnation.unwrap_or(TaskIncarnation(0))))
            .collect();
        self.waiters
            .queue_answer(CallSelection::OfTasks(question.callers), SharedAnswer::LiveSet(Arc::new(live)));
    }

    /// Records that a task became live: requests for its sets wait for it too, unless it has called.
    pub(super) fn add_to_live_set_requests(&mut self, id: TaskId) {
        for (set, question) in &mut self.live_set_requests {
            if set.contains(id) && !question.callers.contains_key(&id) {
                question.awaited += 1;
            }
        }
    }

    /// Records that these live tasks are no longer live: requests stop waiting for them.
    pub(super) fn remove_from_live_set_requests(&mut self, tasks: &[TaskId]) {
        let &[id] = tasks else { return self.recount_live_set_requests() };
        for (set, question) in &mut self.live_set_requests {
            if set.contains(id) && !question.callers.contains_key(&id) {
                question.awaited -= 1;
            }
        }
        self.answer_complete_live_set_requests();
    }

    /// Counts the missing callers of every request again, after many tasks became live or ceased to be.
    pub(super) fn recount_live_set_requests(&mut self) {
        let tasks = &self.tasks;
        for (set, question) in &mut self.live_set_requests {
            let is_live = |id: TaskId| {
                usize::try_from(id.0).ok().and_then(|place| tasks.get(place)).is_some_and(Task::is_connected)
            };
            let awaits = |id: &&TaskId| is_live(**id) && !question.callers.contains_key(*id);
            question.awaited = set.ids().iter().filter(awaits).count();
        }
        self.answer_complete_live_set_requests();
    }

    /// Answers the requests that wait for no task.
    fn answer_complete_live_set_requests(&mut self) {
        let agreed = self.live_set_requests.iter().filter(|(_, question)| question.awaited == 0);
        let agreed: Vec<TaskSet> = agreed.map(|(set, _)| set.clone()).collect();
        for set in agreed {
            self.answer_live_set_if_complete(&set);
        }
    }

    /// Answers the live-set calls of a task with `failure`, as if it had not called.
    pub(super) fn cancel_live_set_calls_of(&mut self, id: TaskId, failure: &Arc<Failure>) {
        let live = self.task(id).is_some_and(Task::is_connected);
        let waiters = &mut self.waiters;
        self.live_set_requests.retain(|_, question| {
            if let Some(calls) = question.callers.remove(&id) {
                question.awaited += usize::from(live);
                waiters.queue_answer(CallSelection::Set(calls), SharedAnswer::Failed(Arc::clone(failure)));
            }
            !question.callers.is_empty()
        });
        self.answer_complete_live_set_requests();
    }

    /// Withdraws a call whose caller no longer waits, as if it had not been made.
    pub(super) fn withdraw_live_set_call(&mut self, set: &TaskSet, id: TaskId, call: CallId) {
        let live = self.task(id).is_some_and(|task| task.is_connected());
        let Some(question) = self.live_set_requests.get_mut(set) else { return };
        let Some(calls) = question.callers.get_mut(&id) else { return };
        // A call whose answer is decided is in no request; this request may be a later one for the same set.
        if calls.remove(&call) && calls.is_empty() {
            question.callers.remove(&id);
            question.awaited += usize::from(live);
        }
        if question.callers.is_empty() {
            self.live_set_requests.remove(set);
        } else {
            self.answer_live_set_if_complete(set);
        }
    }
}
