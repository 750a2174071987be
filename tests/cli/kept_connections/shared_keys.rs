//! Keys that clients of both generations use at once, with the history of each. Begin at [`SharedKeys::choose`].

use std::sync::atomic::{AtomicI64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};

use bytes::Bytes;
use tonic::Code;

use super::linearizability::{HistoryError, KeyHistory, KeyOperation, KeyResult};
use super::random_length;

/// The keys in use at once.
const KEYS: usize = 8;
/// The operations on a key after which another one takes its place.
const OPERATIONS_MAX: usize = 200;
/// The writes without a return after which another key takes the place of one. Each may double the search of the check.
const LOST_WRITES_MAX: usize = 5;
/// The difference of the numbers that clients insert: no sum is another inserted number.
const NUMBER_STEP: i64 = 1_000_000;

/// Returns the value of an inserted number: decimal, with spaces behind it up to a random length.
pub fn encode_number(number: i64) -> Bytes {
    let mut value = number.to_string().into_bytes();
    let length = random_length(&mut fastrand::Rng::with_seed(number.unsigned_abs()));
    value.resize(length.max(value.len()), b' ');
    value.into()
}

/// Returns the number of a value, which must be complete.
fn decode_number(value: &[u8]) -> i64 {
    let text = std::str::from_utf8(value).expect("all values are text");
    let number = text.trim_end().parse().unwrap_or_else(|_| panic!("the value of a key is {text:?}"));
    let expected = if number % NUMBER_STEP == 0 { encode_number(number) } else { number.to_string().into() };
    assert!(*value == expected, "the {} bytes of {number} are not the inserted ones", value.len());
    number
}

/// A key with its history.
pub struct SharedKey {
    pub name: String,
    history: Mutex<KeyHistory>,
    lost_writes: AtomicUsize,
}

/// An operation that has no result yet. If it is dropped without one, it never returned.
pub struct OpenOperation {
    pub key: Arc<SharedKey>,
    pub operation: KeyOperation,
    number: usize,
    has_returned: bool,
}

impl SharedKey {
    fn new(number: usize) -> Arc<Self> {
        let name = format!("shared/{number}");
        Arc::new(Self { name, history: Mutex::default(), lost_writes: AtomicUsize::new(0) })
    }

    fn history(&self) -> MutexGuard<'_, KeyHistory> {
        self.history.lock().expect("no holder panics")
    }

    /// Records that a client is about to call.
    pub fn begin(self: &Arc<Self>, client: &str, operation: KeyOperation) -> OpenOperation {
        let number = self.history().record_call(client, operation);
        OpenOperation { key: Arc::clone(self), operation, number, has_returned: false }
    }

    fn is_used_up(&self) -> bool {
        self.history().len() >= OPERATIONS_MAX || self.lost_writes.load(Ordering::Relaxed) >= LOST_WRITES_MAX
    }

    /// Checks the history. Returns its operations, and the work of the check.
    fn check(&self) -> (usize, usize) {
        let history = self.history();
        match history.check() {
            Ok(visited) => (history.len(), visited),
            Err(HistoryError::Contradiction(why)) => {
                panic!("the operations on key {:?} are not linearisable: {why}", self.name)
            }
            Err(HistoryError::Undecided(why)) => {
                panic!("the check of key {:?} is too long: {why}", self.name)
            }
        }
    }
}

impl OpenOperation {
    /// Records the value, or the gRPC status, of the answer.
    pub fn complete(mut self, outcome: Result<&[u8], Code>) {
        let is_without_value = matches!(self.operation, KeyOperation::Insert { .. } | KeyOperation::Delete);
        let result = match outcome {
            Ok(value) if is_without_value && value.is_empty() => KeyResult::Done,
            Ok(value) => KeyResult::Number(decode_number(value)),
            Err(Code::AlreadyExists) => KeyResult::AlreadyExists,
            Err(Code::NotFound) => KeyResult::NotFound,
            Err(code) => panic!("{:?} of key {:?} failed: {code:?}", self.operation, self.key.name),
        };
        self.key.history().record_return(self.number, result);
        self.has_returned = true;
    }
}

impl Drop for OpenOperation {
    fn drop(&mut self) {
        if !self.has_returned && self.operation.is_write() {
            self.key.lost_writes.fetch_add(1, Ordering::Relaxed);
        }
    }
}

/// The keys that are in use now, and those that are not checked yet.
pub struct SharedKeys {
    used: Mutex<Vec<Arc<SharedKey>>>,
    retired: Mutex<Vec<Arc<SharedKey>>>,
    next_key: AtomicUsize,
    next_number: AtomicI64,
    /// The operations in checked histories, and the work of the longest check.
    checked: AtomicUsize,
    longest: AtomicUsize,
}

impl SharedKeys {
    pub fn new() -> Self {
        Self {
            used: Mutex::new((0..KEYS).map(SharedKey::new).collect()),
            retired: Mutex::default(),
            next_key: AtomicUsize::new(KEYS),
            next_number: AtomicI64::new(NUMBER_STEP),
            checked: AtomicUsize::new(0),
            longest: AtomicUsize::new(0),
        }
    }

    /// Chooses a key and an operation on it.
    pub fn choose(&self, rng: &mut fastrand::Rng) -> (Arc<SharedKey>, KeyOperation) {
        let mut used = self.used.lock().expect("no holder panics");
        let place = &mut used[rng.usize(0..KEYS)];
        if place.is_used_up() {
            let next = SharedKey::new(self.next_key.fetch_add(1, Ordering::Relaxed));
            let retired = std::mem::replace(place, next);
            self.retired.lock().expect("no holder panics").push(retired);
        }
        let insert = |overwrites| {
            let number = self.next_number.fetch_add(NUMBER_STEP, Ordering::Relaxed);
            KeyOperation::Insert { number, overwrites }
        };
        let operation = match rng.u8(0..20) {
            0..3 => insert(false),
            3..6 => insert(true),
            6..13 => KeyOperation::TryGet,
            13..15 => KeyOperation::Get,
            15..18 => KeyOperation::Increment,
            _ => KeyOperation::Delete,
        };
        (Arc::clone(place), operation)
    }

    /// Checks the histories of keys that are used no more, and returns their names.
    pub fn check_retired(&self) -> Vec<String> {
        let mut retired = self.retired.lock().expect("no holder panics");
        // The others have operations in progress.
        let ended: Vec<_> = retired.extract_if(.., |key| Arc::strong_count(key) == 1).collect();
        drop(retired);
        ended
            .into_iter()
            .map(|key| {
                let (operations, visited) = key.check();
                self.checked.fetch_add(operations, Ordering::Relaxed);
                self.longest.fetch_max(visited, Ordering::Relaxed);
                key.name.clone()
            })
            .collect()
    }

    /// Checks the histories that are left, once no client makes calls and all keys are retired.
    pub fn check_rest(&self) {
        self.check_retired();
        let unchecked = self.retired.lock().expect("no holder panics").len();
        assert_eq!(unchecked, 0, "operations on so many keys are still in progress");
    }

    /// Retires all keys, and returns them.
    pub fn retire_all(&self) -> Vec<Arc<SharedKey>> {
        let mut used = std::mem::take(&mut *self.used.lock().expect("no holder panics"));
        let mut retired = self.retired.lock().expect("no holder panics");
        retired.append(&mut used);
        retired.clone()
    }

    /// Describes the work of all checks.
    pub fn describe_checks(&self) -> String {
        let [checked, longest] = [&self.checked, &self.longest].map(|count| count.load(Ordering::Relaxed));
        let keys = self.next_key.load(Ordering::Relaxed);
        format!(
            "{checked} operations on {keys} shared keys are linearisable; the longest check visited {longest} configurations"
        )
    }
}
