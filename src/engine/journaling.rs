//! Connects the engine with its journal: restores the state at the start, makes snapshots, and ends the journal in good order.
//!
//! `recorder.rs` records inputs, and `replay.rs` reads them. Begin at [`Engine::resume_from_journal`].

use std::io::Write;
use std::sync::atomic::Ordering;
use std::sync::{Arc, PoisonError};
use std::time::Duration;

use muster_journal::{JournalError, JournalFolder, JournalOptions, JournalWriter};

use super::answer_takers::{AnswerTakers, wait_until_taken};
use super::held_answers::HeldAnswers;
use super::recorder::{InputRecorder, JournalState};
use super::replay::snapshot_writer;
use super::{Durability, Engine, EngineState, PersistentObserver, RestoredState};
use crate::clock;
use crate::coordination::{Input, ServiceIncarnation, Timestamp};

impl Engine {
    /// Makes a snapshot count only once `takers` have all answers that were given before it: a replay that begins from the
    /// snapshot does not give them again. Only the first call has an effect.
    pub fn set_answer_takers(&self, takers: Arc<dyn AnswerTakers>) {
        let _ = self.answer_takers.set(takers);
    }

    /// Takes the restored state in place of the empty one, and records every input from now on. To be called before anybody
    /// uses the engine, and after [`Engine::set_observers`]. Connections and waiting calls of the former process are gone, but for
    /// those that the state was restored for, and the silence since then fails no task. `persistent_observers` are part of snapshots. `after` says how the former process
    /// ended, if that is known.
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
        drop(locked);
        self.rearm.notify_one();
        Ok(())
    }

    /// Copies the state, which costs one pointer for each job, and some for each connection, and writes it on another thread.
    ///
    /// The snapshot counts once the answers so far have been taken up by `takers`.
    fn begin_snapshot(&self, state: &mut EngineState, now: Timestamp, takers: Option<Arc<dyn AnswerTakers>>) {
        let settle = takers.map(|takers| self.settle_answers(state, takers));
        let observers = self.persistent_observers.get().map(Vec::as_slice).unwrap_or_default();
        let saved = observers.iter().map(|observer| (observer.name(), observer.copy_contents())).collect();
        if let Some(recorder) = &mut state.recorder {
            let write = snapshot_writer(now, state.durable.clone(), saved);
            recorder.begin_snapshot(move |out: &mut dyn Write| {
                write(out)?;
                settle.into_iter().for_each(|settle| settle());
                Ok(())
            });
        }
    }

    /// Delivers the answers that are collected, and returns a function that waits until all answers so far are taken up.
    fn settle_answers(
        &self,
        state: &mut EngineState,
        takers: Arc<dyn AnswerTakers>,
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
            // Whoever was delivering answers at that time has done so.
            drop(engine.delivering.write().unwrap_or_else(PoisonError::into_inner));
            if let (Some(until), Some(held)) = (until, held) {
                held.wait_until_delivered(until);
            }
            drop(engine);
            wait_until_taken(&*takers);
        }
    }

    /// Records contents that a persistent observer has added by itself, not from an event, so that they survive the process.
    pub fn record_note(&self, observer: &'static str, contents: &[u8]) {
        if let Some(recorder) = &mut self.lock().recorder {
            recorder.record_note(observer, contents);
        }
    }

    /// Makes a snapshot if one is due, and does what ends a trouble of the journal. To be called about once a second.
    pub fn maintain_journal(&self) {
        let mut state = self.lock_for_bulk_work();
        let now = self.clock.now();
        let Some(recorder) = &mut state.recorder else { return };
        recorder.maintain();
        if recorder.is_snapshot_due() || std::mem::take(&mut state.is_snapshot_wanted) {
            let takers = self.answer_takers.get().cloned();
            self.begin_snapshot(&mut state, now, takers);
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
