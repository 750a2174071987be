//! A connection of single HTTP/2 frames. Begin at [`RawConnection`].

use std::collections::HashMap;
use std::io;
use std::net::SocketAddr;

use muster::proto::tensorflow;
use prost::Message;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpSocket, TcpStream};

use super::{in_time, value_of};
use crate::harness::frames;

/// The service of generation A.
pub const GENERATION_A: &str = "tensorflow.CoordinationService";
/// The service of generation C.
pub const GENERATION_C: &str = "xla.coordination.CoordinationService";

/// A connection of single frames. It does not acknowledge the server's SETTINGS, so that its requests may refer to the
/// table of header compression. Its small receive buffer keeps unread answers in the server.
pub struct RawConnection {
    /// The name in failures.
    pub name: String,
    socket: TcpStream,
    /// The received bytes of the next frame.
    input: Vec<u8>,
    /// The responses, by stream.
    responses: HashMap<u32, StreamResponse>,
}

/// The received part of a response.
#[derive(Debug, Default)]
pub struct StreamResponse {
    /// The header blocks, in which the server writes literals only.
    pub headers: Vec<u8>,
    pub body: Vec<u8>,
    pub has_ended: bool,
}

impl StreamResponse {
    /// Returns the gRPC status of a response that has ended.
    pub fn status(&self) -> Option<i32> {
        const NAME: &[u8] = b"\x0bgrpc-status";
        let at = self.headers.windows(NAME.len()).rposition(|window| window == NAME)? + NAME.len();
        let (length, rest) = self.headers.get(at..)?.split_first()?;
        std::str::from_utf8(rest.get(..usize::from(*length))?).ok()?.parse().ok()
    }

    /// Returns the message of a successful response.
    pub fn message(&self) -> &[u8] {
        self.body.get(5..).unwrap_or_default()
    }
}

impl RawConnection {
    pub async fn connect(server: SocketAddr, name: String) -> Self {
        let socket = TcpSocket::new_v4().expect("a socket");
        socket.set_recv_buffer_size(64 << 10).expect("a TCP socket");
        let socket = in_time(&format!("{name}: the connection"), socket.connect(server)).await;
        socket.set_nodelay(true).expect("a TCP socket");
        Self { name, socket, input: Vec::new(), responses: HashMap::new() }
    }

    pub async fn send(&mut self, bytes: &[u8]) {
        in_time(&format!("{}: a write", self.name), self.socket.write_all(bytes)).await;
    }

    /// Does what [`Self::send`] does on a connection that may have been reset.
    pub async fn try_send(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.socket.write_all(bytes).await
    }

    /// Resets the connection.
    pub fn reset(self) {
        self.socket.set_zero_linger().expect("a TCP socket");
    }

    /// Receives a frame, and returns its stream. A call that is cancelled loses nothing.
    ///
    /// # Errors
    /// If the connection has ended.
    pub async fn try_receive_frame(&mut self) -> io::Result<(u32, u8, usize)> {
        let (header, length) = loop {
            if let Some((&[high, middle, low, kind, flags, ref stream @ ..], rest)) =
                self.input.split_first_chunk::<9>()
            {
                let length = u32::from_be_bytes([0, high, middle, low]) as usize;
                if rest.len() >= length {
                    break ((kind, flags, u32::from_be_bytes(*stream)), length);
                }
            }
            if self.socket.read_buf(&mut self.input).await? == 0 {
                return Err(io::ErrorKind::UnexpectedEof.into());
            }
        };
        let (kind, flags, stream) = header;
        let payload: Vec<u8> = self.input.drain(..9 + length).skip(9).collect();
        if let frames::RST_STREAM | frames::GOAWAY = kind {
            let text = String::from_utf8_lossy(&payload);
            panic!("{}: the server sent frame {kind} on stream {stream}: {text:?}", self.name)
        }
        if let frames::DATA | frames::HEADERS = kind {
            let response = self.responses.entry(stream).or_default();
            assert!(!response.has_ended, "{}: a frame after the end of stream {stream}", self.name);
            let part = if kind == frames::DATA { &mut response.body } else { &mut response.headers };
            part.extend_from_slice(&payload);
            response.has_ended |= flags & frames::END_STREAM != 0;
        }
        Ok((stream, kind, length))
    }

    /// Removes and returns a response that has ended.
    pub fn take_response(&mut self, stream: u32) -> Option<StreamResponse> {
        self.responses.get(&stream).filter(|response| response.has_ended)?;
        self.responses.remove(&stream)
    }

    /// Returns the body of a successful response, which contains one message.
    pub async fn receive_body(&mut self, stream: u32) -> Vec<u8> {
        let response = loop {
            if let Some(response) = self.take_response(stream) {
                break response;
            }
            in_time(&format!("{}: the next frame", self.name), self.try_receive_frame()).await;
        };
        assert!(!response.body.is_empty(), "{}: the call on stream {stream} failed: {response:?}", self.name);
        response.body
    }
}

/// Encodes the beginning of a connection, with windows for all answers.
pub fn opening() -> Vec<u8> {
    opening_with_window(16 << 20)
}

/// Encodes the beginning of a connection with this window of each stream.
pub fn opening_with_window(window: u32) -> Vec<u8> {
    let mut bytes = frames::PREFACE.to_vec();
    frames::settings(&mut bytes, &[(frames::INITIAL_WINDOW_SIZE, window)]);
    frames::number(&mut bytes, frames::WINDOW_UPDATE, 0, 64 << 20);
    bytes
}

/// Encodes the headers of a request. Each enters the table of header compression.
pub fn header_block(service: &str, method: &str) -> Vec<u8> {
    let path = format!("/{service}/{method}");
    let mut block = Vec::new();
    for (name, value) in [
        (":method", "POST"),
        (":scheme", "http"),
        (":path", path.as_str()),
        (":authority", "muster.example:8476"),
        ("content-type", "application/grpc"),
        ("te", "trailers"),
    ] {
        block.push(0x40);
        frames::string(&mut block, name.as_bytes());
        frames::string(&mut block, value.as_bytes());
    }
    block
}

/// The headers of the last request, as references to the six newest entries of the table.
pub const SAME_HEADERS: [u8; 6] = [0x80 | 67, 0x80 | 66, 0x80 | 65, 0x80 | 64, 0x80 | 63, 0x80 | 62];

pub fn encode_request(stream: u32, headers: &[u8], message: &impl Message) -> Vec<u8> {
    encode_encoded_request(stream, headers, &message.encode_to_vec())
}

/// Encodes a request whose message is encoded.
pub fn encode_encoded_request(stream: u32, headers: &[u8], message: &[u8]) -> Vec<u8> {
    let mut bytes = Vec::new();
    frames::frame(&mut bytes, frames::HEADERS, frames::END_HEADERS, stream, headers);
    let length = u32::try_from(message.len()).expect("a short message").to_be_bytes();
    let body = [&[0_u8][..], &length[..], message].concat();
    let mut pieces = body.chunks(16 << 10).peekable();
    while let Some(piece) = pieces.next() {
        let flags = if pieces.peek().is_none() { frames::END_STREAM } else { 0 };
        frames::frame(&mut bytes, frames::DATA, flags, stream, piece);
    }
    bytes
}

pub fn insertion(key: &str, length: usize) -> tensorflow::InsertKeyValueRequest {
    let kv = Some(tensorflow::KeyValueEntry { key: key.into(), value: value_of(key, length) });
    tensorflow::InsertKeyValueRequest { kv, allow_overwrite: false }
}
