//! Handles the arrival of tasks at barriers: decides which instance a call joins or begins, and which tasks are its
//! members. Begin at `Run::arrive_at_barrier`.
//!
//! `barrier_completion.rs` decides when an instance passes, and `barrier_ends_and_task_removal.rs` ends instances.
//!
//! A barrier id can be used many times. Each use is an instance with a counter. All instances of an id have the
//! members of the first one. JAX clients count the instances too, so the rules are those of jaxlib's C++ service:
//!
//! - *Members.* If a call names other members than the first instance has, or if its task is not a member, the
//!   instance that the call joins or begins fails for all its members. If the job does not have the caller's task id,
//!   the call is refused without an effect on other tasks.
//! - *Counter.* If the counter of a call does not fit, the call is refused. If an instance is in progress and the
//!   counter is not negative, this instance then fails for all its members.
//! - *Repeated call.* If no instance is in progress and a call has the counter of the last instance, the call gets
//!   the result of that instance again. The first answer may have been lost with the task's connection.
//! - *Restart.* A restarted process counts from 0. So a recoverable task with counter 0 joins the instance in
//!   progress, or begins the next one. There is one exception. If instance 0 is the last one that ended, it passed,
//!   and the same process took part in it, the call counts as a repeated call.
//! - *Task left behind.* If a barrier passes without a task, the task's counter is lower than the counters of the
//!   other members. The task still joins the instance in progress, or begins the next one, because a counter mismatch
//!   would fail the instance for all members. The task never gets the result of the last instance, because with that
//!   result it would pass alone.
//! - *Hang-up.* If a caller hangs up, its task is missing again. An instance without arrivals is removed.

use std::sync::Arc;
use std::time::Duration;

use super::barrier_table::{
    ArrivalCallKind, ArrivedCall, BarrierInstance, BarrierKey, BarrierMembers, MemberState,
};
use super::context::TransitionContext;
use super::event::EventKind;
use super::failure::{Code, Failure};
use super::ids::{CallId, ConnectionId, TaskId, Timestamp};
use super::request_reply::{Reply, TaskSet};
use super::run::Run;
use super::settings::JobBounds;
use super::shared_failures::failed_shutdown_failure;
use super::timers::Timer;
use super::waiters::WaitTarget;

/// The effect of a call with a given counter.
enum BarrierCounterDecision {
    /// The call begins an instance with this counter.
    Begin(i64),
    /// The call joins the instance in progress.
    Join,
    /// The call asks again for the result of the last instance.
    Repeat,
    /// The caller's counter differs from the service's, which is given. The instance in progress, if there is
    /// one, fails for all its members, because they are out of step.
    Mismatch(i64),
}

/// A client's call to a barrier.
struct BarrierCall {
    call: CallId,
    connection: ConnectionId,
    task: TaskId,
    name: Arc<str>,
    key: BarrierKey,
    /// The members that the call names, as far as the job has them.
    members: BarrierMembers,
    /// A task that the call names and that the job does not have.
    stranger: Option<TaskId>,
}

impl BarrierCall {
    fn to_arrived_call(&self, now: Timestamp) -> ArrivedCall {
        ArrivedCall { call: self.call, purpose: ArrivalCallKind::Arrive, at: now }
    }

    fn refuse_call(&self, cx: &mut TransitionContext<'_>, code: Code, text: String, last: i64) {
        let failure = Failure::from_service(code, text).with_barrier(&self.name, last);
        cx.reply_to_call(self.call, Err(Arc::new(failure)));
    }

    /// Returns what is wrong with the call to an instance with the members `fixed`, if anything.
    fn members_mismatch_text(&self, fixed: &BarrierMembers) -> Option<String> {
        let Self { task, name, stranger, .. } = self;
        if let Some(stranger) = stranger {
            return Some(format!(
                "Unexpected task ({stranger}) that is not in the cluster called the barrier. Barrier Id: {name}"
            ));
        }
        if *fixed != self.members {
            return Some(format!(
                "Conflicting tasks specified by different processes for the same barrier: {name}. Check that the callers \
                 are invoking the barrier with the same arguments."
            ));
        }
        (fixed.position_of(*task).is_none())
            .then(|| format!("A non-participating task ({task}) called the barrier: {name}"))
    }
}

impl Run {
    /// Handles a client's call to a barrier.
    #[expect(clippy::too_many_arguments, reason = "what a barrier call is made of")]
    pub(super) fn arrive_at_barrier(
        &mut self,
        cx: &mut TransitionContext<'_>,
        call: CallId,
        connection: ConnectionId,
        id: TaskId,
        name: String,
        counter: i64,
        timeout_ms: i64,
        members: Option<TaskSet>,
    ) {
        let bound = cx.settings.bounds.barrier_id_bytes;
        if name.len() > bound {
            let text = format!("The barrier id has {} bytes; at most {bound} are allowed.", name.len());
            return cx
                .reply_to_call(call, Err(Arc::new(Failure::from_service(Code::ResourceExhausted, text))));
        }
        let name = self.share_barrier_id(name);
        let stranger = members.as_ref().and_then(|set| self.first_unknown_task(set));
        let members = members
            .map(|set| self.known_tasks_of(set))
            .filter(|set| set.ids().len() < self.tasks.len())
            .map_or_else(|| self.all_tasks_as_members(), BarrierMembers::Some);
        let key = BarrierKey::Named(Arc::clone(&name));
        let barrier_call = BarrierCall { call, connection, task: id, name, key, members, stranger };
        if self.task(id).is_none() {
            let text = format!(
                "A non-participating task ({id}) called the barrier: {}. It is not in this job.",
                barrier_call.name
            );
            return barrier_call.refuse_call(cx, Code::InvalidArgument, text, counter);
        }
        match self.decide_by_barrier_counter(&barrier_call.key, id, counter) {
            BarrierCounterDecision::Begin(counter) => {
                let timeout = Duration::from_millis(u64::try_from(timeout_ms).unwrap_or(0));
                self.begin_barrier_with_call(cx, &barrier_call, counter, timeout);
            }
            BarrierCounterDecision::Join => self.join_barrier(cx, &barrier_call, counter),
            BarrierCounterDecision::Repeat => self.answer_with_last_result(cx, &barrier_call, counter),
            BarrierCounterDecision::Mismatch(known) => {
                self.refuse_barrier_counter(cx, &barrier_call, counter, known)
            }
        }
    }

    /// Begins an instance with its first arrival.
    fn begin_barrier_with_call(
        &mut self,
        cx: &mut TransitionContext<'_>,
        barrier_call: &BarrierCall,
        counter: i64,
        timeout: Duration,
    ) {
        let BarrierCall { call, connection, task, key, .. } = barrier_call;
        let kept = self.barriers.last_ended(key).map(|ended| ended.members.clone());
        let fixed = kept.unwrap_or_else(|| barrier_call.members.clone());
        if let Some(text) = self.exceeded_barrier_bound_text(&fixed, &cx.settings.bounds) {
            return barrier_call.refuse_call(cx, Code::ResourceExhausted, text, counter - 1);
        }
        let misuse = barrier_call.members_mismatch_text(&fixed);
        match (self.begin_barrier_instance(cx, key, counter, fixed, timeout, *task), misuse) {
            // The other members, which arrive later, get the error too: JAX programs rely on it.
            (Ok(()), Some(text)) => {
                self.fail_barrier(cx, key, Code::InvalidArgument, text.clone(), &text);
                barrier_call.refuse_call(cx, Code::InvalidArgument, text, counter);
            }
            (Ok(()), None) => {
                self.record_barrier_arrival(cx, key, *task, *connection, barrier_call.to_arrived_call(cx.now))
            }
            (Err(failure), _) => cx.reply_to_call(*call, Err(failure)),
        }
    }

    /// Joins the instance in progress.
    fn join_barrier(&mut self, cx: &mut TransitionContext<'_>, barrier_call: &BarrierCall, counter: i64) {
        let BarrierCall { connection, task, key, .. } = barrier_call;
        let misuse = self
            .barriers
            .instance(key)
            .and_then(|instance| barrier_call.members_mismatch_text(&instance.members));
        if let Some(text) = misuse {
            self.fail_barrier(cx, key, Code::InvalidArgument, text.clone(), &text);
            let counter = self.barriers.last_ended(key).map_or(counter, |ended| ended.counter);
            return barrier_call.refuse_call(cx, Code::InvalidArgument, text, counter);
        }
        self.record_barrier_arrival(cx, key, *task, *connection, barrier_call.to_arrived_call(cx.now));
    }

    /// Answers with the result of the last instance.
    fn answer_with_last_result(
        &mut self,
        cx: &mut TransitionContext<'_>,
        barrier_call: &BarrierCall,
        counter: i64,
    ) {
        let Some(ended) = self.barriers.last_ended(&barrier_call.key) else { return };
        match barrier_call.members_mismatch_text(&ended.members) {
            Some(text) => barrier_call.refuse_call(cx, Code::InvalidArgument, text, counter),
            None => {
                let outcome = ended.result.clone().map(|()| Reply::BarrierPassed(ended.counter));
                cx.reply_to_call(barrier_call.call, outcome);
            }
        }
    }

    /// Refuses a counter that differs from the service's, and fails the instance in progress.
    fn refuse_barrier_counter(
        &mut self,
        cx: &mut TransitionContext<'_>,
        barrier_call: &BarrierCall,
        counter: i64,
        known: i64,
    ) {
        let BarrierCall { task, key, name, .. } = barrier_call;
        let text = counter_mismatch_text(name, counter, known);
        if counter >= 0 && known >= 0 && self.barriers.instance(key).is_some() {
            self.remove_earlier_arrival_of(cx, key, *task);
            self.fail_barrier(cx, key, Code::Internal, text.clone(), &text);
        }
        barrier_call.refuse_call(cx, Code::Internal, text, known);
    }

    /// Returns why no further barrier may begin, if a bound is reached.
    fn exceeded_barrier_bound_text(&self, members: &BarrierMembers, bounds: &JobBounds) -> Option<String> {
        let barriers = self.barriers.in_progress_count();
        if barriers >= bounds.barriers_in_progress {
            return Some(format!(
                "{barriers} barriers are in progress, the most allowed (setting bounds.barriers-in-progress)."
            ));
        }
        let all = self.barriers.member_count_in_progress() + members.len();
        let most = bounds.barrier_members_in_progress.max(self.tasks.len());
        (all > most).then(|| {
            format!(
                "The {barriers} barriers in progress and this one have {all} members, {most} are allowed (setting \
                 bounds.barrier-members-in-progress)."
            )
        })
    }

    fn first_unknown_task(&self, set: &TaskSet) -> Option<TaskId> {
        // The ids are ascending, so an unknown task is the first or the last.
        let (first, last) = (set.ids().first()?, set.ids().last()?);
        [*first, *last].into_iter().find(|task| self.task(*task).is_none())
    }

    fn decide_by_barrier_counter(
        &self,
        key: &BarrierKey,
        id: TaskId,
        counter: i64,
    ) -> BarrierCounterDecision {
        let ended = self.barriers.last_ended(key);
        let behind = |known: i64| counter <= known && ended.is_some_and(|ended| ended.lagging.contains(&id));
        let recoverable = self.expect_task(id).recoverable;
        // An answer may be lost with its connection. The process that took part asks again and gets the same
        // result; a process that has registered since counts from 0 and takes part in the next instance.
        if recoverable
            && counter == 0
            && ended.is_some_and(|ended| {
                ended.is_passed_first_instance_with(id, self.expect_task(id).registered_at)
            })
        {
            return BarrierCounterDecision::Repeat;
        }
        if let Some(instance) = self.barriers.instance(key) {
            // A restarted task counts from 0 again, and a task that a barrier passed without counts behind:
            // both join the instance in progress.
            let known = instance.counter;
            let joins = counter == known || (recoverable && counter == 0) || behind(known);
            return if joins {
                BarrierCounterDecision::Join
            } else {
                BarrierCounterDecision::Mismatch(known)
            };
        }
        match ended.map(|ended| ended.counter) {
            None if counter == 0 => BarrierCounterDecision::Begin(0),
            // The mismatch tells the client to count from 0, so its next call begins the barrier.
            None => BarrierCounterDecision::Mismatch(-1),
            Some(last) if Some(counter) == last.checked_add(1) => BarrierCounterDecision::Begin(counter),
            Some(last) if recoverable && counter == 0 => {
                BarrierCounterDecision::Begin(last.saturating_add(1))
            }
            // This task did not take part in the last instance; with that result it would pass alone.
            Some(last) if behind(last) => BarrierCounterDecision::Begin(last.saturating_add(1)),
            Some(last) if counter == last => BarrierCounterDecision::Repeat,
            Some(last) => BarrierCounterDecision::Mismatch(last),
        }
    }

    /// Begins an instance.
    ///
    /// # Errors
    /// Returns the failure of the instance if a member is in error and cannot arrive: the instance ends at
    /// once.
    pub(super) fn begin_barrier_instance(
        &mut self,
        cx: &mut TransitionContext<'_>,
        key: &BarrierKey,
        counter: i64,
        members: BarrierMembers,
        timeout: Duration,
        first: TaskId,
    ) -> Result<(), Arc<Failure>> {
        let mut excused = Vec::new();
        let in_error = (0..members.len()).map(|position| members.task_at(position)).find_map(|id| {
            let task = self.expect_task(id);
            if task.is_excused {
                excused.push(id);
            }
            let failure = task.failure().filter(|_| !task.recoverable)?;
            Some((id, Arc::clone(failure)))
        });
        let wire_id = self.id_of_barrier_for_clients(key);
        if let Some((id, failure)) = in_error {
            let text = format!(
                "Task ({id}) is already in error before the barrier was called. Barrier Id: {wire_id}::{counter} Task \
                 error: {failure}"
            );
            let failure =
                Arc::new(Failure::from_service(Code::Internal, text).with_barrier(&wire_id, counter));
            let result = Err(Arc::clone(&failure));
            let bound = cx.settings.bounds.barrier_memory_bytes;
            let instance = BarrierInstance::new(counter, members, cx.now, cx.now, first);
            self.barriers.record_result(cx.now, key.clone(), &instance, result.clone(), bound);
            if *key == BarrierKey::Shutdown {
                self.finish_shutdown(cx, &instance.members, &result);
            }
            return Err(failure);
        }
        let deadline = cx.now.after(timeout);
        self.timers.set(deadline, Timer::Barrier(key.clone()));
        let size = members.len();
        let mut instance = BarrierInstance::new(counter, members, cx.now, deadline, first);
        for member in excused {
            instance.set_member_state(member, MemberState::NotRequired);
        }
        self.barriers.insert_instance(key.clone(), instance);
        cx.emit_event(
            EventKind::BarrierStarted { barrier: wire_id, counter },
            format!("{} arrived first of {size}", self.describe_task(first)),
        );
        Ok(())
    }

    /// Records that a member has arrived at an instance in progress.
    pub(super) fn record_barrier_arrival(
        &mut self,
        cx: &mut TransitionContext<'_>,
        key: &BarrierKey,
        id: TaskId,
        connection: ConnectionId,
        arrival: ArrivedCall,
    ) {
        if !self.admit_barrier_arrival(cx, key, id, connection, arrival.call) {
            return;
        }
        let Some(instance) = self.barriers.instance_mut(key) else { return };
        let counter = instance.counter;
        match instance.set_member_state(id, MemberState::Arrived(arrival)) {
            // The task is no member; the callers have checked that there is none.
            None => return,
            Some(MemberState::Arrived(old)) => self.replace_barrier_arrival(cx, key, counter, id, old),
            Some(_) if key.is_client_barrier() => self.adjust_barrier_wait_count(id, 1),
            Some(_) => {}
        }
        self.waiters.insert(arrival.call, connection, WaitTarget::Barrier(key.clone(), id));
        self.pass_barrier_if_complete(cx, key);
        self.pass_barriers_missing_unsynced_waiters(cx);
    }

    /// Checks whether one more call may wait at an instance, and refuses the call otherwise. A call that replaces an
    /// earlier one of its task always may.
    pub(super) fn admit_barrier_arrival(
        &mut self,
        cx: &mut TransitionContext<'_>,
        key: &BarrierKey,
        id: TaskId,
        connection: ConnectionId,
        call: CallId,
    ) -> bool {
        let replaces = matches!(
            self.barriers.instance(key).and_then(|i| i.member_state(id)),
            Some(MemberState::Arrived(_))
        );
        let admitted = replaces || self.admit_waiter(cx, call, connection);
        if !admitted {
            self.remove_barrier_if_empty(key);
        }
        admitted
    }

    /// Replaces a waiting call by a newer call of the same task.
    fn replace_barrier_arrival(
        &mut self,
        cx: &mut TransitionContext<'_>,
        key: &BarrierKey,
        counter: i64,
        id: TaskId,
        old: ArrivedCall,
    ) {
        self.waiters.remove(old.call);
        let failure = match old.purpose {
            ArrivalCallKind::Register(incarnation) => self.superseded_failure(id, incarnation, None),
            purpose => {
                let text = format!(
                    "Cancelled because there's a more recent barrier call for {}::{counter} from the same task.",
                    self.id_of_barrier_for_clients(key)
                );
                let failure = Failure::without_details(Code::Cancelled, text);
                Arc::new(if purpose == ArrivalCallKind::ShutDown {
                    failed_shutdown_failure(&failure)
                } else {
                    failure
                })
            }
        };
        cx.reply_to_call(old.call, Err(failure));
    }

    /// Removes the task's waiting call before a newer call of the same task fails the instance.
    fn remove_earlier_arrival_of(&mut self, cx: &mut TransitionContext<'_>, key: &BarrierKey, id: TaskId) {
        let Some(instance) = self.barriers.instance_mut(key) else { return };
        let Some(MemberState::Arrived(old)) = instance.member_state(id) else { return };
        let counter = instance.counter;
        instance.set_member_state(id, MemberState::Missing);
        if key.is_client_barrier() {
            self.adjust_barrier_wait_count(id, -1);
        }
        self.replace_barrier_arrival(cx, key, counter, id, old);
    }

    pub(super) fn arrive_at_device_exchange(
        &mut self,
        cx: &mut TransitionContext<'_>,
        call: CallId,
        connection: ConnectionId,
        id: TaskId,
        devices: Vec<bytes::Bytes>,
    ) {
        if self.task(id).is_none() {
            let failure = self.unknown_task_failure("exchanged devices", id);
            return cx.reply_to_call(call, Err(Arc::new(failure)));
        }
        let key = BarrierKey::Devices;
        if let Some(result) = self.barriers.last_ended(&key).map(|ended| ended.result.clone()) {
            let reply = Reply::Devices(self.incarnation, self.exchanged_devices());
            return cx.reply_to_call(call, result.map(|()| reply));
        }
        // Each task has an equal share of the bound, so the first to arrive cannot use all of it.
        let bytes: usize = devices.iter().map(|device| device.len() + size_of::<bytes::Bytes>()).sum();
        let share = cx.settings.bounds.exchanged_device_bytes / self.tasks.len().max(1);
        if bytes > share {
            let text = format!(
                "The devices of task {id} take {bytes} bytes; {share} are each task's share (setting \
                 bounds.exchanged-device-bytes)."
            );
            return cx
                .reply_to_call(call, Err(Arc::new(Failure::from_service(Code::ResourceExhausted, text))));
        }
        self.exchanged.insert(id, devices);
        const DEVICE_EXCHANGE_TIMEOUT: Duration = Duration::from_secs(60 * 60);
        if self.barriers.instance(&key).is_none()
            && let Err(failure) = self.begin_barrier_instance(
                cx,
                &key,
                0,
                self.all_tasks_as_members(),
                DEVICE_EXCHANGE_TIMEOUT,
                id,
            )
        {
            return cx.reply_to_call(call, Err(failure));
        }
        self.record_barrier_arrival(
            cx,
            &key,
            id,
            connection,
            ArrivedCall { call, purpose: ArrivalCallKind::ExchangeDevices, at: cx.now },
        );
    }
}

fn counter_mismatch_text(name: &str, counter: i64, known: i64) -> String {
    let reason = if counter == 0 || known <= 0 {
        "The service or task probably restarted, check the earlier logs to debug further."
    } else {
        "One task is probably way too quick / slow in its execution: for example, its last use of this barrier timed out \
         before another task came to it even once."
    };
    format!(
        "Barrier ({name}::{counter}) is invoked by the task, but the service thinks it is the {known}-th instance. {reason}"
    )
}
