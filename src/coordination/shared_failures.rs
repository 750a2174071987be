//! The failures that several rules return.
//!
//! A failure that only one rule returns is in the file of that rule. Begin at `job_deleted_failure`.

use std::sync::Arc;

use super::failure::{Code, Failure};
use super::ids::{TaskId, TaskIncarnation};

/// Returns the failure of every call to a deleted job.
pub(super) fn job_deleted_failure() -> Failure {
    Failure::from_service(Code::NotFound, "There is no such job any more.")
}

/// Returns the failure of the waiting calls of an incarnation that a newer one replaces.
pub(super) fn incarnation_replaced_failure(id: TaskId, incarnation: TaskIncarnation) -> Arc<Failure> {
    let text = format!("Task {id} was taken over by its newer incarnation {incarnation}. End this process.");
    Arc::new(Failure::from_service(Code::Aborted, text))
}

/// Returns the failure of a failed shutdown, for its callers and for error polls.
pub(super) fn failed_shutdown_failure(cause: &Failure) -> Failure {
    let text = format!("Shutdown barrier has failed.\nBarrier result: '{cause}'");
    Failure::from_service(Code::Internal, text)
        .with_cause(&format!("the tasks did not shut down together: {}", cause.summary()))
}
