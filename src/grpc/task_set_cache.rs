//! A cache of the sets of tasks in requests: extracted from the message, decoded once, shared by all calls with the
//! same bytes.
//!
//! It decodes nothing else of a request. Begin at [`TaskSetCache::extract`] and [`TaskSetCache::lookup`].
//!
//! Every task of a cluster asks about the whole cluster: 40 KB that differ in the first 30 bytes. Equal sets
//! are one allocation. Of a compressed request only the beginning is inflated; the checksum (CRC-32) then
//! decides whether the rest is a known set, with the same certainty with which it verifies inflated data.
//! Inflating was most of the cost of such a call.

use std::sync::{Arc, Mutex, PoisonError};

use bytes::{Buf, Bytes};
use libdeflater::crc32;
use prost::encoding::{self, DecodeContext, WireType};
use prost::{DecodeError, Message as _};

use super::crc32::CrcShift;
use super::decoded_call::decode_failure;
use super::frame::Message;
use super::gzip::Gzip;
use crate::coordination::{Failure, TaskId, TaskSet};
use crate::proto::CoordinatedTask;

/// The encoding of a set of tasks in a generation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum SetEncoding {
    /// A `CoordinatedTask` for each task.
    Messages,
    /// Numbers, packed or not.
    Numbers,
}

/// The length below which a request is decoded without the cache.
const CACHED_MIN_BYTES: usize = 256;
/// The length beyond which a set is not cached.
const CACHED_MAX_BYTES: usize = 1 << 20;
/// The number of cached sets.
const CACHED_SETS: usize = 8;

#[derive(Debug, Clone)]
struct CachedSet {
    spelling: SetEncoding,
    field: u32,
    raw: Bytes,
    set: TaskSet,
    /// The checksum of `raw`.
    checksum: u32,
    /// The effect of appending `raw` on the checksum of the bytes before it.
    shift: CrcShift,
}

impl CachedSet {
    fn new(spelling: SetEncoding, field: u32, raw: Bytes, set: TaskSet) -> Self {
        let (checksum, shift) = (crc32(&raw), CrcShift::by(raw.len()));
        Self { spelling, field, raw, set, checksum, shift }
    }
}

/// A message that ends in a cached set, by its length and checksum. Inflating it would cost more than the
/// rest of its call, because only a hundredth of it is new.
#[derive(Debug, Clone)]
pub(super) struct CachedMessage {
    /// The bytes before the set.
    beginning: Bytes,
    known: CachedSet,
}

impl CachedMessage {
    /// Returns the whole message.
    pub(super) fn bytes(&self) -> Bytes {
        [&*self.beginning, &*self.known.raw].concat().into()
    }
}

/// The greatest length of the bytes before a set.
const PREFIX_MAX: usize = 256;
/// The number of bytes of the set that are compared, beside the checksum.
const SAMPLE: usize = 16;
/// The longest match of deflate. The decompressor omits a match for which there is no room.
const LONGEST_MATCH: usize = 258;

/// The sets that were decoded last.
#[derive(Default)]
pub(super) struct TaskSetCache {
    /// The list is replaced, never changed, so that comparing needs no lock.
    known: Mutex<Arc<Vec<CachedSet>>>,
}

/// A range of bytes in a request that holds the set's field.
struct FieldRange {
    start: usize,
    end: usize,
}

impl TaskSetCache {
    /// Returns the empty set.
    pub(super) fn empty() -> TaskSet {
        TaskSet::new(Vec::new())
    }

    /// Returns the message in `file`, if it ends in a cached set, so that only its beginning is inflated.
    ///
    /// The checksum is the file's own statement about its contents; no receiver has a better one. A client
    /// that forges it asks about a set that it could have named openly.
    pub(super) fn lookup(&self, file: &Gzip) -> Option<CachedMessage> {
        if file.length < CACHED_MIN_BYTES {
            return None;
        }
        let known = Arc::clone(&self.known.lock().unwrap_or_else(PoisonError::into_inner));
        let fits = |known: &&CachedSet| {
            file.length.checked_sub(known.raw.len()).is_some_and(|length| length <= PREFIX_MAX)
        };
        known.iter().find(fits)?;
        let mut room = [0; PREFIX_MAX + 2 * SAMPLE + LONGEST_MATCH];
        file.peek(&mut room);
        known.iter().filter(fits).find_map(|known| {
            let (beginning, set) = room.split_at_checked(file.length - known.raw.len())?;
            let same = set.get(..SAMPLE) == known.raw.get(..SAMPLE)
                && known.shift.join(crc32(beginning), known.checksum) == file.checksum;
            same.then(|| CachedMessage { beginning: Bytes::copy_from_slice(beginning), known: known.clone() })
        })
    }

    /// Extracts the set in field `field` from a request: returns the rest of the request, and the set if the
    /// field occurs.
    pub(super) fn extract(
        &self,
        message: &Message,
        field: u32,
        spelling: SetEncoding,
    ) -> Result<(Bytes, Option<TaskSet>), Failure> {
        if let Message::Cached(CachedMessage { beginning, known }) = message
            && known.field == field
            && known.spelling == spelling
            && !contains_field(beginning, field)
        {
            return Ok((beginning.clone(), Some(known.set.clone())));
        }
        self.extract_from(message.bytes(), field, spelling)
    }

    fn extract_from(
        &self,
        request: Bytes,
        field: u32,
        spelling: SetEncoding,
    ) -> Result<(Bytes, Option<TaskSet>), Failure> {
        let known = match request.len() {
            0..CACHED_MIN_BYTES => Arc::default(),
            _ => Arc::clone(&self.known.lock().unwrap_or_else(PoisonError::into_inner)),
        };
        let mut lifted =
            SetExtractor { request: &request, field, spelling, ids: Vec::new(), set: None, region: None };
        let rest = lifted.run(&known).map_err(|error| decode_failure(&error))?;
        let SetExtractor { ids, set, region, .. } = lifted;
        if let Some(set) = set {
            return Ok((rest.into(), Some(set)));
        }
        if ids.is_empty() {
            return Ok((rest.into(), None));
        }
        let set = TaskSet::new(ids.into_iter().map(TaskId).collect());
        if let Some(FieldRange { start, end }) = region
            && (CACHED_MIN_BYTES..=CACHED_MAX_BYTES).contains(&(end - start))
        {
            let raw = Bytes::copy_from_slice(request.get(start..end).unwrap_or_default());
            self.keep(CachedSet::new(spelling, field, raw, set.clone()));
        }
        Ok((rest.into(), Some(set)))
    }

    fn keep(&self, new: CachedSet) {
        let mut known = self.known.lock().unwrap_or_else(PoisonError::into_inner);
        let others = known.iter().filter(|k| k.raw != new.raw).take(CACHED_SETS - 1).cloned();
        *known = Arc::new(std::iter::once(new.clone()).chain(others).collect());
    }
}

/// Returns whether `field` occurs in `message`, or `message` is malformed.
fn contains_field(mut message: &[u8], field: u32) -> bool {
    while !message.is_empty() {
        let Ok((tag, wire_type)) = encoding::decode_key(&mut message) else { return true };
        let skipped = encoding::skip_field(wire_type, tag, &mut message, DecodeContext::default());
        if tag == field || skipped.is_err() {
            return true;
        }
    }
    false
}

struct SetExtractor<'a> {
    request: &'a [u8],
    field: u32,
    spelling: SetEncoding,
    /// The decoded ids, in the order of the request.
    ids: Vec<i32>,
    /// The set, if it was cached.
    set: Option<TaskSet>,
    /// The position of the field, as long as it is in one place.
    region: Option<FieldRange>,
}

impl SetExtractor<'_> {
    /// Processes the fields; returns all others.
    fn run(&mut self, known: &[CachedSet]) -> Result<Vec<u8>, DecodeError> {
        let mut rest = Vec::new();
        let mut left = self.request;
        let mut scattered = false;
        while !left.is_empty() {
            let start = self.request.len() - left.len();
            let (tag, wire_type) = encoding::decode_key(&mut left)?;
            if tag != self.field {
                encoding::skip_field(wire_type, tag, &mut left, DecodeContext::default())?;
                let end = self.request.len() - left.len();
                rest.extend_from_slice(self.request.get(start..end).unwrap_or_default());
                continue;
            }
            let first = self.ids.is_empty() && self.set.is_none();
            if first && let Some(length) = self.lookup(known, start) {
                left = self.request.get(start + length..).unwrap_or_default();
                continue;
            }
            // The cached set turns out to continue, so its ids are joined with those that follow.
            if let Some(set) = self.set.take() {
                self.ids.extend(set.ids().iter().map(|task| task.0));
                scattered = true;
            }
            self.read(wire_type, &mut left)?;
            let end = self.request.len() - left.len();
            match &mut self.region {
                Some(region) if region.end == start => region.end = end,
                Some(_) => scattered = true,
                None => self.region = Some(FieldRange { start, end }),
            }
        }
        if scattered {
            self.region = None;
        }
        Ok(rest)
    }

    /// Returns the length of the cached set at `start`.
    fn lookup(&mut self, known: &[CachedSet], start: usize) -> Option<usize> {
        let here = self.request.get(start..)?;
        let found = known.iter().find(|k| {
            k.spelling == self.spelling
                && k.field == self.field
                && here.strip_prefix(&*k.raw).is_some_and(|after| !self.field_continues(after))
        })?;
        self.set = Some(found.set.clone());
        Some(found.raw.len())
    }

    /// Returns whether more of the field follows, so that the bytes before were only a part of the set.
    fn field_continues(&self, mut after: &[u8]) -> bool {
        matches!(encoding::decode_key(&mut after), Ok((tag, _)) if tag == self.field)
    }

    fn read(&mut self, wire_type: WireType, left: &mut &[u8]) -> Result<(), DecodeError> {
        let context = DecodeContext::default();
        match self.spelling {
            SetEncoding::Messages => {
                encoding::check_wire_type(WireType::LengthDelimited, wire_type)?;
                let length = encoding::decode_varint(left)?;
                let task = usize::try_from(length).ok().and_then(|length| left.get(..length));
                let Some(task) = task else {
                    // The data is cut short; the decoder words the error.
                    return encoding::skip_field(
                        WireType::SixtyFourBit,
                        self.field,
                        &mut [].as_slice(),
                        context,
                    );
                };
                left.advance(task.len());
                self.ids.push(CoordinatedTask::decode(task)?.task_id);
            }
            SetEncoding::Numbers => {
                encoding::int32::merge_repeated(wire_type, &mut self.ids, left, context)?;
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::proto::{tensorflow, xla};

    fn tasks(ids: &[i32], named: bool) -> Vec<CoordinatedTask> {
        ids.iter().map(|&task_id| CoordinatedTask { named, task_id, recoverable: false }).collect()
    }

    fn ids(set: Option<TaskSet>) -> Vec<i32> {
        set.expect("a set").ids().iter().map(|task| task.0).collect()
    }

    fn kept(sets: &TaskSetCache) -> usize {
        sets.known.lock().unwrap().len()
    }

    #[test]
    fn a_set_is_lifted_out_and_the_rest_stays() {
        let sets = TaskSetCache::default();
        let all: Vec<i32> = (0..2000).rev().collect();
        for task in [0, 7, 1999] {
            let asked = xla::coordination::GetAliveTasksRequest {
                incarnations: Some(xla::coordination::Incarnations {
                    service_incarnation: 5,
                    ..Default::default()
                }),
                requesting_task_id: task,
                task_ids: all.clone(),
            };
            let (rest, set) =
                sets.extract_from(asked.encode_to_vec().into(), 3, SetEncoding::Numbers).unwrap();
            let rest = xla::coordination::GetAliveTasksRequest::decode(rest).unwrap();
            assert_eq!(ids(set), (0..2000).collect::<Vec<_>>());
            assert_eq!(rest, xla::coordination::GetAliveTasksRequest { task_ids: vec![], ..asked });
            assert_eq!(kept(&sets), 1, "read once");
        }
    }

    #[test]
    fn a_compressed_request_about_a_known_set_is_not_inflated() {
        use crate::grpc::gzip::compress;
        let sets = TaskSetCache::default();
        let ask = |task, tasks: &[i32]| {
            let incarnations = xla::coordination::Incarnations {
                service_incarnation: 7,
                task_id: 0,
                task_incarnation: u64::from(u32::MAX) << 7 | task as u64,
            };
            let (incarnations, task_ids) = (Some(incarnations), tasks.to_vec());
            xla::coordination::GetAliveTasksRequest { incarnations, requesting_task_id: task, task_ids }
        };
        let all: Vec<i32> = (0..2000).collect();
        let recall = |asked: &xla::coordination::GetAliveTasksRequest| {
            let file = compress(&asked.encode_to_vec());
            sets.lookup(&Gzip::open(&file).unwrap())
        };
        assert!(recall(&ask(0, &all)).is_none(), "nothing is known yet");
        sets.extract_from(ask(0, &all).encode_to_vec().into(), 3, SetEncoding::Numbers).unwrap();
        for task in [0, 1, 127, 128, 1999] {
            let asked = ask(task, &all);
            let recalled = recall(&asked).expect("it is known");
            assert_eq!(recalled.bytes(), asked.encode_to_vec());
            let message = Message::Cached(recalled);
            let (rest, set) = sets.extract(&message, 3, SetEncoding::Numbers).unwrap();
            let rest = xla::coordination::GetAliveTasksRequest::decode(rest).unwrap();
            assert_eq!((rest.requesting_task_id, rest.incarnations), (task, asked.incarnations));
            assert_eq!(ids(set), all);
            // The cache distinguishes the encodings of the same bytes.
            let (_, other) = sets.extract(&message, 4, SetEncoding::Numbers).unwrap();
            assert!(other.is_none());
        }
        // A message that differs anywhere has another set.
        for place in [0, 1, 999, 1999] {
            let mut others = all.clone();
            others[place] ^= 1;
            assert!(recall(&ask(3, &others)).is_none(), "{place}");
        }
        assert!(recall(&ask(3, &all[..1999])).is_none());
    }

    #[test]
    fn sets_that_begin_alike_are_told_apart() {
        let sets = TaskSetCache::default();
        for named in [true, false] {
            for n in [100, 200, 100, 150, 200] {
                let members: Vec<i32> = (0..n).collect();
                let asked = tensorflow::BarrierRequest {
                    barrier_id: "b".into(),
                    tasks: tasks(&members, named),
                    source_task: Some(CoordinatedTask { named, task_id: 3, recoverable: false }),
                    counter: 9,
                    ..Default::default()
                };
                let (rest, set) =
                    sets.extract_from(asked.encode_to_vec().into(), 3, SetEncoding::Messages).unwrap();
                assert_eq!(ids(set), members);
                let rest = tensorflow::BarrierRequest::decode(rest).unwrap();
                assert_eq!(rest, tensorflow::BarrierRequest { tasks: vec![], ..asked });
            }
        }
        assert_eq!(kept(&sets), 6);
    }

    #[test]
    fn odd_spellings_are_read_and_bad_ones_refused() {
        let sets = TaskSetCache::default();
        let scattered = [0x18, 5, 0x10, 9, 0x1a, 2, 3, 4, 0x18, 1];
        let (rest, set) =
            sets.extract_from(Bytes::copy_from_slice(&scattered), 3, SetEncoding::Numbers).unwrap();
        assert_eq!(ids(set), [1, 3, 4, 5]);
        assert_eq!(*rest, [0x10, 9]);
        let (_, none) = sets.extract_from(Bytes::from_static(&[0x10, 9]), 3, SetEncoding::Numbers).unwrap();
        assert!(none.is_none());
        for bad in [&[0x1a, 5, 1][..], &[0x1a], &[0x1b], &[0xff; 12], &[0x1d, 1, 2, 3, 4]] {
            for spelling in [SetEncoding::Numbers, SetEncoding::Messages] {
                assert!(sets.extract_from(Bytes::copy_from_slice(bad), 3, spelling).is_err(), "{bad:?}");
            }
        }
    }

    #[test]
    fn a_known_set_that_goes_on_elsewhere_is_read_whole() {
        let sets = TaskSetCache::default();
        let mut packed = vec![0x1a, 0xac, 0x02];
        packed.extend((0..300_u32).map(|n| (n % 100) as u8));
        for _ in 0..2 {
            let (_, set) = sets.extract_from(packed.clone().into(), 3, SetEncoding::Numbers).unwrap();
            assert_eq!(ids(set).len(), 100);
        }
        packed.extend([0x10, 1, 0x18, 101]);
        let (rest, set) = sets.extract_from(packed.into(), 3, SetEncoding::Numbers).unwrap();
        assert_eq!(ids(set).len(), 101);
        assert_eq!(*rest, [0x10, 1]);
    }
}
