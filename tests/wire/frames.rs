//! Encodes the frames that tests send, and decodes those that the server sends.

use std::net::SocketAddr;

use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;

use crate::raw::PATIENCE;
use crate::support::harness::frames;
pub use crate::support::harness::frames::{
    ACK, CONTINUATION, DATA, ENABLE_PUSH, END_HEADERS, END_STREAM, GOAWAY, HEADERS, INITIAL_WINDOW_SIZE,
    MAX_FRAME_SIZE, PADDED, PING, PREFACE, PRIORITY, PUSH_PROMISE, RST_STREAM, SETTINGS, WINDOW_UPDATE,
    WITH_PRIORITY, string,
};

// Error codes.
pub const NO_ERROR: u32 = 0;
pub const PROTOCOL_ERROR: u32 = 1;
pub const FLOW_CONTROL_ERROR: u32 = 3;
pub const STREAM_CLOSED: u32 = 5;
pub const FRAME_SIZE_ERROR: u32 = 6;
pub const REFUSED_STREAM: u32 = 7;
pub const COMPRESSION_ERROR: u32 = 9;
pub const ENHANCE_YOUR_CALM: u32 = 11;

pub fn http2_frame(kind: u8, flags: u8, stream: u32, payload: &[u8]) -> Vec<u8> {
    let mut bytes = Vec::new();
    frames::frame(&mut bytes, kind, flags, stream, payload);
    bytes
}

/// Encodes header fields as literals, without Huffman coding and without the dynamic table.
pub fn header_block(fields: &[(&str, &str)]) -> Vec<u8> {
    let mut block = Vec::new();
    for (name, value) in fields {
        frames::field(&mut block, name.as_bytes(), value.as_bytes());
    }
    block
}

pub fn request_fields() -> Vec<(&'static str, &'static str)> {
    vec![
        (":method", "POST"),
        (":scheme", "http"),
        (":path", "/tensorflow.CoordinationService/TryGetKeyValue"),
        (":authority", "target.test:1"),
        ("content-type", "application/grpc"),
        ("te", "trailers"),
    ]
}

/// Returns the header fields of a call of this method in generation A.
pub fn request_fields_of_method(method: &'static str) -> Vec<(&'static str, &'static str)> {
    let mut fields = request_fields();
    fields[2].1 = match method {
        "GetKeyValue" => "/tensorflow.CoordinationService/GetKeyValue",
        "InsertKeyValue" => "/tensorflow.CoordinationService/InsertKeyValue",
        _ => "/tensorflow.CoordinationService/TryGetKeyValue",
    };
    fields
}

/// A request for the key `k`, with gRPC's prefix.
pub const GET_K: [u8; 8] = [0, 0, 0, 0, 3, 0x0A, 1, b'k'];

pub fn settings_frame(pairs: &[(u16, u32)]) -> Vec<u8> {
    let mut bytes = Vec::new();
    frames::settings(&mut bytes, pairs);
    bytes
}

pub fn window_update_frame(stream: u32, more: u32) -> Vec<u8> {
    http2_frame(WINDOW_UPDATE, 0, stream, &more.to_be_bytes())
}

pub fn reset_frame(stream: u32) -> Vec<u8> {
    http2_frame(RST_STREAM, 0, stream, &8_u32.to_be_bytes())
}

/// Returns the regular opening of a connection: the preface and SETTINGS.
pub fn connection_opening() -> Vec<u8> {
    [PREFACE, &http2_frame(SETTINGS, 0, 0, &[])].concat()
}

/// Returns a complete request for a key that does not exist.
pub fn complete_request(stream: u32) -> Vec<u8> {
    complete_request_with_fields(stream, &request_fields())
}

/// Returns a complete request for the key `k` with these header fields.
pub fn complete_request_with_fields(stream: u32, fields: &[(&str, &str)]) -> Vec<u8> {
    [headers_frame(stream, 0, fields), http2_frame(DATA, END_STREAM, stream, &GET_K)].concat()
}

/// Returns HEADERS of a request, with further flags.
pub fn headers_frame(stream: u32, flags: u8, fields: &[(&str, &str)]) -> Vec<u8> {
    http2_frame(HEADERS, END_HEADERS | flags, stream, &header_block(fields))
}

/// A received frame.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Frame {
    pub kind: u8,
    pub flags: u8,
    pub stream: u32,
    pub payload: Vec<u8>,
}

impl Frame {
    pub fn has_flag(&self, flag: u8) -> bool {
        self.flags & flag != 0
    }

    /// Returns the four bytes from `place` on as a number.
    pub fn u32_at(&self, place: usize) -> u32 {
        let bytes = self.payload.get(place..place + 4).expect("the frame is long enough");
        u32::from_be_bytes(bytes.try_into().expect("four bytes"))
    }
}

/// A peer that sends and receives single frames.
pub struct FramePeer {
    pub socket: TcpStream,
}

impl FramePeer {
    pub async fn connect(server: SocketAddr) -> Self {
        let socket = TcpStream::connect(server).await.expect("the server listens");
        socket.set_nodelay(true).expect("a TCP socket");
        Self { socket }
    }

    /// Connects and sends the regular opening.
    pub async fn open(server: SocketAddr) -> Self {
        let mut peer = Self::connect(server).await;
        peer.say(&connection_opening()).await;
        peer
    }

    /// Sends bytes; returns `false` if the server has closed the connection.
    pub async fn say(&mut self, bytes: &[u8]) -> bool {
        self.socket.write_all(bytes).await.is_ok()
    }

    /// Returns the next frame, or `None` at the end of the connection.
    pub async fn receive_frame(&mut self) -> Option<Frame> {
        let read = async {
            let mut head = [0; 9];
            self.socket.read_exact(&mut head).await.ok()?;
            let length = u32::from_be_bytes([0, head[0], head[1], head[2]]) as usize;
            let mut payload = vec![0; length];
            self.socket.read_exact(&mut payload).await.ok()?;
            let stream = u32::from_be_bytes([head[5], head[6], head[7], head[8]]);
            Some(Frame { kind: head[3], flags: head[4], stream, payload })
        };
        tokio::time::timeout(PATIENCE, read).await.expect("the server sends or closes in time")
    }

    /// Reads until a frame matches; returns `None` if the connection ends before.
    pub async fn receive_until(&mut self, mut is_it: impl FnMut(&Frame) -> bool) -> Option<Frame> {
        loop {
            let frame = self.receive_frame().await?;
            if is_it(&frame) {
                return Some(frame);
            }
        }
    }

    /// Reads until GOAWAY; returns its error code and its text.
    pub async fn receive_goaway(&mut self) -> (u32, String) {
        let goaway = self.receive_until(|frame| frame.kind == GOAWAY).await.expect("a goodbye");
        assert!(self.receive_frame().await.is_none(), "the connection is closed after its goodbye");
        (goaway.u32_at(4), String::from_utf8_lossy(&goaway.payload[8..]).into_owned())
    }
}
