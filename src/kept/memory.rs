//! The layout of the kept memory: a header, a slot for each connection, read rooms, and areas for logs. Begin at
//! [`KeptMemory::create`] and [`KeptMemory::open`].
//!
//! | bytes | field |
//! | --- | --- |
//! | 0..4096 | header: magic, version of the layout, number of the next connection, slots that were ever used |
//! | 64 for each slot | the serial number of its connection, and the word that says where its log is |
//! | 4 KiB and 128 KiB for each room | whose bytes it has, their offset in the input of the connection; the bytes |
//! | the rest | areas |
//!
//! The memory is an anonymous file. Pages exist once they were written. An area that is given back returns its pages to the
//! system if it is long.

#![allow(unsafe_code)]

use std::collections::BTreeMap;
use std::fs::File;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use memmap2::{MmapOptions, MmapRaw};
use rustix::fs::{FallocateFlags, MemfdFlags};

use crate::areas::{Area, AreaTable, SMALLEST};
use crate::connection_log::{CommittedLog, ConnectionLog};
use crate::read_room::{ROOM_BYTES, ReadRoom};

const MAGIC: u64 = u64::from_le_bytes(*b"MUSTRKPT");
/// The version of the layout. A core drops the connections of a memory with another one.
pub const LAYOUT_VERSION: u64 = 1;

const HEADER_BYTES: usize = 4096;
const NEXT_SERIAL: usize = 16;
const SLOTS_USED: usize = 24;
/// The greatest number of kept connections.
const SLOTS: u32 = 1 << 16;
const SLOT_BYTES: usize = 64;
/// More threads than these read connections that are not kept.
const ROOMS: usize = 64;
const ROOM_HEADER: usize = 4096;
const ROOMS_BEGIN: usize = HEADER_BYTES + SLOTS as usize * SLOT_BYTES;
const AREAS_BEGIN: usize = ROOMS_BEGIN + ROOMS * (ROOM_HEADER + ROOM_BYTES);
/// The most bytes of areas in use.
const AREAS_MAX: u64 = 1 << 30;
/// Areas of different lengths leave gaps.
const BYTES: usize = AREAS_BEGIN + 4 * AREAS_MAX as usize;
/// An area of at least this length returns its pages to the system, if more than [`SPARE_BYTES`] of free memory have pages.
const LONG_AREA: u64 = 64 << 10;
/// Free memory that keeps its pages: to get fresh ones takes longer than to copy a large answer.
const SPARE_BYTES: u64 = 32 << 20;

/// The reason for which the memory of a former core cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum KeptMemoryError {
    /// The system refuses it.
    #[error("the kept memory cannot be mapped: {0}")]
    Io(#[from] io::Error),
    /// Another program made it.
    #[error("the kept memory has layout {found}, and this program knows layout {LAYOUT_VERSION}")]
    OtherLayout {
        /// The version of its layout; 0 if it is no such memory.
        found: u64,
    },
}

/// A slot of the memory, and the serial number of the connection that it belonged to when its socket was handed over.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct HeldSlot {
    /// The number of the slot.
    pub slot: u32,
    /// The serial number, which no other connection has.
    pub serial: u64,
}

/// The memory that outlives a core.
#[derive(Debug)]
pub struct KeptMemory {
    file: File,
    map: MmapRaw,
    areas: Mutex<AreaTable>,
    /// The bytes of free long areas that have pages, at most.
    spare_bytes: AtomicU64,
    free_slots: Mutex<Vec<u32>>,
    free_rooms: Mutex<Vec<usize>>,
}

impl KeptMemory {
    /// Creates a memory without connections.
    ///
    /// # Errors
    /// If the system has none.
    pub fn create() -> io::Result<OwnedFd> {
        let file = File::from(rustix::fs::memfd_create("muster-kept", MemfdFlags::CLOEXEC)?);
        file.set_len(BYTES as u64)?;
        let map = MmapOptions::new().len(HEADER_BYTES).map_raw(&file)?;
        for (offset, value) in [(0, MAGIC), (8, LAYOUT_VERSION), (NEXT_SERIAL, 1)] {
            word(&map, offset).store(value, Ordering::Release);
        }
        Ok(file.into())
    }

    /// Opens a memory for the only core that lives. Returns the logs of those of the connections `held` that can be continued;
    /// all other slots become free.
    ///
    /// # Errors
    /// If it cannot be mapped, or another program made it.
    pub fn open(
        descriptor: OwnedFd,
        held: &[HeldSlot],
    ) -> Result<(Arc<Self>, Vec<ConnectionLog>), KeptMemoryError> {
        let file = File::from(descriptor);
        if file.metadata()?.len() < BYTES as u64 {
            return Err(KeptMemoryError::OtherLayout { found: 0 });
        }
        let map = MmapOptions::new().len(BYTES).map_raw(&file)?;
        let found = if word(&map, 0).load(Ordering::Acquire) == MAGIC {
            word(&map, 8).load(Ordering::Acquire)
        } else {
            0
        };
        if found != LAYOUT_VERSION {
            return Err(KeptMemoryError::OtherLayout { found });
        }
        let held: Vec<HeldSlot> = held.iter().copied().filter(|held| held.slot < SLOTS).collect();
        let mut committed: Vec<Option<CommittedLog>> = vec![None; SLOTS as usize];
        let mut ends: BTreeMap<u32, u32> = BTreeMap::new();
        for HeldSlot { slot, serial } in &held {
            if word(&map, serial_offset(*slot)).load(Ordering::Acquire) == *serial {
                let log = CommittedLog::unpack(word(&map, log_offset(*slot)).load(Ordering::Acquire));
                committed[*slot as usize] = log.filter(|log| {
                    let (begin, end) = (log.area.block, log.area.end_block());
                    let is_apart = ends.range(..end).next_back().is_none_or(|(_, before)| *before <= begin);
                    let is_within = log.area.offset() + log.area.bytes() <= 4 * AREAS_MAX;
                    is_apart && is_within && ends.insert(begin, end).is_none()
                });
            }
        }
        let mut free_slots = Vec::new();
        let slots_used =
            u32::try_from(word(&map, SLOTS_USED).load(Ordering::Acquire)).unwrap_or(SLOTS).min(SLOTS);
        for slot in (0..slots_used).rev() {
            if committed[slot as usize].is_none() {
                word(&map, serial_offset(slot)).store(0, Ordering::Release);
                word(&map, log_offset(slot)).store(0, Ordering::Release);
                free_slots.push(slot);
            }
        }
        let used = committed.iter().flatten().map(|log| log.area).collect();
        let memory = Arc::new(Self {
            file,
            map,
            areas: Mutex::new(AreaTable::new(used, AREAS_MAX)),
            spare_bytes: AtomicU64::new(0),
            free_slots: Mutex::new(free_slots),
            free_rooms: Mutex::new((0..ROOMS).collect()),
        });
        let mut logs = Vec::new();
        for held in held {
            if let Some(log) = committed[held.slot as usize].take() {
                logs.push(ConnectionLog::continued(Arc::clone(&memory), held, log));
            }
        }
        Ok((memory, logs))
    }

    /// Takes a slot for a new connection; `None` if there is none. Nothing is valid in its log yet.
    #[must_use]
    pub fn begin_connection(self: &Arc<Self>) -> Option<ConnectionLog> {
        let slot = self.take_slot()?;
        let serial = word(&self.map, NEXT_SERIAL).fetch_add(1, Ordering::Relaxed);
        self.log_word(slot).store(0, Ordering::Release);
        word(&self.map, serial_offset(slot)).store(serial, Ordering::Release);
        Some(ConnectionLog::new(Arc::clone(self), HeldSlot { slot, serial }))
    }

    fn take_slot(&self) -> Option<u32> {
        let mut free = lock(&self.free_slots);
        let used = word(&self.map, SLOTS_USED);
        free.pop().or_else(|| {
            let slot = u32::try_from(used.load(Ordering::Relaxed)).ok().filter(|slot| *slot < SLOTS)?;
            used.store(u64::from(slot) + 1, Ordering::Release);
            Some(slot)
        })
    }

    /// Takes a room to read into; `None` if all are taken.
    #[must_use]
    pub fn take_read_room(self: &Arc<Self>) -> Option<ReadRoom> {
        let room = lock(&self.free_rooms).pop()?;
        Some(ReadRoom::new(Arc::clone(self), room))
    }

    /// Returns the `length` bytes from `offset` on of the input of a connection, if a room of the former core has them: the room
    /// that was claimed when so many bytes had been read.
    #[must_use]
    pub fn find_in_rooms(&self, serial: u64, offset: u64, length: usize) -> Option<Vec<u8>> {
        (0..ROOMS).find_map(|room| {
            let is_owner = self.room_words(room).map(|word| word.load(Ordering::Acquire)) == [serial, offset];
            (is_owner && length <= ROOM_BYTES).then(|| self.read(room_offset(room) + ROOM_HEADER, length))
        })
    }

    /// Forgets what the former core left in its rooms.
    pub fn clear_rooms(&self) {
        for room in 0..ROOMS {
            self.room_words(room)[0].store(0, Ordering::Release);
        }
    }

    /// Returns the number of connections.
    #[must_use]
    pub fn connection_count(&self) -> usize {
        let free = lock(&self.free_slots).len();
        usize::try_from(word(&self.map, SLOTS_USED).load(Ordering::Relaxed)).unwrap_or_default() - free
    }

    /// Returns the bytes of all areas in use.
    #[must_use]
    pub fn used_bytes(&self) -> u64 {
        lock(&self.areas).used_bytes()
    }

    // --- for logs and rooms

    pub(crate) fn allocate(&self, bytes: usize) -> Option<Area> {
        let area = lock(&self.areas).allocate(bytes)?;
        if area.bytes() >= LONG_AREA {
            let less = |spare: u64| Some(spare.saturating_sub(area.bytes()));
            let _ = self.spare_bytes.fetch_update(Ordering::Relaxed, Ordering::Relaxed, less);
        }
        Some(area)
    }

    pub(crate) fn release(&self, area: Area) {
        if area.bytes() >= LONG_AREA
            && self.spare_bytes.fetch_add(area.bytes(), Ordering::Relaxed) >= SPARE_BYTES
        {
            self.spare_bytes.fetch_sub(area.bytes(), Ordering::Relaxed);
            // If that fails, the pages stay, and are used again later.
            let _ = rustix::fs::fallocate(
                &self.file,
                FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE,
                AREAS_BEGIN as u64 + area.offset(),
                area.bytes(),
            );
        }
        lock(&self.areas).release(area);
    }

    /// Frees the slot of a connection that has ended.
    pub(crate) fn free_slot(&self, slot: u32) {
        self.log_word(slot).store(0, Ordering::Release);
        word(&self.map, serial_offset(slot)).store(0, Ordering::Release);
        lock(&self.free_slots).push(slot);
    }

    pub(crate) fn give_back_room(&self, room: usize) {
        lock(&self.free_rooms).push(room);
    }

    /// Returns the word that says where the log of a slot is.
    pub(crate) fn log_word(&self, slot: u32) -> &AtomicU64 {
        word(&self.map, log_offset(slot))
    }

    /// Returns the words of a room that say whose bytes it has, and the offset of the first one.
    pub(crate) fn room_words(&self, room: usize) -> [&AtomicU64; 2] {
        [word(&self.map, room_offset(room)), word(&self.map, room_offset(room) + 8)]
    }

    /// Returns the bytes of a room. The caller is the only one that uses the room.
    pub(crate) fn room_bytes(&self, room: usize) -> *mut u8 {
        assert!(room < ROOMS);
        self.map.as_mut_ptr().wrapping_add(room_offset(room) + ROOM_HEADER)
    }

    /// Writes to an area, which the caller alone uses.
    pub(crate) fn write_area(&self, area: Area, at: usize, bytes: &[u8]) {
        assert!((at + bytes.len()) as u64 <= area.bytes());
        let offset = AREAS_BEGIN + area.offset() as usize + at;
        assert!(offset + bytes.len() <= BYTES);
        // SAFETY: the target lies within the mapping, and no reference into areas exists: `read` copies.
        unsafe {
            let to = self.map.as_mut_ptr().add(offset);
            std::ptr::copy_nonoverlapping(bytes.as_ptr(), to, bytes.len());
        }
    }

    /// Reads from an area, which the caller alone uses.
    pub(crate) fn read_area(&self, area: Area, length: usize) -> Vec<u8> {
        assert!(length as u64 <= area.bytes());
        self.read(AREAS_BEGIN + area.offset() as usize, length)
    }

    fn read(&self, offset: usize, length: usize) -> Vec<u8> {
        assert!(offset + length <= BYTES);
        let mut bytes = vec![0; length];
        // SAFETY: the source lies within the mapping, and no process writes there: the former core is dead, and this one does not
        // use the bytes meanwhile.
        unsafe { std::ptr::copy_nonoverlapping(self.map.as_ptr().add(offset), bytes.as_mut_ptr(), length) };
        bytes
    }
}

/// The serial numbers of the slots, which the keeper compares with those of the sockets that it holds.
#[derive(Debug)]
pub struct SlotSerials {
    map: MmapRaw,
}

impl SlotSerials {
    /// Maps the slots of a memory that this program created.
    ///
    /// # Errors
    /// If it cannot be mapped.
    pub fn map(descriptor: &OwnedFd) -> io::Result<Self> {
        Ok(Self { map: MmapOptions::new().len(ROOMS_BEGIN).map_raw(descriptor)? })
    }

    /// Returns whether a slot still belongs to the connection to which it belonged.
    #[must_use]
    pub fn is_open(&self, held: HeldSlot) -> bool {
        held.slot < SLOTS && word(&self.map, serial_offset(held.slot)).load(Ordering::Acquire) == held.serial
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

fn serial_offset(slot: u32) -> usize {
    HEADER_BYTES + slot as usize * SLOT_BYTES
}

fn log_offset(slot: u32) -> usize {
    serial_offset(slot) + 8
}

fn room_offset(room: usize) -> usize {
    ROOMS_BEGIN + room * (ROOM_HEADER + ROOM_BYTES)
}

fn word(map: &MmapRaw, offset: usize) -> &AtomicU64 {
    assert!(offset.is_multiple_of(8) && offset + 8 <= map.len());
    // SAFETY: the word lies within the mapping and is aligned, and is accessed as an atomic only.
    unsafe { &*map.as_mut_ptr().add(offset).cast::<AtomicU64>() }
}

const _: () = assert!(AREAS_BEGIN.is_multiple_of(4096) && BYTES as u64 / SMALLEST < 1 << 26);
