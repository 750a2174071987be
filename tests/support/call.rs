//! Calls of both generations of the protocol in one form: an enum with a variant for each method.

/// A wire generation of the protocol.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Generation {
    /// `tensorflow.CoordinationService`, jaxlib up to 0.9.2.
    A,
    /// `xla.coordination.CoordinationService`, jaxlib from 0.10.0 on.
    C,
}

/// The caller of a call.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Caller {
    /// The task.
    pub task: i32,
    /// The incarnation of the task.
    pub incarnation: u64,
    /// The service incarnation that the caller expects. Only generation C sends it, and `None` leaves the
    /// message out of the request.
    pub service: Option<u64>,
    /// The caller sends a job name with its task id, as generation A clients up to 0.8.3 do.
    pub named: bool,
}

impl Caller {
    /// Returns a task in the form of the last clients of each generation.
    pub fn new(task: i32, incarnation: u64, service: u64) -> Self {
        Self { task, incarnation, service: Some(service), named: false }
    }
}

/// One call. The [`Caller`] says which task makes it.
#[derive(Debug, Clone, PartialEq)]
pub enum Call {
    Register {
        incarnation: u64,
        recoverable: bool,
    },
    Heartbeat {
        incarnation: u64,
    },
    PollForError,
    Shutdown,
    /// Generation A only.
    Reset,
    /// Generation A, and generation C from 0.11.2 on.
    ReportError {
        code: i32,
        message: String,
    },
    /// Generation A only; intended for a service inside a task, which none has.
    ReportErrorToTask,
    /// Generation A only: each device is the encoded value of an `Any`.
    WaitForAllTasks {
        devices: Vec<Vec<u8>>,
    },
    /// Generation A only.
    TaskStates {
        tasks: Vec<i32>,
    },
    /// Generation A only, 0.5.3 to 0.6.2.
    JobState,
    Watch {
        version: i64,
    },
    Insert {
        key: String,
        value: Vec<u8>,
        overwrite: bool,
    },
    Get {
        key: String,
    },
    TryGet {
        key: String,
    },
    Increment {
        key: String,
        by: i64,
    },
    List {
        directory: String,
    },
    Delete {
        key: String,
        directory: bool,
    },
    Barrier {
        id: String,
        counter: i64,
        timeout_ms: i64,
        members: Vec<i32>,
    },
    CancelBarrier {
        id: String,
        counter: i64,
    },
    Alive {
        tasks: Vec<i32>,
    },
}

/// The timeout of barriers that are not meant to time out.
const PATIENT_MS: i64 = 60_000;

/// Constructors of the usual calls, with defaults for fields that tests rarely set.
impl Call {
    pub fn insert(key: &str, value: impl AsRef<[u8]>) -> Self {
        Self::Insert { key: key.into(), value: value.as_ref().to_vec(), overwrite: false }
    }

    pub fn overwrite(key: &str, value: impl AsRef<[u8]>) -> Self {
        Self::Insert { key: key.into(), value: value.as_ref().to_vec(), overwrite: true }
    }

    pub fn get(key: &str) -> Self {
        Self::Get { key: key.into() }
    }

    pub fn try_get(key: &str) -> Self {
        Self::TryGet { key: key.into() }
    }

    pub fn increment(key: &str, by: i64) -> Self {
        Self::Increment { key: key.into(), by }
    }

    pub fn list(directory: &str) -> Self {
        Self::List { directory: directory.into() }
    }

    pub fn delete(key: &str) -> Self {
        Self::Delete { key: key.into(), directory: true }
    }

    /// Returns a barrier of all tasks.
    pub fn barrier(id: &str, counter: i64) -> Self {
        Self::Barrier { id: id.into(), counter, timeout_ms: PATIENT_MS, members: Vec::new() }
    }

    /// Returns a barrier of these tasks.
    pub fn barrier_of(id: &str, counter: i64, members: &[i32]) -> Self {
        Self::Barrier { id: id.into(), counter, timeout_ms: PATIENT_MS, members: members.to_vec() }
    }

    pub fn cancel(id: &str, counter: i64) -> Self {
        Self::CancelBarrier { id: id.into(), counter }
    }

    pub fn alive(tasks: &[i32]) -> Self {
        Self::Alive { tasks: tasks.to_vec() }
    }

    pub fn report(code: i32, message: &str) -> Self {
        Self::ReportError { code, message: message.into() }
    }

    pub fn watch(version: i64) -> Self {
        Self::Watch { version }
    }

    /// Sets the timeout of a barrier.
    pub fn within_ms(mut self, ms: i64) -> Self {
        if let Self::Barrier { timeout_ms, .. } = &mut self {
            *timeout_ms = ms;
        }
        self
    }
}
