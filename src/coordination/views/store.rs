//! The view of the store: the keys as a tree, and single values.
//!
//! A key `a` may have a value and be a directory at the same time. It is then listed twice, as `a` and as `a/`.
//! Begin at `KeyValueStore::list_entries`.

use std::ops::Bound;

use bytes::Bytes;

use crate::coordination::ids::{TaskId, Timestamp};
use crate::coordination::key_value_store::{KeyValueStore, normalise_key};

/// A key of the store, without its value.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct KeyEntry {
    /// The key, as it is stored; a directory ends with a slash.
    pub key: Bytes,
    /// The length of its value, in bytes; `None` for a directory.
    pub value_bytes: Option<usize>,
    /// The time of the last write.
    pub written_at: Option<Timestamp>,
    /// The task that wrote it last, where it is known.
    pub written_by: Option<TaskId>,
    /// The number of keys below the directory.
    pub keys_below: usize,
    /// The size of the values below the directory, in bytes.
    pub bytes_below: usize,
}

/// A value of the store.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StoredValue {
    /// The key, as it is stored.
    pub key: Bytes,
    /// The value.
    pub value: Bytes,
    /// The time of the last write.
    pub written_at: Timestamp,
    /// The task that wrote it last, where it is known.
    pub written_by: Option<TaskId>,
}

impl KeyValueStore {
    /// Returns the entries below a directory, in byte order, at most `limit` lines after the line `after`;
    /// the empty directory is the root. Directories end with a slash. With `whole_tree`, all keys with values
    /// are listed and no directories.
    pub fn list_entries(
        &self,
        directory: &[u8],
        after: &[u8],
        whole_tree: bool,
        limit: usize,
    ) -> Vec<KeyEntry> {
        let directory = normalise_key(directory);
        let prefix = if directory.is_empty() { Vec::new() } else { [directory.as_ref(), b"/"].concat() };
        let from = match after.strip_suffix(b"/") {
            _ if after < prefix.as_slice() => Bound::Included(prefix.clone()),
            // The end of a directory and everything below it: '0' is the byte after '/'.
            Some(seen) => Bound::Included([seen, b"0"].concat()),
            None => Bound::Excluded(after.to_vec()),
        };
        let mut lines: Vec<KeyEntry> = Vec::new();
        let mut from = from;
        while lines.len() < limit
            && let Some((key, entry)) = self.first_entry_from(&from)
            && let Some(rest) = key.strip_prefix(prefix.as_slice())
        {
            let end = rest.iter().position(|byte| *byte == b'/').filter(|_| !whole_tree);
            let shown = end.map_or(key.as_ref(), |end| &key[..=prefix.len() + end]);
            let value = end.is_none().then_some(entry);
            // Skips the whole directory without visiting the keys below it.
            let path = end.map(|end| &key[..prefix.len() + end]);
            let (keys_below, bytes_below) =
                path.map(|path| self.count_and_bytes_below(path)).unwrap_or_default();
            lines.push(KeyEntry {
                key: Bytes::copy_from_slice(shown),
                value_bytes: value.map(|entry| entry.value.len()),
                written_at: value.map(|entry| entry.at),
                written_by: value.and_then(|entry| entry.by),
                keys_below,
                bytes_below,
            });
            from = match path {
                Some(path) => Bound::Included([path, b"0"].concat()),
                None => Bound::Excluded(key.to_vec()),
            };
        }
        lines
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::coordination::settings::JobBounds;
    use crate::coordination::store_entry::StoreEntry;

    fn store_with_keys(keys: &[&str]) -> KeyValueStore {
        let mut store = KeyValueStore::default();
        for key in keys {
            let entry = StoreEntry::new(Bytes::from_static(b"vv"), Timestamp(0), None);
            store.insert(key.as_bytes(), entry, false, &JobBounds::default()).expect("a new key");
        }
        store
    }

    fn summaries_of_entries(lines: Vec<KeyEntry>) -> Vec<(String, Option<usize>, usize, usize)> {
        let text = |line: &KeyEntry| String::from_utf8_lossy(&line.key).into_owned();
        lines.iter().map(|line| (text(line), line.value_bytes, line.keys_below, line.bytes_below)).collect()
    }

    #[test]
    fn a_directory_shows_its_values_and_its_directories_with_their_sizes() {
        let store = store_with_keys(&["a", "a-b", "a/c", "a/d/e", "b/x"]);
        let root = summaries_of_entries(store.list_entries(b"", b"", false, 100));
        let line = |key: &str, value, keys, bytes| (key.to_owned(), value, keys, bytes);
        let all = [
            line("a", Some(2), 0, 0),
            line("a-b", Some(2), 0, 0),
            line("a/", None, 2, 4),
            line("b/", None, 1, 2),
        ];
        assert_eq!(root, all);
        let below = summaries_of_entries(store.list_entries(b"/a/", b"", false, 100));
        assert_eq!(below, [line("a/c", Some(2), 0, 0), line("a/d/", None, 1, 2)]);
        // Pages of any size give the same lines.
        for size in 1..=all.len() {
            let (mut after, mut paged) = (Vec::new(), Vec::new());
            loop {
                let lines = store.list_entries(b"", &after, false, size);
                let Some(last) = lines.last() else { break };
                after = last.key.to_vec();
                paged.extend(lines);
            }
            assert_eq!(summaries_of_entries(paged), all, "pages of {size}");
        }
    }

    #[test]
    fn the_whole_tree_has_every_value_and_no_directory() {
        let store = store_with_keys(&["a", "a/c", "a/d/e", "b/x"]);
        let keys = |after: &str| {
            let lines = store.list_entries(b"", after.as_bytes(), true, 2);
            summaries_of_entries(lines).into_iter().map(|line| line.0).collect::<Vec<_>>()
        };
        assert_eq!(keys(""), ["a", "a/c"]);
        assert_eq!(keys("a/c"), ["a/d/e", "b/x"]);
        assert!(store.list_entries(b"nothing", b"", true, 2).is_empty());
    }
}
