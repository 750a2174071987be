//! The status codes, and the error of the last failed call of each thread.
//!
//! Each kind of error of the Rust library that a C program can get has a code. `tests/c/language_table.rs` checks
//! this. Begin at [`CallError`].

use std::cell::RefCell;
use std::ffi::{CStr, CString, c_char};

use muster::agent::AgentError;
use muster::transfer::{MemoryError, PrepareError, TransferError};

/// The version of the binary interface.
pub const MUSTER_ABI_VERSION: u32 = 1;

/// The outcome of a call. The numbers never change; later versions add some.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(i32)]
pub enum MusterStatus {
    /// The call succeeded.
    Ok = 0,
    /// An argument is null, misaligned, not UTF-8, or out of range. Nothing was done.
    InvalidArgument = 1,
    /// The handle was freed, or is none of this kind. Nothing was done.
    InvalidHandle = 2,
    /// The library failed inside; standard error has the message. Please report it.
    Internal = 3,
    /// The process was forked after the library was used, and its threads exist only in the parent.
    Forked = 4,
    /// The function was called by a release callback, where it would wait for itself.
    InCallback = 5,
    /// The cancellation of the wait was cancelled.
    Interrupted = 6,
    /// An error that this version of the interface has no code for; the text describes it.
    Other = 7,

    /// The place of this process in its job is unknown, or two sources disagree about it.
    ClusterEnv = 100,
    /// The settings contradict one another, or differ from those of the job.
    Settings = 101,
    /// A certificate or key for TLS is unusable.
    Tls = 102,
    /// The transfer engine cannot start.
    Engine = 103,
    /// The service cannot be reached.
    Unreachable = 104,
    /// The wait was not over within its timeout.
    TimedOut = 105,
    /// Not all tasks requested the live set within the timeout; the text names those that did not.
    IncompleteLiveSet = 106,
    /// Not all tasks of the job registered within the timeout; the text names those that did not.
    TasksMissing = 107,
    /// The service refused the call; `muster_error_service_code` has the status of gRPC.
    Refused = 108,
    /// Another service, or another run, answers now. Join again.
    RunChanged = 109,
    /// The service's answer is invalid.
    Protocol = 110,
    /// This incarnation of the task is over, or has left. Join again.
    LifeEnded = 111,
    /// The service has ended the run, or this incarnation of the task.
    Ended = 112,
    /// A restarted task has other devices than before.
    DevicesChanged = 113,
    /// A task lives, but its transfer engine cannot be used.
    NoEngine = 114,

    /// The peer's process or host is gone.
    PeerDead = 200,
    /// The peer's incarnation is not the current one.
    StaleIncarnation = 201,
    /// A program of one side cancelled the transfer.
    Cancelled = 202,
    /// The deadline of the transfer passed.
    Deadline = 203,
    /// No byte moved for longer than the stall limit.
    Stalled = 204,
    /// Both sides have the key, with different layouts.
    LayoutMismatch = 205,
    /// The sides launched different transfers as the same group.
    OrderMismatch = 206,
    /// A chunk arrived damaged twice.
    Integrity = 207,
    /// A transport failed, and no other could take over.
    Transport = 208,
    /// An event on which the launch depends has failed.
    Dependency = 209,
    /// The prepared transfers were dropped before they were launched.
    Dropped = 210,
    /// Too many launches to one peer are in flight.
    Overloaded = 211,
    /// The transfer engine has been shut down.
    Closed = 212,

    /// The request names no transfer.
    Empty = 300,
    /// The task owns no device to send from.
    NoDevice = 301,
    /// The request holds more transfers than it may.
    TooMany = 302,
    /// No task of the membership owns the device.
    UnknownDevice = 303,
    /// The local device of a transfer belongs to another task.
    NotAddressable = 304,
    /// Both devices of a transfer belong to this task, and the request has only its send, or only its receive.
    SameTask = 305,
    /// Two transfers of one request have the same key and the same devices.
    DuplicateKey = 306,
    /// Two transfers of one request use the same bytes, and at least one of them writes those.
    Overlap = 307,
    /// A range reaches beyond its buffer.
    OutOfRange = 308,
    /// The layout and the range differ in their number of bytes.
    WrongSize = 309,
    /// The lists of a request differ in length.
    Uneven = 310,

    /// The memory has no free range of that size.
    Full = 400,
    /// A transfer uses some of the bytes now.
    Busy = 401,
    /// The operating system refused memory or threads.
    System = 402,
}

impl MusterStatus {
    const fn name(self) -> &'static CStr {
        match self {
            Self::Ok => c"OK",
            Self::InvalidArgument => c"INVALID_ARGUMENT",
            Self::InvalidHandle => c"INVALID_HANDLE",
            Self::Internal => c"INTERNAL",
            Self::Forked => c"FORKED",
            Self::InCallback => c"IN_CALLBACK",
            Self::Interrupted => c"INTERRUPTED",
            Self::Other => c"OTHER",
            Self::ClusterEnv => c"CLUSTER_ENV",
            Self::Settings => c"SETTINGS",
            Self::Tls => c"TLS",
            Self::Engine => c"ENGINE",
            Self::Unreachable => c"UNREACHABLE",
            Self::TimedOut => c"TIMED_OUT",
            Self::IncompleteLiveSet => c"INCOMPLETE_LIVE_SET",
            Self::TasksMissing => c"TASKS_MISSING",
            Self::Refused => c"REFUSED",
            Self::RunChanged => c"RUN_CHANGED",
            Self::Protocol => c"PROTOCOL",
            Self::LifeEnded => c"LIFE_ENDED",
            Self::Ended => c"ENDED",
            Self::DevicesChanged => c"DEVICES_CHANGED",
            Self::NoEngine => c"NO_ENGINE",
            Self::PeerDead => c"PEER_DEAD",
            Self::StaleIncarnation => c"STALE_INCARNATION",
            Self::Cancelled => c"CANCELLED",
            Self::Deadline => c"DEADLINE",
            Self::Stalled => c"STALLED",
            Self::LayoutMismatch => c"LAYOUT_MISMATCH",
            Self::OrderMismatch => c"ORDER_MISMATCH",
            Self::Integrity => c"INTEGRITY",
            Self::Transport => c"TRANSPORT",
            Self::Dependency => c"DEPENDENCY",
            Self::Dropped => c"DROPPED",
            Self::Overloaded => c"OVERLOADED",
            Self::Closed => c"CLOSED",
            Self::Empty => c"EMPTY",
            Self::NoDevice => c"NO_DEVICE",
            Self::TooMany => c"TOO_MANY",
            Self::UnknownDevice => c"UNKNOWN_DEVICE",
            Self::NotAddressable => c"NOT_ADDRESSABLE",
            Self::SameTask => c"SAME_TASK",
            Self::DuplicateKey => c"DUPLICATE_KEY",
            Self::Overlap => c"OVERLAP",
            Self::OutOfRange => c"OUT_OF_RANGE",
            Self::WrongSize => c"WRONG_SIZE",
            Self::Uneven => c"UNEVEN",
            Self::Full => c"FULL",
            Self::Busy => c"BUSY",
            Self::System => c"SYSTEM",
        }
    }

    /// Every status.
    const ALL: [Self; 50] = [
        Self::Ok,
        Self::InvalidArgument,
        Self::InvalidHandle,
        Self::Internal,
        Self::Forked,
        Self::InCallback,
        Self::Interrupted,
        Self::Other,
        Self::ClusterEnv,
        Self::Settings,
        Self::Tls,
        Self::Engine,
        Self::Unreachable,
        Self::TimedOut,
        Self::IncompleteLiveSet,
        Self::TasksMissing,
        Self::Refused,
        Self::RunChanged,
        Self::Protocol,
        Self::LifeEnded,
        Self::Ended,
        Self::DevicesChanged,
        Self::NoEngine,
        Self::PeerDead,
        Self::StaleIncarnation,
        Self::Cancelled,
        Self::Deadline,
        Self::Stalled,
        Self::LayoutMismatch,
        Self::OrderMismatch,
        Self::Integrity,
        Self::Transport,
        Self::Dependency,
        Self::Dropped,
        Self::Overloaded,
        Self::Closed,
        Self::Empty,
        Self::NoDevice,
        Self::TooMany,
        Self::UnknownDevice,
        Self::NotAddressable,
        Self::SameTask,
        Self::DuplicateKey,
        Self::Overlap,
        Self::OutOfRange,
        Self::WrongSize,
        Self::Uneven,
        Self::Full,
        Self::Busy,
        Self::System,
    ];
}

/// The error of a call.
#[derive(Debug, Clone)]
pub struct CallError {
    pub status: MusterStatus,
    pub text: String,
    /// The status of gRPC, if the service stated the error; 0 otherwise.
    service_code: i32,
    /// The task that the error names; -1 if it names none.
    task: i64,
}

impl CallError {
    pub fn new(status: MusterStatus, text: impl Into<String>) -> Self {
        Self { status, text: text.into(), service_code: 0, task: -1 }
    }

    pub fn invalid_argument(text: impl Into<String>) -> Self {
        Self::new(MusterStatus::InvalidArgument, text)
    }

    pub fn with_task(mut self, task: u32) -> Self {
        self.task = i64::from(task);
        self
    }
}

impl From<AgentError> for CallError {
    fn from(error: AgentError) -> Self {
        use MusterStatus as Status;
        let text = replace_flags_by_c_options(&error.to_string());
        let with = |status: Status, next: &str| Self::new(status, format!("{text}; {next}"));
        match &error {
            AgentError::ClusterEnv(_) => Self::new(Status::ClusterEnv, text),
            AgentError::Settings(_) => Self::new(Status::Settings, text),
            AgentError::Tls(_) => with(Status::Tls, "check the paths and contents of ca, cert and key"),
            AgentError::Engine(_) => Self::new(Status::Engine, text),
            AgentError::Unreachable { .. } => {
                let next = "start it (`muster serve`), or correct service or JAX_COORDINATOR_ADDRESS";
                with(Status::Unreachable, next)
            }
            AgentError::TimedOut { .. } => with(Status::TimedOut, LONGER),
            AgentError::IncompleteLiveSet { .. } => Self::new(Status::IncompleteLiveSet, text),
            AgentError::Refused { code, .. } => {
                let number = *code as i32;
                let refused = match number {
                    // The service applies the timeout of a wait.
                    DEADLINE_EXCEEDED => with(Status::TimedOut, LONGER),
                    ALREADY_EXISTS => with(Status::Refused, "overwrite it, or read what is there"),
                    _ => Self::new(Status::Refused, text),
                };
                Self { service_code: number, ..refused }
            }
            AgentError::RunChanged { .. } => with(Status::RunChanged, JOIN_AGAIN),
            AgentError::Protocol { .. } => Self::new(Status::Protocol, text),
            AgentError::LifeEnded { .. } => with(Status::LifeEnded, JOIN_AGAIN),
            AgentError::Ended { code, .. } => {
                Self { service_code: *code as i32, ..with(Status::Ended, JOIN_AGAIN) }
            }
            AgentError::EnginesMissing { .. } => with(Status::TimedOut, LONGER),
            AgentError::EngineUnusable { task, .. } => Self::new(Status::NoEngine, text).with_task(*task),
            AgentError::DevicesChanged { task, .. } => {
                Self::new(Status::DevicesChanged, text).with_task(*task)
            }
            _ => Self::new(Status::Other, text),
        }
    }
}

/// Statuses of gRPC.
const DEADLINE_EXCEEDED: i32 = 4;
const ALREADY_EXISTS: i32 = 6;

const LONGER: &str =
    "`muster status` shows which tasks are missing or waiting; a longer timeout waits longer";
const JOIN_AGAIN: &str = "this agent is of no more use: free it, and join again";

impl From<TransferError> for CallError {
    fn from(error: TransferError) -> Self {
        use MusterStatus as Status;
        let status = match error {
            TransferError::Prepare(error) => return (*error).into(),
            TransferError::Memory(error) => return error.into(),
            TransferError::PeerDead { .. } => Status::PeerDead,
            TransferError::StaleIncarnation { .. } => Status::StaleIncarnation,
            TransferError::Cancelled { .. } => Status::Cancelled,
            TransferError::Deadline { .. } => Status::Deadline,
            TransferError::Stalled { .. } => Status::Stalled,
            TransferError::LayoutMismatch { .. } => Status::LayoutMismatch,
            TransferError::OrderMismatch { .. } => Status::OrderMismatch,
            TransferError::Integrity { .. } => Status::Integrity,
            TransferError::Transport { .. } => Status::Transport,
            TransferError::Dependency(_) => Status::Dependency,
            TransferError::Dropped => Status::Dropped,
            TransferError::Overloaded { .. } => Status::Overloaded,
            TransferError::Closed => Status::Closed,
            _ => Status::Other,
        };
        let named = error.member().map_or(-1, |member| i64::from(member.task.0));
        Self { task: named, ..Self::new(status, error.to_string()) }
    }
}

impl From<PrepareError> for CallError {
    fn from(error: PrepareError) -> Self {
        use MusterStatus as Status;
        let status = match error {
            PrepareError::Memory(error) => return error.into(),
            PrepareError::Clique { error, .. } => return error.into(),
            PrepareError::Closed => Status::Closed,
            PrepareError::Empty => Status::Empty,
            PrepareError::NoDevice { .. } => Status::NoDevice,
            PrepareError::TooMany { .. } => Status::TooMany,
            PrepareError::UnknownDevice(_) => {
                let text = format!("{error}; muster_device returns the number of a task's device");
                return Self::new(Status::UnknownDevice, text);
            }
            PrepareError::NotAddressable { .. } => Status::NotAddressable,
            PrepareError::SameTask { .. } => Status::SameTask,
            PrepareError::DuplicateKey { .. } => Status::DuplicateKey,
            PrepareError::Overlap { .. } => Status::Overlap,
            PrepareError::OutOfRange { .. } => Status::OutOfRange,
            PrepareError::WrongSize { .. } => Status::WrongSize,
            PrepareError::Uneven { .. } => Status::Uneven,
            _ => Status::Other,
        };
        Self::new(status, error.to_string())
    }
}

impl From<MemoryError> for CallError {
    fn from(error: MemoryError) -> Self {
        let status = match error {
            MemoryError::Full { .. } => MusterStatus::Full,
            MemoryError::Busy { .. } => MusterStatus::Busy,
            MemoryError::OutOfRange { .. } => MusterStatus::OutOfRange,
            MemoryError::System { .. } => MusterStatus::System,
            _ => MusterStatus::Other,
        };
        Self::new(status, error.to_string())
    }
}

/// Replaces the flags of the command line in a message by the options of `muster_join`.
fn replace_flags_by_c_options(text: &str) -> String {
    const OPTIONS: [(&str, &str); 13] = [
        ("--token-file", "token"),
        ("--transfer-cert", "transfer_cert"),
        ("--transfer-key", "transfer_key"),
        ("--transfer-ca", "transfer_ca"),
        ("--insecure-transfers", "insecure_transfers"),
        ("--tasks", "tasks"),
        ("--task", "task"),
        ("--service", "service"),
        ("--listen", "listen"),
        ("--advertise", "advertise"),
        ("--cert", "cert"),
        ("--ca", "ca"),
        ("--key", "key"),
    ];
    OPTIONS.iter().fold(text.to_owned(), |text, (flag, option)| text.replace(flag, option))
}

/// The last error of a thread.
struct LastError {
    text: CString,
    service_code: i32,
    task: i64,
}

thread_local! {
    static LAST: RefCell<Option<LastError>> = const { RefCell::new(None) };
}

/// Returns a part of this thread's last error.
fn with_last_error<T>(part: impl FnOnce(&LastError) -> T) -> Option<T> {
    LAST.try_with(|last| last.borrow().as_ref().map(part)).ok().flatten()
}

/// Keeps an error as the last one of this thread, and returns its status.
pub fn set_last_error(error: CallError) -> MusterStatus {
    // A text from outside may contain NUL.
    let text = CString::new(error.text.replace('\0', "\u{fffd}")).unwrap_or_default();
    // A thread that ends has no error any more.
    let _kept = LAST.try_with(|last| {
        let error = LastError { text, service_code: error.service_code, task: error.task };
        // The former text is freed here: the caller has been told that it is gone.
        *last.borrow_mut() = Some(error);
    });
    error.status
}

/// Returns the version of the binary interface. It must be the header's `MUSTER_ABI_VERSION`.
#[unsafe(no_mangle)]
pub extern "C" fn muster_abi_version() -> u32 {
    MUSTER_ABI_VERSION
}

/// Returns the version of Muster, for example "0.1.0". The text is never freed.
#[unsafe(no_mangle)]
pub extern "C" fn muster_version() -> *const c_char {
    const VERSION: &str = concat!(env!("CARGO_PKG_VERSION"), "\0");
    VERSION.as_ptr().cast()
}

/// Returns the name of a status without its prefix, for example "TIMED_OUT"; "UNKNOWN" for another number. The text is
/// never freed.
#[unsafe(no_mangle)]
pub extern "C" fn muster_status_name(status: i32) -> *const c_char {
    let known = MusterStatus::ALL.into_iter().find(|known| *known as i32 == status);
    known.map_or(c"UNKNOWN", MusterStatus::name).as_ptr()
}

/// Returns the text of the last failed call of this thread; empty if none has failed. It is valid until the next failed
/// call of this thread.
#[unsafe(no_mangle)]
pub extern "C" fn muster_error_message() -> *const c_char {
    with_last_error(|last| last.text.as_ptr()).unwrap_or(c"".as_ptr())
}

/// Returns the status of gRPC that the service stated with the last failed call of this thread, for example 6
/// (ALREADY_EXISTS); 0 if the service stated none.
#[unsafe(no_mangle)]
pub extern "C" fn muster_error_service_code() -> i32 {
    with_last_error(|last| last.service_code).unwrap_or(0)
}

/// Returns the task that the error of the last failed call of this thread names, for example the peer of a transfer;
/// -1 if it names none.
#[unsafe(no_mangle)]
pub extern "C" fn muster_error_task() -> i64 {
    with_last_error(|last| last.task).unwrap_or(-1)
}
