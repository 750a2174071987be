//! Records the inputs of the state machine in a journal. Begin at [`InputRecorder::record_before`].
//!
//! `replay.rs` reads the journal. The same inputs at the same times make the same state, so the journal needs no
//! other description of a change. Rules:
//!
//! - *An input is recorded before it is applied*, under the engine's lock. No answer leaves before the lock is released, so
//!   whatever was answered is in the journal, but for the latest heartbeats. With [`Durability::Host`] the answer also waits until its record is on the
//!   disk (`held_answers.rs`).
//! - *Heartbeats are recorded together*, before the next other input (`packed_heartbeats.rs`).
//! - *A read that changes nothing is not recorded.* The recorder decides this after the read was applied: it had one effect,
//!   its own answer, and no other work was pending before it. If it had other effects, it is recorded then; it was applied
//!   under the same lock. So is a read of a connection that may go on in another process, if its answer waits for the disk.
//! - *Checks.* From time to time the recorder appends a few numbers of the state, and less often a digest of all of it
//!   (`state_digest.rs`). A replay compares them with its own state, so a program that decides otherwise than the one that wrote
//!   the journal is noticed.
//! - *Trouble.* While the journal cannot be written, calls and commands that change the state are refused
//!   ([`InputRecorder::refusal`]), also the one whose record finds no room. Heartbeats, reads, ends of connections and ticks are
//!   applied all the same; if one of them is not recorded, the journal needs a snapshot.

use std::fmt;
use std::io::{self, Write};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use muster_journal::{AppendError, JournalStatus, JournalWriter, RecordKind};
use serde::{Deserialize, Serialize, Serializer};
use utoipa::ToSchema;

use super::packed_heartbeats::PackedHeartbeats;
use super::restore_report::RestoreReport;
use super::state_digest::{DigestComparison, DigestSchedule, StateMark};
use crate::clock;
use crate::coordination::{
    CallId, ClaimRefusal, Code, CommandRefusal, Coordinator, Effect, Failure, Input, JobName, JobSettings,
    Request, Timestamp,
};

/// The failures that an answer survives when it leaves.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "kebab-case")]
pub enum Durability {
    /// Nothing: there is no journal, and the death of the process ends all runs.
    None,
    /// The death of the process: the kernel has its record.
    #[default]
    Process,
    /// The loss of the host: its record is on the disk.
    Host,
}

impl Durability {
    /// Parses a setting.
    ///
    /// # Errors
    /// The text that explains the syntax.
    pub fn parse(text: &str) -> Result<Self, String> {
        match text {
            "none" => Ok(Self::None),
            "process" => Ok(Self::Process),
            "host" => Ok(Self::Host),
            _ => Err("write none, process or host".to_owned()),
        }
    }
}

impl fmt::Display for Durability {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::None => "none",
            Self::Process => "process",
            Self::Host => "host",
        })
    }
}

/// The kinds of records.
pub(super) mod kind {
    use muster_journal::RecordKind;

    /// An input, with its time.
    pub const INPUT: RecordKind = RecordKind(1);
    /// A `StateCheck`.
    pub const CHECK: RecordKind = RecordKind(2);
    /// The version of the encoding of the records that follow, and the version of the program that wrote them.
    pub const ENCODING: RecordKind = RecordKind(3);
    /// A job's name, and the settings with which the configuration declared it again.
    pub const DECLARED: RecordKind = RecordKind(4);
    /// The name of a persistent observer, and contents that it added by itself.
    pub const NOTE: RecordKind = RecordKind(5);
    /// Heartbeats, as `PackedHeartbeats` has them. Since encoding 2.
    pub const HEARTBEATS: RecordKind = RecordKind(6);
    /// The stream of a call, and the call as an `INPUT`. Since encoding 3.
    pub const CALL: RecordKind = RecordKind(7);
    /// A `StateMark`: the state at this place gets a digest. Since encoding 4.
    pub const MARK: RecordKind = RecordKind(8);
    /// A `StateMark` that came before, and the digest of the state there. Since encoding 4.
    pub const DIGEST: RecordKind = RecordKind(9);
}

/// The version of the encoding of inputs and of the state in snapshots. It grows when a type changes that they contain.
///
/// | version | new in it |
/// | --- | --- |
/// | 2 | heartbeats are packed; `Input::Resumed` says how the former process ended |
/// | 3 | calls have the number of their stream; `Input::Resumed` says which connections go on |
/// | 4 | digests of the state |
pub const JOURNAL_ENCODING: u32 = 4;
/// The oldest encoding that this program reads.
pub(super) const OLDEST_ENCODING: u32 = 1;

/// A check is recorded after so many inputs.
const CHECK_INTERVAL: u32 = 1024;

/// Some numbers of the state, by which a replay notices soon that it went another way. `state_digest.rs` compares the whole state.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct StateCheck {
    /// The number of the next event.
    pub next_event: u64,
    /// The next deadline.
    pub next_wakeup: Option<Timestamp>,
    /// The number of waiting calls.
    pub waiting_calls: u64,
}

impl StateCheck {
    pub fn of(coordinator: &Coordinator, next_event: u64) -> Self {
        Self {
            next_event,
            next_wakeup: coordinator.next_wakeup(),
            waiting_calls: coordinator.waiting_call_count() as u64,
        }
    }
}

impl fmt::Display for StateCheck {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "next event {}, {} waiting calls, next deadline ", self.next_event, self.waiting_calls)?;
        match self.next_wakeup {
            Some(at) => at.fmt(f),
            None => f.write_str("none"),
        }
    }
}

/// Records inputs.
pub(super) struct InputRecorder {
    writer: JournalWriter,
    heartbeats: PackedHeartbeats,
    durability: Durability,
    inputs_since_check: u32,
    digests: DigestSchedule,
    refused_changes: AtomicU64,
    restored: RestoreReport,
}

/// A description of the journal for metrics, pages and REST.
#[derive(Debug, Clone)]
pub struct JournalState {
    /// The durability of answers when they leave.
    pub durability: Durability,
    /// The number of starts that found a state, over all lives of the server.
    pub restarts: u64,
    /// The number of calls and commands that were refused because the journal could not be written.
    pub refused_changes: u64,
    /// The report of this process's start.
    pub restored: RestoreReport,
    /// The files.
    pub files: JournalStatus,
}

/// An input that was not recorded before it was applied.
pub(super) enum Unrecorded {
    /// A read in this stream, which is recorded if it has other effects than its answer.
    Read(u32, Input),
    /// A heartbeat that was packed. If it has other effects than the answer to this call, it is recorded at once.
    Heartbeat(CallId),
}

impl InputRecorder {
    /// Begins to record after the end of a journal.
    pub fn new(mut writer: JournalWriter, durability: Durability, restored: RestoreReport) -> Self {
        append_or_lose(&mut writer, kind::ENCODING, &(JOURNAL_ENCODING, env!("CARGO_PKG_VERSION")));
        Self {
            writer,
            heartbeats: PackedHeartbeats::default(),
            durability,
            inputs_since_check: 0,
            digests: DigestSchedule::new(clock::monotonic()),
            refused_changes: AtomicU64::new(0),
            restored,
        }
    }

    /// Records an input that is about to be applied at `now`, with the stream of its connection in which it came; 0: in none.
    /// Returns one that need not be recorded if it changes nothing: pass it to [`Self::record_after`].
    ///
    /// # Errors
    /// If there is no room and the input can be refused. It must not be applied then.
    pub fn record_before(
        &mut self,
        now: Timestamp,
        stream: u32,
        input: &Input,
        coordinator: &Coordinator,
        next_event: u64,
    ) -> Result<Option<Unrecorded>, NotRecordable> {
        if let Input::Call { call, request: Request::Heartbeat { .. }, .. } = input {
            let is_packed = self.heartbeats.push(now, input, coordinator) || {
                self.flush_heartbeats();
                self.heartbeats.push(now, input, coordinator)
            };
            if is_packed {
                return Ok(Some(Unrecorded::Heartbeat(*call)));
            }
        }
        if let Input::Call { job, caller, request, .. } = input
            && request.is_read()
            && !coordinator.has_pending_work()
            && coordinator.is_connection_known_to_job(*job, caller.connection)
        {
            return Ok(Some(Unrecorded::Read(stream, input.clone())));
        }
        self.flush_heartbeats();
        self.inputs_since_check += 1;
        self.digests.note_change();
        if self.inputs_since_check >= CHECK_INTERVAL {
            self.inputs_since_check = 0;
            // Without it, the next replay compares less.
            let _ = append(&mut self.writer, kind::CHECK, &StateCheck::of(coordinator, next_event));
        }
        match append_input(&mut self.writer, now, stream, input) {
            Ok(_) => Ok(None),
            Err(error) if is_refusable_input(input) => {
                self.refused_changes.fetch_add(1, Ordering::Relaxed);
                Err(NotRecordable(refusal_text(&error.to_string())))
            }
            Err(error) => {
                self.writer.record_lost(&error);
                Ok(None)
            }
        }
    }

    /// Records an input after it was applied, if it had other effects than its answer.
    pub fn record_after(&mut self, now: Timestamp, unrecorded: Unrecorded, effects: &[Effect]) {
        let answers_only = |own: CallId| matches!(effects, [Effect::Reply(call, _)] if *call == own);
        match unrecorded {
            Unrecorded::Heartbeat(call) if answers_only(call) => {}
            Unrecorded::Heartbeat(_) => self.flush_heartbeats(),
            // An answer that waits for the disk may have to be found by a replay.
            Unrecorded::Read(stream, Input::Call { call, .. })
                if answers_only(call) && (stream == 0 || self.held_until().is_none()) => {}
            Unrecorded::Read(stream, input) => {
                self.flush_heartbeats();
                if let Err(error) = append_input(&mut self.writer, now, stream, &input) {
                    self.writer.record_lost(&error);
                }
            }
        }
    }

    /// Records the heartbeats that were packed.
    fn flush_heartbeats(&mut self) {
        let bytes = self.heartbeats.bytes();
        if bytes.is_empty() {
            return;
        }
        let appended = self.writer.append(
            kind::HEARTBEATS,
            || bytes.len(),
            |space| {
                space.get_mut(..bytes.len())?.copy_from_slice(bytes);
                Some(bytes.len())
            },
        );
        if let Err(error) = appended {
            self.writer.record_lost(&error);
        }
        self.heartbeats.clear();
    }

    /// Records that the configuration declares a job with other settings than before.
    pub fn record_declaration(&mut self, name: &JobName, settings: &JobSettings) {
        append_or_lose(&mut self.writer, kind::DECLARED, &(name, settings));
    }

    /// Records what a persistent observer added by itself.
    pub fn record_note(&mut self, observer: &str, contents: &[u8]) {
        append_or_lose(&mut self.writer, kind::NOTE, &(observer, NoteContents(contents)));
    }

    /// Records the heartbeats that were packed, and does what ends a trouble of the journal, if that is possible now.
    pub fn maintain(&mut self) {
        self.flush_heartbeats();
        self.writer.maintain();
    }

    /// Returns the number below which all records must be on the disk before an answer leaves; `None`: it may leave now.
    pub fn held_until(&self) -> Option<u64> {
        let next = self.writer.next_record();
        (self.durability == Durability::Host && self.writer.durable_records() < next).then_some(next)
    }

    /// Returns the reason for which changes are refused now.
    pub fn refusal(&self) -> Option<String> {
        if !self.writer.is_in_trouble() {
            return None;
        }
        self.refused_changes.fetch_add(1, Ordering::Relaxed);
        let why = self.writer.status().trouble.unwrap_or_else(|| "it cannot be written".to_owned());
        Some(refusal_text(&why))
    }

    /// Returns whether a snapshot should be made now.
    pub fn is_snapshot_due(&self) -> bool {
        self.writer.is_snapshot_due()
    }

    /// Makes a snapshot on another thread.
    pub fn begin_snapshot(&mut self, write: impl FnOnce(&mut dyn Write) -> io::Result<()> + Send + 'static) {
        // The state in the snapshot has them.
        self.flush_heartbeats();
        self.writer.begin_snapshot(Box::new(write));
    }

    /// Returns whether a digest of the state is due.
    pub fn is_digest_due(&self, now: Instant) -> bool {
        self.digests.is_due(now)
    }

    /// Marks this place, and returns the mark, whose digest is to be passed to [`Self::record_digest`]. A journal in trouble is not
    /// marked: it lacks records, until a snapshot makes up for them.
    pub fn mark_state(&mut self) -> Option<StateMark> {
        if self.writer.is_in_trouble() {
            return None;
        }
        self.flush_heartbeats();
        let mark = StateMark(clock::random_u64());
        append(&mut self.writer, kind::MARK, &mark).ok()?;
        self.digests.begin();
        Some(mark)
    }

    /// Records the digest of the state at a mark, which took so long.
    pub fn record_digest(&mut self, mark: StateMark, digest: Option<u64>, now: Instant, took: Duration) {
        self.digests.end(now, took);
        if let Some(digest) = digest {
            // Without it, the next replay compares less.
            let _ = append(&mut self.writer, kind::DIGEST, &(mark, digest));
        }
    }

    /// Notes how the restored state compares with its digest.
    pub fn note_comparison(&mut self, digest: DigestComparison) {
        self.restored.digest = digest;
    }

    /// Returns the description for metrics and pages.
    pub fn state(&self, restarts: u64) -> JournalState {
        JournalState {
            durability: self.durability,
            restarts,
            refused_changes: self.refused_changes.load(Ordering::Relaxed),
            restored: self.restored.clone(),
            files: self.writer.status(),
        }
    }
}

/// The text of a refusal.
pub(super) struct NotRecordable(pub String);

fn refusal_text(why: &str) -> String {
    format!(
        "The coordination service makes no changes now, because it cannot record them in its journal: {why}. It goes on by itself \
         when the journal can be written again."
    )
}

fn append(writer: &mut JournalWriter, kind: RecordKind, value: &impl Serialize) -> Result<u64, AppendError> {
    let length = || postcard::experimental::serialized_size(value).unwrap_or(usize::MAX >> 1);
    writer.append(kind, length, |space| postcard::to_slice(value, space).ok().map(|used| used.len()))
}

fn append_input(
    writer: &mut JournalWriter,
    now: Timestamp,
    stream: u32,
    input: &Input,
) -> Result<u64, AppendError> {
    match stream {
        0 => append(writer, kind::INPUT, &(now, input)),
        stream => append(writer, kind::CALL, &(stream, now, input)),
    }
}

/// Appends a record whose loss stops no call. If it is lost, the journal needs a snapshot.
fn append_or_lose(writer: &mut JournalWriter, kind: RecordKind, value: &impl Serialize) {
    if let Err(error) = append(writer, kind, value) {
        writer.record_lost(&error);
    }
}

/// The contents of a note: encoded as a list of bytes is, but copied at once.
struct NoteContents<'a>(&'a [u8]);

impl Serialize for NoteContents<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_bytes(self.0)
    }
}

/// Returns whether an input can be refused instead of being applied.
fn is_refusable_input(input: &Input) -> bool {
    match input {
        Input::Call { request, .. } => is_refusable(request),
        Input::Command { .. } | Input::ClaimTask { .. } | Input::DeclareJob { .. } => true,
        _ => false,
    }
}

/// Returns the answers to an input that was refused.
pub(super) fn refusal_effects(input: Input, why: NotRecordable) -> Vec<Effect> {
    match input {
        Input::Call { call, .. } => vec![Effect::Reply(call, Err(refused_call(why.0)))],
        Input::Command { .. } => vec![Effect::CommandDone(Err(CommandRefusal::NotRecordable(why.0)))],
        Input::ClaimTask { .. } => vec![Effect::ClaimAnswered(Err(ClaimRefusal::NotRecordable(why.0)))],
        _ => Vec::new(),
    }
}

/// Returns the failure of a refused call. It has no mark of the service: registering clients take it for a transport failure
/// and retry.
pub(super) fn refused_call(why: String) -> Arc<Failure> {
    Arc::new(Failure::without_details(Code::Unavailable, why))
}

/// Returns whether a request is refused while the journal cannot be written. The others change nothing that their caller
/// could rely on after a restart.
pub(super) fn is_refusable(request: &Request) -> bool {
    !request.is_read()
        && !matches!(
            request,
            Request::Heartbeat { .. }
                | Request::PollForError { .. }
                | Request::Watch { .. }
                | Request::FromPeerJob { .. }
        )
}
