//! The HTTP port: pages, REST, probes, metrics. It presents the state of the engine. Its own state is limited
//! to sessions, limits and live pages.
//!
//! It contains no rule of coordination: handlers read copies of the state and hand commands to [`Operations`],
//! which writes the audit. Begin at [`AppState`], which handlers share, then `routes.rs`. Every request passes
//! `listener.rs`, `slots.rs` and `access/middleware.rs`.
//!
//! - `GET /` and the addresses below it: the pages (`pages/`)
//! - `GET /healthz/live`: the process answers
//! - `GET /healthz/ready`: it serves; 503 with the reason while it starts and while it stops
//! - `GET /version`: name and version
//! - `GET POST /login`, `POST /logout`: a token for a cookie, and back
//! - `GET /api/v1/server`: version and addresses, with the jobs that each gRPC address serves
//! - `GET /api/v1/handshakes`: failed TLS handshakes, with the reasons
//! - `GET /api/v1/openapi.json`: the description of everything under `/api/v1`
//! - `GET /api/v1/audit`: changes, done and refused, with actor, reason and address
//! - `GET POST /api/v1/jobs`, `GET PATCH DELETE /api/v1/jobs/{job}`: jobs, as summaries and in full
//! - `GET /api/v1/jobs/{job}/events`: the events, as pages or as a stream
//! - `GET POST /api/v1/jobs/{job}/exclusions`, `GET DELETE …/exclusions/{id}`: exclusions
//! - `GET POST /api/v1/jobs/{job}/drain`: a coordinated save
//! - `GET /api/v1/jobs/{job}/runs`, `/tasks`, `/tasks/{task}`, `/barriers`, `/live`, `/devices`,
//!   `/devices/map`
//! - `GET /api/v1/jobs/{job}/transfers`, `/transfers/tasks`: transfer reports of workers
//! - `GET /api/v1/jobs/{job}/keys`, `GET PUT DELETE …/keys/{key}`: the store of the present run
//! - `GET /api/v1/jobs/{job}/findings`, `GET /api/v1/findings`: findings
//! - `GET /metrics`: metrics in the text format of Prometheus
//!
//! Every change has a reason and a line in the audit. Errors are RFC 9457 problem details
//! (`application/problem+json`).

#![allow(unused_qualifications, reason = "what describes the handlers is written out by a macro")]

mod about;
mod access;
mod actor;
mod audit;
mod body;
mod client_network;
mod drain;
mod etag;
mod events;
mod exclusions;
mod extract;
mod findings;
mod headers;
mod health;
mod hosts;
mod jobs;
mod keys;
mod listener;
mod listener_state;
mod metrics;
mod openapi;
mod pages;
mod pagination;
mod problem;
mod redaction;
mod routes;
mod runs;
mod slots;
mod transfers;
mod write_timeout;

#[cfg(any(test, feature = "fuzzing"))]
pub(crate) use access::fuzz_tokens;

use std::sync::Arc;

pub use about::{GrpcListenerInfo, ServerInfo, Version};
pub use access::{
    Access, AccessControl, AuthMethod, NewToken, Principal, TokenError, TokenFile, append_token,
};
pub use actor::{PeerAddress, RequestActor, TransportSecurity};
pub use body::BodyBudget;
pub use client_network::ClientNetwork;
pub use drain::{DrainView, NewDrain};
pub use events::{EventLine, EventStreamLimiter, EventsPage};
pub use exclusions::{ExclusionsPage, NewExclusion};
pub use findings::{FindingsPage, JobFindings};
pub use health::ServerReadiness;
pub use hosts::AllowedHosts;
pub use jobs::{JobPatch, JobsPage, NewJob, SettingsBody};
pub use keys::{KeyInfo, KeyView, KeysPage, NewValue};
pub use listener::{HttpLimits, serve};
pub use listener_state::ListenerState;
pub use pages::{LiveHubs, Timelines};
pub use problem::{NO_SUCH_JOB, Problem};
pub use redaction::RedactionPatterns;
pub use routes::{ROUTE_ACCESS, health_router, metrics_router, router};
pub use runs::{BarriersPage, DevicesPage, EndedBarrierView, RunsPage, TasksPage};
pub use slots::descriptors_needed;
pub use transfers::{TaskTransfersPage, TransfersPage};

use crate::coordination::JobReader;
use crate::engine::Engine;
use crate::findings::{FindingMetrics, FindingStore};
use crate::reports::ReportStore;
use crate::service::{AuditLog, Operations};
use crate::telemetry::metrics::{MetricSource, Metrics};
use crate::tls::HandshakeFailures;

/// The maximum length of a request body, in bytes.
const BODY_BYTES_MAX: usize = 256 << 10;

/// The state that the handlers share.
#[derive(Clone)]
pub struct AppState {
    /// The engine.
    pub engine: Arc<Engine>,
    /// The readiness of the server.
    pub readiness: Arc<ServerReadiness>,
    /// Version and addresses of the server.
    pub about: Arc<ServerInfo>,
    /// Commands upon jobs, and the audit of them.
    pub operations: Arc<Operations>,
    /// The limiter of event streams.
    pub streams: Arc<EventStreamLimiter>,
    /// The memory budget for request bodies.
    pub bodies: Arc<BodyBudget>,
    /// The patterns of keys whose values are hidden.
    pub redaction: Arc<RedactionPatterns>,
    /// The failed TLS handshakes.
    pub handshakes: Arc<HandshakeFailures>,
    /// Access control.
    pub guard: Arc<AccessControl>,
    /// The metrics.
    pub metrics: Arc<Metrics>,
    /// The findings.
    pub findings: Arc<FindingStore>,
    /// The transfer reports of workers.
    pub transfers: Arc<ReportStore>,
    /// The timelines of the jobs.
    pub timelines: Arc<Timelines>,
    /// The hubs of live pages.
    pub live: Arc<LiveHubs>,
}

impl AppState {
    /// Returns a state that keeps its audit in memory, redacts nothing, and measures the engine.
    #[must_use]
    pub fn new(engine: Arc<Engine>, readiness: Arc<ServerReadiness>, about: Arc<ServerInfo>) -> Self {
        let (audit, streams) = (Arc::<AuditLog>::default(), Arc::<EventStreamLimiter>::default());
        let bodies = Arc::<BodyBudget>::default();
        let (findings, transfers) = (Arc::<FindingStore>::default(), Arc::<ReportStore>::default());
        let of_findings = FindingMetrics {
            engine: Arc::clone(&engine),
            reports: Arc::clone(&transfers),
            findings: Arc::clone(&findings),
        };
        let own: Vec<Arc<dyn MetricSource>> =
            vec![readiness.clone(), audit.clone(), streams.clone(), bodies.clone(), Arc::new(of_findings)];
        let metrics = Arc::new(Metrics::for_engine(&engine, own));
        let operations = Operations { engine: Arc::clone(&engine), audit, traces: None };
        Self {
            operations: Arc::new(operations),
            handshakes: Arc::new(HandshakeFailures::new(*engine.clock())),
            guard: Arc::new(AccessControl::open(*engine.clock())),
            engine,
            readiness,
            about,
            metrics,
            findings,
            transfers,
            timelines: Arc::default(),
            live: Arc::default(),
            streams,
            bodies,
            redaction: Arc::default(),
        }
    }

    /// Reads a part of a job.
    fn read_job<T>(
        &self,
        job: &extract::JobPath,
        look: impl FnOnce(JobReader<'_>) -> T,
    ) -> Result<T, Problem> {
        let seen = self.engine.read(|core, _| core.job(job.id).map(look));
        seen.ok_or_else(|| Problem::no_such_job(job.name.as_str(), Vec::new()))
    }
}
