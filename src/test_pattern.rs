//! Reproducible pseudo-random bytes, computed from a seed. A receiver that knows the sender's seed computes the
//! same bytes and compares them with the received ones.
//!
//! The bytes are not for security: SplitMix64 is predictable. Begin at `fill_with_pattern` and
//! `first_difference_from_pattern`.

/// The increment of the generator's state.
const STEP: u64 = 0x9e37_79b9_7f4a_7c15;

/// Returns the next number of a well-mixed sequence (SplitMix64, Steele, Lea, Flood, OOPSLA 2014).
pub fn next_pattern_word(state: &mut u64) -> u64 {
    *state = state.wrapping_add(STEP);
    let mut z = *state;
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

/// Returns a hash of all of `parts`, in their order.
pub fn hash_numbers(parts: &[u64]) -> u64 {
    parts.iter().fold(0, |hash: u64, part| next_pattern_word(&mut (hash ^ part.wrapping_mul(STEP))))
}

/// Returns the number at index `place` of the sequence that begins with `seed`.
pub fn pattern_word_at(seed: u64, place: u64) -> u64 {
    next_pattern_word(&mut seed.wrapping_add(place.wrapping_mul(STEP)))
}

/// Fills `bytes` with the sequence of `seed`.
pub fn fill_with_pattern(bytes: &mut [u8], mut seed: u64) {
    for chunk in bytes.chunks_mut(8) {
        let made = next_pattern_word(&mut seed).to_le_bytes();
        chunk.copy_from_slice(&made[..chunk.len()]);
    }
}

/// Fills `bytes` so that every byte differs from the sequence of `seed`.
pub fn fill_with_wrong_pattern(bytes: &mut [u8], seed: u64) {
    fill_with_pattern(bytes, seed);
    for byte in bytes {
        *byte = !*byte;
    }
}

/// Returns the index of the first byte that differs from the sequence of `seed`.
pub fn first_difference_from_pattern(bytes: &[u8], mut seed: u64) -> Option<usize> {
    bytes.chunks(8).enumerate().find_map(|(n, chunk)| {
        let made = next_pattern_word(&mut seed).to_le_bytes();
        (chunk != &made[..chunk.len()])
            .then(|| n * 8 + chunk.iter().zip(made).position(|(a, b)| *a != b).unwrap_or(0))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_wrong_byte_is_found_wherever_it_is() {
        for len in [1, 7, 8, 9, 100] {
            let mut bytes = vec![0; len];
            fill_with_pattern(&mut bytes, 5);
            assert_eq!(first_difference_from_pattern(&bytes, 5), None);
            assert!(first_difference_from_pattern(&bytes, 6).is_some(), "another seed makes others");
            for at in 0..len {
                bytes[at] ^= 1;
                assert_eq!(first_difference_from_pattern(&bytes, 5), Some(at));
                bytes[at] ^= 1;
            }
            let wanted = bytes.clone();
            fill_with_wrong_pattern(&mut bytes, 5);
            assert!(bytes.iter().zip(&wanted).all(|(a, b)| a != b), "no byte is right by chance");
        }
        let mut state = 5;
        assert_eq!(
            [pattern_word_at(5, 0), pattern_word_at(5, 1)],
            [next_pattern_word(&mut state), next_pattern_word(&mut state)]
        );
        assert_ne!(hash_numbers(&[1, 2]), hash_numbers(&[2, 1]));
        assert_ne!(hash_numbers(&[0]), hash_numbers(&[0, 0]));
    }
}
