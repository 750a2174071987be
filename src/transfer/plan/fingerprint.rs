//! The fingerprints of a layout and of a plan, and the key of a step.
//!
//! Each process computes them from the inputs of the plan, so both sides of a transfer have the same values without a
//! message. `step_keys.rs` has the keys of several plans that are executed together. Begin at [`Fingerprint`] and
//! [`TransferKey::for_step`].

use std::fmt;
use std::str::FromStr;

use ring::digest::{Context, SHA256};
use serde::{Deserialize, Serialize};

use super::PlanError;
use super::tiles::Tiling;
pub use crate::base::key::TransferKey;

/// A digest: the first 128 bits of SHA-256. In text: 32 hexadecimal digits.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct Fingerprint(pub [u8; 16]);

impl TransferKey {
    /// Returns the key of step number `step` of a plan: a permutation of all 64-bit numbers, chosen by the
    /// plan's fingerprint.
    #[must_use]
    pub fn for_step(plan: Fingerprint, step: u32) -> Self {
        let [low, high] = split_into_halves(plan);
        // Adding a constant, xor with a shift of itself and multiplying by an odd number are all invertible,
        // so no two steps have the same key. The constants are those of the SplitMix64 generator.
        let mut key = low.wrapping_add(u64::from(step).wrapping_mul(0x9e37_79b9_7f4a_7c15));
        key = (key ^ (key >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        key = (key ^ (key >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        Self(key ^ (key >> 31) ^ high)
    }
}

fn split_into_halves(Fingerprint(bytes): Fingerprint) -> [u64; 2] {
    let number = u128::from_le_bytes(bytes);
    // Each cast keeps exactly one half.
    #[expect(clippy::cast_possible_truncation, reason = "the two halves of the number")]
    [number as u64, (number >> 64) as u64]
}

/// A digest of fields, each of a fixed length or with its length before it.
pub(super) struct FingerprintHasher {
    context: Context,
    // A buffer, because to digest eight bytes at a time costs more than the digest itself.
    pending: Vec<u8>,
}

impl FingerprintHasher {
    /// Creates a digest for one purpose. Digests of different purposes never have the same input.
    pub fn new(purpose: &str) -> Self {
        let mut digest = Self { context: Context::new(&SHA256), pending: Vec::with_capacity(1 << 14) };
        digest.add_text(purpose);
        digest
    }

    pub fn add_text(&mut self, add_text: &str) {
        self.add_number(add_text.len() as u64);
        self.pending.extend_from_slice(add_text.as_bytes());
    }

    pub fn add_number(&mut self, add_number: u64) {
        if self.pending.len() > (1 << 14) - 512 {
            self.context.update(&self.pending);
            self.pending.clear();
        }
        self.pending.extend_from_slice(&add_number.to_le_bytes());
    }

    pub fn finish(mut self) -> Fingerprint {
        self.context.update(&self.pending);
        let digest = self.context.finish();
        let mut fingerprint = [0; 16];
        for (to, from) in fingerprint.iter_mut().zip(digest.as_ref()) {
            *to = *from;
        }
        Fingerprint(fingerprint)
    }
}

/// Returns the fingerprint of the layout that both sides must agree on before a byte moves: shape, data type,
/// and the part of the array on each device before and after. Two descriptions that place the same elements
/// on the same devices have the same layout, whatever the names and the order of their axes.
pub(super) fn tilings_fingerprint(dtype: &str, source: &Tiling, destination: &Tiling) -> Fingerprint {
    let mut digest = FingerprintHasher::new("muster layout 1");
    digest.add_text(dtype);
    digest.add_number(source.cuts.len() as u64);
    for cut in &source.cuts {
        digest.add_number(cut.size);
    }
    let mut stretches = Vec::new();
    for tiling in [source, destination] {
        digest.add_number(tiling.devices.len() as u64);
        for &(device, tile) in &tiling.devices {
            digest.add_number(i64::from(device.0).cast_unsigned());
            tiling.intervals(tile, &mut stretches);
            for &(start, end) in &stretches {
                digest.add_number(start);
                digest.add_number(end);
            }
        }
    }
    digest.finish()
}

impl fmt::Display for Fingerprint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:032x}", u128::from_be_bytes(self.0))
    }
}

impl fmt::Debug for Fingerprint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl FromStr for Fingerprint {
    type Err = PlanError;

    fn from_str(text: &str) -> Result<Self, PlanError> {
        Ok(Self(parse_hexadecimal(text, 32, "a fingerprint")?.to_be_bytes()))
    }
}

impl TryFrom<String> for Fingerprint {
    type Error = PlanError;

    fn try_from(text: String) -> Result<Self, PlanError> {
        text.parse()
    }
}

impl From<Fingerprint> for String {
    fn from(fingerprint: Fingerprint) -> Self {
        fingerprint.to_string()
    }
}

impl FromStr for TransferKey {
    type Err = PlanError;

    fn from_str(text: &str) -> Result<Self, PlanError> {
        let key = parse_hexadecimal(text, 16, "a key")?;
        // Sixteen digits are 64 bits.
        Ok(Self(u64::try_from(key).unwrap_or(u64::MAX)))
    }
}

impl TryFrom<String> for TransferKey {
    type Error = PlanError;

    fn try_from(text: String) -> Result<Self, PlanError> {
        text.parse()
    }
}

impl From<TransferKey> for String {
    fn from(key: TransferKey) -> Self {
        key.to_string()
    }
}

/// Parses exactly `digits` lower-case hexadecimal digits, so that each value has one text.
fn parse_hexadecimal(text: &str, digits: usize, what: &'static str) -> Result<u128, PlanError> {
    let wrong = || PlanError::Json { what, why: format!("{digits} hexadecimal digits are wanted") };
    if text.len() != digits
        || !text.bytes().all(|byte| byte.is_ascii_digit() || (b'a'..=b'f').contains(&byte))
    {
        return Err(wrong());
    }
    u128::from_str_radix(text, 16).map_err(|_| wrong())
}
