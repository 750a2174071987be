//! Assembles a server of this process: engine, edges, telemetry, findings, audit; and stops them in order.
//!
//! Begin at `Server::start`, then `stop`.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context as _, Result};
use tokio::net::TcpListener;
use tokio::sync::watch;
use tokio::task::JoinSet;

use super::limits;
use crate::clock::Clock;
use crate::config::{Config, JobConfig, TlsConfig};
use crate::coordination::JobName;
use crate::engine::{Engine, Observer};
use crate::findings::{self, FindingMetrics, FindingStore};
use crate::grpc::{self, Routing};
use crate::http::{
    self, AccessControl, AppState, BodyBudget, EventStreamLimiter, GrpcListenerInfo, HttpLimits,
    ListenerState, ServerInfo, ServerReadiness, Timelines, TokenFile, Version,
};
use crate::meter;
use crate::reports::{self, ReportMetrics};
use crate::service::{AuditLog, Operations};
use crate::telemetry::event_log::log_events;
use crate::telemetry::log::LogStats;
use crate::telemetry::metrics::{EventCounters, MetricInputs, MetricSource, Metrics};
use crate::telemetry::traces::{CollectorTls, OtlpProtocol, Traces};
use crate::tls::{HandshakeFailures, ListenerTls};

/// The time that the last HTTP responses have if the stop timeout is spent.
const HTTP_STOP_TIMEOUT: Duration = Duration::from_millis(200);
/// The time that the last lines of the audit have.
const AUDIT_STOP_TIMEOUT: Duration = Duration::from_secs(1);
/// The time that the last traces have.
const TRACES_STOP_TIMEOUT: Duration = Duration::from_secs(3);
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
    audit: Arc<AuditLog>,
    guard: Arc<AccessControl>,
    config: Box<Config>,
    grpc: TaskGroup,
    http: TaskGroup,
    health: TaskGroup,
    log: TaskGroup,
    timers: JoinSet<()>,
    traces: Option<Arc<Traces>>,
}

/// Tokio tasks that stop on a signal.
struct TaskGroup {
    stop: watch::Sender<bool>,
    tasks: JoinSet<()>,
}

impl TaskGroup {
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
struct BoundListener {
    listener: TcpListener,
    address: SocketAddr,
    job: Option<JobName>,
}

impl RunningServer {
    /// Binds every address of `config`, declares its jobs and serves them.
    pub async fn start(config: &Config) -> Result<Self> {
        let clock = Clock::start();
        let connections = limits::connections(config)?;
        let audit = AuditLog::new(config.server.audit_lines).on_failure(config.server.audit_failure);
        let audit = match &config.server.audit_file {
            None => audit,
            Some(path) => audit.to_file(path, clock).with_context(|| {
                format!("cannot append to the audit file {}: name another with --audit-file", path.display())
            })?,
        };
        config.require_access_control()?;
        let handshakes = Arc::new(HandshakeFailures::new(clock));
        let [grpc_entrance, http_entrance] = tls_entrances(config, clock, &handshakes)?;
        let guard = guard(config, clock)?;
        let (web, web_address) = bind(config.server.http, "HTTP", "--http")?;
        let mut listeners = Vec::new();
        let (listener, address) = bind(config.server.grpc, "gRPC", "--grpc")?;
        listeners.push(BoundListener { listener, address, job: None });
        for job in &config.jobs {
            if let Some(address) = job.grpc {
                let (listener, address) = bind(address, "gRPC", &format!("--job {}=N@ADDR", job.name))?;
                listeners.push(BoundListener { listener, address, job: Some(job.name.clone()) });
            }
        }

        let metrics_listener =
            config.server.metrics.map(|address| bind(address, "metrics", "--metrics")).transpose()?;
        let health_listener =
            config.server.health.map(|address| bind(address, "health", "--health")).transpose()?;
        let engine = Engine::new(clock);
        engine.bound_jobs(config.server.jobs_max);
        let tally = Arc::new(EventCounters::new(findings::ids()));
        let traces = start_traces(config, &engine)?;
        let timelines = Arc::<Timelines>::default();
        let mut observers: Vec<Arc<dyn Observer>> = vec![timelines.clone()];
        if meter::ENABLED {
            observers.push(tally.clone());
        }
        observers.extend(traces.iter().map(|traces| Arc::clone(traces) as Arc<dyn Observer>));
        engine.observe_with(observers);
        for job in &config.jobs {
            engine.declare(job.name.clone(), job.settings.clone())?;
        }
        let about = Arc::new(describe(web_address, &listeners, &config.jobs));
        let mut server = Self {
            readiness: Arc::default(),
            streams: Arc::new(EventStreamLimiter::new(config.server.http_streams)),
            audit: Arc::default(),
            guard: Arc::new(guard),
            config: Box::new(config.clone()),
            grpc: TaskGroup::new(),
            http: TaskGroup::new(),
            health: TaskGroup::new(),
            log: TaskGroup::new(),
            timers: JoinSet::new(),
            traces,
            engine,
            about,
        };
        server.timers.spawn(Arc::clone(&server.engine).run_timers());
        server.log.tasks.spawn(log_events(Arc::clone(&server.engine), server.log.stop.subscribe()));
        let limits = grpc::GrpcLimits {
            drain: config.server.stop_timeout,
            connections: connections.grpc,
            ..config.server.grpc_limits.clone()
        };
        let engine = Arc::clone(&server.engine);
        let edge = grpc::Server::with_entrance(grpc_entrance, engine, limits, server.traces.clone());
        let limits = HttpLimits {
            connections_per_source: config.server.http_connections_per_source,
            ..HttpLimits::new(connections.http)
        };
        let traffic = ListenerState::new("http", clock, limits);
        let side = |name| ListenerState::new(name, clock, HttpLimits::new(connections.auxiliary));
        let metrics_traffic = metrics_listener.is_some().then(|| side("metrics"));
        let health_traffic = health_listener.is_some().then(|| side("health"));
        let listeners_seen: Vec<_> =
            metrics_traffic.iter().chain(&health_traffic).chain([&traffic]).cloned().collect();
        let site = server.site(&edge, tally, (Arc::new(audit), handshakes), (config, listeners_seen));
        let site = AppState { guard: Arc::clone(&server.guard), timelines, ..site };
        server.audit = Arc::clone(&site.operations.audit);
        let http_entrance = Arc::new(http_entrance);
        if let (Some((listener, address)), Some(traffic)) = (metrics_listener, metrics_traffic) {
            tracing::info!(%address, "metrics have a listener of their own");
            let router = http::metrics_router(site.clone());
            let (entrance, stop) = (Arc::clone(&http_entrance), server.http.stop.subscribe());
            server.http.tasks.spawn(http::serve(listener, entrance, router, traffic, stop));
        }
        if let (Some((listener, address)), Some(traffic)) = (health_listener, health_traffic) {
            tracing::info!(%address, "serving health on a separate listener");
            let entrance = Arc::new(ListenerTls::plain("http", Arc::clone(&site.handshakes)));
            let (router, stop) = (http::health_router(site.clone()), server.health.stop.subscribe());
            server.health.tasks.spawn(http::serve(listener, entrance, router, traffic, stop));
        }
        let stop = server.http.stop.subscribe();
        server.http.tasks.spawn(http::serve(web, http_entrance, http::router(site), traffic, stop));
        server.serve_grpc(&edge, listeners, config)?;
        warn_if_exposed(config);
        server.readiness.started();
        Ok(server)
    }

    /// Reads the files that `config` names: certificates and tokens.
    pub fn check_files(config: &Config) -> Result<()> {
        let clock = Clock::start();
        tls_entrances(config, clock, &Arc::new(HandshakeFailures::new(clock)))?;
        guard(config, clock)?;
        Ok(())
    }

    /// Builds the state of the HTTP port, and starts the tasks that measure.
    fn site(
        &mut self,
        edge: &Arc<grpc::Server>,
        tally: Arc<EventCounters>,
        (audit, handshakes): (Arc<AuditLog>, Arc<HandshakeFailures>),
        (config, listeners): (&Config, Vec<Arc<ListenerState>>),
    ) -> AppState {
        let mut others: Vec<Arc<dyn MetricSource>> =
            vec![self.readiness.clone(), self.streams.clone(), audit.clone(), Arc::new(LogStats)];
        let bodies = Arc::new(BodyBudget::new(config.server.http_bodies_bytes));
        others.push(Arc::clone(&bodies) as Arc<dyn MetricSource>);
        others.extend(listeners.into_iter().map(|listener| listener as Arc<dyn MetricSource>));
        others.extend(self.traces.iter().map(|traces| Arc::clone(traces) as Arc<dyn MetricSource>));
        let findings = Arc::<FindingStore>::default();
        let reports = Arc::clone(edge.transfers());
        let tasks_max = config.server.task_metrics_max;
        others.push(Arc::clone(edge) as Arc<dyn MetricSource>);
        others.push(Arc::new(FindingMetrics {
            engine: Arc::clone(&self.engine),
            reports: Arc::clone(&reports),
            findings: Arc::clone(&findings),
        }));
        others.push(Arc::new(ReportMetrics {
            engine: Arc::clone(&self.engine),
            reports: Arc::clone(&reports),
            tasks_max,
        }));
        self.timers.spawn(Metrics::sample_lag(Arc::clone(&self.engine), Arc::clone(&tally)));
        let sources = MetricInputs {
            engine: Arc::clone(&self.engine),
            tally,
            handshakes: Arc::clone(&handshakes),
            others,
        };
        let metrics = Metrics::new(sources, tasks_max);
        let operations = Operations { engine: Arc::clone(&self.engine), audit, traces: self.traces.clone() };
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
            ..AppState::new(engine, readiness, Arc::clone(&self.about))
        };
        self.timers.spawn(reports::watch(Arc::clone(&self.engine), Arc::clone(&reports)));
        let engine = Arc::clone(&self.engine);
        self.timers
            .spawn(findings::watch(engine, reports, findings, move |remedy| operations.apply_remedy(remedy)));
        site
    }

    /// Serves gRPC: each dedicated listener its job, the shared one the job that the caller names.
    fn serve_grpc(
        &mut self,
        edge: &Arc<grpc::Server>,
        listeners: Vec<BoundListener>,
        config: &Config,
    ) -> Result<()> {
        let place = |name: &JobName| self.engine.read_under_lock(|core| core.job_named(name.as_str()));
        let mut shared = config.jobs.iter().filter(|job| job.grpc.is_none());
        let only = shared.next().filter(|_| shared.next().is_none()).map(|job| job.name.clone());
        for BoundListener { listener, job, .. } in listeners {
            let routing = match job {
                None => Routing::ByAuthority(only.clone()),
                Some(name) => {
                    let job = place(&name).with_context(|| format!("the job {name} is not there"))?;
                    Routing::Job(name, job)
                }
            };
            self.grpc.tasks.spawn(Arc::clone(edge).serve(listener, routing, self.grpc.stop.subscribe()));
        }
        Ok(())
    }

    /// Returns the engine.
    pub fn engine(&self) -> &Arc<Engine> {
        &self.engine
    }

    /// Returns version and addresses of the server.
    pub fn about(&self) -> &ServerInfo {
        &self.about
    }

    /// Reloads files: opens the audit file again, reads the tokens, and checks the certificates, which the
    /// listeners reload by themselves.
    pub fn reload(&self) {
        self.audit.reopen();
        let (guard, config, clock) = (Arc::clone(&self.guard), self.config.clone(), *self.engine.clock());
        // Reading files may block.
        tokio::task::spawn_blocking(move || {
            guard.reload();
            match tls_entrances(&config, clock, &Arc::new(HandshakeFailures::new(clock))) {
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
        self.readiness.stopping();
        self.streams.close();
        let began = self.engine.clock().now();
        self.engine.stop();
        if !self.grpc.stop(within + GRPC_CLOSE_TIMEOUT).await {
            tracing::warn!(?within, "some gRPC connections did not finish in time and are cut");
        }
        let left = within.saturating_sub(self.engine.clock().now().since(began));
        self.http.stop(left.max(HTTP_STOP_TIMEOUT)).await;
        // Health probes are answered until the end.
        self.health.stop(HTTP_STOP_TIMEOUT).await;
        self.audit.flush_aggregated(*self.engine.clock());
        self.audit.close(AUDIT_STOP_TIMEOUT).await;
        self.log.stop(HTTP_STOP_TIMEOUT).await;
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

fn bind(address: SocketAddr, what: &str, flag: &str) -> Result<(TcpListener, SocketAddr)> {
    let bind = || {
        let listener = grpc::bind(address)?;
        let bound = listener.local_addr()?;
        Ok::<_, std::io::Error>((listener, bound))
    };
    bind().with_context(|| {
        format!("cannot listen for {what} at {address}: choose another address with {flag} (port 0 picks a free one)")
    })
}

fn describe(http: SocketAddr, listeners: &[BoundListener], jobs: &[JobConfig]) -> ServerInfo {
    let grpc = listeners.iter().map(|bound| GrpcListenerInfo {
        address: bound.address,
        jobs: match &bound.job {
            Some(job) => vec![job.clone()],
            None => jobs.iter().filter(|job| job.grpc.is_none()).map(|job| job.name.clone()).collect(),
        },
    });
    ServerInfo { version: Version::current(), http, grpc: grpc.collect() }
}

/// Builds the TLS of the gRPC listeners and of the HTTP listener.
fn tls_entrances(
    config: &Config,
    clock: Clock,
    handshakes: &Arc<HandshakeFailures>,
) -> Result<[ListenerTls; 2]> {
    let enter = |edge, tls: &TlsConfig, protocols| {
        let kept = (clock, Arc::clone(handshakes));
        let entrance = ListenerTls::new(edge, tls.mode, tls.files(edge)?, protocols, kept);
        entrance.with_context(|| format!("no TLS for {edge}: see --{edge}-tls-cert, and `muster tls check`"))
    };
    let server = &config.server;
    Ok([enter("grpc", &server.grpc_tls, HTTP2)?, enter("http", &server.http_tls, HTTP1)?])
}

/// Builds the access control of the HTTP port.
fn guard(config: &Config, clock: Clock) -> Result<AccessControl> {
    let server = &config.server;
    let tokens = server.tokens_file.as_ref().map(|path| TokenFile::read(path, clock)).transpose()?;
    if tokens.is_some() && server.http_tls.cert.is_none() && !server.http.ip().is_loopback() {
        tracing::warn!("tokens come in by plaintext HTTP, where others may read them: see --http-tls-cert");
    }
    // Clients that use the name of this machine should be able to reach it.
    let machine = rustix::system::uname().nodename().to_string_lossy().into_owned();
    let hosts = server.http_hosts.clone().with(&machine);
    let guard = AccessControl::open(clock).with_tokens(tokens, server.session_timeout).with_hosts(hosts);
    Ok(guard.with_changes(server.http_changes_per_second))
}

/// Logs a warning for each address that is open without access control by request.
fn warn_if_exposed(config: &Config) {
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
