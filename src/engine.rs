//! The driver of the state machine: passes inputs and the time to it under one lock, and performs its effects.
//!
//! The rules of jobs are in `coordination`, and the protocols in `grpc` and `http`. Begin at [`Engine::call`]. Only
//! `Engine::apply` applies inputs. `engine/` has the parts of the driver: `jobs.rs` (declarations and commands), `lock.rs`,
//! `observer.rs`, `waiting_calls.rs`, `event_history.rs`, `drop_thread.rs`; and `journaling.rs`, `recorder.rs`, `replay.rs`,
//! `state_digest.rs`, `held_answers.rs`, by which the state survives the process.
//!
//! - *One lock, on the caller's thread.* Each caller applies its input on its own thread, under a lock that is held
//!   only for the transition. A transition takes about a microsecond. If one thread owned the state, a queue to it
//!   would cost two wake-ups for each call. Here, an answer that is known at once needs no queue and no wake-up.
//!   Answers to waiting calls go to the [`AnswerInbox`] of their connection after the lock is released.
//! - *Readers copy.* [`Engine::read`] copies one pointer for each job under the lock, releases the lock, and then
//!   runs its closure on the copy. So pages, scrapes and listings do not delay clients. [`Engine::read_under_lock`]
//!   runs its closure under the lock; it is meant for single entries.
//! - *Time.* A tokio task sleeps until the state machine's next deadline ([`Engine::run_timers`]). If this task runs
//!   more than a second late, for example because the process was stopped, heartbeats may wait unread. The driver
//!   then applies [`Input::DriverLagged`] first, so that no task fails because of them.
//! - *Freeing.* Memory that the state machine no longer needs is freed after the lock is released, large amounts on a
//!   separate thread (`drop_thread.rs`).
//! - *Observers* (counters, traces, timelines) receive each event and each ended barrier under the lock. So they must
//!   be quick, and must neither block nor call the driver. A [`PersistentObserver`] keeps a history, which is saved
//!   with the state.
//! - *Measurement.* Of inputs that concern one task or one key, one in 64 is timed under the lock. All others are timed.

mod answer_flush;
mod applied_input;
mod continued_calls;
mod counters;
mod drop_thread;
mod durable_state;
mod event_history;
mod held_answers;
mod jobs;
mod journaling;
mod kept_calls;
mod lock;
mod observer;
mod packed_heartbeats;
mod recorder;
mod replay;
mod restore_report;
mod state_digest;
mod waiting_calls;

use std::net::SocketAddr;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock, PoisonError, RwLock, Weak};
use std::time::Duration;

use tokio::sync::{Notify, broadcast};

use crate::clock::{self, Clock};
use crate::coordination::{
    CallId, CallOutcome, Caller, ConnectionEnd, ConnectionId, Coordinator, DeferredFree, Effect, Failure,
    Input, JobId, Request, ServiceIncarnation, Timestamp,
};

pub use answer_flush::{FlushToken, LoggedConnections};
use applied_input::{AppliedInput, OwnCall, is_about_one_task_or_key};
pub use counters::EngineCounters;
use drop_thread::DropThread;
use durable_state::DurableState;
use event_history::EventHistory;
pub use event_history::{EventHistoryExcerpt, NumberedEvent};
use held_answers::HeldAnswers;
pub use jobs::{DeclareError, DeclaredJob};
pub use kept_calls::KeptConnections;
use kept_calls::ReplayedCalls;
pub use lock::EngineLockTimes;
use lock::{ReadLockedState, StateLock, WriteLockedState};
pub use observer::{ContentsSerialiser, Observer, PersistentObserver};
pub use recorder::{Durability, JOURNAL_ENCODING, JournalState};
use recorder::{InputRecorder, is_refusable, refusal_effects, refused_call};
pub use replay::{RestoreError, RestoredState, Visited};
pub use restore_report::{DigestComparison, RestoreReport};
pub use waiting_calls::AnswerInbox;
use waiting_calls::{WaitingCall, WaitingCalls};

/// The state of a call after [`Engine::call`].
pub enum AnsweredOrWaiting {
    /// The call is answered.
    Now(CallOutcome),
    /// The call waits; its answer will be delivered to the inbox, unless the call is cancelled before.
    Waiting(CallId),
}

struct EngineState {
    /// The state that a journal preserves, if the server has one.
    durable: DurableState,
    waiting: WaitingCalls,
    effects: Vec<Effect>,
    lags: u64,
    /// The answers to waiting calls that are collected while work is pending.
    undelivered: Vec<(WaitingCall, CallOutcome)>,
    /// Records inputs, if the server has a journal.
    recorder: Option<InputRecorder>,
    /// The journal has been ended: nothing would record a change.
    is_closed: bool,
    /// A snapshot is to be made as soon as possible.
    is_snapshot_wanted: bool,
    /// The calls and answers that the continued connections do not know yet.
    replayed_calls: ReplayedCalls,
}

impl EngineState {
    /// Returns the reason for which changes are refused now.
    fn change_refusal(&self) -> Option<String> {
        if self.is_closed {
            return Some(STOPPED.to_owned());
        }
        self.recorder.as_ref().and_then(InputRecorder::refusal)
    }

    /// Returns the failure of a call that is refused now.
    fn call_refusal(&self, request: &Request) -> Option<Arc<Failure>> {
        if !is_refusable(request) {
            return None;
        }
        self.change_refusal().map(refused_call)
    }

    /// Returns the number below which all records must be on the disk before an answer leaves.
    fn held_until(&self) -> Option<u64> {
        self.recorder.as_ref().and_then(InputRecorder::held_until)
    }
}

/// The number of events that a follower may lag behind before it misses some.
const EVENTS_BUFFERED: usize = 1 << 12;

/// The number of calls of a closed connection that are dropped under one hold of the lock.
const CALLS_DROPPED_AT_ONCE: usize = 1 << 8;

/// The number of answers that are delivered together while work is pending, so that a connection with many of them writes
/// them together. Collecting so many takes about a millisecond.
const DELIVERED_AT_ONCE: usize = 1 << 10;

/// The answer to a change after the end of the journal.
const STOPPED: &str = "The coordination service is stopping and makes no more changes.";

/// The delay of a deadline from which on the driver assumes that it did not run.
const LAG_TOLERANCE: Duration = Duration::from_secs(1);

/// The driver of the state machine, which all its callers share.
pub struct Engine {
    state: StateLock<EngineState>,
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
    persistent_observers: OnceLock<Vec<Arc<dyn PersistentObserver>>>,
    held_answers: OnceLock<Arc<HeldAnswers>>,
    logged_connections: OnceLock<Weak<dyn LoggedConnections>>,
    /// Held for reading while answers are delivered.
    delivering: RwLock<()>,
    missed: AtomicU64,
    reaper: DropThread,
    this: Weak<Self>,
}

impl Engine {
    /// Returns an engine without jobs. Deadlines are kept only while [`Engine::run_timers`] runs.
    #[must_use]
    pub fn new(clock: Clock) -> Arc<Self> {
        let state = EngineState {
            durable: DurableState::default(),
            waiting: WaitingCalls::default(),
            effects: Vec::new(),
            lags: 0,
            undelivered: Vec::new(),
            recorder: None,
            is_closed: false,
            is_snapshot_wanted: false,
            replayed_calls: ReplayedCalls::default(),
        };
        let (followers, _) = broadcast::channel(EVENTS_BUFFERED);
        Arc::new_cyclic(|this| Self {
            state: StateLock::new(state),
            clock,
            armed: AtomicU64::new(u64::MAX),
            rearm: Notify::new(),
            followers,
            jobs_max: AtomicUsize::new(Self::JOBS_MAX),
            job_changes: AtomicU64::new(0),
            observers: OnceLock::new(),
            persistent_observers: OnceLock::new(),
            held_answers: OnceLock::new(),
            logged_connections: OnceLock::new(),
            delivering: RwLock::default(),
            missed: AtomicU64::new(0),
            reaper: DropThread::default(),
            this: Weak::clone(this),
        })
    }

    /// Returns the times for which the lock is waited for and held.
    #[must_use]
    pub fn lock_times(&self) -> &EngineLockTimes {
        self.state.times()
    }

    fn lock(&self) -> WriteLockedState<'_, EngineState> {
        self.state.lock_for_input(&self.clock)
    }

    fn lock_for_bulk_work(&self) -> WriteLockedState<'_, EngineState> {
        self.state.lock_for_bulk_work(&self.clock)
    }

    fn lock_for_read(&self) -> ReadLockedState<'_, EngineState> {
        self.state.lock_for_read(&self.clock)
    }

    /// Sends every effect to `observers` from now on. Only the first call has an effect.
    pub fn set_observers(&self, observers: Vec<Arc<dyn Observer>>) {
        let _ = self.observers.set(observers);
    }

    /// Counts events that a follower missed.
    pub fn add_to_missed_events(&self, events: u64) {
        self.missed.fetch_add(events, Ordering::Relaxed);
    }

    /// Returns the engine's clock.
    #[must_use]
    pub fn clock(&self) -> &Clock {
        &self.clock
    }

    /// Registers a new connection and returns its number.
    pub fn register_connection(&self, peer: SocketAddr) -> ConnectionId {
        let mut state = self.lock();
        let connection = ConnectionId(state.durable.next_connection);
        state.durable.next_connection += 1;
        self.apply_input(state, Input::ConnectionOpened { connection, peer });
        connection
    }

    /// Reports the end of a connection. Calls that wait on it are dropped; their inbox receives no more
    /// answers.
    pub fn report_connection_closed(
        &self,
        connection: ConnectionId,
        ending: ConnectionEnd,
        calls: Vec<CallId>,
    ) {
        let mut state = self.lock_for_bulk_work();
        if !state.replayed_calls.is_empty() {
            state.replayed_calls.forget_connection(connection);
        }
        self.apply_input(state, Input::ConnectionClosed { connection, ending });
        match self.this.upgrade() {
            Some(engine) if calls.len() > CALLS_DROPPED_AT_ONCE => {
                self.reaper.run_in_background(move || engine.drop_waiting_calls(&calls));
            }
            _ => self.drop_waiting_calls(&calls),
        }
    }

    /// Drops calls whose answers have no recipient. The lock is released between parts, so that other callers
    /// come in between.
    fn drop_waiting_calls(&self, calls: &[CallId]) {
        for part in calls.chunks(CALLS_DROPPED_AT_ONCE) {
            let mut tables = Vec::new();
            let mut state = self.lock_for_bulk_work();
            let dropped: Vec<Option<WaitingCall>> =
                part.iter().map(|call| state.waiting.remove(*call, &mut tables)).collect();
            drop(state);
            drop((dropped, tables));
        }
    }

    /// Drops a large value on the reaper's thread.
    pub fn drop_in_background(&self, thing: impl Send + 'static) {
        self.reaper.run_in_background(move || drop(thing));
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
    ) -> AnsweredOrWaiting {
        self.call_in_stream(0, job, caller, request, inbox, slot)
    }

    /// Does what [`Self::call`] does. A connection uses the number of a stream once, and `stream` is 0 for connections that end
    /// with the process. A call that a former process has applied is not applied again.
    pub fn call_in_stream(
        &self,
        stream: u32,
        job: JobId,
        caller: Caller,
        request: Request,
        inbox: &Arc<dyn AnswerInbox>,
        slot: u64,
    ) -> AnsweredOrWaiting {
        // The value of a refused request is freed after the lock is released.
        let _value = match &request {
            Request::Insert { value, .. } => Some(value.clone()),
            _ => None,
        };
        let is_heartbeat = matches!(&request, Request::Heartbeat { .. });
        let mut state =
            if is_about_one_task_or_key(&request) { self.lock() } else { self.lock_for_bulk_work() };
        if !state.replayed_calls.is_empty()
            && let Some(call) = state.replayed_calls.take_call(caller.connection, stream)
        {
            return match state.replayed_calls.take_outcome(call) {
                Some(outcome) => AnsweredOrWaiting::Now(outcome),
                None => {
                    state.waiting.insert(call, WaitingCall { inbox: Arc::clone(inbox), slot });
                    AnsweredOrWaiting::Waiting(call)
                }
            };
        }
        if let Some(refusal) = state.call_refusal(&request) {
            return AnsweredOrWaiting::Now(Err(refusal));
        }
        let call = CallId(state.durable.next_call);
        state.durable.next_call += 1;
        let had_work = state.durable.coordinator.has_pending_work();
        let input = Input::Call { job, call, caller, request };
        let mut applied = self.apply(&mut state, input, Some(OwnCall { call, stream }));
        let status = match applied.own.take() {
            Some(outcome) if !is_heartbeat && state.held_until().is_some() => {
                applied.deliveries.push((WaitingCall { inbox: Arc::clone(inbox), slot }, outcome));
                AnsweredOrWaiting::Waiting(call)
            }
            Some(outcome) => AnsweredOrWaiting::Now(outcome),
            None => {
                state.waiting.insert(call, WaitingCall { inbox: Arc::clone(inbox), slot });
                AnsweredOrWaiting::Waiting(call)
            }
        };
        let state = if had_work { state } else { self.continue_pending_work(state, &mut applied) };
        self.unlock_and_deliver(state, applied);
        status
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
        self.apply_input(self.lock_for_bulk_work(), Input::Stop);
    }

    /// Runs `look` on a copy of the jobs. The copy costs a pointer for each job; the lock is free while
    /// `look` runs, however long that takes.
    pub fn read<T>(&self, look: impl FnOnce(&Coordinator, Timestamp) -> T) -> T {
        let (copy, now) = {
            let state = self.lock_for_read();
            (state.durable.coordinator.snapshot(), self.clock.now())
        };
        look(&copy, now)
    }

    /// Runs `look` under the lock. It must take the same short time however large the state is; otherwise use
    /// [`Engine::read`].
    pub fn read_under_lock<T>(&self, look: impl FnOnce(&Coordinator) -> T) -> T {
        look(&self.lock_for_read().durable.coordinator)
    }

    /// Returns the number of waiting calls.
    #[must_use]
    pub fn waiting_call_count(&self) -> usize {
        self.lock_for_read().waiting.len()
    }

    /// Returns the retained events of all jobs after number `after`, and a stream of later ones.
    #[must_use]
    pub fn subscribe_events(&self, after: u64) -> (EventHistoryExcerpt, broadcast::Receiver<NumberedEvent>) {
        let (kept, coming) = self.subscribe_all_with_history();
        (kept.events_of_all_jobs_after(after), coming)
    }

    fn subscribe_all_with_history(&self) -> (EventHistory, broadcast::Receiver<NumberedEvent>) {
        let state = self.lock_for_read();
        (state.durable.history.clone(), self.followers.subscribe())
    }

    /// Returns the retained events of a job after number `after`, and a stream of later events of all jobs.
    #[must_use]
    pub fn subscribe_all_with_job_history(
        &self,
        job: JobId,
        after: u64,
    ) -> (EventHistoryExcerpt, broadcast::Receiver<NumberedEvent>) {
        let (kept, coming) = self.subscribe_all_with_history();
        (kept.events_of_job_after(job, after), coming)
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
                    self.apply_due_tick(at);
                    tokio::task::yield_now().await;
                }
                Some(at) => {
                    let due = tokio::time::Instant::from_std(self.clock.instant_at(at));
                    tokio::select! {
                        () = tokio::time::sleep_until(due) => {}
                        () = rearmed => {}
                    }
                }
            }
        }
    }

    fn apply_due_tick(&self, due: Timestamp) {
        // A process that was stopped or starved received no heartbeats meanwhile; the tasks did not cause
        // that.
        if self.clock.now().since(due) > LAG_TOLERANCE {
            let mut state = self.lock_for_bulk_work();
            state.lags += 1;
            self.apply_input(state, Input::DriverLagged);
        }
        self.apply_input(self.lock_for_bulk_work(), Input::Tick);
    }

    fn arm_timer(&self) -> Option<Timestamp> {
        let state = self.lock();
        let next = state.durable.coordinator.next_wakeup();
        self.armed.store(next.map_or(u64::MAX, |at| at.0), Ordering::Relaxed);
        next
    }

    fn apply_input(&self, mut state: WriteLockedState<'_, EngineState>, input: Input) {
        // Ticks do the work that is pending; other inputs only what they have left themselves.
        let continues = matches!(input, Input::Tick) || !state.durable.coordinator.has_pending_work();
        let mut applied = self.apply(&mut state, input, None);
        let state = if continues { self.continue_pending_work(state, &mut applied) } else { state };
        self.unlock_and_deliver(state, applied);
    }

    /// Applies one input; the answer to the call `own` is returned separately.
    fn apply(
        &self,
        locked: &mut WriteLockedState<'_, EngineState>,
        input: Input,
        own: Option<OwnCall>,
    ) -> AppliedInput {
        let now = locked.locked_at().unwrap_or_else(|| self.clock.now());
        let state = &mut **locked;
        state.durable.inputs += 1;
        let observers = self.observers.get().map(Vec::as_slice).unwrap_or_default();
        let mut effects = std::mem::take(&mut state.effects);
        let mut applied = AppliedInput::default();
        let (mut next, mut spares) = (Some(input), Vec::new());
        // The input that gives a job its spare incarnation may also continue pending work, and so has effects
        // of its own.
        while let Some(input) = next {
            let recorded = match &mut state.recorder {
                Some(recorder) => {
                    let stream =
                        own.filter(|_| matches!(input, Input::Call { .. })).map_or(0, |own| own.stream);
                    let next_event = state.durable.next_event;
                    recorder.record_before(now, stream, &input, &state.durable.coordinator, next_event)
                }
                None => Ok(None),
            };
            match recorded {
                Ok(unrecorded) => {
                    state.durable.coordinator.apply(now, input, &mut effects);
                    if let (Some(input), Some(recorder)) = (unrecorded, &mut state.recorder) {
                        recorder.record_after(now, input, &effects);
                    }
                }
                Err(why) => effects.extend(refusal_effects(input, why)),
            }
            for effect in effects.drain(..) {
                match effect {
                    Effect::Reply(call, outcome) if own.is_some_and(|own| own.call == call) => {
                        assert!(applied.own.is_none(), "{call:?} is answered twice");
                        applied.own = Some(outcome);
                    }
                    Effect::Reply(call, outcome) => {
                        match state.waiting.remove(call, &mut applied.tables) {
                            Some(waiting) => applied.deliveries.push((waiting, outcome)),
                            // Its connection may go on from a former process, and not have come so far.
                            None => state.replayed_calls.record_answer(call, outcome),
                        }
                    }
                    Effect::CommandDone(outcome) => applied.acted = Some(outcome),
                    Effect::ClaimAnswered(answer) => applied.claimed = Some(answer),
                    Effect::Event(event) => {
                        observers.iter().for_each(|observer| observer.on_event(&event));
                        let numbered =
                            NumberedEvent { number: state.durable.next_event, event: Arc::new(event) };
                        state.durable.next_event += 1;
                        // Without followers, the send fails; that is no error.
                        let _ = self.followers.send(numbered.clone());
                        state.durable.history.push(numbered, &mut applied.events);
                    }
                    Effect::BarrierEnded(ending) => {
                        observers.iter().for_each(|observer| observer.on_barrier_ended(&ending));
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

    /// Does some of the work that an input has left, in parts between which the lock is free, and collects the answers. The
    /// caller does it on its own thread, because a task for each part would cost more than the part.
    fn continue_pending_work<'a>(
        &'a self,
        mut state: WriteLockedState<'a, EngineState>,
        applied: &mut AppliedInput,
    ) -> WriteLockedState<'a, EngineState> {
        while state.durable.coordinator.has_pending_work() && state.undelivered.len() < DELIVERED_AT_ONCE {
            // While the lock is free, a snapshot may be made, which must know of all answers that are not delivered.
            state.undelivered.append(&mut applied.deliveries);
            drop(state);
            state = self.lock_for_bulk_work();
            let part = self.apply(&mut state, Input::Tick, None);
            let has_answers = !part.deliveries.is_empty();
            applied.merge_tick_result(part);
            if !has_answers {
                break;
            }
        }
        state
    }

    /// Releases the lock, wakes the timer task if the next deadline is earlier, and delivers the answers. While work is
    /// pending, answers are collected first; the ticks that do this work deliver them.
    fn unlock_and_deliver(&self, mut state: WriteLockedState<'_, EngineState>, mut applied: AppliedInput) {
        let is_pending = state.durable.coordinator.has_pending_work();
        if is_pending || !state.undelivered.is_empty() {
            state.undelivered.append(&mut applied.deliveries);
            if !is_pending || state.undelivered.len() >= DELIVERED_AT_ONCE {
                applied.deliveries = std::mem::take(&mut state.undelivered);
            }
        }
        let next = state.durable.coordinator.next_wakeup().map_or(u64::MAX, |at| at.0);
        let nearer = next < self.armed.load(Ordering::Relaxed);
        if nearer {
            self.armed.store(next, Ordering::Relaxed);
        }
        // The answers to others may be of any input, so they wait for all records so far.
        let held_until =
            Some(&applied.deliveries).filter(|held| !held.is_empty()).and_then(|_| state.held_until());
        // Taken before the lock is released: a snapshot of this state counts only once these answers are delivered.
        let delivering = (!applied.deliveries.is_empty())
            .then(|| self.delivering.read().unwrap_or_else(PoisonError::into_inner));
        drop(state);
        if nearer {
            self.rearm.notify_one();
        }
        match (held_until, self.held_answers.get()) {
            (Some(until), Some(held)) => held.hold(until, applied.deliveries),
            _ => applied.deliveries.into_iter().for_each(|(waiting, outcome)| {
                waiting.inbox.deliver(waiting.slot, outcome);
            }),
        }
        drop(delivering);
        self.free_deferred_memory(applied.discarded);
    }

    /// Frees memory; a large amount on the reaper's thread.
    fn free_deferred_memory(&self, discarded: Vec<DeferredFree>) {
        const MUCH: usize = 1 << 12;
        let weight: usize = discarded.iter().map(DeferredFree::approximate_allocations).sum();
        if weight > MUCH {
            self.drop_in_background(discarded);
        }
    }
}
