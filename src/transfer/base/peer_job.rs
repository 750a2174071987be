//! The job of a peer: either this engine's own job, or another job by its name.
//!
//! The service decides which jobs may exchange transfers. Begin at [`PeerJob::named`].

use std::collections::BTreeSet;
use std::fmt;
use std::sync::{Mutex, PoisonError};

/// The most other jobs that a process names in its life.
const NAMES_MAX: usize = 4096;

/// The names that this process has used. They are never freed, so that a member can be copied.
static NAMES: Mutex<BTreeSet<&'static str>> = Mutex::new(BTreeSet::new());

/// The job of a peer, as an engine names it.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct PeerJob(Option<&'static str>);

/// The error of a process that has named too many jobs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("this process has named {NAMES_MAX} other jobs, the most in its life: start it again")]
pub struct TooManyJobs;

impl PeerJob {
    /// The engine's own job.
    pub const OWN: Self = Self(None);

    /// Returns the job with this name, which must not be the engine's own.
    ///
    /// # Errors
    /// If the process has named too many jobs.
    pub fn named(name: &str) -> Result<Self, TooManyJobs> {
        let mut names = NAMES.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(known) = names.get(name) {
            return Ok(Self(Some(known)));
        }
        if names.len() >= NAMES_MAX {
            return Err(TooManyJobs);
        }
        let kept: &'static str = Box::leak(name.into());
        names.insert(kept);
        Ok(Self(Some(kept)))
    }

    /// Returns the name of another job; none for the engine's own.
    #[must_use]
    pub const fn name(self) -> Option<&'static str> {
        self.0
    }

    /// Returns whether it is the engine's own job.
    #[must_use]
    pub const fn is_own(self) -> bool {
        self.0.is_none()
    }
}

impl fmt::Debug for PeerJob {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.0.unwrap_or("(own job)"))
    }
}

/// Writes ` of job NAME`; nothing for the engine's own job.
impl fmt::Display for PeerJob {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.map_or(Ok(()), |name| write!(f, " of job {name}"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_name_is_one_job() {
        let serve = PeerJob::named("serve").unwrap();
        assert_eq!(PeerJob::named(&String::from("serve")).unwrap(), serve);
        assert_ne!(PeerJob::named("eval").unwrap(), serve);
        assert_eq!((serve.name(), serve.to_string()), (Some("serve"), " of job serve".to_owned()));
        assert_eq!((PeerJob::OWN.is_own(), PeerJob::OWN.to_string()), (true, String::new()));
    }
}
