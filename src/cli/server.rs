//! Assembles the server of this process from the driver, the gRPC port, the HTTP port, telemetry, findings and audit.
//!
//! The server stops its parts in a fixed order. The HTTP port stops after the gRPC port, so clients can see the state
//! until then. Begin at `RunningServer::start`, then `stop`.

use std::collections::HashMap;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context as _, Result};
use tokio::net::TcpListener;
use tokio::sync::watch;
use tokio::task::JoinSet;

use super::connection_limits::{self, ConnectionLimits};
use super::keeper::{CoreStart, KeeperLink, KeeperMetrics};
use super::listeners::{ENDING_PROCESS_WAIT, ListenAddress, ListenerSource};
use super::server_histories::ServiceHistories;
use super::server_journal::{ServerJournal, declare_configured_jobs};
use crate::clock::Clock;
use crate::config::{Config, JobConfig, TlsConfig};
use crate::coordination::JobName;
use crate::engine::{Engine, Observer};
use crate::grpc::{self, ContinuedConnections, ListenerJobRule};
use crate::http::api::{GrpcListenerInfo, ProductVersion, ServerInfo, machine_name};
use crate::http::{
    self, AccessControl, AppState, BodyMemoryBudget, EventStreamLimiter, HttpLimits, ListenerState,
    ServerReadiness, StackWaits, TokenFile,
};
use crate::meter;
use crate::service::collectives::CollectiveMetrics;
use crate::service::findings::{self, FindingMetrics, FindingStore, WorkerReports};
use crate::service::reports::{self, TransferReportMetrics};
use crate::service::stacks::StackMetrics;
use crate::service::{AuditLog, AuditedOperations, request_stacks_for_findings};
use crate::telemetry::event_log::log_events;
use crate::telemetry::log::LogMetrics;
use crate::telemetry::metrics::{EventCounters, MetricSource, MetricSources, Metrics};
use crate::telemetry::traces::{CollectorTls, OtlpProtocol, Traces};
use crate::tls::{HandshakeFailures, TransportPolicy};

/// The time that the last HTTP responses have if the stop timeout is spent.
const HTTP_STOP_TIMEOUT: Duration = Duration::from_millis(200);
/// The time that the last lines of the audit have.
const AUDIT_STOP_TIMEOUT: Duration = Duration::from_secs(1);
/// The time that the last traces have.
const TRACES_STOP_TIMEOUT: Duration = Duration::from_secs(3);
/// The time that the last snapshot of the journal has.
const JOURNAL_STOP_TIMEOUT: Duration = Duration::from_secs(10);
/// The time that the gRPC port has, beyond the stop timeout, to close unfinished connections.
const GRPC_CLOSE_TIMEOUT: Duration = Duration::from_secs(2);

/// The ALPN protocols of the gRPC port. JAX disconnects if the server selects none.
const HTTP2: &[&[u8]] = &[b"h2"];
/// The ALPN protocols of the HTTP port.
const HTTP1: &[&[u8]] = &[b"http/1.1"];

/// A server that is running.
pub struct RunningServer {
    engine: Arc<Engine>,
    about: Arc<ServerInfo>,
    readiness: Arc<ServerReadiness>,
    streams: Arc<EventStreamLimiter>,
    stack_waits: Arc<StackWaits>,
    audit: Arc<AuditLog>,
    guard: Arc<AccessControl>,
    config: Box<Config>,
    grpc: TokioTaskGroup,
    http: TokioTaskGroup,
    health: TokioTaskGroup,
    log: TokioTaskGroup,
    timers: JoinSet<()>,
    traces: Option<Arc<Traces>>,
    /// The facts from the keeper; `None`: there is no keeper.
    core_start: Option<CoreStart>,
}

/// Tokio tasks that stop on a signal.
struct TokioTaskGroup {
    stop: watch::Sender<bool>,
    tasks: JoinSet<()>,
}

impl TokioTaskGroup {
    fn new() -> Self {
        Self { stop: watch::Sender::new(false), tasks: JoinSet::new() }
    }

    /// Signals the tasks to stop and waits for them, for `within` at most.
    async fn stop(&mut self, within: Duration) -> bool {
        self.stop.send_replace(true);
        let all = async { while self.tasks.join_next().await.is_some() {} };
        tokio::time::timeout(within, all).await.is_ok()
    }
}

/// A bound gRPC listener and its job; `None` for the shared listener.
struct GrpcListener {
    listener: TcpListener,
    address: SocketAddr,
    job: Option<JobName>,
}

/// A bound HTTP listener and its state.
struct HttpListener {
    listener: TcpListener,
    address: SocketAddr,
    state: Arc<ListenerState>,
}

/// The bound listeners of a server.
struct BoundListeners {
    /// The shared listener comes first.
    grpc: Vec<GrpcListener>,
    http: HttpListener,
    metrics: Option<HttpListener>,
    health: Option<HttpListener>,
}

impl BoundListeners {
    /// Takes a socket for every address of `config`.
    fn open(
        config: &Config,
        clock: Clock,
        limits: &ConnectionLimits,
        mut sockets: ListenerSource,
    ) -> Result<Self> {
        let server = &config.server;
        let mut http = |at: &ListenAddress, name, limits| {
            let (listener, address) = sockets.listen(at)?;
            Ok::<_, anyhow::Error>(HttpListener {
                listener,
                address,
                state: ListenerState::new(name, clock, limits),
            })
        };
        let pages = HttpLimits {
            connections_per_source: server.http_connections_per_source,
            ..HttpLimits::new(limits.http)
        };
        let main = http(&ListenAddress::http(config), "http", pages)?;
        let mut auxiliary = |at: Option<ListenAddress>, name| {
            at.map(|at| http(&at, name, HttpLimits::new(limits.auxiliary))).transpose()
        };
        let metrics = auxiliary(ListenAddress::metrics(config), "metrics")?;
        let health = auxiliary(ListenAddress::health(config), "health")?;
        let (listener, address) = sockets.listen(&ListenAddress::grpc(config))?;
        let mut grpc = vec![GrpcListener { listener, address, job: None }];
        for job in &config.jobs {
            if let Some(at) = ListenAddress::grpc_of_job(job) {
                let (listener, address) = sockets.listen(&at)?;
                grpc.push(GrpcListener { listener, address, job: Some(job.name.clone()) });
            }
        }
        Ok(Self { grpc, http: main, metrics, health })
    }

    /// Returns the states of the HTTP listeners.
    fn http_listener_states(&self) -> impl Iterator<Item = Arc<ListenerState>> {
        let listeners = self.metrics.iter().chain(&self.health).chain([&self.http]);
        listeners.map(|listener| Arc::clone(&listener.state))
    }
}

/// The observers of the engine.
struct EngineObservers {
    counters: Arc<EventCounters>,
    histories: ServiceHistories,
    traces: Option<Arc<Traces>>,
}

impl EngineObservers {
    /// Starts the observers that `config` requests, before the engine has a job.
    fn start(config: &Config, engine: &Arc<Engine>, histories: ServiceHistories) -> Result<Self> {
        let counters = Arc::new(EventCounters::new(findings::finding_ids()));
        let traces = start_traces(config, engine)?;
        let saved = histories.as_persistent_observers();
        let mut observers: Vec<Arc<dyn Observer>> =
            saved.into_iter().map(|saved| saved as Arc<dyn Observer>).collect();
        if meter::ENABLED {
            observers.push(counters.clone());
        }
        observers.extend(traces.iter().map(|traces| Arc::clone(traces) as Arc<dyn Observer>));
        engine.set_observers(observers);
        Ok(Self { counters, histories, traces })
    }
}

impl RunningServer {
    /// Listens at every address of `config`, declares its jobs and serves them.
    pub async fn start(config: &Config) -> Result<Self> {
        Self::start_as_core(config, None).await
    }

    /// Does what [`Self::start`] does, in the core of a keeper.
    pub async fn start_as_core(config: &Config, mut keeper: Option<&mut KeeperLink>) -> Result<Self> {
        let (start, kept) = match &mut keeper {
            Some(keeper) => (Some(keeper.start.clone()), std::mem::take(&mut keeper.listeners)),
            None => (None, HashMap::new()),
        };
        let connection_keeper = keeper.as_ref().map(|keeper| keeper.connection_keeper());
        let continued = keeper.as_mut().and_then(|keeper| keeper.take_over_connections());
        let connections = connection_limits::compute_connection_limits(config)?;
        // The clock of the server begins after the last time in the journal, and the lines of the audit are in the journal too.
        let audit = Arc::new(open_audit_log(config, Clock::start())?);
        let histories = ServiceHistories::new(Arc::clone(&audit));
        let journal = {
            let known = continued.as_ref().map(ContinuedConnections::known_calls).unwrap_or_default();
            ServerJournal::open(config, &histories.as_persistent_observers(), start.as_ref(), known)?
        };
        if let (Some(keeper), Some(journal)) = (keeper, &journal) {
            keeper.report_set_aside(journal.set_aside());
        }
        let clock = ServerJournal::start_clock(journal.as_ref());
        config.check_access_control()?;
        let handshakes = Arc::new(HandshakeFailures::new(clock));
        let [grpc_tls, http_tls] = build_transport_policies(config, clock, &handshakes)?;
        let guard = Arc::new(build_access_control(config, clock)?);
        // The former process on this journal may still be ending, if it was killed.
        let wait = journal.as_ref().map_or(Duration::ZERO, |_| ENDING_PROCESS_WAIT);
        let bound = BoundListeners::open(config, clock, &connections, ListenerSource { kept, wait })?;
        let engine = Engine::new(clock);
        engine.set_job_limit(config.server.jobs_max);
        let observers = EngineObservers::start(config, &engine, histories)?;
        // Events of an earlier process were logged by that process.
        let logged = journal.as_ref().map_or(0, ServerJournal::last_event);
        if let Some(journal) = journal {
            let after = start.as_ref().and_then(|start| start.previous_end.clone());
            journal.resume(&engine, observers.histories.as_persistent_observers(), after)?;
        }
        audit.record_lines_in_journal(&engine);
        declare_configured_jobs(&engine, &config.jobs)?;
        let mut server = Self {
            about: Arc::new(build_server_info(&bound, &config.jobs)),
            readiness: Arc::default(),
            streams: Arc::new(EventStreamLimiter::new(config.server.http_streams)),
            stack_waits: Arc::new(StackWaits::new(connections.http)),
            audit,
            guard,
            config: Box::new(config.clone()),
            grpc: TokioTaskGroup::new(),
            http: TokioTaskGroup::new(),
            health: TokioTaskGroup::new(),
            log: TokioTaskGroup::new(),
            timers: JoinSet::new(),
            traces: observers.traces.clone(),
            core_start: start,
            engine,
        };
        server.timers.spawn(Arc::clone(&server.engine).run_timers());
        let log_stop = server.log.stop.subscribe();
        server.log.tasks.spawn(log_events(Arc::clone(&server.engine), logged, log_stop));
        let transfers = Arc::clone(&observers.histories.transfers);
        let edge = server.build_grpc_server(grpc_tls, connections.grpc).with_report_store(transfers);
        if let (Some(continued), Some(keeper)) = (&continued, connection_keeper) {
            edge.keep_connections(Arc::clone(continued.memory()), keeper);
        }
        let site = server.build_http_state(&edge, observers, handshakes, bound.http_listener_states());
        let BoundListeners { grpc, http, metrics, health } = bound;
        server.serve_http(site, Arc::new(http_tls), http, metrics, health);
        server.serve_grpc(&edge, grpc, continued)?;
        // Once the connections go on: the first snapshot waits for them.
        server.timers.spawn(Arc::clone(&server.engine).maintain_journal_periodically());
        warn_of_exposed_addresses(config);
        server.readiness.mark_ready();
        Ok(server)
    }

    /// Reads the files that `config` names: certificates and tokens.
    pub fn check_certificates_and_tokens(config: &Config) -> Result<()> {
        let clock = Clock::start();
        build_transport_policies(config, clock, &Arc::new(HandshakeFailures::new(clock)))?;
        build_access_control(config, clock)?;
        Ok(())
    }

    /// Builds the server of the gRPC port.
    fn build_grpc_server(&self, tls: TransportPolicy, connections: usize) -> Arc<grpc::GrpcServer> {
        let limits = grpc::GrpcLimits {
            drain: self.config.server.stop_timeout,
            connections,
            ..self.config.server.grpc_limits.clone()
        };
        grpc::GrpcServer::with_transport_policy(tls, Arc::clone(&self.engine), limits, self.traces.clone())
    }

    /// Builds the state of the HTTP port, and starts the tasks that measure.
    fn build_http_state(
        &mut self,
        edge: &Arc<grpc::GrpcServer>,
        observers: EngineObservers,
        handshakes: Arc<HandshakeFailures>,
        listeners: impl Iterator<Item = Arc<ListenerState>>,
    ) -> AppState {
        let EngineObservers { counters: tally, histories, .. } = observers;
        let ServiceHistories { timelines, barriers, states, activity, .. } = histories;
        let (config, audit) = (&self.config, Arc::clone(&self.audit));
        let mut others: Vec<Arc<dyn MetricSource>> =
            vec![self.readiness.clone(), self.streams.clone(), audit.clone(), Arc::new(LogMetrics)];
        let bodies = Arc::new(BodyMemoryBudget::new(config.server.http_bodies_bytes));
        others.push(Arc::clone(&bodies) as Arc<dyn MetricSource>);
        others.extend(listeners.map(|listener| listener as Arc<dyn MetricSource>));
        others.extend(self.traces.iter().map(|traces| Arc::clone(traces) as Arc<dyn MetricSource>));
        let findings = Arc::<FindingStore>::default();
        let reports = Arc::clone(edge.report_store());
        let collectives = Arc::clone(edge.collective_reports());
        collectives.set_stuck_after(config.server.collective_stuck_after);
        let worker_reports = WorkerReports { transfers: Arc::clone(&reports), collectives };
        let tasks_max = config.server.task_metrics_max;
        others.push(Arc::clone(edge) as Arc<dyn MetricSource>);
        others.push(Arc::new(FindingMetrics {
            engine: Arc::clone(&self.engine),
            reports: worker_reports.clone(),
            findings: Arc::clone(&findings),
        }));
        let stacks = Arc::clone(edge.stack_collector());
        others.push(Arc::new(StackMetrics(Arc::clone(&stacks))));
        others.push(CollectiveMetrics::source(&worker_reports.collectives, &self.engine));
        others.push(Arc::new(KeeperMetrics(self.core_start.clone())));
        others.push(Arc::clone(&self.stack_waits) as Arc<dyn MetricSource>);
        others.push(Arc::new(TransferReportMetrics {
            engine: Arc::clone(&self.engine),
            reports: Arc::clone(&reports),
            tasks_max,
        }));
        self.timers.spawn(Metrics::sample_timer_lag(Arc::clone(&self.engine), Arc::clone(&tally)));
        let sources = MetricSources {
            engine: Arc::clone(&self.engine),
            tally,
            handshakes: Arc::clone(&handshakes),
            others,
        };
        let metrics = Metrics::new(sources, tasks_max);
        let operations =
            AuditedOperations { engine: Arc::clone(&self.engine), audit, traces: self.traces.clone() };
        let operations = Arc::new(operations);
        let (engine, readiness) = (Arc::clone(&self.engine), Arc::clone(&self.readiness));
        let site = AppState {
            operations: Arc::clone(&operations),
            handshakes,
            streams: Arc::clone(&self.streams),
            bodies,
            redaction: Arc::new(config.server.redact_keys.clone()),
            metrics: Arc::new(metrics),
            findings: Arc::clone(&findings),
            transfers: Arc::clone(&reports),
            guard: Arc::clone(&self.guard),
            timelines,
            barriers,
            states,
            activity: Arc::clone(&activity),
            stacks: Arc::clone(&stacks),
            collectives: Arc::clone(&worker_reports.collectives),
            stack_waits: Arc::clone(&self.stack_waits),
            ..AppState::new(engine, readiness, Arc::clone(&self.about))
        };
        self.timers
            .spawn(reports::clean_up_reports_periodically(Arc::clone(&self.engine), Arc::clone(&reports)));
        self.timers.spawn(activity.sample_periodically(Arc::clone(&self.engine)));
        self.timers.spawn(request_stacks_for_findings(Arc::clone(&operations), stacks));
        let engine = Arc::clone(&self.engine);
        self.timers.spawn(findings::run_detectors_periodically(
            engine,
            worker_reports,
            findings,
            move |remedy| operations.apply_automatic_exclusion(remedy),
        ));
        site
    }

    /// Serves HTTP: the pages, and metrics and health where they have listeners of their own.
    fn serve_http(
        &mut self,
        site: AppState,
        tls: Arc<TransportPolicy>,
        http: HttpListener,
        metrics: Option<HttpListener>,
        health: Option<HttpListener>,
    ) {
        if let Some(HttpListener { listener, address, state }) = metrics {
            tracing::info!(%address, "metrics have a listener of their own");
            let (router, stop) = (http::metrics_router(site.clone()), self.http.stop.subscribe());
            self.http.tasks.spawn(http::serve(listener, Arc::clone(&tls), router, state, stop));
        }
        if let Some(HttpListener { listener, address, state }) = health {
            tracing::info!(%address, "serving health on a separate listener");
            let plain = Arc::new(TransportPolicy::plaintext_only("http", Arc::clone(&site.handshakes)));
            let (router, stop) = (http::health_router(site.clone()), self.health.stop.subscribe());
            self.health.tasks.spawn(http::serve(listener, plain, router, state, stop));
        }
        let stop = self.http.stop.subscribe();
        self.http.tasks.spawn(http::serve(http.listener, tls, http::router(site), http.state, stop));
    }

    /// Serves gRPC: each dedicated listener its job, the shared one the job that the caller names. Each listener continues the
    /// connections that it accepted in a former process.
    fn serve_grpc(
        &mut self,
        edge: &Arc<grpc::GrpcServer>,
        listeners: Vec<GrpcListener>,
        mut continued: Option<ContinuedConnections>,
    ) -> Result<()> {
        let place = |name: &JobName| self.engine.read_under_lock(|core| core.job_named(name.as_str()));
        let mut shared = self.config.jobs.iter().filter(|job| job.grpc.is_none());
        let only = shared.next().filter(|_| shared.next().is_none()).map(|job| job.name.clone());
        for GrpcListener { listener, address, job } in listeners {
            let routing = match job {
                None => ListenerJobRule::ByAuthority(only.clone()),
                Some(name) => {
                    let job = place(&name).with_context(|| format!("the job {name} is not there"))?;
                    ListenerJobRule::Job(name, job)
                }
            };
            let own = continued.as_mut().map(|continued| continued.take_of_listener(address));
            let stop = self.grpc.stop.subscribe();
            self.grpc.tasks.spawn(Arc::clone(edge).serve(listener, routing, stop, own));
        }
        if let Some(others) = continued {
            edge.end_connections(others);
        }
        Ok(())
    }

    /// Returns the engine.
    pub fn engine(&self) -> &Arc<Engine> {
        &self.engine
    }

    /// Returns version and addresses of the server.
    pub fn server_info(&self) -> &ServerInfo {
        &self.about
    }

    /// Reloads files: opens the audit file again, reads the tokens, and checks the certificates, which the
    /// listeners reload by themselves.
    pub fn reload_files(&self) {
        self.audit.reopen_file();
        let (guard, config, clock) = (Arc::clone(&self.guard), self.config.clone(), *self.engine.clock());
        // Reading files may block.
        tokio::task::spawn_blocking(move || {
            guard.reload_tokens();
            match build_transport_policies(&config, clock, &Arc::new(HandshakeFailures::new(clock))) {
                Ok(_) => tracing::info!("files were read again"),
                Err(error) => {
                    let error = format!("{error:#}");
                    tracing::error!(error, "certificates cannot be used; the former ones stay in use");
                }
            }
        });
    }

    /// Stops gracefully: reports not ready, answers every waiting call, and lets connections finish. HTTP
    /// stops last, so that clients can see the state until then.
    pub async fn stop(mut self, within: Duration) {
        self.readiness.mark_stopping();
        self.streams.end_all_streams();
        self.stack_waits.end_all_waits();
        let began = self.engine.clock().now();
        self.engine.stop();
        if !self.grpc.stop(within + GRPC_CLOSE_TIMEOUT).await {
            tracing::warn!(?within, "some gRPC connections did not finish in time and are cut");
        }
        let left = within.saturating_sub(self.engine.clock().now().since(began));
        self.http.stop(left.max(HTTP_STOP_TIMEOUT)).await;
        // Health probes are answered until the end.
        self.health.stop(HTTP_STOP_TIMEOUT).await;
        self.audit.flush_all_pending_refusals(*self.engine.clock());
        self.audit.wait_for_last_lines(AUDIT_STOP_TIMEOUT).await;
        self.log.stop(HTTP_STOP_TIMEOUT).await;
        // It writes a snapshot to the disk, and so blocks.
        let engine = Arc::clone(&self.engine);
        let closed = tokio::task::spawn_blocking(move || engine.close_journal());
        if tokio::time::timeout(JOURNAL_STOP_TIMEOUT, closed).await.is_err() {
            tracing::warn!(within = ?JOURNAL_STOP_TIMEOUT, "the last snapshot was not written in time; the next start replays");
        }
        if let Some(traces) = self.traces.take() {
            // It blocks, and the collector may be slow.
            let stopped = tokio::task::spawn_blocking(move || traces.stop());
            if tokio::time::timeout(TRACES_STOP_TIMEOUT, stopped).await.is_err() {
                tracing::warn!(within = ?TRACES_STOP_TIMEOUT, "the last traces were not sent in time");
            }
        }
    }
}

/// Starts traces if the settings, or else the standard variables of OpenTelemetry, name an endpoint.
fn start_traces(config: &Config, engine: &Arc<Engine>) -> Result<Option<Arc<Traces>>> {
    let server = &config.server;
    let variable = |name: &str| std::env::var(name).ok().filter(|value| !value.is_empty());
    let (endpoint, protocol) = match &server.otlp_endpoint {
        Some(endpoint) => (endpoint.clone(), server.otlp_protocol),
        None => {
            let Some(endpoint) = variable("OTEL_EXPORTER_OTLP_ENDPOINT") else { return Ok(None) };
            let protocol = variable("OTEL_EXPORTER_OTLP_PROTOCOL");
            let protocol = protocol.map(|text| OtlpProtocol::parse(&text)).transpose();
            let protocol = protocol.map_err(anyhow::Error::msg).context("OTEL_EXPORTER_OTLP_PROTOCOL")?;
            (endpoint, protocol.unwrap_or(server.otlp_protocol))
        }
    };
    // The variables for traces take precedence, as OpenTelemetry specifies.
    let file = |name: &str| {
        let own = variable(&format!("OTEL_EXPORTER_OTLP_TRACES_{name}"));
        own.or_else(|| variable(&format!("OTEL_EXPORTER_OTLP_{name}"))).map(PathBuf::from)
    };
    let trust =
        CollectorTls { ca: file("CERTIFICATE"), own: file("CLIENT_CERTIFICATE").zip(file("CLIENT_KEY")) };
    let started = Traces::start(engine, &endpoint, protocol, &trust).map_err(anyhow::Error::msg);
    let traces = started.with_context(|| format!("traces cannot be sent to {endpoint}"))?;
    tracing::info!(endpoint, %protocol, "traces are sent");
    Ok(Some(traces))
}

/// Describes the server by its version and its addresses.
fn build_server_info(bound: &BoundListeners, jobs: &[JobConfig]) -> ServerInfo {
    let grpc = bound.grpc.iter().map(|listener| GrpcListenerInfo {
        address: listener.address,
        jobs: match &listener.job {
            Some(job) => vec![job.clone()],
            None => jobs.iter().filter(|job| job.grpc.is_none()).map(|job| job.name.clone()).collect(),
        },
    });
    ServerInfo { version: ProductVersion::current(), http: bound.http.address, grpc: grpc.collect() }
}

/// Builds the TLS of the gRPC listeners and of the HTTP listener.
fn build_transport_policies(
    config: &Config,
    clock: Clock,
    handshakes: &Arc<HandshakeFailures>,
) -> Result<[TransportPolicy; 2]> {
    let enter = |edge, tls: &TlsConfig, protocols| {
        let kept = (clock, Arc::clone(handshakes));
        let entrance = TransportPolicy::new(edge, tls.mode, tls.checked_tls_files(edge)?, protocols, kept);
        entrance.with_context(|| format!("no TLS for {edge}: see --{edge}-tls-cert, and `muster tls check`"))
    };
    let server = &config.server;
    Ok([enter("grpc", &server.grpc_tls, HTTP2)?, enter("http", &server.http_tls, HTTP1)?])
}

/// Opens the audit.
fn open_audit_log(config: &Config, clock: Clock) -> Result<AuditLog> {
    let server = &config.server;
    let audit = AuditLog::new(server.audit_lines).with_failure_policy(server.audit_failure);
    let Some(path) = &server.audit_file else { return Ok(audit) };
    audit.with_file(path, clock).with_context(|| {
        format!("cannot append to the audit file {}: name another with --audit-file", path.display())
    })
}

/// Builds the access control of the HTTP port.
fn build_access_control(config: &Config, clock: Clock) -> Result<AccessControl> {
    let server = &config.server;
    let tokens = server.tokens_file.as_ref().map(|path| TokenFile::load(path, clock)).transpose()?;
    if tokens.is_some() && server.http_tls.cert.is_none() && !server.http.ip().is_loopback() {
        tracing::warn!("tokens come in by plaintext HTTP, where others may read them: see --http-tls-cert");
    }
    // Clients that use the name of this machine should be able to reach it.
    let hosts = server.http_hosts.clone().with_name(&machine_name());
    let guard =
        AccessControl::without_tokens(clock).with_tokens(tokens, server.session_timeout).with_hosts(hosts);
    Ok(guard.with_change_rate_limit(server.http_changes_per_second))
}

/// Logs a warning for each address that is open without access control by request.
fn warn_of_exposed_addresses(config: &Config) {
    for (flag, told) in
        [("--insecure", config.server.insecure), ("--insecure-grpc", config.server.insecure_grpc)]
    {
        if told {
            tracing::warn!(
                "{flag}: anybody who can reach the address can use it; keep it inside a trusted network"
            );
        }
    }
}
