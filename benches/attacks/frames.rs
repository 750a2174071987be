//! Frames of HTTP/2 (RFC 9113) and header blocks (RFC 7541), as any client may write them.

use prost::Message;

/// The connection preface.
pub const PREFACE: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";

pub const DATA: u8 = 0;
pub const HEADERS: u8 = 1;
pub const RST_STREAM: u8 = 3;
pub const SETTINGS: u8 = 4;
pub const PING: u8 = 6;
pub const GOAWAY: u8 = 7;
pub const WINDOW_UPDATE: u8 = 8;
pub const CONTINUATION: u8 = 9;

pub const END_STREAM: u8 = 1;
pub const ACK: u8 = 1;
pub const END_HEADERS: u8 = 4;

pub const INITIAL_WINDOW_SIZE: u16 = 4;

/// The length of a frame header.
pub const HEAD: usize = 9;
/// The largest frame payload before any settings.
pub const FRAME: usize = 16 << 10;

/// The largest window.
pub const LARGEST_WINDOW: u32 = (1 << 31) - 1;
/// The initial window.
pub const FIRST_WINDOW: u32 = (1 << 16) - 1;

/// Appends a frame header.
pub fn head(out: &mut Vec<u8>, length: usize, kind: u8, flags: u8, stream: u32) {
    out.extend_from_slice(&(length as u32).to_be_bytes()[1..]);
    out.extend_from_slice(&[kind, flags]);
    out.extend_from_slice(&stream.to_be_bytes());
}

/// Appends a frame.
pub fn frame(out: &mut Vec<u8>, kind: u8, flags: u8, stream: u32, payload: &[u8]) {
    head(out, payload.len(), kind, flags, stream);
    out.extend_from_slice(payload);
}

/// Appends a SETTINGS frame.
pub fn settings(out: &mut Vec<u8>, entries: &[(u16, u32)]) {
    head(out, entries.len() * 6, SETTINGS, 0, 0);
    for (name, value) in entries {
        out.extend_from_slice(&name.to_be_bytes());
        out.extend_from_slice(&value.to_be_bytes());
    }
}

/// Appends a frame whose payload is one number.
pub fn number(out: &mut Vec<u8>, kind: u8, stream: u32, value: u32) {
    frame(out, kind, 0, stream, &value.to_be_bytes());
}

/// Appends a header block in as many frames as it needs.
pub fn block(out: &mut Vec<u8>, stream: u32, ends: bool, block: &[u8]) {
    let last = block.len().div_ceil(FRAME).max(1) - 1;
    for (n, piece) in block.chunks(FRAME).enumerate() {
        let kind = if n == 0 { HEADERS } else { CONTINUATION };
        let ends = if n == 0 && ends { END_STREAM } else { 0 };
        let done = if n == last { END_HEADERS } else { 0 };
        frame(out, kind, ends | done, stream, piece);
    }
}

/// Appends an integer whose first byte has `prefix` bits for it (RFC 7541, 5.1).
pub fn integer(out: &mut Vec<u8>, first: u8, prefix: u32, value: usize) {
    let most = (1 << prefix) - 1;
    if value < most {
        return out.push(first | value as u8);
    }
    out.push(first | most as u8);
    let mut rest = value - most;
    while rest >= 0x80 {
        out.push(rest as u8 | 0x80);
        rest >>= 7;
    }
    out.push(rest as u8);
}

/// Appends a string literal (RFC 7541, 5.2).
pub fn string(out: &mut Vec<u8>, text: &[u8]) {
    integer(out, 0, 7, text.len());
    out.extend_from_slice(text);
}

/// Appends a literal field without indexing.
pub fn field(out: &mut Vec<u8>, name: &[u8], value: &[u8]) {
    out.push(0);
    string(out, name);
    string(out, value);
}

/// The authority of the calls.
const AUTHORITY: &[u8] = b"localhost:8476";

/// Returns the header block of a gRPC call.
pub fn call_block(path: &str) -> Vec<u8> {
    // First that no table is used, as the server asks (RFC 7541, 4.2), `:method: POST` and `:scheme: http`, then `:path`, `:authority` and `content-type` by the names of the table.
    let mut out = vec![0x20, 0x83, 0x86, 4];
    string(&mut out, path.as_bytes());
    out.push(1);
    string(&mut out, AUTHORITY);
    integer(&mut out, 0, 4, 31);
    string(&mut out, b"application/grpc");
    field(&mut out, b"te", b"trailers");
    out
}

/// Returns the path of a method of generation A.
pub fn path(method: &str) -> String {
    format!("/tensorflow.CoordinationService/{method}")
}

/// Returns a message with gRPC's prefix.
pub fn message(message: &impl Message) -> Vec<u8> {
    let encoded = message.encode_to_vec();
    let mut out = Vec::with_capacity(encoded.len() + 5);
    out.push(0);
    out.extend_from_slice(&(encoded.len() as u32).to_be_bytes());
    out.extend_from_slice(&encoded);
    out
}

/// Appends a complete call whose message fits into a frame.
pub fn call(out: &mut Vec<u8>, stream: u32, head: &[u8], message: &[u8]) {
    frame(out, HEADERS, END_HEADERS, stream, head);
    frame(out, DATA, END_STREAM, stream, message);
}

/// Returns the `grpc-status` of a header block whose fields are literals, as Muster's are.
pub fn grpc_status(block: &[u8]) -> Option<u32> {
    const NAME: &[u8] = b"\x0bgrpc-status";
    let at = block.windows(NAME.len()).position(|window| window == NAME)?;
    let (&length, rest) = block.get(at + NAME.len()..)?.split_first()?;
    std::str::from_utf8(rest.get(..length.into())?).ok()?.parse().ok()
}
