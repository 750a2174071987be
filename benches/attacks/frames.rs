//! The gRPC calls of the benchmark as frames of HTTP/2.

use prost::Message;

pub use crate::harness::frames::*;

/// The length of a frame header.
pub const HEAD: usize = 9;
/// The largest frame payload before any settings.
pub const FRAME: usize = 16 << 10;

/// The largest window.
pub const LARGEST_WINDOW: u32 = (1 << 31) - 1;
/// The initial window.
pub const FIRST_WINDOW: u32 = (1 << 16) - 1;

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
