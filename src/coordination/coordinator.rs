//! stub
use super::*;
/// stub
#[derive(Default)]
pub struct Coordinator {}
#[allow(missing_docs, unused_variables)]
impl Coordinator {
    pub fn apply(&mut self, now: Timestamp, input: Input, effects: &mut Vec<Effect>) {}
    pub fn next_wake(&self) -> Option<Timestamp> {
        None
    }
    /// The job of this name.
    pub fn job_named(&self, name: &str) -> Option<JobId> {
        None
    }
    /// The job that callers reach who name none: `default`, or the only one declared.
    pub fn default_job(&self) -> Option<JobId> {
        None
    }
    pub fn job_view(&self, job: JobId, now: Timestamp) -> Option<JobView> {
        None
    }
    pub fn jobs(&self) -> impl Iterator<Item = (JobId, &JobName)> {
        std::iter::empty()
    }
    pub fn next_job(&self) -> JobId {
        JobId(0)
    }
}
