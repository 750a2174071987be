//! A buffer in the kept memory into which a thread reads. Begin at [`ReadRoom::claim`].

#![allow(unsafe_code)]

use std::sync::Arc;
use std::sync::atomic::Ordering;

use crate::memory::KeptMemory;

/// The bytes of a room.
pub const ROOM_BYTES: usize = 128 << 10;

/// A room, which one thread uses for one connection after another.
#[derive(Debug)]
pub struct ReadRoom {
    memory: Arc<KeptMemory>,
    room: usize,
    is_claimed: bool,
}

impl ReadRoom {
    pub(crate) fn new(memory: Arc<KeptMemory>, room: usize) -> Self {
        memory.room_words(room)[0].store(0, Ordering::Release);
        Self { memory, room, is_claimed: false }
    }

    /// Returns whether the room is in this memory.
    #[must_use]
    pub fn is_in(&self, memory: &Arc<KeptMemory>) -> bool {
        Arc::ptr_eq(&self.memory, memory)
    }

    /// Says that the room is about to get bytes of a connection, and returns the room. `offset` is the number of bytes that
    /// were read from the connection before.
    pub fn claim(&mut self, serial: u64, offset: u64) -> &mut [u8] {
        let [owner, begin] = self.memory.room_words(self.room);
        owner.store(0, Ordering::Release);
        begin.store(offset, Ordering::Release);
        owner.store(serial, Ordering::Release);
        self.is_claimed = true;
        // SAFETY: the bytes lie within the mapping, which `memory` keeps, and this value alone uses them: a room is taken once.
        unsafe { std::slice::from_raw_parts_mut(self.memory.room_bytes(self.room), ROOM_BYTES) }
    }

    /// Marks the room as unowned: the log of the connection has what is left of the bytes.
    pub fn release(&mut self) {
        if std::mem::take(&mut self.is_claimed) {
            self.memory.room_words(self.room)[0].store(0, Ordering::Release);
        }
    }
}

impl Drop for ReadRoom {
    fn drop(&mut self) {
        self.memory.give_back_room(self.room);
    }
}
