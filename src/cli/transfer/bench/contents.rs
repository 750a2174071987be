//! Contents that a seed determines: what is sent is compared with what arrives, byte for byte.

/// The `n`-th word (SplitMix64, Steele, Lea, Flood, OOPSLA 2014).
const fn word(seed: u64, n: u64) -> [u8; 8] {
    let mut mixed = seed.wrapping_add(n.wrapping_add(1).wrapping_mul(0x9e37_79b9_7f4a_7c15));
    mixed = (mixed ^ mixed >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    mixed = (mixed ^ mixed >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
    (mixed ^ mixed >> 31).to_le_bytes()
}

/// A seed for each buffer of each measurement, from numbers that tell them apart.
pub fn seed(measurement: u64, buffer: u64) -> u64 {
    u64::from_le_bytes(word(measurement, buffer))
}

/// Makes `bytes` what `seed` says.
pub fn fill(bytes: &mut [u8], seed: u64) {
    for (n, part) in bytes.chunks_mut(8).enumerate() {
        part.copy_from_slice(&word(seed, n as u64)[..part.len()]);
    }
}

/// Makes every byte of `bytes` another than `seed` says.
pub fn spoil(bytes: &mut [u8], seed: u64) {
    fill(bytes, seed);
    for byte in bytes {
        *byte = !*byte;
    }
}

/// The first byte that is not what `seed` says.
pub fn differs(bytes: &[u8], seed: u64) -> Option<usize> {
    for (n, part) in bytes.chunks(8).enumerate() {
        let wanted = word(seed, n as u64);
        if part != &wanted[..part.len()] {
            return part.iter().zip(wanted).position(|(a, b)| *a != b).map(|at| n * 8 + at);
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_wrong_byte_is_found_wherever_it_is() {
        for len in [1, 7, 8, 9, 100] {
            let mut bytes = vec![0; len];
            fill(&mut bytes, 7);
            assert_eq!(differs(&bytes, 7), None);
            assert!(differs(&bytes, 8).is_some());
            for at in 0..len {
                bytes[at] ^= 0x80;
                assert_eq!(differs(&bytes, 7), Some(at));
                bytes[at] ^= 0x80;
            }
            spoil(&mut bytes, 7);
            let mut wanted = vec![0; len];
            fill(&mut wanted, 7);
            assert!(bytes.iter().zip(&wanted).all(|(a, b)| a != b), "no byte is right by chance");
        }
    }
}
