//! Connects the engine with its journal: restores the state at the start, makes snapshots, and ends the journal in good order.
//!
//! `recorder.rs` records inputs, and `replay.rs` reads them. Begin at [`Engine::resume_from_journal`].

use std::io::Write;
use std::sync::atomic::Ordering;
use std::sync::{Arc, PoisonError, Weak};
use std::time::Duration;

use muster_journal::{JournalError, JournalFolder, JournalOptions, JournalWriter};

use super::answer_flush::{LoggedConnections, wait_until_flushed};
use super::held_answers::HeldAnswers;
use super::recorder::{InputRecorder, JournalState};
use super::replay::snapshot_writer;
use super::state_digest::{DigestComparison, ReplayedDigests, StateMark, digest_of};
use super::{Durability, Engine, EngineState, PersistentObserver, RestoredState};
use crate::clock;
use crate::coordination::{Coordinator, Input, ServiceIncarnation, Timestamp};

impl Engine {
    /// Makes a snapshot count only once all answers that were given before it are in the logs of `connections`: a replay that begins
    /// from the snapshot does not give them again. Only the first call has an effect.
    pub fn set_logged_connections(&self, connections: Weak<dyn LoggedConnections>) {
        let _ = self.logged_connections.set(connections);
    }

    /// Takes the restored state in place of the empty one, and records every input from now on. To be called before anybody
    /// uses the engine, and after [`Engine::set_observers`]. Connections and waiting calls of the former process are gone, but for
    /// those that the state was restored for, and the silence since then fails no task. `persistent_observers` are part of
    /// snapshots. `after` says how the former process ended, if that is known.
    ///
    /// # Errors
    /// If the journal cannot be written.
    pub fn resume_from_journal(
        &self,
        mut restored: RestoredState,
        folder: JournalFolder,
        options: JournalOptions,
        durability: Durability,
        persistent_observers: Vec<Arc<dyn PersistentObserver>>,
        after: Option<String>,
    ) -> Result<(), JournalError> {
        let writer = JournalWriter::begin(folder, &restored.end, options)?;
        restored.report.after.clone_from(&after);
        let digests = restored.digests;
        if digests.has_digest() {
            restored.report.digest = DigestComparison::UnderWay;
        }
        let _ = self.persistent_observers.set(persistent_observers);
        if durability == Durability::Host {
            let _ = self.held_answers.set(HeldAnswers::new(writer.sync()));
        }
        let mut locked = self.lock_for_bulk_work();
        let state = &mut *locked;
        let has_state = restored.report.had_snapshot || restored.report.inputs > 0;
        state.durable = restored.state;
        state.durable.restarts += u64::from(has_state);
        state.recorder = Some(InputRecorder::new(writer, durability, restored.report));
        let kept = restored.calls.kept().connections();
        state.replayed_calls = restored.calls;
        for job in restored.wanted_incarnations {
            let incarnation = ServiceIncarnation(clock::random_nonzero().get());
            self.apply(&mut locked, Input::NextIncarnation { job, incarnation }, None);
        }
        if has_state {
            // A snapshot has to wait until the connections that go on have their answers.
            locked.is_snapshot_wanted = !kept.is_empty();
            self.apply(&mut locked, Input::Resumed { after, kept }, None);
            let now = self.clock.now();
            if !locked.is_snapshot_wanted {
                self.begin_snapshot(&mut locked, now, None);
            }
        }
        let changes = locked.durable.coordinator.jobs().count() as u64;
        self.job_changes.fetch_add(changes, Ordering::Release);
        let held_until = locked.held_until();
        drop(locked);
        self.rearm.notify_one();
        self.compare_digest(digests);
        // Answers that the replay has found leave at once, so their records must be on the disk now.
        if let (Some(until), Some(held)) = (held_until, self.held_answers.get()) {
            held.wait(until);
        }
        Ok(())
    }

    /// Copies the state, which costs one pointer for each job, and some for each connection, and writes it on another thread.
    ///
    /// The snapshot counts once the answers so far are in the logs of `connections`.
    fn begin_snapshot(
        &self,
        state: &mut EngineState,
        now: Timestamp,
        connections: Option<Arc<dyn LoggedConnections>>,
    ) {
        let flush = connections.map(|connections| self.flush_answers(state, connections));
        let observers = self.persistent_observers.get().map(Vec::as_slice).unwrap_or_default();
        let saved = observers.iter().map(|observer| (observer.name(), observer.copy_contents())).collect();
        if let Some(recorder) = &mut state.recorder {
            let write = snapshot_writer(now, state.durable.clone(), saved);
            recorder.begin_snapshot(move |out: &mut dyn Write| {
                write(out)?;
                flush.into_iter().for_each(|flush| flush());
                Ok(())
            });
        }
    }

    /// Delivers the answers that are collected, and returns a function that waits until all answers so far are in the logs of
    /// their connections.
    fn flush_answers(
        &self,
        state: &mut EngineState,
        connections: Arc<dyn LoggedConnections>,
    ) -> impl FnOnce() + Send + use<> {
        let collected = std::mem::take(&mut state.undelivered);
        let until = state.held_until();
        let held = self.held_answers.get().cloned();
        match (until, &held) {
            (Some(until), Some(held)) => held.hold(until, collected),
            _ => collected.into_iter().for_each(|(call, outcome)| call.inbox.deliver(call.slot, outcome)),
        }
        let engine = self.this.clone();
        move || {
            let Some(engine) = engine.upgrade() else { return };
            // Threads that were delivering answers at that time have done so.
            drop(engine.delivering.write().unwrap_or_else(PoisonError::into_inner));
            if let (Some(until), Some(held)) = (until, held) {
                held.wait_until_delivered(until);
            }
            drop(engine);
            wait_until_flushed(&*connections);
        }
    }

    /// Records contents that a persistent observer has added by itself, not from an event, so that they survive the process.
    pub fn record_note(&self, observer: &'static str, contents: &[u8]) {
        self.with_recorder(|recorder| recorder.record_note(observer, contents));
    }

    /// Makes a snapshot if one is due, and does what ends a trouble of the journal. To be called about once a second.
    pub fn maintain_journal(&self) {
        let mut state = self.lock_for_bulk_work();
        let now = self.clock.now();
        let Some(recorder) = &mut state.recorder else { return };
        recorder.maintain();
        if recorder.is_snapshot_due() || std::mem::take(&mut state.is_snapshot_wanted) {
            let connections = self.logged_connections.get().and_then(Weak::upgrade);
            self.begin_snapshot(&mut state, now, connections);
            return;
        }
        let is_digest_due = state.recorder.as_ref().is_some_and(|it| it.is_digest_due(clock::monotonic()));
        drop(state);
        if is_digest_due {
            self.record_state_digest();
        }
    }

    /// Records a digest of the state, which another thread computes.
    pub fn record_state_digest(&self) {
        let mut state = self.lock_for_bulk_work();
        let Some(mark) = state.recorder.as_mut().and_then(InputRecorder::mark_state) else { return };
        let coordinator = state.durable.coordinator.clone();
        drop(state);
        let engine = self.this.clone();
        if !spawn_digest_thread(move || record_digest(&engine, mark, coordinator)) {
            self.with_recorder(|recorder| {
                recorder.record_digest(mark, None, clock::monotonic(), Duration::ZERO);
            });
        }
    }

    /// Compares the restored state with its digest, on another thread.
    fn compare_digest(&self, digests: ReplayedDigests) {
        if !digests.has_digest() {
            return;
        }
        let engine = self.this.clone();
        let compare = move || {
            let digest = digests.compare();
            if let Some(engine) = engine.upgrade() {
                engine.with_recorder(|recorder| recorder.note_comparison(digest));
            }
        };
        if !spawn_digest_thread(compare) {
            self.with_recorder(|recorder| recorder.note_comparison(DigestComparison::None));
        }
    }

    fn with_recorder(&self, act: impl FnOnce(&mut InputRecorder)) {
        if let Some(recorder) = &mut self.lock().recorder {
            act(recorder);
        }
    }

    /// Calls [`Engine::maintain_journal`] once a second for as long as it is polled.
    pub async fn maintain_journal_periodically(self: Arc<Self>) {
        loop {
            tokio::time::sleep(Duration::from_secs(1)).await;
            self.maintain_journal();
        }
    }

    /// Returns the description of the journal; `None` if the server has none.
    #[must_use]
    pub fn journal_state(&self) -> Option<JournalState> {
        let state = self.lock_for_read();
        state.recorder.as_ref().map(|recorder| recorder.state(state.durable.restarts))
    }

    /// Ends the journal with a snapshot, so that the next start, also of another version, needs no replay. Blocks until it is
    /// on the disk. Later changes are refused.
    pub fn close_journal(&self) {
        let mut state = self.lock_for_bulk_work();
        let now = self.clock.now();
        // The connections have ended.
        self.begin_snapshot(&mut state, now, None);
        let recorder = state.recorder.take();
        state.is_closed = recorder.is_some();
        drop(state);
        // The writer ends its threads, which write the snapshot first.
        drop(recorder);
    }
}

/// Computes the digest of the state at a mark, and records it.
fn record_digest(engine: &Weak<Engine>, mark: StateMark, coordinator: Coordinator) {
    let began = clock::monotonic();
    let digest = digest_of(&coordinator);
    drop(coordinator);
    if let Err(error) = &digest {
        tracing::warn!(%error, "the state cannot be encoded: the next replay compares less");
    }
    let took = began.elapsed();
    if let Some(engine) = engine.upgrade() {
        engine.with_recorder(|recorder| {
            recorder.record_digest(mark, digest.ok(), clock::monotonic(), took);
        });
    }
}

/// Runs this on a thread of its own. Returns whether there is one.
fn spawn_digest_thread(work: impl FnOnce() + Send + 'static) -> bool {
    let spawned = std::thread::Builder::new().name("muster-digest".to_owned()).spawn(work);
    if let Err(error) = &spawned {
        tracing::warn!(%error, "there is no thread for a digest of the state");
    }
    spawned.is_ok()
}
