//! The names of the gRPC services for coordination and for peer jobs, and the *dialect* of a client: how replies to
//! this client encode tasks.
//!
//! `generation_a.rs`, `generation_c.rs` and `peer_jobs_service.rs` decode the calls of these services. Begin at
//! [`Dialect`].

use serde::{Deserialize, Serialize};

/// The service of generation A.
pub(super) const GENERATION_A_SERVICE: &str = "tensorflow.CoordinationService";
/// The service of generation C.
pub(super) const GENERATION_C_SERVICE: &str = "xla.coordination.CoordinationService";
/// The service by which a task finds the tasks of another job.
pub(super) const PEER_JOBS_SERVICE: &str = "muster.v1.PeerJobs";

/// The encoding of tasks: the only difference between the replies of the generations.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum Dialect {
    /// Generation A, from a client that names its job: jaxlib up to 0.8.3.
    Named,
    /// Generation A, from a client that does not: jaxlib 0.9.
    Unnamed,
    /// Generation C: plain numbers.
    Number,
}

impl Dialect {
    /// Returns generation A's dialect, by whether the client names its job.
    pub(super) fn of_generation_a(named: bool) -> Self {
        if named { Self::Named } else { Self::Unnamed }
    }

    /// Returns the name of the service.
    pub(super) fn service_name(self) -> &'static str {
        match self {
            Self::Named | Self::Unnamed => GENERATION_A_SERVICE,
            Self::Number => GENERATION_C_SERVICE,
        }
    }
}
