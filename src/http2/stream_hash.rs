//! A hash of stream numbers under a key of the connection.
//!
//! A peer chooses its stream numbers. Without a secret key, it could choose numbers that collide. Begin at
//! [`StreamHash`].

use std::collections::hash_map::RandomState;
use std::hash::{BuildHasher, Hasher};

/// The key under which one connection hashes its stream numbers.
#[derive(Debug, Clone, Copy)]
pub(super) struct StreamHash {
    key: [u64; 2],
}

impl StreamHash {
    pub(super) fn new() -> Self {
        let random = RandomState::new();
        Self { key: [random.hash_one(0_u64), random.hash_one(1_u64) | 1] }
    }
}

impl BuildHasher for StreamHash {
    type Hasher = StreamHasher;

    fn build_hasher(&self) -> StreamHasher {
        StreamHasher { key: self.key, hash: 0 }
    }
}

pub(super) struct StreamHasher {
    key: [u64; 2],
    hash: u64,
}

impl Hasher for StreamHasher {
    fn finish(&self) -> u64 {
        self.hash
    }

    fn write(&mut self, bytes: &[u8]) {
        for byte in bytes {
            self.write_u32(u32::from(*byte));
        }
    }

    fn write_u32(&mut self, number: u32) {
        // Both halves of the product together depend on every bit of the number and of the key. The second
        // multiplication spreads them, because numbers in equal steps would still give hashes in equal steps.
        let product = u128::from(self.hash ^ self.key[0] ^ u64::from(number)) * u128::from(self.key[1]);
        let folded = (product as u64 ^ (product >> 64) as u64).wrapping_mul(0x9E37_79B9_7F4A_7C15);
        self.hash = folded ^ folded >> 32;
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;

    #[test]
    fn no_numbers_of_streams_collide_by_design() {
        let numbers = |step: u32| (0..16_384_u32).map(move |n| 1 + n.wrapping_mul(step) % (1 << 31));
        for step in [2, 1 << 16, 1 << 17, 3 << 20] {
            let hash = StreamHash::new();
            let distinct: HashSet<u32> = numbers(step).collect();
            // The table takes its positions from the lowest bits.
            let places: HashSet<u64> = distinct.iter().map(|id| hash.hash_one(id) & 0x7fff).collect();
            // The number of positions that this many random numbers occupy.
            let fair = (1 << 15) as f64 * (1.0 - (-(distinct.len() as f64) / f64::from(1 << 15)).exp());
            assert!(
                places.len() as f64 > 0.9 * fair,
                "{} places for {} numbers",
                places.len(),
                distinct.len()
            );
        }
        let [one, other] = [StreamHash::new(), StreamHash::new()].map(|hash| hash.hash_one(1_u32));
        assert_ne!(one, other, "each connection has its own key");
    }
}
