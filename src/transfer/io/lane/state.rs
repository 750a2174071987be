//! A lane, its interface to its session, and its end.
//!
//! It moves no bytes: `send.rs` and `receive.rs` do. Begin at [`LaneHost`].

use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock, Weak};

use super::input::{LaneInput, Reading};
use super::output::LaneOutput;
use crate::base::sync::lock;
use crate::base::transport::TransportKind;
use crate::io::pump::Pump;
use crate::io::wire::{Wire, WireCapabilities, WireError};
use crate::launch::peer_launch::{OwnedAccessGuard, PeerLaunch};
use crate::protocol::frame::{FrameError, Header, Kind};
use crate::protocol::link::{Frame, Landing, Push, Violation};

/// Why a lane is over.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum LaneError {
    /// The wire failed.
    #[error(transparent)]
    Wire(#[from] WireError),
    /// The other side closed it.
    #[error("the peer closed the connection")]
    Closed,
    /// What came is no frame.
    #[error(transparent)]
    Frame(#[from] FrameError),
    /// What came makes no sense.
    #[error(transparent)]
    Violation(#[from] Violation),
    /// It came from, or was meant for, another life.
    #[error("a frame of another incarnation came")]
    Fenced,
}

/// The session of a lane, as the lane sees it.
pub trait LaneHost: Send + Sync {
    /// Returns the next control frame; one that carries a descriptor only if it would be the first of its call.
    fn next_control(&self, first: bool) -> Option<Frame>;

    /// Returns whether control frames wait for the lane that carries them.
    fn has_control(&self) -> bool;

    /// Returns the next chunk for the lane with this number. The control lane carries chunks only where there is no other,
    /// and after the control frames that wait.
    fn next_chunk(&self, lane: u16, control: bool) -> Option<Push<Arc<PeerLaunch>>>;

    /// Sends the beginning of a control frame with the descriptors that go with it.
    fn send_with_descriptors(
        &self,
        wire: &dyn Wire,
        bytes: &[u8],
        kind: Kind,
        region: u32,
    ) -> Result<usize, WireError>;

    /// Counts bytes that left.
    fn count_sent(&self, kind: TransportKind, bytes: u64);

    /// Says that bytes of the peer came.
    fn mark_heard(&self);

    /// Returns whether a frame is from the peer's life to this life.
    fn is_between(&self, header: &Header) -> bool;

    /// Returns where a chunk belongs that is about to come.
    fn begin_landing(&self, header: &Header) -> Landing<Arc<PeerLaunch>>;

    /// Says that a chunk that had begun will not come.
    fn abandon_chunk(&self, header: &Header);

    /// Says that a chunk is there, whole or damaged.
    fn end_landing(
        &self,
        kind: TransportKind,
        header: &Header,
        launch: &Arc<PeerLaunch>,
        start: u64,
        intact: bool,
    );

    /// Takes a control frame, perhaps with descriptors. What is to be said to it waits for [`reply`](Self::reply).
    fn control_frame(
        &self,
        header: &Header,
        payload: Vec<u8>,
        descriptors: Vec<OwnedFd>,
        replies: &mut Replies,
    ) -> Result<(), Violation>;

    /// Sends what there is to say to frames that came together, and completes what they brought.
    fn reply(&self, replies: Replies);

    /// Says that a lane is over.
    fn lane_over(&self, lane: &Arc<Lane>, error: &LaneError);
}

/// What frames that came together call for: all of it leaves in as few system calls as it fits into.
#[derive(Default)]
pub struct Replies {
    /// Whether anything came: most of what a lane of chunks receives calls for nothing.
    pub due: bool,
    /// Bytes that are to be sent now.
    pub sends: u64,
    /// Whether the connection is unused.
    pub unused: bool,
    /// Launches whose bytes are in place, of which the peer hears first.
    pub landed: Vec<OwnedAccessGuard>,
}

/// One wire of a connection.
pub struct Lane {
    /// Its number on the connection; both sides know it by it.
    pub id: u16,
    /// Whether control frames go here.
    pub control: bool,
    /// Whether its chunks carry checksums.
    pub(super) checks: bool,
    /// Over what.
    pub kind: TransportKind,
    pub(super) capabilities: WireCapabilities,
    pub(super) wire: Box<dyn Wire>,
    /// Its session, which owns it.
    host: Weak<dyn LaneHost>,
    pub(super) output: Pump<LaneOutput>,
    pub(super) input: Mutex<LaneInput>,
    over: AtomicBool,
    seat: OnceLock<u64>,
    pub(super) held: AtomicBool,
    told: AtomicBool,
    pub(super) ending: AtomicBool,
    /// Bytes received and sent.
    pub bytes: AtomicU64,
}

impl Lane {
    /// Makes a lane over a wire on which the hello has been said.
    pub fn new(
        host: Weak<dyn LaneHost>,
        id: u16,
        control: bool,
        checks: bool,
        wire: Box<dyn Wire>,
    ) -> Arc<Self> {
        Arc::new(Self {
            id,
            control,
            checks,
            kind: wire.kind(),
            capabilities: wire.capabilities(),
            wire,
            host,
            output: Pump::new(LaneOutput::Idle),
            input: Mutex::new(LaneInput::new(control)),
            over: AtomicBool::new(false),
            seat: OnceLock::new(),
            held: AtomicBool::new(false),
            told: AtomicBool::new(false),
            ending: AtomicBool::new(false),
            bytes: AtomicU64::new(0),
        })
    }

    /// Returns its wire.
    pub fn wire(&self) -> &dyn Wire {
        &*self.wire
    }

    /// Returns whether it is in the middle of sending something.
    pub fn is_sending(&self) -> bool {
        !matches!(self.output.try_lock().as_deref(), Some(LaneOutput::Idle))
    }

    /// Says by which number its reactor knows it.
    pub fn set_seat(&self, seat: u64) {
        let _once = self.seat.set(seat);
    }

    /// Returns the number by which its reactor knows it, once it has one.
    pub fn seat(&self) -> Option<u64> {
        self.seat.get().copied()
    }

    /// Returns its session, if there still is one.
    pub fn host(&self) -> Option<Arc<dyn LaneHost>> {
        self.host.upgrade()
    }

    /// Returns whether it is over.
    pub fn is_over(&self) -> bool {
        self.over.load(Ordering::Acquire)
    }

    /// Returns whether it reads nothing until the place of a chunk is known.
    pub fn is_held(&self) -> bool {
        self.held.load(Ordering::SeqCst)
    }

    /// Ends it because the peer has lost it, and waits to hear which of its chunks came.
    pub fn end_for_peer(&self) {
        self.told.store(true, Ordering::SeqCst);
        self.close();
    }

    /// Returns whether the peer waits to hear which of its chunks came.
    pub fn is_ended_for_peer(&self) -> bool {
        self.told.load(Ordering::SeqCst)
    }

    /// Ends it: nothing is sent or received on it after this returns. Returns whether it was alive.
    pub fn close(&self) -> bool {
        let first = !self.over.swap(true, Ordering::AcqRel);
        self.wire.end();
        first
    }

    /// Waits until no thread is in the middle of receiving on it, and drops what had begun.
    pub fn drain(&self) {
        let reading = std::mem::replace(&mut lock(&self.input).now, Reading::Header);
        if let Reading::Chunk { header, .. } = reading
            && let Some(host) = self.host()
        {
            host.abandon_chunk(&header);
        }
        self.stop_sending();
    }

    /// Waits until no thread is in the middle of sending on it; it was closed before.
    pub fn stop_sending(&self) {
        *self.output.wait() = LaneOutput::Idle;
    }

    /// Says that no more will come than what is there: its end is read as well.
    pub fn mark_hung_up(&self) {
        self.ending.store(true, Ordering::SeqCst);
    }
}
