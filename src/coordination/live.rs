//! Live-set requests: every live task of a set calls, and all receive the same answer.
//!
//! It does not decide which tasks are live: registration, failure, shutdown and exclusion do. A request holds the
//! number of live members that have not called yet, so an arrival needs no pass over the other members. Begin at
//! `Run::ask_live_set`.

use std::collections::BTreeSet;
use std::sync::Arc;

use super::call::{LiveSet, Shared, TaskSet};
use super::context::Cx;
use super::failure::{Code, Failure};
use super::ids::{CallId, ConnectionId, TaskId, TaskIncarnation};
use super::live_set::Question;
use super::run::Run;
use super::task::Task;
use super::waiters::{Answer, Calls, Place};
use crate::cow::CowMap;

impl Run {
    pub(super) fn ask_live_set(
        &mut self,
        cx: &mut Cx<'_>,
        call: CallId,
        connection: ConnectionId,
        id: TaskId,
        set: TaskSet,
    ) {
        if !set.contains(id) {
            let text =
                format!("Requesting task {id} is not one of the tasks specified in a GetAliveTasks request.");
            return cx.reply(call, Err(Arc::new(Failure::plain(Code::InvalidArgument, text))));
        }
        // Ids that the job does not have are not alive, and so of no weight.
        let set = self.without_strangers(set);
        if !self.questions.contains_key(&set)
            && self.questions.len() >= cx.settings.bounds.live_sets_in_progress
        {
            let text = format!(
                "{} live-set questions are in progress, the most allowed (setting bounds.live-sets-in-progress).",
                self.questions.len()
            );
            return cx.reply(call, Err(Arc::new(Failure::service(Code::ResourceExhausted, text))));
        }
        if !self.has_room(cx, call, connection) {
            return;
        }
        let live = self.task(id).is_some_and(|task| task.is_connected());
        if !self.questions.contains_key(&set) {
            let awaited = set.ids().iter().filter(|id| self.own(**id).is_connected()).count();
            let question =
                Question { since: cx.now, first: id, last: (id, cx.now), asked: CowMap::default(), awaited };
            self.questions.insert(set.clone(), question);
        }
        let Some(question) = self.questions.get_mut(&set) else { return };
        match question.asked.get_mut(&id) {
            Some(calls) => drop(calls.insert(call)),
            None => {
                question.asked.insert(id, BTreeSet::from([call]));
                question.awaited -= usize::from(live);
                question.last = (id, cx.now);
            }
        }
        self.waiters.insert(call, connection, Place::LiveSet(set.clone(), id));
        self.answer_if_agreed(&set);
    }

    /// The ids of a set that the job has.
    pub(super) fn without_strangers(&self, set: TaskSet) -> TaskSet {
        let ends = [set.ids().first(), set.ids().last()];
        if ends.into_iter().flatten().all(|id| self.task(*id).is_some()) {
            return set;
        }
        // Ascending, so that strangers stand at the ends, however many there are.
        let from = set.ids().partition_point(|id| id.0 < 0);
        let to = set.ids().partition_point(|id| id.0 < 0 || self.task(*id).is_some());
        TaskSet::new(set.ids()[from..to].to_vec())
    }

    fn answer_if_agreed(&mut self, set: &TaskSet) {
        if self.questions.get(set).is_none_or(|question| question.awaited > 0) {
            return;
        }
        let Some(question) = self.questions.remove(set) else { return };
        let live: LiveSet = set
            .ids()
            .iter()
            .filter(|id| self.own(**id).is_connected())
            .map(|id| (*id, self.own(*id).incarnation.unwrap_or(TaskIncarnation(0))))
            .collect();
        self.waiters.decide(Calls::OfTasks(question.asked), Answer::LiveSet(Shared::new(live)));
    }

    /// A task has become live: questions about it wait for it too, unless it has asked.
    pub(super) fn enter_questions(&mut self, id: TaskId) {
        for (set, question) in &mut self.questions {
            if set.contains(id) && !question.asked.contains_key(&id) {
                question.awaited += 1;
            }
        }
    }

    /// These tasks were live and are live no more: questions do not wait for them.
    pub(super) fn leave_questions(&mut self, tasks: &[TaskId]) {
        let &[id] = tasks else { return self.recount_questions() };
        for (set, question) in &mut self.questions {
            if set.contains(id) && !question.asked.contains_key(&id) {
                question.awaited -= 1;
            }
        }
        self.answer_agreed();
    }

    /// Many tasks have become live or are live no more: questions wait for those that are live and have not asked.
    pub(super) fn recount_questions(&mut self) {
        let tasks = &self.tasks;
        for (set, question) in &mut self.questions {
            let is_live = |id: TaskId| {
                usize::try_from(id.0).ok().and_then(|place| tasks.get(place)).is_some_and(Task::is_connected)
            };
            let awaits = |id: &&TaskId| is_live(**id) && !question.asked.contains_key(*id);
            question.awaited = set.ids().iter().filter(awaits).count();
        }
        self.answer_agreed();
    }

    /// Answers the questions that wait for nobody any more.
    fn answer_agreed(&mut self) {
        let agreed = self.questions.iter().filter(|(_, question)| question.awaited == 0);
        let agreed: Vec<TaskSet> = agreed.map(|(set, _)| set.clone()).collect();
        for set in agreed {
            self.answer_if_agreed(&set);
        }
    }

    /// The calls of a task about live sets are answered with `failure`: it has not asked.
    pub(super) fn drop_questions_of(&mut self, id: TaskId, failure: &Arc<Failure>) {
        let live = self.task(id).is_some_and(Task::is_connected);
        let waiters = &mut self.waiters;
        self.questions.retain(|_, question| {
            if let Some(calls) = question.asked.remove(&id) {
                question.awaited += usize::from(live);
                waiters.decide(Calls::Set(calls), Answer::Failed(Arc::clone(failure)));
            }
            !question.asked.is_empty()
        });
        self.answer_agreed();
    }

    /// A caller does not wait for its answer any more: it has not asked.
    pub(super) fn leave_question(&mut self, set: &TaskSet, id: TaskId, call: CallId) {
        let live = self.task(id).is_some_and(|task| task.is_connected());
        let Some(question) = self.questions.get_mut(set) else { return };
        let Some(calls) = question.asked.get_mut(&id) else { return };
        // A call whose answer is decided is in no question; this one may be the next about the same set.
        if calls.remove(&call) && calls.is_empty() {
            question.asked.remove(&id);
            question.awaited += usize::from(live);
        }
        if question.asked.is_empty() {
            self.questions.remove(set);
        } else {
            self.answer_if_agreed(set);
        }
    }
}
