//! The web edge: it shows what the state machine says, and holds nothing of its own.
//!
//! - `GET /healthz/live`: the process answers
//! - `GET /healthz/ready`: it serves; 503 with the reason while it starts and while it stops
//! - `GET /version`: name and version
//! - `GET /api/v1/server`: version and addresses, with the jobs that each gRPC address serves
//! - `GET /api/v1/jobs`: every job in short
//! - `GET /api/v1/jobs/{job}`: a job with its present run: tasks, barriers, devices, history
//! - `GET /api/v1/jobs/{job}/events?after=N&limit=M`: what happened after event number N
//! - `GET /api/v1/jobs/{job}/findings`: what is found in what is measured, open and closed
//! - `GET /api/v1/findings`: the open findings of every job
//! - `GET /metrics`: metrics in the text format of Prometheus
//!
//! Errors are RFC 9457 problem details (`application/problem+json`).

mod about;
mod findings;
mod health;
mod jobs;
mod listen;
mod metrics;
mod problem;
mod routes;

use std::sync::Arc;

pub use about::{About, Listener, Version};
pub use findings::{FindingsPage, JobFindings};
pub use health::Readiness;
pub use jobs::{EventLine, EventsPage, JobSummary, JobsPage};
pub use listen::{Limits, serve};
pub use problem::{NO_SUCH_JOB, Problem};
pub use routes::{metrics_router, router};

use crate::engine::Engine;
use crate::findings::Board;
use crate::telemetry::metrics::Metrics;

/// What the handlers look at.
#[derive(Clone)]
pub struct Site {
    /// The state.
    pub engine: Arc<Engine>,
    /// Whether the server is ready.
    pub readiness: Arc<Readiness>,
    /// What the server says of itself.
    pub about: Arc<About>,
    /// What is measured.
    pub metrics: Arc<Metrics>,
    /// What was found in it.
    pub findings: Arc<Board>,
}
