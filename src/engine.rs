//! The driver of the state machine: feeds it inputs and the time under one lock, and performs its effects.
//!
//! It decides nothing about jobs (`coordination` does) and speaks no protocol (`grpc` and `http` do). Begin at
//! [`Engine::call`]; `Engine::apply` is the only place that applies an input.
//!
//! - *One lock, on the caller's thread.* The caller applies its own input under a lock that is held for the
//!   transition only. A transition takes about a microsecond; a queue to an owner thread would cost two wake-ups a
//!   call. An answer that is known at once costs no queue and no wake-up. Answers to waiting calls go to the
//!   [`AnswerInbox`] of their connection after the lock is released.
//! - *Readers copy.* [`Engine::read`] copies a pointer for each job under the lock and runs its closure afterwards,
//!   so pages, scrapes and listings do not hold up clients. Only [`Engine::read_under_lock`] reads under the lock, for a
//!   single entry.
//! - *Time.* One task sleeps until the state machine's next deadline ([`Engine::run_timers`]). If the driver was
//!   away for more than a second (stopped, starved), it applies [`Input::DriverLagged`] first: the silence is its own.
//! - *Freeing.* Memory that the state machine gives up is freed after the lock, much of it on a thread of its own
//!   (`reaper.rs`).
//! - *Observers* (counters, traces, timelines) hear of each event under the lock: they are quick, do not block, and
//!   do not call back.
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

/// Where the answers to waiting calls go: one for each connection.
pub trait AnswerInbox: Send + Sync {
    /// Takes the answer to the call that was asked with `slot`. Called outside of the engine's lock, on
    /// any thread; must not block.
    fn deliver(&self, slot: u64, outcome: CallOutcome);
}

/// What has become of a call.
pub enum CallStatus {
    /// It is answered.
    Now(CallOutcome),
    /// It waits; the answer will be delivered to its inbox, unless it is hung up before.
    Waiting(CallId),
}

/// Whoever wants to know of every effect, such as counters. Called under the engine's lock: it must be quick, must not
/// block and must not come back to the engine.
pub trait Observer: Send + Sync {
    /// Something changed.
    fn event(&self, event: &JobEvent);
    /// A barrier has ended.
    fn barrier_ended(&self, ending: &BarrierCompletion);
}

/// What the engine counts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct EngineCounters {
    /// Inputs that were applied.
    pub inputs: u64,
    /// Events that happened.
    pub events: u64,
    /// Events that are kept.
    pub events_kept: usize,
    /// How many are kept at most.
    pub events_kept_max: usize,
    /// Events that a follower never saw, since it was too slow.
    pub events_missed: u64,
    /// Followers now.
    pub followers: usize,
    /// Times that the driver found that it could not run for a while.
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

/// The calls that wait. In many tables, so that none of them has to grow by much at once while the lock is held.
#[derive(Default)]
struct WaitingCalls {
    tables: [WaitingTable; Self::TABLES],
    len: usize,
    removed: usize,
}

type WaitingTable = HashMap<CallId, WaitingCall, BuildHasherDefault<NumberHasher>>;

impl WaitingCalls {
    const TABLES: usize = 32;
    /// A table with room for so many calls keeps it.
    const KEPT: usize = 1 << 10;

    fn table(&mut self, call: CallId) -> &mut WaitingTable {
        let number = usize::try_from(call.0 % Self::TABLES as u64).unwrap_or_default();
        &mut self.tables[number]
    }

    fn insert(&mut self, call: CallId, waiting: WaitingCall) {
        self.len += usize::from(self.table(call).insert(call, waiting).is_none());
    }

    /// Takes a call out. A table that was left for a smaller one is added to `gone`, to be freed without the lock.
    fn remove(&mut self, call: CallId, gone: &mut Vec<WaitingTable>) -> Option<WaitingCall> {
        let waiting = self.table(call).remove(&call)?;
        self.len -= 1;
        self.removed = self.removed.wrapping_add(1);
        // What very many calls took is given back. The tables empty alike: each has its turn, so that the lock is not held
        // until all of them have moved what is left. The period is prime, so that it meets every table.
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

/// What came of an input.
#[derive(Default)]
struct InputResult {
    /// The answer to the call that was applied, if it came at once.
    own: Option<CallOutcome>,
    /// The answer to the act that was applied.
    acted: Option<Result<CommandOutcome, CommandRefusal>>,
    /// The answers to calls that waited.
    deliveries: Vec<(WaitingCall, CallOutcome)>,
    /// What is to be freed.
    discarded: Vec<DeferredFree>,
    events: Vec<Ring>,
    tables: Vec<WaitingTable>,
}

/// An event with its place in the order of all events of this server, from 1.
#[derive(Debug, Clone)]
pub struct NumberedEvent {
    /// Its place.
    pub number: u64,
    /// What happened.
    pub event: Arc<JobEvent>,
}

/// How many events a follower may lag behind before it loses some.
const EVENTS_BUFFERED: usize = 1 << 12;

/// How many calls of a connection that is gone are dropped while the lock is held once.
const CALLS_DROPPED_AT_ONCE: usize = 1 << 10;

/// How late a deadline may be kept before the driver takes itself to have been away.
const LAG_TOLERANCE: Duration = Duration::from_secs(1);

/// How long the engine's lock is waited for and held.
#[derive(Debug, Default)]
pub struct Locks {
    /// By those who apply an input about one task or one key; one in many is timed.
    pub inputs: meter::LockTimes,
    /// By those who apply any other input: each is timed.
    pub bulk: meter::LockTimes,
    /// By those who only look (pages, scrapes, detectors), to take a copy: each is timed.
    pub reads: meter::LockTimes,
}

/// The state, while it is locked.
struct LockedState<'a> {
    state: MutexGuard<'a, State>,
    // After the lock, so that it is dropped after it.
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
    /// How many jobs there may be.
    jobs_max: AtomicUsize,
    /// How many times a job was made or deleted.
    job_changes: AtomicU64,
    observers: OnceLock<Vec<Arc<dyn Observer>>>,
    missed: AtomicU64,
    locks: Locks,
    reaper: Reaper,
    this: Weak<Self>,
}

impl Engine {
    /// How many jobs there may be unless a setting says otherwise.
    pub const JOBS_MAX: usize = 1024;

    /// An engine without jobs. [`Engine::run_timers`] must be running for deadlines to be kept.
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

    /// Tells `observers` of every effect from now on. Those of the first call stay.
    pub fn observe_with(&self, observers: Vec<Arc<dyn Observer>>) {
        let _ = self.observers.set(observers);
    }

    /// What the engine has counted so far.
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

    /// A follower has missed so many events.
    pub fn count_missed_events(&self, events: u64) {
        self.missed.fetch_add(events, Ordering::Relaxed);
    }

    /// Puts what an observer has found into the order of events.
    pub fn record_finding(&self, job: JobId, note: FindingNote) {
        self.apply_input(self.lock(), Input::FindingChanged { job, note });
    }

    /// Puts what a worker has reported of its transfers into the order of events.
    pub fn record_transfer_failure(&self, job: JobId, note: TransferFailure) {
        self.apply_input(self.lock(), Input::TransferFailed { job, note });
    }

    /// The engine's clock.
    #[must_use]
    pub fn clock(&self) -> &Clock {
        &self.clock
    }

    /// Bounds how many jobs there may be; those that are there stay.
    pub fn bound_jobs(&self, most: usize) {
        self.jobs_max.store(most, Ordering::Relaxed);
    }

    /// Declares a job, as the server was configured.
    ///
    /// # Errors
    /// If there is a job of that name, or there are too many jobs.
    pub fn declare(&self, name: JobName, settings: JobSettings) -> Result<JobId, DeclareError> {
        self.declare_with(name, settings, None, |_| ()).map(|(job, ())| job)
    }

    /// Declares a job that somebody asked for, and looks at the jobs as they are right then. `look` runs on a copy, as that
    /// of [`Engine::read`] does.
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

    /// How many times a job was made or deleted: what was found out about the names of jobs holds as long as this stays.
    #[must_use]
    pub fn job_table_version(&self) -> u64 {
        self.job_changes.load(Ordering::Acquire)
    }

    /// Acts upon a job.
    ///
    /// # Errors
    /// If the act is refused; nothing has changed then.
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

    /// Numbers a new connection.
    pub fn connection_opened(&self, peer: SocketAddr) -> ConnectionId {
        let mut state = self.lock();
        let connection = ConnectionId(state.next_connection);
        state.next_connection += 1;
        self.apply_input(state, Input::ConnectionOpened { connection, peer });
        connection
    }

    /// Reports that a connection is gone. Calls that wait on it are dropped; their inbox hears no more of them.
    pub fn connection_closed(&self, connection: ConnectionId, ending: ConnectionEnd, calls: Vec<CallId>) {
        self.apply_input(self.lock_for_bulk(), Input::ConnectionClosed { connection, ending });
        match self.this.upgrade() {
            Some(engine) if calls.len() > CALLS_DROPPED_AT_ONCE => {
                self.reaper.run(move || engine.drop_waiting(&calls));
            }
            _ => self.drop_waiting(&calls),
        }
    }

    /// Drops calls whose answers are for nobody any more. Many are dropped bit by bit: others come in between.
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

    /// Drops something that takes long to drop, where nobody waits for it.
    pub fn drop_later(&self, thing: impl Send + 'static) {
        self.reaper.run(move || drop(thing));
    }

    /// Puts a call to a job. Either it is answered at once, or its answer is delivered later to
    /// `inbox` under `slot`.
    pub fn call(
        &self,
        job: JobId,
        caller: Caller,
        request: Request,
        inbox: &Arc<dyn AnswerInbox>,
        slot: u64,
    ) -> CallStatus {
        // A value that is refused is freed after the lock is.
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

    /// Drops a call that nobody waits for any more.
    pub fn cancel_waiting_call(&self, job: JobId, call: CallId) {
        let mut tables = Vec::new();
        let mut state = self.lock();
        // If its answer is on the way already, there is nothing to drop.
        if state.waiting.remove(call, &mut tables).is_some() {
            self.apply_input(state, Input::CallCancelled { job, call });
        }
    }

    /// Answers every waiting call, in the way that lets clients live on.
    pub fn stop(&self) {
        self.apply_input(self.lock_for_bulk(), Input::Stop);
    }

    /// Looks at the jobs as they are now. `look` runs on a copy, which costs a pointer for each job: the lock is free
    /// while it runs, however long that takes.
    pub fn read<T>(&self, look: impl FnOnce(&Coordinator, Timestamp) -> T) -> T {
        let (copy, now) = {
            let state = self.lock_for_read();
            (state.coordinator.snapshot(), self.clock.now())
        };
        look(&copy, now)
    }

    /// Looks something up. `look` runs under the lock, and must not take longer the more there is: see [`Engine::read`].
    pub fn read_under_lock<T>(&self, look: impl FnOnce(&Coordinator) -> T) -> T {
        look(&self.lock_for_read().coordinator)
    }

    /// How many calls wait for an answer.
    #[must_use]
    pub fn waiting_calls(&self) -> usize {
        self.lock_for_read().waiting.len
    }

    /// The kept events of all jobs after number `after`, and a stream of those to come.
    #[must_use]
    pub fn follow(&self, after: u64) -> (RetainedEvents, broadcast::Receiver<NumberedEvent>) {
        let (kept, coming) = self.subscribe_with_history();
        (kept.after(after), coming)
    }

    fn subscribe_with_history(&self) -> (EventHistory, broadcast::Receiver<NumberedEvent>) {
        let state = self.lock_for_read();
        (state.history.clone(), self.followers.subscribe())
    }

    /// The kept events of a job after number `after`, and a stream of those to come, of all jobs.
    #[must_use]
    pub fn follow_job(&self, job: JobId, after: u64) -> (RetainedEvents, broadcast::Receiver<NumberedEvent>) {
        let (kept, coming) = self.subscribe_with_history();
        (kept.of(job, after), coming)
    }

    /// Keeps the deadlines of the state machine, for as long as the returned future is polled.
    pub async fn run_timers(self: Arc<Self>) {
        loop {
            let armed = self.arm_timer();
            let rearmed = self.rearm.notified();
            match armed {
                None => rearmed.await,
                // Work that is decided and not done: at once. A timer would sleep for the rest of a millisecond.
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
        // A process that was stopped, or starved, has heard nobody in the meantime; that is not their fault.
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

    /// How long the lock is waited for and held.
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
        // A transition that panicked has been reported; the tables it left are still the best there is.
        let state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        LockedState { state, _held: waiting.acquired() }
    }

    fn apply_input(&self, mut state: LockedState<'_>, input: Input) {
        let applied = self.apply(&mut state, input, None);
        self.unlock_and_deliver(state, applied);
    }

    /// Applies one input; the answer to the call `own` is told apart.
    fn apply(&self, state: &mut State, input: Input, own: Option<CallId>) -> InputResult {
        let now = self.clock.now();
        state.inputs += 1;
        let observers = self.observers.get().map(Vec::as_slice).unwrap_or_default();
        let mut effects = std::mem::take(&mut state.effects);
        let mut applied = InputResult::default();
        let (mut next, mut spares) = (Some(input), Vec::new());
        // An input that gives a job a spare identity may also go on with work that was put off, and so has effects of its own.
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
                        // Nobody following is no error.
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

    /// Releases the lock, wakes the timer task if a deadline came nearer, and hands out the answers.
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

    /// Frees memory: much of it where nobody waits for it.
    fn drop_deferred(&self, discarded: Vec<DeferredFree>) {
        const MUCH: usize = 1 << 12;
        let weight: usize = discarded.iter().map(DeferredFree::weight).sum();
        if weight > MUCH {
            self.drop_later(discarded);
        }
    }
}

/// Whether a request is about one task or one key, whatever there is beside it.
fn is_about_one(request: &Request) -> bool {
    matches!(request, Request::Heartbeat { .. } | Request::Get { .. } | Request::TryGet { .. })
}

/// Why a job cannot be declared.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum DeclareError {
    /// There is a job of that name already.
    #[error("there is a job named {0} already")]
    Exists(JobName),
    /// There are too many.
    #[error("there are {0} jobs, the most that this server may have (setting jobs-max): delete one first")]
    TooMany(usize),
}

/// Hashes numbers that we count up ourselves: spreads them over the high bits, which the table uses too.
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
