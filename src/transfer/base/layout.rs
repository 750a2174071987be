//! The layout of a buffer, and its fingerprint. Both sides of a transfer compare the fingerprints of their layouts
//! before a byte moves.
//!
//! The engine uses the size of a layout, and compares fingerprints. It does not interpret shapes, element types or
//! shardings. Begin at [`BufferLayout`].

use std::fmt;

/// The size of a buffer in bytes, and the fingerprint of its shape, element type and sharding.
#[derive(Debug, Clone, PartialEq, Eq, Hash, serde::Serialize, serde::Deserialize)]
pub struct BufferLayout {
    bytes: u64,
    fingerprint: LayoutFingerprint,
}

/// A hash of a layout: equal for equal layouts, and almost surely different for different ones.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, serde::Serialize, serde::Deserialize)]
#[serde(transparent)]
pub struct LayoutFingerprint(pub u64);

impl fmt::Display for LayoutFingerprint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:016x}", self.0)
    }
}

impl LayoutFingerprint {
    /// Hashes `parts` to a value that is the same on every machine and in every version (64-bit FNV-1a).
    #[must_use]
    pub fn hash_of_parts(parts: &[&[u8]]) -> Self {
        let mut hash = 0xcbf2_9ce4_8422_2325_u64;
        let mut eat = |byte: u8| hash = (hash ^ u64::from(byte)).wrapping_mul(0x100_0000_01b3);
        for part in parts {
            (part.len() as u64).to_le_bytes().into_iter().for_each(&mut eat);
            part.iter().copied().for_each(&mut eat);
        }
        Self(hash)
    }
}

impl BufferLayout {
    /// Returns the layout of `count` plain bytes, without a shape.
    #[must_use]
    pub fn bytes(count: usize) -> Self {
        Self { bytes: count as u64, fingerprint: LayoutFingerprint::hash_of_parts(&[b"bytes"]) }
    }

    /// Returns the layout of `bytes` bytes that are part of an array with the fingerprint `of`.
    #[must_use]
    pub const fn part_of_array(bytes: u64, of: LayoutFingerprint) -> Self {
        Self { bytes, fingerprint: of }
    }

    /// Returns the layout of an array: the name of its element type, the width of an element in bytes, its
    /// shape, and its sharding (any text that both sides write alike). None if its size overflows.
    #[must_use]
    pub fn array(element: &str, width: u64, shape: &[u64], sharding: &str) -> Option<Self> {
        let bytes = shape.iter().try_fold(width, |bytes, extent| bytes.checked_mul(*extent))?;
        let dimensions: Vec<u8> = shape.iter().flat_map(|extent| extent.to_le_bytes()).collect();
        let fingerprint = LayoutFingerprint::hash_of_parts(&[
            b"array",
            element.as_bytes(),
            &dimensions,
            sharding.as_bytes(),
        ]);
        Some(Self { bytes, fingerprint })
    }

    /// Returns the size in bytes.
    #[must_use]
    pub const fn len(&self) -> u64 {
        self.bytes
    }

    /// Returns whether the size is zero.
    #[must_use]
    pub const fn is_empty(&self) -> bool {
        self.bytes == 0
    }

    /// Returns the fingerprint, to be compared with the other side's.
    #[must_use]
    pub const fn fingerprint(&self) -> LayoutFingerprint {
        self.fingerprint
    }
}
