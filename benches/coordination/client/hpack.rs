//! Header compression (RFC 7541): the parts that a gRPC client needs.
//!
//! Requests repeat the same few headers. Response headers are decoded in full. A compressed string that any
//! connection has received before is not decoded again, but looked up.

use std::collections::{HashMap, VecDeque};

use anyhow::{Context as _, Result, bail, ensure};
use bytes::Bytes;

use crate::wire::Method;

/// The headers of all requests to one server.
pub struct HeaderTable {
    paths: Vec<HeaderField>,
    others: Vec<HeaderField>,
}

/// A header with and without incremental indexing.
struct HeaderField {
    remembered: Vec<u8>,
    passing: Vec<u8>,
}

/// The static indexes of `:method POST` and `:scheme http`, and of these names.
const POST: u8 = 0x83;
const HTTP: u8 = 0x86;
const AUTHORITY: usize = 1;
const PATH: usize = 4;
const CONTENT_TYPE: usize = 31;
const USER_AGENT: usize = 58;

/// The first bits of a header: an index, a literal with indexing, or a literal without.
const INDEXED: u8 = 0x80;
const REMEMBERED: u8 = 0x40;
const PASSING: u8 = 0;
/// The first bits of a dynamic table size update.
const TABLE_SIZE: u8 = 0x20;

/// The size of a table that holds all headers of a client.
pub const TABLE: u32 = 4096;

impl HeaderTable {
    /// Returns the headers of jaxlib's requests to a server at `authority`.
    pub fn new(authority: &str) -> Self {
        let phrase = |known: usize, name: &str, value: &str| {
            let name = if known == 0 { string(name) } else { Vec::new() };
            let whole = |kind, bits| [number(kind, bits, known), name.clone(), string(value)].concat();
            HeaderField { remembered: whole(REMEMBERED, 6), passing: whole(PASSING, 4) }
        };
        let others = vec![
            phrase(AUTHORITY, ":authority", authority),
            phrase(0, "te", "trailers"),
            phrase(CONTENT_TYPE, "content-type", "application/grpc"),
            phrase(USER_AGENT, "user-agent", "grpc-c++/1.78.0 grpc-c/52.0.0 (linux; chttp2)"),
            phrase(0, "grpc-encoding", "gzip"),
            phrase(0, "grpc-accept-encoding", "identity, deflate, gzip"),
        ];
        let paths = Method::ALL.iter().map(|method| phrase(PATH, ":path", &method.path())).collect();
        Self { paths, others }
    }
}

/// Encodes an integer with a prefix of `bits` bits and at most one further byte.
fn number(kind: u8, bits: u32, value: usize) -> Vec<u8> {
    let most = (1 << bits) - 1;
    if value < most { vec![kind | value as u8] } else { vec![kind | most as u8, (value - most) as u8] }
}

/// Encodes a string literal, which must be shorter than 127 bytes.
fn string(text: &str) -> Vec<u8> {
    let mut out = vec![text.len() as u8];
    out.extend_from_slice(text.as_bytes());
    out
}

/// The dynamic table that the peer of one connection keeps.
#[derive(Default)]
pub struct Encoder {
    remembered: u8,
    paths: [Option<u8>; Method::ALL.len()],
    /// Set if the peer's table is too small: the change is announced once, and every request is sent in full.
    forgetful: Option<Told>,
}

struct Told(bool);

impl Encoder {
    /// Applies the peer's table size.
    pub fn table_size(&mut self, size: u32) {
        if size < TABLE {
            self.forgetful.get_or_insert(Told(false));
        }
    }

    /// Appends the headers of a request.
    pub fn encode(&mut self, phrases: &HeaderTable, method: Method, out: &mut Vec<u8>) {
        let path = &phrases.paths[method as usize];
        if let Some(Told(told)) = &mut self.forgetful {
            if !std::mem::replace(told, true) {
                out.push(TABLE_SIZE);
            }
            out.extend_from_slice(&[POST, HTTP]);
            out.extend_from_slice(&path.passing);
            for phrase in &phrases.others {
                out.extend_from_slice(&phrase.passing);
            }
            return;
        }
        out.extend_from_slice(&[POST, HTTP]);
        let first = self.remembered == 0;
        match self.paths[method as usize] {
            Some(place) => out.push(self.index(place)),
            None => {
                out.extend_from_slice(&path.remembered);
                self.paths[method as usize] = Some(self.remembered);
                self.remembered += 1;
            }
        }
        for (place, phrase) in (1..).zip(&phrases.others) {
            if first {
                out.extend_from_slice(&phrase.remembered);
                self.remembered += 1;
            } else {
                out.push(self.index(place));
            }
        }
    }

    /// Returns the index of an entry: the newest comes directly after the 61 static ones.
    fn index(&self, place: u8) -> u8 {
        INDEXED | (62 + self.remembered - 1 - place)
    }
}

/// The decoded strings, by their compressed forms.
#[derive(Default)]
pub struct StringCache {
    known: HashMap<Vec<u8>, Bytes>,
    codes: HuffmanTable,
}

impl StringCache {
    fn decompressed(&mut self, packed: &[u8]) -> Result<Bytes> {
        if let Some(known) = self.known.get(packed) {
            return Ok(known.clone());
        }
        let text = Bytes::from(self.codes.decode(packed)?);
        self.known.insert(packed.to_vec(), text.clone());
        Ok(text)
    }
}

/// The dynamic table that a peer uses.
pub struct Decoder {
    table: VecDeque<(Bytes, Bytes)>,
    size: usize,
    limit: usize,
}

impl Default for Decoder {
    fn default() -> Self {
        Self { table: VecDeque::new(), size: 0, limit: TABLE as usize }
    }
}

impl Decoder {
    /// Decodes a header block.
    pub fn decode(
        &mut self,
        mut block: &[u8],
        strings: &mut StringCache,
        mut header: impl FnMut(&[u8], &[u8]),
    ) -> Result<()> {
        while let Some(&first) = block.first() {
            if first & INDEXED != 0 {
                let (name, value) = self.entry(integer(&mut block, 7)?)?;
                header(&name, &value);
                continue;
            }
            if first & 0xe0 == TABLE_SIZE {
                self.limit = integer(&mut block, 5)?;
                self.make_room(0);
                continue;
            }
            let remembered = first & REMEMBERED != 0;
            let name = match integer(&mut block, if remembered { 6 } else { 4 })? {
                0 => text(&mut block, strings)?,
                index => self.entry(index)?.0,
            };
            let value = text(&mut block, strings)?;
            header(&name, &value);
            if remembered {
                self.remember(name, value);
            }
        }
        Ok(())
    }

    fn entry(&self, index: usize) -> Result<(Bytes, Bytes)> {
        if let Some((name, value)) = index.checked_sub(1).and_then(|index| STATIC.get(index)) {
            return Ok((Bytes::from_static(name.as_bytes()), Bytes::from_static(value.as_bytes())));
        }
        let found = index.checked_sub(1 + STATIC.len()).and_then(|index| self.table.get(index));
        found.cloned().with_context(|| format!("no header has index {index}"))
    }

    fn remember(&mut self, name: Bytes, value: Bytes) {
        let size = name.len() + value.len() + 32;
        self.make_room(size);
        if size <= self.limit {
            self.size += size;
            self.table.push_front((name, value));
        }
    }

    fn make_room(&mut self, size: usize) {
        while self.size + size > self.limit {
            let Some((name, value)) = self.table.pop_back() else { return };
            self.size -= name.len() + value.len() + 32;
        }
    }
}

fn integer(block: &mut &[u8], bits: u32) -> Result<usize> {
    let mut next = || -> Result<usize> {
        let (&byte, rest) = block.split_first().context("a header block is cut short")?;
        *block = rest;
        Ok(byte.into())
    };
    let most = (1 << bits) - 1;
    let mut number = next()? & most;
    if number == most {
        for shift in (0..28).step_by(7) {
            let byte = next()?;
            number += (byte & 0x7f) << shift;
            if byte < 0x80 {
                return Ok(number);
            }
        }
        bail!("a number too large for headers");
    }
    Ok(number)
}

fn text(block: &mut &[u8], strings: &mut StringCache) -> Result<Bytes> {
    let compressed = block.first().is_some_and(|&first| first & 0x80 != 0);
    let length = integer(block, 7)?;
    let (text, rest) = block.split_at_checked(length).context("a header is cut short")?;
    *block = rest;
    if compressed { strings.decompressed(text) } else { Ok(Bytes::copy_from_slice(text)) }
}

/// The Huffman code of RFC 7541, appendix B. It is canonical: the lengths of the codes define it.
struct HuffmanTable {
    /// The symbols, by the length of their code and then by value.
    symbols: Vec<u16>,
}

impl Default for HuffmanTable {
    fn default() -> Self {
        let mut symbols: Vec<u16> = (0..LENGTHS.len() as u16).collect();
        symbols.sort_by_key(|&symbol| LENGTHS[usize::from(symbol)]);
        Self { symbols }
    }
}

impl HuffmanTable {
    fn decode(&self, packed: &[u8]) -> Result<Vec<u8>> {
        let mut out = Vec::new();
        let mut bits = packed.iter().flat_map(|byte| (0..8).rev().map(move |bit| u32::from(byte >> bit & 1)));
        'symbols: loop {
            // The first code of the present length, and the number of symbols with shorter codes.
            let (mut code, mut first, mut shorter) = (0, 0, 0);
            for length in 1..=30 {
                let Some(bit) = bits.next() else {
                    ensure!(length <= 8, "a compressed string ends within a symbol");
                    return Ok(out);
                };
                code = code << 1 | bit;
                first <<= 1;
                let of_length = LENGTHS.iter().filter(|&&other| other == length).count() as u32;
                if code < first + of_length {
                    let symbol = self.symbols[(shorter + code - first) as usize];
                    out.push(u8::try_from(symbol).context("a compressed string with an end inside")?);
                    continue 'symbols;
                }
                first += of_length;
                shorter += of_length;
            }
            bail!("no symbol has such a code");
        }
    }
}

#[rustfmt::skip]
const LENGTHS: [u8; 257] = [
    13, 23, 28, 28, 28, 28, 28, 28, 28, 24, 30, 28, 28, 30, 28, 28, 28, 28, 28, 28, 28, 28, 30, 28, 28, 28, 28, 28, 28, 28, 28, 28,
    6, 10, 10, 12, 13, 6, 8, 11, 10, 10, 8, 11, 8, 6, 6, 6, 5, 5, 5, 6, 6, 6, 6, 6, 6, 6, 7, 8, 15, 6, 12, 10,
    13, 6, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 8, 7, 8, 13, 19, 13, 14, 6,
    15, 5, 6, 5, 6, 5, 6, 6, 6, 5, 7, 7, 6, 6, 6, 5, 6, 7, 6, 5, 5, 6, 7, 7, 7, 7, 7, 15, 11, 14, 13, 28,
    20, 22, 20, 20, 22, 22, 22, 23, 22, 23, 23, 23, 23, 23, 24, 23, 24, 24, 22, 23, 24, 23, 23, 23, 23, 21, 22, 23, 22, 23, 23, 24,
    22, 21, 20, 22, 22, 23, 23, 21, 23, 22, 22, 24, 21, 22, 23, 23, 21, 21, 22, 21, 23, 22, 23, 23, 20, 22, 22, 22, 23, 22, 22, 23,
    26, 26, 20, 19, 22, 23, 22, 25, 26, 26, 26, 27, 27, 26, 24, 25, 19, 21, 26, 27, 27, 26, 27, 24, 21, 21, 26, 26, 28, 27, 27, 27,
    20, 24, 20, 21, 22, 21, 21, 23, 22, 22, 25, 25, 24, 24, 26, 23, 26, 27, 26, 26, 27, 27, 27, 27, 27, 28, 27, 27, 27, 27, 27, 26,
    30,
];

/// The static table (RFC 7541, appendix A).
#[rustfmt::skip]
const STATIC: [(&str, &str); 61] = [
    (":authority", ""), (":method", "GET"), (":method", "POST"), (":path", "/"), (":path", "/index.html"),
    (":scheme", "http"), (":scheme", "https"), (":status", "200"), (":status", "204"), (":status", "206"),
    (":status", "304"), (":status", "400"), (":status", "404"), (":status", "500"), ("accept-charset", ""),
    ("accept-encoding", "gzip, deflate"), ("accept-language", ""), ("accept-ranges", ""), ("accept", ""),
    ("access-control-allow-origin", ""), ("age", ""), ("allow", ""), ("authorization", ""), ("cache-control", ""),
    ("content-disposition", ""), ("content-encoding", ""), ("content-language", ""), ("content-length", ""),
    ("content-location", ""), ("content-range", ""), ("content-type", ""), ("cookie", ""), ("date", ""), ("etag", ""),
    ("expect", ""), ("expires", ""), ("from", ""), ("host", ""), ("if-match", ""), ("if-modified-since", ""),
    ("if-none-match", ""), ("if-range", ""), ("if-unmodified-since", ""), ("last-modified", ""), ("link", ""),
    ("location", ""), ("max-forwards", ""), ("proxy-authenticate", ""), ("proxy-authorization", ""), ("range", ""),
    ("referer", ""), ("refresh", ""), ("retry-after", ""), ("server", ""), ("set-cookie", ""),
    ("strict-transport-security", ""), ("transfer-encoding", ""), ("user-agent", ""), ("vary", ""), ("via", ""),
    ("www-authenticate", ""),
];
