//! What is asked of an engine: looked at, put in its place in the order, connected, and defined for the peers.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::task::Poll;
use std::time::Duration;

use crate::base::error::{PrepareError, TransferError, TransferKey};
use crate::base::event::Event;
use crate::base::identity::{DeviceId, Member, TaskId};
use crate::base::meters::{Meters, Stage};
use crate::base::sync::lock;
use crate::base::transport::Choice;
use crate::engine::cliques::{CliqueKey, Found, WAITERS_MAX, Waiter, Wanted};
use crate::engine::dial;
use crate::engine::handle::Engine;
use crate::engine::prepared::{Options, Prepared, Share, Spec};
use crate::engine::shared::Core;
use crate::launch::peer_launch::Work;
use crate::launch::transfer::Transfer;
use crate::memory::stream::Stream;
use crate::memory::{Region, Span};
use crate::protocol::link::definition::{Definition, ENTRIES_MAX, Entry, Source};
use crate::protocol::link::{GroupId, Numbers};
use crate::session::connection::Kept;
use muster_clock as clock;

pub(crate) fn even(buffers: usize, devices: usize, keys: usize) -> Result<(), PrepareError> {
    if buffers == 0 {
        return Err(PrepareError::Empty);
    }
    if buffers != devices || buffers != keys {
        return Err(PrepareError::Uneven { buffers, devices, keys });
    }
    Ok(())
}

/// Looks at a request, and says who each of its transfers is with.
pub(crate) fn check(core: &Core, specs: &[Spec]) -> Result<Vec<Member>, PrepareError> {
    if specs.is_empty() {
        return Err(PrepareError::Empty);
    }
    if specs.len() > ENTRIES_MAX {
        return Err(PrepareError::TooMany { given: specs.len(), bound: ENTRIES_MAX });
    }
    let here = core.here().task;
    let membership = core.membership.read().unwrap_or_else(PoisonError::into_inner);
    let mut owners: HashMap<DeviceId, TaskId> = HashMap::new();
    let mut owner = |device: DeviceId| -> Result<TaskId, PrepareError> {
        if core.config.devices.binary_search(&device).is_ok() {
            return Ok(here);
        }
        if let Some(known) = owners.get(&device) {
            return Ok(*known);
        }
        let task = membership
            .owner(device)
            .filter(|task| *task != here)
            .ok_or(PrepareError::UnknownDevice(device))?;
        owners.insert(device, task);
        Ok(task)
    };
    let mut peers = Vec::with_capacity(specs.len());
    let mut seen = HashSet::new();
    let mut written: Vec<(usize, usize, usize, TransferKey)> = Vec::new();
    let mut read: Vec<(usize, usize, usize, TransferKey)> = Vec::new();
    for spec in specs {
        let (near, far) = if spec.outgoing { (spec.from, spec.to) } else { (spec.to, spec.from) };
        let (near_owner, far_owner) = (owner(near)?, owner(far)?);
        if near_owner != here {
            return Err(PrepareError::NotAddressable { device: near, owner: near_owner, here });
        }
        if far_owner == here {
            return Err(PrepareError::SameTask(spec.from, spec.to));
        }
        let (layout, buffer) = (spec.layout.len(), spec.span.len() as u64);
        if layout != buffer {
            return Err(PrepareError::WrongSize { key: spec.key, layout, buffer });
        }
        if !seen.insert((spec.key, spec.from, spec.to)) {
            let (key, source_device, destination) = (spec.key, spec.from, spec.to);
            return Err(PrepareError::DuplicateKey { key, source_device, destination });
        }
        if !spec.span.is_empty() {
            let range =
                (spec.span.buffer().id(), spec.span.start(), spec.span.start() + spec.span.len(), spec.key);
            if spec.outgoing { read.push(range) } else { written.push(range) }
        }
        peers.push(membership.member(far_owner).ok_or(PrepareError::UnknownDevice(far))?);
    }
    overlap(written, read)?;
    Ok(peers)
}

/// Whether any range that is written shares bytes with another one.
pub(crate) fn overlap(
    mut written: Vec<(usize, usize, usize, TransferKey)>,
    read: Vec<(usize, usize, usize, TransferKey)>,
) -> Result<(), PrepareError> {
    written.sort_unstable();
    for pair in written.windows(2) {
        let ((buffer, _, end, _), (other, start, until, key)) = (pair[0], pair[1]);
        if buffer == other && start < end {
            return Err(PrepareError::Overlap { key, start, end: until });
        }
    }
    for (buffer, start, end, key) in read {
        // Of the written ranges, which do not overlap, only the last that begins before the end can reach into it.
        let at = written.partition_point(|range| (range.0, range.1) < (buffer, end));
        if let Some(&(other, _, until, _)) = at.checked_sub(1).and_then(|at| written.get(at))
            && other == buffer
            && until > start
        {
            return Err(PrepareError::Overlap { key, start, end });
        }
    }
    Ok(())
}

/// A place in the order of a channel with a peer, for a launch whose connection may not be there yet. Dropped unused, it
/// tells the peer that nothing comes.
pub(crate) struct Ticket {
    core: Arc<Core>,
    numbers: Numbers,
    peer: Member,
    at: Option<GroupId>,
}

impl Ticket {
    pub(crate) fn take(core: &Arc<Core>, peer: Member, channel: u32) -> Self {
        let numbers = core.numbers(peer);
        let at = Some(numbers.take(channel));
        Self { core: Arc::clone(core), numbers, peer, at }
    }

    /// With whom.
    pub(crate) const fn peer(&self) -> Member {
        self.peer
    }

    /// The number, for a launch that is made now.
    pub(crate) fn used(mut self) -> Option<GroupId> {
        self.at.take()
    }
}

impl Drop for Ticket {
    fn drop(&mut self) {
        if let Some(at) = self.at {
            // First, so that either a launch of the peer finds it so when it comes, or is here to be found.
            self.numbers.close(at);
            self.core.withdraw(self.peer, at);
        }
    }
}

/// Transfers that were asked for, and are in order.
pub(crate) struct Request {
    pub specs: Vec<Spec>,
    /// Whom each of them is with.
    pub peers: Vec<Member>,
    /// Whom any of them is with.
    pub distinct: BTreeSet<Member>,
}

impl Request {
    /// Looks at what is asked for.
    pub(crate) fn of(core: &Core, specs: Vec<Spec>) -> Result<Self, PrepareError> {
        if core.closed.load(Ordering::Acquire) {
            return Err(PrepareError::Closed);
        }
        let peers = check(core, &specs)?;
        let distinct = peers.iter().copied().collect();
        Ok(Self { specs, peers, distinct })
    }
}

/// Finds or makes the connections that a request needs, and defines it. Makings that nobody else wants are given up when it
/// is not `wanted` any more; `then` is called either way.
pub(crate) fn prepare_then(
    core: &Arc<Core>,
    request: Request,
    options: Options,
    wanted: &Wanted,
    then: impl FnOnce(Result<Prepared, PrepareError>) + Send + 'static,
) {
    let Request { specs, peers, distinct } = request;
    let (defining, asked) = (Arc::clone(core), clock::monotonic());
    gather(
        core,
        distinct.into_iter().collect(),
        wanted,
        Box::new(move |found| {
            let prepared = found.map(|connections| define(&defining, &specs, &peers, options, &connections));
            if prepared.is_ok() {
                let took = clock::monotonic().saturating_duration_since(asked);
                defining.meters.observe_time(Stage::Prepare, took);
            }
            then(prepared);
        }),
    );
}

type Connections = HashMap<Member, Kept>;
type Gathered = Box<dyn FnOnce(Result<Connections, PrepareError>) + Send>;

/// Connections that are being found or made, all at once.
struct Gathering {
    found: Connections,
    left: usize,
    /// Whom to tell; none once they were.
    then: Option<Gathered>,
}

/// Finds or makes the connections to all of `peers`, then calls `then`; with the first that cannot be made, at once.
fn gather(core: &Arc<Core>, peers: Vec<Member>, wanted: &Wanted, then: Gathered) {
    if peers.is_empty() {
        return then(Ok(Connections::new()));
    }
    let gathering = Gathering { found: Connections::new(), left: peers.len(), then: Some(then) };
    let gathering = Arc::new(Mutex::new(gathering));
    for member in peers {
        let key = CliqueKey::new(core.here(), member);
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
            // Once it has failed nobody needs what the others find.
            let unneeded = if all.then.is_none() { std::mem::take(&mut all.found) } else { HashMap::new() };
            drop(all);
            drop(unneeded);
            if let Some((then, outcome)) = told {
                then(outcome);
            }
        });
        let how = lock(&core.cliques).find(key, clock::monotonic(), waiter);
        match how {
            Found::Ready(connection, waiter) => waiter.tell(Ok(connection)),
            Found::Pending => {}
            Found::Crowded(waiter) => {
                waiter.tell(Err(TransferError::Overloaded { member, bound: WAITERS_MAX }));
            }
            Found::Make(making, None) => dial::make(core, member, making),
            Found::Make(making, Some(undecided)) => core.make_unless_it_stays(undecided, making),
        }
    }
}

/// Makes the definitions of a request whose connections are there.
pub(crate) fn define(
    core: &Arc<Core>,
    specs: &[Spec],
    peers: &[Member],
    options: Options,
    connections: &Connections,
) -> Prepared {
    let mut by_peer: BTreeMap<Member, Vec<(Entry, u32, Span)>> = BTreeMap::new();
    let mut regions: BTreeMap<Member, BTreeMap<u32, Arc<Region>>> = BTreeMap::new();
    for (number, (spec, &member)) in specs.iter().zip(peers).enumerate() {
        let region = spec.span.buffer().region();
        let source = match core.config.transport {
            _ if !spec.outgoing || spec.span.is_empty() => Source::None,
            Choice::Unix | Choice::Tcp | Choice::Loopback => Source::None,
            Choice::Auto | Choice::Shm if region.shared().is_some() => {
                regions.entry(member).or_default().insert(region.id, Arc::clone(region));
                Source::Region(region.id, spec.span.offset() as u64)
            }
            Choice::Shm => Source::None,
            Choice::Auto | Choice::Pvm => Source::Address(spec.span.piece().number()),
        };
        let entry = Entry {
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
            Stream::new(
                list.iter()
                    .filter(|(entry, ..)| entry.outgoing == outgoing)
                    .map(|(_, number, span)| (*number, span.clone())),
            )
        };
        let work = Arc::new(Work { out: stream(true), inbound: stream(false) });
        let definition = Definition::new(list.iter().map(|(entry, ..)| *entry).collect());
        let connection = connections[&member].connection();
        let regions: Vec<_> = regions.remove(&member).unwrap_or_default().into_values().collect();
        let definition = connection.define(definition, &regions);
        shares.push(Share { connection: Arc::clone(connection), definition, work });
    }
    Prepared::new(core, shares, options, specs.len())
}

pub(crate) struct Arrival {
    result: Option<Result<Prepared, PrepareError>>,
    waker: Option<std::task::Waker>,
}

/// A preparation under way. Dropped, it is given up: connections that nobody else waits for are not made.
#[must_use = "nothing is launched by preparing it"]
pub struct Preparing {
    slot: Arc<Mutex<Arrival>>,
    changed: Arc<Condvar>,
    wanted: Arc<AtomicBool>,
}

impl Drop for Preparing {
    fn drop(&mut self) {
        self.wanted.store(false, Ordering::Release);
    }
}

impl Preparing {
    /// One that waits, whether anybody does, and what ends its waiting.
    pub(crate) fn new(
        meters: &Arc<Meters>,
    ) -> (Self, Wanted, impl FnOnce(Result<Prepared, PrepareError>) + Send + 'static) {
        let wanted = Arc::new(AtomicBool::new(true));
        let asked = Arc::clone(&wanted);
        let slot = Arc::new(Mutex::new(Arrival { result: None, waker: None }));
        let (done, changed) = (Arc::clone(&slot), Arc::new(Condvar::new()));
        let (signal, meters) = (Arc::clone(&changed), Arc::clone(meters));
        let finish = move |result: Result<Prepared, PrepareError>| {
            if let Err(error) = &result {
                meters.failed(None, &error.clone().into());
            }
            let mut slot = lock(&done);
            slot.result = Some(result);
            let waker = slot.waker.take();
            drop(slot);
            signal.notify_all();
            if let Some(waker) = waker {
                waker.wake();
            }
        };
        (Self { slot, changed, wanted }, Arc::new(move || asked.load(Ordering::Acquire)), finish)
    }

    /// Waits for it on this thread.
    ///
    /// # Errors
    /// If the request is wrong, or a peer cannot be reached.
    pub fn wait(self) -> Result<Prepared, PrepareError> {
        let mut slot = lock(&self.slot);
        loop {
            if let Some(result) = slot.result.take() {
                return result;
            }
            slot = self.changed.wait(slot).unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// Waits so long. None if it is not prepared by then: it goes on, until this is dropped.
    ///
    /// # Errors
    /// As [`wait`](Self::wait).
    pub fn wait_for(&mut self, time: Duration) -> Option<Result<Prepared, PrepareError>> {
        let until = clock::monotonic() + time;
        let mut slot = lock(&self.slot);
        loop {
            if let Some(result) = slot.result.take() {
                return Some(result);
            }
            let left = until.checked_duration_since(clock::monotonic())?;
            slot = self.changed.wait_timeout(slot, left).unwrap_or_else(PoisonError::into_inner).0;
        }
    }
}

impl Future for Preparing {
    type Output = Result<Prepared, PrepareError>;

    fn poll(self: std::pin::Pin<&mut Self>, cx: &mut std::task::Context<'_>) -> Poll<Self::Output> {
        let mut slot = lock(&self.slot);
        if let Some(result) = slot.result.take() {
            return Poll::Ready(result);
        }
        slot.waker = Some(cx.waker().clone());
        Poll::Pending
    }
}

/// Transfers that are requested one by one, and leave together.
#[derive(Debug)]
#[must_use = "nothing of it leaves until it is launched"]
pub struct Batch {
    engine: Engine,
    options: Options,
    specs: Vec<Spec>,
}

impl Batch {
    pub(crate) fn new(engine: &Engine, options: Options) -> Self {
        Self { engine: engine.clone(), options, specs: Vec::new() }
    }

    /// Adds a transfer; its number in the batch.
    pub fn add(&mut self, spec: Spec) -> usize {
        self.specs.push(spec);
        self.specs.len() - 1
    }

    /// Sends them off.
    pub fn launch(self, dependencies: &[Event]) -> Transfer {
        self.engine.transfer(dependencies, self.specs, self.options)
    }
}
