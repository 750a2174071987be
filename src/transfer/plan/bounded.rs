//! Reads lists of bounded length from untrusted text, and checks names. Reading stops with an error at the bound, so
//! a text cannot make the reader keep a longer list.
//!
//! `limits.rs` has the bounds. Begin at [`deserialize_at_most`].

use std::fmt;
use std::marker::PhantomData;

use serde::de::{Error as _, SeqAccess, Visitor};
use serde::{Deserialize, Deserializer};

use super::error::PlanError;
use super::limits::MAX_NAME;

/// Reads a list of at most `N` entries; fails at the first one beyond.
pub(super) fn deserialize_at_most<'de, D, T, const N: usize>(deserializer: D) -> Result<Vec<T>, D::Error>
where
    D: Deserializer<'de>,
    T: Deserialize<'de>,
{
    deserializer.deserialize_seq(AtMostVisitor::<T, N>(PhantomData))
}

struct AtMostVisitor<T, const N: usize>(PhantomData<T>);

impl<'de, T: Deserialize<'de>, const N: usize> Visitor<'de> for AtMostVisitor<T, N> {
    type Value = Vec<T>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "a list of at most {N}")
    }

    fn visit_seq<A: SeqAccess<'de>>(self, list: A) -> Result<Vec<T>, A::Error> {
        collect_bounded_list(list, N)
    }
}

/// Collects the rest of a list that may have `limit` entries.
pub(super) fn collect_bounded_list<'de, A: SeqAccess<'de>, T: Deserialize<'de>>(
    mut list: A,
    limit: usize,
) -> Result<Vec<T>, A::Error> {
    let mut found = Vec::new();
    while let Some(next) = list.next_element()? {
        if found.len() == limit {
            return Err(A::Error::custom(format_args!(
                "a list has more than {limit} entries, the most that are taken"
            )));
        }
        found.push(next);
    }
    Ok(found)
}

/// Refuses names that are empty, too long, or contain control characters.
pub(super) fn check_name(what: &'static str, index: usize, name: &str) -> Result<(), PlanError> {
    if name.is_empty() || name.len() > MAX_NAME || name.contains(char::is_control) {
        return Err(PlanError::Name { what, index });
    }
    Ok(())
}
