//! The web edge: it shows what the state machine says, and holds nothing of its own.
//!
//! - `GET /` and what it leads to: the pages (`pages/`), for people
//! - `GET /healthz/live`: the process answers
//! - `GET /healthz/ready`: it serves; 503 with the reason while it starts and while it stops
//! - `GET /version`: name and version
//! - `GET POST /login`, `POST /logout`: a token for a cookie, and back
//! - `GET /api/v1/server`: version and addresses, with the jobs that each gRPC address serves
//! - `GET /api/v1/handshakes`: which clients could not connect by TLS, and why
//! - `GET /api/v1/openapi.json`: the description of all that stands under `/api/v1`
//! - `GET /api/v1/audit`: who did what, why, from where, and what came of it
//! - `GET POST /api/v1/jobs`, `GET PATCH DELETE /api/v1/jobs/{job}`: jobs, in short and whole
//! - `GET /api/v1/jobs/{job}/events`: what happened, as pages or as a stream
//! - `GET POST /api/v1/jobs/{job}/exclusions`, `GET DELETE …/exclusions/{id}`: who takes no part
//! - `GET POST /api/v1/jobs/{job}/drain`: a coordinated save
//! - `GET /api/v1/jobs/{job}/runs`, `/tasks`, `/tasks/{task}`, `/barriers`, `/live`, `/devices`, `/devices/map`
//! - `GET /api/v1/jobs/{job}/transfers`, `/transfers/tasks`: what workers report of the bytes that they move
//! - `GET /api/v1/jobs/{job}/keys`, `GET PUT DELETE …/keys/{key}`: the store of the present run
//! - `GET /api/v1/jobs/{job}/findings`, `GET /api/v1/findings`: what is found in what is measured
//! - `GET /metrics`: metrics in the text format of Prometheus
//!
//! Whoever changes anything gives a reason, and it stands in the audit. Errors are RFC 9457 problem details (`application/problem+json`).

#![allow(unused_qualifications, reason = "what describes the handlers is written out by a macro")]

mod about;
mod actor;
mod audit;
mod body;
mod connections;
mod drain;
mod etag;
mod events;
mod exclusions;
mod extract;
mod findings;
#[cfg(any(test, feature = "fuzzing"))]
pub(crate) use guard::fuzz_tokens;

mod guard;
mod headers;
mod health;
mod hosts;
mod jobs;
mod keys;
mod listen;
mod metrics;
mod openapi;
mod page;
mod pages;
mod problem;
mod redaction;
mod routes;
mod runs;
mod source;
mod traffic;
mod transfers;
mod write_timeout;

use std::sync::Arc;

pub use about::{About, Listener, Version};
pub use actor::{Acting, Author, Channel, Peer};
pub use audit::{Audit, AuditLine, AuditOutcome, AuditPage, OnAuditFailure};
pub use body::BodyBudget;
pub use connections::descriptors;
pub use drain::{DrainView, NewDrain};
pub use events::{EventLine, EventsPage, Streams};
pub use exclusions::{ExclusionsPage, NewExclusion};
pub use findings::{FindingsPage, JobFindings};
pub use guard::{Guard, How, Need, NewToken, Role, TokenError, Tokens, Visitor, append};
pub use health::Readiness;
pub use hosts::Hosts;
pub use jobs::{JobPatch, JobsPage, NewJob, SettingsBody};
pub use keys::{KeyInfo, KeyView, KeysPage, NewValue};
pub use listen::{Limits, serve};
pub use pages::{Live, Timelines};
pub use problem::{NO_SUCH_JOB, Problem};
pub use redaction::Redaction;
pub use routes::{NEEDS, health_router, metrics_router, router};
pub use runs::{BarriersPage, DevicesPage, EndedBarrier, RunsPage, TasksPage};
pub use source::Source;
pub use traffic::Traffic;
pub use transfers::{TaskTransfersPage, TransfersPage};

use crate::coordination::{Act, Actor, Done, JobLook, Means, Reason, Target};
use crate::engine::Engine;
use crate::findings::{Board, Remedy};
use crate::reports;
use crate::telemetry::metrics::{Metrics, Shows};
use crate::telemetry::traces::Traces;
use crate::text::is_safe_to_show;
use crate::tls::Failures;

/// How long a request's body may be, in bytes.
const BODY_BYTES_MAX: usize = 256 << 10;

/// What the handlers look at.
#[derive(Clone)]
pub struct Site {
    /// The state.
    pub engine: Arc<Engine>,
    /// Whether the server is ready.
    pub readiness: Arc<Readiness>,
    /// What the server says of itself.
    pub about: Arc<About>,
    /// Who did what.
    pub audit: Arc<Audit>,
    /// The streams that are open.
    pub streams: Arc<Streams>,
    /// The memory for bodies of requests.
    pub bodies: Arc<BodyBudget>,
    /// Which values are not shown.
    pub redaction: Arc<Redaction>,
    /// The handshakes that failed.
    pub handshakes: Arc<Failures>,
    /// Who may do what.
    pub guard: Arc<Guard>,
    /// What is measured.
    pub metrics: Arc<Metrics>,
    /// What was found in it.
    pub findings: Arc<Board>,
    /// What workers report of their transfers.
    pub transfers: Arc<reports::Board>,
    /// What has happened in each job.
    pub timelines: Arc<Timelines>,
    /// The pages that follow what changes.
    pub live: Arc<Live>,
    /// Where traces go, if somebody wants them.
    pub traces: Option<Arc<Traces>>,
}

impl Site {
    /// A site that keeps its audit in memory, hides nothing, and measures what can be seen of the engine.
    #[must_use]
    pub fn new(engine: Arc<Engine>, readiness: Arc<Readiness>, about: Arc<About>) -> Self {
        let (audit, streams) = (Arc::<Audit>::default(), Arc::<Streams>::default());
        let bodies = Arc::<BodyBudget>::default();
        let own: Vec<Arc<dyn Shows>> =
            vec![readiness.clone(), audit.clone(), streams.clone(), bodies.clone()];
        let metrics = Arc::new(Metrics::of_engine(&engine, own));
        Self {
            handshakes: Arc::new(Failures::new(*engine.clock())),
            guard: Arc::new(Guard::open(*engine.clock())),
            engine,
            readiness,
            about,
            metrics,
            findings: Arc::default(),
            transfers: Arc::default(),
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
    fn look<T>(&self, job: &extract::Job, look: impl FnOnce(JobLook<'_>) -> T) -> Result<T, Problem> {
        let seen = self.engine.look(|core, _| core.job(job.id).map(look));
        seen.ok_or_else(|| Problem::no_such_job(job.name.as_str(), Vec::new()))
    }

    /// Does what a rule of a job asks for, and writes down what came of it.
    pub fn apply(&self, remedy: Remedy) {
        let Remedy { job, name, rule, task, expires_in, reason } = remedy;
        let actor = Actor { who: rule.name().into(), address: None, means: Means::Rule };
        let Ok(reason) = Reason::try_from(shortened(&reason)) else { return };
        let act = Act::Exclude { target: Target::Task(task), expires_in: Some(expires_in), end_run: false };
        // A refusal is in the audit.
        let job = extract::Job { id: job, name };
        let rule = Author::new(actor, None, None);
        let _ = self.act(&job, &rule, reason, "exclude", format!("task {task}"), act);
    }

    /// Acts upon a job, and writes down what came of it.
    fn act(
        &self,
        job: &extract::Job,
        by: &Author,
        reason: Reason,
        verb: &'static str,
        subject: String,
        act: Act,
    ) -> Result<Done, Problem> {
        let done = self.engine.act(job.id, by.actor.clone(), reason.clone(), act);
        if let (Some(traces), Some(parent), Ok(Done::Excluded(id))) = (&self.traces, &by.parent, &done) {
            traces.exclusion_is_part_of(job.id, *id, parent.clone());
        }
        let (outcome, detail) = match &done {
            Ok(Done::Excluded(id)) => (AuditOutcome::Done, format!("exclusion {id}")),
            Ok(_) => (AuditOutcome::Done, String::new()),
            Err(refusal) => (AuditOutcome::Refused, refusal.to_string()),
        };
        let deed = by.deed(Some(job.name.clone()), verb, subject, Some(reason));
        self.audit.record(self.engine.clock().now(), deed, outcome, detail);
        Ok(done?)
    }
}

/// What was found, as the reason of an act: one line of limited length.
fn shortened(text: &str) -> String {
    let safe = |letter: char| is_safe_to_show(letter.encode_utf8(&mut [0; 4]));
    let line: String = text.chars().map(|letter| if safe(letter) { letter } else { '?' }).collect();
    line.get(..line.floor_char_boundary(Reason::BYTES_MAX)).unwrap_or_default().to_owned()
}
