//! Injects faults into wires, for tests.
//!
//! A [`FaultInjector`] wraps wires of any kind. So a test can inject the same fault into every kind of wire, and
//! needs no faulty network. The test chooses the fault and how many sends or chunks it hits; a seed chooses the byte.
//! The module exists only with the feature `faults`. Begin at [`FaultInjector`].

use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, OnceLock, Weak};
use std::time::Duration;

use super::traits::{PeerProcess, ReceivedCount, Wire, WireCapabilities, WireError, WireWaker};
use crate::base::sync::lock;
use crate::base::transport::TransportKind;
use crate::memory::{ReadView, WriteView, total_len_of_views};
use crate::protocol::frame::{FrameKind, HEADER, Header};

/// The most bytes of a send that is never truncated.
const LARGE: usize = 4096;
/// How long a call on a held wire sleeps if no reactor attends to the wire.
const UNATTENDED: Duration = Duration::from_millis(1);

/// A handle that injects faults into the wires of an engine, for tests. Give it to an engine with its
/// [`EngineConfig`](crate::EngineConfig), and keep a clone to control it. Clones are the same handle, and engines may
/// share one.
///
/// The seed decides where a fault happens, within what is requested.
#[derive(Debug, Clone)]
pub struct FaultInjector(Arc<FaultInjectorState>);

#[derive(Debug)]
struct FaultInjectorState {
    seed: AtomicU64,
    damage: AtomicUsize,
    garble: AtomicUsize,
    truncate: AtomicUsize,
    delay: AtomicU64,
    narrow: AtomicUsize,
    held: AtomicBool,
    refuse: AtomicBool,
    wires: Mutex<Vec<Weak<WireWithWaker>>>,
}

/// A wire, and the waker that it needs once it is no longer held.
struct WireWithWaker {
    wire: Box<dyn Wire>,
    waker: OnceLock<WireWaker>,
}

impl std::fmt::Debug for WireWithWaker {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("WireWithWaker").field("kind", &self.wire.kind()).finish_non_exhaustive()
    }
}

impl FaultInjector {
    /// Creates a handle that injects no faults until it is told to.
    #[must_use]
    pub fn new(seed: u64) -> Self {
        Self(Arc::new(FaultInjectorState {
            seed: AtomicU64::new(seed),
            damage: AtomicUsize::new(0),
            garble: AtomicUsize::new(0),
            truncate: AtomicUsize::new(0),
            delay: AtomicU64::new(0),
            narrow: AtomicUsize::new(0),
            held: AtomicBool::new(false),
            refuse: AtomicBool::new(false),
            wires: Mutex::default(),
        }))
    }

    /// Changes one byte of the payload in each of the next `chunks` chunks sent; under TLS, of records.
    /// Chunks without a checksum arrive changed.
    pub fn corrupt_chunks(&self, chunks: usize) {
        self.0.damage.store(chunks, Ordering::SeqCst);
    }

    /// Changes one byte in each of the next `sends` sends: of a header, of a control frame, or of a chunk.
    pub fn corrupt_sends(&self, sends: usize) {
        self.0.garble.store(sends, Ordering::SeqCst);
    }

    /// Truncates each of the next `sends` large sends: only the begin is sent, and the wire ends there.
    pub fn truncate_sends(&self, sends: usize) {
        self.0.truncate.store(sends, Ordering::SeqCst);
    }

    /// Delays every receive by `time`. The receiving thread sleeps meanwhile.
    pub fn delay_receives(&self, time: Duration) {
        self.0.delay.store(u64::try_from(time.as_micros()).unwrap_or(u64::MAX), Ordering::SeqCst);
    }

    /// Limits the bytes of each send and receive to a random number of at most `bytes`; 0 for no limit.
    pub fn limit_io_size(&self, bytes: usize) {
        self.0.narrow.store(bytes, Ordering::SeqCst);
    }

    /// Holds the wires: they accept no bytes, deliver none, and do not report their end.
    pub fn hold_wires(&self, held: bool) {
        self.0.held.store(held, Ordering::SeqCst);
        if !held {
            for wire in self.live_wires() {
                if let Some(waker) = wire.waker.get() {
                    waker.wake();
                }
            }
        }
    }

    /// Makes new wires end at once.
    pub fn set_new_wires_end_at_once(&self, refused: bool) {
        self.0.refuse.store(refused, Ordering::SeqCst);
    }

    /// Ends the chosen live wires, by their index in the order in which they were made. Returns their number.
    pub fn reset(&self, chosen: impl Fn(usize) -> bool) -> usize {
        let all = self.live_wires();
        let chosen = all.iter().enumerate().filter(|(at, _)| chosen(*at));
        chosen.map(|(_, wire)| wire.wire.end()).count()
    }

    /// Stops all faults.
    pub fn clear_faults(&self) {
        for count in [&self.0.damage, &self.0.garble, &self.0.truncate, &self.0.narrow] {
            count.store(0, Ordering::SeqCst);
        }
        self.delay_receives(Duration::ZERO);
        self.set_new_wires_end_at_once(false);
        self.hold_wires(false);
    }

    /// Wraps a wire, so that these faults happen on it.
    pub(crate) fn wrap(&self, wire: Box<dyn Wire>) -> Box<dyn Wire> {
        if self.0.refuse.load(Ordering::SeqCst) {
            wire.end();
        }
        let owned = Arc::new(WireWithWaker { wire, waker: OnceLock::new() });
        let mut wires = lock(&self.0.wires);
        wires.retain(|wire| wire.strong_count() > 0);
        wires.push(Arc::downgrade(&owned));
        Box::new(FaultyWire { owned, faults: Arc::clone(&self.0) })
    }

    fn live_wires(&self) -> Vec<Arc<WireWithWaker>> {
        lock(&self.0.wires).iter().filter_map(Weak::upgrade).collect()
    }
}

fn consume_one_fault(count: &AtomicUsize) -> bool {
    count.load(Ordering::Relaxed) > 0
        && count.fetch_update(Ordering::SeqCst, Ordering::SeqCst, |left| left.checked_sub(1)).is_ok()
}

impl FaultInjectorState {
    /// Returns a random number below `bound`.
    fn random_below(&self, bound: usize) -> usize {
        // SplitMix64, whose state is a counter: several threads may draw at once.
        const STEP: u64 = 0x9e37_79b9_7f4a_7c15;
        let mut drawn = self.seed.fetch_add(STEP, Ordering::Relaxed).wrapping_add(STEP);
        drawn = (drawn ^ (drawn >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        drawn = (drawn ^ (drawn >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((drawn ^ (drawn >> 31)) % bound.max(1) as u64) as usize
    }

    /// Returns how many of `len` bytes a call may move.
    fn limited_len(&self, len: usize) -> usize {
        match self.narrow.load(Ordering::Relaxed) {
            0 => len,
            narrow => len.min(1 + narrow / 2 + self.random_below(narrow.div_ceil(2))),
        }
    }
}

/// A wire into which faults are injected.
struct FaultyWire {
    owned: Arc<WireWithWaker>,
    faults: Arc<FaultInjectorState>,
}

impl FaultyWire {
    /// Returns [`WireError::Later`] while the wire is held.
    fn check_held(&self) -> Result<(), WireError> {
        if !self.faults.held.load(Ordering::SeqCst) {
            return Ok(());
        }
        if self.owned.waker.get().is_none() {
            std::thread::sleep(UNATTENDED);
        }
        Err(WireError::Later)
    }

    /// Delays a receive; returns [`WireError::Later`] while the wire is held.
    fn delay_receive(&self) -> Result<(), WireError> {
        self.check_held()?;
        let delay = self.faults.delay.load(Ordering::Relaxed);
        if delay > 0 {
            std::thread::sleep(Duration::from_micros(delay));
        }
        Ok(())
    }

    /// Sends the views with the byte at `at` changed. Returns whether that byte was sent, and the result of
    /// the send.
    fn send_damaged(&self, views: &[ReadView<'_>], at: usize) -> (bool, Result<usize, WireError>) {
        let mut before = 0;
        let mut copy = Vec::new();
        let Some(hit) = views.iter().position(|piece| {
            before += piece.len();
            at < before
        }) else {
            return (false, self.owned.wire.send(views));
        };
        before -= views[hit].len();
        views[hit].with_bytes(|bytes| copy.extend_from_slice(bytes));
        copy[at - before] ^= 0x10;
        let mut harmed = views.to_vec();
        harmed[hit] = ReadView::of_slice(&copy);
        let sent = self.owned.wire.send(&harmed);
        (sent.as_ref().is_ok_and(|sent| *sent > at), sent)
    }
}

/// The first bytes of a TLS record of application data, and the length of its header.
const RECORD: ([u8; 3], usize) = ([23, 3, 3], 5);

/// Returns the offset of the payload if the views are a chunk or a TLS record.
fn payload_offset(views: &[ReadView<'_>]) -> Option<usize> {
    let first = views.first().filter(|first| first.len() >= HEADER)?;
    first.with_bytes(|bytes| {
        if bytes.starts_with(&RECORD.0) {
            return Some(RECORD.1);
        }
        let header = bytes.first_chunk::<HEADER>()?;
        let is_chunk = Header::decode(header).is_ok_and(|header| header.kind == FrameKind::Data);
        is_chunk.then_some(HEADER)
    })
}

/// Returns the first `most` bytes of the views.
fn truncate_read_views<'a>(views: &[ReadView<'a>], mut most: usize) -> Vec<ReadView<'a>> {
    let mut kept = Vec::new();
    for view in views {
        if most == 0 {
            break;
        }
        kept.push(view.part(0, most));
        most -= view.len().min(most);
    }
    kept
}

/// Returns the first `most` bytes of the views.
fn truncate_write_views<'a>(views: &'a mut [WriteView<'_>], mut most: usize) -> Vec<WriteView<'a>> {
    let mut kept = Vec::new();
    for view in views {
        if most == 0 {
            break;
        }
        let len = view.len().min(most);
        kept.push(view.part(0, most));
        most -= len;
    }
    kept
}

impl Wire for FaultyWire {
    fn kind(&self) -> TransportKind {
        self.owned.wire.kind()
    }

    fn capabilities(&self) -> WireCapabilities {
        self.owned.wire.capabilities()
    }

    fn peer(&self) -> Option<PeerProcess> {
        self.owned.wire.peer()
    }

    fn descriptor(&self) -> BorrowedFd<'_> {
        self.owned.wire.descriptor()
    }

    fn send(&self, views: &[ReadView<'_>]) -> Result<usize, WireError> {
        self.check_held()?;
        let (wire, faults) = (&self.owned.wire, &self.faults);
        let total: usize = views.iter().map(ReadView::len).sum();
        if total > LARGE && consume_one_fault(&faults.truncate) {
            let sent = wire.send(&truncate_read_views(views, 1 + faults.random_below(total - 1)));
            wire.end();
            return sent;
        }
        let most = faults.limited_len(total);
        let kept = if most < total { Some(truncate_read_views(views, most)) } else { None };
        let views = kept.as_deref().unwrap_or(views);
        let (begins, count) = match payload_offset(views).filter(|begins| *begins < most) {
            Some(begins) if consume_one_fault(&faults.damage) => (begins, &faults.damage),
            _ if most > 0 && consume_one_fault(&faults.garble) => (0, &faults.garble),
            _ => return wire.send(views),
        };
        let (done, sent) = self.send_damaged(views, begins + faults.random_below(most - begins));
        if !done {
            count.fetch_add(1, Ordering::SeqCst);
        }
        sent
    }

    fn send_with_descriptors(
        &self,
        bytes: &[u8],
        descriptors: &[BorrowedFd<'_>],
    ) -> Result<usize, WireError> {
        self.check_held()?;
        self.owned.wire.send_with_descriptors(&bytes[..self.faults.limited_len(bytes.len())], descriptors)
    }

    fn receive(&self, views: &mut [WriteView<'_>]) -> Result<ReceivedCount, WireError> {
        self.delay_receive()?;
        let total_len_of_views = total_len_of_views(views);
        let most = self.faults.limited_len(total_len_of_views);
        if most < total_len_of_views {
            self.owned.wire.receive(&mut truncate_write_views(views, most))
        } else {
            self.owned.wire.receive(views)
        }
    }

    fn receive_with_descriptors(
        &self,
        into: &mut [u8],
        descriptors: &mut Vec<OwnedFd>,
    ) -> Result<ReceivedCount, WireError> {
        self.delay_receive()?;
        let most = self.faults.limited_len(into.len());
        self.owned.wire.receive_with_descriptors(&mut into[..most], descriptors)
    }

    fn discard(&self, len: usize) -> Result<usize, WireError> {
        self.delay_receive()?;
        self.owned.wire.discard(self.faults.limited_len(len))
    }

    fn set_waker(&self, waker: WireWaker) {
        let _once = self.owned.waker.set(waker);
    }

    fn end(&self) {
        self.owned.wire.end();
    }
}
