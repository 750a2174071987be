//! The layout of a buffer, and its fingerprint, which both sides of a transfer compare before a byte moves.
//!
//! To the engine a buffer is bytes: it compares layouts and interprets none. Begin at [`Layout`].

use std::fmt;

/// Shape, element type and sharding of what a buffer holds. To the engine it is bytes; the rest is compared.
#[derive(Debug, Clone, PartialEq, Eq, Hash, serde::Serialize, serde::Deserialize)]
pub struct Layout {
    bytes: u64,
    fingerprint: LayoutFingerprint,
}

/// Equal for equal layouts, and almost surely different for different ones.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, serde::Serialize, serde::Deserialize)]
#[serde(transparent)]
pub struct LayoutFingerprint(pub u64);

impl fmt::Display for LayoutFingerprint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:016x}", self.0)
    }
}

impl LayoutFingerprint {
    /// Makes that of bytes, the same on every machine and in every version (64-bit FNV-1a).
    #[must_use]
    pub fn of(parts: &[&[u8]]) -> Self {
        let mut hash = 0xcbf2_9ce4_8422_2325_u64;
        let mut eat = |byte: u8| hash = (hash ^ u64::from(byte)).wrapping_mul(0x100_0000_01b3);
        for part in parts {
            (part.len() as u64).to_le_bytes().into_iter().for_each(&mut eat);
            part.iter().copied().for_each(&mut eat);
        }
        Self(hash)
    }
}

impl Layout {
    /// Plain bytes, without a shape.
    #[must_use]
    pub fn bytes(count: usize) -> Self {
        Self { bytes: count as u64, fingerprint: LayoutFingerprint::of(&[b"bytes"]) }
    }

    /// Makes that of so many bytes of what has this fingerprint.
    #[must_use]
    pub const fn part(bytes: u64, of: LayoutFingerprint) -> Self {
        Self { bytes, fingerprint: of }
    }

    /// Returns an array: the name and width in bytes of its elements, its shape, and how it is sharded (any text that both
    /// sides write alike). None if its size overflows.
    #[must_use]
    pub fn array(element: &str, width: u64, shape: &[u64], sharding: &str) -> Option<Self> {
        let bytes = shape.iter().try_fold(width, |bytes, extent| bytes.checked_mul(*extent))?;
        let dimensions: Vec<u8> = shape.iter().flat_map(|extent| extent.to_le_bytes()).collect();
        let fingerprint =
            LayoutFingerprint::of(&[b"array", element.as_bytes(), &dimensions, sharding.as_bytes()]);
        Some(Self { bytes, fingerprint })
    }

    /// Returns how many bytes it takes.
    #[must_use]
    pub const fn len(&self) -> u64 {
        self.bytes
    }

    /// Returns whether it takes none.
    #[must_use]
    pub const fn is_empty(&self) -> bool {
        self.bytes == 0
    }

    /// Returns what is compared with the other side's.
    #[must_use]
    pub const fn fingerprint(&self) -> LayoutFingerprint {
        self.fingerprint
    }
}
