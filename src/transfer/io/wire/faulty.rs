//! Wires with faults on purpose: for tests of what an engine makes of them.
//!
//! The wrapper works around any kind of wire, so the same fault is tried over every kind, at the very call that it
//! should hit, without a second network in between. It exists with the feature `faults` only. Begin at [`Faults`].

use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, OnceLock, Weak};
use std::time::Duration;

use super::traits::{Process, Received, Wire, WireCapabilities, WireError, WireWaker};
use crate::base::sync::lock;
use crate::base::transport::TransportKind;
use crate::memory::{ReadView, WriteView, total};
use crate::protocol::frame::{HEADER, Header, Kind};

/// Sends of no more than this are not cut off: small ones have no end to lose.
const LARGE: usize = 4096;
/// How long a wire that is held is left alone while no thread attends to it.
const UNATTENDED: Duration = Duration::from_millis(1);

/// What goes wrong on the wires of an engine, on purpose. For tests: give it to an engine with its
/// [`Config`](crate::Config), and keep a clone to say what is to happen. Clones are the same handle, and engines may
/// share one.
///
/// Where something happens, within what is asked for, comes of the seed.
#[derive(Debug, Clone)]
pub struct Faults(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    seed: AtomicU64,
    damage: AtomicUsize,
    garble: AtomicUsize,
    truncate: AtomicUsize,
    delay: AtomicU64,
    narrow: AtomicUsize,
    held: AtomicBool,
    refuse: AtomicBool,
    wires: Mutex<Vec<Weak<Owned>>>,
}

/// A wire, and what it takes to go on after it was held.
struct Owned {
    wire: Box<dyn Wire>,
    waker: OnceLock<WireWaker>,
}

impl std::fmt::Debug for Owned {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Owned").field("kind", &self.wire.kind()).finish_non_exhaustive()
    }
}

impl Faults {
    /// Makes a handle by which all is well, until it is told otherwise.
    #[must_use]
    pub fn new(seed: u64) -> Self {
        Self(Arc::new(Inner {
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

    /// Changes a byte of the payload in each of the next so many chunks that are sent; under TLS, of records. Where
    /// chunks carry no checksum it is not noticed.
    pub fn damage(&self, chunks: usize) {
        self.0.damage.store(chunks, Ordering::SeqCst);
    }

    /// Changes a byte in each of the next so many sends, whatever they are: of a header, of a control frame, of a chunk.
    pub fn garble(&self, sends: usize) {
        self.0.garble.store(sends, Ordering::SeqCst);
    }

    /// Cuts off each of the next so many large sends: only the beginning leaves, and the wire ends there.
    pub fn truncate(&self, sends: usize) {
        self.0.truncate.store(sends, Ordering::SeqCst);
    }

    /// Delays all that is received by so much. The thread that receives sleeps meanwhile.
    pub fn delay(&self, time: Duration) {
        self.0.delay.store(u64::try_from(time.as_micros()).unwrap_or(u64::MAX), Ordering::SeqCst);
    }

    /// Limits how many bytes a call sends or receives, at random below this; 0 for any number.
    pub fn narrow(&self, bytes: usize) {
        self.0.narrow.store(bytes, Ordering::SeqCst);
    }

    /// Holds the wires: they take no bytes and give none, and their end is not seen either.
    pub fn hold(&self, held: bool) {
        self.0.held.store(held, Ordering::SeqCst);
        if !held {
            for wire in self.living() {
                if let Some(waker) = wire.waker.get() {
                    waker.wake();
                }
            }
        }
    }

    /// Wires that are made from now on end at once.
    pub fn refuse(&self, refused: bool) {
        self.0.refuse.store(refused, Ordering::SeqCst);
    }

    /// Ends the chosen ones of the wires that there are, by their number in the order in which they were made; returns how
    /// many.
    pub fn reset(&self, chosen: impl Fn(usize) -> bool) -> usize {
        let all = self.living();
        let chosen = all.iter().enumerate().filter(|(at, _)| chosen(*at));
        chosen.map(|(_, wire)| wire.wire.end()).count()
    }

    /// Makes all well again.
    pub fn heal(&self) {
        for count in [&self.0.damage, &self.0.garble, &self.0.truncate, &self.0.narrow] {
            count.store(0, Ordering::SeqCst);
        }
        self.delay(Duration::ZERO);
        self.refuse(false);
        self.hold(false);
    }

    /// Returns a wire on which these faults happen.
    pub(crate) fn around(&self, wire: Box<dyn Wire>) -> Box<dyn Wire> {
        if self.0.refuse.load(Ordering::SeqCst) {
            wire.end();
        }
        let owned = Arc::new(Owned { wire, waker: OnceLock::new() });
        let mut wires = lock(&self.0.wires);
        wires.retain(|wire| wire.strong_count() > 0);
        wires.push(Arc::downgrade(&owned));
        Box::new(Faulty { owned, faults: Arc::clone(&self.0) })
    }

    fn living(&self) -> Vec<Arc<Owned>> {
        lock(&self.0.wires).iter().filter_map(Weak::upgrade).collect()
    }
}

fn consume(count: &AtomicUsize) -> bool {
    count.load(Ordering::Relaxed) > 0
        && count.fetch_update(Ordering::SeqCst, Ordering::SeqCst, |left| left.checked_sub(1)).is_ok()
}

impl Inner {
    /// Returns a number below `bound`.
    fn below(&self, bound: usize) -> usize {
        // SplitMix64: its state is a counter, so that threads may draw at once.
        const STEP: u64 = 0x9e37_79b9_7f4a_7c15;
        let mut drawn = self.seed.fetch_add(STEP, Ordering::Relaxed).wrapping_add(STEP);
        drawn = (drawn ^ (drawn >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        drawn = (drawn ^ (drawn >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((drawn ^ (drawn >> 31)) % bound.max(1) as u64) as usize
    }

    /// Returns how much a call may take of so much.
    fn most(&self, len: usize) -> usize {
        match self.narrow.load(Ordering::Relaxed) {
            0 => len,
            narrow => len.min(1 + narrow / 2 + self.below(narrow.div_ceil(2))),
        }
    }
}

/// A wire on which faults happen.
struct Faulty {
    owned: Arc<Owned>,
    faults: Arc<Inner>,
}

impl Faulty {
    /// Returns whether it may do anything now.
    fn ready(&self) -> Result<(), WireError> {
        if !self.faults.held.load(Ordering::SeqCst) {
            return Ok(());
        }
        if self.owned.waker.get().is_none() {
            std::thread::sleep(UNATTENDED);
        }
        Err(WireError::Later)
    }

    /// Delays, and fails while it is held, before something is received.
    fn receives(&self) -> Result<(), WireError> {
        self.ready()?;
        let delay = self.faults.delay.load(Ordering::Relaxed);
        if delay > 0 {
            std::thread::sleep(Duration::from_micros(delay));
        }
        Ok(())
    }

    /// Sends the views with one byte changed, the one at `at`. Returns whether it left, and how many did.
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
        views[hit].read(|bytes| copy.extend_from_slice(bytes));
        copy[at - before] ^= 0x10;
        let mut harmed = views.to_vec();
        harmed[hit] = ReadView::of(&copy);
        let sent = self.owned.wire.send(&harmed);
        (sent.as_ref().is_ok_and(|sent| *sent > at), sent)
    }
}

/// The first bytes of a record of TLS that carries data, and how long its head is.
const RECORD: ([u8; 3], usize) = ([23, 3, 3], 5);

/// Returns where the payload of a chunk or of a record begins, if that is what the views are.
fn payload(views: &[ReadView<'_>]) -> Option<usize> {
    let first = views.first().filter(|first| first.len() >= HEADER)?;
    first.read(|bytes| {
        if bytes.starts_with(&RECORD.0) {
            return Some(RECORD.1);
        }
        let header = bytes.first_chunk::<HEADER>()?;
        let is_chunk = Header::decode(header).is_ok_and(|header| header.kind == Kind::Data);
        is_chunk.then_some(HEADER)
    })
}

/// Returns the first `most` bytes of the views.
fn cut<'a>(views: &[ReadView<'a>], mut most: usize) -> Vec<ReadView<'a>> {
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
fn cut_mut<'a>(views: &'a mut [WriteView<'_>], mut most: usize) -> Vec<WriteView<'a>> {
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

impl Wire for Faulty {
    fn kind(&self) -> TransportKind {
        self.owned.wire.kind()
    }

    fn capabilities(&self) -> WireCapabilities {
        self.owned.wire.capabilities()
    }

    fn peer(&self) -> Option<Process> {
        self.owned.wire.peer()
    }

    fn descriptor(&self) -> BorrowedFd<'_> {
        self.owned.wire.descriptor()
    }

    fn send(&self, views: &[ReadView<'_>]) -> Result<usize, WireError> {
        self.ready()?;
        let (wire, faults) = (&self.owned.wire, &self.faults);
        let total: usize = views.iter().map(ReadView::len).sum();
        if total > LARGE && consume(&faults.truncate) {
            let sent = wire.send(&cut(views, 1 + faults.below(total - 1)));
            wire.end();
            return sent;
        }
        let most = faults.most(total);
        let kept = if most < total { Some(cut(views, most)) } else { None };
        let views = kept.as_deref().unwrap_or(views);
        let (begins, count) = match payload(views).filter(|begins| *begins < most) {
            Some(begins) if consume(&faults.damage) => (begins, &faults.damage),
            _ if most > 0 && consume(&faults.garble) => (0, &faults.garble),
            _ => return wire.send(views),
        };
        let (done, sent) = self.send_damaged(views, begins + faults.below(most - begins));
        if !done {
            count.fetch_add(1, Ordering::SeqCst);
        }
        sent
    }

    fn send_with(&self, bytes: &[u8], descriptors: &[BorrowedFd<'_>]) -> Result<usize, WireError> {
        self.ready()?;
        self.owned.wire.send_with(&bytes[..self.faults.most(bytes.len())], descriptors)
    }

    fn receive(&self, views: &mut [WriteView<'_>]) -> Result<Received, WireError> {
        self.receives()?;
        let total = total(views);
        let most = self.faults.most(total);
        if most < total {
            self.owned.wire.receive(&mut cut_mut(views, most))
        } else {
            self.owned.wire.receive(views)
        }
    }

    fn receive_with(&self, into: &mut [u8], descriptors: &mut Vec<OwnedFd>) -> Result<Received, WireError> {
        self.receives()?;
        let most = self.faults.most(into.len());
        self.owned.wire.receive_with(&mut into[..most], descriptors)
    }

    fn discard(&self, len: usize) -> Result<usize, WireError> {
        self.receives()?;
        self.owned.wire.discard(self.faults.most(len))
    }

    fn set_waker(&self, waker: WireWaker) {
        let _once = self.owned.waker.set(waker);
    }

    fn end(&self) {
        self.owned.wire.end();
    }
}
