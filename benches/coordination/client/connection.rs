//! One HTTP/2 connection of the load generator (RFC 9113), with the settings and headers of jaxlib's
//! connections.

use std::collections::VecDeque;
use std::io::{ErrorKind, Read as _, Write as _};

use anyhow::{Context as _, Result, bail, ensure};
use bytes::{Buf as _, Bytes};
use mio::net::TcpStream;

use super::calls::{Calls, Slot};
use super::hpack::{Decoder, Encoder, HeaderTable, StringCache};
use crate::wire::Method;

const DATA: u8 = 0;
const HEADERS: u8 = 1;
const RST_STREAM: u8 = 3;
const SETTINGS: u8 = 4;
const PING: u8 = 6;
const GOAWAY: u8 = 7;
const WINDOW_UPDATE: u8 = 8;
const CONTINUATION: u8 = 9;

const END_STREAM: u8 = 1;
const ACK: u8 = 1;
const END_HEADERS: u8 = 4;
const PADDED: u8 = 8;

const SETTING_TABLE_SIZE: u16 = 1;
const SETTING_WINDOW: u16 = 4;
const SETTING_FRAME_MAX: u16 = 5;

/// The receive window of a stream and of the connection.
const WINDOW: u32 = 4 << 20;
const DEFAULT_WINDOW: u32 = (1 << 16) - 1;

/// ENABLE_PUSH 0, MAX_CONCURRENT_STREAMS 0, INITIAL_WINDOW_SIZE and MAX_FRAME_SIZE 4 MiB, MAX_HEADER_LIST_SIZE 16 KiB.
const OUR_SETTINGS: [(u16, u32); 5] =
    [(2, 0), (3, 0), (SETTING_WINDOW, WINDOW), (SETTING_FRAME_MAX, WINDOW), (6, 16384)];

const FRAME_HEAD: usize = 9;

/// The length from which on a body is not copied.
const LARGE: usize = 16 << 10;

pub struct Connection {
    stream: TcpStream,
    /// Whether the server has answered anything.
    pub open: bool,
    /// The rest of a large output, which is sent first.
    large: Bytes,
    out: Vec<u8>,
    next_stream: u32,
    /// The calls in progress, by stream; usually the oldest is answered first.
    calls: Vec<(u32, Slot)>,
    encoder: Encoder,
    decoder: Decoder,
    incoming: Incoming,
    unread_window: u32,
    send_window: i64,
    stream_window: i64,
    frame_max: usize,
    /// The bodies that wait for the server's windows.
    held_back: VecDeque<HeldBack>,
}

struct HeldBack {
    stream: u32,
    window: i64,
    body: Bytes,
}

/// The frame that is being received.
#[derive(Default)]
struct Incoming {
    head: [u8; FRAME_HEAD],
    head_length: usize,
    left: usize,
    kind: u8,
    flags: u8,
    stream: u32,
    /// The call to whose answer the frame belongs.
    slot: Option<Slot>,
    /// The payload, unless it is part of an answer.
    payload: Vec<u8>,
}

/// The state shared by all connections.
pub struct Shared<'a> {
    pub phrases: &'a HeaderTable,
    pub strings: &'a mut StringCache,
    pub calls: &'a mut Calls,
}

impl Connection {
    pub fn new(stream: TcpStream) -> Self {
        let mut out = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n".to_vec();
        let settings: Vec<u8> = OUR_SETTINGS
            .iter()
            .flat_map(|(name, value)| [&name.to_be_bytes()[..], &value.to_be_bytes()].concat())
            .collect();
        put_frame(&mut out, SETTINGS, 0, 0, &settings);
        put_frame(&mut out, WINDOW_UPDATE, 0, 0, &(WINDOW - DEFAULT_WINDOW).to_be_bytes());
        // Its acknowledgement shows that the server serves the connection.
        put_frame(&mut out, PING, 0, 0, b"opening!");
        Self {
            stream,
            open: false,
            large: Bytes::new(),
            out,
            next_stream: 1,
            calls: Vec::new(),
            encoder: Encoder::default(),
            decoder: Decoder::default(),
            incoming: Incoming::default(),
            unread_window: 0,
            send_window: DEFAULT_WINDOW.into(),
            stream_window: DEFAULT_WINDOW.into(),
            frame_max: 16384,
            held_back: VecDeque::new(),
        }
    }

    pub fn socket(&mut self) -> &mut TcpStream {
        &mut self.stream
    }

    /// Starts a call. It is sent with the next [`Self::flush`].
    pub fn start(&mut self, shared: &Shared<'_>, slot: Slot, method: Method, body: Bytes) -> Result<()> {
        let stream = self.next_stream;
        self.next_stream += 2;
        self.calls.push((stream, slot));
        let head = self.out.len();
        put_frame(&mut self.out, HEADERS, END_HEADERS, stream, &[]);
        self.encoder.encode(shared.phrases, method, &mut self.out);
        let length = (self.out.len() - head - FRAME_HEAD) as u32;
        self.out[head..head + 3].copy_from_slice(&length.to_be_bytes()[1..]);
        self.held_back.push_back(HeldBack { stream, window: self.stream_window, body });
        self.send_bodies()
    }

    /// Sends what the server's windows permit, in the order of the calls.
    fn send_bodies(&mut self) -> Result<()> {
        while let Some(first) = self.held_back.front_mut() {
            let allowed = usize::try_from(self.send_window.min(first.window)).unwrap_or(0);
            let length = first.body.len().min(allowed).min(self.frame_max);
            if length == 0 {
                return Ok(());
            }
            let piece = first.body.split_to(length);
            first.window -= length as i64;
            self.send_window -= length as i64;
            let (stream, last) = (first.stream, first.body.is_empty());
            if last {
                self.held_back.pop_front();
            }
            put_head(&mut self.out, length, DATA, if last { END_STREAM } else { 0 }, stream);
            if length >= LARGE {
                self.flush()?;
                if self.out.is_empty() {
                    self.large = piece;
                    self.flush()?;
                    continue;
                }
            }
            self.out.extend_from_slice(&piece);
        }
        Ok(())
    }

    /// Writes output as far as the socket accepts it.
    pub fn flush(&mut self) -> Result<()> {
        if !self.large.is_empty() {
            let sent = write(&mut self.stream, &self.large)?;
            self.large.advance(sent);
        }
        if self.large.is_empty() && !self.out.is_empty() {
            let sent = write(&mut self.stream, &self.out)?;
            self.out.drain(..sent);
        }
        Ok(())
    }

    /// Reads all available input, through the borrowed `buffer`.
    pub fn receive(&mut self, shared: &mut Shared<'_>, buffer: &mut [u8]) -> Result<()> {
        loop {
            let length = match self.stream.read(buffer) {
                Ok(0) => bail!("the server has closed the connection"),
                Ok(length) => length,
                Err(error) if error.kind() == ErrorKind::WouldBlock => break,
                Err(error) if error.kind() == ErrorKind::Interrupted => continue,
                Err(error) => return Err(error).context("reading"),
            };
            self.take_in(shared, &buffer[..length])?;
            // The socket had less than the buffer holds, so it is empty; later input is reported again.
            if length < buffer.len() {
                break;
            }
        }
        if self.unread_window >= WINDOW / 2 {
            put_frame(&mut self.out, WINDOW_UPDATE, 0, 0, &self.unread_window.to_be_bytes());
            self.unread_window = 0;
        }
        self.flush()
    }

    fn take_in(&mut self, shared: &mut Shared<'_>, mut data: &[u8]) -> Result<()> {
        while !data.is_empty() {
            let frame = &mut self.incoming;
            if frame.head_length < FRAME_HEAD {
                let length = data.len().min(FRAME_HEAD - frame.head_length);
                frame.head[frame.head_length..frame.head_length + length].copy_from_slice(&data[..length]);
                frame.head_length += length;
                data = &data[length..];
                if frame.head_length < FRAME_HEAD {
                    return Ok(());
                }
                self.begin_frame()?;
            }
            let frame = &mut self.incoming;
            let length = data.len().min(frame.left);
            let (piece, rest) = data.split_at(length);
            data = rest;
            frame.left -= length;
            if frame.kind != DATA {
                frame.payload.extend_from_slice(piece);
            } else {
                self.unread_window += length as u32;
                if let Some(slot) = frame.slot {
                    shared.calls.add(slot, piece, WINDOW)?;
                }
            }
            if self.incoming.left == 0 {
                self.incoming.head_length = 0;
                self.end_frame(shared)?;
            }
        }
        Ok(())
    }

    fn begin_frame(&mut self) -> Result<()> {
        let frame = &mut self.incoming;
        let mut head = &frame.head[..];
        frame.left = head.get_uint(3) as usize;
        frame.kind = head.get_u8();
        frame.flags = head.get_u8();
        frame.stream = head.get_u32() & 0x7fff_ffff;
        frame.payload.clear();
        let stream = frame.stream;
        frame.slot = self.calls.iter().find(|(other, _)| *other == stream).map(|&(_, slot)| slot);
        ensure!(
            frame.kind > HEADERS || frame.flags & PADDED == 0,
            "padded frames are not for a load generator to read"
        );
        Ok(())
    }

    fn end_frame(&mut self, shared: &mut Shared<'_>) -> Result<()> {
        let Incoming { kind, flags, slot, stream, .. } = self.incoming;
        let mut payload = &self.incoming.payload[..];
        match kind {
            HEADERS => {
                ensure!(flags & END_HEADERS != 0, "headers in pieces are not for a load generator to read");
                // Headers of cancelled calls are decoded too, because later blocks may refer to them.
                let header = |name: &[u8], value: &[u8]| {
                    if let Some(slot) = slot {
                        shared.calls.header(slot, name, value);
                    }
                };
                self.decoder.decode(payload, shared.strings, header)?;
            }
            RST_STREAM if slot.is_some() => {
                let code = payload.try_get_u32().context("a short frame")?;
                self.finish(shared, Some(format!("the server has reset the call with code {code}")));
            }
            SETTINGS if flags & ACK == 0 => {
                while payload.remaining() >= 6 {
                    let (name, value) = (payload.get_u16(), payload.get_u32());
                    match name {
                        SETTING_TABLE_SIZE => self.encoder.table_size(value),
                        SETTING_WINDOW => self.stream_window = value.into(),
                        SETTING_FRAME_MAX => self.frame_max = value as usize,
                        _ => {}
                    }
                }
                put_frame(&mut self.out, SETTINGS, ACK, 0, &[]);
            }
            PING if flags & ACK == 0 => put_frame(&mut self.out, PING, ACK, 0, payload),
            PING => self.open = true,
            GOAWAY => bail!("the server says goodbye: {}", String::from_utf8_lossy(payload)),
            WINDOW_UPDATE => {
                let more = i64::from(payload.try_get_u32().context("a short frame")?);
                if stream == 0 {
                    self.send_window += more;
                } else if let Some(held) = self.held_back.iter_mut().find(|held| held.stream == stream) {
                    held.window += more;
                }
                self.send_bodies()?;
            }
            CONTINUATION => bail!("headers in pieces are not for a load generator to read"),
            _ => {}
        }
        if kind <= HEADERS && flags & END_STREAM != 0 {
            self.finish(shared, None);
        }
        Ok(())
    }

    /// Ends the stream of the present frame.
    fn finish(&mut self, shared: &mut Shared<'_>, failure: Option<String>) {
        let stream = self.incoming.stream;
        if let Some(place) = self.calls.iter().position(|(other, _)| *other == stream) {
            let (_, slot) = self.calls.remove(place);
            shared.calls.finish(slot, failure);
        }
    }

    /// Fails all calls, because no input follows.
    pub fn fail(&mut self, calls: &mut Calls, why: &str) {
        for (_, slot) in self.calls.drain(..) {
            calls.finish(slot, Some(why.to_owned()));
        }
    }
}

fn put_head(out: &mut Vec<u8>, length: usize, kind: u8, flags: u8, stream: u32) {
    out.extend_from_slice(&(length as u32).to_be_bytes()[1..]);
    out.extend_from_slice(&[kind, flags]);
    out.extend_from_slice(&stream.to_be_bytes());
}

fn put_frame(out: &mut Vec<u8>, kind: u8, flags: u8, stream: u32, payload: &[u8]) {
    put_head(out, payload.len(), kind, flags, stream);
    out.extend_from_slice(payload);
}

/// Writes until the socket accepts no more.
fn write(stream: &mut TcpStream, data: &[u8]) -> Result<usize> {
    let mut sent = 0;
    while sent < data.len() {
        match stream.write(&data[sent..]) {
            Ok(length) => sent += length,
            Err(error) if error.kind() == ErrorKind::WouldBlock => break,
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            Err(error) => return Err(error).context("writing"),
        }
    }
    Ok(sent)
}
