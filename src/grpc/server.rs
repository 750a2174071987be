//! The state that all listeners and connections of the gRPC port share: the driver, limits, memory pools, caches,
//! counters and traces.
//!
//! `listener.rs` accepts connections. Begin at [`GrpcServer`].

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError, Weak};

use muster_kept::KeptMemory;

use super::auxiliary::AuxiliaryServices;
use super::body_memory::MemoryPool;
use super::call_counts::{CallCount, CallCounts, CallDurations, ENDINGS};
use super::connection_keeping::{ConnectionKeeper, ConnectionKeeping};
use super::encoded_replies::EncodedReplyCache;
use super::limits::GrpcLimits;
use super::mailbox::{MailboxGroup, MailboxMessage};
use super::task_set_cache::TaskSetCache;
use crate::engine::{Engine, FlushToken, LoggedConnections};
use crate::http2::StateMemoryPool;
use crate::meter::{self, Counter, Sharded};
use crate::service::collectives::CollectiveReports;
use crate::service::reports::TransferReportStore;
use crate::service::stacks::StackCollector;
use crate::telemetry::log_rate_limit::LogRateLimit;
use crate::telemetry::traces::Traces;
use crate::tls::{HandshakeFailures, TransportPolicy};

/// The gRPC port of one engine. Its limits hold over all of its listeners together.
pub struct GrpcServer {
    pub(super) engine: Arc<Engine>,
    pub(super) limits: GrpcLimits,
    pub(super) bodies: Arc<MemoryPool>,
    pub(super) state: Arc<StateMemoryPool>,
    pub(super) sets: TaskSetCache,
    pub(super) replies: EncodedReplyCache,
    pub(super) services: AuxiliaryServices,
    pub(super) counts: Sharded<PortCounters>,
    /// The present number of connections.
    pub(super) connections: AtomicUsize,
    pub(super) listener_tls: TransportPolicy,
    /// The rate limit of log lines about clients whose authority leads to no job.
    pub(super) unroutable_log: Mutex<LogRateLimit<()>>,
    pub(super) transfers: Arc<TransferReportStore>,
    pub(super) stacks: Arc<StackCollector>,
    pub(super) collectives: Arc<CollectiveReports>,
    /// `None`: calls are neither counted by method nor timed.
    pub(super) calls: Option<Box<Sharded<CallCounts>>>,
    /// `None`: calls are not traced.
    pub(super) traces: Option<Arc<Traces>>,
    /// Empty: all connections end with this process.
    keeping: OnceLock<ConnectionKeeping>,
    /// The connections of each listener.
    pub(super) listeners: Mutex<Vec<Weak<dyn MailboxGroup>>>,
}

impl GrpcServer {
    /// Returns a port for `engine`, without TLS. It serves no connection before [`GrpcServer::serve`].
    #[must_use]
    pub fn new(engine: Arc<Engine>, limits: GrpcLimits) -> Arc<Self> {
        Self::with_traces(engine, limits, None)
    }

    /// Returns the same with traces of its calls.
    #[must_use]
    pub fn with_traces(engine: Arc<Engine>, limits: GrpcLimits, traces: Option<Arc<Traces>>) -> Arc<Self> {
        let failures = Arc::new(HandshakeFailures::new(*engine.clock()));
        Self::with_transport_policy(TransportPolicy::plaintext_only("grpc", failures), engine, limits, traces)
    }

    /// Returns the same with the given handling of new connections.
    #[must_use]
    pub fn with_transport_policy(
        entrance: TransportPolicy,
        engine: Arc<Engine>,
        limits: GrpcLimits,
        traces: Option<Arc<Traces>>,
    ) -> Arc<Self> {
        let bodies = MemoryPool::new(limits.bodies_in_flight_bytes);
        let state = StateMemoryPool::new(limits.state_bytes);
        let calls = (meter::ENABLED && limits.count_calls).then(Box::default);
        Arc::new(Self {
            engine,
            limits,
            bodies,
            state,
            sets: TaskSetCache::default(),
            replies: EncodedReplyCache::default(),
            services: AuxiliaryServices::new(),
            counts: Sharded::default(),
            connections: AtomicUsize::new(0),
            listener_tls: entrance,
            unroutable_log: Mutex::default(),
            transfers: Arc::default(),
            stacks: Arc::default(),
            collectives: Arc::default(),
            calls,
            traces,
            keeping: OnceLock::new(),
            listeners: Mutex::default(),
        })
    }

    /// Returns the same with a store of transfer reports that is also used elsewhere.
    ///
    /// # Panics
    /// If others have this server already.
    #[must_use]
    pub fn with_report_store(mut self: Arc<Self>, transfers: Arc<TransferReportStore>) -> Arc<Self> {
        Arc::get_mut(&mut self).expect("nobody else has the server yet").transfers = transfers;
        self
    }

    /// Makes plaintext connections go on when this process dies: their logs are in `memory`, and `keeper` holds their sockets.
    /// Only the first call has an effect. To be called before [`GrpcServer::serve`].
    pub fn keep_connections(self: &Arc<Self>, memory: Arc<KeptMemory>, keeper: Arc<dyn ConnectionKeeper>) {
        let _ = self.keeping.set(ConnectionKeeping { memory, keeper });
        let this: Weak<dyn LoggedConnections> = Arc::downgrade(self) as Weak<dyn LoggedConnections>;
        self.engine.set_logged_connections(this);
    }

    pub(super) fn connection_keeping(&self) -> Option<&ConnectionKeeping> {
        self.keeping.get()
    }

    /// Returns the store of transfer reports.
    #[must_use]
    pub fn report_store(&self) -> &Arc<TransferReportStore> {
        &self.transfers
    }

    /// Returns the requests for stacks, and the answers to them.
    #[must_use]
    pub fn stack_collector(&self) -> &Arc<StackCollector> {
        &self.stacks
    }

    /// Returns the collectives that processes report.
    #[must_use]
    pub fn collective_reports(&self) -> &Arc<CollectiveReports> {
        &self.collectives
    }

    /// Returns the counters of the port.
    #[must_use]
    pub fn counters(&self) -> ServerCounters {
        let sum = |of: &dyn Fn(&PortCounters) -> &Counter| {
            self.counts.all_shards().map(|counts| of(counts).get()).sum()
        };
        ServerCounters {
            connections: self.connections.load(Ordering::Relaxed),
            connections_opened: sum(&|counts| &counts.opened),
            connections_refused: sum(&|counts| &counts.refused),
            accept_errors: sum(&|counts| &counts.accept_errors),
            not_http2: sum(&|counts| &counts.not_http2),
            calls: sum(&|counts| &counts.calls),
            calls_refused: sum(&|counts| &counts.refused_calls),
            bodies_in_flight_bytes: self.bodies.taken_bytes(),
            bodies_in_flight_bytes_max: self.limits.bodies_in_flight_bytes,
            state_bytes: self.state.taken_bytes(),
            state_bytes_max: self.limits.state_bytes,
            connections_max: self.limits.connections,
            endings: std::array::from_fn(|n| sum(&|counts| &counts.endings[n])),
            received_bytes: sum(&|counts| &counts.received),
            sent_bytes: sum(&|counts| &counts.sent),
        }
    }

    /// Returns the number of calls by method, generation and code. Empty if calls are not counted.
    #[must_use]
    pub fn call_counts(&self) -> Vec<CallCount> {
        self.calls.as_ref().map(|calls| CallCounts::sum_counts_of_threads(calls)).unwrap_or_default()
    }

    /// Returns the durations of calls by method. Empty if calls are not counted.
    #[must_use]
    pub fn call_durations(&self) -> Vec<CallDurations> {
        self.calls.as_ref().map(|calls| CallCounts::sum_durations_of_threads(calls)).unwrap_or_default()
    }
}

impl LoggedConnections for GrpcServer {
    fn request_flush(&self, token: FlushToken) {
        let listeners = self.listeners.lock().unwrap_or_else(PoisonError::into_inner).clone();
        for connections in listeners.iter().filter_map(Weak::upgrade) {
            connections.post_to_all(&|| MailboxMessage::Flush(token.clone()));
        }
    }
}

#[derive(Debug, Default)]
pub(super) struct PortCounters {
    pub(super) opened: Counter,
    pub(super) refused: Counter,
    pub(super) accept_errors: Counter,
    pub(super) not_http2: Counter,
    pub(super) calls: Counter,
    pub(super) refused_calls: Counter,
    /// The ended connections, in the order of [`ENDINGS`].
    pub(super) endings: [Counter; ENDINGS.len()],
    pub(super) received: Counter,
    pub(super) sent: Counter,
}

/// The counters of the gRPC port.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ServerCounters {
    /// The present number of connections.
    pub connections: usize,
    /// The number of accepted connections.
    pub connections_opened: u64,
    /// The number of connections closed at once because there were too many.
    pub connections_refused: u64,
    /// The number of failed accepts.
    pub accept_errors: u64,
    /// The number of connections that did not speak HTTP/2.
    pub not_http2: u64,
    /// The number of received calls, either dispatched or refused.
    pub calls: u64,
    /// The number of calls refused by the port itself: unknown, unreadable, too large, too slow or for no
    /// job.
    pub calls_refused: u64,
    /// The memory taken by request bodies, in bytes.
    pub bodies_in_flight_bytes: usize,
    /// The bound on that memory.
    pub bodies_in_flight_bytes_max: usize,
    /// The memory taken by the state of requests in progress, beyond the allowances of connections, in bytes.
    pub state_bytes: usize,
    /// The bound on that memory.
    pub state_bytes_max: usize,
    /// The bound on connections.
    pub connections_max: usize,
    /// The number of ended connections, in the order of [`ENDINGS`].
    pub endings: [u64; ENDINGS.len()],
    /// The number of bytes read from connections, HTTP/2 included.
    pub received_bytes: u64,
    /// The number of bytes written to connections.
    pub sent_bytes: u64,
}
