//! The number by which all ranks know a communicator: NCCL's hash of its unique id. Begin at [`communicator_hash`].
//!
//! NCCL passes the number to profiler plug-ins. XLA writes the unique id to the key-value store before a clique is made. So the
//! number leads from a communicator to the devices of its clique. The function is that of NCCL 2.27 to 2.32.

/// The length of a unique id.
pub const UNIQUE_ID_BYTES: usize = 128;

/// Returns NCCL's hash of a unique id.
#[must_use]
pub fn communicator_hash(unique_id: &[u8; UNIQUE_ID_BYTES]) -> u64 {
    let mut low = 1 ^ UNIQUE_ID_BYTES as u64;
    let mut high = 1_u64;
    for bytes in unique_id.as_chunks::<8>().0 {
        low = low.wrapping_add(high);
        high ^= low;
        low = (low ^ (low >> 31)).wrapping_mul(0x9de6_2bbc_8cef_3ce3);
        high = (high ^ (high >> 32)).wrapping_mul(0x485c_d631_1b59_9e79);
        low = low.wrapping_add(u64::from_le_bytes(*bytes));
    }
    let mut hash = (low ^ (low >> 31)).wrapping_mul(0xbac3_bd56_2846_de6b).wrapping_add(high);
    hash = (hash ^ (hash >> 32)).wrapping_mul(0x995a_187a_14e7_b445);
    hash
}

/// Returns the name of the clique of communicators with this hash, as 16 hexadecimal digits.
#[must_use]
pub fn clique_name(hash: u64) -> String {
    format!("{hash:016x}")
}

/// Returns the hash in the name of a clique; `None` if it is no such name.
#[must_use]
pub fn parse_clique_name(name: &str) -> Option<u64> {
    let hash = u64::from_str_radix(name, 16).ok()?;
    (clique_name(hash) == name).then_some(hash)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_is_that_of_one_hash() {
        for hash in [0, 0xABCD, u64::MAX] {
            assert_eq!(parse_clique_name(&clique_name(hash)), Some(hash));
        }
        for other in
            ["", "abcd", "+00000000000abcd", "000000000000ABCD", "00000000000000abcd", "000000000000abcg"]
        {
            assert_eq!(parse_clique_name(other), None, "{other}");
        }
    }

    #[test]
    fn the_hash_is_nccls() {
        let id = std::array::from_fn(|at| (at * 37 + 11) as u8);
        assert_eq!(communicator_hash(&id), 0x3002_dcd1_bbe6_653d);
    }
}
