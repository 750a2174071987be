//! Requests of tasks and their replies, in one form for both wire generations.
//!
//! `call_dispatch.rs` passes a request to the function that handles it. `grpc` has the encodings of both
//! generations. Begin at [`Request`] and [`Reply`].
//!
//! A reply with many recipients is one shared object ([`Arc`]), so the gRPC port can encode it once for all of
//! them.

use std::cmp::Ordering;
use std::fmt;
use std::sync::Arc;

use bytes::Bytes;
use serde::de::Error as _;
use serde::{Deserialize, Deserializer, Serialize, Serializer};

use super::failure::Failure;
use super::ids::{ConnectionId, JobId, ServiceIncarnation, TaskId, TaskIncarnation};
use super::store_entry::DirectoryListing;

/// A set of task ids in ascending order without repeats, shared between calls that name the same set.
#[derive(Clone, PartialEq, Eq, Hash)]
pub struct TaskSet(Arc<[TaskId]>);

// The usual set is the whole job, or a few ranges of it. Written as ranges it takes a few bytes, and each task of a large job
// may name the set in each call.
impl Serialize for TaskSet {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let ranges = self.0.chunk_by(|a, b| a.0.checked_add(1) == Some(b.0));
        let ranges: Vec<(i32, u32)> =
            ranges.filter_map(|range| Some((range.first()?.0, u32::try_from(range.len()).ok()?))).collect();
        ranges.serialize(serializer)
    }
}

impl<'de> Deserialize<'de> for TaskSet {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        const IDS_MAX: usize = 1 << 26;
        let mut ids = Vec::new();
        for (first, length) in Vec::<(i32, u32)>::deserialize(deserializer)? {
            let end = i64::from(first) + i64::from(length);
            if ids.len() + length as usize > IDS_MAX || end > i64::from(i32::MAX) + 1 {
                return Err(D::Error::custom("a set of too many tasks"));
            }
            ids.extend((i64::from(first)..end).filter_map(|id| i32::try_from(id).ok()).map(TaskId));
        }
        Ok(Self::new(ids))
    }
}

// Calls that name the same set share its allocation, so a lookup in a table usually compares pointers, not
// ids.
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
    /// Returns the set of these ids, sorted and without repeats. An ordered list is taken as it is.
    #[must_use]
    pub fn new(mut ids: Vec<TaskId>) -> Self {
        if !ids.is_sorted_by(|a, b| a < b) {
            ids.sort_unstable();
            ids.dedup();
        }
        Self(ids.into())
    }

    /// Returns the ids, ascending.
    #[must_use]
    pub fn ids(&self) -> &[TaskId] {
        &self.0
    }

    /// Returns whether the set contains `task`.
    #[must_use]
    pub fn contains(&self, task: TaskId) -> bool {
        self.position(task).is_some()
    }

    /// Returns the position of `task` in the set.
    #[must_use]
    pub fn position(&self, task: TaskId) -> Option<usize> {
        // The usual set is the whole cluster, in which the position of a task is its number.
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

/// The incarnations that a caller of generation C states with its call.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct StatedIncarnations {
    /// The service incarnation that the caller registered with; 0 if absent.
    pub service: ServiceIncarnation,
    /// The caller's own incarnation; 0 if absent.
    pub task: TaskIncarnation,
}

/// The origin of a call.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Caller {
    /// The connection that the call arrived on.
    pub connection: ConnectionId,
    /// The stated incarnations. Generation C states them with every call but registration; generation A never
    /// does.
    pub claim: Option<StatedIncarnations>,
}

/// A request of a task. Keys and barrier ids are as the caller spelled them.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum Request {
    /// Take part in the job's run; answered when every task has registered.
    Register {
        /// The task that registers.
        task: TaskId,
        /// The task's incarnation.
        incarnation: TaskIncarnation,
        /// The client asks to be recoverable (jaxlib 0.7.2 to 0.8.3 can).
        recoverable: bool,
    },
    /// A heartbeat.
    Heartbeat {
        /// The task that sends it.
        task: TaskId,
        /// The task's incarnation.
        incarnation: TaskIncarnation,
    },
    /// Wait for the first error of the run; never answered with success.
    PollForError {
        /// The task that polls.
        task: TaskId,
    },
    /// Leave the run, together with all tasks unless the task is recoverable.
    Shutdown {
        /// The task that leaves.
        task: TaskId,
    },
    /// Leave the run alone, at once.
    Reset {
        /// The task that leaves.
        task: TaskId,
    },
    /// A task declares itself failed.
    ReportError {
        /// The task that failed.
        task: TaskId,
        /// The status code, any number.
        code: i32,
        /// The error message.
        message: String,
    },
    /// Exchange opaque device descriptions between all tasks (generation A).
    WaitForAllTasks {
        /// The task that takes part.
        task: TaskId,
        /// Its devices: encoded `google.protobuf.Any` messages.
        devices: Vec<Bytes>,
    },
    /// Return the states of these tasks (generation A).
    TaskStates {
        /// The tasks, in the order of the reply.
        tasks: Vec<TaskId>,
    },
    /// Return the present states of all tasks (generation A).
    JobState,
    /// Return the states of all tasks once they differ from the caller's version.
    Watch {
        /// The caller's version; negative for none.
        version: i64,
    },
    /// Store a value.
    Insert {
        /// The key.
        key: Bytes,
        /// The value.
        value: Bytes,
        /// Replace an existing value; otherwise an existing value is an error.
        overwrite: bool,
    },
    /// Return a value, once the key has one.
    Get {
        /// The key.
        key: Bytes,
    },
    /// Return a value, if the key has one.
    TryGet {
        /// The key.
        key: Bytes,
    },
    /// Add to a decimal number.
    Increment {
        /// The key.
        key: Bytes,
        /// The summand; negative to subtract.
        by: i64,
    },
    /// Return every entry below a directory.
    List {
        /// The directory.
        directory: Bytes,
    },
    /// Remove a key and everything below it.
    Delete {
        /// The key.
        key: Bytes,
    },
    /// Wait until every member of a barrier has arrived.
    Barrier {
        /// The barrier's id.
        id: String,
        /// The instance, by the caller's counter.
        counter: i64,
        /// How long to wait, in milliseconds; the first caller's value holds.
        timeout_ms: i64,
        /// The members; `None` for every task of the job.
        members: Option<TaskSet>,
        /// The task that arrives.
        task: TaskId,
    },
    /// Fail a barrier instance for all members.
    CancelBarrier {
        /// The barrier's id.
        id: String,
        /// The counter of the instance.
        counter: i64,
        /// The task that cancels.
        task: TaskId,
    },
    /// Agree with every live task of a set on who is alive.
    LiveSet {
        /// The task that asks.
        task: TaskId,
        /// The set, which must contain the asking task.
        tasks: TaskSet,
    },
    /// A question about this job by a task of another job, with which it exchanges transfers.
    FromPeerJob {
        /// The job of the task that asks.
        from: JobId,
        /// The question.
        question: PeerJobQuery,
    },
}

/// Everything that a task of one job can learn of a job with which it exchanges transfers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum PeerJobQuery {
    /// The states of all tasks, once they differ from the caller's version.
    TaskStates {
        /// The caller's version; negative for none.
        version: i64,
    },
    /// The engine record of one incarnation, once it is published.
    EngineRecord {
        /// The task.
        task: TaskId,
        /// Its incarnation.
        incarnation: TaskIncarnation,
    },
}

impl PeerJobQuery {
    /// Returns the key under which an incarnation publishes its engine record.
    #[must_use]
    pub fn engine_record_key(task: TaskId, incarnation: TaskIncarnation) -> String {
        format!("muster/transfer/{task}/{incarnation}")
    }
}

impl Request {
    /// Returns the name of the kind of request.
    #[must_use]
    pub fn kind(&self) -> &'static str {
        match self {
            Self::Register { .. } => "register",
            Self::Heartbeat { .. } => "heartbeat",
            Self::PollForError { .. } => "poll-for-error",
            Self::Shutdown { .. } => "shutdown",
            Self::Reset { .. } => "reset",
            Self::ReportError { .. } => "report-error",
            Self::WaitForAllTasks { .. } => "wait-for-all-tasks",
            Self::TaskStates { .. } => "task-states",
            Self::JobState => "job-state",
            Self::Watch { .. } => "watch",
            Self::Insert { .. } => "insert",
            Self::Get { .. } => "get",
            Self::TryGet { .. } => "try-get",
            Self::Increment { .. } => "increment",
            Self::List { .. } => "list",
            Self::Delete { .. } => "delete",
            Self::Barrier { .. } => "barrier",
            Self::CancelBarrier { .. } => "cancel-barrier",
            Self::LiveSet { .. } => "live-set",
            Self::FromPeerJob { .. } => "from-peer-job",
        }
    }

    /// Returns whether the request changes nothing if it is answered at once, admitted, and not the first call of its
    /// connection.
    #[must_use]
    pub fn is_read(&self) -> bool {
        matches!(
            self,
            Self::Get { .. }
                | Self::TryGet { .. }
                | Self::List { .. }
                | Self::TaskStates { .. }
                | Self::JobState
        )
    }

    /// Returns the task that the request names as its caller, if it names one.
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
            | Self::Delete { .. }
            | Self::FromPeerJob { .. } => None,
        }
    }
}

/// The states of tasks at one version of the run.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct TaskStates {
    /// The version, which grows with every change of any task's state.
    pub version: i64,
    /// One entry for each task.
    pub tasks: Vec<TaskInfo>,
}

/// The four states that clients know.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum ClientTaskState {
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
    /// The task.
    pub task: TaskId,
    /// Its state.
    pub state: ClientTaskState,
    /// Its present or last incarnation; 0 before its first.
    pub incarnation: TaskIncarnation,
    /// Its error, when it is in one.
    pub error: Option<Arc<Failure>>,
}

/// The tasks of a set that are alive, ascending, each with its incarnation.
pub type LiveSet = Vec<(TaskId, TaskIncarnation)>;

/// A successful reply.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Reply {
    /// Success without a value.
    Done,
    /// Success of a registration or a heartbeat; holds the incarnation of the run.
    ServiceIncarnation(ServiceIncarnation),
    /// The value of the requested key.
    Value(Bytes),
    /// The entries below a directory, as they were at one moment.
    Directory(DirectoryListing),
    /// The barrier passed; holds the service's counter of the instance.
    BarrierPassed(i64),
    /// The live tasks of the requested set.
    LiveSet(Arc<LiveSet>),
    /// The states of tasks.
    States(Arc<TaskStates>),
    /// The devices of all tasks, in the order of the task ids, with the incarnation of the run.
    Devices(ServiceIncarnation, Arc<Vec<Bytes>>),
}

/// The outcome of a call.
pub type CallOutcome = Result<Reply, Arc<Failure>>;
