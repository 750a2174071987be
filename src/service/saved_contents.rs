//! The form in which observers that keep a history of each job save it: a map by job, in the format postcard.
//!
//! The histories own what is saved, and check what is restored. Begin at [`restore_jobs`].

use std::collections::BTreeMap;

use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::coordination::JobId;
use crate::engine::ContentsSerialiser;

/// Returns a function that serialises the histories of all jobs.
pub(super) fn serialise_later<T: Serialize + Send + 'static>(jobs: BTreeMap<JobId, T>) -> ContentsSerialiser {
    Box::new(move || postcard::to_stdvec(&jobs).expect("postcard can serialise every history"))
}

/// Restores the histories of all jobs. The bytes may be damaged, so `is_valid` checks the history of each job.
pub(super) fn restore_jobs<T: DeserializeOwned>(
    bytes: &[u8],
    is_valid: impl Fn(JobId, &T) -> bool,
) -> Result<BTreeMap<JobId, T>, String> {
    let (jobs, rest) = postcard::take_from_bytes::<BTreeMap<JobId, T>>(bytes)
        .map_err(|error| format!("The contents cannot be decoded: {error}"))?;
    if !rest.is_empty() {
        return Err(format!("{} bytes follow the contents.", rest.len()));
    }
    match jobs.iter().find(|(job, history)| !is_valid(**job, history)) {
        Some((job, _)) => Err(format!("The contents of the job with number {} are not valid.", job.0)),
        None => Ok(jobs),
    }
}

#[cfg(test)]
mod tests;
