//! The number of a communicator, which its ranks compute from the unique id.

const WORD: usize = 8;
const ID_LEN: usize = 128;

/// Returns the number that NCCL passes to a profiler plug-in for the communicator of a unique id: `commHash` of table v4,
/// `commId` of later ones. It is the same on all ranks. NCCL 2.27 to 2.32 compute it so.
pub const fn communicator_hash(id: &[u8; ID_LEN]) -> u64 {
    let (mut first, mut second) = (1 ^ ID_LEN as u64, 1u64);
    let mut at = 0;
    while at < ID_LEN {
        first = first.wrapping_add(second);
        second ^= first;
        first ^= first >> 31;
        first = first.wrapping_mul(0x9de6_2bbc_8cef_3ce3);
        second ^= second >> 32;
        second = second.wrapping_mul(0x485c_d631_1b59_9e79);
        first = first.wrapping_add(read_word(id, at));
        at += WORD;
    }
    let mut hash = first;
    hash ^= hash >> 31;
    hash = hash.wrapping_mul(0xbac3_bd56_2846_de6b);
    hash = hash.wrapping_add(second);
    hash ^= hash >> 32;
    hash.wrapping_mul(0x995a_187a_14e7_b445)
}

/// Reads a little-endian number.
const fn read_word(bytes: &[u8; ID_LEN], at: usize) -> u64 {
    let (mut word, mut index) = (0, WORD);
    while index > 0 {
        index -= 1;
        word = word << 8 | bytes[at + index] as u64;
    }
    word
}
