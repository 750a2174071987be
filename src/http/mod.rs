//! The HTTP port: serves pages, the REST API, health checks and metrics. The port presents the state of the jobs.
//! Its own state consists of sessions, rate limits and live pages.
//!
//! This module contains no rule of coordination. Handlers read copies of the state, and pass commands to
//! [`AuditedOperations`], which writes the audit. Begin at [`AppState`], which handlers share, then `routes.rs`. Every
//! request passes `listener.rs`, `slots.rs` and `access/middleware.rs`.
//!
//! - `GET /` and the addresses below it: the pages (`pages/`)
//! - `GET /healthz/live`: 200 if the process answers
//! - `GET /healthz/ready`: 200 while the process serves; 503 with the reason while it starts or stops
//! - `GET /version`: name and version
//! - `GET POST /login`, `POST /logout`: exchanges a token for a session cookie, and ends the session
//! - `GET /api/v1/server`: version and addresses, with the jobs that each gRPC address serves
//! - `GET /api/v1/handshakes`: failed TLS handshakes, with the reasons
//! - `GET /api/v1/openapi.json`: the description of everything under `/api/v1`
//! - `GET /api/v1/audit`: changes, done and refused, with actor, reason and address
//! - `GET POST /api/v1/jobs`, `GET PATCH DELETE /api/v1/jobs/{job}`: jobs, as summaries and in full
//! - `GET /api/v1/jobs/{job}/events`: the events, as pages or as a stream
//! - `GET POST /api/v1/jobs/{job}/exclusions`, `GET DELETE …/exclusions/{id}`: exclusions
//! - `GET POST DELETE /api/v1/jobs/{job}/hosts`, `DELETE …/hosts/{task}`: the host to which each task id belongs
//! - `GET POST /api/v1/jobs/{job}/drain`: a coordinated save
//! - `GET /api/v1/jobs/{job}/runs`, `/tasks`, `/tasks/{task}`, `/barriers`, `/live`, `/devices`,
//!   `/devices/map`
//! - `GET /api/v1/jobs/{job}/transfers`, `/transfers/tasks`: transfer reports of workers
//! - `GET /api/v1/jobs/{job}/keys`, `GET PUT DELETE …/keys/{key}`: the store of the present run
//! - `GET /api/v1/jobs/{job}/findings`, `GET /api/v1/findings`: findings
//! - `GET /metrics`: metrics in the text format of Prometheus
//!
//! Every change has a reason and a line in the audit, except the claims of task ids by processes. Errors are problem
//! details of RFC 9457 (`application/problem+json`).

#![allow(unused_qualifications, reason = "what describes the handlers is written out by a macro")]

mod about;
mod access;
mod actor;
mod allowed_hosts;
pub mod api;
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
mod route_table;
mod routes;
mod runs;
mod slots;
mod task_owners;
mod transfers;
mod write_timeout;

#[cfg(any(test, feature = "fuzzing"))]
pub(crate) use access::check_token_file_round_trip;

use std::sync::Arc;

pub use access::{
    AccessControl, AuthMethod, NewToken, Principal, RequiredAccess, TokenError, TokenFile, append_token,
};
pub use actor::{PeerAddress, TransportSecurity};
pub use allowed_hosts::AllowedHosts;
pub use body::BodyBudget;
pub use client_network::ClientNetwork;
pub use events::EventStreamLimiter;
pub use health::ServerReadiness;
pub use listener::{HttpLimits, serve};
pub use listener_state::ListenerState;
pub use pages::LiveHubs;
pub use redaction::RedactionPatterns;
pub use route_table::RouteTable;
pub use routes::{health_router, metrics_router, route_table, router};
pub use slots::descriptors_needed;

use crate::coordination::JobReader;
use crate::engine::Engine;
use crate::service::findings::{FindingMetrics, FindingStore};
use crate::service::reports::ReportStore;
use crate::service::{AuditLog, AuditedOperations, Timelines};
use crate::telemetry::metrics::{MetricSource, Metrics};
use crate::tls::HandshakeFailures;
use api::{Problem, ServerInfo};

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
    pub operations: Arc<AuditedOperations>,
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
        let operations = AuditedOperations { engine: Arc::clone(&engine), audit, traces: None };
        Self {
            operations: Arc::new(operations),
            handshakes: Arc::new(HandshakeFailures::new(*engine.clock())),
            guard: Arc::new(AccessControl::without_tokens(*engine.clock())),
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
