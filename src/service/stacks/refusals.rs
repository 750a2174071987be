//! The reasons why a request for stacks or an answer to one is refused.
//!
//! `collector.rs` refuses, and `http/stacks.rs` gives each reason its status.

use std::time::Duration;

use super::answer::InvalidStackAnswer;
use super::{JOB_BYTES_MAX, OPEN_FOR};
use crate::coordination::TaskId;

/// The reason why a request is refused.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum StackRequestRefusal {
    /// The job does not exist.
    #[error("there is no such job")]
    NoSuchJob,
    /// A task does not exist.
    #[error("there is no task {task}: the job has {tasks} tasks")]
    NoSuchTask {
        /// The task.
        task: TaskId,
        /// The number of tasks.
        tasks: usize,
    },
    /// The last request was a moment ago.
    #[error("stacks of this job were requested less than {} s ago: wait, or look at the answers", .0.as_secs())]
    TooSoon(Duration),
}

/// The reason why an answer is refused.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum StackAnswerRefusal {
    /// The job does not exist.
    #[error("there is no such job")]
    NoSuchJob,
    /// The task does not exist.
    #[error("there is no task {0}")]
    NoSuchTask(TaskId),
    /// The job has no such request, or a later one has replaced it.
    #[error("request {0} is not the latest request for stacks of this job")]
    NoSuchRequest(u64),
    /// The time for answers is over.
    #[error("request {0} is over: its answers had to come within {seconds} s", seconds = OPEN_FOR.as_secs())]
    Over(u64),
    /// The request does not ask the task.
    #[error("request {request} does not ask task {task}")]
    NotAsked {
        /// The request.
        request: u64,
        /// The task.
        task: TaskId,
    },
    /// The task has answered.
    #[error("task {task} has answered request {request}")]
    AlreadyAnswered {
        /// The request.
        request: u64,
        /// The task.
        task: TaskId,
    },
    /// The request was not handed out with this ticket.
    #[error(
        "request {request} was not handed out to task {task} with this ticket, or a newer process has it"
    )]
    WrongTicket {
        /// The request.
        request: u64,
        /// The task.
        task: TaskId,
    },
    /// Another incarnation of the task has taken its place.
    #[error("another incarnation of task {0} is connected by now")]
    StaleIncarnation(TaskId),
    /// The answer is invalid.
    #[error(transparent)]
    Invalid(#[from] InvalidStackAnswer),
    /// There is no memory for the stacks.
    #[error("the stacks of this job take {max} bytes, the limit", max = JOB_BYTES_MAX)]
    NoRoom,
}
