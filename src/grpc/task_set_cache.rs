//! A cache of the sets of tasks that requests contain. The bytes of a set are cut out of the message and decoded
//! once. All calls with the same bytes share the decoded set. Begin at [`TaskSetCache::extract_task_set`] and
//! [`TaskSetCache::inflate_or_look_up`].
//!
//! In a large job, each task sends requests that name all tasks: 40 KB, of which only the first 30 bytes differ
//! from task to task. With the cache, all these requests share one allocation. Most tasks send the same bytes again
//! and again, and to inflate them was most of the cost of such a call. The cache therefore also keeps compressed
//! requests that end in a known set. A request with the same bytes is not inflated again. Two sets, or two requests,
//! count as equal only if all their bytes are equal; a checksum only finds the candidate.

use std::borrow::Cow;
use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use bytes::{Buf, Bytes};
use prost::encoding::{self, DecodeContext, WireType};
use prost::{DecodeError, Message as _};

use super::cached_task_set::{CachedTaskSet, MessageWithCachedSet, TaskSetEncoding};
use super::frame::{RequestMessage, decode_failure};
use super::gzip::GzipFile;
use crate::coordination::{Failure, TaskId, TaskSet};
use crate::proto::CoordinatedTask;

/// The length below which a request is decoded without the cache.
const CACHED_MIN_BYTES: usize = 256;
/// The length beyond which a set is not cached.
const CACHED_MAX_BYTES: usize = 1 << 20;
/// The number of cached sets.
const CACHED_SETS: usize = 8;

/// The greatest length of the bytes before a set.
const PREFIX_MAX: usize = 256;

/// A compressed request as it came, and the message in it.
struct CompressedRequest {
    compressed: Box<[u8]>,
    beginning: Bytes,
    /// The set at its end, as long as that is in the cache.
    known: Weak<CachedTaskSet>,
}

/// The compressed requests that ended in cached sets, by the checksums of their messages.
#[derive(Default)]
struct CompressedRequests {
    by_checksum: HashMap<u32, Arc<CompressedRequest>>,
    /// The memory of all, in bytes.
    total_bytes: usize,
}

impl CompressedRequests {
    /// The bound on the memory. If it is exceeded, all requests are dropped.
    const BYTES_MAX: usize = 32 << 20;
    /// The memory of a request besides its compressed bytes.
    const ENTRY_BYTES: usize = 2 * PREFIX_MAX;

    fn entry_bytes(compressed: &[u8]) -> usize {
        compressed.len() + Self::ENTRY_BYTES
    }

    /// Adds a request; returns what it replaces, to be freed without the lock.
    fn insert(&mut self, checksum: u32, request: CompressedRequest) -> impl Sized + use<> {
        let weight = Self::entry_bytes(&request.compressed);
        let all =
            if self.total_bytes + weight > Self::BYTES_MAX { std::mem::take(self) } else { Self::default() };
        let replaced = self.by_checksum.insert(checksum, Arc::new(request));
        self.total_bytes += weight;
        self.total_bytes -= replaced.as_ref().map_or(0, |old| Self::entry_bytes(&old.compressed));
        (all, replaced)
    }
}

/// The sets that were decoded last.
#[derive(Default)]
pub(super) struct TaskSetCache {
    /// The list is replaced, never changed, so that comparing needs no lock.
    known: Mutex<Arc<Vec<Arc<CachedTaskSet>>>>,
    compressed: Mutex<CompressedRequests>,
}

/// A range of bytes in a request that holds the set's field.
struct FieldRange {
    start: usize,
    end: usize,
}

impl TaskSetCache {
    /// Returns the empty set.
    pub(super) fn empty_set() -> TaskSet {
        TaskSet::new(Vec::new())
    }

    fn cached_sets(&self) -> Arc<Vec<Arc<CachedTaskSet>>> {
        Arc::clone(&self.known.lock().unwrap_or_else(PoisonError::into_inner))
    }

    fn lock_compressed_requests(&self) -> MutexGuard<'_, CompressedRequests> {
        self.compressed.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the message in a compressed request, `compressed` with its frame `gzip`. It is not inflated if it is known.
    pub(super) fn inflate_or_look_up(
        &self,
        compressed: &[u8],
        gzip: &GzipFile,
    ) -> Result<RequestMessage<'static>, Failure> {
        if gzip.length < CACHED_MIN_BYTES {
            return gzip.inflate().map(RequestMessage::new);
        }
        if let Some(message) = self.find_compressed_request(compressed, gzip.checksum) {
            return Ok(RequestMessage::Cached(message));
        }
        let message = gzip.inflate()?;
        let split = |known: &Arc<CachedTaskSet>| {
            let beginning = message.strip_suffix(&*known.raw).filter(|left| left.len() <= PREFIX_MAX)?;
            Some(MessageWithCachedSet {
                beginning: Bytes::copy_from_slice(beginning),
                known: Arc::clone(known),
            })
        };
        let Some(found) = self.cached_sets().iter().find_map(split) else {
            return Ok(RequestMessage::new(message));
        };
        self.insert_compressed_request(compressed, gzip.checksum, &found);
        Ok(RequestMessage::Cached(found))
    }

    fn find_compressed_request(&self, compressed: &[u8], checksum: u32) -> Option<MessageWithCachedSet> {
        let request = Arc::clone(self.lock_compressed_requests().by_checksum.get(&checksum)?);
        let known = request.known.upgrade().filter(|_| *request.compressed == *compressed)?;
        Some(MessageWithCachedSet { beginning: request.beginning.clone(), known })
    }

    fn insert_compressed_request(&self, compressed: &[u8], checksum: u32, message: &MessageWithCachedSet) {
        // Each task of the set asks with a file of about this length. If there is no room for all of them, each would
        // be dropped before it is wanted again.
        let crowd = message.known.set.ids().len().saturating_mul(CompressedRequests::entry_bytes(compressed));
        if crowd > CompressedRequests::BYTES_MAX {
            return;
        }
        let MessageWithCachedSet { beginning, known } = message;
        let request = CompressedRequest {
            compressed: compressed.into(),
            beginning: beginning.clone(),
            known: Arc::downgrade(known),
        };
        let gone = self.lock_compressed_requests().insert(checksum, request);
        drop(gone);
    }

    /// Extracts the set in field `field` from a request: returns the rest of the request, and the set if the
    /// field occurs. The rest is copied only if it is in several places.
    pub(super) fn extract_task_set<'m>(
        &self,
        message: &'m RequestMessage<'_>,
        field: u32,
        spelling: TaskSetEncoding,
    ) -> Result<(Cow<'m, [u8]>, Option<TaskSet>), Failure> {
        if let RequestMessage::Cached(MessageWithCachedSet { beginning, known }) = message
            && known.field == field
            && known.spelling == spelling
            && !contains_field_or_is_malformed(beginning, field)
        {
            return Ok((Cow::Borrowed(beginning), Some(known.set.clone())));
        }
        match message.contents() {
            Cow::Borrowed(request) => self.extract_task_set_from_bytes(request, field, spelling),
            Cow::Owned(request) => {
                let (rest, set) = self.extract_task_set_from_bytes(&request, field, spelling)?;
                Ok((Cow::Owned(rest.into_owned()), set))
            }
        }
    }

    fn extract_task_set_from_bytes<'r>(
        &self,
        request: &'r [u8],
        field: u32,
        spelling: TaskSetEncoding,
    ) -> Result<(Cow<'r, [u8]>, Option<TaskSet>), Failure> {
        let known = match request.len() {
            0..CACHED_MIN_BYTES => Arc::default(),
            _ => self.cached_sets(),
        };
        let mut lifted =
            TaskSetExtractor { request, field, spelling, ids: Vec::new(), set: None, region: None };
        let rest = lifted.extract_set_fields(&known).map_err(|error| decode_failure(&error))?;
        let TaskSetExtractor { ids, set, region, .. } = lifted;
        if let Some(set) = set {
            return Ok((rest, Some(set)));
        }
        if ids.is_empty() {
            return Ok((rest, None));
        }
        let set = TaskSet::new(ids.into_iter().map(TaskId).collect());
        if let Some(FieldRange { start, end }) = region
            && (CACHED_MIN_BYTES..=CACHED_MAX_BYTES).contains(&(end - start))
        {
            let raw = Bytes::copy_from_slice(request.get(start..end).unwrap_or_default());
            self.insert_set(CachedTaskSet { spelling, field, raw, set: set.clone() });
        }
        Ok((rest, Some(set)))
    }

    fn insert_set(&self, new: CachedTaskSet) {
        let mut known = self.known.lock().unwrap_or_else(PoisonError::into_inner);
        let others: Vec<_> =
            known.iter().filter(|k| k.raw != new.raw).take(CACHED_SETS - 1).cloned().collect();
        *known = Arc::new(std::iter::once(Arc::new(new)).chain(others).collect());
    }
}

/// Returns whether `field` occurs in `message`, or `message` is malformed.
fn contains_field_or_is_malformed(mut message: &[u8], field: u32) -> bool {
    while !message.is_empty() {
        let Ok((tag, wire_type)) = encoding::decode_key(&mut message) else { return true };
        let skipped = encoding::skip_field(wire_type, tag, &mut message, DecodeContext::default());
        if tag == field || skipped.is_err() {
            return true;
        }
    }
    false
}

struct TaskSetExtractor<'a> {
    request: &'a [u8],
    field: u32,
    spelling: TaskSetEncoding,
    /// The decoded ids, in the order of the request.
    ids: Vec<i32>,
    /// The set, if it was cached.
    set: Option<TaskSet>,
    /// The position of the field, as long as it is in one place.
    region: Option<FieldRange>,
}

/// The fields of a request besides the set.
enum OtherFields {
    /// They are the first bytes of the request.
    Prefix(usize),
    /// They are in several places.
    Copied(Vec<u8>),
}

impl OtherFields {
    /// Adds the bytes of `request` from `start` to `end`, which follow those that are here.
    fn add(&mut self, request: &[u8], start: usize, end: usize) {
        let bytes = |start: usize, end: usize| request.get(start..end).unwrap_or_default();
        match self {
            Self::Prefix(length) if *length == start => *length = end,
            Self::Prefix(length) => {
                let mut copied = Vec::with_capacity(*length + request.len() - start);
                copied.extend_from_slice(bytes(0, *length));
                copied.extend_from_slice(bytes(start, end));
                *self = Self::Copied(copied);
            }
            Self::Copied(copied) => copied.extend_from_slice(bytes(start, end)),
        }
    }

    fn of(self, request: &[u8]) -> Cow<'_, [u8]> {
        match self {
            Self::Prefix(length) => Cow::Borrowed(request.get(..length).unwrap_or_default()),
            Self::Copied(copied) => Cow::Owned(copied),
        }
    }
}

impl<'r> TaskSetExtractor<'r> {
    /// Processes the fields; returns all others.
    fn extract_set_fields(&mut self, known: &[Arc<CachedTaskSet>]) -> Result<Cow<'r, [u8]>, DecodeError> {
        let mut others = OtherFields::Prefix(0);
        let mut left = self.request;
        let mut scattered = false;
        while !left.is_empty() {
            let start = self.request.len() - left.len();
            let (tag, wire_type) = encoding::decode_key(&mut left)?;
            if tag != self.field {
                encoding::skip_field(wire_type, tag, &mut left, DecodeContext::default())?;
                let end = self.request.len() - left.len();
                others.add(self.request, start, end);
                continue;
            }
            let first = self.ids.is_empty() && self.set.is_none();
            if first && let Some(length) = self.match_cached_set_at(known, start) {
                left = self.request.get(start + length..).unwrap_or_default();
                continue;
            }
            // The cached set turns out to continue, so its ids are joined with those that follow.
            if let Some(set) = self.set.take() {
                self.ids.extend(set.ids().iter().map(|task| task.0));
                scattered = true;
            }
            self.read_set_field(wire_type, &mut left)?;
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
        Ok(others.of(self.request))
    }

    /// Returns the length of the cached set at `start`.
    fn match_cached_set_at(&mut self, known: &[Arc<CachedTaskSet>], start: usize) -> Option<usize> {
        let here = self.request.get(start..)?;
        let found = known.iter().find(|k| {
            k.spelling == self.spelling
                && k.field == self.field
                && here.strip_prefix(&*k.raw).is_some_and(|after| !self.set_field_follows(after))
        })?;
        self.set = Some(found.set.clone());
        Some(found.raw.len())
    }

    /// Returns whether more of the field follows, so that the bytes before were only a part of the set.
    fn set_field_follows(&self, mut after: &[u8]) -> bool {
        matches!(encoding::decode_key(&mut after), Ok((tag, _)) if tag == self.field)
    }

    fn read_set_field(&mut self, wire_type: WireType, left: &mut &[u8]) -> Result<(), DecodeError> {
        let context = DecodeContext::default();
        match self.spelling {
            TaskSetEncoding::Messages => {
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
            TaskSetEncoding::Numbers => {
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

    fn coordinated_tasks(ids: &[i32], named: bool) -> Vec<CoordinatedTask> {
        ids.iter().map(|&task_id| CoordinatedTask { named, task_id, recoverable: false }).collect()
    }

    fn task_ids_of_set(set: Option<TaskSet>) -> Vec<i32> {
        set.expect("a set").ids().iter().map(|task| task.0).collect()
    }

    fn cached_set_count(sets: &TaskSetCache) -> usize {
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
            let encoded = asked.encode_to_vec();
            let (rest, set) =
                sets.extract_task_set_from_bytes(&encoded, 3, TaskSetEncoding::Numbers).unwrap();
            let rest = xla::coordination::GetAliveTasksRequest::decode(&*rest).unwrap();
            assert_eq!(task_ids_of_set(set), (0..2000).collect::<Vec<_>>());
            assert_eq!(rest, xla::coordination::GetAliveTasksRequest { task_ids: vec![], ..asked });
            assert_eq!(cached_set_count(&sets), 1, "read once");
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
        let read = |asked: &xla::coordination::GetAliveTasksRequest| {
            let compressed = compress(&asked.encode_to_vec());
            let gzip = GzipFile::parse(&compressed).unwrap();
            let is_kept = sets.find_compressed_request(&compressed, gzip.checksum).is_some();
            let message = sets.inflate_or_look_up(&compressed, &gzip).unwrap();
            assert_eq!(message.bytes(), asked.encode_to_vec());
            (message, is_kept)
        };
        let (message, _) = read(&ask(0, &all));
        assert!(matches!(message, RequestMessage::Whole(_)), "nothing is known yet");
        sets.extract_task_set(&message, 3, TaskSetEncoding::Numbers).unwrap();
        for task in [0, 1, 127, 128, 1999] {
            let asked = ask(task, &all);
            let kept = [(); 3].map(|()| read(&asked).1);
            assert_eq!(kept, [false, true, true], "a request that came is kept");
            let (message, is_kept) = read(&asked);
            assert!(is_kept);
            let (rest, set) = sets.extract_task_set(&message, 3, TaskSetEncoding::Numbers).unwrap();
            let rest = xla::coordination::GetAliveTasksRequest::decode(&*rest).unwrap();
            assert_eq!((rest.requesting_task_id, rest.incarnations), (task, asked.incarnations));
            assert_eq!(task_ids_of_set(set), all);
            // The cache distinguishes the encodings of the same bytes.
            let (_, other) = sets.extract_task_set(&message, 4, TaskSetEncoding::Numbers).unwrap();
            assert!(other.is_none());
        }
        // A message that differs anywhere has another set.
        for place in [0, 1, 999, 1999] {
            let mut others = all.clone();
            others[place] ^= 1;
            assert!(matches!(read(&ask(3, &others)).0, RequestMessage::Whole(_)), "{place}");
        }
        assert!(matches!(read(&ask(3, &all[..1999])).0, RequestMessage::Whole(_)));
        // Eight other sets come: the first one is forgotten, and the requests that ended in it.
        for n in 1..=CACHED_SETS as i32 {
            let others = ask(0, &all[n as usize..]);
            sets.extract_task_set_from_bytes(&others.encode_to_vec(), 3, TaskSetEncoding::Numbers).unwrap();
        }
        assert!(!read(&ask(0, &all)).1);
    }

    #[test]
    fn kept_requests_have_a_bound() {
        let set = TaskSet::new(vec![TaskId(0)]);
        let raw = Bytes::from_static(&[0x18, 0]);
        let known = Arc::new(CachedTaskSet { spelling: TaskSetEncoding::Numbers, field: 3, raw, set });
        let sets = TaskSetCache::default();
        let message = MessageWithCachedSet { beginning: Bytes::new(), known };
        for number in 0..100 {
            sets.insert_compressed_request(&vec![0; 1 << 20], number % 40, &message);
            let requests = sets.compressed.lock().unwrap();
            let sum: usize = requests
                .by_checksum
                .values()
                .map(|kept| CompressedRequests::entry_bytes(&kept.compressed))
                .sum();
            assert!(
                requests.total_bytes == sum && sum <= CompressedRequests::BYTES_MAX && sum > 0,
                "{number}"
            );
        }
        let before = sets.compressed.lock().unwrap().total_bytes;
        sets.insert_compressed_request(&vec![0; CompressedRequests::BYTES_MAX], 1000, &message);
        assert_eq!(sets.compressed.lock().unwrap().total_bytes, before, "it is too long");
    }

    #[test]
    fn sets_that_begin_alike_are_told_apart() {
        let sets = TaskSetCache::default();
        for named in [true, false] {
            for n in [100, 200, 100, 150, 200] {
                let members: Vec<i32> = (0..n).collect();
                let asked = tensorflow::BarrierRequest {
                    barrier_id: "b".into(),
                    tasks: coordinated_tasks(&members, named),
                    source_task: Some(CoordinatedTask { named, task_id: 3, recoverable: false }),
                    counter: 9,
                    ..Default::default()
                };
                let encoded = asked.encode_to_vec();
                let (rest, set) =
                    sets.extract_task_set_from_bytes(&encoded, 3, TaskSetEncoding::Messages).unwrap();
                assert_eq!(task_ids_of_set(set), members);
                let rest = tensorflow::BarrierRequest::decode(&*rest).unwrap();
                assert_eq!(rest, tensorflow::BarrierRequest { tasks: vec![], ..asked });
            }
        }
        assert_eq!(cached_set_count(&sets), 6);
    }

    #[test]
    fn odd_spellings_are_read_and_bad_ones_refused() {
        let sets = TaskSetCache::default();
        let scattered = [0x18, 5, 0x10, 9, 0x1a, 2, 3, 4, 0x18, 1];
        let (rest, set) = sets.extract_task_set_from_bytes(&scattered, 3, TaskSetEncoding::Numbers).unwrap();
        assert_eq!(task_ids_of_set(set), [1, 3, 4, 5]);
        assert_eq!(*rest, [0x10, 9]);
        let (_, none) = sets.extract_task_set_from_bytes(&[0x10, 9], 3, TaskSetEncoding::Numbers).unwrap();
        assert!(none.is_none());
        for bad in [&[0x1a, 5, 1][..], &[0x1a], &[0x1b], &[0xff; 12], &[0x1d, 1, 2, 3, 4]] {
            for spelling in [TaskSetEncoding::Numbers, TaskSetEncoding::Messages] {
                assert!(sets.extract_task_set_from_bytes(bad, 3, spelling).is_err(), "{bad:?}");
            }
        }
    }

    #[test]
    fn a_known_set_that_goes_on_elsewhere_is_read_whole() {
        let sets = TaskSetCache::default();
        let mut packed = vec![0x1a, 0xac, 0x02];
        packed.extend((0..300_u32).map(|n| (n % 100) as u8));
        for _ in 0..2 {
            let (_, set) = sets.extract_task_set_from_bytes(&packed, 3, TaskSetEncoding::Numbers).unwrap();
            assert_eq!(task_ids_of_set(set).len(), 100);
        }
        packed.extend([0x10, 1, 0x18, 101]);
        let (rest, set) = sets.extract_task_set_from_bytes(&packed, 3, TaskSetEncoding::Numbers).unwrap();
        assert_eq!(task_ids_of_set(set).len(), 101);
        assert_eq!(*rest, [0x10, 1]);
    }
}
