//! The state of a lane, the interface by which the lane calls its session, and the closing of the lane.
//!
//! `send.rs` and `receive.rs` move the bytes. Begin at [`Lane`] and [`LaneHost`].

use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock, Weak};

use super::input::{IncomingFrame, LaneInput};
use super::output::OutgoingFrame;
use super::staged_chunks::StagedChunks;
use crate::base::sync::lock;
use crate::base::transport::TransportKind;
use crate::io::exclusive_work::ExclusiveWork;
use crate::io::gpu_copies::CopyFailure;
use crate::io::staging::StagingPools;
use crate::io::wire::{Wire, WireCapabilities, WireError};
use crate::launch::peer_launch::{OwnedAccessGuard, PeerLaunch};
use crate::protocol::frame::{FrameError, FrameKind, Header};
use crate::protocol::link::{ChunkDestination, ControlFrame, OutgoingChunk, ProtocolViolation};

/// The reason why a lane ended.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum LaneError {
    /// The wire failed.
    #[error(transparent)]
    Wire(#[from] WireError),
    /// The other side closed it, or this side did.
    #[error("the peer closed the connection")]
    Closed,
    /// The bytes received are no frame.
    #[error(transparent)]
    Frame(#[from] FrameError),
    /// A frame breaks the protocol.
    #[error(transparent)]
    Violation(#[from] ProtocolViolation),
    /// A frame names another incarnation as its sender or receiver.
    #[error("a frame of another incarnation came")]
    Fenced,
}

/// The session of a lane, as the lane sees it.
pub trait LaneHost: Send + Sync {
    /// Returns the next control frame. Without `first` it returns none that carries descriptors.
    fn next_control_frame(&self, first: bool) -> Option<ControlFrame>;

    /// Returns whether control frames are queued for the control lane.
    fn has_queued_control_frames(&self) -> bool;

    /// Returns the next chunk for the lane with this number; one with bytes of a GPU only if it `may_stage`. The control
    /// lane carries chunks only if there is no other lane, and after the queued control frames.
    fn next_chunk(&self, lane: u16, control: bool, may_stage: bool)
    -> Option<OutgoingChunk<Arc<PeerLaunch>>>;

    /// Sends the begin of a control frame together with its descriptors.
    fn send_with_descriptors(
        &self,
        wire: &dyn Wire,
        bytes: &[u8],
        kind: FrameKind,
        region: u32,
    ) -> Result<usize, WireError>;

    /// Counts bytes that were sent.
    fn count_sent(&self, kind: TransportKind, bytes: u64);

    /// Records that bytes of the peer arrived.
    fn record_frame_received(&self);

    /// Returns whether a frame is from the peer's incarnation to this one.
    fn incarnations_match(&self, header: &Header) -> bool;

    /// Returns the destination of a chunk that is about to arrive.
    fn begin_chunk_receive(&self, header: &Header) -> ChunkDestination<Arc<PeerLaunch>>;

    /// Reports that a chunk whose landing had begun will not arrive.
    fn abandon_chunk_receive(&self, header: &Header);

    /// Reports that a chunk has arrived, intact or damaged.
    fn end_chunk_receive(
        &self,
        kind: TransportKind,
        header: &Header,
        launch: &Arc<PeerLaunch>,
        start: u64,
        intact: bool,
    );

    /// Processes a control frame and its descriptors. The replies wait for [`send_pending_replies`](Self::send_pending_replies).
    fn process_control_frame(
        &self,
        header: &Header,
        payload: Vec<u8>,
        descriptors: Vec<OwnedFd>,
        replies: &mut PendingReplies,
    ) -> Result<(), ProtocolViolation>;

    /// Sends the replies to frames that arrived together, and completes the launches whose bytes came with
    /// them.
    fn send_pending_replies(&self, replies: PendingReplies);

    /// Returns the page-locked memory for chunks with bytes of GPUs.
    fn staging(&self) -> &StagingPools;

    /// Makes the reactor of the lane with this number send and receive on it.
    fn request_pump(&self, lane: u16);

    /// Sends a chunk of a launch that is in its slot, on the lane with this number: on this thread if the launch is small and
    /// nothing else is to be sent, else on the lane's reactor.
    fn send_staged(&self, lane: u16, launch: &PeerLaunch);

    /// Reports that a GPU failed to copy a chunk, or had no page-locked memory for it.
    fn on_copy_failed(&self, launch: &Arc<PeerLaunch>, failure: CopyFailure);

    /// Reports that a lane is over.
    fn on_lane_over(&self, lane: &Arc<Lane>, error: &LaneError);
}

/// The replies to frames that arrived together. They leave in as few system calls as possible.
#[derive(Default)]
pub struct PendingReplies {
    /// Whether there is anything to do; most of the frames of a chunk lane need no reply.
    pub due: bool,
    /// The bytes that may be sent now.
    pub sends: u64,
    /// Whether the connection is unused.
    pub unused: bool,
    /// The launches whose bytes are in place, and of which the peer learns first.
    pub landed: Vec<OwnedAccessGuard>,
}

/// One wire of a connection.
pub struct Lane {
    /// The number of the lane on its connection, equal on both sides.
    pub id: u16,
    /// Whether it carries control frames.
    pub control: bool,
    /// Whether its chunks carry checksums.
    pub(super) checks: bool,
    /// The transport of its wire.
    pub kind: TransportKind,
    pub(super) capabilities: WireCapabilities,
    pub(super) wire: Box<dyn Wire>,
    /// The session, which owns the lane.
    pub(super) host: Weak<dyn LaneHost>,
    pub(super) output: ExclusiveWork<OutgoingFrame>,
    pub(super) input: Mutex<LaneInput>,
    over: AtomicBool,
    seat: OnceLock<u64>,
    /// Whether a pump must look at the input although no bytes have arrived: a chunk waits for its destination or for a
    /// slot, or has a slot that is to be given back once its launch is over.
    pub(super) held: AtomicBool,
    /// The chunks to send whose bytes a GPU copies to a slot, or has copied.
    pub(super) staged: StagedChunks,
    /// Whether the lane is to be pumped when a slot for sending, or for receiving, was given back.
    pub(super) awaits_send_slot: Arc<AtomicBool>,
    pub(super) awaits_receive_slot: Arc<AtomicBool>,
    told: AtomicBool,
    pub(super) ending: AtomicBool,
    /// The bytes received and sent.
    pub bytes: AtomicU64,
}

impl Lane {
    /// Creates a lane over a wire on which the handshake is complete.
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
            output: ExclusiveWork::new(OutgoingFrame::Idle),
            input: Mutex::new(LaneInput::new(control)),
            over: AtomicBool::new(false),
            seat: OnceLock::new(),
            held: AtomicBool::new(false),
            staged: StagedChunks::default(),
            awaits_send_slot: Arc::default(),
            awaits_receive_slot: Arc::default(),
            told: AtomicBool::new(false),
            ending: AtomicBool::new(false),
            bytes: AtomicU64::new(0),
        })
    }

    /// Returns the wire.
    pub fn wire(&self) -> &dyn Wire {
        &*self.wire
    }

    /// Returns whether a frame is being sent.
    pub fn is_sending(&self) -> bool {
        !matches!(self.output.try_lock_state().as_deref(), Some(OutgoingFrame::Idle))
    }

    /// Sets the number under which its reactor knows it.
    pub fn set_reactor_slot(&self, seat: u64) {
        let _once = self.seat.set(seat);
    }

    /// Returns the number under which its reactor knows it, or none before it has one.
    pub fn reactor_slot(&self) -> Option<u64> {
        self.seat.get().copied()
    }

    /// Returns the session, or none if it is gone.
    pub fn host(&self) -> Option<Arc<dyn LaneHost>> {
        self.host.upgrade()
    }

    /// Returns whether it is over.
    pub fn is_over(&self) -> bool {
        self.over.load(Ordering::Acquire)
    }

    /// Returns whether a pump must look at the input although no bytes have arrived.
    pub fn input_needs_pump(&self) -> bool {
        self.held.load(Ordering::SeqCst)
    }

    /// Closes it because the peer has lost it and waits to learn which chunks have arrived.
    pub fn close_lost_by_peer(&self) {
        self.told.store(true, Ordering::SeqCst);
        self.close_if_open();
    }

    /// Returns whether the peer waits to learn which chunks have arrived.
    pub fn is_lost_by_peer(&self) -> bool {
        self.told.load(Ordering::SeqCst)
    }

    /// Closes it: no bytes are sent or received on it any more. Returns whether it was open.
    pub fn close_if_open(&self) -> bool {
        let first = !self.over.swap(true, Ordering::AcqRel);
        self.wire.end();
        first
    }

    /// Waits until no thread is receiving or sending on it, and drops what had begun.
    pub fn wait_until_idle(&self) {
        let reading = std::mem::replace(&mut lock(&self.input).now, IncomingFrame::Header);
        if let Some(header) = reading.begun_chunk()
            && let Some(host) = self.host()
        {
            host.abandon_chunk_receive(header);
        }
        self.wait_until_send_idle();
    }

    /// Waits until no thread is sending on it. It must be closed before.
    pub fn wait_until_send_idle(&self) {
        let mut output = self.output.wait_idle();
        *output = OutgoingFrame::Idle;
        self.staged.clear();
    }

    /// Records that the peer has closed the wire: it is read up to its end.
    pub fn mark_hung_up(&self) {
        self.ending.store(true, Ordering::SeqCst);
    }
}
