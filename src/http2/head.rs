//! The head of a request, and the memory of heads that were read before.

use std::sync::Arc;

use http::{HeaderMap, HeaderName, HeaderValue};

use super::hpack::ENTRY;

/// The head of a request, or its trailers.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Head {
    pub(crate) method: String,
    pub(crate) scheme: String,
    pub(crate) authority: String,
    pub(crate) path: String,
    pub(crate) fields: HeaderMap,
    /// What is wrong with it, if something is.
    pub(super) flaw: Option<Flaw>,
}

/// What is wrong with a head.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Flaw {
    /// It is malformed (RFC 9113, 8.1.1).
    Malformed,
    /// It is longer than heads may be.
    TooLong,
}

/// Puts a head together, field by field.
pub(super) struct HeadBuilder {
    head: Head,
    left: usize,
    regular: bool,
}

impl HeadBuilder {
    pub(super) fn new(most: usize) -> Self {
        Self { head: Head::default(), left: most, regular: false }
    }

    /// Adds a field.
    pub(super) fn add(&mut self, name: &[u8], value: &[u8]) {
        match self.left.checked_sub(name.len() + value.len() + ENTRY) {
            Some(left) => self.left = left,
            None => {
                self.left = 0;
                self.head.flaw = Some(Flaw::TooLong);
            }
        }
        if self.head.flaw.is_none() && self.put(name, value).is_none() {
            self.head.flaw = Some(Flaw::Malformed);
        }
    }

    fn put(&mut self, name: &[u8], value: &[u8]) -> Option<()> {
        if let [b':', pseudo @ ..] = name {
            let place = match pseudo {
                _ if self.regular => return None,
                b"method" => &mut self.head.method,
                b"scheme" => &mut self.head.scheme,
                b"authority" => &mut self.head.authority,
                b"path" => &mut self.head.path,
                _ => return None,
            };
            if !place.is_empty() {
                return None;
            }
            // Visible ASCII, as in URIs and the names of methods.
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
        let name = HeaderName::from_bytes(name).ok()?;
        let value = HeaderValue::from_bytes(value).ok()?;
        self.head.fields.try_append(name, value).ok()?;
        Some(())
    }

    pub(super) fn finish(self) -> Head {
        self.head
    }
}

/// Fields that HTTP/2 has no use for (RFC 9113, 8.2.2).
const CONNECTION_SPECIFIC: [&[u8]; 5] =
    [b"connection", b"proxy-connection", b"keep-alive", b"transfer-encoding", b"upgrade"];

/// Heads that were read lately, by the bytes of their blocks. Clients without a table send the same bytes for the
/// same method again and again: what they mean is worked out once.
#[derive(Debug)]
pub(crate) struct Memo<H> {
    known: Vec<Option<Known<H>>>,
}

#[derive(Debug)]
struct Known<H> {
    block: Box<[u8]>,
    head: Arc<H>,
}

/// How many heads are remembered. A power of two.
const REMEMBERED: usize = 256;
/// Longer blocks are not remembered.
const BLOCK: usize = 1 << 10;

impl<H> Memo<H> {
    pub(crate) const fn new() -> Self {
        Self { known: Vec::new() }
    }

    fn place(block: &[u8]) -> usize {
        let mut hash = block.len() as u64;
        let mut mix = |word: u64| hash = (hash.rotate_left(5) ^ word).wrapping_mul(0x9E37_79B9_7F4A_7C15);
        let (words, rest) = block.as_chunks::<8>();
        for word in words {
            mix(u64::from_le_bytes(*word));
        }
        for byte in rest {
            mix(u64::from(*byte));
        }
        (hash >> 56) as usize % REMEMBERED
    }

    /// What `block` means, if it is known.
    pub(super) fn recall(&self, block: &[u8]) -> Option<Arc<H>> {
        let known = self.known.get(Self::place(block))?.as_ref()?;
        (*known.block == *block).then(|| Arc::clone(&known.head))
    }

    /// Remembers what `block` means.
    pub(super) fn remember(&mut self, block: &[u8], head: &Arc<H>) {
        if block.len() > BLOCK {
            return;
        }
        if self.known.is_empty() {
            self.known.resize_with(REMEMBERED, || None);
        }
        if let Some(place) = self.known.get_mut(Self::place(block)) {
            *place = Some(Known { block: block.into(), head: Arc::clone(head) });
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn head(fields: &[(&str, &str)]) -> Head {
        let mut head = HeadBuilder::new(1000);
        for (name, value) in fields {
            head.add(name.as_bytes(), value.as_bytes());
        }
        head.finish()
    }

    #[test]
    fn malformed_heads_are_marked() {
        let good =
            [(":method", "POST"), (":scheme", "http"), (":path", "/x"), ("te", "trailers"), ("te", "again")];
        assert_eq!(head(&good).flaw, None);
        for bad in [
            &[("te", "trailers"), (":method", "POST")][..],
            &[(":method", "POST"), (":method", "GET")],
            &[(":status", "200")],
            &[(":path", "/a b")],
            &[("Upper", "case")],
            &[("connection", "close")],
            &[("bad name", "x")],
            &[("name", "line\nbreak")],
        ] {
            assert_eq!(head(bad).flaw, Some(Flaw::Malformed), "{bad:?}");
        }
        assert_eq!(head(&[("x", &"y".repeat(990))]).flaw, Some(Flaw::TooLong));
    }

    #[test]
    fn a_head_is_known_by_all_of_its_bytes() {
        let mut memo = Memo::new();
        let blocks: Vec<Vec<u8>> = (0..2000_u32).map(|n| n.to_le_bytes().repeat(40)).collect();
        for block in &blocks {
            memo.remember(block, &Arc::new(block.clone()));
        }
        let known =
            blocks.iter().filter(|block| memo.recall(block).is_some_and(|head| *head == **block)).count();
        assert!((1..=REMEMBERED).contains(&known));
        assert!(blocks.iter().all(|block| memo.recall(block).is_none_or(|head| *head == **block)));
        let long = vec![1; BLOCK + 1];
        memo.remember(&long, &Arc::new(long.clone()));
        assert!(memo.recall(&long).is_none());
    }
}
