//! Completion of barriers: how an instance passes, fails, times out or is cancelled.
//!
//! `meeting.rs` fills instances; `barrier_stats.rs` measures ended ones. Begin at `Run::pass`.
//!
//! The end of an instance changes the state at once and queues the answers of all members; `Run::work` sends them.
//! Excused tasks (taken out by an exclusion; see `excluding.rs`) are not waited for. Two rules keep a restarted
//! task (a recoverable task that registered again in this run) from blocking the others:
//!
//! 1. an instance that began before a task's present registration does not wait for that task;
//! 2. an instance whose only missing members are unsynced tasks that wait at another instance passes without them.

use std::sync::Arc;

use super::barrier::{BarrierKey, Instance, Slot};
use super::call::Shared;
use super::context::Cx;
use super::event::{Change, RunOutcome};
use super::failure::{Code, Failure};
use super::failure_texts::shutdown_failure;
use super::ids::{CallId, TaskId};
use super::measure::Measure;
use super::run::{Remembered, Run};
use super::timers::Timer;
use super::waiters::{Answer, Calls};

impl Run {
    pub(super) fn pass_if_complete(&mut self, cx: &mut Cx<'_>, key: &BarrierKey) {
        if let Some(instance) = self.barriers.instance(key)
            && instance.missing() == 0
            && instance.arrived() > 0
        {
            let reason = if instance.arrived() == instance.members.len() {
                "all members arrived"
            } else if instance.absent_tasks().any(|id| self.own(id).excused) {
                "all members arrived except excluded ones and ones that have not registered since their exclusion"
            } else {
                "all members arrived except those that restarted after the barrier began"
            };
            self.pass(cx, key, Ok(()), reason);
        }
    }

    /// Rule 2. Looks at every instance, since one arrival may be what several others waited to see.
    pub(super) fn pass_without_unsynced(&mut self, cx: &mut Cx<'_>) {
        if self.unsynced == 0 {
            return;
        }
        let named = self.barriers.in_progress().filter(|(key, _)| key.is_named());
        let keys: Vec<BarrierKey> = named.map(|(key, _)| key.clone()).collect();
        for key in keys {
            let Some(instance) = self.barriers.instance(&key) else { continue };
            if instance.missing() > self.unsynced || instance.missing() == 0 {
                continue;
            }
            let waits_elsewhere = |id: TaskId| {
                let task = self.own(id);
                task.unsynced && task.is_connected() && self.waits_at(id) > 0
            };
            if instance.missing_tasks().all(waits_elsewhere) {
                let reason = "the missing members restarted in this run and wait at another barrier: this one would never be \
                     complete";
                self.pass(cx, &key, Ok(()), reason);
            }
        }
    }

    /// Rule 1: the task has registered again; what began before does not wait for it. The same holds, for every barrier,
    /// once it is excused.
    pub(super) fn release_from_barriers(&mut self, cx: &mut Cx<'_>, id: TaskId) {
        let every = self.own(id).excused;
        let concerned = self.barriers.in_progress().filter(|(key, _)| every || key.is_named());
        let keys: Vec<BarrierKey> = concerned
            .filter(|(_, instance)| instance.slot(id) == Some(Slot::Missing))
            .map(|(key, _)| key.clone())
            .collect();
        for key in keys {
            if let Some(instance) = self.barriers.instance_mut(&key) {
                instance.put(id, Slot::Released);
            }
            self.pass_if_complete(cx, &key);
        }
        self.pass_without_unsynced(cx);
    }

    /// An instance has ended: answers all who came to it and keeps the result.
    pub(super) fn pass(
        &mut self,
        cx: &mut Cx<'_>,
        key: &BarrierKey,
        result: Result<(), Arc<Failure>>,
        reason: &str,
    ) {
        let Some(instance) = self.barriers.dissolve(key) else { return };
        self.timers.clear(instance.deadline, Timer::Barrier(key.clone()));
        let counter = instance.counter;
        let bound = cx.settings.bounds.barrier_memory_bytes;
        self.barriers.end(cx.now, key.clone(), &instance, result.clone(), bound);
        let barrier = self.wire_id(key);
        let id = Arc::clone(&barrier);
        let change = match &result {
            Ok(()) => Change::BarrierPassed { barrier, counter, without: instance.absent_tasks().collect() },
            Err(_) => Change::BarrierFailed { barrier, counter },
        };
        cx.event(change, reason);
        let passed = result.is_ok();
        self.measures.push_back(Measure::new(cx.now, key, id, &instance, passed));
        let calls = || Calls::List(instance.arrivals().map(|(_, arrival)| arrival.call).collect());
        match key {
            BarrierKey::Named(_) => {
                self.leave_named(&instance, passed);
                self.waiters.decide(calls(), Answer::to(&result, Answer::BarrierPassed(counter)));
            }
            BarrierKey::Devices => {
                let devices = if passed { self.gathered() } else { Shared::new(Vec::new()) };
                let answer = Answer::to(&result, Answer::Devices(self.incarnation, devices));
                self.waiters.decide(calls(), answer);
            }
            BarrierKey::Registration => match &result {
                Ok(()) => self.start(cx, &instance),
                Err(failure) => {
                    self.waiters.decide(calls(), Answer::Failed(Arc::clone(failure)));
                    self.registration_failed(cx, failure);
                }
            },
            BarrierKey::Shutdown => {
                let told = result.clone().map_err(|failure| Arc::new(shutdown_failure(&failure)));
                self.waiters.decide(calls(), Answer::to(&told, Answer::Done));
                self.after_shutdown(cx, &instance.members, &result);
            }
        }
    }

    /// The members that had come to a barrier that clients named wait there no more. If it passed with all its members,
    /// they are in step with one another.
    fn leave_named(&mut self, instance: &Instance, passed: bool) {
        for (id, _) in instance.arrivals() {
            self.count_wait(id, -1);
        }
        if self.unsynced == 0 || !passed || instance.arrived() != instance.members.len() {
            return;
        }
        for (id, _) in instance.arrivals() {
            if self.own(id).unsynced {
                self.own_mut(id).unsynced = false;
                self.unsynced -= 1;
            }
        }
    }

    fn registration_failed(&mut self, cx: &mut Cx<'_>, failure: &Arc<Failure>) {
        let text = format!("Cluster registration failed with error: {failure}");
        self.fail_all(cx, Failure::service(Code::Internal, text));
        self.note_first_cause(cx, None, failure);
        self.end(cx, RunOutcome::Failed, failure.why());
    }

    /// An instance fails: `text` is what its callers are told, `why` is for people.
    pub(super) fn fail_instance(
        &mut self,
        cx: &mut Cx<'_>,
        key: &BarrierKey,
        code: Code,
        text: String,
        why: &str,
    ) {
        let Some(counter) = self.barriers.instance(key).map(|instance| instance.counter) else { return };
        let failure = Failure::service(code, text).of_barrier(&self.wire_id(key), counter).because(why);
        self.pass(cx, key, Err(Arc::new(failure)), why);
    }

    /// The deadline of an instance has come.
    pub(super) fn time_out(&mut self, cx: &mut Cx<'_>, key: &BarrierKey) {
        let Some(instance) = self.barriers.instance(key) else { return };
        let (arrived, members) = (instance.arrived(), instance.members.len());
        let missing = self.describe_all(instance.missing_tasks());
        let text = format!(
            "Barrier timed out. Id: {}::{}. This usually happens because a task triggered the barrier too early or too \
             slowly. Please look at the task logs (both timed out and first task) to debug further.\n# of tasks that \
             reached the barrier: {arrived}/{members}.\nThe first task at the barrier: {}. Some timed out task names:\n\
             {missing}",
            self.wire_id(key),
            instance.counter,
            self.describe(instance.first),
        );
        let why = format!("timed out with {arrived} of {members} tasks at the barrier; missing: {missing}");
        self.fail_instance(cx, key, Code::DeadlineExceeded, text, &why);
    }

    /// These tasks, ascending, take part no more in any barrier in progress: recoverable ones are waited for again, without
    /// another one nothing can complete. `reason` is for those who wait, `why` for people.
    pub(super) fn leave_all_barriers(&mut self, cx: &mut Cx<'_>, tasks: &[TaskId], reason: &str, why: &str) {
        let keys: Vec<BarrierKey> = self.barriers.in_progress().map(|(key, _)| key.clone()).collect();
        for key in keys {
            let Some(instance) = self.barriers.instance(&key) else { continue };
            let counter = instance.counter;
            let leaving = instance.members_among(tasks);
            let barrier = self.wire_id(&key);
            if let Some(id) = leaving.iter().copied().find(|id| !self.own(*id).recoverable) {
                let text = format!(
                    "Barrier failed because: {reason}. Barrier Id: {barrier}, Task: {}",
                    self.describe(id)
                );
                let why = format!("cannot pass without {}: {why}", self.describe(id));
                self.fail_instance(cx, &key, Code::Internal, text, &why);
                continue;
            }
            for id in leaving {
                let Some(instance) = self.barriers.instance(&key) else { break };
                let Some(Slot::Arrived(arrival)) = instance.slot(id) else { continue };
                self.leave_barrier(&key, id, arrival.call);
                self.waiters.remove(arrival.call);
                let text = format!(
                    "Stale barrier invocation is cancelled because: {reason}. Barrier: {barrier}::{counter} Task {id}"
                );
                let failure = Failure::service(Code::Cancelled, text).of_barrier(&barrier, counter);
                cx.reply(arrival.call, Err(Arc::new(failure)));
            }
        }
    }

    /// The task's arrival with this call does not count any more; the caller deals with the call itself.
    pub(super) fn leave_barrier(&mut self, key: &BarrierKey, id: TaskId, call: CallId) {
        let left = if self.own(id).excused { Slot::Released } else { Slot::Missing };
        let Some(instance) = self.barriers.instance_mut(key) else { return };
        // A call whose answer is decided stands in no slot; the slot may be that of the next use.
        if !matches!(instance.slot(id), Some(Slot::Arrived(arrival)) if arrival.call == call) {
            return;
        }
        instance.put(id, left);
        if key.is_named() {
            self.count_wait(id, -1);
        }
        self.dissolve_if_empty(key);
    }

    /// An instance that nobody waits at is as if it had never begun.
    pub(super) fn dissolve_if_empty(&mut self, key: &BarrierKey) {
        if self.barriers.instance(key).is_some_and(|instance| instance.arrived() == 0)
            && let Some(instance) = self.barriers.dissolve(key)
        {
            self.timers.clear(instance.deadline, Timer::Barrier(key.clone()));
        }
    }

    pub(super) fn cancel_barrier(
        &mut self,
        cx: &mut Cx<'_>,
        id: TaskId,
        name: String,
        counter: i64,
    ) -> Result<(), Failure> {
        let name: Arc<str> = name.into();
        let key = BarrierKey::Named(Arc::clone(&name));
        let refuse = |text: String, known| {
            Err(Failure::service(Code::FailedPrecondition, text).of_barrier(&name, known))
        };
        if self.task(id).is_none() {
            return Err(self.unknown("cancelled a barrier", id));
        }
        let running = self.barriers.instance(&key).map(|instance| instance.counter);
        let ended = self.barriers.ended(&key).map(|ended| (ended.counter, ended.result.is_ok()));
        match (running, ended) {
            (Some(known), _) if known == counter => {
                let text = format!("Barrier ({name}::{counter}) is cancelled by task: {}", self.describe(id));
                let why = format!("cancelled by {}", self.describe(id));
                self.fail_instance(cx, &key, Code::Cancelled, text, &why);
                Ok(())
            }
            (Some(known), _) => refuse(not_the_instance(&name, counter, known), known),
            (None, Some((known, ok))) if known == counter => {
                let how = if ok { "has passed" } else { "has failed" };
                refuse(format!("Barrier ({name}::{counter}) has already been passed: it {how}."), known)
            }
            (None, Some((known, _))) => refuse(not_the_instance(&name, counter, known), known),
            (None, None) => refuse(
                format!("Barrier ({name}::{counter}) cannot be cancelled: nobody has begun it."),
                counter,
            ),
        }
    }

    /// The devices of all tasks, once the exchange is over; shared by all who ask.
    pub(super) fn gathered(&mut self) -> Arc<Shared<Vec<bytes::Bytes>>> {
        if let Some(devices) = &self.gathered.0 {
            return Arc::clone(devices);
        }
        let devices = Shared::new(self.exchanged.values().flatten().cloned().collect());
        self.gathered = Remembered(Some(Arc::clone(&devices)));
        devices
    }
}

fn not_the_instance(name: &str, counter: i64, known: i64) -> String {
    format!(
        "Barrier ({name}::{counter}) is cancelled by task, but the service thinks it is the {known}-th instance. This \
         is likely due to a restart in the task or service."
    )
}
