//! Validates the header list and the trailers of a request (RFC 9113, section 8), and caches request heads by the
//! bytes of their header blocks.
//!
//! `hpack.rs` decodes header blocks. Begin at [`RequestHeadBuilder::add_field`] and [`HeaderBlockCache`].

use std::sync::Arc;

use http::header::HOST;
use http::{HeaderMap, HeaderName, HeaderValue};

/// The size of a field beside its name and value, in the size of a list (RFC 9113, 6.5.2) and in that of a table
/// (RFC 7541, 4.1).
pub(super) const ENTRY_OVERHEAD: usize = 32;

/// The head of a request, or its trailers.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct RequestHead {
    pub(crate) method: String,
    pub(crate) scheme: String,
    pub(crate) authority: String,
    pub(crate) path: String,
    pub(crate) fields: HeaderMap,
    /// The length of the body, if the head states it.
    pub(crate) content_length: Option<u64>,
    /// The error of the head, if it has one.
    pub(super) error: Option<HeaderError>,
}

/// A value that is made from the head of a request and kept.
pub(crate) trait FromRequestHead: From<RequestHead> {
    /// Returns the length of the body, if the head states it.
    fn content_length(&self) -> Option<u64>;
}

/// The error of a head.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum HeaderError {
    /// It is malformed (RFC 9113, 8.1.1).
    Malformed,
    /// It exceeds the permitted size.
    TooLong,
}

/// The pseudo-headers of requests (RFC 9113, 8.3.1).
const METHOD: u8 = 1;
const SCHEME: u8 = 2;
const AUTHORITY: u8 = 4;
const PATH: u8 = 8;

/// Builds a head field by field, and validates it.
pub(super) struct RequestHeadBuilder {
    head: RequestHead,
    most: usize,
    size: usize,
    /// The pseudo-headers that have occurred.
    pseudo: u8,
    /// Whether a regular field has occurred.
    regular: bool,
}

impl RequestHeadBuilder {
    pub(super) fn new(most: usize) -> Self {
        Self { head: RequestHead::default(), most, size: 0, pseudo: 0, regular: false }
    }

    /// Returns the size of the list so far, by RFC 9113, 6.5.2.
    pub(super) fn list_size(&self) -> usize {
        self.size
    }

    /// Adds a field.
    pub(super) fn add_field(&mut self, name: &[u8], value: &[u8]) {
        self.size = self.size.saturating_add(name.len() + value.len() + ENTRY_OVERHEAD);
        if self.size > self.most {
            self.head.error = Some(HeaderError::TooLong);
        }
        if self.head.error.is_none() && self.try_add_field(name, value).is_none() {
            self.head.error = Some(HeaderError::Malformed);
        }
    }

    fn try_add_field(&mut self, name: &[u8], value: &[u8]) -> Option<()> {
        if let [b':', pseudo @ ..] = name {
            let (bit, place) = match pseudo {
                _ if self.regular => return None,
                b"method" => (METHOD, &mut self.head.method),
                b"scheme" => (SCHEME, &mut self.head.scheme),
                b"authority" => (AUTHORITY, &mut self.head.authority),
                b"path" => (PATH, &mut self.head.path),
                _ => return None,
            };
            if self.pseudo & bit != 0 {
                return None;
            }
            self.pseudo |= bit;
            // Visible ASCII, as in URIs and method names.
            if !value.iter().all(u8::is_ascii_graphic) {
                return None;
            }
            *place = String::from_utf8_lossy(value).into_owned();
            return Some(());
        }
        self.regular = true;
        if name.iter().any(u8::is_ascii_uppercase) || CONNECTION_SPECIFIC.contains(&name) {
            return None;
        }
        let is_padded = |end: Option<&u8>| matches!(end, Some(b' ' | b'\t'));
        if is_padded(value.first()) || is_padded(value.last()) {
            return None;
        }
        match name {
            b"te" if !value.eq_ignore_ascii_case(b"trailers") => return None,
            b"content-length" => {
                let length = parse_decimal(value)?;
                if *self.head.content_length.get_or_insert(length) != length {
                    return None;
                }
            }
            _ => {}
        }
        let name = HeaderName::from_bytes(name).ok()?;
        let value = HeaderValue::from_bytes(value).ok()?;
        self.head.fields.try_append(name, value).ok()?;
        Some(())
    }

    /// Returns the head of a request, with an error if it lacks a required field (RFC 9113, 8.3.1).
    pub(super) fn finish_request(mut self) -> RequestHead {
        if self.head.error.is_none() && self.check_required_fields().is_none() {
            self.head.error = Some(HeaderError::Malformed);
        }
        self.head
    }

    fn check_required_fields(&mut self) -> Option<()> {
        let head = &mut self.head;
        let needed = if head.method == "CONNECT" { METHOD | AUTHORITY } else { METHOD | SCHEME | PATH };
        if self.pseudo & !AUTHORITY != needed & !AUTHORITY
            || self.pseudo & needed != needed
            || head.method.is_empty()
        {
            return None;
        }
        if needed & PATH != 0 && !head.path.starts_with('/') && (head.method != "OPTIONS" || head.path != "*")
        {
            return None;
        }
        let mut hosts = head.fields.get_all(HOST).iter();
        if let Some(host) = hosts.next() {
            let host = host.to_str().ok()?;
            if hosts.next().is_some() {
                return None;
            }
            if self.pseudo & AUTHORITY == 0 {
                host.clone_into(&mut head.authority);
            } else if !host.eq_ignore_ascii_case(&head.authority) {
                return None;
            }
        }
        Some(())
    }

    /// Returns the trailers, with an error if they contain pseudo-headers (RFC 9113, 8.1).
    pub(super) fn finish_trailers(mut self) -> RequestHead {
        if self.pseudo != 0 {
            self.head.error.get_or_insert(HeaderError::Malformed);
        }
        self.head
    }
}

/// Parses a number in decimal digits.
fn parse_decimal(digits: &[u8]) -> Option<u64> {
    if digits.is_empty() {
        return None;
    }
    digits.iter().try_fold(0_u64, |number, digit| {
        let digit = digit.is_ascii_digit().then(|| u64::from(digit - b'0'))?;
        number.checked_mul(10)?.checked_add(digit)
    })
}

/// Connection-specific fields, which HTTP/2 forbids (RFC 9113, 8.2.2).
const CONNECTION_SPECIFIC: [&[u8]; 5] =
    [b"connection", b"proxy-connection", b"keep-alive", b"transfer-encoding", b"upgrade"];

/// A cache of decoded heads by the bytes of their header blocks. Clients without a table send the same bytes
/// for the same method again and again, so each is decoded once.
#[derive(Debug)]
pub(crate) struct HeaderBlockCache<H> {
    known: Vec<Option<CachedHead<H>>>,
    /// The position of the head that was found last. The next block is mostly the same, and then is not hashed.
    latest: usize,
}

#[derive(Debug)]
struct CachedHead<H> {
    block: Box<[u8]>,
    head: Arc<H>,
}

/// The number of entries; a power of two.
const CACHED_HEADS: usize = 256;
/// The length beyond which a block is not cached.
const CACHED_BLOCK_MAX: usize = 1 << 10;

impl<H> HeaderBlockCache<H> {
    pub(crate) const fn new() -> Self {
        Self { known: Vec::new(), latest: 0 }
    }

    fn slot_of_block(block: &[u8]) -> usize {
        const FACTOR: u64 = 0x9E37_79B9_7F4A_7C15;
        let mix = |hash: u64, word: u64| (hash.rotate_left(5) ^ word).wrapping_mul(FACTOR);
        // Four hashes, so that a multiplication does not wait for the one before it.
        let mut hashes = [block.len() as u64, 1, 2, 3];
        let (words, rest) = block.as_chunks::<8>();
        let (fours, few) = words.as_chunks::<4>();
        for four in fours {
            for (hash, word) in hashes.iter_mut().zip(four) {
                *hash = mix(*hash, u64::from_le_bytes(*word));
            }
        }
        for (hash, word) in hashes.iter_mut().zip(few) {
            *hash = mix(*hash, u64::from_le_bytes(*word));
        }
        let mut last = [0; 8];
        for (to, byte) in last.iter_mut().zip(rest) {
            *to = *byte;
        }
        let hash = hashes.into_iter().fold(u64::from_le_bytes(last), mix);
        (hash >> 56) as usize % CACHED_HEADS
    }

    /// Returns the cached head of `block`.
    pub(super) fn lookup(&mut self, block: &[u8]) -> Option<Arc<H>> {
        if let Some(head) = self.cached_head_in_slot(self.latest, block) {
            return Some(head);
        }
        let slot = Self::slot_of_block(block);
        let head = self.cached_head_in_slot(slot, block)?;
        self.latest = slot;
        Some(head)
    }

    /// Returns the head in `slot` if it is that of `block`.
    fn cached_head_in_slot(&self, slot: usize, block: &[u8]) -> Option<Arc<H>> {
        let known = self.known.get(slot)?.as_ref()?;
        (*known.block == *block).then(|| Arc::clone(&known.head))
    }

    /// Caches the head of `block`.
    pub(super) fn insert(&mut self, block: &[u8], head: &Arc<H>) {
        if block.len() > CACHED_BLOCK_MAX {
            return;
        }
        if self.known.is_empty() {
            self.known.resize_with(CACHED_HEADS, || None);
        }
        if let Some(place) = self.known.get_mut(Self::slot_of_block(block)) {
            *place = Some(CachedHead { block: block.into(), head: Arc::clone(head) });
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn build_head(fields: &[(&str, &str)]) -> RequestHeadBuilder {
        let mut head = RequestHeadBuilder::new(1000);
        for (name, value) in fields {
            head.add_field(name.as_bytes(), value.as_bytes());
        }
        head
    }

    const GOOD: [(&str, &str); 3] = [(":method", "POST"), (":scheme", "http"), (":path", "/x")];

    #[test]
    fn malformed_heads_are_marked() {
        for good in [
            &[("te", "trailers"), ("te", "Trailers")][..],
            &[("content-length", "12"), ("content-length", "12")],
            &[(":authority", "host:1"), ("host", "HOST:1")],
            &[("x", ""), ("y", "a b")],
        ] {
            let mut fields = GOOD.to_vec();
            fields.extend(good);
            assert_eq!(build_head(&fields).finish_request().error, None, "{good:?}");
        }
        for bad in [
            &[("te", "trailers"), (":authority", "x")][..],
            &[(":method", "GET")],
            &[(":status", "200")],
            &[(":protocol", "websocket")],
            &[(":authority", "a b")],
            &[(":authority", "a"), (":authority", "a")],
            &[("Upper", "case")],
            &[("connection", "close")],
            &[("bad name", "x")],
            &[("", "x")],
            &[("name", "line\nbreak")],
            &[("name", " padded")],
            &[("name", "padded\t")],
            &[("te", "gzip")],
            &[("te", "trailers, gzip")],
            &[("content-length", "12"), ("content-length", "13")],
            &[("content-length", "+1")],
            &[("content-length", "99999999999999999999")],
            &[(":authority", "a"), ("host", "b")],
            &[("host", "a"), ("host", "a")],
        ] {
            let mut fields = GOOD.to_vec();
            fields.extend(bad);
            assert_eq!(build_head(&fields).finish_request().error, Some(HeaderError::Malformed), "{bad:?}");
        }
        assert_eq!(build_head(&[("x", &"y".repeat(990))]).finish_request().error, Some(HeaderError::TooLong));
    }

    #[test]
    fn requests_have_all_of_their_pseudo_headers_and_trailers_none() {
        for missing in 0..GOOD.len() {
            let mut fields = GOOD.to_vec();
            fields.remove(missing);
            assert_eq!(
                build_head(&fields).finish_request().error,
                Some(HeaderError::Malformed),
                "{fields:?}"
            );
        }
        for (method, path, flaw) in [
            ("OPTIONS", "*", None),
            ("GET", "*", Some(HeaderError::Malformed)),
            ("GET", "", Some(HeaderError::Malformed)),
            ("GET", "x", Some(HeaderError::Malformed)),
            ("", "/", Some(HeaderError::Malformed)),
            ("CONNECT", "/", Some(HeaderError::Malformed)),
        ] {
            let fields = [(":method", method), (":scheme", "http"), (":path", path)];
            assert_eq!(build_head(&fields).finish_request().error, flaw, "{method} {path}");
        }
        assert_eq!(build_head(&[(":method", "CONNECT"), (":authority", "a:1")]).finish_request().error, None);
        assert_eq!(
            build_head(&[(":method", "CONNECT")]).finish_request().error,
            Some(HeaderError::Malformed)
        );
        let host = build_head(&[&GOOD[..], &[("host", "only.one:1")]].concat()).finish_request();
        assert_eq!((host.error, &*host.authority), (None, "only.one:1"));
        assert_eq!(build_head(&[("t", "v")]).finish_trailers().error, None);
        assert_eq!(build_head(&[(":method", "GET")]).finish_trailers().error, Some(HeaderError::Malformed));
    }

    #[test]
    fn a_head_is_known_by_all_of_its_bytes() {
        let mut cache = HeaderBlockCache::new();
        let blocks: Vec<Vec<u8>> = (0..2000_u32).map(|n| n.to_le_bytes().repeat(40)).collect();
        for block in &blocks {
            cache.insert(block, &Arc::new(block.clone()));
        }
        let known =
            blocks.iter().filter(|block| cache.lookup(block).is_some_and(|head| *head == **block)).count();
        assert!((1..=CACHED_HEADS).contains(&known));
        assert!(blocks.iter().all(|block| cache.lookup(block).is_none_or(|head| *head == **block)));
        let long = vec![1; CACHED_BLOCK_MAX + 1];
        cache.insert(&long, &Arc::new(long.clone()));
        assert!(cache.lookup(&long).is_none());
    }
}
