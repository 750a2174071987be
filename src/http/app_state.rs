//! The state that the handlers of the HTTP port share.
//!
//! `route_builder.rs` gives this state to the handlers. Begin at [`AppState`].

use std::sync::Arc;

use super::access::AccessControl;
use super::api::ServerInfo;
use super::body::BodyMemoryBudget;
use super::event_stream_limiter::EventStreamLimiter;
use super::readiness::ServerReadiness;
use super::redaction::RedactionPatterns;
use super::stack_waits::StackWaits;
use crate::engine::Engine;
use crate::service::collectives::{CollectiveMetrics, CollectiveReports};
use crate::service::findings::{FindingMetrics, FindingStore, WorkerReports};
use crate::service::reports::TransferReportStore;
use crate::service::stacks::{StackCollector, StackMetrics};
use crate::service::{ActivityHistory, AuditLog, AuditedOperations, BarrierHistory, StateHistory, Timelines};
use crate::telemetry::metrics::{MetricSource, Metrics};
use crate::tls::HandshakeFailures;

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
    pub bodies: Arc<BodyMemoryBudget>,
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
    pub transfers: Arc<TransferReportStore>,
    /// The timelines of the jobs.
    pub timelines: Arc<Timelines>,
    /// The latest ended barriers of the jobs.
    pub barriers: Arc<BarrierHistory>,
    /// The states of the tasks over time.
    pub states: Arc<StateHistory>,
    /// The recent activity of the jobs.
    pub activity: Arc<ActivityHistory>,
    /// The requests for stacks, and the answers to them.
    pub stacks: Arc<StackCollector>,
    /// The collectives of all jobs.
    pub collectives: Arc<CollectiveReports>,
    /// The requests of helpers that wait for them.
    pub stack_waits: Arc<StackWaits>,
}

impl AppState {
    /// Returns a state that keeps its audit in memory, redacts nothing, and measures the engine.
    #[must_use]
    pub fn new(engine: Arc<Engine>, readiness: Arc<ServerReadiness>, about: Arc<ServerInfo>) -> Self {
        let (audit, streams) = (Arc::<AuditLog>::default(), Arc::<EventStreamLimiter>::default());
        let bodies = Arc::<BodyMemoryBudget>::default();
        let (findings, transfers) = (Arc::<FindingStore>::default(), Arc::<TransferReportStore>::default());
        let collectives = Arc::<CollectiveReports>::default();
        let reports =
            WorkerReports { transfers: Arc::clone(&transfers), collectives: Arc::clone(&collectives) };
        let of_findings =
            FindingMetrics { engine: Arc::clone(&engine), reports, findings: Arc::clone(&findings) };
        let (stacks, stack_waits) = (Arc::<StackCollector>::default(), Arc::<StackWaits>::default());
        let of_stacks = StackMetrics(Arc::clone(&stacks));
        let of_collectives = CollectiveMetrics::source(&collectives, &engine);
        let own: Vec<Arc<dyn MetricSource>> = vec![
            readiness.clone(),
            audit.clone(),
            streams.clone(),
            bodies.clone(),
            Arc::new(of_findings),
            Arc::new(of_stacks),
            of_collectives,
            stack_waits.clone(),
        ];
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
            barriers: Arc::default(),
            states: Arc::default(),
            activity: Arc::default(),
            stacks,
            collectives,
            stack_waits,
            streams,
            bodies,
            redaction: Arc::default(),
        }
    }

    /// Returns what processes report about themselves.
    #[must_use]
    pub fn worker_reports(&self) -> WorkerReports {
        WorkerReports { transfers: Arc::clone(&self.transfers), collectives: Arc::clone(&self.collectives) }
    }
}
