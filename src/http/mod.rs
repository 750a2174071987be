//! The HTTP port: pages, REST, probes, metrics. It shows what the state machine says; what it holds is its own
//! affair (sessions, audit, limits, live pages).
//!
//! It contains no rule of coordination: handlers read copies of the state and send commands to the engine. Begin at
//! [`AppState`], which handlers share, then `routes.rs`. Every request passes `listener.rs`, `slots.rs` and
//! `guard/pass.rs`.
//!
//! - `GET /` and what it leads to: the pages (`pages/`)
//! - `GET /healthz/live`: the process answers
//! - `GET /healthz/ready`: it serves; 503 with the reason while it starts and while it stops
//! - `GET /version`: name and version
//! - `GET POST /login`, `POST /logout`: a token for a cookie, and back
//! - `GET /api/v1/server`: version and addresses, with the jobs that each gRPC address serves
//! - `GET /api/v1/handshakes`: which clients could not connect by TLS, and why
//! - `GET /api/v1/openapi.json`: the description of everything under `/api/v1`
//! - `GET /api/v1/audit`: changes, done and refused, with actor, reason and address
//! - `GET POST /api/v1/jobs`, `GET PATCH DELETE /api/v1/jobs/{job}`: jobs, in short and whole
//! - `GET /api/v1/jobs/{job}/events`: the events, as pages or as a stream
//! - `GET POST /api/v1/jobs/{job}/exclusions`, `GET DELETE …/exclusions/{id}`: exclusions
//! - `GET POST /api/v1/jobs/{job}/drain`: a coordinated save
//! - `GET /api/v1/jobs/{job}/runs`, `/tasks`, `/tasks/{task}`, `/barriers`, `/live`, `/devices`, `/devices/map`
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

use std::sync::Arc;

pub use about::{GrpcListenerInfo, ServerInfo, Version};
pub use access::{
    Access, AccessControl, AuthMethod, NewToken, Principal, Role, TokenError, TokenFile, append_token,
};
pub use actor::{ActorContext, PeerAddress, RequestActor, TransportSecurity};
pub use audit::{AuditFailurePolicy, AuditLine, AuditLog, AuditOutcome, AuditPage};
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

use crate::coordination::{
    Actor, ActorOrigin, CommandOutcome, ExclusionTarget, JobReader, OperatorCommand, Reason,
};
use crate::engine::Engine;
use crate::findings::{FindingMetrics, FindingStore, Remedy};
use crate::reports::ReportStore;
use crate::telemetry::metrics::{MetricSource, Metrics};
use crate::telemetry::traces::Traces;
use crate::text::is_safe_to_show;
use crate::tls::HandshakeFailures;

/// How long a request's body may be, in bytes.
const BODY_BYTES_MAX: usize = 256 << 10;

/// What the handlers look at.
#[derive(Clone)]
pub struct AppState {
    /// The state.
    pub engine: Arc<Engine>,
    /// Whether the server is ready.
    pub readiness: Arc<ServerReadiness>,
    /// What the server says of itself.
    pub about: Arc<ServerInfo>,
    /// Who did what.
    pub audit: Arc<AuditLog>,
    /// The streams that are open.
    pub streams: Arc<EventStreamLimiter>,
    /// The memory for bodies of requests.
    pub bodies: Arc<BodyBudget>,
    /// Which values are not shown.
    pub redaction: Arc<RedactionPatterns>,
    /// The handshakes that failed.
    pub handshakes: Arc<HandshakeFailures>,
    /// Who may do what.
    pub guard: Arc<AccessControl>,
    /// What is measured.
    pub metrics: Arc<Metrics>,
    /// What was found in it.
    pub findings: Arc<FindingStore>,
    /// What workers report of their transfers.
    pub transfers: Arc<ReportStore>,
    /// What has happened in each job.
    pub timelines: Arc<Timelines>,
    /// The pages that follow what changes.
    pub live: Arc<LiveHubs>,
    /// Where traces go, if somebody wants them.
    pub traces: Option<Arc<Traces>>,
}

impl AppState {
    /// A site that keeps its audit in memory, hides nothing, and measures what can be seen of the engine.
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
        Self {
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
            audit,
            streams,
            bodies,
            traces: None,
            redaction: Arc::default(),
        }
    }

    /// Looks at a part of a job.
    fn read_job<T>(
        &self,
        job: &extract::JobPath,
        look: impl FnOnce(JobReader<'_>) -> T,
    ) -> Result<T, Problem> {
        let seen = self.engine.read(|core, _| core.job(job.id).map(look));
        seen.ok_or_else(|| Problem::no_such_job(job.name.as_str(), Vec::new()))
    }

    /// Does what a rule of a job asks for, and writes down what came of it.
    pub fn apply_remedy(&self, remedy: Remedy) {
        let Remedy { job, name, rule, task, expires_in, reason } = remedy;
        let actor = Actor { who: rule.name().into(), address: None, means: ActorOrigin::Rule };
        let Ok(reason) = Reason::try_from(reason_from_text(&reason)) else { return };
        let act = OperatorCommand::Exclude {
            target: ExclusionTarget::Task(task),
            expires_in: Some(expires_in),
            end_run: false,
        };
        // A refusal is in the audit.
        let job = extract::JobPath { id: job, name };
        let rule = ActorContext::new(actor, None, None);
        let _ = self.act(&job, &rule, reason, "exclude", format!("task {task}"), act);
    }

    /// Acts upon a job, and writes down what came of it.
    fn act(
        &self,
        job: &extract::JobPath,
        by: &ActorContext,
        reason: Reason,
        verb: &'static str,
        subject: String,
        act: OperatorCommand,
    ) -> Result<CommandOutcome, Problem> {
        let done = self.engine.act(job.id, by.actor.clone(), reason.clone(), act);
        if let (Some(traces), Some(parent), Ok(CommandOutcome::Excluded(id))) =
            (&self.traces, &by.parent, &done)
        {
            traces.link_exclusion(job.id, *id, parent.clone());
        }
        let (outcome, detail) = match &done {
            Ok(CommandOutcome::Excluded(id)) => (AuditOutcome::Done, format!("exclusion {id}")),
            Ok(_) => (AuditOutcome::Done, String::new()),
            Err(refusal) => (AuditOutcome::Refused, refusal.to_string()),
        };
        let deed = by.audit_entry(Some(job.name.clone()), verb, subject, Some(reason));
        self.audit.record(self.engine.clock().now(), deed, outcome, detail);
        Ok(done?)
    }
}

/// What was found, as the reason of an act: one line of limited length.
fn reason_from_text(text: &str) -> String {
    let safe = |letter: char| is_safe_to_show(letter.encode_utf8(&mut [0; 4]));
    let line: String = text.chars().map(|letter| if safe(letter) { letter } else { '?' }).collect();
    line.get(..line.floor_char_boundary(Reason::BYTES_MAX)).unwrap_or_default().to_owned()
}
