//! Header compression (RFC 7541): decodes the header blocks of peers, and encodes those of the server without a
//! dynamic table.
//!
//! `request_head.rs` validates the decoded fields. Begin at [`HpackDecoder::decode_block`].

use std::borrow::Cow;
use std::collections::VecDeque;

use http::{HeaderMap, HeaderName, HeaderValue};
use serde::{Deserialize, Serialize};

use super::frame::{ConnectionError, ErrorCode};
use super::huffman;
use super::request_head::{ENTRY_OVERHEAD, RequestHeadBuilder};

/// The static table (RFC 7541, appendix A). Its first entry has index 1.
#[rustfmt::skip]
static STATIC_TABLE: [(&str, &str); 61] = [
    (":authority", ""),
    (":method", "GET"),
    (":method", "POST"),
    (":path", "/"),
    (":path", "/index.html"),
    (":scheme", "http"),
    (":scheme", "https"),
    (":status", "200"),
    (":status", "204"),
    (":status", "206"),
    (":status", "304"),
    (":status", "400"),
    (":status", "404"),
    (":status", "500"),
    ("accept-charset", ""),
    ("accept-encoding", "gzip, deflate"),
    ("accept-language", ""),
    ("accept-ranges", ""),
    ("accept", ""),
    ("access-control-allow-origin", ""),
    ("age", ""),
    ("allow", ""),
    ("authorization", ""),
    ("cache-control", ""),
    ("content-disposition", ""),
    ("content-encoding", ""),
    ("content-language", ""),
    ("content-length", ""),
    ("content-location", ""),
    ("content-range", ""),
    ("content-type", ""),
    ("cookie", ""),
    ("date", ""),
    ("etag", ""),
    ("expect", ""),
    ("expires", ""),
    ("from", ""),
    ("host", ""),
    ("if-match", ""),
    ("if-modified-since", ""),
    ("if-none-match", ""),
    ("if-range", ""),
    ("if-unmodified-since", ""),
    ("last-modified", ""),
    ("link", ""),
    ("location", ""),
    ("max-forwards", ""),
    ("proxy-authenticate", ""),
    ("proxy-authorization", ""),
    ("range", ""),
    ("referer", ""),
    ("refresh", ""),
    ("retry-after", ""),
    ("server", ""),
    ("set-cookie", ""),
    ("strict-transport-security", ""),
    ("transfer-encoding", ""),
    ("user-agent", ""),
    ("vary", ""),
    ("via", ""),
    ("www-authenticate", ""),
];

/// The size of the dynamic table before any settings.
const DEFAULT_TABLE_SIZE: usize = 4096;
/// The most memory that a dynamic table takes, in bytes. It is twice the size of the table, because the slots of
/// entries (two boxes, together [`ENTRY_OVERHEAD`] bytes) grow by doubling.
pub(super) const TABLE_BYTES: usize = 2 * DEFAULT_TABLE_SIZE;

/// The factor by which a header list may exceed the permitted size before the connection ends: decoding
/// further would be unbounded work for a request that is refused anyway.
const LIST_EXCESS: usize = 8;

type OwnedFieldText = Box<[u8]>;
/// The name and the value of a field, copied only if they had to be decoded.
type DecodedField<'a> = (Cow<'a, [u8]>, Cow<'a, [u8]>);

/// The decoder of the header blocks of one connection.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(super) struct HpackDecoder {
    entries: VecDeque<(OwnedFieldText, OwnedFieldText)>,
    size: usize,
    /// The present limit of the table, chosen by the peer.
    limit: usize,
    /// The greatest limit that the peer may choose.
    allowed: usize,
    /// Whether the peer has acknowledged a smaller table, and must announce it before its next field (RFC
    /// 7541, 4.2).
    must_shrink: bool,
}

impl Default for HpackDecoder {
    fn default() -> Self {
        Self {
            entries: VecDeque::new(),
            size: 0,
            limit: DEFAULT_TABLE_SIZE,
            allowed: DEFAULT_TABLE_SIZE,
            must_shrink: false,
        }
    }
}

impl HpackDecoder {
    /// Returns whether no block depends on earlier blocks, now and later.
    pub(super) fn is_stateless(&self) -> bool {
        self.limit == 0 && !self.must_shrink
    }

    /// Returns what a decoder needs to go on from this one; `None`: nothing, because the peer has agreed that there is no table
    /// ([`Self::without_table`]).
    pub(super) fn saved(&self) -> Option<Self> {
        (self.limit != 0 || self.allowed != 0 || self.must_shrink).then(|| self.clone())
    }

    /// Returns a decoder without a table, as the peer has agreed.
    pub(super) fn without_table() -> Self {
        Self { limit: 0, allowed: 0, ..Self::default() }
    }

    /// Disables the dynamic table, because the peer has acknowledged that setting.
    pub(super) fn disable_dynamic_table(&mut self) {
        if self.allowed != 0 {
            self.allowed = 0;
            self.must_shrink = self.limit != 0;
        }
    }

    /// Decodes a block. `most` bounds the size of the list by RFC 9113, 6.5.2. Beyond it the head is not
    /// built, but the block is decoded to keep the table in step.
    pub(super) fn decode_block(
        &mut self,
        mut block: &[u8],
        most: usize,
    ) -> Result<RequestHeadBuilder, ConnectionError> {
        let mut head = RequestHeadBuilder::new(most);
        let mut begun = false;
        if self.must_shrink && !block.first().is_some_and(|first| (0x20..0x40).contains(first)) {
            return Err(compression_error("the table is used after it was agreed that there is none"));
        }
        while let Some(&first) = block.first() {
            match first {
                0x80.. => {
                    let index = decode_integer(&mut block, 7)?;
                    let (name, value) = self.table_entry(index)?;
                    head.add_field(name, value);
                }
                0x40.. => {
                    let (name, value) = self.decode_literal(&mut block, 6, most)?;
                    head.add_field(&name, &value);
                    let fits = name.len() + value.len() + ENTRY_OVERHEAD <= self.limit;
                    match fits.then(|| (OwnedFieldText::from(&*name), OwnedFieldText::from(&*value))) {
                        Some((name, value)) => self.insert_entry(name, value),
                        // An entry larger than the table empties it (RFC 7541, 4.4).
                        None => {
                            self.entries.clear();
                            self.size = 0;
                        }
                    }
                }
                0x20.. => {
                    let limit = decode_integer(&mut block, 5)?;
                    if begun || limit > self.allowed {
                        return Err(compression_error("the table's size changes where it must not"));
                    }
                    self.limit = limit;
                    self.must_shrink = false;
                    self.evict_until_within_limit();
                    continue;
                }
                _ => {
                    let (name, value) = self.decode_literal(&mut block, 4, most)?;
                    head.add_field(&name, &value);
                }
            }
            begun = true;
            if head.list_size() > LIST_EXCESS * most {
                return Err(ConnectionError::new(ErrorCode::EnhanceYourCalm, "a header list without end"));
            }
        }
        Ok(head)
    }

    /// Checks that the recorded size of the table is right and within its bound.
    #[cfg(any(test, feature = "fuzzing"))]
    pub(super) fn assert_table_invariants(&self) {
        let size: usize =
            self.entries.iter().map(|(name, value)| name.len() + value.len() + ENTRY_OVERHEAD).sum();
        assert!(self.size == size && size <= self.limit && self.limit <= DEFAULT_TABLE_SIZE);
    }

    fn table_entry(&self, index: usize) -> Result<(&[u8], &[u8]), ConnectionError> {
        const UNKNOWN: ConnectionError = compression_error("an index leads beyond the table");
        let index = index.checked_sub(1).ok_or(UNKNOWN)?;
        if let Some((name, value)) = STATIC_TABLE.get(index) {
            return Ok((name.as_bytes(), value.as_bytes()));
        }
        let (name, value) = self.entries.get(index - STATIC_TABLE.len()).ok_or(UNKNOWN)?;
        Ok((name, value))
    }

    /// A name from the table is not copied: its reference cost the peer only two bytes.
    fn decode_literal<'a, 'b: 'a>(
        &'a self,
        block: &mut &'b [u8],
        prefix: u32,
        most: usize,
    ) -> Result<DecodedField<'a>, ConnectionError> {
        let name = match decode_integer(block, prefix)? {
            0 => decode_string(block, most)?,
            index => self.table_entry(index)?.0.into(),
        };
        Ok((name, decode_string(block, most)?))
    }

    fn insert_entry(&mut self, name: OwnedFieldText, value: OwnedFieldText) {
        self.size += name.len() + value.len() + ENTRY_OVERHEAD;
        self.entries.push_front((name, value));
        self.evict_until_within_limit();
    }

    fn evict_until_within_limit(&mut self) {
        while self.size > self.limit {
            let Some((name, value)) = self.entries.pop_back() else { break };
            self.size -= name.len() + value.len() + ENTRY_OVERHEAD;
        }
        if self.limit == 0 {
            self.entries = VecDeque::new();
        }
    }
}

/// Returns the error of an undecodable header block. The tables of peer and server may differ from here on,
/// so the connection ends.
const fn compression_error(what: &'static str) -> ConnectionError {
    ConnectionError { reason: ErrorCode::Compression, what }
}

const CUT: ConnectionError = compression_error("it ends in the middle");

/// Decodes an integer whose first byte holds `prefix` bits of it (RFC 7541, 5.1).
fn decode_integer(block: &mut &[u8], prefix: u32) -> Result<usize, ConnectionError> {
    let full = (1_usize << prefix) - 1;
    let first = take_byte(block)?;
    let mut value = usize::from(first) & full;
    if value < full {
        return Ok(value);
    }
    for shift in [0, 7, 14, 21] {
        let byte = take_byte(block)?;
        value += usize::from(byte & 0x7f) << shift;
        if byte & 0x80 == 0 {
            return Ok(value);
        }
    }
    Err(compression_error("a number is too large"))
}

fn take_byte(block: &mut &[u8]) -> Result<u8, ConnectionError> {
    let (first, rest) = block.split_first().ok_or(CUT)?;
    *block = rest;
    Ok(*first)
}

/// Decodes a string (RFC 7541, 5.2). A string longer than `most` bytes cannot be part of an accepted list.
fn decode_string<'a>(block: &mut &'a [u8], most: usize) -> Result<Cow<'a, [u8]>, ConnectionError> {
    let huffman = block.first().ok_or(CUT)? & 0x80 != 0;
    let length = decode_integer(block, 7)?;
    let (text, rest) = block.split_at_checked(length).ok_or(CUT)?;
    *block = rest;
    if huffman {
        // Twice the longest list, so that a list that is too long is distinguished from a malformed one.
        let text = huffman::decode_huffman(text, 2 * most + text.len());
        return text.map(Cow::Owned).ok_or(compression_error("a string is not in the Huffman code"));
    }
    Ok(text.into())
}

/// `:status: 200` and `content-type: application/grpc`: the head of every gRPC response.
pub(crate) static GRPC_RESPONSE_HEADERS: [u8; 20] = *b"\x88\x0f\x10\x10application/grpc";
/// `grpc-status: 0`: the trailers of every successful response.
pub(crate) static GRPC_OK_TRAILERS: [u8; 15] = *b"\x00\x0bgrpc-status\x010";

/// Encodes a header block: the status of a response, unless it is a trailer, and its fields. It adds nothing
/// to the peer's table.
pub(crate) fn encode_header_block(status: Option<u16>, fields: &HeaderMap) -> Vec<u8> {
    let mut block = Vec::with_capacity(64);
    match status {
        None => {}
        Some(200) => block.push(0x88),
        Some(status) => {
            // A literal with the name of static entry 8, `:status`.
            block.push(8);
            put_string(&mut block, status.to_string().as_bytes());
        }
    }
    for (name, value) in fields {
        put_field(&mut block, name, value);
    }
    block
}

fn put_field(block: &mut Vec<u8>, name: &HeaderName, value: &HeaderValue) {
    block.push(0);
    put_string(block, name.as_str().as_bytes());
    put_string(block, value.as_bytes());
}

fn put_string(block: &mut Vec<u8>, text: &[u8]) {
    let mut rest = text.len();
    if rest < 0x7f {
        block.push(rest as u8);
    } else {
        block.push(0x7f);
        rest -= 0x7f;
        while rest >= 0x80 {
            block.push(rest as u8 | 0x80);
            rest >>= 7;
        }
        block.push(rest as u8);
    }
    block.extend_from_slice(text);
}

#[cfg(test)]
mod tests {
    use super::super::request_head::RequestHead;
    use super::*;

    fn bytes_from_hex(hex: &str) -> Vec<u8> {
        let digits: Vec<u8> = hex.bytes().filter(u8::is_ascii_hexdigit).collect();
        let pairs = digits.chunks(2).map(|pair| std::str::from_utf8(pair).unwrap());
        pairs.map(|pair| u8::from_str_radix(pair, 16).unwrap()).collect()
    }

    /// Decodes a block and finishes it as a request, whether it is a valid one or not.
    fn decode_hex_block(decoder: &mut HpackDecoder, hex: &str) -> Result<RequestHead, ConnectionError> {
        decoder.decode_block(&bytes_from_hex(hex), 4096).map(RequestHeadBuilder::finish_request)
    }

    #[test]
    fn the_requests_of_the_standard() {
        // RFC 7541, C.4: three requests on one connection.
        let mut decoder = HpackDecoder::default();
        let first = decode_hex_block(&mut decoder, "8286 8441 8cf1 e3c2 e5f2 3a6b a0ab 90f4 ff").unwrap();
        assert_eq!((&*first.method, &*first.path, &*first.authority), ("GET", "/", "www.example.com"));
        assert_eq!((decoder.size, decoder.entries.len()), (57, 1));
        let second = decode_hex_block(&mut decoder, "8286 84be 5886 a8eb 1064 9cbf").unwrap();
        assert_eq!(second.authority, "www.example.com");
        assert_eq!(second.fields["cache-control"], "no-cache");
        let third =
            decode_hex_block(&mut decoder, "8287 85bf 4088 25a8 49e9 5ba9 7d7f 8925 a849 e95b b8e8 b4bf")
                .unwrap();
        assert_eq!(
            (&*third.path, &third.fields["custom-key"]),
            ("/index.html", &"custom-value".parse().unwrap())
        );
        assert_eq!((decoder.size, decoder.entries.len()), (164, 3));
    }

    #[test]
    fn a_table_that_is_switched_off_stays_empty() {
        let mut decoder = HpackDecoder::default();
        decode_hex_block(&mut decoder, "8286 8441 0161").unwrap();
        assert!(!decoder.is_stateless());
        decode_hex_block(&mut decoder, "20 8286 8441 0161").unwrap();
        assert!(decoder.is_stateless() && decoder.entries.is_empty() && decoder.size == 0);
        assert_eq!(
            decode_hex_block(&mut decoder, "be"),
            Err(compression_error("an index leads beyond the table"))
        );
    }

    #[test]
    fn a_peer_that_agreed_to_no_table_says_so_before_its_next_field() {
        const UNSAID: ConnectionError =
            compression_error("the table is used after it was agreed that there is none");
        for (hex, expected) in [
            ("8286 84", Err(UNSAID)),
            ("", Err(UNSAID)),
            ("3f01 8286 84", Err(compression_error("the table's size changes where it must not"))),
            ("20 8286 84", Ok(())),
        ] {
            let mut decoder = HpackDecoder::default();
            decode_hex_block(&mut decoder, "8286 8441 0161").unwrap();
            decoder.disable_dynamic_table();
            assert_eq!(decode_hex_block(&mut decoder, hex).map(drop), expected, "{hex:?}");
        }
        let mut early = HpackDecoder::default();
        decode_hex_block(&mut early, "20 8286 84").unwrap();
        early.disable_dynamic_table();
        assert_eq!(decode_hex_block(&mut early, "8286 84").map(drop), Ok(()), "it had said so already");
        assert!(decode_hex_block(&mut early, "21 8286 84").is_err(), "no table may come back");
    }

    #[test]
    fn references_to_a_long_name_end_when_the_list_has_no_end() {
        let mut decoder = HpackDecoder::default();
        let mut first = bytes_from_hex("40 7fa11e");
        first.resize(first.len() + 4000, b'n');
        first.push(0);
        decoder.decode_block(&first, 16 << 10).unwrap();
        assert_eq!(decoder.entries.len(), 1);
        let references = [0x0f, 62 - 15, 0].repeat(28_000);
        let fault = decoder.decode_block(&references, 16 << 10).map(|head| head.list_size()).unwrap_err();
        assert_eq!(fault.reason, ErrorCode::EnhanceYourCalm);
        assert!(
            decoder.decode_block(&references[..30], 16 << 10).is_ok_and(|head| head.list_size() > 40_000)
        );
    }

    #[test]
    fn an_invalid_block_is_a_compression_error() {
        for (hex, why) in [
            ("80", "an index leads beyond the table"),
            ("ff8001", "an index leads beyond the table"),
            ("ffffffffffff", "a number is too large"),
            ("ff", "it ends in the middle"),
            ("0005 6161", "it ends in the middle"),
            ("3fe21f", "the table's size changes where it must not"),
            ("82 20", "the table's size changes where it must not"),
            ("0081ff 0161", "a string is not in the Huffman code"),
        ] {
            assert_eq!(
                decode_hex_block(&mut HpackDecoder::default(), hex),
                Err(compression_error(why)),
                "{hex}"
            );
        }
    }

    #[test]
    fn what_is_written_reads_back() {
        let mut fields = HeaderMap::new();
        let long = "v".repeat(300);
        fields.insert("x-long", long.parse().unwrap());
        fields.append("x-two", "1".parse().unwrap());
        fields.append("x-two", "2".parse().unwrap());
        let read = |block: &[u8]| {
            HpackDecoder::default()
                .decode_block(block, 4096)
                .map(RequestHeadBuilder::finish_trailers)
                .unwrap()
        };
        let back = read(&encode_header_block(None, &fields));
        assert_eq!(back.fields, fields);
        for (status, head) in [(200, &[0x88][..]), (405, b"\x08\x03405")] {
            assert_eq!(encode_header_block(Some(status), &HeaderMap::new()), head);
        }
        let grpc = HeaderMap::from_iter([(
            http::header::CONTENT_TYPE,
            HeaderValue::from_static("application/grpc"),
        )]);
        let expected = read(&encode_header_block(Some(200), &grpc)[1..]);
        assert_eq!(read(&GRPC_RESPONSE_HEADERS[1..]), expected);
        let ok = read(&GRPC_OK_TRAILERS);
        assert_eq!(ok.fields["grpc-status"], "0");
    }
}
