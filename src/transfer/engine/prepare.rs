//! Prepares requests: finds or makes the connections to all peers of a request in parallel, and sends each peer the
//! list of its transfers.
//!
//! If a connection is missing, the clique cache decides whether this request dials ([`dial`]) or waits for an attempt
//! that is in progress. If the caller drops a request, an attempt that no other request wants is given up. At most
//! [`WAITERS_MAX`] requests wait for one connection; further requests fail. Begin at [`prepare_transfers`].

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex};

use muster_clock as clock;

use super::clique_cache::{CliqueKey, CliqueLookup, CliqueWaiter, IsRequestWanted, WAITERS_MAX};
use super::dial;
use super::local_transfers::LocalTransfers;
use super::prepared_transfers::{LaunchOptions, PreparedPeer, PreparedTransfers, TransferSpec};
use super::request_check::check_request;
use super::shared::EngineShared;
use crate::base::error::{PrepareError, TransferError};
use crate::base::launch_metrics::LaunchStage;
use crate::base::membership::MemberId;
use crate::base::sync::lock;
use crate::base::transport::TransportChoice;
use crate::launch::launch_spans::LaunchSpans;
use crate::memory::{MemoryRegion, Span, SpanStream};
use crate::protocol::link::launch_definition::{DefinitionEntry, FetchSource, LaunchDefinition};
use crate::session::api_for_engine::ConnectionLease;

/// A request that was checked.
pub struct TransferRequest {
    pub specs: Vec<TransferSpec>,
    /// The peer of each transfer; this task itself, for a copy within it.
    pub peers: Vec<MemberId>,
    /// The distinct peers, without this task.
    pub distinct: BTreeSet<MemberId>,
}

impl TransferRequest {
    /// Checks a request.
    pub(super) fn new(shared: &EngineShared, specs: Vec<TransferSpec>) -> Result<Self, PrepareError> {
        if shared.closed.load(Ordering::Acquire) {
            return Err(PrepareError::Closed);
        }
        let peers = check_request(shared, &specs)?;
        let distinct = peers.iter().copied().filter(|peer| *peer != shared.here()).collect();
        Ok(Self { specs, peers, distinct })
    }
}

/// Finds or makes the connections of a request, and defines its transfers. Attempts that no other request
/// wants are given up once the request is not `wanted` any more; `then` is called in any case.
pub fn prepare_transfers(
    shared: &Arc<EngineShared>,
    request: TransferRequest,
    options: LaunchOptions,
    wanted: &IsRequestWanted,
    then: impl FnOnce(Result<PreparedTransfers, PrepareError>) + Send + 'static,
) {
    let TransferRequest { specs, peers, distinct } = request;
    let (weak, asked) = (Arc::downgrade(shared), clock::monotonic());
    gather_connections(
        shared,
        distinct.into_iter().collect(),
        wanted,
        Box::new(move |found| {
            let Some(shared) = weak.upgrade() else { return then(Err(PrepareError::Closed)) };
            let prepared =
                found.map(|connections| define_transfers(&shared, &specs, &peers, options, &connections));
            if prepared.is_ok() {
                let took = clock::monotonic().saturating_duration_since(asked);
                shared.launch_metrics.record_stage_time(LaunchStage::Prepare, took);
            }
            then(prepared);
        }),
    );
}

type LeasedConnections = HashMap<MemberId, ConnectionLease>;
type LeasedConnectionsCallback = Box<dyn FnOnce(Result<LeasedConnections, PrepareError>) + Send>;

/// The connections of a request, while they are being found or made.
struct PendingConnections {
    found: LeasedConnections,
    left: usize,
    /// The function to call with the result; none once it was called.
    then: Option<LeasedConnectionsCallback>,
}

/// Finds or makes the connections to all of `peers`, then calls `then`; with the first error at once.
fn gather_connections(
    shared: &Arc<EngineShared>,
    peers: Vec<MemberId>,
    wanted: &IsRequestWanted,
    then: LeasedConnectionsCallback,
) {
    if peers.is_empty() {
        return then(Ok(LeasedConnections::new()));
    }
    let gathering =
        PendingConnections { found: LeasedConnections::new(), left: peers.len(), then: Some(then) };
    let gathering = Arc::new(Mutex::new(gathering));
    for member in peers {
        let key = CliqueKey::new(shared.here(), member);
        let gathering = Arc::clone(&gathering);
        let waiter = CliqueWaiter::new(wanted, move |result| {
            let mut all = lock(&gathering);
            all.left -= 1;
            let outcome = match result {
                Ok(connection) => {
                    all.found.insert(member, connection);
                    (all.left == 0).then(|| Ok(std::mem::take(&mut all.found)))
                }
                Err(error) => Some(Err(PrepareError::Clique { member, error })),
            };
            let told = outcome.and_then(|outcome| Some((all.then.take()?, outcome)));
            // Once one has failed, the connections of the others are not needed.
            let unneeded = if all.then.is_none() { std::mem::take(&mut all.found) } else { HashMap::new() };
            drop(all);
            drop(unneeded);
            if let Some((then, outcome)) = told {
                then(outcome);
            }
        });
        let how = lock(&shared.cliques).find_or_begin_attempt(key, clock::monotonic(), waiter);
        match how {
            CliqueLookup::Ready(connection, waiter) => waiter.notify(Ok(connection)),
            CliqueLookup::Pending => {}
            CliqueLookup::Crowded(waiter) => {
                waiter.notify(Err(TransferError::Overloaded { member, bound: WAITERS_MAX }));
            }
            CliqueLookup::Make(making, None) => dial::dial_clique(shared, member, making),
            CliqueLookup::Make(making, Some(undecided)) => {
                dial::dial_after_leave_decision(shared, undecided, making)
            }
        }
    }
}

/// Defines the transfers of a request whose connections exist.
fn define_transfers(
    shared: &Arc<EngineShared>,
    specs: &[TransferSpec],
    peers: &[MemberId],
    options: LaunchOptions,
    connections: &LeasedConnections,
) -> PreparedTransfers {
    let mut by_peer: BTreeMap<MemberId, Vec<(DefinitionEntry, u32, Span)>> = BTreeMap::new();
    let mut regions: BTreeMap<MemberId, BTreeMap<u32, Arc<MemoryRegion>>> = BTreeMap::new();
    let mut local = Vec::new();
    for (number, (spec, &member)) in specs.iter().zip(peers).enumerate() {
        if member == shared.here() {
            local.push((spec.definition_entry(), number as u32, spec.span.clone()));
            continue;
        }
        let region = spec.span.buffer().region();
        let connection = connections[&member].connection();
        if !spec.outgoing {
            connection.register_for_reads(region);
        }
        let mut source_in_region = || {
            regions.entry(member).or_default().insert(region.id, Arc::clone(region));
            FetchSource::Region(region.id, spec.span.region_offset() as u64)
        };
        let source = match shared.config.transport {
            _ if !spec.outgoing || spec.span.is_empty() => FetchSource::None,
            _ if let Some(gpu) = connection.gpu_of_clique(region) => FetchSource::Gpu(gpu),
            _ if connection.may_read_over_fabric() => match connection.can_offer_over_fabric(region) {
                true => source_in_region(),
                false => FetchSource::None,
            },
            TransportChoice::Unix | TransportChoice::Tcp | TransportChoice::Loopback => FetchSource::None,
            TransportChoice::Auto | TransportChoice::Shm if region.shared_file().is_some() => {
                source_in_region()
            }
            // The kernel cannot read the memory of a GPU.
            _ if region.device().is_some() => FetchSource::None,
            TransportChoice::Shm => FetchSource::None,
            TransportChoice::Auto | TransportChoice::Pvm => FetchSource::Address(spec.span.address()),
        };
        let entry = DefinitionEntry { source, ..spec.definition_entry() };
        by_peer.entry(member).or_default().push((entry, number as u32, spec.span.clone()));
    }
    let mut shares = Vec::with_capacity(by_peer.len());
    for (member, mut list) in by_peer {
        list.sort_by_key(|(entry, ..)| entry.sort_key());
        let stream = |outgoing| {
            SpanStream::new(
                list.iter()
                    .filter(|(entry, ..)| entry.outgoing == outgoing)
                    .map(|(_, number, span)| (*number, span.clone())),
            )
        };
        let lists = Arc::new(LaunchSpans { outbound: stream(true), inbound: stream(false) });
        let definition = LaunchDefinition::new(list.iter().map(|(entry, ..)| *entry).collect());
        let connection = connections[&member].connection();
        let regions: Vec<_> = regions.remove(&member).unwrap_or_default().into_values().collect();
        let definition = connection.send_definition(definition, &regions);
        shares.push(PreparedPeer { connection: Arc::clone(connection), definition, lists });
    }
    let local = LocalTransfers::new(local);
    PreparedTransfers::new(shared, shares, local, options, specs.len())
}
