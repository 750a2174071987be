//! The driver of the state machine: feeds it inputs and the time under one lock, and performs its effects.
//!
//! It decides nothing about jobs (`coordination` does) and speaks no protocol (`grpc` and `http` do). Begin at
//! [`Engine::call`]; `Engine::apply` is the only place that applies an input.
//!
//! - *One lock, on the caller's thread.* The caller applies its own input under a lock that is held for the
//!   transition only. A transition takes about a microsecond; a queue to an owner thread would cost two wake-ups a
//!   call. An answer that is known at once costs no queue and no wake-up. Answers to waiting calls go to the
//!   [`AnswerInbox`] of their connection after the lock is released.
//! - *Readers copy.* [`Engine::read`] copies a pointer for each job under the lock and runs its closure
//!   afterwards, so pages, scrapes and listings do not hold up clients. Only [`Engine::read_under_lock`]
//!   reads under the lock, for a single entry.
//! - *Time.* One task sleeps until the state machine's next deadline ([`Engine::run_timers`]). If the driver
//!   did not run for more than a second (stopped, starved), it applies [`Input::DriverLagged`] first, so that
//!   the silence fails no task.
//! - *Freeing.* Memory that the state machine gives up is freed after the lock, much of it on a thread of its own
//!   (`reaper.rs`).
//! - *Observers* (counters, traces, timelines) receive each event under the lock: they are quick, do not
//!   block, and do not call back.
//! - *Measurement.* One in 64 of the inputs about one task or key is timed under the lock; every other input and
//!   every read is.

mod event_history;
mod reaper;

use std::collections::HashMap;
use std::hash::{BuildHasherDefault, Hasher};
use std::net::SocketAddr;
use std::ops::{Deref, DerefMut};
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, Weak};
use std::time::Duration;

use tokio::sync::{Notify, broadcast};

use crate::clock::{self, Clock};
use crate::coordination::{
    Actor, BarrierCompletion, CallId, CallOutcome, Caller, CommandOutcome, CommandRefusal, ConnectionEnd,
    ConnectionId, Coordinator, DeferredFree, Effect, FindingNote, Input, JobEvent, JobId, JobName,
    JobSettings, OperatorCommand, Reason, Request, ServiceIncarnation, Timestamp, TransferFailure,
};
use crate::meter;

pub use event_history::RetainedEvents;
use event_history::{EventHistory, Ring};
use reaper::Reaper;

/// The recipient of answers to waiting calls: one for each connection.
pub trait AnswerInbox: Send + Sync {
    /// Receives the answer to the call that was made with `slot`. Called outside the engine's lock, on any
    /// thread; must not block.
    fn deliver(&self, slot: u64, outcome: CallOutcome);
}

/// The state of a call after [`Engine::call`].
pub enum CallStatus {
    /// The call is answered.
    Now(CallOutcome),
    /// The call waits; its answer will be delivered to the inbox, unless the call is cancelled before.
    Waiting(CallId),
}

/// An observer of every effect, such as a counter. It is called under the engine's lock: it must be quick,
/// and must not block or call the engine.
pub trait Observer: Send + Sync {
    /// Receives an event.
    fn event(&self, event: &JobEvent);
    /// Receives an ended barrier.
    fn barrier_ended(&self, ending: &BarrierCompletion);
}

/// The counters of the engine.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct EngineCounters {
    /// The number of applied inputs.
    pub inputs: u64,
    /// The number of events.
    pub events: u64,
    /// The number of retained events.
    pub events_kept: usize,
    /// The greatest number of retained events.
    pub events_kept_max: usize,
    /// The number of events that slow followers missed.
    pub events_missed: u64,
    /// The present number of followers.
    pub followers: usize,
    /// The number of times that the driver could not run for a while.
    pub lags: u64,
}

struct WaitingCall {
    inbox: Arc<dyn AnswerInbox>,
    slot: u64,
}

struct State {
    coordinator: Coordinator,
    waiting: WaitingCalls,
    effects: Vec<Effect>,
    next_call: u64,
    next_connection: u64,
    history: EventHistory,
    next_event: u64,
    inputs: u64,
    lags: u64,
}

/// The waiting calls. They are in many tables, so that none of them grows by much at once while the lock is
/// held.
#[derive(Default)]
struct WaitingCalls {
    tables: [WaitingTable; Self::TABLES],
    len: usize,
    removed: usize,
}

type WaitingTable = HashMap<CallId, WaitingCall, BuildHasherDefault<NumberHasher>>;

impl WaitingCalls {
    const TABLES: usize = 32;
    /// A table with at most this capacity is not shrunk.
    const KEPT: usize = 1 << 10;

    fn table(&mut self, call: CallId) -> &mut WaitingTable {
        let number = usize::try_from(call.0 % Self::TABLES as u64).unwrap_or_default();
        &mut self.tables[number]
    }

    fn insert(&mut self, call: CallId, waiting: WaitingCall) {
        self.len += usize::from(self.table(call).insert(call, waiting).is_none());
    }

    /// Removes a call. A table that is replaced by a smaller one is added to `gone`, to be freed without the
    /// lock.
    fn remove(&mut self, call: CallId, gone: &mut Vec<WaitingTable>) -> Option<WaitingCall> {
        let waiting = self.table(call).remove(&call)?;
        self.len -= 1;
        self.removed = self.removed.wrapping_add(1);
        // The memory of very many calls is given back, one table at a time: the tables empty at the same
        // pace, and the lock must not be held while all of them move their rest. The period is prime, so it
        // meets every table.
        const PERIOD: usize = 509;
        if self.removed.is_multiple_of(PERIOD) {
            let table = self.table(call);
            if table.capacity() > Self::KEPT && table.len() < table.capacity() / 8 {
                let mut smaller =
                    WaitingTable::with_capacity_and_hasher(table.capacity() / 4, <_>::default());
                smaller.extend(table.drain());
                gone.push(std::mem::replace(table, smaller));
            }
        }
        Some(waiting)
    }
}

/// The result of an input.
#[derive(Default)]
struct InputResult {
    /// The answer to the applied call, if it came at once.
    own: Option<CallOutcome>,
    /// The outcome of the applied command.
    acted: Option<Result<CommandOutcome, CommandRefusal>>,
    /// The answers to waiting calls.
    deliveries: Vec<(WaitingCall, CallOutcome)>,
    /// The memory to free.
    discarded: Vec<DeferredFree>,
    events: Vec<Ring>,
    tables: Vec<WaitingTable>,
}

/// An event with its number in the order of all events of this server, from 1.
#[derive(Debug, Clone)]
pub struct NumberedEvent {
    /// The number.
    pub number: u64,
    /// The event.
    pub event: Arc<JobEvent>,
}

/// The number of events that a follower may lag behind before it misses some.
const EVENTS_BUFFERED: usize = 1 << 12;

/// The number of calls of a closed connection that are dropped under one hold of the lock.
const CALLS_DROPPED_AT_ONCE: usize = 1 << 10;

/// The delay of a deadline from which on the driver assumes that it did not run.
const LAG_TOLERANCE: Duration = Duration::from_secs(1);

/// The times for which the engine's lock is waited for and held.
#[derive(Debug, Default)]
pub struct Locks {
    /// For inputs about one task or one key; one in many is timed.
    pub inputs: meter::LockTimes,
    /// For all other inputs; each is timed.
    pub bulk: meter::LockTimes,
    /// For readers (pages, scrapes, detectors), which take a copy; each is timed.
    pub reads: meter::LockTimes,
}

/// The locked state.
struct LockedState<'a> {
    state: MutexGuard<'a, State>,
    // Declared after the lock, so that it is dropped after it.
    _held: meter::LockHold<'a>,
}

impl Deref for LockedState<'_> {
    type Target = State;

    fn deref(&self) -> &State {
        &self.state
    }
}

impl DerefMut for LockedState<'_> {
    fn deref_mut(&mut self) -> &mut State {
        &mut self.state
    }
}

/// The handle through which every edge reaches the state machine.
pub struct Engine {
    state: Mutex<State>,
    clock: Clock,
    /// The deadline that the timer task sleeps for; `u64::MAX` for none.
    armed: AtomicU64,
    rearm: Notify,
    followers: broadcast::Sender<NumberedEvent>,
    /// The greatest number of jobs.
    jobs_max: AtomicUsize,
    /// The number of times that a job was created or deleted.
    job_changes: AtomicU64,
    observers: OnceLock<Vec<Arc<dyn Observer>>>,
    missed: AtomicU64,
    locks: Locks,
    reaper: Reaper,
    this: Weak<Self>,
}

impl Engine {
    /// The default of the greatest number of jobs.
    pub const JOBS_MAX: usize = 1024;

    /// Returns an engine without jobs. Deadlines are kept only while [`Engine::run_timers`] runs.
    #[must_use]
    pub fn new(clock: Clock) -> Arc<Self> {
        let state = State {
            coordinator: Coordinator::default(),
            waiting: WaitingCalls::default(),
            effects: Vec::new(),
            next_call: 0,
            next_connection: 0,
            history: EventHistory::default(),
            next_event: 1,
            inputs: 0,
            lags: 0,
        };
        let (followers, _) = broadcast::channel(EVENTS_BUFFERED);
        Arc::new_cyclic(|this| Self {
            state: Mutex::new(state),
            clock,
            armed: AtomicU64::new(u64::MAX),
            rearm: Notify::new(),
            followers,
            jobs_max: AtomicUsize::new(Self::JOBS_MAX),
            job_changes: AtomicU64::new(0),
            observers: OnceLock::new(),
            missed: AtomicU64::new(0),
            locks: Locks::default(),
            reaper: Reaper::default(),
            this: Weak::clone(this),
        })
    }

    /// Sends every effect to `observers` from now on. Only the first call has an effect.
    pub fn observe_with(&self, observers: Vec<Arc<dyn Observer>>) {
        let _ = self.observers.set(observers);
    }

    /// Returns the counters.
    #[must_use]
    pub fn counters(&self) -> EngineCounters {
        let state = self.lock_for_read();
        EngineCounters {
            inputs: state.inputs,
            events: state.next_event - 1,
            events_kept: state.history.len(),
            events_kept_max: state.history.capacity(),
            events_missed: self.missed.load(Ordering::Relaxed),
            followers: self.followers.receiver_count(),
            lags: state.lags,
        }
    }

    /// Counts events that a follower missed.
    pub fn count_missed_events(&self, events: u64) {
        self.missed.fetch_add(events, Ordering::Relaxed);
    }

    /// Puts a finding of an observer into the order of events.
    pub fn record_finding(&self, job: JobId, note: FindingNote) {
        self.apply_input(self.lock(), Input::FindingChanged { job, note });
    }

    /// Puts a worker's report of failed transfers into the order of events.
    pub fn record_transfer_failure(&self, job: JobId, note: TransferFailure) {
        self.apply_input(self.lock(), Input::TransferFailed { job, note });
    }

    /// Returns the engine's clock.
    #[must_use]
    pub fn clock(&self) -> &Clock {
        &self.clock
    }

    /// Bounds the number of jobs; existing jobs stay.
    pub fn bound_jobs(&self, most: usize) {
        self.jobs_max.store(most, Ordering::Relaxed);
    }

    /// Declares a job of the server's configuration.
    ///
    /// # Errors
    /// If there is a job of that name, or there are too many jobs.
    pub fn declare(&self, name: JobName, settings: JobSettings) -> Result<JobId, DeclareError> {
        self.declare_with(name, settings, None, |_| ()).map(|(job, ())| job)
    }

    /// Declares a job for an operator.
    ///
    /// # Errors
    /// As [`Engine::declare`].
    pub fn declare_and_read<T>(
        &self,
        name: JobName,
        settings: JobSettings,
        actor: Actor,
        look: impl FnOnce(&Coordinator, JobId) -> T,
    ) -> Result<T, DeclareError> {
        let (job, copy) = self.declare_with(name, settings, Some(actor), Coordinator::snapshot)?;
        Ok(look(&copy, job))
    }

    /// Declares a job, and takes something of the state in the same step.
    fn declare_with<C>(
        &self,
        name: JobName,
        settings: JobSettings,
        actor: Option<Actor>,
        take: impl FnOnce(&Coordinator) -> C,
    ) -> Result<(JobId, C), DeclareError> {
        let mut state = self.lock();
        if state.coordinator.job_named(name.as_str()).is_some() {
            return Err(DeclareError::Exists(name));
        }
        let most = self.jobs_max.load(Ordering::Relaxed);
        if state.coordinator.jobs().count() >= most {
            return Err(DeclareError::TooMany(most));
        }
        let job = state.coordinator.next_job();
        let incarnation = ServiceIncarnation(clock::random_nonzero().get());
        let input = Input::DeclareJob { job, name, settings, incarnation, actor };
        let applied = self.apply(&mut state, input, None);
        let taken = take(&state.coordinator);
        self.unlock_and_deliver(state, applied);
        self.job_changes.fetch_add(1, Ordering::Release);
        Ok((job, taken))
    }

    /// Returns the number of times that a job was created or deleted. A lookup of a job by name stays valid
    /// while it does not change.
    #[must_use]
    pub fn job_table_version(&self) -> u64 {
        self.job_changes.load(Ordering::Acquire)
    }

    /// Performs a command on a job.
    ///
    /// # Errors
    /// If the command is refused; nothing has changed then.
    pub fn act(
        &self,
        job: JobId,
        actor: Actor,
        reason: Reason,
        act: OperatorCommand,
    ) -> Result<CommandOutcome, CommandRefusal> {
        self.act_and_read(job, actor, reason, act, |_, acted| acted)
    }

    /// Acts upon a job, and looks at the jobs as they are right after the act or its refusal. `look` runs on a copy that is
    /// taken in the same step: nothing comes in between. The lock is free while it runs.
    pub fn act_and_read<T>(
        &self,
        job: JobId,
        actor: Actor,
        reason: Reason,
        act: OperatorCommand,
        look: impl FnOnce(&Coordinator, Result<CommandOutcome, CommandRefusal>) -> T,
    ) -> T {
        // A value that is refused is freed after the lock is.
        let _value = match &act {
            OperatorCommand::PutKey { value, .. } => Some(value.clone()),
            _ => None,
        };
        let mut state = self.lock_for_bulk();
        let mut applied = self.apply(&mut state, Input::Command { job, actor, reason, act }, None);
        let acted = applied.acted.take().unwrap_or(Err(CommandRefusal::NoSuchJob));
        let copy = state.coordinator.snapshot();
        self.unlock_and_deliver(state, applied);
        if acted == Ok(CommandOutcome::JobDeleted) {
            self.job_changes.fetch_add(1, Ordering::Release);
        }
        look(&copy, acted)
    }

    /// Registers a new connection and returns its number.
    pub fn connection_opened(&self, peer: SocketAddr) -> ConnectionId {
        let mut state = self.lock();
        let connection = ConnectionId(state.next_connection);
        state.next_connection += 1;
        self.apply_input(state, Input::ConnectionOpened { connection, peer });
        connection
    }

    /// Reports the end of a connection. Calls that wait on it are dropped; their inbox receives no more
    /// answers.
    pub fn connection_closed(&self, connection: ConnectionId, ending: ConnectionEnd, calls: Vec<CallId>) {
        self.apply_input(self.lock_for_bulk(), Input::ConnectionClosed { connection, ending });
        match self.this.upgrade() {
            Some(engine) if calls.len() > CALLS_DROPPED_AT_ONCE => {
                self.reaper.run(move || engine.drop_waiting(&calls));
            }
            _ => self.drop_waiting(&calls),
        }
    }

    /// Drops calls whose answers have no recipient. The lock is released between parts, so that other callers
    /// come in between.
    fn drop_waiting(&self, calls: &[CallId]) {
        for part in calls.chunks(CALLS_DROPPED_AT_ONCE) {
            let mut tables = Vec::new();
            let mut state = self.lock_for_bulk();
            let dropped: Vec<Option<WaitingCall>> =
                part.iter().map(|call| state.waiting.remove(*call, &mut tables)).collect();
            drop(state);
            drop((dropped, tables));
        }
    }

    /// Drops a large value on the reaper's thread.
    pub fn drop_later(&self, thing: impl Send + 'static) {
        self.reaper.run(move || drop(thing));
    }

    /// Makes a call to a job. It is answered at once, or its answer is delivered later to `inbox` under
    /// `slot`.
    pub fn call(
        &self,
        job: JobId,
        caller: Caller,
        request: Request,
        inbox: &Arc<dyn AnswerInbox>,
        slot: u64,
    ) -> CallStatus {
        // The value of a refused request is freed after the lock is released.
        let _value = match &request {
            Request::Insert { value, .. } => Some(value.clone()),
            _ => None,
        };
        let mut state = if is_about_one(&request) { self.lock() } else { self.lock_for_bulk() };
        let call = CallId(state.next_call);
        state.next_call += 1;
        let mut applied = self.apply(&mut state, Input::Call { job, call, caller, request }, Some(call));
        if let Some(outcome) = applied.own.take() {
            self.unlock_and_deliver(state, applied);
            return CallStatus::Now(outcome);
        }
        state.waiting.insert(call, WaitingCall { inbox: Arc::clone(inbox), slot });
        self.unlock_and_deliver(state, applied);
        CallStatus::Waiting(call)
    }

    /// Withdraws a waiting call.
    pub fn cancel_waiting_call(&self, job: JobId, call: CallId) {
        let mut tables = Vec::new();
        let mut state = self.lock();
        // If the answer is already on its way, there is nothing to drop.
        if state.waiting.remove(call, &mut tables).is_some() {
            self.apply_input(state, Input::CallCancelled { job, call });
        }
    }

    /// Answers every waiting call in the way that lets clients continue.
    pub fn stop(&self) {
        self.apply_input(self.lock_for_bulk(), Input::Stop);
    }

    /// Runs `look` on a copy of the jobs. The copy costs a pointer for each job; the lock is free while
    /// `look` runs, however long that takes.
    pub fn read<T>(&self, look: impl FnOnce(&Coordinator, Timestamp) -> T) -> T {
        let (copy, now) = {
            let state = self.lock_for_read();
            (state.coordinator.snapshot(), self.clock.now())
        };
        look(&copy, now)
    }

    /// Runs `look` under the lock. It must take the same short time however large the state is; otherwise use
    /// [`Engine::read`].
    pub fn read_under_lock<T>(&self, look: impl FnOnce(&Coordinator) -> T) -> T {
        look(&self.lock_for_read().coordinator)
    }

    /// Returns the number of waiting calls.
    #[must_use]
    pub fn waiting_calls(&self) -> usize {
        self.lock_for_read().waiting.len
    }

    /// Returns the retained events of all jobs after number `after`, and a stream of later ones.
    #[must_use]
    pub fn follow(&self, after: u64) -> (RetainedEvents, broadcast::Receiver<NumberedEvent>) {
        let (kept, coming) = self.subscribe_with_history();
        (kept.after(after), coming)
    }

    fn subscribe_with_history(&self) -> (EventHistory, broadcast::Receiver<NumberedEvent>) {
        let state = self.lock_for_read();
        (state.history.clone(), self.followers.subscribe())
    }

    /// Returns the retained events of a job after number `after`, and a stream of later events of all jobs.
    #[must_use]
    pub fn follow_job(&self, job: JobId, after: u64) -> (RetainedEvents, broadcast::Receiver<NumberedEvent>) {
        let (kept, coming) = self.subscribe_with_history();
        (kept.of(job, after), coming)
    }

    /// Applies a tick at each deadline of the state machine, for as long as the returned future is polled.
    pub async fn run_timers(self: Arc<Self>) {
        loop {
            let armed = self.arm_timer();
            let rearmed = self.rearm.notified();
            match armed {
                None => rearmed.await,
                // Pending work runs at once; a timer would sleep for the rest of a millisecond.
                Some(at) if at <= self.clock.now() => {
                    self.tick(at);
                    tokio::task::yield_now().await;
                }
                Some(at) => {
                    let due = tokio::time::Instant::from_std(self.clock.instant(at));
                    tokio::select! {
                        () = tokio::time::sleep_until(due) => {}
                        () = rearmed => {}
                    }
                }
            }
        }
    }

    fn tick(&self, due: Timestamp) {
        // A process that was stopped or starved received no heartbeats meanwhile; the tasks did not cause
        // that.
        if self.clock.now().since(due) > LAG_TOLERANCE {
            let mut state = self.lock_for_bulk();
            state.lags += 1;
            self.apply_input(state, Input::DriverLagged);
        }
        self.apply_input(self.lock_for_bulk(), Input::Tick);
    }

    fn arm_timer(&self) -> Option<Timestamp> {
        let state = self.lock();
        let next = state.coordinator.next_wakeup();
        self.armed.store(next.map_or(u64::MAX, |at| at.0), Ordering::Relaxed);
        next
    }

    /// Returns the times for which the lock is waited for and held.
    #[must_use]
    pub fn locks(&self) -> &Locks {
        &self.locks
    }

    fn lock(&self) -> LockedState<'_> {
        self.lock_after(self.locks.inputs.wait_sampled(&self.clock))
    }

    fn lock_for_bulk(&self) -> LockedState<'_> {
        self.lock_after(self.locks.bulk.wait_timed(&self.clock))
    }

    fn lock_for_read(&self) -> LockedState<'_> {
        self.lock_after(self.locks.reads.wait_timed(&self.clock))
    }

    fn lock_after<'a>(&'a self, waiting: meter::LockWait<'a>) -> LockedState<'a> {
        // A panic inside a transition has been reported; the tables that it left are the best that there are.
        let state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        LockedState { state, _held: waiting.acquired() }
    }

    fn apply_input(&self, mut state: LockedState<'_>, input: Input) {
        let applied = self.apply(&mut state, input, None);
        self.unlock_and_deliver(state, applied);
    }

    /// Applies one input; the answer to the call `own` is returned separately.
    fn apply(&self, state: &mut State, input: Input, own: Option<CallId>) -> InputResult {
        let now = self.clock.now();
        state.inputs += 1;
        let observers = self.observers.get().map(Vec::as_slice).unwrap_or_default();
        let mut effects = std::mem::take(&mut state.effects);
        let mut applied = InputResult::default();
        let (mut next, mut spares) = (Some(input), Vec::new());
        // The input that gives a job its spare incarnation may also continue pending work, and so has effects
        // of its own.
        while let Some(input) = next {
            state.coordinator.apply(now, input, &mut effects);
            for effect in effects.drain(..) {
                match effect {
                    Effect::Reply(call, outcome) if Some(call) == own => applied.own = Some(outcome),
                    Effect::Reply(call, outcome) => {
                        if let Some(waiting) = state.waiting.remove(call, &mut applied.tables) {
                            applied.deliveries.push((waiting, outcome));
                        }
                    }
                    Effect::CommandDone(outcome) => applied.acted = Some(outcome),
                    Effect::Event(event) => {
                        observers.iter().for_each(|observer| observer.event(&event));
                        let numbered = NumberedEvent { number: state.next_event, event: Arc::new(event) };
                        state.next_event += 1;
                        // Without followers, the send fails; that is no error.
                        let _ = self.followers.send(numbered.clone());
                        state.history.push(numbered, &mut applied.events);
                    }
                    Effect::BarrierEnded(ending) => {
                        observers.iter().for_each(|observer| observer.barrier_ended(&ending));
                    }
                    Effect::FreeLater(discarded) => applied.discarded.push(discarded),
                    Effect::RequestIncarnation(job) => {
                        let incarnation = ServiceIncarnation(clock::random_nonzero().get());
                        spares.push(Input::NextIncarnation { job, incarnation });
                    }
                }
            }
            next = spares.pop();
        }
        state.effects = effects;
        applied
    }

    /// Releases the lock, wakes the timer task if the next deadline is earlier, and delivers the answers.
    fn unlock_and_deliver(&self, state: LockedState<'_>, applied: InputResult) {
        let next = state.coordinator.next_wakeup().map_or(u64::MAX, |at| at.0);
        let nearer = next < self.armed.load(Ordering::Relaxed);
        if nearer {
            self.armed.store(next, Ordering::Relaxed);
        }
        drop(state);
        if nearer {
            self.rearm.notify_one();
        }
        for (waiting, outcome) in applied.deliveries {
            waiting.inbox.deliver(waiting.slot, outcome);
        }
        self.drop_deferred(applied.discarded);
    }

    /// Frees memory; a large amount on the reaper's thread.
    fn drop_deferred(&self, discarded: Vec<DeferredFree>) {
        const MUCH: usize = 1 << 12;
        let weight: usize = discarded.iter().map(DeferredFree::weight).sum();
        if weight > MUCH {
            self.drop_later(discarded);
        }
    }
}

/// Returns whether a request is about one task or one key, so that its cost does not depend on the size of
/// the state.
fn is_about_one(request: &Request) -> bool {
    matches!(request, Request::Heartbeat { .. } | Request::Get { .. } | Request::TryGet { .. })
}

/// The reason for which a job cannot be declared.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum DeclareError {
    /// A job with that name exists.
    #[error("there is a job named {0} already")]
    Exists(JobName),
    /// The bound on jobs is reached.
    #[error("there are {0} jobs, the most that this server may have (setting jobs-max): delete one first")]
    TooMany(usize),
}

/// A hasher for our own consecutive numbers: it spreads them over the high bits, which the table uses too.
#[derive(Default)]
struct NumberHasher(u64);

impl Hasher for NumberHasher {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, bytes: &[u8]) {
        for &byte in bytes {
            self.write_u64(u64::from(byte));
        }
    }

    fn write_u64(&mut self, number: u64) {
        self.0 = (self.0 ^ number).wrapping_mul(0x9E37_79B9_7F4A_7C15);
    }
}
