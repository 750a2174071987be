//! Requests of tasks and their replies, in one form for both wire generations.
//!
//! It contains no rule (`run.rs` dispatches a request to its rule) and no encoding (`grpc` has both). Begin at
//! [`Request`] and [`Reply`].
//!
//! A reply with many recipients is shared ([`SharedReply`]) and has room for its encoded forms, so the edge encodes it
//! once for each dialect and sends the same bytes to all.

use std::cmp::Ordering;
use std::fmt;
use std::sync::{Arc, OnceLock};

use bytes::Bytes;
use serde::{Deserialize, Deserializer, Serialize, Serializer};

use super::directory::Directory;
use super::failure::Failure;
use super::ids::{ConnectionId, ServiceIncarnation, TaskId, TaskIncarnation};

/// A set of task ids in ascending order without repeats, shared between calls that name the same set.
#[derive(Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct TaskSet(Arc<[TaskId]>);

// Calls that name the same set share it: to look it up in a table, its ids need not be looked at.
impl Ord for TaskSet {
    fn cmp(&self, other: &Self) -> Ordering {
        if Arc::ptr_eq(&self.0, &other.0) { Ordering::Equal } else { self.0.cmp(&other.0) }
    }
}

impl PartialOrd for TaskSet {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl TaskSet {
    /// Sorts and dedups; a list that is already in order is taken as it is.
    #[must_use]
    pub fn new(mut ids: Vec<TaskId>) -> Self {
        if !ids.is_sorted_by(|a, b| a < b) {
            ids.sort_unstable();
            ids.dedup();
        }
        Self(ids.into())
    }

    /// The ids, ascending.
    #[must_use]
    pub fn ids(&self) -> &[TaskId] {
        &self.0
    }

    /// Whether the set holds `task`.
    #[must_use]
    pub fn contains(&self, task: TaskId) -> bool {
        self.position(task).is_some()
    }

    /// The place of `task` in the set.
    #[must_use]
    pub fn position(&self, task: TaskId) -> Option<usize> {
        // The whole cluster is the usual set: there a task stands at the place of its number.
        let guess = usize::try_from(task.0).ok()?;
        if self.0.get(guess) == Some(&task) {
            return Some(guess);
        }
        self.0.binary_search(&task).ok()
    }
}

impl fmt::Debug for TaskSet {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_set().entries(self.0.iter().map(|t| t.0)).finish()
    }
}

/// Whom and what a caller believes itself to be and to speak to, where its wire generation says so.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct ClaimedIncarnations {
    /// The service incarnation that the caller registered with; 0 where it left that out.
    pub service: ServiceIncarnation,
    /// The caller's own incarnation; 0 where it left that out.
    pub task: TaskIncarnation,
}

/// Where a call comes from.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Caller {
    /// The connection that the call arrived on.
    pub connection: ConnectionId,
    /// Generation C states it with every call but registration; generation A never does.
    pub claim: Option<ClaimedIncarnations>,
}

/// What a caller asks. Keys and barrier ids are as the caller spelled them.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum Request {
    /// Take part in the job's run; answered when every task has registered.
    Register {
        /// Who registers.
        task: TaskId,
        /// Which life of it.
        incarnation: TaskIncarnation,
        /// The client asks to be recoverable (jaxlib 0.7.2 to 0.8.3 can).
        recoverable: bool,
    },
    /// A sign of life.
    Heartbeat {
        /// Who is alive.
        task: TaskId,
        /// Which life of it.
        incarnation: TaskIncarnation,
    },
    /// Be told of the first error of the run; never answered with success.
    PollForError {
        /// Who wants to know.
        task: TaskId,
    },
    /// Leave the run, all together unless the task is recoverable.
    Shutdown {
        /// Who leaves.
        task: TaskId,
    },
    /// Leave the run alone, at once.
    Reset {
        /// Who leaves.
        task: TaskId,
    },
    /// A task declares itself failed.
    ReportError {
        /// The task that failed.
        task: TaskId,
        /// The status code, any number.
        code: i32,
        /// What it says of it.
        message: String,
    },
    /// Exchange opaque device descriptions between all tasks (generation A).
    WaitForAllTasks {
        /// Who takes part.
        task: TaskId,
        /// Its devices: encoded `google.protobuf.Any` messages.
        devices: Vec<Bytes>,
    },
    /// The states of these tasks (generation A).
    TaskStates {
        /// Which tasks, in the order to answer.
        tasks: Vec<TaskId>,
    },
    /// The states of all tasks, now (generation A).
    JobState,
    /// The states of all tasks, once they differ from a version that the caller has.
    Watch {
        /// The version that the caller has; negative for none.
        version: i64,
    },
    /// Store a value.
    Insert {
        /// Where.
        key: Bytes,
        /// What.
        value: Bytes,
        /// Replace what is there; otherwise that is an error.
        overwrite: bool,
    },
    /// A value, once it is there.
    Get {
        /// Where.
        key: Bytes,
    },
    /// A value, if it is there.
    TryGet {
        /// Where.
        key: Bytes,
    },
    /// Add to a decimal number.
    Increment {
        /// Where.
        key: Bytes,
        /// How much, negative to subtract.
        by: i64,
    },
    /// Every entry below a directory.
    List {
        /// Which directory.
        directory: Bytes,
    },
    /// Remove a key and everything below it.
    Delete {
        /// Which key.
        key: Bytes,
    },
    /// Wait until every member of a barrier has come.
    Barrier {
        /// The barrier.
        id: String,
        /// Which use of it, as the caller counts.
        counter: i64,
        /// How long to wait, in milliseconds; the first caller's value holds.
        timeout_ms: i64,
        /// The members; `None` for every task of the job.
        members: Option<TaskSet>,
        /// Who has come.
        task: TaskId,
    },
    /// Fail a barrier instance for everybody.
    CancelBarrier {
        /// The barrier.
        id: String,
        /// Which use of it.
        counter: i64,
        /// Who cancels.
        task: TaskId,
    },
    /// Agree with every live task of a set on who is alive.
    LiveSet {
        /// Who asks.
        task: TaskId,
        /// The set, which must hold the asker.
        tasks: TaskSet,
    },
}

impl Request {
    /// The task that the caller says it is, where the request says so.
    #[must_use]
    pub fn task(&self) -> Option<TaskId> {
        match self {
            Self::Register { task, .. }
            | Self::Heartbeat { task, .. }
            | Self::PollForError { task }
            | Self::Shutdown { task }
            | Self::Reset { task }
            | Self::ReportError { task, .. }
            | Self::WaitForAllTasks { task, .. }
            | Self::Barrier { task, .. }
            | Self::CancelBarrier { task, .. }
            | Self::LiveSet { task, .. } => Some(*task),
            Self::TaskStates { .. }
            | Self::JobState
            | Self::Watch { .. }
            | Self::Insert { .. }
            | Self::Get { .. }
            | Self::TryGet { .. }
            | Self::Increment { .. }
            | Self::List { .. }
            | Self::Delete { .. } => None,
        }
    }
}

/// The states of tasks at one version of the run.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct TaskStates {
    /// Grows with every change of any task's state.
    pub version: i64,
    /// A task each.
    pub tasks: Vec<TaskInfo>,
}

/// The four states that clients know.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum WireState {
    /// Not registered, or shut down.
    Disconnected,
    /// Registered and, as far as is known, alive.
    Connected,
    /// Failed.
    Error,
}

/// One task's state as clients see it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct TaskInfo {
    /// Which task.
    pub task: TaskId,
    /// Its state.
    pub state: WireState,
    /// Its present or last incarnation; 0 before its first.
    pub incarnation: TaskIncarnation,
    /// Its error, when it is in one.
    pub error: Option<Arc<Failure>>,
}

/// The tasks of a set that are alive, ascending, each with its incarnation.
pub type LiveSet = Vec<(TaskId, TaskIncarnation)>;

/// A successful answer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Reply {
    /// Done; nothing more to say.
    Done,
    /// Registered, or alive: the incarnation of the run.
    ServiceIncarnation(ServiceIncarnation),
    /// The value of the key that was asked for.
    Value(Bytes),
    /// What is below a directory, as it was at one moment.
    Directory(Directory),
    /// The barrier passed; the instance as the service counts.
    BarrierPassed(i64),
    /// Who is alive.
    LiveSet(Arc<SharedReply<LiveSet>>),
    /// The states of tasks.
    States(Arc<SharedReply<TaskStates>>),
    /// Everybody's devices, in the order of their ids, with the incarnation of the run.
    Devices(ServiceIncarnation, Arc<SharedReply<Vec<Bytes>>>),
}

/// What a call ends with.
pub type CallOutcome = Result<Reply, Arc<Failure>>;

/// How many encoded forms a shared answer has room for.
const ENCODINGS: usize = 3;

/// An answer that many callers get, with room for the encoded forms that the wire makes of it, so
/// that it is encoded once and not once a caller. The encodings are no part of the state.
#[derive(Debug)]
pub struct SharedReply<T> {
    value: T,
    encoded: [OnceLock<Bytes>; ENCODINGS],
}

impl<T> SharedReply<T> {
    /// Shares `value`.
    #[must_use]
    pub fn new(value: T) -> Arc<Self> {
        Arc::new(Self::of(value))
    }

    fn of(value: T) -> Self {
        Self { value, encoded: [const { OnceLock::new() }; ENCODINGS] }
    }

    /// The encoded form number `form`, made by `encode` the first time.
    pub fn encoded(&self, form: usize, encode: impl FnOnce(&T) -> Bytes) -> Bytes {
        match self.encoded.get(form) {
            Some(slot) => slot.get_or_init(|| encode(&self.value)).clone(),
            None => encode(&self.value),
        }
    }
}

impl<T> std::ops::Deref for SharedReply<T> {
    type Target = T;

    fn deref(&self) -> &T {
        &self.value
    }
}

impl<T: PartialEq> PartialEq for SharedReply<T> {
    fn eq(&self, other: &Self) -> bool {
        self.value == other.value
    }
}

impl<T: Eq> Eq for SharedReply<T> {}

impl<T: Serialize> Serialize for SharedReply<T> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        self.value.serialize(serializer)
    }
}

impl<'de, T: Deserialize<'de>> Deserialize<'de> for SharedReply<T> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        T::deserialize(deserializer).map(Self::of)
    }
}
