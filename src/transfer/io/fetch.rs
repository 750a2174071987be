//! Fetching, and the threads that fetch, which also copy within this task (`local_copy.rs`). To *fetch* means that the receiver copies bytes from the memory of a sender
//! on the same host.
//!
//! Fetches call their session only through [`FetchHost`]. The receiver makes the copy, so it can stop at any time,
//! and the sender's arena can be sealed against writers. A source is a region that the peer shared (mapped
//! read-only), or an address in the other process (`process_vm_readv`). If neither is allowed, the peer sends the
//! bytes over a socket. Bytes for a GPU are fetched by the GPU (`device_fetch.rs`), and those of a peer on another host over a fabric
//! (`fabric_fetch.rs`) or, between GPUs, through NCCL (`clique`). Begin at [`FetchThreadPool::fetch_or_enqueue`].
//!
//! Before a sender reuses a source buffer at the end of a connection, it marks the connection closed in shared
//! memory. The receiver copies in steps, and checks the mark after each step
//! ([`FetchHost::fetched_bytes_are_valid`]). If the mark is set, the receiver discards the step and fails the launch.
//! The sender cannot stop another process from reading shared memory. But because of the mark, bytes that were read
//! too late do not count, and neither side waits for the other.
//!
//! Fetches of shared memory above [`PAST_CACHES`] bypass the processor's caches. A plain copy also reads the memory
//! that it overwrites, which is a third of its memory traffic, and evicts other data from the caches. Smaller fetches
//! do not bypass the caches, because programs usually read the received bytes at once.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, PoisonError, Weak};

use muster_gpu::is_reporting_thread;
use rustix::io::Errno;

use super::contiguous_runs::{ContiguousBytes, contiguous_runs};
use super::device_fetch::DeviceFetch;
use super::fabric_fetch::FabricFetch;
use super::fetch_host::FetchHost;
use crate::base::sync::lock;
use crate::base::transport::TransportKind;
use crate::io::sys;
use crate::launch::launch_spans::LaunchBytes;
use crate::launch::peer_launch::PeerLaunch;
use crate::memory::WriteView;
use crate::protocol::link::launch_definition::{FetchSource, LaunchDefinition};

/// The bytes of one step. A cancelled fetch stops at the end of a step.
pub const STEP: u64 = 512 << 10;
/// The most bytes of a fetch that the thread which learns of it performs itself, because to hand it over
/// would cost more.
pub const AT_ONCE: u64 = 128 << 10;

/// The bytes above which a fetch bypasses the caches: they hold no more of both sides beside the other work
/// of the host.
const PAST_CACHES: u64 = 8 << 20;

/// A fetch of the inbound bytes of one launch.
pub struct LaunchFetch {
    /// The session. It is a weak reference, because the session owns the threads, and they own the queue.
    host: Weak<dyn FetchHost>,
    launch: Arc<PeerLaunch>,
    runs: Vec<ContiguousBytes>,
    kind: TransportKind,
    total: u64,
    /// The offset at which the next step begins.
    next: AtomicU64,
    finished: AtomicU64,
    failed: AtomicBool,
}

/// The next job of a fetching thread.
enum FetchJob {
    /// Performs steps of a fetch.
    Steps(Arc<LaunchFetch>),
    /// Calls a function.
    Call(Box<dyn FnOnce() + Send>),
}

/// The fetching threads and their queue.
pub struct FetchThreadPool {
    queue: Mutex<(VecDeque<FetchJob>, bool)>,
    waiting: Condvar,
    threads: usize,
}

impl FetchThreadPool {
    /// Creates the queue of so many threads.
    pub fn new(threads: usize) -> Arc<Self> {
        Arc::new(Self { queue: Mutex::default(), waiting: Condvar::new(), threads })
    }

    /// Starts the threads.
    pub fn start(self: &Arc<Self>) -> std::io::Result<Vec<std::thread::JoinHandle<()>>> {
        let start = |n| {
            let fetchers = Arc::clone(self);
            std::thread::Builder::new().name(format!("muster-copy-{n}")).spawn(move || fetchers.run())
        };
        (0..self.threads).map(start).collect()
    }

    /// Fetches the inbound bytes of a launch from the sources in the peer's definition.
    pub fn fetch_or_enqueue(
        &self,
        host: Arc<dyn FetchHost>,
        launch: &Arc<PeerLaunch>,
        definition: &LaunchDefinition,
    ) {
        if launch.lists.inbound.gpu().is_some() {
            return match host.clique_exchange() {
                Some(exchange) => exchange.fetch_or_request_push(&*host, launch, definition),
                None => self.begin_between_gpus(host, launch, definition),
            };
        }
        if host.fabric_reads().is_some() {
            return FabricFetch::begin_or_request_push(&host, launch, definition);
        }
        let runs = contiguous_runs(&*host, launch, definition);
        let kind = if runs.iter().any(|run| matches!(run.source, FetchSource::Address(_))) {
            TransportKind::Pvm
        } else {
            TransportKind::Shm
        };
        let total = launch.lists.inbound.total();
        // A fetch must be able to complete before it begins, because a push can replace it only before the
        // first byte.
        let is_available = host.can_fetch()
            && runs.iter().all(|run| run.is_available(&*host))
            && runs.iter().map(|run| run.len).sum::<u64>() == total;
        if !is_available {
            return host.on_fetch_failed(launch, kind, Errno::INVAL, true);
        }
        let fetch = Arc::new(LaunchFetch {
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
            fetch.fetch_until_done();
            return;
        }
        let shares = self.threads.min(total.div_ceil(STEP) as usize);
        let mut queue = lock(&self.queue);
        for _ in 0..shares {
            queue.0.push_back(FetchJob::Steps(Arc::clone(&fetch)));
        }
        drop(queue);
        if shares > 1 {
            self.waiting.notify_all();
        } else {
            self.waiting.notify_one();
        }
    }

    /// Begins the fetch of a launch whose bytes are received by GPUs: at once, or on a fetching thread if this thread reports
    /// copies, because it must not wait while the driver maps memory.
    fn begin_between_gpus(
        &self,
        host: Arc<dyn FetchHost>,
        launch: &Arc<PeerLaunch>,
        definition: &LaunchDefinition,
    ) {
        if !is_reporting_thread() {
            return DeviceFetch::begin_or_request_push(&host, launch, definition);
        }
        let (host, launch, definition) = (Arc::downgrade(&host), Arc::clone(launch), definition.clone());
        let job = move || {
            if let Some(host) = host.upgrade() {
                DeviceFetch::begin_or_request_push(&host, &launch, &definition);
            }
        };
        self.run_soon(Box::new(job));
    }

    /// Calls `work` on a fetching thread. If the threads end before, `work` is dropped.
    pub fn run_soon(&self, work: Box<dyn FnOnce() + Send>) {
        let mut queue = lock(&self.queue);
        if queue.1 {
            drop(queue);
            return drop(work);
        }
        queue.0.push_back(FetchJob::Call(work));
        drop(queue);
        self.waiting.notify_one();
    }

    /// Returns the number of threads.
    pub const fn len(&self) -> usize {
        self.threads
    }

    /// Ends the threads. Jobs that have not begun are dropped, with the guards that they hold.
    pub fn request_stop(&self) {
        let mut queue = lock(&self.queue);
        queue.1 = true;
        let dropped = std::mem::take(&mut queue.0);
        drop(queue);
        self.waiting.notify_all();
        drop(dropped);
    }

    fn run(&self) {
        loop {
            let mut queue = lock(&self.queue);
            let job = loop {
                if queue.1 {
                    return;
                }
                if let Some(job) = queue.0.pop_front() {
                    break job;
                }
                queue = self.waiting.wait(queue).unwrap_or_else(PoisonError::into_inner);
            };
            drop(queue);
            match job {
                FetchJob::Steps(fetch) => fetch.fetch_until_done(),
                FetchJob::Call(work) => work(),
            }
        }
    }
}

impl LaunchFetch {
    /// Performs steps until there are none left.
    fn fetch_until_done(&self) {
        let Some(host) = self.host.upgrade() else { return };
        let launch = &self.launch;
        loop {
            let start = self.next.fetch_add(STEP, Ordering::Relaxed);
            if start >= self.total || self.failed.load(Ordering::Acquire) {
                return;
            }
            let len = STEP.min(self.total - start);
            let Some(guard) = launch.access() else { return };
            let outcome = self.fetch_piece(&*host, guard.bytes(), start, len);
            match outcome {
                Ok(()) if !host.fetched_bytes_are_valid() => {
                    drop(guard);
                    if !self.failed.swap(true, Ordering::AcqRel) {
                        host.on_fetch_invalidated(launch);
                    }
                    return;
                }
                Ok(()) => {
                    launch.set_transport(self.kind);
                    host.count_received(self.kind, len);
                    if self.finished.fetch_add(len, Ordering::AcqRel) + len == self.total
                        && let Some(at) = launch.group_id()
                    {
                        // The peer learns of it before this program does, because the program may exit at
                        // once.
                        host.on_group_fetched(at);
                    }
                    launch.record_arrived_bytes(start, len);
                    drop(guard);
                }
                Err(error) => {
                    drop(guard);
                    if !self.failed.swap(true, Ordering::AcqRel) {
                        // No other thread has begun a step, and none will.
                        let nothing_yet = start == 0 && self.next.swap(self.total, Ordering::Relaxed) == STEP;
                        host.on_fetch_failed(launch, self.kind, error, nothing_yet);
                    }
                    return;
                }
            }
        }
    }

    fn fetch_piece(
        &self,
        host: &dyn FetchHost,
        bytes: LaunchBytes<'_>,
        start: u64,
        len: u64,
    ) -> Result<(), Errno> {
        // Small runs are read with one system call together.
        let (mut addresses, mut views) = (Vec::new(), Vec::new());
        let end = start + len;
        let first = self.runs.partition_point(|run| run.start + run.len <= start);
        for run in self.runs[first..].iter().take_while(|run| run.start < end) {
            let from = start.max(run.start) - run.start;
            let len = (end.min(run.start + run.len) - run.start - from) as usize;
            let mut into = bytes.inbound_span(run.at, from as usize, len);
            match (run.source, &run.memory) {
                (FetchSource::Region(_, offset), Some(memory)) => {
                    let source = memory.view_of_peer_bytes(offset, from as usize, len).ok_or(Errno::FAULT)?;
                    into.copy_from_peer(&source, self.total > PAST_CACHES);
                }
                (FetchSource::Address(address), _) => {
                    addresses.push(address.wrapping_add(from));
                    views.push(into);
                }
                _ => return Err(Errno::INVAL),
            }
        }
        self.read_memory_of_peer(host, &mut addresses, &mut views)
    }

    /// Reads the memory at each address into the view with the same index.
    fn read_memory_of_peer(
        &self,
        host: &dyn FetchHost,
        addresses: &mut [u64],
        views: &mut [WriteView<'_>],
    ) -> Result<(), Errno> {
        let Some(readable_peer_pid) = host.readable_peer_pid() else { return Err(Errno::PERM) };
        let mut at = 0;
        while at < views.len() {
            let mut done =
                match sys::read_process_memory(readable_peer_pid, &addresses[at..], &mut views[at..])? {
                    0 => return Err(Errno::FAULT),
                    some => some,
                };
            while at < views.len() && done >= views[at].len() {
                done -= views[at].len();
                at += 1;
            }
            if done > 0 {
                // The view that was filled in part continues where it stopped.
                addresses[at] += done as u64;
                views[at].advance(done);
            }
        }
        Ok(())
    }
}
