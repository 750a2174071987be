//! The threads that fetch: a receiver copies from memory on the same host.
//!
//! They know a session by [`FetchHost`] only. The receiver copies because it can then stop, and because the
//! sender's arena can be sealed against writing by others. Sources are regions that the peer shared (mapped
//! read-only), or addresses of the other process (`process_vm_readv`); if neither is allowed, the peer sends
//! instead. Begin at [`Fetchers::fetch`].
//!
//! A side that ends a connection marks it in shared memory before it uses its sources for other things, and the
//! receiver checks the mark after each step that it has copied ([`FetchHost::fetch_counts`]). Nothing can take
//! memory back from another process that is reading it; so bytes that were read too late do not count, and neither
//! side waits for the other.
//!
//! Fetches of shared memory above [`PAST_CACHES`] are copied past the caches. A plain copy reads what it
//! overwrites, a third of all that it moves, and evicts what programs had in the caches; smaller ones are usually
//! read again at once.

use std::collections::VecDeque;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, PoisonError, Weak};

use rustix::io::Errno;

use crate::base::sync::lock;
use crate::base::transport::TransportKind;
use crate::io::sys;
use crate::launch::io_lists::LaunchBytes;
use crate::launch::peer_launch::PeerLaunch;
use crate::memory::{Mapping, PeerView, WriteView};
use crate::protocol::link::GroupId;
use crate::protocol::link::definition::{Definition, Source};

/// Bytes of one step. A fetch that is given up stops at the end of a step.
const STEP: u64 = 512 << 10;
/// The thread that learns of a fetch of no more does it: to hand it over costs more.
const AT_ONCE: u64 = 128 << 10;

/// Fetches of more are copied past the caches: with what else is under way they hold no more than that of both sides.
const PAST_CACHES: u64 = 8 << 20;

/// Memory of a peer, mapped to be read.
pub struct PeerMemory(Mapping);

impl PeerMemory {
    /// Maps the `len` bytes of what a peer sent, if they can never fault the thread that reads them.
    pub fn map(file: &OwnedFd, len: u64) -> Option<Self> {
        Mapping::sealed(file.as_fd(), usize::try_from(len).ok()?, false).map(Self)
    }

    /// Returns a view of `len` bytes at `offset + from`, if they are there.
    fn view(&self, offset: u64, from: usize, len: usize) -> Option<PeerView<'_>> {
        self.0.peer_view(usize::try_from(offset).ok()?.checked_add(from)?, len)
    }
}

/// The session of a fetch, as the threads that fetch see it.
pub trait FetchHost: Send + Sync {
    /// Returns the peer's process, if its memory can be read.
    fn pid(&self) -> Option<i32>;

    /// Returns the memory of the peer in which a source lies.
    fn peer_memory(&self, source: Source) -> Option<Arc<PeerMemory>>;

    /// Returns whether the peer's memory can be read, and it will be known whether that was in time.
    fn can_fetch(&self) -> bool;

    /// Returns whether all that was read of the peer's memory before this call counts. A side that ends a connection
    /// says so first and then uses its memory for other things, however long the other one goes on reading: neither
    /// waits for the other, and nothing that was read too late counts.
    fn fetch_counts(&self) -> bool;

    /// Says that what was fetched does not count: the connection ends, on one side or the other.
    fn fetch_is_late(&self, launch: &Arc<PeerLaunch>);

    /// Says that a launch cannot be fetched; with `nothing_yet` the peer may send it instead.
    fn fetch_failed(&self, launch: &Arc<PeerLaunch>, kind: TransportKind, error: Errno, nothing_yet: bool);

    /// Says that all that a group receives was fetched.
    fn fetched(&self, at: GroupId);

    /// Counts bytes that were fetched.
    fn count_received(&self, kind: TransportKind, bytes: u64);
}

/// Bytes that lie in one piece on both sides.
struct ContiguousBytes {
    /// Where in the stream it begins, and how long it is.
    start: u64,
    len: u64,
    /// The receive in which it begins, at its first byte.
    at: usize,
    source: Source,
    /// The memory that a source within a region is in.
    memory: Option<Arc<PeerMemory>>,
}

impl ContiguousBytes {
    /// Returns whether what follows it in the stream follows it in the sender's memory too.
    fn goes_on_in(&self, source: Source) -> bool {
        match (self.source, source) {
            (Source::Region(region, offset), Source::Region(other, next)) => {
                region == other && offset.checked_add(self.len) == Some(next)
            }
            (Source::Address(address), Source::Address(next)) => address.checked_add(self.len) == Some(next),
            _ => false,
        }
    }

    /// Returns whether all of it can be fetched.
    fn is_available(&self, host: &dyn FetchHost) -> bool {
        match self.source {
            Source::None => false,
            Source::Region(_, offset) => {
                let memory = self.memory.as_ref();
                memory.is_some_and(|memory| memory.view(offset, 0, self.len as usize).is_some())
            }
            Source::Address(_) => host.pid().is_some(),
        }
    }
}

/// Returns what a launch receives, as few runs as it is: small buffers that lie one after the other on both sides are one.
fn runs(host: &dyn FetchHost, launch: &PeerLaunch, definition: &Definition) -> Vec<ContiguousBytes> {
    let inbound = &launch.lists.inbound;
    let sources = definition.entries.iter().filter(|entry| !entry.outgoing).map(|entry| entry.source);
    let mut runs: Vec<ContiguousBytes> = Vec::new();
    for ((at, span), source) in inbound.spans.iter().enumerate().zip(sources) {
        if span.is_empty() {
            continue;
        }
        let last = runs.last_mut();
        let memory = match (&last, source) {
            (
                Some(ContiguousBytes { source: Source::Region(last, _), memory, .. }),
                Source::Region(region, _),
            ) if *last == region => memory.clone(),
            _ => host.peer_memory(source),
        };
        match last {
            Some(run) if inbound.is_joined(at) && run.goes_on_in(source) => {
                run.len += span.len() as u64;
            }
            _ => runs.push(ContiguousBytes {
                start: inbound.start(at),
                len: span.len() as u64,
                at,
                source,
                memory,
            }),
        }
    }
    runs
}

/// Something to fetch.
pub struct Fetch {
    /// Not owned: the session keeps the threads, which keep what is queued.
    host: Weak<dyn FetchHost>,
    launch: Arc<PeerLaunch>,
    runs: Vec<ContiguousBytes>,
    kind: TransportKind,
    total: u64,
    /// Where the next step begins.
    next: AtomicU64,
    finished: AtomicU64,
    failed: AtomicBool,
}

/// The threads.
pub struct Fetchers {
    queue: Mutex<(VecDeque<Arc<Fetch>>, bool)>,
    waiting: Condvar,
    threads: usize,
}

impl Fetchers {
    /// Starts as many threads.
    pub fn start(threads: usize) -> std::io::Result<(Arc<Self>, Vec<std::thread::JoinHandle<()>>)> {
        let fetchers = Arc::new(Self { queue: Mutex::default(), waiting: Condvar::new(), threads });
        let handles = (0..threads)
            .map(|n| {
                let fetchers = Arc::clone(&fetchers);
                std::thread::Builder::new().name(format!("muster-copy-{n}")).spawn(move || fetchers.run())
            })
            .collect::<std::io::Result<Vec<_>>>()?;
        Ok((fetchers, handles))
    }

    /// Fetches what a launch receives, from where the peer's definition says.
    pub fn fetch(&self, host: Arc<dyn FetchHost>, launch: &Arc<PeerLaunch>, definition: &Definition) {
        let runs = runs(&*host, launch, definition);
        let kind = if runs.iter().any(|run| matches!(run.source, Source::Address(_))) {
            TransportKind::Pvm
        } else {
            TransportKind::Shm
        };
        let total = launch.lists.inbound.total();
        // Whether all of it can be fetched is known before a byte is.
        let is_available = host.can_fetch()
            && runs.iter().all(|run| run.is_available(&*host))
            && runs.iter().map(|run| run.len).sum::<u64>() == total;
        if !is_available {
            return host.fetch_failed(launch, kind, Errno::INVAL, true);
        }
        let fetch = Arc::new(Fetch {
            host: Arc::downgrade(&host),
            launch: Arc::clone(launch),
            runs,
            kind,
            total,
            next: AtomicU64::new(0),
            finished: AtomicU64::new(0),
            failed: AtomicBool::new(false),
        });
        if total <= AT_ONCE {
            fetch.run();
            return;
        }
        let shares = self.threads.min(total.div_ceil(STEP) as usize);
        let mut queue = lock(&self.queue);
        for _ in 0..shares {
            queue.0.push_back(Arc::clone(&fetch));
        }
        drop(queue);
        if shares > 1 {
            self.waiting.notify_all();
        } else {
            self.waiting.notify_one();
        }
    }

    /// Ends the threads.
    pub fn stop(&self) {
        lock(&self.queue).1 = true;
        self.waiting.notify_all();
    }

    fn run(&self) {
        loop {
            let mut queue = lock(&self.queue);
            let fetch = loop {
                if queue.1 {
                    return;
                }
                if let Some(fetch) = queue.0.pop_front() {
                    break fetch;
                }
                queue = self.waiting.wait(queue).unwrap_or_else(PoisonError::into_inner);
            };
            drop(queue);
            fetch.run();
        }
    }
}

impl Fetch {
    /// Takes steps until there are none.
    fn run(&self) {
        let Some(host) = self.host.upgrade() else { return };
        let launch = &self.launch;
        loop {
            let start = self.next.fetch_add(STEP, Ordering::Relaxed);
            if start >= self.total || self.failed.load(Ordering::Acquire) {
                return;
            }
            let len = STEP.min(self.total - start);
            let Some(guard) = launch.access() else { return };
            let outcome = self.step(&*host, guard.bytes(), start, len);
            match outcome {
                Ok(()) if !host.fetch_counts() => {
                    drop(guard);
                    if !self.failed.swap(true, Ordering::AcqRel) {
                        host.fetch_is_late(launch);
                    }
                    return;
                }
                Ok(()) => {
                    launch.set_transport(self.kind);
                    host.count_received(self.kind, len);
                    if self.finished.fetch_add(len, Ordering::AcqRel) + len == self.total
                        && let Some(at) = launch.group()
                    {
                        // The peer hears of it before this program does, which may end the process at once.
                        host.fetched(at);
                    }
                    launch.add_arrived(start, len);
                    drop(guard);
                }
                Err(error) => {
                    drop(guard);
                    if !self.failed.swap(true, Ordering::AcqRel) {
                        // No other thread has begun, and none will.
                        let nothing_yet = start == 0 && self.next.swap(self.total, Ordering::Relaxed) == STEP;
                        host.fetch_failed(launch, self.kind, error, nothing_yet);
                    }
                    return;
                }
            }
        }
    }

    fn step(&self, host: &dyn FetchHost, bytes: LaunchBytes<'_>, start: u64, len: u64) -> Result<(), Errno> {
        // Many small ones in one call.
        let (mut addresses, mut views) = (Vec::new(), Vec::new());
        let end = start + len;
        let first = self.runs.partition_point(|run| run.start + run.len <= start);
        for run in self.runs[first..].iter().take_while(|run| run.start < end) {
            let from = start.max(run.start) - run.start;
            let len = (end.min(run.start + run.len) - run.start - from) as usize;
            let mut into = bytes.inbound_span(run.at, from as usize, len);
            match (run.source, &run.memory) {
                (Source::Region(_, offset), Some(memory)) => {
                    let source = memory.view(offset, from as usize, len).ok_or(Errno::FAULT)?;
                    into.copy_from_peer(&source, self.total > PAST_CACHES);
                }
                (Source::Address(address), _) => {
                    addresses.push(address.wrapping_add(from));
                    views.push(into);
                }
                _ => return Err(Errno::INVAL),
            }
        }
        self.read_process(host, &mut addresses, &mut views)
    }

    /// Reads what is at each address into the view with the same number.
    fn read_process(
        &self,
        host: &dyn FetchHost,
        addresses: &mut [u64],
        views: &mut [WriteView<'_>],
    ) -> Result<(), Errno> {
        let Some(pid) = host.pid() else { return Err(Errno::PERM) };
        let mut at = 0;
        while at < views.len() {
            let mut done = match sys::read_process(pid, &addresses[at..], &mut views[at..])? {
                0 => return Err(Errno::FAULT),
                some => some,
            };
            while at < views.len() && done >= views[at].len() {
                done -= views[at].len();
                at += 1;
            }
            if done > 0 {
                // The rest of one that was read in part.
                addresses[at] += done as u64;
                views[at].advance(done);
            }
        }
        Ok(())
    }
}
