//! Prepares requests: finds or makes their connections, all in parallel, and defines the transfers at the
//! peers.
//!
//! It makes no connection itself: the clique cache decides whether [`dial`] has to. A request
//! that its caller has dropped makes no connection, and at most [`WAITERS_MAX`] requests wait for one. Begin
//! at [`prepare_then`].

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex};

use muster_clock as clock;

use super::check::check;
use super::cliques::{CliqueKey, Found, IsWanted, WAITERS_MAX, Waiter};
use super::dial;
use super::prepared::{LaunchOptions, Prepared, PreparedPeer, Spec};
use super::shared::EngineShared;
use crate::base::error::{PrepareError, TransferError};
use crate::base::identity::Member;
use crate::base::meters::Stage;
use crate::base::sync::lock;
use crate::base::transport::Choice;
use crate::launch::io_lists::IoLists;
use crate::memory::{MemoryRegion, Span, SpanStream};
use crate::protocol::link::definition::{Definition, DefinitionEntry, Source};
use crate::session::connection::ConnectionLease;

/// A request that was checked.
pub struct TransferRequest {
    pub specs: Vec<Spec>,
    /// The peer of each transfer.
    pub peers: Vec<Member>,
    /// The distinct peers.
    pub distinct: BTreeSet<Member>,
}

impl TransferRequest {
    /// Checks a request.
    pub(super) fn new(shared: &EngineShared, specs: Vec<Spec>) -> Result<Self, PrepareError> {
        if shared.closed.load(Ordering::Acquire) {
            return Err(PrepareError::Closed);
        }
        let peers = check(shared, &specs)?;
        let distinct = peers.iter().copied().collect();
        Ok(Self { specs, peers, distinct })
    }
}

/// Finds or makes the connections of a request, and defines its transfers. Attempts that no other request
/// wants are given up once the request is not `wanted` any more; `then` is called in any case.
pub fn prepare_then(
    shared: &Arc<EngineShared>,
    request: TransferRequest,
    options: LaunchOptions,
    wanted: &IsWanted,
    then: impl FnOnce(Result<Prepared, PrepareError>) + Send + 'static,
) {
    let TransferRequest { specs, peers, distinct } = request;
    let (weak, asked) = (Arc::downgrade(shared), clock::monotonic());
    gather(
        shared,
        distinct.into_iter().collect(),
        wanted,
        Box::new(move |found| {
            let Some(shared) = weak.upgrade() else { return then(Err(PrepareError::Closed)) };
            let prepared = found.map(|connections| define(&shared, &specs, &peers, options, &connections));
            if prepared.is_ok() {
                let took = clock::monotonic().saturating_duration_since(asked);
                shared.meters.observe_time(Stage::Prepare, took);
            }
            then(prepared);
        }),
    );
}

type Connections = HashMap<Member, ConnectionLease>;
type Gathered = Box<dyn FnOnce(Result<Connections, PrepareError>) + Send>;

/// The connections of a request, while they are being found or made.
struct Gathering {
    found: Connections,
    left: usize,
    /// The function to call with the result; none once it was called.
    then: Option<Gathered>,
}

/// Finds or makes the connections to all of `peers`, then calls `then`; with the first error at once.
fn gather(shared: &Arc<EngineShared>, peers: Vec<Member>, wanted: &IsWanted, then: Gathered) {
    if peers.is_empty() {
        return then(Ok(Connections::new()));
    }
    let gathering = Gathering { found: Connections::new(), left: peers.len(), then: Some(then) };
    let gathering = Arc::new(Mutex::new(gathering));
    for member in peers {
        let key = CliqueKey::new(shared.here(), member);
        let gathering = Arc::clone(&gathering);
        let waiter = Waiter::new(wanted, move |result| {
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
        let how = lock(&shared.cliques).find(key, clock::monotonic(), waiter);
        match how {
            Found::Ready(connection, waiter) => waiter.tell(Ok(connection)),
            Found::Pending => {}
            Found::Crowded(waiter) => {
                waiter.tell(Err(TransferError::Overloaded { member, bound: WAITERS_MAX }));
            }
            Found::Make(making, None) => dial::make(shared, member, making),
            Found::Make(making, Some(undecided)) => dial::make_unless_it_stays(shared, undecided, making),
        }
    }
}

/// Defines the transfers of a request whose connections exist.
fn define(
    shared: &Arc<EngineShared>,
    specs: &[Spec],
    peers: &[Member],
    options: LaunchOptions,
    connections: &Connections,
) -> Prepared {
    let mut by_peer: BTreeMap<Member, Vec<(DefinitionEntry, u32, Span)>> = BTreeMap::new();
    let mut regions: BTreeMap<Member, BTreeMap<u32, Arc<MemoryRegion>>> = BTreeMap::new();
    for (number, (spec, &member)) in specs.iter().zip(peers).enumerate() {
        let region = spec.span.buffer().region();
        let source = match shared.config.transport {
            _ if !spec.outgoing || spec.span.is_empty() => Source::None,
            Choice::Unix | Choice::Tcp | Choice::Loopback => Source::None,
            Choice::Auto | Choice::Shm if region.shared().is_some() => {
                regions.entry(member).or_default().insert(region.id, Arc::clone(region));
                Source::Region(region.id, spec.span.offset() as u64)
            }
            Choice::Shm => Source::None,
            Choice::Auto | Choice::Pvm => Source::Address(spec.span.address()),
        };
        let entry = DefinitionEntry {
            key: spec.key,
            from: spec.from,
            to: spec.to,
            bytes: spec.span.len() as u64,
            fingerprint: spec.layout.fingerprint(),
            outgoing: spec.outgoing,
            source,
        };
        by_peer.entry(member).or_default().push((entry, number as u32, spec.span.clone()));
    }
    let mut shares = Vec::with_capacity(by_peer.len());
    for (member, mut list) in by_peer {
        list.sort_by_key(|(entry, ..)| entry.order());
        let stream = |outgoing| {
            SpanStream::new(
                list.iter()
                    .filter(|(entry, ..)| entry.outgoing == outgoing)
                    .map(|(_, number, span)| (*number, span.clone())),
            )
        };
        let lists = Arc::new(IoLists { outbound: stream(true), inbound: stream(false) });
        let definition = Definition::new(list.iter().map(|(entry, ..)| *entry).collect());
        let connection = connections[&member].connection();
        let regions: Vec<_> = regions.remove(&member).unwrap_or_default().into_values().collect();
        let definition = connection.define(definition, &regions);
        shares.push(PreparedPeer { connection: Arc::clone(connection), definition, lists });
    }
    Prepared::new(shared, shares, options, specs.len())
}
