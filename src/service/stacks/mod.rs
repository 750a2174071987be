//! Stacks of tasks: requests for them, and the answers, grouped by equal stacks.
//!
//! An operator asks, or a finding does (`service/stack_requests.rs`). A task answers in one of two ways. A Python program
//! that has loaded the helper (`python/muster/_stacks.py`) waits for requests and answers over HTTP. A worker learns of a
//! request from the answer to its transfer report, and answers over gRPC (`proto/muster_stacks.proto`). Stacks contain
//! names of functions and files and numbers of lines, and no values. Nothing here is part of the state machine: a request
//! changes nothing for a job. Begin at [`StackCollector`].
//!
//! | file | contents |
//! | --- | --- |
//! | `answer.rs` | an answer, and the checks of what a task sends |
//! | `task_ranges.rs` | sets of tasks, such as `0-7,12` |
//! | `stack_groups.rs` | the stacks of one request, each stored once, within a bound |
//! | `collector.rs` | the requests, the answers and the sources of all jobs |
//! | `refusals.rs` | why a request or an answer is refused |
//! | `view.rs` | the views that pages, REST and the command line share |
//! | `metrics.rs` | requests, answers and sources as metrics |
//!
//! - A job keeps its latest request. The next request drops its answers.
//! - A task answers a request once from each source, Python and the worker. The answer counts only if the incarnation of
//!   the task is still the one to which the request was handed out.
//! - A request is handed out for [`OPEN_FOR`]. A stack that a task sends later would show another moment.

mod answer;
mod collector;
#[cfg(any(test, feature = "fuzzing"))]
mod fuzzing;
mod metrics;
mod refusals;
mod stack_groups;
mod task_ranges;
#[cfg(test)]
mod tests;
mod view;

use std::time::Duration;

pub use answer::{InvalidStackAnswer, NewStackAnswer, StackFrame, StackSource, ThreadStack};
pub use collector::{HandedRequest, HelperPoll, NewStackRequest, StackCollector, StackWaitView};
#[cfg(any(test, feature = "fuzzing"))]
pub(crate) use fuzzing::check_stack_answer;
pub use metrics::StackMetrics;
pub use refusals::{StackAnswerRefusal, StackRequestRefusal};
pub use task_ranges::{TaskRange, TaskRanges};
pub use view::{NewStackRequestBody, StackGroupView, StackRequestView, StacksView};

/// The maximum number of threads in an answer.
pub const THREADS_MAX: usize = 256;
/// The maximum number of frames of a thread.
pub const FRAMES_MAX: usize = 128;
/// The maximum length of the name of a thread or a function, in bytes. Longer names are cut.
pub const NAME_BYTES_MAX: usize = 200;
/// The maximum length of the path of a file, in bytes. Of longer paths the end is kept.
pub const FILE_BYTES_MAX: usize = 300;
/// The maximum length of the answer of a worker, in bytes. The answers of helpers are bodies of HTTP requests.
pub const WORKER_ANSWER_BYTES_MAX: usize = 256 << 10;
/// The maximum memory of the stacks of one job, in bytes.
pub const JOB_BYTES_MAX: usize = 8 << 20;
/// The maximum memory of the stacks of all jobs, in bytes. Beyond it, the oldest request of another job loses its stacks.
pub const ALL_BYTES_MAX: usize = 64 << 20;
/// The time for which a request is handed out and answered.
pub const OPEN_FOR: Duration = Duration::from_secs(120);
/// The minimum time between two requests by operators for one job.
pub const REQUEST_INTERVAL: Duration = Duration::from_secs(1);
/// The minimum time between two automatic requests for one job.
pub const AUTOMATIC_INTERVAL: Duration = Duration::from_secs(300);
/// The minimum time between a request by an operator and an automatic one, which drops the answers to it.
pub const AUTOMATIC_AFTER_OPERATOR: Duration = Duration::from_secs(60);
