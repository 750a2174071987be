//! The threads that copy: what a receiver fetches from memory on the same host.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, PoisonError};

use rustix::io::Errno;

use crate::base::transport::TransportKind;
use crate::io::sys;
use crate::launch::peer_launch::Part;
use crate::memory::raw::Piece;
use crate::protocol::link::definition::{Definition, Source};
use crate::session::connection::{Connection, Shared};

/// Bytes of one step. A fetch that is given up stops at the end of a step.
const STEP: u64 = 512 << 10;
/// Fetches of no more are done by whoever learns of them: to hand them over costs more.
const AT_ONCE: u64 = 128 << 10;

/// Fetches of more are copied past the caches: with what else is under way they hold no more than that of both sides.
const PAST_CACHES: u64 = 8 << 20;

/// Bytes that lie in one piece on both sides.
struct Run {
    /// Where in the stream it begins, and how long it is.
    start: u64,
    len: u64,
    /// The receive in which it begins, at its first byte.
    at: usize,
    source: Source,
    /// The memory that a source within a region is in.
    shared: Option<Arc<Shared>>,
}

impl Run {
    /// Whether what follows it in the stream follows it in the sender's memory too.
    fn goes_on_in(&self, source: Source) -> bool {
        match (self.source, source) {
            (Source::Region(region, offset), Source::Region(other, next)) => {
                region == other && offset.checked_add(self.len) == Some(next)
            }
            (Source::Address(address), Source::Address(next)) => address.checked_add(self.len) == Some(next),
            _ => false,
        }
    }

    /// Whether all of it can be fetched.
    fn is_there(&self, connection: &Connection) -> bool {
        match self.source {
            Source::None => false,
            Source::Region(_, offset) => {
                let memory = self.shared.as_ref();
                memory.is_some_and(|memory| memory.piece(offset, 0, self.len as usize).is_some())
            }
            Source::Address(_) => connection.pid().is_some(),
        }
    }
}

/// What a part receives, as few runs as it is: small buffers that lie one after the other on both sides are one.
fn runs(connection: &Connection, part: &Part, definition: &Definition) -> Vec<Run> {
    let inbound = &part.work.inbound;
    let sources = definition.entries.iter().filter(|entry| !entry.outgoing).map(|entry| entry.source);
    let mut runs: Vec<Run> = Vec::new();
    for ((at, span), source) in inbound.spans.iter().enumerate().zip(sources) {
        if span.is_empty() {
            continue;
        }
        let last = runs.last_mut();
        let shared = match (&last, source) {
            (Some(Run { source: Source::Region(last, _), shared, .. }), Source::Region(region, _))
                if *last == region =>
            {
                shared.clone()
            }
            _ => connection.shared(source),
        };
        match last {
            Some(run) if inbound.is_joined(at) && run.goes_on_in(source) => {
                run.len += span.len() as u64;
            }
            _ => runs.push(Run { start: inbound.start(at), len: span.len() as u64, at, source, shared }),
        }
    }
    runs
}

/// Something to fetch.
pub struct Fetch {
    part: Arc<Part>,
    runs: Vec<Run>,
    kind: TransportKind,
    total: u64,
    /// Where the next step begins.
    next: AtomicU64,
    finished: AtomicU64,
    failed: AtomicBool,
}

/// The threads.
pub struct Copiers {
    queue: Mutex<(VecDeque<Arc<Fetch>>, bool)>,
    waiting: Condvar,
    threads: usize,
}

impl Copiers {
    /// Starts as many threads.
    pub fn start(threads: usize) -> std::io::Result<(Arc<Self>, Vec<std::thread::JoinHandle<()>>)> {
        let copiers = Arc::new(Self { queue: Mutex::default(), waiting: Condvar::new(), threads });
        let handles = (0..threads)
            .map(|n| {
                let copiers = Arc::clone(&copiers);
                std::thread::Builder::new().name(format!("muster-copy-{n}")).spawn(move || copiers.run())
            })
            .collect::<std::io::Result<Vec<_>>>()?;
        Ok((copiers, handles))
    }

    /// Fetches what a part receives, from where the peer's definition says.
    pub fn fetch(&self, connection: &Arc<Connection>, part: &Arc<Part>, definition: &Definition) {
        let runs = runs(connection, part, definition);
        let kind = if runs.iter().any(|run| matches!(run.source, Source::Address(_))) {
            TransportKind::Pvm
        } else {
            TransportKind::Shm
        };
        let total = part.work.inbound.total();
        // Whether all of it can be fetched is known before a byte is.
        let is_there = connection.can_fetch()
            && runs.iter().all(|run| run.is_there(connection))
            && runs.iter().map(|run| run.len).sum::<u64>() == total;
        if !is_there {
            return connection.fetch_failed(part, kind, Errno::INVAL, true);
        }
        let fetch = Arc::new(Fetch {
            part: Arc::clone(part),
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
        let mut queue = self.queue.lock().unwrap_or_else(PoisonError::into_inner);
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
        self.queue.lock().unwrap_or_else(PoisonError::into_inner).1 = true;
        self.waiting.notify_all();
    }

    fn run(&self) {
        loop {
            let mut queue = self.queue.lock().unwrap_or_else(PoisonError::into_inner);
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
        let connection = &self.part.connection;
        loop {
            let start = self.next.fetch_add(STEP, Ordering::Relaxed);
            if start >= self.total || self.failed.load(Ordering::Acquire) {
                return;
            }
            let len = STEP.min(self.total - start);
            let Some(visit) = self.part.visit() else { return };
            let outcome = self.step(start, len);
            match outcome {
                Ok(()) if !connection.fetch_counts() => {
                    drop(visit);
                    if !self.failed.swap(true, Ordering::AcqRel) {
                        connection.fetch_is_late(&self.part);
                    }
                    return;
                }
                Ok(()) => {
                    self.part.moves_by(self.kind);
                    connection.count_received(self.kind, len);
                    if self.finished.fetch_add(len, Ordering::AcqRel) + len == self.total
                        && let Some(at) = self.part.at()
                    {
                        // Before anybody here hears of it: they may end the process at once.
                        connection.fetched(at);
                    }
                    self.part.arrived(start, len);
                    drop(visit);
                }
                Err(error) => {
                    drop(visit);
                    if !self.failed.swap(true, Ordering::AcqRel) {
                        // Nobody else has begun, and nobody will.
                        let nothing_yet = start == 0 && self.next.swap(self.total, Ordering::Relaxed) == STEP;
                        connection.fetch_failed(&self.part, self.kind, error, nothing_yet);
                    }
                    return;
                }
            }
        }
    }

    fn step(&self, start: u64, len: u64) -> Result<(), Errno> {
        // Many small ones in one call.
        let (mut addresses, mut pieces) = (Vec::new(), Vec::new());
        let end = start + len;
        let first = self.runs.partition_point(|run| run.start + run.len <= start);
        for run in self.runs[first..].iter().take_while(|run| run.start < end) {
            let from = start.max(run.start) - run.start;
            let bytes = (end.min(run.start + run.len) - run.start - from) as usize;
            let into = self.part.work.inbound.spans[run.at].piece_across(from as usize, bytes);
            match (run.source, &run.shared) {
                (Source::Region(_, offset), Some(shared)) => {
                    let source = shared.piece(offset, from as usize, bytes).ok_or(Errno::FAULT)?;
                    if self.total > PAST_CACHES {
                        into.copy_past_caches(&source);
                    } else {
                        into.copy_from(&source);
                    }
                }
                (Source::Address(address), _) => {
                    addresses.push(address.wrapping_add(from));
                    pieces.push(into);
                }
                _ => return Err(Errno::INVAL),
            }
        }
        self.read_process(&mut addresses, &mut pieces)
    }

    /// Reads what is at each address into the piece with the same number.
    fn read_process(&self, addresses: &mut [u64], pieces: &mut [Piece<'_>]) -> Result<(), Errno> {
        let Some(pid) = self.part.connection.pid() else { return Err(Errno::PERM) };
        let mut at = 0;
        while at < pieces.len() {
            let mut done = match sys::read_process_pieces(pid, &addresses[at..], &pieces[at..])? {
                0 => return Err(Errno::FAULT),
                some => some,
            };
            while at < pieces.len() && done >= pieces[at].len() {
                done -= pieces[at].len();
                at += 1;
            }
            if done > 0 {
                // The rest of one that was read in part.
                addresses[at] += done as u64;
                pieces[at] = pieces[at].part(done, pieces[at].len() - done);
            }
        }
        Ok(())
    }
}
