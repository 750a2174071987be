//! Arrival at barriers: which instance a call means, which tasks are members, and how an instance fills.
//! `barrier_completion.rs` ends instances.
//!
//! A barrier id is used again and again; each use is an instance with a counter. The members of the first instance
//! are those of all later ones. The rules on counters and members are the C++ service's, because clients count
//! along: a task of the job that calls a barrier with other members than its first use has, or that is no member,
//! fails the instance for every member. Two mistakes are refused without an effect on others: those that no client
//! of JAX makes (a first call that does not count from 0, a negative counter), and calls from outside the
//! job.
//! Begin at `Run::arrive_at_barrier`.
//!
//! A barrier that passes without a task leaves that task's counter behind. Such a task joins whatever
//! instance is in progress, whatever its counter, and never gets the last result: with that result it would
//! pass alone, and a counter mismatch would fail the others. A recoverable task that took part in the last
//! instance and asks again with counter 0 gets that result again, because its answer may have been lost with
//! its connection.
//!
//! A caller that hangs up has not arrived: its slot is empty again, and an instance without arrivals is dissolved.

use std::sync::Arc;
use std::time::Duration;

use super::barrier::{Arrival, ArrivalPurpose, BarrierInstance, BarrierKey, BarrierMembers, MemberState};
use super::call::{Reply, TaskSet};
use super::context::TransitionContext;
use super::event::EventKind;
use super::failure::{Code, Failure};
use super::failure_texts::shutdown_failure;
use super::ids::{CallId, ConnectionId, TaskId};
use super::run::Run;
use super::settings::Bounds;
use super::timers::Timer;
use super::waiters::WaitTarget;

/// The effect of a call with a given counter.
enum CounterMatch {
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

impl Run {
    pub(super) fn all_members(&self) -> BarrierMembers {
        BarrierMembers::All(u32::try_from(self.tasks.len()).unwrap_or(u32::MAX))
    }

    pub(super) fn wire_id(&self, key: &BarrierKey) -> Arc<str> {
        key.wire_id(self.incarnation.0)
    }

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
        let name: Arc<str> = name.into();
        let refuse = |cx: &mut TransitionContext<'_>, code, text: String, last: i64| {
            cx.reply(call, Err(Arc::new(Failure::from_service(code, text).with_barrier(&name, last))));
        };
        if name.len() > bound {
            let text = format!("The barrier id has {} bytes; at most {bound} are allowed.", name.len());
            return cx.reply(call, Err(Arc::new(Failure::from_service(Code::ResourceExhausted, text))));
        }
        if self.task(id).is_none() {
            let text =
                format!("A non-participating task ({id}) called the barrier: {name}. It is not in this job.");
            return refuse(cx, Code::InvalidArgument, text, counter);
        }
        let stranger = members.as_ref().and_then(|set| self.first_unknown_task(set)).map(|stranger| {
            format!(
                "Unexpected task ({stranger}) that is not in the cluster called the barrier. Barrier Id: {name}"
            )
        });
        let members = members
            .map(|set| self.known_tasks_of(set))
            .filter(|set| set.ids().len() < self.tasks.len())
            .map_or_else(|| self.all_members(), BarrierMembers::Some);
        let key = BarrierKey::Named(Arc::clone(&name));
        match self.match_counter(&key, id, counter) {
            CounterMatch::Begin(counter) => {
                let kept = self.barriers.ended(&key).map(|ended| ended.members.clone());
                let fixed = kept.unwrap_or_else(|| members.clone());
                if let Some(text) = self.barrier_bound_exceeded(&fixed, &cx.settings.bounds) {
                    return refuse(cx, Code::ResourceExhausted, text, counter - 1);
                }
                let misuse = stranger.or_else(|| membership_error(&key, &fixed, id, &members));
                let timeout = Duration::from_millis(u64::try_from(timeout_ms).unwrap_or(0));
                match (self.begin_instance(cx, &key, counter, fixed, timeout, id), misuse) {
                    // The other members, which arrive later, get the error too: JAX programs rely on it.
                    (Ok(()), Some(text)) => {
                        self.fail_barrier(cx, &key, Code::InvalidArgument, text.clone(), &text);
                        refuse(cx, Code::InvalidArgument, text, counter);
                    }
                    (Ok(()), None) => self.record_arrival(
                        cx,
                        &key,
                        id,
                        connection,
                        Arrival { call, purpose: ArrivalPurpose::Arrive, at: cx.now },
                    ),
                    (Err(failure), _) => cx.reply(call, Err(failure)),
                }
            }
            CounterMatch::Join => {
                let fixed = self.barriers.instance(&key).map(|instance| instance.members.clone());
                let misuse = stranger.or_else(|| membership_error(&key, &fixed?, id, &members));
                if let Some(text) = misuse {
                    self.fail_barrier(cx, &key, Code::InvalidArgument, text.clone(), &text);
                    let counter = self.barriers.ended(&key).map_or(counter, |ended| ended.counter);
                    return refuse(cx, Code::InvalidArgument, text, counter);
                }
                self.record_arrival(
                    cx,
                    &key,
                    id,
                    connection,
                    Arrival { call, purpose: ArrivalPurpose::Arrive, at: cx.now },
                );
            }
            CounterMatch::Repeat => {
                let fixed = self.barriers.ended(&key).map(|ended| ended.members.clone());
                let misuse = stranger.or_else(|| membership_error(&key, &fixed?, id, &members));
                if let Some(text) = misuse {
                    return refuse(cx, Code::InvalidArgument, text, counter);
                }
                self.repeat_result(cx, call, &key);
            }
            CounterMatch::Mismatch(known) => {
                let text = counter_mismatch_text(&name, counter, known);
                if counter >= 0 && known >= 0 && self.barriers.instance(&key).is_some() {
                    self.remove_own_arrival(cx, &key, id);
                    self.fail_barrier(cx, &key, Code::Internal, text.clone(), &text);
                }
                refuse(cx, Code::Internal, text, known);
            }
        }
    }

    /// Returns why no further barrier may begin, if a bound is reached.
    fn barrier_bound_exceeded(&self, members: &BarrierMembers, bounds: &Bounds) -> Option<String> {
        let barriers = self.barriers.in_progress_len();
        if barriers >= bounds.barriers_in_progress {
            return Some(format!(
                "{barriers} barriers are in progress, the most allowed (setting bounds.barriers-in-progress)."
            ));
        }
        let all = self.barriers.members_in_progress() + members.len();
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

    fn match_counter(&self, key: &BarrierKey, id: TaskId, counter: i64) -> CounterMatch {
        let ended = self.barriers.ended(key);
        let behind = |known: i64| counter <= known && ended.is_some_and(|ended| ended.lagging.contains(&id));
        let recoverable = self.expect_task(id).recoverable;
        // An answer may be lost with its connection. The process that took part asks again and gets the same
        // result; a process that has registered since counts from 0 and takes part in the next instance.
        if recoverable
            && counter == 0
            && ended.is_some_and(|ended| ended.has_passed_with(id, self.expect_task(id).registered_at))
        {
            return CounterMatch::Repeat;
        }
        if let Some(instance) = self.barriers.instance(key) {
            // A restarted task counts from 0 again, and a task that a barrier passed without counts behind:
            // both join the instance in progress.
            let known = instance.counter;
            let joins = counter == known || (recoverable && counter == 0) || behind(known);
            return if joins { CounterMatch::Join } else { CounterMatch::Mismatch(known) };
        }
        match ended.map(|ended| ended.counter) {
            None if counter == 0 => CounterMatch::Begin(0),
            // The mismatch tells the client to count from 0, so its next call begins the barrier.
            None => CounterMatch::Mismatch(-1),
            Some(last) if Some(counter) == last.checked_add(1) => CounterMatch::Begin(counter),
            Some(last) if recoverable && counter == 0 => CounterMatch::Begin(last.saturating_add(1)),
            // This task did not take part in the last instance; with that result it would pass alone.
            Some(last) if behind(last) => CounterMatch::Begin(last.saturating_add(1)),
            Some(last) if counter == last => CounterMatch::Repeat,
            Some(last) => CounterMatch::Mismatch(last),
        }
    }

    fn repeat_result(&mut self, cx: &mut TransitionContext<'_>, call: CallId, key: &BarrierKey) {
        if let Some(ended) = self.barriers.ended(key) {
            let outcome = ended.result.clone().map(|()| Reply::BarrierPassed(ended.counter));
            cx.reply(call, outcome);
        }
    }

    /// Begins an instance.
    ///
    /// # Errors
    /// Returns the failure of the instance if a member is in error and cannot arrive: the instance ends at
    /// once.
    pub(super) fn begin_instance(
        &mut self,
        cx: &mut TransitionContext<'_>,
        key: &BarrierKey,
        counter: i64,
        members: BarrierMembers,
        timeout: Duration,
        first: TaskId,
    ) -> Result<(), Arc<Failure>> {
        let mut excused = Vec::new();
        let in_error = (0..members.len()).map(|position| members.at(position)).find_map(|id| {
            let task = self.expect_task(id);
            if task.is_exempt {
                excused.push(id);
            }
            let failure = task.failure().filter(|_| !task.recoverable)?;
            Some((id, Arc::clone(failure)))
        });
        let wire_id = self.wire_id(key);
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
            instance.set_member_state(member, MemberState::Released);
        }
        self.barriers.insert_instance(key.clone(), instance);
        cx.emit(
            EventKind::BarrierStarted { barrier: wire_id, counter },
            format!("{} arrived first of {size}", self.describe(first)),
        );
        Ok(())
    }

    /// Records that a member has arrived at an instance in progress.
    pub(super) fn record_arrival(
        &mut self,
        cx: &mut TransitionContext<'_>,
        key: &BarrierKey,
        id: TaskId,
        connection: ConnectionId,
        arrival: Arrival,
    ) {
        let replaces = matches!(
            self.barriers.instance(key).and_then(|i| i.member_state(id)),
            Some(MemberState::Arrived(_))
        );
        if !replaces && !self.admit_waiter(cx, arrival.call, connection) {
            return self.remove_if_empty(key);
        }
        let Some(instance) = self.barriers.instance_mut(key) else { return };
        let counter = instance.counter;
        match instance.set_member_state(id, MemberState::Arrived(arrival)) {
            // The task is no member; the callers have checked that there is none.
            None => return,
            Some(MemberState::Arrived(old)) => self.replace_arrival(cx, key, counter, id, old),
            Some(_) if key.is_named() => self.adjust_barrier_waits(id, 1),
            Some(_) => {}
        }
        self.waiters.insert(arrival.call, connection, WaitTarget::Barrier(key.clone(), id));
        self.pass_if_complete(cx, key);
        self.pass_without_unsynced(cx);
    }

    /// Replaces a waiting call by a newer call of the same task.
    fn replace_arrival(
        &mut self,
        cx: &mut TransitionContext<'_>,
        key: &BarrierKey,
        counter: i64,
        id: TaskId,
        old: Arrival,
    ) {
        self.waiters.remove(old.call);
        let failure = match old.purpose {
            ArrivalPurpose::Register(incarnation) => self.superseded_failure(id, incarnation, None),
            purpose => {
                let text = format!(
                    "Cancelled because there's a more recent barrier call for {}::{counter} from the same task.",
                    self.wire_id(key)
                );
                let failure = Failure::without_details(Code::Cancelled, text);
                Arc::new(if purpose == ArrivalPurpose::ShutDown {
                    shutdown_failure(&failure)
                } else {
                    failure
                })
            }
        };
        cx.reply(old.call, Err(failure));
    }

    /// Removes the task's waiting call before a newer call of the same task fails the instance.
    fn remove_own_arrival(&mut self, cx: &mut TransitionContext<'_>, key: &BarrierKey, id: TaskId) {
        let Some(instance) = self.barriers.instance_mut(key) else { return };
        let Some(MemberState::Arrived(old)) = instance.member_state(id) else { return };
        let counter = instance.counter;
        instance.set_member_state(id, MemberState::Missing);
        if key.is_named() {
            self.adjust_barrier_waits(id, -1);
        }
        self.replace_arrival(cx, key, counter, id, old);
    }

    pub(super) fn exchange_devices(
        &mut self,
        cx: &mut TransitionContext<'_>,
        call: CallId,
        connection: ConnectionId,
        id: TaskId,
        devices: Vec<bytes::Bytes>,
    ) {
        if self.task(id).is_none() {
            let failure = self.unknown_task_failure("exchanged devices", id);
            return cx.reply(call, Err(Arc::new(failure)));
        }
        let key = BarrierKey::Devices;
        if let Some(result) = self.barriers.ended(&key).map(|ended| ended.result.clone()) {
            let reply = Reply::Devices(self.incarnation, self.exchanged_devices());
            return cx.reply(call, result.map(|()| reply));
        }
        // Each task has an equal share of the bound, so the first to arrive cannot use all of it.
        let bytes: usize = devices.iter().map(|device| device.len() + size_of::<bytes::Bytes>()).sum();
        let share = cx.settings.bounds.exchanged_device_bytes / self.tasks.len().max(1);
        if bytes > share {
            let text = format!(
                "The devices of task {id} take {bytes} bytes; {share} are each task's share (setting \
                 bounds.exchanged-device-bytes)."
            );
            return cx.reply(call, Err(Arc::new(Failure::from_service(Code::ResourceExhausted, text))));
        }
        self.exchanged.insert(id, devices);
        const DEVICE_EXCHANGE_TIMEOUT: Duration = Duration::from_secs(60 * 60);
        if self.barriers.instance(&key).is_none()
            && let Err(failure) =
                self.begin_instance(cx, &key, 0, self.all_members(), DEVICE_EXCHANGE_TIMEOUT, id)
        {
            return cx.reply(call, Err(failure));
        }
        self.record_arrival(
            cx,
            &key,
            id,
            connection,
            Arrival { call, purpose: ArrivalPurpose::ExchangeDevices, at: cx.now },
        );
    }
}

/// Returns what is wrong with the members that a caller names, if anything.
fn membership_error(
    key: &BarrierKey,
    fixed: &BarrierMembers,
    caller: TaskId,
    given: &BarrierMembers,
) -> Option<String> {
    let BarrierKey::Named(name) = key else { return None };
    if fixed != given {
        return Some(format!(
            "Conflicting tasks specified by different processes for the same barrier: {name}. Check that the callers are \
             invoking the barrier with the same arguments."
        ));
    }
    if fixed.position(caller).is_none() {
        return Some(format!("A non-participating task ({caller}) called the barrier: {name}"));
    }
    None
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
