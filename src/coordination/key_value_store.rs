//! The key-value store of one run: its keys, its values, and the calls that wait for a key, each within bounds.
//!
//! `store_calls.rs` answers calls, and `views/store.rs` makes listings for people. Begin at
//! [`KeyValueStore::insert`].
//!
//! Keys are paths: leading, trailing and repeated slashes do not count. A key can hold a value and be a directory
//! at the same time. A key that has a value can be inserted again only if the call permits it, with one exception:
//! JAX's global topology, if the bytes are identical. Process 0 inserts this key again after a restart, and JAX
//! treats a refusal as fatal.

use std::borrow::Cow;
use std::collections::VecDeque;
use std::ops::Bound;

use bytes::Bytes;
use serde::{Deserialize, Serialize};

use super::deferred_free::DeferredFree;
use super::failure::{Code, Failure};
use super::ids::{CallId, TaskId, Timestamp};
use super::settings::JobBounds;
use super::store_entry::{DirectoryListing, StoreEntries, StoreEntry};
use super::topology::{DecodedTopology, TopologyKey, TopologyValue, TopologyValues};
use crate::cow::{CowMap, KeyPosition, Weight};

/// The number of bytes beyond the normalised form that the spelling of a waited key may have.
const EXTRA_SLASHES_MAX: usize = 64;

/// Returns the normalised form of a key, under which it is stored.
pub(super) fn normalise_key(key: &[u8]) -> Cow<'_, [u8]> {
    let clean =
        key.first() != Some(&b'/') && key.last() != Some(&b'/') && !key.windows(2).any(|pair| pair == b"//");
    if clean {
        return Cow::Borrowed(key);
    }
    let parts: Vec<&[u8]> = key.split(|&b| b == b'/').filter(|part| !part.is_empty()).collect();
    Cow::Owned(parts.join(&b'/'))
}

/// Returns a key as text for messages, cut to the length of a line.
pub(super) fn display_key(key: &[u8]) -> Cow<'_, str> {
    const MOST: usize = 256;
    if key.len() <= MOST {
        return String::from_utf8_lossy(key);
    }
    Cow::Owned(format!("{}… ({} bytes)", String::from_utf8_lossy(&key[..MOST]), key.len()))
}

/// Calls that waited for a key which now has a value, and are answered one after the other.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
struct WokenCalls {
    key: Bytes,
    value: Bytes,
    calls: CowMap<CallId, ()>,
}

#[derive(Debug, Default, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct KeyValueStore {
    entries: StoreEntries,
    /// The size of all keys and values, in bytes.
    bytes: usize,
    /// The calls that wait for each key, in the order of their arrival.
    waiting: CowMap<Bytes, CowMap<CallId, ()>>,
    woken: VecDeque<WokenCalls>,
    /// The lengths of the keys in `waiting` and `woken`, each counted once for every call that waits for it.
    waited_bytes: usize,
    topology: TopologyValues,
    /// Replaced whenever `topology` changes.
    #[serde(skip)]
    decoded_topology: DecodedTopology,
}

impl KeyValueStore {
    /// Returns a store with nothing but topology values, for views of an ended run.
    pub fn with_topology_only(topology: TopologyValues) -> Self {
        Self { topology, ..Self::default() }
    }

    pub fn len(&self) -> usize {
        self.entries.len()
    }

    pub fn total_bytes(&self) -> usize {
        self.bytes
    }

    pub fn get(&self, key: &[u8]) -> Option<&StoreEntry> {
        self.entries.get(normalise_key(key).as_ref())
    }

    /// Writes a value and queues the calls that wait for it ([`KeyValueStore::pop_woken_call`]).
    pub fn insert(
        &mut self,
        key: &[u8],
        entry: StoreEntry,
        overwrite: bool,
        bounds: &JobBounds,
    ) -> Result<DeferredFree, Failure> {
        let normal = normalise_key(key);
        let position = self.entries.position(normal.as_ref());
        let old = self.entries.entry_at(position).map(|(_, old)| old);
        if let Some(old) = old
            && self
                .topology
                .get(normal.as_ref())
                .is_some_and(|old| matches!(old.key, TopologyKey::Global { .. }))
            && old.value == entry.value
        {
            // A restarted process 0 gathers the topology again. Identical bytes prove that nothing changed;
            // an error would end the process.
            return Ok(DeferredFree::default());
        }
        if old.is_some() && !overwrite {
            // Without details: clients since 0.6.2 get this error so.
            let text = format!("key {} already exists.", display_key(key));
            return Err(Failure::without_details(Code::AlreadyExists, text));
        }
        self.check_bounds(&normal, old.map(|entry| entry.value.len()), entry.value.len(), bounds)?;
        Ok(self.write_entry(&normal, position, entry))
    }

    /// Reads what writes of these keys will search, so that the caches of the processor have it.
    pub fn prefetch(&self, keys: &[&Bytes]) {
        let keys: Vec<Cow<'_, [u8]>> = keys.iter().map(|key| normalise_key(key)).collect();
        self.entries.prefetch::<[u8], _>(&keys);
    }

    /// Adds to a decimal number (0 if there is none yet) and returns the sum.
    pub fn increment(
        &mut self,
        key: &[u8],
        by: i64,
        at: Timestamp,
        writer: Option<TaskId>,
        bounds: &JobBounds,
    ) -> Result<(Bytes, DeferredFree), Failure> {
        let normal = normalise_key(key);
        let position = self.entries.position(normal.as_ref());
        let old = self.entries.entry_at(position).map(|(_, old)| old);
        let present = match old {
            None => 0,
            Some(entry) => std::str::from_utf8(&entry.value)
                .ok()
                .and_then(|text| text.trim().parse::<i64>().ok())
                .ok_or_else(|| {
                    let text =
                        format!("Failed to parse value \"{}\" as an integer.", display_key(&entry.value));
                    Failure::from_service(Code::FailedPrecondition, text)
                })?,
        };
        let sum = present.checked_add(by).ok_or_else(|| {
            let text =
                format!("Adding {by} to key {} ({present}) passes the range of 64 bits.", display_key(key));
            Failure::from_service(Code::OutOfRange, text)
        })?;
        let value = Bytes::from(sum.to_string());
        self.check_bounds(&normal, old.map(|entry| entry.value.len()), value.len(), bounds)?;
        let discarded = self.write_entry(&normal, position, StoreEntry::new(value.clone(), at, writer));
        Ok((value, discarded))
    }

    /// Returns every entry strictly below a directory. The root has no name, so no call lists everything.
    pub fn list_below(&self, directory: &[u8]) -> DirectoryListing {
        let (from, to) = key_range_below(&normalise_key(directory));
        DirectoryListing(self.entries.copy_range(from.as_slice(), to.as_slice()))
    }

    /// Removes a key and everything below it; returns the memory to free.
    pub fn delete_subtree(&mut self, key: &[u8]) -> DeferredFree {
        let normal = normalise_key(key);
        let (from, to) = key_range_below(&normal);
        let mut gone = self.entries.remove_range(from.as_slice(), to.as_slice());
        let removed = self.topology.remove_range(from.as_slice(), to.as_slice());
        let is_changed = !removed.is_empty() || self.topology.contains_key(normal.as_ref());
        if is_changed {
            self.decoded_topology = DecodedTopology::default();
        }
        if let Some((key, _)) = self.entries.get_key_value(normal.as_ref()) {
            let key = key.clone();
            self.topology.remove(&key);
            if let Some(entry) = self.entries.remove(&key) {
                gone.insert(key, entry);
            }
        }
        let Weight { keys, values } = gone.weight();
        self.bytes -= keys + values;
        if gone.is_empty() { DeferredFree::default() } else { DeferredFree::of_table(gone) }
    }

    /// Returns the number of entries below a directory, and the bytes of their values.
    pub fn count_and_bytes_below(&self, directory: &[u8]) -> (usize, usize) {
        let (from, to) = key_range_below(directory);
        let all = self.entries.copy_range(from.as_slice(), to.as_slice());
        (all.len(), all.weight().values)
    }

    /// Adds a call to the queue of a key; returns the key as stored.
    ///
    /// Every waiting call counts with its key, because its caller's spelling is kept for the answer.
    ///
    /// # Errors
    /// If the key is longer than its bound, or all waited keys together would exceed theirs.
    pub fn add_waiter(&mut self, key: &[u8], call: CallId, bounds: &JobBounds) -> Result<Bytes, Failure> {
        let normal = normalise_key(key);
        if key.len() > bounds.key_bytes || key.len() > normal.len() + EXTRA_SLASHES_MAX {
            return refuse_write_beyond_bound(
                "key as it is spelled",
                key.len(),
                bounds.key_bytes,
                "bounds.key-bytes",
            );
        }
        let waited = self.waited_bytes + normal.len();
        if waited > bounds.waited_key_bytes {
            return refuse_write_beyond_bound(
                "keys that are waited for",
                waited,
                bounds.waited_key_bytes,
                "bounds.waited-key-bytes",
            );
        }
        self.waited_bytes = waited;
        if let Some((key, _)) = self.waiting.get_key_value(normal.as_ref()) {
            let key = key.clone();
            if let Some(calls) = self.waiting.get_mut(&key) {
                calls.insert(call, ());
            }
            return Ok(key);
        }
        let key = Bytes::copy_from_slice(&normal);
        self.waiting.insert(key.clone(), std::iter::once((call, ())).collect());
        Ok(key)
    }

    /// Removes a call from the queue of a key.
    pub fn remove_waiter(&mut self, key: &Bytes, call: CallId) {
        if let Some(calls) = self.waiting.get_mut(key)
            && calls.remove(&call).is_some()
        {
            self.waited_bytes -= key.len();
            if calls.is_empty() {
                self.waiting.remove(key);
            }
            return;
        }
        let mut waking = self.woken.iter_mut().filter(|waking| waking.key == *key);
        if waking.any(|waking| waking.calls.remove(&call).is_some()) {
            self.waited_bytes -= key.len();
            self.woken.retain(|waking| !waking.calls.is_empty());
        }
    }

    /// Returns whether calls are queued for an answer.
    pub fn has_woken_calls(&self) -> bool {
        !self.woken.is_empty()
    }

    /// Removes and returns the next woken call with its answer: the value that ended its wait.
    pub fn pop_woken_call(&mut self) -> Option<(CallId, Bytes)> {
        let waking = self.woken.front_mut()?;
        let (call, ()) = waking.calls.pop_first()?;
        let value = waking.value.clone();
        self.waited_bytes -= waking.key.len();
        if waking.calls.is_empty() {
            self.woken.pop_front();
        }
        Some((call, value))
    }

    /// Returns the place of what the topology values describe.
    pub fn decoded_topology(&self) -> &DecodedTopology {
        &self.decoded_topology
    }

    /// Returns the topology values.
    pub fn topology_values(&self) -> &TopologyValues {
        &self.topology
    }

    /// Returns every call that waits for a key, or waited for it and is not answered yet.
    pub fn waiting_calls(&self) -> impl Iterator<Item = (&Bytes, CallId)> {
        let woken = self.woken.iter().map(|waking| (&waking.key, &waking.calls));
        self.waiting.iter().chain(woken).flat_map(|(key, calls)| calls.keys().map(move |call| (key, *call)))
    }

    /// Returns whether the tables are consistent.
    pub fn is_consistent(&self) -> bool {
        self.entries.is_consistent()
            && self.waiting.is_consistent()
            && self.waiting.values().all(|calls| !calls.is_empty())
    }

    /// Returns every key that calls wait for.
    pub fn waited_keys(&self) -> impl Iterator<Item = &Bytes> {
        self.waiting.keys()
    }

    /// Returns the counted size of the waited keys, in bytes.
    pub fn waited_key_bytes(&self) -> usize {
        self.waited_bytes
    }

    /// Returns the lengths of every key and its value.
    pub fn key_and_value_lengths(&self) -> impl Iterator<Item = (usize, usize)> {
        self.entries.iter().map(|(key, entry)| (key.len(), entry.value.len()))
    }

    /// Writes an entry whose key has this position in the table.
    fn write_entry(&mut self, key: &[u8], position: KeyPosition, entry: StoreEntry) -> DeferredFree {
        if let Some((key, _)) = self.waiting.get_key_value(key) {
            let key = key.clone();
            let calls = self.waiting.remove(&key).unwrap_or_default();
            self.woken.push_back(WokenCalls { key, value: entry.value.clone(), calls });
        }
        self.bytes += entry.value.len();
        if let Some(topology) = self.topology.get_mut(key) {
            (topology.value, topology.written_at) = (entry.value.clone(), entry.at);
            self.decoded_topology = DecodedTopology::default();
        }
        if let Some((key, old)) = self.entries.entry_at(position) {
            let key = key.clone();
            self.bytes -= old.value.len();
            let old = self.entries.insert_at(position, key, entry);
            return old.map_or_else(DeferredFree::default, |old| DeferredFree::of_bytes(old.value));
        }
        let key = Bytes::copy_from_slice(key);
        self.bytes += key.len();
        if let Some(what) = TopologyKey::parse(&key) {
            let (value, written_at) = (entry.value.clone(), entry.at);
            self.topology.insert(key.clone(), TopologyValue { key: what, value, written_at });
            self.decoded_topology = DecodedTopology::default();
        }
        self.entries.insert_at(position, key, entry);
        DeferredFree::default()
    }

    /// Returns the first entry from `from` on.
    pub fn first_entry_from(&self, from: &Bound<Vec<u8>>) -> Option<(&Bytes, &StoreEntry)> {
        let from = from.as_ref().map(Vec::as_slice);
        self.entries.range_from::<[u8]>(from).next()
    }

    fn check_bounds(
        &self,
        key: &[u8],
        old: Option<usize>,
        new: usize,
        bounds: &JobBounds,
    ) -> Result<(), Failure> {
        if key.len() > bounds.key_bytes {
            return refuse_write_beyond_bound("key", key.len(), bounds.key_bytes, "bounds.key-bytes");
        }
        if new > bounds.value_bytes {
            return refuse_write_beyond_bound("value", new, bounds.value_bytes, "bounds.value-bytes");
        }
        let total = self.bytes + new + old.map_or(key.len(), |_| 0) - old.unwrap_or(0);
        if total > bounds.store_bytes {
            return refuse_write_beyond_bound(
                "key-value store",
                total,
                bounds.store_bytes,
                "bounds.store-bytes",
            );
        }
        if old.is_none() && self.entries.len() >= bounds.keys {
            let text = format!("The run has {} keys, the most allowed (setting bounds.keys).", bounds.keys);
            return Err(Failure::from_service(Code::ResourceExhausted, text));
        }
        Ok(())
    }
}

/// Returns the refusal of a write that would exceed a bound in bytes.
fn refuse_write_beyond_bound<T>(what: &str, is: usize, bound: usize, setting: &str) -> Result<T, Failure> {
    let text =
        format!("The {what} would have {is} bytes; at most {bound} are allowed here (setting {setting}).");
    Err(Failure::from_service(Code::ResourceExhausted, text))
}

/// Returns the bounds between which all keys below a directory lie: '0' is the byte after '/'.
fn key_range_below(directory: &[u8]) -> (Vec<u8>, Vec<u8>) {
    ([directory, b"/"].concat(), [directory, b"0"].concat())
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;

    fn store_with_keys(keys: &[&str]) -> KeyValueStore {
        let mut store = KeyValueStore::default();
        for key in keys {
            let entry = StoreEntry::new(Bytes::from_static(b"v"), Timestamp(0), None);
            store.insert(key.as_bytes(), entry, false, &JobBounds::default()).expect("a new key");
        }
        store
    }

    #[test]
    fn slashes_at_the_ends_and_repeated_ones_do_not_count() {
        for (raw, normal) in [("///a//b/c//", "a/b/c"), ("", ""), ("/", ""), ("a", "a"), ("a/b", "a/b")] {
            assert_eq!(normalise_key(raw.as_bytes()).as_ref(), normal.as_bytes());
        }
    }

    #[test]
    fn a_directory_lists_its_strict_descendants_in_byte_order_and_the_root_lists_nothing() {
        let store = store_with_keys(&["d/b", "d", "d/a/x", "da", "e"]);
        let listed = store.list_below(b"/d/");
        let keys: Vec<&Bytes> = listed.iter().map(|(key, _)| key).collect();
        assert_eq!(keys, ["d/a/x", "d/b"]);
        assert!(store.list_below(b"").is_empty() && store.list_below(b"/").is_empty());
    }

    #[test]
    fn deleting_a_key_takes_everything_below_it_and_nothing_beside_it() {
        let mut store = store_with_keys(&["d/b", "d", "d/a/x", "da"]);
        assert!(!store.delete_subtree(b"d/").is_empty());
        assert!(store.delete_subtree(b"d/").is_empty(), "there is nothing left");
        assert_eq!(store.len(), 1);
        assert_eq!(store.total_bytes(), "da".len() + 1);
        assert!(store.get(b"da").is_some());
    }

    #[test]
    fn only_a_gathered_topology_may_be_written_again_and_only_the_same() {
        let mut store = store_with_keys(&["cpu:global_topology/cpu", "cpu:local_topology/cpu/0", "k"]);
        let mut again = |key: &str, value: &'static str| {
            let entry = StoreEntry::new(Bytes::from_static(value.as_bytes()), Timestamp(1), None);
            store.insert(key.as_bytes(), entry, false, &JobBounds::default()).map_err(|failure| failure.code)
        };
        assert_eq!(again("cpu:global_topology/cpu", "v"), Ok(DeferredFree::default()));
        let refused = Err(Code::AlreadyExists);
        assert_eq!(again("cpu:global_topology/cpu", "other"), refused);
        assert_eq!(again("cpu:local_topology/cpu/0", "v"), refused, "clients count on this error");
        assert_eq!(again("k", "v"), refused);
    }

    #[test]
    fn devices_are_decoded_again_when_a_topology_value_changes_and_else_once() {
        let mut store = store_with_keys(&["cpu:global_topology/cpu", "cpu:local_topology/cpu/0", "k"]);
        // Decodes nothing: what matters is whether it is asked to.
        let is_decoded_again = |store: &KeyValueStore| {
            let mut asked = false;
            store.decoded_topology().devices.get_or_compute(|| {
                asked = true;
                Arc::default()
            });
            asked
        };
        assert!(is_decoded_again(&store) && !is_decoded_again(&store));
        let copy = store.clone();
        assert!(!is_decoded_again(&copy), "copies share the devices");
        let mut write = |key: &str, value: &'static str| {
            let entry = StoreEntry::new(Bytes::from_static(value.as_bytes()), Timestamp(1), None);
            store.insert(key.as_bytes(), entry, true, &JobBounds::default()).expect("there is room");
            is_decoded_again(&store)
        };
        assert!(!write("k", "w") && !write("other", "w"), "other keys have no devices");
        assert!(write("cpu:global_topology/cpu", "w") && write("cuda:local_topology/cuda/1", "w"));
        for (key, is_topology) in
            [("k", false), ("cuda:local_topology/cuda/1", true), ("cpu:local_topology", true)]
        {
            drop(store.delete_subtree(key.as_bytes()));
            assert_eq!(is_decoded_again(&store), is_topology, "{key}");
        }
        assert!(!is_decoded_again(&copy), "the copy has its own values");
    }

    #[test]
    fn increment_parses_decimal_text_and_refuses_other_values() {
        let mut store = store_with_keys(&["word"]);
        let bounds = JobBounds::default();
        let mut add =
            |key: &[u8], by| store.increment(key, by, Timestamp(0), None, &bounds).map(|(sum, _)| sum);
        assert_eq!(add(b"n", 5).expect("a number"), "5");
        assert_eq!(add(b"n", -7).expect("a number"), "-2");
        assert_eq!(add(b"n", i64::MIN).expect_err("out of range").code, Code::OutOfRange);
        assert_eq!(add(b"word", 1).expect_err("no number").code, Code::FailedPrecondition);
    }
}
