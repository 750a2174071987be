//! Fetches over a fabric: this side reads the bytes of a launch from the sender's memory on another host, without work for the
//! sender's processor where the network card can do that alone.
//!
//! The reads go in pieces, of which several are under way: a cancelled launch asks for no further piece, and is quiescent once
//! the last one has ended. A piece whose read succeeded has the sender's bytes: the sender closes its endpoint before it uses its
//! memory again. Begin at [`FabricFetch::begin_or_request_push`].
#![allow(unsafe_code, reason = "reads into memory that a guard keeps")]

use std::ptr::NonNull;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, OnceLock, Weak};
use std::time::{Duration, Instant};

use muster_clock as clock;
use muster_fabric::{FabricError, RemoteBytes};

use super::contiguous_runs::{ContiguousBytes, contiguous_runs};
use super::fabric_reads::FabricReads;
use super::fetch_host::FetchHost;
use crate::base::sync::lock;
use crate::base::transport::TransportKind;
use crate::launch::peer_launch::{OwnedAccessGuard, PeerLaunch};
use crate::protocol::link::launch_definition::LaunchDefinition;

/// The most bytes of one read: many times what a network moves in the time that it takes to ask for another one, and few enough
/// for a program that waits for the end of a cancellation.
const READ_MAX: u64 = 1 << 20;
/// The most reads of a launch that are under way.
const READS_UNDER_WAY: usize = 16;
/// How often the sender is told how far a fetch has come, so that its launch is not taken for stalled; more often if the receiver's own
/// stall limit is short, because the sender's is likely to be the same.
const PROGRESS_INTERVAL: Duration = Duration::from_millis(250);

/// A fetch of the inbound bytes of one launch.
pub struct FabricFetch {
    host: Weak<dyn FetchHost>,
    launch: Arc<PeerLaunch>,
    runs: Vec<ContiguousBytes>,
    total: u64,
    /// The next read: the index of a run, and the offset in it.
    next: Mutex<(usize, u64)>,
    fetched: AtomicU64,
    /// The reads under way, and the loops that begin some.
    under_way: AtomicUsize,
    /// The first failure; no read is begun after it.
    failure: OnceLock<FabricError>,
    /// When the sender was last told of progress, and of how many bytes.
    told: Mutex<(Instant, u64)>,
}

/// One read: bytes that are contiguous on both sides.
struct Piece {
    /// The offset in the inbound stream, and the length in bytes.
    start: u64,
    len: u64,
    /// The receive in which the bytes begin, and the first of them in it.
    at: usize,
    from: u64,
    remote: RemoteBytes,
}

impl FabricFetch {
    /// Begins the fetch of a launch, if all bytes are in memory that the peer has registered. Else the peer pushes them.
    pub fn begin_or_request_push(
        host: &Arc<dyn FetchHost>,
        launch: &Arc<PeerLaunch>,
        definition: &LaunchDefinition,
    ) {
        let runs = contiguous_runs(&**host, launch, definition);
        let total = launch.lists.inbound.total();
        // The memory of receives was registered when they were prepared, unless the fabric refused it.
        let can_fetch = |run: &ContiguousBytes, reads: &FabricReads| {
            run.remote_bytes(0, run.len).is_some()
                && reads.can_read_into(launch.lists.inbound.spans[run.at].buffer().region())
        };
        let is_usable = host
            .fabric_reads()
            .is_some_and(|reads| reads.is_usable() && runs.iter().all(|run| can_fetch(run, reads)))
            && runs.iter().map(|run| run.len).sum::<u64>() == total;
        if !is_usable {
            return host.request_push(launch);
        }
        let fetch = Arc::new(Self {
            host: Arc::downgrade(host),
            launch: Arc::clone(launch),
            runs,
            total,
            next: Mutex::new((0, 0)),
            fetched: AtomicU64::new(0),
            under_way: AtomicUsize::new(1),
            failure: OnceLock::new(),
            told: Mutex::new((clock::monotonic(), 0)),
        });
        for _ in 0..READS_UNDER_WAY {
            fetch.begin_next_read(&**host);
        }
        fetch.leave(&**host);
    }

    /// Takes the next piece; none if every byte was asked for.
    fn take_piece(&self) -> Option<Piece> {
        let mut next = lock(&self.next);
        let run = self.runs.get(next.0)?;
        let offset = next.1;
        let len = READ_MAX.min(run.len - offset);
        *next = if offset + len == run.len { (next.0 + 1, 0) } else { (next.0, offset + len) };
        drop(next);
        let remote = run.remote_bytes(offset, len)?;
        Some(Piece { start: run.start + offset, len, at: run.at, from: offset, remote })
    }

    /// Begins a read, unless there are no more, one has failed, or the launch is closing.
    fn begin_next_read(self: &Arc<Self>, host: &dyn FetchHost) {
        if self.failure.get().is_some() {
            return;
        }
        let (Some(reads), Some(guard)) = (host.fabric_reads(), self.launch.access_owned()) else { return };
        let Some(piece) = self.take_piece() else { return };
        let span = &self.launch.lists.inbound.spans[piece.at];
        let is_local_needed = reads.fabric().needs_local_registration();
        let local =
            if is_local_needed { span.buffer().region().registered_with(reads.fabric()) } else { None };
        let len = piece.len as usize;
        let Some(into) =
            NonNull::new(guard.bytes().inbound_span(piece.at, piece.from as usize, len).address())
        else {
            return;
        };
        self.under_way.fetch_add(1, Ordering::AcqRel);
        let number = reads.record_begin(self.launch.limits.stall);
        let (fetch, kept, remote) = (Arc::clone(self), local.clone(), piece.remote);
        // SAFETY: the guard reserves the bytes for writing until the read has ended, and keeps them mapped; each byte is in one
        // piece. The registration is dropped before the guard.
        let begun = unsafe {
            reads.endpoint().read(into, len, local.as_deref(), remote, move |outcome| {
                drop(kept);
                fetch.finish_read(guard, number, &piece, outcome);
            })
        };
        if let Err(error) = begun {
            reads.record_end(number);
            let _first = self.failure.set(error);
            self.leave(host);
        }
    }

    fn finish_read(
        self: &Arc<Self>,
        guard: OwnedAccessGuard,
        number: u64,
        piece: &Piece,
        outcome: Result<(), FabricError>,
    ) {
        let Some(host) = self.host.upgrade() else { return };
        host.fabric_reads().iter().for_each(|reads| reads.record_end(number));
        let launch = &self.launch;
        match outcome {
            Err(error) => {
                drop(guard);
                let _first = self.failure.set(error);
            }
            // A launch that was cancelled meanwhile resolves as cancelled, also if this piece was its last one.
            Ok(()) if launch.is_closing() => drop(guard),
            Ok(()) => {
                launch.set_transport(TransportKind::Fabric);
                host.count_received(TransportKind::Fabric, piece.len);
                let fetched = self.fetched.fetch_add(piece.len, Ordering::AcqRel) + piece.len;
                if let Some(at) = launch.group_id() {
                    if fetched == self.total {
                        // The peer learns of it before this program does, because the program may exit at once.
                        host.on_group_fetched(at);
                    } else if let Some(bytes) = self.progress_to_tell(fetched) {
                        host.on_group_fetched_in_part(at, bytes);
                    }
                }
                launch.record_arrived_bytes(piece.start, piece.len);
                drop(guard);
                self.begin_next_read(&*host);
            }
        }
        self.leave(&*host);
    }

    /// Returns the bytes of which the sender is to be told now, if it is time.
    fn progress_to_tell(&self, fetched: u64) -> Option<u64> {
        let mut told = self.told.try_lock().ok()?;
        let now = clock::monotonic();
        if now.saturating_duration_since(told.0) < PROGRESS_INTERVAL.min(self.launch.limits.stall / 4) {
            return None;
        }
        let bytes = fetched.saturating_sub(told.1);
        *told = (now, fetched);
        Some(bytes)
    }

    /// Records the end of a read, or of a loop that began some. If the fetch has failed, the last one reports it: from then on nothing of
    /// it is under way, so the peer may push the bytes.
    fn leave(&self, host: &dyn FetchHost) {
        if self.under_way.fetch_sub(1, Ordering::AcqRel) == 1
            && let Some(error) = self.failure.get()
        {
            host.on_fabric_read_failed(&self.launch, error, self.fetched.load(Ordering::Acquire) == 0);
        }
    }
}
