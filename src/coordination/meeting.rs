//! Arrival at barriers: which instance a call means, which tasks are members, and how an instance fills.
//! `parting.rs` ends instances.
//!
//! A barrier id is used again and again; each use is an instance with a counter. The members of the first instance
//! are those of all later ones. The rules on counters and members are the C++ service's, because clients count
//! along: a task of the job that calls a barrier with other members than its first use has, or that is no member,
//! fails the instance for every member. Two mistakes are refused without an effect on others: those that no client
//! of JAX makes (a first call that does not count from 0, a negative counter), and calls from outside of the job.
//! Begin at `Run::meet`.
//!
//! A task that a barrier passed without counts behind. It joins whatever instance is in progress, whatever it
//! counts, and is never given the last result: with that result it would pass alone, and a counter mismatch would
//! fail the others. A recoverable task that took part in the last instance and asks again with counter 0 gets that
//! result again, because its answer may have been lost with its connection.
//!
//! A caller that hangs up has not arrived: its slot is empty again, and an instance without arrivals is dissolved.

use std::sync::Arc;
use std::time::Duration;

use super::barrier::{Arrival, BarrierKey, Instance, Members, Purpose, Slot};
use super::call::{Reply, TaskSet};
use super::context::Cx;
use super::event::Change;
use super::failure::{Code, Failure};
use super::failure_texts::shutdown_failure;
use super::ids::{CallId, ConnectionId, TaskId};
use super::run::Run;
use super::settings::Bounds;
use super::timers::Timer;
use super::waiters::Place;

/// What becomes of a call upon a barrier with a given counter.
enum Use {
    /// It begins an instance with this counter.
    Begin(i64),
    /// It takes part in the instance in progress.
    Join,
    /// It asks again for the result of the last instance.
    Repeat,
    /// Its caller counts otherwise than the service, whose counter is given. The instance in progress, if there is
    /// one, fails for all: they are out of step.
    Mismatch(i64),
}

impl Run {
    pub(super) fn everybody(&self) -> Members {
        Members::All(u32::try_from(self.tasks.len()).unwrap_or(u32::MAX))
    }

    pub(super) fn wire_id(&self, key: &BarrierKey) -> Arc<str> {
        key.wire_id(self.incarnation.0)
    }

    /// A client's call upon a barrier.
    #[expect(clippy::too_many_arguments, reason = "what a barrier call is made of")]
    pub(super) fn meet(
        &mut self,
        cx: &mut Cx<'_>,
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
        let refuse = |cx: &mut Cx<'_>, code, text: String, last: i64| {
            cx.reply(call, Err(Arc::new(Failure::service(code, text).of_barrier(&name, last))));
        };
        if name.len() > bound {
            let text = format!("The barrier id has {} bytes; at most {bound} are allowed.", name.len());
            return cx.reply(call, Err(Arc::new(Failure::service(Code::ResourceExhausted, text))));
        }
        if self.task(id).is_none() {
            let text =
                format!("A non-participating task ({id}) called the barrier: {name}. It is not in this job.");
            return refuse(cx, Code::InvalidArgument, text, counter);
        }
        let stranger = members.as_ref().and_then(|set| self.first_stranger(set)).map(|stranger| {
            format!(
                "Unexpected task ({stranger}) that is not in the cluster called the barrier. Barrier Id: {name}"
            )
        });
        let members = members
            .map(|set| self.without_strangers(set))
            .filter(|set| set.ids().len() < self.tasks.len())
            .map_or_else(|| self.everybody(), Members::Some);
        let key = BarrierKey::Named(Arc::clone(&name));
        match self.use_of(&key, id, counter) {
            Use::Begin(counter) => {
                let kept = self.barriers.ended(&key).map(|ended| ended.members.clone());
                let fixed = kept.unwrap_or_else(|| members.clone());
                if let Some(text) = self.no_room_for(&fixed, &cx.settings.bounds) {
                    return refuse(cx, Code::ResourceExhausted, text, counter - 1);
                }
                let misuse = stranger.or_else(|| misuse(&key, &fixed, id, &members));
                let timeout = Duration::from_millis(u64::try_from(timeout_ms).unwrap_or(0));
                match (self.begin(cx, &key, counter, fixed, timeout, id), misuse) {
                    // The members, who come later, are told too: JAX programs count on it.
                    (Ok(()), Some(text)) => {
                        self.fail_instance(cx, &key, Code::InvalidArgument, text.clone(), &text);
                        refuse(cx, Code::InvalidArgument, text, counter);
                    }
                    (Ok(()), None) => self.arrive(
                        cx,
                        &key,
                        id,
                        connection,
                        Arrival { call, purpose: Purpose::Meet, at: cx.now },
                    ),
                    (Err(failure), _) => cx.reply(call, Err(failure)),
                }
            }
            Use::Join => {
                let fixed = self.barriers.instance(&key).map(|instance| instance.members.clone());
                let misuse = stranger.or_else(|| misuse(&key, &fixed?, id, &members));
                if let Some(text) = misuse {
                    self.fail_instance(cx, &key, Code::InvalidArgument, text.clone(), &text);
                    let counter = self.barriers.ended(&key).map_or(counter, |ended| ended.counter);
                    return refuse(cx, Code::InvalidArgument, text, counter);
                }
                self.arrive(cx, &key, id, connection, Arrival { call, purpose: Purpose::Meet, at: cx.now });
            }
            Use::Repeat => {
                let fixed = self.barriers.ended(&key).map(|ended| ended.members.clone());
                let misuse = stranger.or_else(|| misuse(&key, &fixed?, id, &members));
                if let Some(text) = misuse {
                    return refuse(cx, Code::InvalidArgument, text, counter);
                }
                self.repeat(cx, call, &key);
            }
            Use::Mismatch(known) => {
                let text = mismatch(&name, counter, known);
                if counter >= 0 && known >= 0 && self.barriers.instance(&key).is_some() {
                    self.displace_own(cx, &key, id);
                    self.fail_instance(cx, &key, Code::Internal, text.clone(), &text);
                }
                refuse(cx, Code::Internal, text, known);
            }
        }
    }

    /// Why no further barrier may begin, if none may.
    fn no_room_for(&self, members: &Members, bounds: &Bounds) -> Option<String> {
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

    fn first_stranger(&self, set: &TaskSet) -> Option<TaskId> {
        // Ascending, so that strangers stand at the ends.
        let (first, last) = (set.ids().first()?, set.ids().last()?);
        [*first, *last].into_iter().find(|task| self.task(*task).is_none())
    }

    fn use_of(&self, key: &BarrierKey, id: TaskId, counter: i64) -> Use {
        let ended = self.barriers.ended(key);
        let behind = |known: i64| counter <= known && ended.is_some_and(|ended| ended.behind.contains(&id));
        let recoverable = self.own(id).recoverable;
        // An answer may be lost with its connection: the process that took part asks again and gets the same. One that has
        // registered since counts from 0 and takes part in the next use.
        if recoverable
            && counter == 0
            && ended.is_some_and(|ended| ended.has_passed_with(id, self.own(id).registered_at))
        {
            return Use::Repeat;
        }
        if let Some(instance) = self.barriers.instance(key) {
            // A task that came back counts from 0 again, and one that was not waited for counts behind: both join
            // whatever is in progress.
            let known = instance.counter;
            let joins = counter == known || (recoverable && counter == 0) || behind(known);
            return if joins { Use::Join } else { Use::Mismatch(known) };
        }
        match ended.map(|ended| ended.counter) {
            None if counter == 0 => Use::Begin(0),
            // With this for an answer, the caller's next use is number 0, which begins the barrier.
            None => Use::Mismatch(-1),
            Some(last) if Some(counter) == last.checked_add(1) => Use::Begin(counter),
            Some(last) if recoverable && counter == 0 => Use::Begin(last.saturating_add(1)),
            // Before the next: it has not taken part in the last one, and must not pass alone by its result.
            Some(last) if behind(last) => Use::Begin(last.saturating_add(1)),
            Some(last) if counter == last => Use::Repeat,
            Some(last) => Use::Mismatch(last),
        }
    }

    fn repeat(&mut self, cx: &mut Cx<'_>, call: CallId, key: &BarrierKey) {
        if let Some(ended) = self.barriers.ended(key) {
            let outcome = ended.result.clone().map(|()| Reply::BarrierPassed(ended.counter));
            cx.reply(call, outcome);
        }
    }

    /// Begins an instance.
    ///
    /// # Errors
    /// It ends at once if a member is in error and cannot come.
    pub(super) fn begin(
        &mut self,
        cx: &mut Cx<'_>,
        key: &BarrierKey,
        counter: i64,
        members: Members,
        timeout: Duration,
        first: TaskId,
    ) -> Result<(), Arc<Failure>> {
        let mut excused = Vec::new();
        let in_error = (0..members.len()).map(|position| members.at(position)).find_map(|id| {
            let task = self.own(id);
            if task.excused {
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
            let failure = Arc::new(Failure::service(Code::Internal, text).of_barrier(&wire_id, counter));
            let result = Err(Arc::clone(&failure));
            let bound = cx.settings.bounds.barrier_memory_bytes;
            let instance = Instance::new(counter, members, cx.now, cx.now, first);
            self.barriers.end(cx.now, key.clone(), &instance, result.clone(), bound);
            if *key == BarrierKey::Shutdown {
                self.after_shutdown(cx, &instance.members, &result);
            }
            return Err(failure);
        }
        let deadline = cx.now.after(timeout);
        self.timers.set(deadline, Timer::Barrier(key.clone()));
        let size = members.len();
        let mut instance = Instance::new(counter, members, cx.now, deadline, first);
        for member in excused {
            instance.put(member, Slot::Released);
        }
        self.barriers.begin(key.clone(), instance);
        cx.event(
            Change::BarrierStarted { barrier: wire_id, counter },
            format!("{} arrived first of {size}", self.describe(first)),
        );
        Ok(())
    }

    /// A member has come to an instance in progress.
    pub(super) fn arrive(
        &mut self,
        cx: &mut Cx<'_>,
        key: &BarrierKey,
        id: TaskId,
        connection: ConnectionId,
        arrival: Arrival,
    ) {
        let replaces = matches!(self.barriers.instance(key).and_then(|i| i.slot(id)), Some(Slot::Arrived(_)));
        if !replaces && !self.has_room(cx, arrival.call, connection) {
            return self.dissolve_if_empty(key);
        }
        let Some(instance) = self.barriers.instance_mut(key) else { return };
        let counter = instance.counter;
        match instance.put(id, Slot::Arrived(arrival)) {
            // A task that is no member; callers have seen to it that there is none.
            None => return,
            Some(Slot::Arrived(old)) => self.displace(cx, key, counter, id, old),
            Some(_) if key.is_named() => self.count_wait(id, 1),
            Some(_) => {}
        }
        self.waiters.insert(arrival.call, connection, Place::Barrier(key.clone(), id));
        self.pass_if_complete(cx, key);
        self.pass_without_unsynced(cx);
    }

    /// A newer call of the same task takes the place of one that waits.
    fn displace(&mut self, cx: &mut Cx<'_>, key: &BarrierKey, counter: i64, id: TaskId, old: Arrival) {
        self.waiters.remove(old.call);
        let failure = match old.purpose {
            Purpose::Register(incarnation) => self.superseded(id, incarnation, None),
            purpose => {
                let text = format!(
                    "Cancelled because there's a more recent barrier call for {}::{counter} from the same task.",
                    self.wire_id(key)
                );
                let failure = Failure::plain(Code::Cancelled, text);
                Arc::new(if purpose == Purpose::ShutDown { shutdown_failure(&failure) } else { failure })
            }
        };
        cx.reply(old.call, Err(failure));
    }

    /// A call of the same task that is about to fail the instance: an older one that waits there is displaced all the same.
    fn displace_own(&mut self, cx: &mut Cx<'_>, key: &BarrierKey, id: TaskId) {
        let Some(instance) = self.barriers.instance_mut(key) else { return };
        let Some(Slot::Arrived(old)) = instance.slot(id) else { return };
        let counter = instance.counter;
        instance.put(id, Slot::Missing);
        if key.is_named() {
            self.count_wait(id, -1);
        }
        self.displace(cx, key, counter, id, old);
    }

    pub(super) fn exchange_devices(
        &mut self,
        cx: &mut Cx<'_>,
        call: CallId,
        connection: ConnectionId,
        id: TaskId,
        devices: Vec<bytes::Bytes>,
    ) {
        if self.task(id).is_none() {
            let failure = self.unknown("exchanged devices", id);
            return cx.reply(call, Err(Arc::new(failure)));
        }
        let key = BarrierKey::Devices;
        if let Some(result) = self.barriers.ended(&key).map(|ended| ended.result.clone()) {
            let reply = Reply::Devices(self.incarnation, self.gathered());
            return cx.reply(call, result.map(|()| reply));
        }
        // Each task has its share, so that the first to come cannot take it all.
        let bytes: usize = devices.iter().map(|device| device.len() + size_of::<bytes::Bytes>()).sum();
        let share = cx.settings.bounds.exchanged_device_bytes / self.tasks.len().max(1);
        if bytes > share {
            let text = format!(
                "The devices of task {id} take {bytes} bytes; {share} are each task's share (setting \
                 bounds.exchanged-device-bytes)."
            );
            return cx.reply(call, Err(Arc::new(Failure::service(Code::ResourceExhausted, text))));
        }
        self.exchanged.insert(id, devices);
        const PATIENCE: Duration = Duration::from_secs(60 * 60);
        if self.barriers.instance(&key).is_none()
            && let Err(failure) = self.begin(cx, &key, 0, self.everybody(), PATIENCE, id)
        {
            return cx.reply(call, Err(failure));
        }
        self.arrive(
            cx,
            &key,
            id,
            connection,
            Arrival { call, purpose: Purpose::ExchangeDevices, at: cx.now },
        );
    }
}

/// What is wrong with a caller's idea of who takes part, if anything is.
fn misuse(key: &BarrierKey, fixed: &Members, caller: TaskId, given: &Members) -> Option<String> {
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

fn mismatch(name: &str, counter: i64, known: i64) -> String {
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
