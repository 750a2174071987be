//! The CRC-32 of a message in two parts from the CRCs of its parts.
//!
//! It does not compute the CRC of bytes: libdeflater does. Begin at [`CrcShift::join`].

/// The polynomial, lowest power first in the highest bit.
const POLYNOMIAL: u32 = 0xedb8_8320;
/// The polynomials 1 and x.
const ONE: u32 = 1 << 31;
const X: u32 = 1 << 30;

/// The effect on a checksum of appending a number of bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct CrcShift(u32);

impl CrcShift {
    /// Returns the shift by `bytes` bytes: multiplication by x to the power of eight times that.
    pub(super) fn by(bytes: usize) -> Self {
        let (mut power, mut base, mut left) = (ONE, X, bytes as u64 * 8);
        while left > 0 {
            if left & 1 == 1 {
                power = multiply(power, base);
            }
            base = multiply(base, base);
            left >>= 1;
        }
        Self(power)
    }

    /// Returns the checksum of a message from those of its beginning and its end; the end is as long as this
    /// shift.
    pub(super) fn join(self, beginning: u32, end: u32) -> u32 {
        multiply(self.0, beginning) ^ end
    }
}

fn multiply(a: u32, mut b: u32) -> u32 {
    let mut product = 0;
    for bit in (0..32).rev() {
        if a >> bit & 1 == 1 {
            product ^= b;
        }
        b = b >> 1 ^ if b & 1 == 1 { POLYNOMIAL } else { 0 };
    }
    product
}

#[cfg(test)]
mod tests {
    use libdeflater::crc32;

    use super::*;

    #[test]
    fn crcs_of_two_parts_join_to_the_crc_of_the_whole() {
        let message: Vec<u8> = (0..5000_u32).flat_map(|n| n.wrapping_mul(n).to_le_bytes()).collect();
        for at in [0, 1, 7, 255, 4096, message.len() - 1, message.len()] {
            let (beginning, end) = message.split_at(at);
            let joined = CrcShift::by(end.len()).join(crc32(beginning), crc32(end));
            assert_eq!(joined, crc32(&message), "{at}");
        }
    }
}
