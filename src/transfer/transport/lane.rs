//! A lane: one socket of a connection, with what is half sent and half received on it.
//!
//! Lanes never block. Whoever has something to send pumps the lane's output, if nobody else does at this moment; the
//! [reactor](super::reactor) pumps it again when the socket takes more, and is the only one to pump the input.

use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock, TryLockError};

use rustix::io::Errno;

use super::TransportKind;
use crate::transfer::connection::Connection;
use crate::transfer::frame::{Checksum, FrameError, HEADER, Header, Kind, crc, flag};
use crate::transfer::launch::{Part, Sending};
use crate::transfer::link::{Frame, Landing, Violation};
use crate::transfer::memory::raw::Piece;
use crate::transfer::sync::lock;
use crate::transfer::sys;

/// How much one lane may read before others have their turn.
const TURN: usize = 4 << 20;

/// Why a lane is over.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum LaneError {
    /// The socket failed.
    #[error("{0}")]
    Socket(Errno),
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
        sending: Sending,
        start: u64,
        len: usize,
        sent: usize,
    },
}

/// What is being received.
enum Reading {
    Header,
    Control {
        header: Header,
        bytes: Vec<u8>,
        got: usize,
    },
    Chunk {
        header: Header,
        part: Arc<Part>,
        start: u64,
        got: usize,
    },
    Waste {
        left: usize,
    },
    /// A chunk whose place is not known yet: nothing more is read until it is.
    Held {
        header: Header,
    },
}

/// What is being received, and what was read ahead of it: a socket is read for frames, not for bytes.
struct Input {
    now: Reading,
    ahead: Box<[u8]>,
    /// What of `ahead` was read and not yet used.
    from: usize,
    to: usize,
}

impl Input {
    fn ahead(&self) -> &[u8] {
        &self.ahead[self.from..self.to]
    }

    fn take(&mut self, len: usize) {
        self.from += len;
    }

    /// Room for more, after what is there.
    fn room(&mut self) -> &mut [u8] {
        if self.from == self.to {
            (self.from, self.to) = (0, 0);
        } else if self.from > 0 {
            self.ahead.copy_within(self.from..self.to, 0);
            (self.from, self.to) = (0, self.to - self.from);
        }
        &mut self.ahead[self.to..]
    }
}

/// How a step of receiving went.
enum Step {
    /// On to the next.
    Go,
    /// The socket had no more than this when it was read.
    Drained,
}

/// One socket of a connection.
pub struct Lane {
    /// Its number on the connection; both sides know it by it.
    pub id: u16,
    /// Whether control frames go here.
    pub control: bool,
    /// Over what.
    pub kind: TransportKind,
    socket: OwnedFd,
    connection: Arc<Connection>,
    writing: Mutex<Writing>,
    reading: Mutex<Input>,
    again: AtomicBool,
    over: AtomicBool,
    seat: OnceLock<u64>,
    held: AtomicBool,
    told: AtomicBool,
    ending: AtomicBool,
    received: Mutex<Vec<OwnedFd>>,
    /// Bytes received and sent.
    pub bytes: AtomicU64,
}

/// Read ahead on lanes of control frames: many come at once.
const AHEAD_CONTROL: usize = 16 << 10;
/// Read ahead on other lanes: the next header comes with the end of a chunk, and no byte of a chunk is copied twice.
const AHEAD_BULK: usize = HEADER;

impl Lane {
    /// A lane over a socket that does not block.
    pub fn new(
        connection: &Arc<Connection>,
        id: u16,
        control: bool,
        kind: TransportKind,
        socket: OwnedFd,
    ) -> Arc<Self> {
        Arc::new(Self {
            id,
            control,
            kind,
            socket,
            connection: Arc::clone(connection),
            writing: Mutex::new(Writing::Idle),
            reading: Mutex::new(Input {
                now: Reading::Header,
                ahead: vec![0; if control { AHEAD_CONTROL } else { AHEAD_BULK }].into_boxed_slice(),
                from: 0,
                to: 0,
            }),
            again: AtomicBool::new(false),
            over: AtomicBool::new(false),
            seat: OnceLock::new(),
            held: AtomicBool::new(false),
            told: AtomicBool::new(false),
            ending: AtomicBool::new(false),
            received: Mutex::default(),
            bytes: AtomicU64::new(0),
        })
    }

    /// Its socket.
    pub fn socket(&self) -> std::os::fd::BorrowedFd<'_> {
        self.socket.as_fd()
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
        let _gone = rustix::net::shutdown(&self.socket, rustix::net::Shutdown::Both);
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

    /// Sends what there is, until the socket takes no more.
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

    /// Sends until the socket is full, or there is nothing more to send.
    fn send_all(&self, writing: &mut Writing) -> Result<(), LaneError> {
        loop {
            if self.is_over() {
                return Err(LaneError::Closed);
            }
            if matches!(writing, Writing::Idle) && !self.take_next(writing) {
                return Ok(());
            }
            let sent = match self.send_some(writing) {
                Ok(sent) => sent,
                Err(Errno::AGAIN) => return Ok(()),
                Err(Errno::INTR) => continue,
                Err(error) => return Err(LaneError::Socket(error)),
            };
            self.bytes.fetch_add(sent as u64, Ordering::Relaxed);
        }
    }

    fn take_next(&self, writing: &mut Writing) -> bool {
        if self.control {
            // Everything that waits, up to a bound, leaves in one call.
            let mut bytes = Vec::new();
            let mut descriptor = None;
            while bytes.len() < 256 << 10 {
                let Some(frame) = self.connection.next_control(descriptor.is_none() && bytes.is_empty())
                else {
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
            if !bytes.is_empty() {
                *writing = Writing::Bytes { bytes, sent: 0, descriptor };
                return true;
            }
        }
        loop {
            let Some(push) = self.connection.next_chunk(self) else { return false };
            // Given up since: it does not begin.
            let Some(sending) = push.token.sending() else { continue };
            let (mut header, start) = (push.header, push.start);
            if self.connection.checks() {
                // Read here, it is in the cache when the kernel copies it a moment later.
                header.flags |= flag::CHECKED;
                header.payload_crc = checksum(&push.token.work.out, start, u64::from(header.len));
            }
            let len = header.len as usize;
            *writing = Writing::Chunk { header: header.encode(), sending, start, len, sent: 0 };
            return true;
        }
    }

    fn send_some(&self, writing: &mut Writing) -> Result<usize, Errno> {
        match writing {
            Writing::Idle => Ok(0),
            Writing::Bytes { bytes, sent, descriptor } => {
                let now = match *descriptor {
                    Some((kind, region)) if *sent == 0 => {
                        self.connection.send_descriptors(self.socket(), bytes, kind, region)?
                    }
                    _ => sys::send(self.socket(), &[Piece::of(&bytes[*sent..])])?,
                };
                *sent += now;
                if *sent == bytes.len() {
                    *writing = Writing::Idle;
                }
                Ok(now)
            }
            Writing::Chunk { header, sending, start, len, sent } => {
                let part = sending.part();
                let body = sent.saturating_sub(HEADER);
                if sending.is_closing() {
                    // Given up in the middle of a chunk: the frame ends with what it began with, out of a copy.
                    let mut bytes = Vec::new();
                    if *sent > 0 {
                        bytes.extend_from_slice(&header[(*sent).min(HEADER)..]);
                        part.work.out.each(*start + body as u64, (*len - body) as u64, |at, from, len| {
                            let piece = part.work.out.spans[at].piece();
                            piece.part(from, len).read(|some| bytes.extend_from_slice(some));
                        });
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
                let now = sys::send(self.socket(), &pieces)?;
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

    /// Receives what is there. Whether there may be more.
    pub fn pump_input(&self) -> Result<bool, LaneError> {
        let mut input = lock(&self.reading);
        let mut turn = 0;
        while turn < TURN {
            if self.is_over() {
                return Err(LaneError::Closed);
            }
            if let Reading::Held { header } = input.now {
                let Some(placed) = self.place(header) else { return Ok(false) };
                input.now = placed;
                self.use_ahead(&mut input, header.len as usize)?;
            }
            match self.receive_some(&mut input, &mut turn) {
                Ok(Step::Go) => {}
                Ok(Step::Drained) | Err(LaneError::Socket(Errno::AGAIN)) => return Ok(false),
                Err(LaneError::Socket(Errno::INTR)) => {}
                Err(error) => return Err(error),
            }
        }
        Ok(true)
    }

    /// So many bytes came of so many that there was room for. Fewer than that means that there are no more now, and an
    /// edge will tell of the next.
    fn came(&self, got: usize, room: usize, turn: &mut usize) -> Result<Step, LaneError> {
        if got == 0 {
            return Err(LaneError::Closed);
        }
        *turn += got;
        self.bytes.fetch_add(got as u64, Ordering::Relaxed);
        self.connection.heard();
        Ok(if got < room && !self.ending.load(Ordering::SeqCst) { Step::Drained } else { Step::Go })
    }

    fn receive_some(&self, input: &mut Input, turn: &mut usize) -> Result<Step, LaneError> {
        match &mut input.now {
            Reading::Held { .. } => Ok(Step::Drained),
            Reading::Header => {
                if input.ahead().len() >= HEADER {
                    return self.begin_all(input);
                }
                let room = input.room();
                let wanted = room.len();
                let (got, step) = if self.kind == TransportKind::Unix {
                    let (got, descriptors) = self.receive_with_descriptors(room)?;
                    let step = self.came(got, wanted, turn)?;
                    // A read ends where descriptors came, whatever follows.
                    (got, if descriptors { Step::Go } else { step })
                } else {
                    let got = sys::read(self.socket(), &[Piece::of_mut(room)]).map_err(LaneError::Socket)?;
                    (got, self.came(got, wanted, turn)?)
                };
                input.to += got;
                self.begin_all(input)?;
                // A body that was begun has to be asked for, unless its place is awaited.
                Ok(if matches!(input.now, Reading::Header) && input.ahead().len() < HEADER {
                    step
                } else {
                    Step::Go
                })
            }
            Reading::Control { bytes, got, .. } => {
                let now = sys::read(self.socket(), &[Piece::of_mut(&mut bytes[*got..])])
                    .map_err(LaneError::Socket)?;
                *got += now;
                self.came(now, now, turn)?;
                if *got == bytes.len()
                    && let Reading::Control { header, bytes, .. } =
                        std::mem::replace(&mut input.now, Reading::Header)
                {
                    self.control_frame(&header, bytes)?;
                }
                Ok(Step::Go)
            }
            Reading::Chunk { header, part, start, got } => {
                let (header, part, start) = (*header, Arc::clone(part), *start);
                let len = header.len as usize;
                let Some(visit) = part.visit() else {
                    self.connection.let_fall(&header);
                    input.now = Reading::Waste { left: len - *got };
                    return Ok(Step::Go);
                };
                let mut done = *got;
                let mut pieces = Vec::with_capacity(8);
                let left = (len - done) as u64;
                part.work.inbound.pieces(start + done as u64, left, sys::PIECES_MAX, &mut pieces);
                let body: usize = pieces.iter().map(Piece::len).sum();
                // The next header comes along; not where descriptors may, which this read would drop.
                (input.from, input.to) = (0, 0);
                if body as u64 == left && self.kind != TransportKind::Unix {
                    pieces.push(Piece::of_mut(&mut input.ahead[..HEADER]));
                }
                let room = pieces.iter().map(Piece::len).sum();
                let now = sys::read(self.socket(), &pieces).map_err(LaneError::Socket)?;
                drop(pieces);
                let step = self.came(now, room, turn)?;
                done += now.min(body);
                input.to = now.saturating_sub(body);
                if done == len {
                    self.chunk_is_here(&header, &part, start);
                    drop(visit);
                    input.now = Reading::Header;
                } else if let Reading::Chunk { got, .. } = &mut input.now {
                    *got = done;
                }
                Ok(step)
            }
            Reading::Waste { left } => {
                let now = if self.kind == TransportKind::Unix {
                    let mut waste = [0; 16 << 10];
                    let most = (*left).min(waste.len());
                    sys::read(self.socket(), &[Piece::of_mut(&mut waste[..most])])
                } else {
                    sys::discard(self.socket(), *left)
                }
                .map_err(LaneError::Socket)?;
                *left -= now;
                let over = *left == 0;
                self.came(now, now, turn)?;
                if over {
                    input.now = Reading::Header;
                }
                Ok(Step::Go)
            }
        }
    }

    /// A chunk is in place: tells whether it is whole. The caller holds a visit.
    fn chunk_is_here(&self, header: &Header, part: &Arc<Part>, start: u64) {
        let intact = !header.has(flag::CHECKED)
            || checksum(&part.work.inbound, start, u64::from(header.len)) == header.payload_crc;
        self.connection.chunk_came(self.kind, header, part, start, intact);
    }

    /// Begins the frames whose headers were read ahead, and ends those that were read whole.
    fn begin_all(&self, input: &mut Input) -> Result<Step, LaneError> {
        while matches!(input.now, Reading::Header) && input.ahead().len() >= HEADER {
            let mut bytes = [0; HEADER];
            bytes.copy_from_slice(&input.ahead()[..HEADER]);
            let header = Header::decode(&bytes)?;
            input.take(HEADER);
            let len = header.len as usize;
            input.now = self.begin(header)?;
            self.use_ahead(input, len)?;
        }
        Ok(Step::Go)
    }

    /// What was read ahead of a body is the beginning of it.
    fn use_ahead(&self, input: &mut Input, len: usize) -> Result<(), LaneError> {
        let there = input.ahead().len().min(len);
        let (from, to) = (input.from, input.from + there);
        match &mut input.now {
            Reading::Header | Reading::Held { .. } => return Ok(()),
            Reading::Control { bytes, got, .. } => {
                bytes[..there].copy_from_slice(&input.ahead[from..to]);
                *got = there;
            }
            Reading::Waste { left } => *left -= there,
            Reading::Chunk { part, start, got, .. } => {
                if let Some(_visit) = part.visit() {
                    let mut pieces = Vec::new();
                    part.work.inbound.pieces(*start, there as u64, usize::MAX, &mut pieces);
                    let mut at = from;
                    for piece in pieces {
                        piece.copy_from(&Piece::of(&input.ahead[at..at + piece.len()]));
                        at += piece.len();
                    }
                }
                *got = there;
            }
        }
        input.take(there);
        if there < len {
            return Ok(());
        }
        match std::mem::replace(&mut input.now, Reading::Header) {
            Reading::Control { header, bytes, .. } => self.control_frame(&header, bytes)?,
            Reading::Chunk { header, part, start, .. } => {
                if let Some(_visit) = part.visit() {
                    self.chunk_is_here(&header, &part, start);
                } else {
                    self.connection.let_fall(&header);
                }
            }
            Reading::Header | Reading::Waste { .. } | Reading::Held { .. } => {}
        }
        Ok(())
    }

    fn begin(&self, header: Header) -> Result<Reading, LaneError> {
        if !self.connection.is_between(&header) {
            return Err(LaneError::Fenced);
        }
        let len = header.len as usize;
        if header.kind == Kind::Data {
            return Ok(self.place(header).unwrap_or(Reading::Held { header }));
        }
        if len == 0 {
            self.control_frame(&header, Vec::new())?;
            return Ok(Reading::Header);
        }
        Ok(Reading::Control { header, bytes: vec![0; len], got: 0 })
    }

    /// Where a chunk goes; none if that is not known yet.
    fn place(&self, header: Header) -> Option<Reading> {
        let mut landing = self.connection.begin_landing(&header);
        if landing == Landing::Early {
            // Whoever learns of its place from here on sees that it is awaited.
            self.held.store(true, Ordering::SeqCst);
            landing = self.connection.begin_landing(&header);
            if landing == Landing::Early {
                return None;
            }
        }
        self.held.store(false, Ordering::SeqCst);
        Some(match landing {
            Landing::At(part, start) => Reading::Chunk { header, part, start, got: 0 },
            _ if header.len == 0 => Reading::Header,
            _ => Reading::Waste { left: header.len as usize },
        })
    }

    fn control_frame(&self, header: &Header, payload: Vec<u8>) -> Result<(), LaneError> {
        if header.has(flag::CHECKED) && crc(&payload) != header.payload_crc {
            return Err(LaneError::Frame(FrameError::Damaged));
        }
        let wanted = match header.kind {
            Kind::Ring => 2,
            Kind::Region | Kind::Descriptor => 1,
            _ => 0,
        };
        let mut received = lock(&self.received);
        let there = received.len().min(wanted);
        let descriptors = received.drain(..there).collect();
        drop(received);
        Ok(self.connection.control_frame(header, payload, descriptors)?)
    }

    /// Whether descriptors came along as well.
    fn receive_with_descriptors(&self, into: &mut [u8]) -> Result<(usize, bool), LaneError> {
        use rustix::net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, recvmsg};
        let mut space = [std::mem::MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(4))];
        let mut ancillary = RecvAncillaryBuffer::new(&mut space);
        let mut slices = [std::io::IoSliceMut::new(into)];
        let flags = RecvFlags::DONTWAIT | RecvFlags::CMSG_CLOEXEC;
        let got = recvmsg(&self.socket, &mut slices, &mut ancillary, flags).map_err(LaneError::Socket)?;
        let mut received = lock(&self.received);
        let before = received.len();
        for message in ancillary.drain() {
            if let RecvAncillaryMessage::ScmRights(descriptors) = message {
                received.extend(descriptors);
            }
        }
        if received.len() > 64 {
            return Err(LaneError::Violation(Violation("descriptors came that belong to nothing")));
        }
        Ok((got.bytes, received.len() > before))
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
fn checksum(stream: &crate::transfer::launch::Stream, start: u64, len: u64) -> u32 {
    let mut checksum = Checksum::new();
    stream.each(start, len, |at, from, bytes| {
        stream.spans[at].piece().part(from, bytes).read(|bytes| checksum.update(bytes));
    });
    checksum.value()
}
