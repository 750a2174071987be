//! Computes the transfers of a step. Every member computes the same list.
//!
//! Begin at `ring_moves` and `partner_moves`.

use crate::test_pattern::hash_numbers;
use crate::transfer::TransferKey;

/// The greatest number of devices of a task that take part.
pub const DEVICES_MAX: u32 = 8;
/// The sizes of the buffers that go round the ring, unless they exceed the largest permitted one.
const SIZES: [usize; 6] = [1, 4096, 65_537, 256 << 10, 1 << 20, (3 << 20) + 5];
/// The number of turns: steps with the same turn move the same buffers round the ring.
pub const TURNS: usize = SIZES.len();
/// The granularity of an arena's memory, in bytes.
const PIECE: usize = 64 << 10;

/// The move of one buffer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BufferMove {
    /// The position of the sender among the members.
    pub from: usize,
    /// The position of the receiver.
    pub to: usize,
    /// The ordinal of the device on both sides.
    pub device: u32,
    /// The size in bytes.
    pub bytes: usize,
    /// The key of the transfer on both sides.
    pub key: TransferKey,
}

/// Returns the turn of a step.
pub const fn ring_size_class_of_step(step: u64) -> usize {
    (step % SIZES.len() as u64) as usize
}

/// Returns the size of the buffer that a device sends round the ring.
pub fn ring_buffer_bytes(turn: usize, device: u32, bytes_max: usize) -> usize {
    SIZES[(turn + device as usize) % SIZES.len()].min(bytes_max)
}

/// Returns the moves round the ring: each member sends to the next, from each device. They are the same in
/// each step of a turn, so they are prepared once.
pub fn ring_moves(count: usize, devices: u32, turn: usize, bytes_max: usize) -> Vec<BufferMove> {
    if count < 2 {
        return Vec::new();
    }
    let all = (0..count).flat_map(|from| (0..devices).map(move |device| (from, device)));
    let moves = all.map(|(from, device)| {
        let bytes = ring_buffer_bytes(turn, device, bytes_max);
        let key = TransferKey(hash_numbers(&[1, from as u64, u64::from(device), turn as u64]));
        BufferMove { from, to: (from + 1) % count, device, bytes, key }
    });
    moves.collect()
}

/// Returns the moves to partners, which differ in every step: each member sends a buffer of some size to the
/// member a drawn distance further on.
pub fn partner_moves(count: usize, step: u64, number: u64, bytes_max: usize) -> Vec<BufferMove> {
    if count < 2 {
        return Vec::new();
    }
    let further = 1 + (hash_numbers(&[2, step, number]) % (count as u64 - 1)) as usize;
    let moves = (0..count).map(|from| {
        let drawn = hash_numbers(&[3, step, number, from as u64]);
        // Small sizes are as frequent as large ones.
        let bytes = (drawn % (bytes_max as u64 + 1)) as usize >> (drawn >> 60);
        BufferMove {
            from,
            to: (from + further) % count,
            device: 0,
            bytes,
            key: TransferKey(hash_numbers(&[4, step, from as u64])),
        }
    });
    moves.collect()
}

/// Returns the seed of the contents of a move in a step.
pub fn content_seed_of_move(step: u64, number: u64, key: TransferKey) -> u64 {
    hash_numbers(&[5, step, number, key.0])
}

/// Returns the seed of the array in a step.
pub fn content_seed_of_array(step: u64, number: u64) -> u64 {
    hash_numbers(&[6, step, number])
}

/// Returns the memory for all buffers of one task: round the ring, and to partners.
pub fn arena_bytes(devices: u32, bytes_max: usize) -> usize {
    let piece = |bytes: usize| bytes.next_multiple_of(PIECE) + PIECE;
    let all = (0..TURNS)
        .flat_map(|turn| (0..devices).map(move |device| ring_buffer_bytes(turn, device, bytes_max)));
    all.map(|bytes| 2 * piece(bytes)).sum::<usize>() + 2 * piece(bytes_max)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn everybody_sends_once_and_receives_once_and_never_itself() {
        for count in 2..9 {
            for step in 0..50 {
                for moves in [
                    partner_moves(count, step, 7, 1 << 20),
                    ring_moves(count, 1, ring_size_class_of_step(step), 1 << 20),
                ] {
                    let mut to: Vec<_> = moves.iter().map(|m| m.to).collect();
                    to.sort_unstable();
                    assert_eq!(to, (0..count).collect::<Vec<_>>());
                    assert!(moves.iter().all(|m| m.from != m.to && m.bytes <= 1 << 20));
                    let mut keys: Vec<_> = moves.iter().map(|m| m.key).collect();
                    keys.sort_unstable();
                    keys.dedup();
                    assert_eq!(keys.len(), moves.len());
                }
            }
        }
        assert!(ring_moves(1, 1, 0, 1).is_empty() && partner_moves(1, 0, 0, 1).is_empty());
    }

    #[test]
    fn sizes_change_from_step_to_step() {
        let sizes: std::collections::BTreeSet<_> =
            (0..20).map(|step| ring_moves(2, 1, ring_size_class_of_step(step), 4 << 20)[0].bytes).collect();
        assert_eq!(sizes.len(), SIZES.len());
        let sizes: std::collections::BTreeSet<_> =
            (0..20).map(|step| partner_moves(2, step, 1, 4 << 20)[0].bytes).collect();
        assert!(sizes.len() > 10, "{sizes:?}");
    }
}
