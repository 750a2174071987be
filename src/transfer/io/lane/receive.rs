//! The receiving half of a lane: headers, and what follows them straight into its place.

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use crate::base::sync::lock;
use crate::io::lane::{Lane, LaneError, checksum};
use crate::io::sys;
use crate::io::wire::{Received, WireError};
use crate::launch::peer_launch::Part;
use crate::memory::raw::Piece;
use crate::protocol::frame::{FrameError, HEADER, Header, Kind, crc, flag};
use crate::protocol::link::{Landing, Violation};
use crate::session::perform::Answers;

/// How much one lane may read before others have their turn.
const TURN: usize = 4 << 20;

/// Read ahead on lanes of control frames: many come at once.
const AHEAD_CONTROL: usize = 64 << 10;
/// Read ahead on other lanes: the next header comes with the end of a chunk, and no byte of a chunk is copied twice.
const AHEAD_BULK: usize = HEADER;
/// The most descriptors that wait for the frames that they belong to.
const DESCRIPTORS_MAX: usize = 64;

/// What is being received.
pub(crate) enum Reading {
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

/// What is being received, and what was read ahead of it: a wire is read for frames, not for bytes.
pub(crate) struct Input {
    pub(crate) now: Reading,
    ahead: Box<[u8]>,
    /// What of `ahead` was read and not yet used.
    from: usize,
    to: usize,
    /// Descriptors that came, and the frames that they belong to have not.
    descriptors: Vec<OwnedFd>,
}

impl Input {
    /// Of a lane on which nothing has come yet.
    pub(crate) fn new(control: bool) -> Self {
        let ahead = vec![0; if control { AHEAD_CONTROL } else { AHEAD_BULK }].into_boxed_slice();
        Self { now: Reading::Header, ahead, from: 0, to: 0, descriptors: Vec::new() }
    }

    fn ahead(&self) -> &[u8] {
        &self.ahead[self.from..self.to]
    }

    fn take(&mut self, len: usize) {
        self.from += len;
    }

    /// Makes room for more, after what is there.
    fn make_room(&mut self) {
        if self.from == self.to {
            (self.from, self.to) = (0, 0);
        } else if self.from > 0 {
            self.ahead.copy_within(self.from..self.to, 0);
            (self.from, self.to) = (0, self.to - self.from);
        }
    }
}

/// How a step of receiving went.
enum Step {
    /// On to the next.
    Go,
    /// The wire had no more than this when it was read.
    Drained,
}

impl Lane {
    /// Receives what is there. Whether there may be more.
    pub fn pump_input(&self) -> Result<bool, LaneError> {
        let mut input = lock(&self.reading);
        let mut turn = 0;
        while turn < TURN {
            if self.is_over() {
                return Err(LaneError::Closed);
            }
            // What came with one call is answered with one.
            let mut answers = Answers::default();
            let step = self.receive_more(&mut input, &mut turn, &mut answers);
            self.connection.answer(answers);
            match step {
                Ok(Step::Go) => {}
                Ok(Step::Drained) | Err(LaneError::Wire(WireError::Later)) => return Ok(false),
                Err(error) => return Err(error),
            }
        }
        Ok(true)
    }

    fn receive_more(
        &self,
        input: &mut Input,
        turn: &mut usize,
        answers: &mut Answers,
    ) -> Result<Step, LaneError> {
        if let Reading::Held { header } = input.now {
            let Some(placed) = self.place(header) else { return Ok(Step::Drained) };
            input.now = placed;
            self.use_ahead(input, header.len as usize, answers)?;
        }
        self.receive_some(input, turn, answers)
    }

    /// Bytes came. If the wire is dry then, an edge will tell of the next.
    fn came(&self, received: Received, turn: &mut usize) -> Result<Step, LaneError> {
        let Received { bytes, dry } = received;
        if bytes == 0 {
            return Err(LaneError::Closed);
        }
        *turn += bytes;
        self.bytes.fetch_add(bytes as u64, Ordering::Relaxed);
        self.connection.heard();
        Ok(if dry && !self.ending.load(Ordering::SeqCst) { Step::Drained } else { Step::Go })
    }

    fn receive_some(
        &self,
        input: &mut Input,
        turn: &mut usize,
        answers: &mut Answers,
    ) -> Result<Step, LaneError> {
        match &mut input.now {
            Reading::Held { .. } => Ok(Step::Drained),
            Reading::Header => {
                if input.ahead().len() >= HEADER {
                    return self.begin_all(input, answers);
                }
                input.make_room();
                let Input { ahead, to, descriptors, .. } = &mut *input;
                let received = self.wire.receive_with(&mut ahead[*to..], descriptors)?;
                if descriptors.len() > DESCRIPTORS_MAX {
                    return Err(LaneError::Violation(Violation("descriptors came that belong to nothing")));
                }
                let step = self.came(received, turn)?;
                input.to += received.bytes;
                self.begin_all(input, answers)?;
                // A body that was begun has to be asked for, unless its place is awaited.
                Ok(if matches!(input.now, Reading::Header) && input.ahead().len() < HEADER {
                    step
                } else {
                    Step::Go
                })
            }
            Reading::Control { bytes, got, .. } => {
                let received = self.wire.receive(&[Piece::of_mut(&mut bytes[*got..])])?;
                *got += received.bytes;
                self.came(received, turn)?;
                if *got == bytes.len()
                    && let Reading::Control { header, bytes, .. } =
                        std::mem::replace(&mut input.now, Reading::Header)
                {
                    self.control_frame(&header, bytes, &mut input.descriptors, answers)?;
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
                if body as u64 == left && !self.nature.shares {
                    pieces.push(Piece::of_mut(&mut input.ahead[..HEADER]));
                }
                let received = self.wire.receive(&pieces)?;
                drop(pieces);
                let step = self.came(received, turn)?;
                done += received.bytes.min(body);
                input.to = received.bytes.saturating_sub(body);
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
                let bytes = self.wire.discard(*left)?;
                *left -= bytes;
                let over = *left == 0;
                self.came(Received { bytes, dry: false }, turn)?;
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
    fn begin_all(&self, input: &mut Input, answers: &mut Answers) -> Result<Step, LaneError> {
        while matches!(input.now, Reading::Header) && input.ahead().len() >= HEADER {
            let mut bytes = [0; HEADER];
            bytes.copy_from_slice(&input.ahead()[..HEADER]);
            let header = Header::decode(&bytes)?;
            input.take(HEADER);
            let len = header.len as usize;
            input.now = self.begin(header, &mut input.descriptors, answers)?;
            self.use_ahead(input, len, answers)?;
        }
        Ok(Step::Go)
    }

    /// What was read ahead of a body is the beginning of it.
    fn use_ahead(&self, input: &mut Input, len: usize, answers: &mut Answers) -> Result<(), LaneError> {
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
                    part.work.inbound.copy_in(*start, &input.ahead[from..to]);
                }
                *got = there;
            }
        }
        input.take(there);
        if there < len {
            return Ok(());
        }
        match std::mem::replace(&mut input.now, Reading::Header) {
            Reading::Control { header, bytes, .. } => {
                self.control_frame(&header, bytes, &mut input.descriptors, answers)?;
            }
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

    fn begin(
        &self,
        header: Header,
        descriptors: &mut Vec<OwnedFd>,
        answers: &mut Answers,
    ) -> Result<Reading, LaneError> {
        if !self.connection.is_between(&header) {
            return Err(LaneError::Fenced);
        }
        let len = header.len as usize;
        if header.kind == Kind::Data {
            return Ok(self.place(header).unwrap_or(Reading::Held { header }));
        }
        if len == 0 {
            self.control_frame(&header, Vec::new(), descriptors, answers)?;
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

    fn control_frame(
        &self,
        header: &Header,
        payload: Vec<u8>,
        descriptors: &mut Vec<OwnedFd>,
        answers: &mut Answers,
    ) -> Result<(), LaneError> {
        if header.has(flag::CHECKED) && crc(&payload) != header.payload_crc {
            return Err(LaneError::Frame(FrameError::Damaged));
        }
        let wanted = match header.kind {
            Kind::Ring => 2,
            Kind::Region | Kind::Descriptor => 1,
            _ => 0,
        };
        let there = descriptors.len().min(wanted);
        let descriptors = descriptors.drain(..there).collect();
        Ok(self.connection.control_frame(header, payload, descriptors, answers)?)
    }
}
