//! The HTTP port: serves pages, the REST API, health checks and metrics. The port presents the state of the jobs.
//! Its own state is about its clients: connections, sessions, rate limits and live pages.
//!
//! This module contains no rule of coordination. Handlers read copies of the state, and pass commands to
//! [`AuditedOperations`](crate::service::AuditedOperations), which writes the audit. Begin at [`AppState`], which
//! handlers share, then `routes.rs`. A request passes `listener.rs`, `connection_slots.rs` and
//! `access/middleware.rs`.
//!
//! - `GET /` and the addresses below it: the pages (`pages/`)
//! - `GET /healthz/live`: 200 if the process answers
//! - `GET /healthz/ready`: 200 while the process serves; 503 with the reason while it starts or stops
//! - `GET /version`: name and version
//! - `GET POST /login`, `POST /logout`: exchanges a token for a session cookie, and ends the session
//! - `GET /api/v1/server`: version and addresses, with the jobs that each gRPC address serves
//! - `GET /api/v1/handshakes`: failed TLS handshakes, with the reasons
//! - `GET /api/v1/journal`: what survives the process, and the state of the journal
//! - `GET /api/v1/openapi.json`: the description of everything under `/api/v1`
//! - `GET /api/v1/audit`: changes, done and refused, with actor, reason and address
//! - `GET POST /api/v1/jobs`, `GET PATCH DELETE /api/v1/jobs/{job}`: jobs, as summaries and in full
//! - `GET /api/v1/jobs/{job}/events`: the events, as pages or as a stream
//! - `GET POST /api/v1/jobs/{job}/exclusions`, `GET DELETE …/exclusions/{id}`: exclusions
//! - `GET /api/v1/jobs/{job}/hosts`, `GET …/hosts/{host}`: the hosts of the present run
//! - `GET POST DELETE /api/v1/jobs/{job}/task-owners`, `DELETE …/task-owners/{task}`: the process that owns each
//!   task id
//! - `GET POST /api/v1/jobs/{job}/drain`: a coordinated save
//! - `GET /api/v1/jobs/{job}/runs`, `/tasks`, `/tasks/{task}`, `/barriers`, `/live`, `/devices`,
//!   `/devices/map`
//! - `GET /api/v1/jobs/{job}/barriers/arrivals`: every arrival at the latest barriers
//! - `GET /api/v1/jobs/{job}/transfers`, `/transfers/tasks`: transfer reports of workers
//! - `GET /api/v1/jobs/{job}/collectives`, `GET …/collectives/{clique}`: the cliques of NCCL, and which tasks hold them up
//! - `GET POST /api/v1/jobs/{job}/stacks`: the stacks of the tasks; `GET …/stacks/requests`, `POST …/stacks/answers`: for the
//!   helpers in programs, which `GET /helper.py` serves
//! - `GET /api/v1/jobs/{job}/keys`, `GET PUT DELETE …/keys/{key}`: the store of the present run
//! - `GET /api/v1/jobs/{job}/activity`: what the job did over the last ten minutes
//! - `GET /api/v1/jobs/{job}/findings`, `GET /api/v1/findings`: findings
//! - `GET /metrics`: metrics in the text format of Prometheus
//!
//! Every change of a job has a reason and a line in the audit, except the claims of task ids by processes. Errors are
//! problem details of RFC 9457 (`application/problem+json`).

#![allow(unused_qualifications, reason = "what describes the handlers is written out by a macro")]

mod access;
mod activity;
mod allowed_hosts;
pub mod api;
mod app_state;
mod audit;
mod barrier_arrivals;
mod body;
mod client_network;
mod collectives;
mod connection_slots;
mod csv;
mod drain;
mod etag;
mod event_stream_limiter;
mod events;
mod exclusions;
mod extractors;
mod findings;
mod headers;
mod health;
mod hosts;
mod http_limits;
mod jobs;
mod journal;
mod keys;
mod listener;
mod listener_state;
mod metrics;
mod openapi;
mod page_times;
mod pages;
mod pagination;
mod problem;
mod problem_rendering;
mod readiness;
mod redaction;
mod request_client;
mod route_access_table;
mod route_builder;
mod routes;
mod runs;
mod server_info;
mod stack_helper;
mod stack_waits;
mod stacks;
mod tables;
mod task_owners;
mod task_states;
mod transfers;
mod write_timeout;

#[cfg(any(test, feature = "fuzzing"))]
pub(crate) use access::check_token_file_round_trip;

pub use access::{
    AccessControl, AuthMethod, NewToken, Principal, RequiredAccess, TokenError, TokenFile,
    append_token_to_file,
};
pub use allowed_hosts::AllowedHosts;
pub(crate) use api::Problem;
pub use app_state::AppState;
pub use body::BodyMemoryBudget;
pub use client_network::ClientNetwork;
pub use connection_slots::descriptors_needed;
pub use event_stream_limiter::EventStreamLimiter;
pub use http_limits::HttpLimits;
pub use listener::serve;
pub use listener_state::ListenerState;
pub use readiness::ServerReadiness;
pub use redaction::RedactionPatterns;
pub use request_client::{PeerAddress, TransportSecurity};
pub use route_access_table::RouteAccessTable;
pub use routes::{health_router, metrics_router, route_access_table, router};
pub use stack_waits::StackWaits;
