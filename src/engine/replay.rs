//! Restores the state of the engine from a journal. Begin at [`RestoredState::read`].
//!
//! The latest snapshot is the state to begin from; the inputs after it are applied at their recorded times. Events and ended
//! barriers go to the event history and to the observers that keep a history, and nowhere else. An answer is kept if a
//! kept connection does not have it yet (`kept_calls.rs`). If a [`StateCheck`] differs from the restored state, the journal is
//! refused.
//!
//! An input that made the former process panic would end each later process in the same way. So if an input panics here, it
//! is *set aside*: the replay begins again without it, and the report names it. A call that is set aside is
//! answered with INTERNAL.
//!
//! Some inputs are decoded before the first of them is applied. So the keys that they write can be searched together, which
//! takes less time than one after the other.

use std::collections::BTreeSet;
use std::io::{self, Write};
use std::panic::{self, AssertUnwindSafe};
use std::sync::Arc;

use muster_journal::{
    JournalError, JournalFolder, JournalRecord, JournalRecovery, RecoveryEnd, RecoveryError,
};
use serde::Serialize;

use super::durable_state::DurableState;
use super::event_history::NumberedEvent;
use super::kept_calls::{KeptConnections, ReplayedCalls};
use super::packed_heartbeats::unpack_heartbeats;
use super::recorder::{JOURNAL_ENCODING, OLDEST_ENCODING, StateCheck, kind};
use super::restore_report::RestoreReport;
use super::state_digest::{DigestComparison, ReplayedDigests};
use super::{ContentsSerialiser, PersistentObserver};
use crate::clock;
use crate::coordination::{Coordinator, Effect, Input, JobId, JobSettings, Timestamp};

/// The most decoded inputs that wait to be applied.
const PENDING_INPUTS_MAX: usize = 32;
/// Inputs of more bytes are applied at once: large values, which may replace one another, must not be in memory together.
const PENDING_BYTES_MAX: usize = 1 << 20;

/// The reason for which the state cannot be restored.
#[derive(Debug, thiserror::Error)]
pub enum RestoreError {
    /// The journal cannot be read.
    #[error(transparent)]
    Journal(#[from] JournalError),
    /// The journal was written by a program with another encoding.
    #[error(
        "the journal has records of encoding {found} (written by version {by}); this program reads encodings {OLDEST_ENCODING} to \
             {JOURNAL_ENCODING}. Start the version that wrote it, or begin anew with another --data-dir"
    )]
    OtherEncoding {
        /// The encoding of the journal.
        found: u32,
        /// The version of the program that wrote it.
        by: String,
    },
    /// A snapshot or a record does not decode, or the replay went another way.
    #[error(
        "{what}: {why}. Start the version of the program that wrote the journal and stop it with SIGTERM, which leaves a \
             snapshot; or end the journal earlier with: muster journal repair --before RECORD"
    )]
    Replay {
        /// The record or the snapshot.
        what: String,
        /// The reason.
        why: String,
    },
}

/// The state of the engine as a snapshot has it.
#[derive(Serialize)]
struct SnapshotToWrite<'a> {
    encoding: u32,
    program: &'a str,
    at: Timestamp,
    state: &'a DurableState,
    observers: &'a [(&'static str, Vec<u8>)],
}

/// The state that was restored, and the end of the journal.
pub struct RestoredState {
    pub(super) state: DurableState,
    pub(super) end: RecoveryEnd,
    /// The jobs that wait for the incarnation of their next run.
    pub(super) wanted_incarnations: BTreeSet<JobId>,
    /// The calls and answers that continued connections lack.
    pub(super) calls: ReplayedCalls,
    pub(super) digests: ReplayedDigests,
    /// The restore report.
    pub report: RestoreReport,
}

/// Returns a function that writes a snapshot of `state`.
pub(super) fn snapshot_writer(
    at: Timestamp,
    state: DurableState,
    observers: Vec<(&'static str, ContentsSerialiser)>,
) -> impl FnOnce(&mut dyn Write) -> io::Result<()> + Send {
    move |out| {
        let program = env!("CARGO_PKG_VERSION");
        let observers: Vec<_> = observers.into_iter().map(|(name, serialise)| (name, serialise())).collect();
        let snapshot =
            SnapshotToWrite { encoding: JOURNAL_ENCODING, program, at, state: &state, observers: &observers };
        postcard::to_io(&snapshot, out).map_err(io::Error::other).map(drop)
    }
}

impl RestoredState {
    /// Restores the state from a journal, and passes events to `observers`.
    ///
    /// # Errors
    /// If the journal is damaged, or was written by a program that decides otherwise.
    pub fn read(
        folder: &JournalFolder,
        observers: &[Arc<dyn PersistentObserver>],
    ) -> Result<Self, RestoreError> {
        Self::read_until(folder, observers, Timestamp(u64::MAX), |_, _| {})
    }

    /// Does what [`Self::read`] does, but applies neither the records `set_aside` nor, with `sets_last_aside`, the last input.
    /// They ended the processes that applied them. Finds the calls and answers that the connections `kept` do not know yet.
    ///
    /// # Errors
    /// As [`Self::read`].
    pub fn read_setting_aside(
        folder: &JournalFolder,
        observers: &[Arc<dyn PersistentObserver>],
        mut set_aside: BTreeSet<u64>,
        sets_last_aside: bool,
        kept: KeptConnections,
    ) -> Result<Self, RestoreError> {
        let kept = Arc::new(kept);
        if !sets_last_aside {
            return Self::read_without(folder, observers, Timestamp(u64::MAX), set_aside, kept, |_, _| {});
        }
        let mut last = None;
        let found = folder.recover()?.replay(|record| {
            if matches!(record.kind, kind::INPUT | kind::CALL) {
                last = Some(record.number);
            }
            Ok(())
        });
        match found {
            Ok(_) => {}
            Err(RecoveryError::Journal(error)) => return Err(error.into()),
            Err(RecoveryError::Record { error, .. }) => return Err(error),
        }
        set_aside.extend(last);
        Self::read_without(folder, observers, Timestamp(u64::MAX), set_aside, kept, |_, _| {})
    }

    /// Restores the state as it was at `until`, and passes each record that it comes to, and its length, to `visit`.
    ///
    /// # Errors
    /// As [`Self::read`]; also if the journal no longer has what was before `until`.
    pub fn read_until(
        folder: &JournalFolder,
        observers: &[Arc<dyn PersistentObserver>],
        until: Timestamp,
        visit: impl FnMut(Visited<'_>, usize),
    ) -> Result<Self, RestoreError> {
        Self::read_without(folder, observers, until, BTreeSet::new(), Arc::default(), visit)
    }

    /// Restores the state, and does not apply the records in `set_aside`.
    fn read_without(
        folder: &JournalFolder,
        observers: &[Arc<dyn PersistentObserver>],
        until: Timestamp,
        mut set_aside: BTreeSet<u64>,
        kept: Arc<KeptConnections>,
        mut visit: impl FnMut(Visited<'_>, usize),
    ) -> Result<Self, RestoreError> {
        let began = clock::monotonic();
        let contents: Vec<Vec<u8>> = observers.iter().map(|observer| observer.save()).collect();
        let (recovery, replay, replayed) = loop {
            let attempt = Attempt { folder, observers, until, set_aside: &set_aside, kept: &kept };
            match attempt.run(&mut visit)? {
                Ok(done) => break done,
                Err(record) => {
                    tracing::error!(
                        record,
                        "an input of the journal makes this program panic, and is set aside"
                    );
                    set_aside.insert(record);
                    for (observer, contents) in observers.iter().zip(&contents) {
                        let _ = observer.restore(contents);
                    }
                }
            }
        };
        let end = replayed.map_err(|error| match error {
            RecoveryError::Journal(error) => error.into(),
            RecoveryError::Record { error, .. } => error,
        })?;
        let report = RestoreReport {
            inputs: replay.inputs,
            had_snapshot: recovery.snapshot().is_some(),
            bytes: end.bytes,
            took: began.elapsed(),
            last_input: replay.last_input,
            damaged_snapshots: recovery.damaged_snapshots().to_vec(),
            cut: end.cut.clone(),
            set_aside: set_aside.into_iter().collect(),
            digest: DigestComparison::None,
            after: None,
            continued_connections: kept.connections().len(),
            lost_connections: kept.lost(),
        };
        let Replay { state, wanted_incarnations, calls, digests, .. } = replay;
        Ok(Self { state, end, wanted_incarnations, calls, digests, report })
    }

    /// Returns the jobs and their state.
    #[must_use]
    pub fn coordinator(&self) -> &Coordinator {
        &self.state.coordinator
    }

    /// Compares the state with the last digest in the journal, which takes up to half a second.
    pub fn compare_digest(&mut self) -> DigestComparison {
        self.report.digest = std::mem::take(&mut self.digests).compare();
        self.report.digest
    }

    /// Returns the number of the last event; 0 if there was none.
    #[must_use]
    pub fn last_event(&self) -> u64 {
        self.state.next_event - 1
    }

    /// Begins another journal with this state.
    ///
    /// # Errors
    /// If the other journal is not empty, or cannot be written.
    pub fn export(&self, target: &JournalFolder) -> Result<u64, JournalError> {
        let write = snapshot_writer(self.report.last_input, self.state.clone(), Vec::new());
        target.begin_with_snapshot(self.end.next_record, Box::new(write))
    }
}

/// One replay of a journal.
struct Attempt<'a> {
    folder: &'a JournalFolder,
    observers: &'a [Arc<dyn PersistentObserver>],
    until: Timestamp,
    set_aside: &'a BTreeSet<u64>,
    kept: &'a Arc<KeptConnections>,
}

/// The result of a replay: the snapshot that it began from, the state, and the end of the journal.
type Replayed<'a> = (JournalRecovery<'a>, Replay, Result<RecoveryEnd, RecoveryError<RestoreError>>);

impl<'a> Attempt<'a> {
    /// Replays the journal. Returns the number of the record whose input panics, if one does.
    fn run(
        &self,
        visit: &mut dyn FnMut(Visited<'_>, usize),
    ) -> Result<Result<Replayed<'a>, u64>, RestoreError> {
        let mut recovery = self.folder.recover()?;
        let mut replay = Replay::new(self.until, self.kept);
        while let Some(snapshot) = recovery.snapshot() {
            let what = || format!("the snapshot before record {}", snapshot.record);
            replay.restore_snapshot(&snapshot.state, what, self.observers)?;
            if replay.last_input <= self.until {
                break;
            }
            let earlier = self.folder.recover_before(snapshot.record)?;
            replay = Replay::new(self.until, self.kept);
            recovery = earlier;
        }
        let replayed = panic::catch_unwind(AssertUnwindSafe(|| {
            let replayed = recovery.replay(|record| {
                if self.set_aside.contains(&record.number) {
                    replay.apply_pending_inputs(self.observers);
                    replay.set_aside(record);
                    return Ok(());
                }
                replay
                    .apply_record(record, self.observers, &mut |visited| visit(visited, record.payload.len()))
            });
            replay.apply_pending_inputs(self.observers);
            replayed
        }));
        match replayed {
            Ok(replayed) => Ok(Ok((recovery, replay, replayed))),
            Err(_) => Ok(Err(replay.present)),
        }
    }
}

/// A record that a replay has come to.
#[derive(Debug, Clone, Copy)]
pub enum Visited<'a> {
    /// An input.
    Input(&'a Input),
    /// Packed heartbeats.
    Heartbeats,
    /// Another record; the number is its kind.
    Other(u8),
}

/// An input that was decoded and is not applied yet.
struct PendingInput {
    /// The number of its record.
    record: u64,
    /// The stream of a call; 0: none.
    stream: u32,
    now: Timestamp,
    input: Input,
}

#[derive(Default)]
struct Replay {
    /// The record that is being decoded or applied.
    present: u64,
    pending: Vec<PendingInput>,
    /// The bytes of their records.
    pending_bytes: usize,
    /// Later inputs are not applied.
    until: Timestamp,
    /// The encoding of the records.
    encoding: u32,
    state: DurableState,
    is_past_until: bool,
    wanted_incarnations: BTreeSet<JobId>,
    inputs: u64,
    last_input: Timestamp,
    effects: Vec<Effect>,
    calls: ReplayedCalls,
    digests: ReplayedDigests,
}

impl Replay {
    fn new(until: Timestamp, kept: &Arc<KeptConnections>) -> Self {
        Self { until, calls: ReplayedCalls::new(Arc::clone(kept)), ..Self::default() }
    }

    /// Does not apply a record. If it is a call, it gets an answer all the same.
    fn set_aside(&mut self, record: JournalRecord<'_>) {
        self.present = record.number;
        self.digests.clear();
        if record.kind == kind::CALL
            && let Ok((stream, _, input)) = self.decode_call(record.payload)
        {
            self.calls.record_set_aside(stream, &input);
        }
    }

    fn restore_snapshot(
        &mut self,
        bytes: &[u8],
        what: impl Fn() -> String,
        observers: &[Arc<dyn PersistentObserver>],
    ) -> Result<(), RestoreError> {
        let undecodable =
            |error: postcard::Error| RestoreError::Replay { what: what(), why: error.to_string() };
        let (encoding, rest) = postcard::take_from_bytes::<u32>(bytes).map_err(undecodable)?;
        let (program, rest) = postcard::take_from_bytes::<String>(rest).map_err(undecodable)?;
        self.set_encoding(encoding, program)?;
        let (at, rest) = postcard::take_from_bytes::<Timestamp>(rest).map_err(undecodable)?;
        let (state, rest) = postcard::take_from_bytes::<DurableState>(rest).map_err(undecodable)?;
        let saved: Vec<(String, Vec<u8>)> = postcard::from_bytes(rest).map_err(undecodable)?;
        for (name, contents) in &saved {
            // A history of another version is not worth refusing the jobs.
            if let Some(observer) = observers.iter().find(|observer| observer.name() == name)
                && let Err(why) = observer.restore(contents)
            {
                tracing::warn!(
                    history = name,
                    why,
                    "a history in the snapshot cannot be restored; it begins anew"
                );
            }
        }
        (self.state, self.last_input) = (state, at);
        Ok(())
    }

    fn apply_record(
        &mut self,
        record: JournalRecord<'_>,
        observers: &[Arc<dyn PersistentObserver>],
        visit: &mut dyn FnMut(Visited<'_>),
    ) -> Result<(), RestoreError> {
        let what = || format!("record {}", record.number);
        let undecodable =
            |error: postcard::Error| RestoreError::Replay { what: what(), why: error.to_string() };
        if !matches!(record.kind, kind::INPUT | kind::CALL) {
            // The record is about the state after the inputs before it.
            self.apply_pending_inputs(observers);
        }
        self.present = record.number;
        match record.kind {
            kind::INPUT | kind::CALL => {
                let decoded = match record.kind {
                    kind::CALL => self.decode_call(record.payload),
                    _ => self.decode_input(record.payload).map(|(now, input)| (0, now, input)),
                };
                let (stream, now, input) = decoded.map_err(undecodable)?;
                visit(Visited::Input(&input));
                if now > self.until {
                    self.is_past_until = true;
                    return Ok(());
                }
                self.pending.push(PendingInput { record: record.number, stream, now, input });
                self.pending_bytes += record.payload.len();
                if self.pending.len() >= PENDING_INPUTS_MAX || self.pending_bytes >= PENDING_BYTES_MAX {
                    self.apply_pending_inputs(observers);
                }
                return Ok(());
            }
            kind::HEARTBEATS => {
                visit(Visited::Heartbeats);
                let unpacked = unpack_heartbeats(record.payload, |now, to_input| {
                    match to_input(&self.state.coordinator) {
                        Some(input) if now <= self.until => self.apply_input(now, input, observers),
                        _ => self.is_past_until |= now > self.until,
                    }
                });
                return unpacked.map_err(undecodable);
            }
            kind::CHECK | kind::MARK | kind::DIGEST if self.is_past_until => {}
            kind::CHECK => {
                let expected = postcard::from_bytes(record.payload).map_err(undecodable)?;
                self.compare(&expected).map_err(|why| RestoreError::Replay { what: what(), why })?;
            }
            kind::MARK => {
                let mark = postcard::from_bytes(record.payload).map_err(undecodable)?;
                self.digests.mark(mark, &self.state.coordinator);
            }
            kind::DIGEST => {
                let (mark, digest) = postcard::from_bytes(record.payload).map_err(undecodable)?;
                // The digest is one of the encoded state, and this program encodes it as it does now.
                if self.encoding == JOURNAL_ENCODING {
                    self.digests.note_digest(mark, digest, record.number);
                }
            }
            kind::NOTE => {
                let (name, contents): (String, Vec<u8>) =
                    postcard::from_bytes(record.payload).map_err(undecodable)?;
                if let Some(observer) = observers.iter().find(|observer| observer.name() == name)
                    && let Err(why) = observer.restore_note(&contents)
                {
                    tracing::warn!(history = name, record = record.number, why, "a note cannot be restored");
                }
            }
            kind::DECLARED => {
                let (name, settings) = postcard::from_bytes(record.payload).map_err(undecodable)?;
                self.state.declared.insert(name, settings);
            }
            kind::ENCODING => {
                let (encoding, program): (u32, String) =
                    postcard::from_bytes(record.payload).map_err(undecodable)?;
                self.set_encoding(encoding, program)?;
            }
            other => {
                let why = format!("its kind {} is unknown", other.0);
                return Err(RestoreError::Replay { what: what(), why });
            }
        }
        visit(Visited::Other(record.kind.0));
        Ok(())
    }

    /// Compares numbers of the state. Returns what differs.
    fn compare(&self, expected: &StateCheck) -> Result<(), String> {
        let found = StateCheck::of(&self.state.coordinator, self.state.next_event);
        if found == *expected {
            return Ok(());
        }
        Err(format!(
            "the inputs before it lead this program to another state than the program that recorded them ({found} in place of \
             {expected})"
        ))
    }

    fn set_encoding(&mut self, encoding: u32, program: String) -> Result<(), RestoreError> {
        if !(OLDEST_ENCODING..=JOURNAL_ENCODING).contains(&encoding) {
            return Err(RestoreError::OtherEncoding { found: encoding, by: program });
        }
        self.encoding = encoding;
        Ok(())
    }

    fn decode_input(&self, payload: &[u8]) -> Result<(Timestamp, Input), postcard::Error> {
        // `Resumed`, which is the last variant, has got fields, whose empty values are zeroes. The decoder ignores the bytes
        // behind any other input.
        match self.encoding {
            ..=1 => postcard::from_bytes(&[payload, &[0, 0]].concat()),
            2 => postcard::from_bytes(&[payload, &[0]].concat()),
            _ => postcard::from_bytes(payload),
        }
    }

    fn decode_call(&self, payload: &[u8]) -> Result<(u32, Timestamp, Input), postcard::Error> {
        let (stream, rest) = postcard::take_from_bytes(payload)?;
        let (now, input) = self.decode_input(rest)?;
        Ok((stream, now, input))
    }

    fn apply_pending_inputs(&mut self, observers: &[Arc<dyn PersistentObserver>]) {
        let mut pending = std::mem::take(&mut self.pending);
        if pending.len() > 1 {
            let inputs = pending.iter().map(|pending| &pending.input);
            // It changes nothing. A panic in it must not set an input aside.
            let prefetch = || self.state.coordinator.prefetch_written_keys(inputs);
            let _ = panic::catch_unwind(AssertUnwindSafe(prefetch));
        }
        for PendingInput { record, stream, now, input } in pending.drain(..) {
            self.present = record;
            if stream != 0
                && let Input::Call { call, caller, .. } = &input
            {
                self.calls.record_call(caller.connection, stream, *call);
            }
            self.apply_input(now, input, observers);
        }
        // Its space is used again.
        (self.pending, self.pending_bytes) = (pending, 0);
    }

    fn apply_input(&mut self, now: Timestamp, input: Input, observers: &[Arc<dyn PersistentObserver>]) {
        let state = &mut self.state;
        match &input {
            Input::Call { call, .. } => state.next_call = state.next_call.max(call.0 + 1),
            Input::ConnectionOpened { connection, .. } => {
                state.next_connection = state.next_connection.max(connection.0 + 1);
            }
            Input::Resumed { .. } => state.restarts += 1,
            Input::CallCancelled { call, .. } => self.calls.record_cancelled(*call),
            Input::DeclareJob { name, settings, actor: None, .. } => {
                state.declared.insert(name.clone(), JobSettings::clone(settings));
            }
            Input::NextIncarnation { job, .. } => {
                self.wanted_incarnations.remove(job);
            }
            _ => {}
        }
        (self.inputs, state.inputs) = (self.inputs + 1, state.inputs + 1);
        self.last_input = self.last_input.max(now);
        state.coordinator.apply(now, input, &mut self.effects);
        for effect in self.effects.drain(..) {
            match effect {
                Effect::Event(event) => {
                    observers.iter().for_each(|observer| observer.on_event(&event));
                    let number = state.next_event;
                    state.history.push(NumberedEvent { number, event: Arc::new(event) }, &mut Vec::new());
                    state.next_event = number + 1;
                }
                Effect::BarrierEnded(ending) => {
                    observers.iter().for_each(|observer| observer.on_barrier_ended(&ending));
                }
                Effect::RequestIncarnation(job) => {
                    self.wanted_incarnations.insert(job);
                }
                Effect::Reply(call, outcome) => self.calls.record_answer(call, outcome),
                Effect::CommandDone(_) | Effect::ClaimAnswered(_) | Effect::FreeLater(_) => {}
            }
        }
    }
}
