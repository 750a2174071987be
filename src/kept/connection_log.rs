//! The log of one connection: records from which the next core makes the state of the connection again. Begin at
//! [`ConnectionLog::begin`].
//!
//! Records are appended to an area, and are valid once they are committed, all together. When the area is full, the user
//! begins another one with records that say everything anew; the former area stays valid until they are committed.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use crate::areas::{Area, SMALLEST};
use crate::memory::{HeldSlot, KeptMemory};

/// The length and the kind of a record, before its bytes.
const RECORD_HEADER: usize = 8;

/// A record that was committed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LogRecord {
    /// Its kind, which the user chose.
    pub kind: u32,
    /// Its contents.
    pub bytes: Vec<u8>,
}

/// A log that is valid: its area, and the length of its records.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct CommittedLog {
    pub area: Area,
    pub length: usize,
}

impl CommittedLog {
    const LENGTH_BITS: u32 = 33;
    const CLASS_BITS: u32 = 5;

    fn pack(self) -> u64 {
        let area = u64::from(self.area.block) << Self::CLASS_BITS | u64::from(self.area.class);
        area << Self::LENGTH_BITS | self.length as u64
    }

    /// Returns the log that a word names; `None` if none is valid.
    pub fn unpack(word: u64) -> Option<Self> {
        let length = word & ((1 << Self::LENGTH_BITS) - 1);
        let area = word >> Self::LENGTH_BITS;
        let block = u32::try_from(area >> Self::CLASS_BITS).ok()?;
        let area = Area { block, class: u8::try_from(area & ((1 << Self::CLASS_BITS) - 1)).ok()? };
        (area.is_valid() && length > 0 && length <= area.bytes())
            .then_some(Self { area, length: length as usize })
    }
}

/// The log of a connection. Its slot becomes free when it is dropped.
#[derive(Debug)]
pub struct ConnectionLog {
    memory: Arc<KeptMemory>,
    held: HeldSlot,
    committed: Option<CommittedLog>,
    /// Where records are appended, and the length of those that are there.
    present: Option<CommittedLog>,
}

impl ConnectionLog {
    pub(crate) fn new(memory: Arc<KeptMemory>, held: HeldSlot) -> Self {
        Self { memory, held, committed: None, present: None }
    }

    pub(crate) fn continued(memory: Arc<KeptMemory>, held: HeldSlot, log: CommittedLog) -> Self {
        Self { memory, held, committed: Some(log), present: Some(log) }
    }

    /// Returns its slot.
    #[must_use]
    pub fn held_slot(&self) -> HeldSlot {
        self.held
    }

    /// Returns the memory that the log is in.
    #[must_use]
    pub fn memory(&self) -> &Arc<KeptMemory> {
        &self.memory
    }

    /// Returns the bytes of the area in which records are appended.
    #[must_use]
    pub fn area_bytes(&self) -> usize {
        self.present.map_or(0, |log| log.area.bytes() as usize)
    }

    /// Returns the committed records.
    #[must_use]
    pub fn records(&self) -> Vec<LogRecord> {
        let Some(log) = self.committed else { return Vec::new() };
        let bytes = self.memory.read_area(log.area, log.length);
        let mut rest = bytes.as_slice();
        let mut records = Vec::new();
        while let Some((header, after)) = rest.split_first_chunk::<RECORD_HEADER>() {
            let [l0, l1, l2, l3, k0, k1, k2, k3] = *header;
            let length = u32::from_le_bytes([l0, l1, l2, l3]) as usize;
            let Some((contents, after)) = after.split_at_checked(length) else { break };
            records.push(LogRecord { kind: u32::from_le_bytes([k0, k1, k2, k3]), bytes: contents.to_vec() });
            rest = after;
        }
        records
    }

    /// Begins another area with room for at least `bytes` of records, headers included. Returns `false`, and appends
    /// nothing more, if there is no memory.
    #[must_use]
    pub fn begin(&mut self, bytes: usize) -> bool {
        self.drop_uncommitted();
        let area = self.memory.allocate(bytes.max(SMALLEST as usize));
        self.present = area.map(|area| CommittedLog { area, length: 0 });
        area.is_some()
    }

    /// Returns the bytes that a record with `bytes` of contents takes.
    #[must_use]
    pub const fn record_bytes(bytes: usize) -> usize {
        RECORD_HEADER + bytes
    }

    /// Appends a record, whose contents are `first` and then these parts. Returns `false`, and appends nothing, if the area has
    /// no room for it.
    #[must_use]
    pub fn append<'a>(
        &mut self,
        kind: u32,
        first: &[u8],
        parts: impl Iterator<Item = &'a [u8]> + Clone,
    ) -> bool {
        let Some(log) = &mut self.present else { return false };
        let length = first.len() + parts.clone().map(<[u8]>::len).sum::<usize>();
        let (Ok(short), end) = (u32::try_from(length), log.length + RECORD_HEADER + length) else {
            return false;
        };
        if end as u64 > log.area.bytes() {
            return false;
        }
        let mut header = [0; RECORD_HEADER];
        header[..4].copy_from_slice(&short.to_le_bytes());
        header[4..].copy_from_slice(&kind.to_le_bytes());
        let mut at = log.length;
        let mut write = |part: &[u8]| {
            self.memory.write_area(log.area, at, part);
            at += part.len();
        };
        write(&header);
        write(first);
        parts.for_each(write);
        log.length = end;
        true
    }

    /// Makes all appended records valid, in place of a former area if one was begun.
    pub fn commit(&mut self) {
        let Some(present) = self.present.filter(|log| log.length > 0) else { return };
        // A process that reads this word also reads the records before it.
        self.memory.log_word(self.held.slot).store(present.pack(), Ordering::Release);
        if let Some(former) = self.committed.replace(present)
            && former.area != present.area
        {
            self.memory.release(former.area);
        }
    }

    /// Makes nothing valid until the next commit. The records stay, and others can be appended to them.
    pub fn suspend(&mut self) {
        self.memory.log_word(self.held.slot).store(0, Ordering::Release);
    }

    /// Makes nothing valid: the next core cannot continue the connection.
    pub fn withdraw(&mut self) {
        self.memory.log_word(self.held.slot).store(0, Ordering::Release);
        self.drop_uncommitted();
        self.present = None;
        if let Some(log) = self.committed.take() {
            self.memory.release(log.area);
        }
    }

    fn drop_uncommitted(&mut self) {
        if let Some(present) = self.present.take()
            && self.committed.is_none_or(|log| log.area != present.area)
        {
            self.memory.release(present.area);
        }
    }
}

impl Drop for ConnectionLog {
    fn drop(&mut self) {
        self.withdraw();
        self.memory.free_slot(self.held.slot);
    }
}

#[cfg(test)]
mod tests {
    use std::iter;

    use super::*;
    use crate::read_room::ROOM_BYTES;

    /// Opens a memory as a core does.
    fn open(descriptor: &std::os::fd::OwnedFd, held: &[HeldSlot]) -> (Arc<KeptMemory>, Vec<ConnectionLog>) {
        KeptMemory::open(descriptor.try_clone().expect("a descriptor"), held).expect("the layout is known")
    }

    /// Ends a core that has these logs, as a signal does.
    fn kill(logs: Vec<ConnectionLog>) {
        logs.into_iter().for_each(std::mem::forget);
    }

    #[test]
    fn the_next_core_finds_what_was_committed_and_nothing_else() {
        let descriptor = KeptMemory::create().expect("memory");
        let mut random = fastrand::Rng::with_seed(3);
        let mut expected: Vec<(HeldSlot, Vec<LogRecord>)> = Vec::new();
        for round in 0..200 {
            let held: Vec<HeldSlot> = expected.iter().map(|(held, _)| *held).collect();
            let (memory, logs) = open(&descriptor, &held);
            let mut present: Vec<(ConnectionLog, Vec<LogRecord>)> = Vec::new();
            assert_eq!(logs.len(), expected.len(), "round {round}");
            for (log, (expected_held, records)) in logs.into_iter().zip(expected.drain(..)) {
                assert_eq!(
                    (log.held_slot(), log.records()),
                    (expected_held, records.clone()),
                    "round {round}"
                );
                present.push((log, records));
            }
            for _ in 0..random.usize(..4) {
                let mut log = memory.begin_connection().expect("a slot");
                assert!(log.begin(100) && log.append(1, &[1, 2, 3], iter::empty()));
                log.commit();
                present.push((log, vec![LogRecord { kind: 1, bytes: vec![1, 2, 3] }]));
            }
            for _ in 0..random.usize(..20) {
                if present.is_empty() {
                    break;
                }
                let nth = random.usize(..present.len());
                if random.usize(..10) == 0 {
                    drop(present.swap_remove(nth));
                    continue;
                }
                let (log, records) = &mut present[nth];
                let length = random.usize(..3000);
                let bytes: Vec<u8> = iter::repeat_with(|| random.u8(..)).take(length).collect();
                let record = LogRecord { kind: random.u32(..), bytes };
                let parts = record.bytes.split_at(record.bytes.len() / 2);
                let parts = [parts.0, parts.1];
                if !log.append(record.kind, &[], parts.iter().copied()) {
                    // All is said anew in an area of another length.
                    let bytes = records
                        .iter()
                        .chain([&record])
                        .map(|of| ConnectionLog::record_bytes(of.bytes.len()))
                        .sum();
                    assert!(log.begin(bytes));
                    for of in records.iter().chain([&record]) {
                        assert!(log.append(of.kind, &of.bytes, iter::empty()));
                    }
                }
                // Records that are not committed are lost.
                if random.bool() {
                    log.commit();
                    records.push(record);
                } else {
                    let committed = log.records();
                    assert_eq!(committed, *records);
                    assert!(
                        log.begin(
                            1 + records
                                .iter()
                                .map(|of| ConnectionLog::record_bytes(of.bytes.len()))
                                .sum::<usize>()
                        )
                    );
                    for of in records.iter() {
                        assert!(log.append(of.kind, &of.bytes, iter::empty()));
                    }
                    assert_eq!(log.records(), *records, "the former area is valid");
                }
            }
            let (logs, records): (Vec<_>, Vec<_>) = present.into_iter().unzip();
            expected = logs.iter().map(ConnectionLog::held_slot).zip(records).collect();
            kill(logs);
        }
        let (memory, logs) = open(&descriptor, &[]);
        assert!(logs.is_empty() && memory.used_bytes() == 0, "nobody holds the connections any more");
    }

    #[test]
    fn a_slot_of_another_connection_is_not_continued_and_a_withdrawn_log_neither() {
        let descriptor = KeptMemory::create().expect("memory");
        let (memory, _) = open(&descriptor, &[]);
        let mut log = memory.begin_connection().expect("a slot");
        let first = log.held_slot();
        assert!(log.begin(10) && log.append(1, &[1], iter::empty()));
        log.commit();
        drop(log);
        let mut log = memory.begin_connection().expect("a slot");
        let second = log.held_slot();
        assert!(second.slot == first.slot && second.serial != first.serial);
        let serials = crate::SlotSerials::map(&descriptor).expect("memory");
        assert!(serials.is_open(second) && !serials.is_open(first));
        assert!(log.begin(10) && log.append(1, &[1], iter::empty()));
        log.commit();
        log.withdraw();
        kill(vec![log]);
        assert!(open(&descriptor, &[first, second]).1.is_empty());
        assert!(!serials.is_open(second), "the keeper can let go of its socket");
    }

    #[test]
    fn bytes_in_a_room_belong_to_the_connection_that_claimed_it_last() {
        let descriptor = KeptMemory::create().expect("memory");
        let (memory, _) = open(&descriptor, &[]);
        let mut room = memory.take_read_room().expect("a room");
        room.claim(7, 1000)[..3].copy_from_slice(b"abc");
        let find = |serial, offset, length| memory.find_in_rooms(serial, offset, length);
        assert_eq!(find(7, 1000, 3).as_deref(), Some(b"abc".as_slice()));
        assert_eq!(find(7, 1001, 2), None, "everything before was in the log when the room was claimed");
        assert_eq!(find(7, 999, 3), None);
        assert_eq!(find(8, 1000, 3), None);
        assert_eq!(find(7, 1000, ROOM_BYTES + 1), None);
        room.claim(8, 5);
        assert_eq!((find(7, 1000, 3), find(8, 5, 3).as_deref()), (None, Some(b"abc".as_slice())));
        room.release();
        assert_eq!(find(8, 5, 3), None);
        assert!(room.is_in(&memory));
    }
}
