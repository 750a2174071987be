//! The reads of one connection over a fabric: its endpoint, and whether it can be used.
//!
//! Each side of a connection has one, and tells the other the address of its endpoint. The side that dialled then reads a word of
//! the other's memory, which holds its incarnation. If that succeeds, both sides read each other's memory (`fabric_fetch.rs`);
//! until then, and if it never does, bytes go through sockets. So only one side makes the connection of the fabric: providers of
//! libfabric 1.17 lose reads if both begin at once.
//!
//! Closing the endpoint proves that no read of either side through it is under way: a side that ends the
//! connection does that before it uses its memory again. A side whose read has failed once reads no more on this connection.
//! Begin at [`FabricReads::open`].
#![allow(unsafe_code, reason = "registers and reads into memory that it keeps")]

use std::collections::BTreeMap;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use muster_clock as clock;
use muster_fabric::{Fabric, FabricEndpoint, FabricError, RegisteredMemory, RemoteBytes};

use crate::base::sync::lock;
use crate::memory::MemoryRegion;

/// A read is overdue after the stall limit of its launch and this part of it: the launch fails first, with its own reason.
const GRACE: u32 = 16;

/// The reads of one connection over a fabric.
#[derive(Debug)]
pub struct FabricReads {
    fabric: Fabric,
    endpoint: FabricEndpoint,
    words: Arc<ProbeWords>,
    /// Whether the peer's address is known.
    is_connected: AtomicBool,
    /// Whether a read has succeeded.
    is_proven: AtomicBool,
    has_failed: AtomicBool,
    is_ending: AtomicBool,
    under_way: Mutex<ReadsUnderWay>,
    next_read: AtomicU64,
}

/// The reads under way.
#[derive(Debug, Default)]
struct ReadsUnderWay {
    /// When each read began, and the time after which it is overdue, by its number.
    begun: BTreeMap<u64, (Instant, Duration)>,
    /// When a read last ended. A read waits for those before it, so until then none was overdue.
    last_end: Option<Instant>,
}

/// Two registered words: this side's incarnation, which the peer reads, and the place for the peer's.
#[derive(Debug)]
struct ProbeWords {
    /// Dropped before the memory: fields are dropped in their order.
    registered: RegisteredMemory,
    words: Box<[AtomicU64; 2]>,
}

impl ProbeWords {
    fn register(fabric: &Fabric, incarnation: u64) -> Result<Self, FabricError> {
        let words = Box::new([AtomicU64::new(incarnation), AtomicU64::new(0)]);
        let base = NonNull::from(&*words).cast();
        // SAFETY: the words stay where they are until this is dropped, after the registration.
        let registered = unsafe { fabric.register(base, size_of_val(&*words))? };
        Ok(Self { registered, words })
    }
}

impl FabricReads {
    /// Opens an endpoint, for a side of this incarnation.
    ///
    /// # Errors
    /// Returns the error of the library.
    pub fn open(fabric: &Fabric, incarnation: u64) -> Result<Self, FabricError> {
        Ok(Self {
            fabric: fabric.clone(),
            endpoint: fabric.open_endpoint()?,
            words: Arc::new(ProbeWords::register(fabric, incarnation)?),
            is_connected: AtomicBool::new(false),
            is_proven: AtomicBool::new(false),
            has_failed: AtomicBool::new(false),
            is_ending: AtomicBool::new(false),
            under_way: Mutex::default(),
            next_read: AtomicU64::new(0),
        })
    }

    /// Returns the fabric.
    pub const fn fabric(&self) -> &Fabric {
        &self.fabric
    }

    /// Returns the endpoint.
    pub const fn endpoint(&self) -> &FabricEndpoint {
        &self.endpoint
    }

    /// Returns whether bytes can be read into a region: some providers want it registered. Their first call for a region takes long: it
    /// locks its pages.
    pub fn can_read_into(&self, region: &MemoryRegion) -> bool {
        !self.fabric.needs_local_registration() || region.registered_with(&self.fabric).is_some()
    }

    /// Returns what the peer needs to know, as the payload of a frame.
    ///
    /// # Errors
    /// Returns the error of the library.
    pub fn announcement(&self) -> Result<Vec<u8>, FabricError> {
        let word = self.words.registered.remote();
        Ok([&word.key.to_le_bytes(), &word.address.to_le_bytes(), &self.endpoint.address()?[..]].concat())
    }

    /// Takes the peer's announcement. If this side dialled, it reads the peer's incarnation, and calls `then` with whether it
    /// is this one. That is on another thread, which must not wait.
    pub fn connect(
        &self,
        announcement: &[u8],
        dialled: bool,
        peer: u64,
        then: impl FnOnce(bool) + Send + 'static,
    ) {
        let Some((word, address)) = announcement.split_first_chunk::<16>() else {
            return tracing::warn!("the peer's announcement of its endpoint of the fabric is too short");
        };
        if self.is_connected.load(Ordering::Acquire) {
            return;
        }
        let begun = self.endpoint.connect(address).and_then(|()| {
            self.is_connected.store(true, Ordering::Release);
            let number = |at: usize| word[at..].first_chunk().map_or(0, |bytes| u64::from_le_bytes(*bytes));
            let from = RemoteBytes { key: number(0), address: number(8) };
            if dialled { self.begin_probe(from, peer, then) } else { Ok(()) }
        });
        if let Err(error) = begun {
            self.has_failed.store(true, Ordering::Release);
            tracing::warn!(%error, "the peer cannot be reached over the fabric: bytes go through sockets");
        }
    }

    fn begin_probe(
        &self,
        from: RemoteBytes,
        peer: u64,
        then: impl FnOnce(bool) + Send + 'static,
    ) -> Result<(), FabricError> {
        let words = Arc::clone(&self.words);
        let into = NonNull::from(&words.words[1]).cast();
        let kept = Arc::clone(&words);
        // SAFETY: the word is kept, registered, until the read has ended, and nothing else uses it before.
        unsafe {
            self.endpoint.read(into, size_of::<u64>(), Some(&words.registered), from, move |outcome| {
                then(outcome.is_ok() && kept.words[1].load(Ordering::Acquire) == peer);
            })
        }
    }

    /// Records whether a read has succeeded, on this side or on the other one.
    pub fn record_proof(&self, works: bool) {
        if works {
            self.is_proven.store(true, Ordering::Release);
        } else if !self.is_ending() && !self.has_failed.swap(true, Ordering::AcqRel) {
            tracing::warn!("the peer's incarnation cannot be read over the fabric: bytes go through sockets");
        }
    }

    /// Returns whether the peer's memory can be read.
    pub fn is_usable(&self) -> bool {
        self.is_connected.load(Ordering::Acquire)
            && self.is_proven.load(Ordering::Acquire)
            && !self.has_failed.load(Ordering::Acquire)
            && !self.is_ending()
    }

    /// Records that a read failed: no further ones are begun.
    pub fn give_up(&self, error: &FabricError) {
        if !self.has_failed.swap(true, Ordering::AcqRel) {
            tracing::warn!(%error, "a read over the fabric failed: the bytes of later launches go through sockets");
        }
    }

    /// Records a read that begins, of a launch with this stall limit. Returns its number, for [`Self::record_end`].
    pub fn record_begin(&self, stall: Duration) -> u64 {
        let number = self.next_read.fetch_add(1, Ordering::Relaxed);
        lock(&self.under_way).begun.insert(number, (clock::monotonic(), stall + stall / GRACE));
        number
    }

    /// Records that a read has ended.
    pub fn record_end(&self, number: u64) {
        let mut under_way = lock(&self.under_way);
        under_way.begun.remove(&number);
        under_way.last_end = Some(clock::monotonic());
    }

    /// Returns when the first of the reads under way is overdue, if no other one ends before. Only the end of the connection ends it
    /// then, and with it the wait of a launch that was cancelled.
    pub fn first_limit(&self) -> Option<Instant> {
        let under_way = lock(&self.under_way);
        let limit = |(began, allowed): &(Instant, Duration)| {
            under_way.last_end.map_or(*began, |end| end.max(*began)) + *allowed
        };
        under_way.begun.values().map(limit).min()
    }

    /// Returns whether the connection is ending: the failures of reads are its consequences.
    pub fn is_ending(&self) -> bool {
        self.is_ending.load(Ordering::Acquire)
    }

    /// Ends all reads of both sides. When it returns true, none is under way; otherwise the library did not close the endpoint, and
    /// memory of this side may still be read and written. The caller holds no lock that the end of a read may take.
    #[must_use]
    pub fn end(&self) -> bool {
        self.is_ending.store(true, Ordering::Release);
        let is_closed = self.endpoint.close();
        if !is_closed {
            tracing::error!(
                "the fabric did not close an endpoint: the memory of its launches stays reserved"
            );
        }
        is_closed
    }
}
