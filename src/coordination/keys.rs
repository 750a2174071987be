//! The store as people browse it: one level of a tree at a time.

use std::fmt;
use std::ops::Bound;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

use super::coordinator::Coordinator;
use super::ids::{JobId, TaskId, Timestamp};
use super::store::{Entry, Store, normalise};

/// How many nodes a page holds at most.
pub const KEYS_PAGE_MAX: usize = 1000;
/// How many keys a page may look at to count what lies below its directories.
const COUNTED: usize = 20_000;

/// One level of the store, or a part of it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct KeysPage {
    /// The directory whose level this is; empty for the whole store.
    pub prefix: String,
    /// What is in it, in byte order.
    pub nodes: Vec<KeyNode>,
    /// What to give as `after` for the nodes that follow; `None` if there are none.
    pub next: Option<KeysCursor>,
}

/// One thing on a level of the store. A path may be a key and a directory at once; it is two nodes then.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", tag = "node")]
pub enum KeyNode {
    /// A key with a value.
    Key {
        /// Its whole path; bytes that are no UTF-8 are shown as U+FFFD.
        key: String,
        /// The last part of it.
        name: String,
        /// The length of its value, in bytes.
        bytes: usize,
        /// When it was written last.
        at: Timestamp,
        /// Who wrote it last, where the connection told.
        by: Option<TaskId>,
        /// How often it was written again since it came into being.
        overwrites: u64,
    },
    /// Keys that have a path in common.
    Directory {
        /// The path, which is the `prefix` of the level below.
        key: String,
        /// The last part of it.
        name: String,
        /// How many keys lie below.
        keys: usize,
        /// How many bytes their values have.
        bytes: usize,
        /// There are more than were counted.
        more: bool,
    },
}

/// A place on a level of the store: pages follow one another by it. Its text is hexadecimal.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct KeysCursor(Vec<u8>);

impl fmt::Display for KeysCursor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

/// A text that is no [`KeysCursor`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("it is no place in the store: give what the page before said is next")]
pub struct NotACursor;

impl FromStr for KeysCursor {
    type Err = NotACursor;

    fn from_str(text: &str) -> Result<Self, NotACursor> {
        let digits = text.as_bytes();
        let byte = |pair: &[u8]| {
            let pair = std::str::from_utf8(pair).ok().filter(|pair| pair.len() == 2)?;
            u8::from_str_radix(pair, 16).ok()
        };
        digits.chunks(2).map(byte).collect::<Option<Vec<u8>>>().map(Self).ok_or(NotACursor)
    }
}

impl TryFrom<String> for KeysCursor {
    type Error = NotACursor;

    fn try_from(text: String) -> Result<Self, NotACursor> {
        text.parse()
    }
}

impl From<KeysCursor> for String {
    fn from(cursor: KeysCursor) -> Self {
        cursor.to_string()
    }
}

impl Coordinator {
    /// One level of the store of a job's present run: what lies directly below `prefix` (`""` for the whole store), after
    /// the place `after`, `limit` nodes at most. `None` if there is no such job.
    #[must_use]
    pub fn keys(
        &self,
        job: JobId,
        prefix: &str,
        after: Option<&KeysCursor>,
        limit: usize,
    ) -> Option<KeysPage> {
        let limit = limit.clamp(1, KEYS_PAGE_MAX);
        self.job_of(job).map(|job| job.run.store.level(prefix, after, limit))
    }
}

impl Store {
    fn level(&self, prefix: &str, after: Option<&KeysCursor>, limit: usize) -> KeysPage {
        let directory = normalise(prefix.as_bytes());
        let shown = String::from_utf8_lossy(&directory).into_owned();
        let base: Vec<u8> = if directory.is_empty() { Vec::new() } else { [&directory[..], b"/"].concat() };
        let mut from = match after {
            // A place outside of the level would lead outside.
            Some(KeysCursor(place)) if place.starts_with(&base) => behind(place),
            _ => Bound::Included(base.clone()),
        };
        let mut page = KeysPage { prefix: shown, nodes: Vec::new(), next: None };
        let mut budget = COUNTED;
        let mut last = Vec::new();
        while let Some((key, entry)) = self.first_from(&from).filter(|(key, _)| key.starts_with(&base)) {
            if page.nodes.len() == limit {
                page.next = Some(KeysCursor(last));
                break;
            }
            let rest = &key[base.len()..];
            let (node, place) = match rest.iter().position(|byte| *byte == b'/') {
                None => (leaf(key, rest, entry), key.to_vec()),
                Some(slash) => {
                    let place = key[..=base.len() + slash].to_vec();
                    (self.directory(&place, &rest[..slash], &mut budget), place)
                }
            };
            page.nodes.push(node);
            from = behind(&place);
            last = place;
        }
        page
    }

    fn directory(&self, place: &[u8], name: &[u8], budget: &mut usize) -> KeyNode {
        let (mut keys, mut bytes, mut more) = (0, 0, false);
        for (_, entry) in self.below(place) {
            if *budget == 0 {
                more = true;
                break;
            }
            *budget -= 1;
            keys += 1;
            bytes += entry.value.len();
        }
        let key = String::from_utf8_lossy(&place[..place.len() - 1]).into_owned();
        KeyNode::Directory { key, name: String::from_utf8_lossy(name).into_owned(), keys, bytes, more }
    }
}

fn leaf(key: &[u8], name: &[u8], entry: &Entry) -> KeyNode {
    KeyNode::Key {
        key: String::from_utf8_lossy(key).into_owned(),
        name: String::from_utf8_lossy(name).into_owned(),
        bytes: entry.value.len(),
        at: entry.at,
        by: entry.by,
        overwrites: entry.overwrites,
    }
}

/// Where the level goes on behind a node: for a directory, which ends with a slash, behind everything below it.
fn behind(place: &[u8]) -> Bound<Vec<u8>> {
    match place.split_last() {
        Some((b'/', path)) => Bound::Included([path, b"0"].concat()),
        _ => Bound::Excluded(place.to_vec()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::coordination::settings::Bounds;
    use bytes::Bytes;

    fn store(keys: &[&str]) -> Store {
        let mut store = Store::default();
        for key in keys {
            let entry = Entry::new(Bytes::from_static(b"vv"), Timestamp(1), Some(TaskId(3)));
            store.insert(key.as_bytes(), entry, true, &Bounds::default()).expect("there is room");
        }
        store
    }

    fn names(page: &KeysPage) -> Vec<String> {
        let name = |node: &KeyNode| match node {
            KeyNode::Key { name, .. } => name.clone(),
            KeyNode::Directory { name, keys, .. } => format!("{name}/ {keys}"),
        };
        page.nodes.iter().map(name).collect()
    }

    #[test]
    fn a_level_shows_keys_and_directories_once() {
        let store = store(&["a", "a/x", "a/y/z", "a-b", "b/c", "a0"]);
        assert_eq!(names(&store.level("", None, 10)), ["a", "a-b", "a/ 2", "a0", "b/ 1"]);
        assert_eq!(names(&store.level("/a/", None, 10)), ["x", "y/ 1"]);
        assert_eq!(names(&store.level("none", None, 10)), Vec::<String>::new());
    }

    #[test]
    fn pages_of_any_size_make_the_same_level() {
        let store = store(&["a", "a/x", "a/y/z", "a-b", "b/c", "a0", "c"]);
        let whole = names(&store.level("", None, 10));
        for size in 1..=whole.len() {
            let (mut all, mut after) = (Vec::new(), None);
            loop {
                let page = store.level("", after.as_ref(), size);
                all.extend(names(&page));
                let Some(next) = page.next else { break };
                after = Some(next.to_string().parse().expect("a cursor reads back"));
            }
            assert_eq!(all, whole, "pages of {size}");
        }
    }

    #[test]
    fn writing_again_is_counted_and_cursors_of_elsewhere_lead_nowhere_else() {
        let store = store(&["a/k", "a/k", "a/k", "b"]);
        let page = store.level("a", Some(&KeysCursor(b"b".to_vec())), 10);
        assert!(
            matches!(page.nodes[..], [KeyNode::Key { overwrites: 2, bytes: 2, by: Some(TaskId(3)), .. }]),
            "{page:?}"
        );
        assert!("0g".parse::<KeysCursor>().is_err() && "abc".parse::<KeysCursor>().is_err());
    }
}
