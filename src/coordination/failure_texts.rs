//! Failures that several rules answer with.
//!
//! A failure of one rule only stands in the file of that rule.

use std::sync::Arc;

use super::failure::{Code, Failure};
use super::ids::{TaskId, TaskIncarnation};

/// What every call to a job is answered that is no more.
pub(super) fn deleted_job_failure() -> Failure {
    Failure::from_service(Code::NotFound, "There is no such job any more.")
}

/// What the waiting calls of a life end with when a newer one takes its place.
pub(super) fn taken_over_failure(id: TaskId, incarnation: TaskIncarnation) -> Arc<Failure> {
    let text = format!("Task {id} was taken over by its newer incarnation {incarnation}. End this process.");
    Arc::new(Failure::from_service(Code::Aborted, text))
}

/// What callers of a failed shutdown, and everybody who polls, are told.
pub(super) fn shutdown_failure(cause: &Failure) -> Failure {
    let text = format!("Shutdown barrier has failed.\nBarrier result: '{cause}'");
    Failure::from_service(Code::Internal, text)
        .with_cause(&format!("the tasks did not shut down together: {}", cause.summary()))
}
