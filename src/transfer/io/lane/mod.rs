//! A lane: one wire of a connection, with what is half sent and half received on it.
//!
//! Lanes never block. Whoever has something to send pumps the lane's output, if nobody else does at this moment; the
//! [reactor](crate::io::reactor) pumps it again when the wire takes more, and is the only one to pump the input.

mod receive;

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock, TryLockError};

use receive::{Input, Reading};

use crate::base::sync::lock;
use crate::base::transport::TransportKind;
use crate::io::sys;
use crate::io::wire::{Nature, Wire, WireError};
use crate::launch::peer_launch::Stay;
use crate::memory::raw::Piece;
use crate::protocol::frame::{Checksum, FrameError, HEADER, Kind, crc, flag};
use crate::protocol::link::{Frame, Violation};
use crate::session::connection::Connection;

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

/// What is being sent.
enum Writing {
    Idle,
    /// Control frames, or what is left of a chunk whose buffers are not used any more.
    Bytes {
        bytes: Vec<u8>,
        sent: usize,
        descriptor: Option<(Kind, u32)>,
    },
    Chunk {
        header: [u8; HEADER],
        stay: Stay,
        start: u64,
        len: usize,
        sent: usize,
    },
}

/// One wire of a connection.
pub struct Lane {
    /// Its number on the connection; both sides know it by it.
    pub id: u16,
    /// Whether control frames go here.
    pub control: bool,
    /// Over what.
    pub kind: TransportKind,
    nature: Nature,
    wire: Box<dyn Wire>,
    connection: Arc<Connection>,
    writing: Mutex<Writing>,
    reading: Mutex<Input>,
    again: AtomicBool,
    over: AtomicBool,
    seat: OnceLock<u64>,
    held: AtomicBool,
    told: AtomicBool,
    ending: AtomicBool,
    /// Bytes received and sent.
    pub bytes: AtomicU64,
}

impl Lane {
    /// A lane over a wire on which the hello has been said.
    pub fn new(connection: &Arc<Connection>, id: u16, control: bool, wire: Box<dyn Wire>) -> Arc<Self> {
        Arc::new(Self {
            id,
            control,
            kind: wire.kind(),
            nature: wire.nature(),
            wire,
            connection: Arc::clone(connection),
            writing: Mutex::new(Writing::Idle),
            reading: Mutex::new(Input::new(control)),
            again: AtomicBool::new(false),
            over: AtomicBool::new(false),
            seat: OnceLock::new(),
            held: AtomicBool::new(false),
            told: AtomicBool::new(false),
            ending: AtomicBool::new(false),
            bytes: AtomicU64::new(0),
        })
    }

    /// Its wire.
    pub fn wire(&self) -> &dyn Wire {
        &*self.wire
    }

    /// Whether it is in the middle of sending something.
    pub fn is_sending(&self) -> bool {
        !matches!(self.writing.try_lock().as_deref(), Ok(Writing::Idle))
    }

    /// Its reactor knows it by this number.
    pub fn sits_at(&self, seat: u64) {
        let _once = self.seat.set(seat);
    }

    /// The number that its reactor knows it by, once it has one.
    pub fn seat(&self) -> Option<u64> {
        self.seat.get().copied()
    }

    /// Its connection.
    pub const fn connection(&self) -> &Arc<Connection> {
        &self.connection
    }

    /// Whether it is over.
    pub fn is_over(&self) -> bool {
        self.over.load(Ordering::Acquire)
    }

    /// Whether it reads nothing until the place of a chunk is known.
    pub fn is_held(&self) -> bool {
        self.held.load(Ordering::SeqCst)
    }

    /// Ends it because the peer has lost it, and waits to hear what came of it.
    pub fn end_for_peer(&self) {
        self.told.store(true, Ordering::SeqCst);
        self.close();
    }

    /// Whether the peer waits to hear what came of it.
    pub fn is_ended_for_peer(&self) -> bool {
        self.told.load(Ordering::SeqCst)
    }

    /// Ends it: nothing is sent or received on it after this returns. Whether it was alive.
    pub fn close(&self) -> bool {
        let first = !self.over.swap(true, Ordering::AcqRel);
        self.wire.end();
        first
    }

    /// Waits until nobody is in the middle of receiving on it, and lets go of what had begun.
    pub fn drain(&self) {
        let reading = std::mem::replace(&mut lock(&self.reading).now, Reading::Header);
        if let Reading::Chunk { header, .. } = reading {
            self.connection.let_fall(&header);
        }
        self.stop_sending();
    }

    /// It was closed: waits until nobody is in the middle of sending on it.
    pub fn stop_sending(&self) {
        *lock(&self.writing) = Writing::Idle;
    }

    /// No more will come than what is there: its end is read as well.
    pub fn hung_up(&self) {
        self.ending.store(true, Ordering::SeqCst);
    }

    /// Sends what there is, until the wire takes no more.
    pub fn pump_output(&self) -> Result<(), LaneError> {
        loop {
            let mut writing = match self.writing.try_lock() {
                Ok(writing) => writing,
                Err(TryLockError::Poisoned(poisoned)) => poisoned.into_inner(),
                Err(TryLockError::WouldBlock) => {
                    // Whoever is at it looks again before they leave.
                    self.again.store(true, Ordering::SeqCst);
                    match self.writing.try_lock() {
                        Ok(writing) => writing,
                        Err(_) => return Ok(()),
                    }
                }
            };
            self.again.store(false, Ordering::SeqCst);
            let outcome = self.send_all(&mut writing);
            drop(writing);
            outcome?;
            if !self.again.load(Ordering::SeqCst) {
                return Ok(());
            }
        }
    }

    /// Sends until the wire is full, or there is nothing more to send.
    fn send_all(&self, writing: &mut Writing) -> Result<(), LaneError> {
        loop {
            if self.is_over() {
                return Err(LaneError::Closed);
            }
            if matches!(writing, Writing::Idle) && !self.take_next(writing) {
                return self.flush();
            }
            let sent = match self.send_some(writing) {
                Ok(sent) => sent,
                Err(WireError::Later) => return Ok(()),
                Err(error) => return Err(LaneError::Wire(error)),
            };
            self.bytes.fetch_add(sent as u64, Ordering::Relaxed);
        }
    }

    /// There is nothing more to send: what waits in the wire leaves, now or when there is room.
    fn flush(&self) -> Result<(), LaneError> {
        if !self.nature.keeps {
            return Ok(());
        }
        match self.wire.flush() {
            Ok(()) | Err(WireError::Later) => Ok(()),
            Err(error) => Err(LaneError::Wire(error)),
        }
    }

    /// Begins with what is to be sent next, if there is something: control frames first.
    fn take_next(&self, writing: &mut Writing) -> bool {
        loop {
            if self.control && self.take_control(writing) || self.take_chunk(writing) {
                return true;
            }
            // Something was said between the two: the chunk waits for it.
            if !self.control || !self.connection.has_control() {
                return false;
            }
        }
    }

    fn take_control(&self, writing: &mut Writing) -> bool {
        // Everything that waits, up to a bound, leaves in one call.
        let mut bytes = Vec::new();
        let mut descriptor = None;
        while bytes.len() < 256 << 10 {
            let Some(frame) = self.connection.next_control(descriptor.is_none() && bytes.is_empty()) else {
                break;
            };
            if matches!(frame.header.kind, Kind::Region | Kind::Ring | Kind::Descriptor) {
                descriptor = Some((frame.header.kind, frame.header.index));
            }
            encode(&frame, &mut bytes);
            if descriptor.is_some() {
                break;
            }
        }
        if bytes.is_empty() {
            return false;
        }
        *writing = Writing::Bytes { bytes, sent: 0, descriptor };
        true
    }

    fn take_chunk(&self, writing: &mut Writing) -> bool {
        loop {
            let Some(push) = self.connection.next_chunk(self) else { return false };
            // Given up since: it does not begin.
            let Some(stay) = push.token.stay() else { continue };
            let (mut header, start) = (push.header, push.start);
            if self.connection.checks() {
                // Read here, it is in the cache when the kernel copies it a moment later.
                header.flags |= flag::CHECKED;
                header.payload_crc = checksum(&push.token.work.out, start, u64::from(header.len));
            }
            let len = header.len as usize;
            *writing = Writing::Chunk { header: header.encode(), stay, start, len, sent: 0 };
            return true;
        }
    }

    fn send_some(&self, writing: &mut Writing) -> Result<usize, WireError> {
        match writing {
            Writing::Idle => Ok(0),
            Writing::Bytes { bytes, sent, descriptor } => {
                let now = match *descriptor {
                    Some((kind, region)) if *sent == 0 => {
                        self.connection.send_with_descriptors(&*self.wire, bytes, kind, region)?
                    }
                    _ => self.wire.send(&[Piece::of(&bytes[*sent..])])?,
                };
                *sent += now;
                if *sent == bytes.len() {
                    *writing = Writing::Idle;
                }
                Ok(now)
            }
            Writing::Chunk { header, stay, start, len, sent } => {
                let part = stay.part();
                let body = sent.saturating_sub(HEADER);
                if stay.is_closing() {
                    // Given up in the middle of a chunk: the frame ends with what it began with, out of a copy.
                    let mut bytes = Vec::new();
                    if *sent > 0 {
                        bytes.extend_from_slice(&header[(*sent).min(HEADER)..]);
                        part.work.out.copy_out(*start + body as u64, (*len - body) as u64, &mut bytes);
                    }
                    *writing = if bytes.is_empty() {
                        Writing::Idle
                    } else {
                        Writing::Bytes { bytes, sent: 0, descriptor: None }
                    };
                    return Ok(0);
                }
                let mut pieces = Vec::with_capacity(8);
                if *sent < HEADER {
                    pieces.push(Piece::of(&header[*sent..]));
                }
                let left = (*len - body) as u64;
                part.work.out.pieces(*start + body as u64, left, sys::PIECES_MAX, &mut pieces);
                let now = self.wire.send(&pieces)?;
                part.moves_by(self.kind);
                part.progressed((now as u64).min(left));
                drop(pieces);
                *sent += now;
                if *sent == HEADER + *len {
                    self.connection.count_sent(self.kind, *len as u64);
                    *writing = Writing::Idle;
                }
                Ok(now)
            }
        }
    }
}

/// Appends a control frame.
fn encode(frame: &Frame, into: &mut Vec<u8>) {
    let mut header = frame.header;
    if !frame.payload.is_empty() {
        header.flags |= flag::CHECKED;
        header.payload_crc = crc(&frame.payload);
    }
    into.extend_from_slice(&header.encode());
    into.extend_from_slice(&frame.payload);
}

/// The checksum of a stretch of a stream. The caller holds a visit.
fn checksum(stream: &crate::memory::stream::Stream, start: u64, len: u64) -> u32 {
    let mut pieces = Vec::with_capacity(8);
    stream.pieces(start, len, usize::MAX, &mut pieces);
    let mut checksum = Checksum::new();
    for piece in pieces {
        piece.read(|bytes| checksum.update(bytes));
    }
    checksum.value()
}
