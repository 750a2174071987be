//! Divides long lists into pages by the query parameters `after` and `limit`.
//!
//! [`page_query`] defines these parameters for a list, and [`paginate`] returns the selected page. Begin at
//! [`paginate`].

use serde::de::{Deserialize, Deserializer, Error as _};

/// The maximum and the default number of items on a page.
pub(super) const PAGE_LIMIT: usize = 1000;

/// Returns the number of items on a page, given the requested one.
pub(super) fn page_limit(asked: Option<usize>) -> usize {
    asked.unwrap_or(PAGE_LIMIT).clamp(1, PAGE_LIMIT)
}

/// Defines the query parameters of a list that comes in pages: its filters, then `after` and `limit`. It is a macro
/// because unknown parameters are refused, which excludes a flattened struct of these two.
macro_rules! page_query {
    (
        $(#[$about:meta])*
        $name:ident { $($filters:tt)* }
        $(#[$about_after:meta])*
        after: $key:ty,
        $(#[$about_limit:meta])*
        limit
    ) => {
        $(#[$about])*
        #[derive(Debug, serde::Deserialize, utoipa::IntoParams)]
        #[serde(deny_unknown_fields)]
        #[into_params(parameter_in = Query)]
        pub(super) struct $name {
            $($filters)*
            $(#[$about_after])*
            #[serde(default)]
            after: $key,
            $(#[$about_limit])*
            #[serde(default, deserialize_with = "crate::http::pagination::deserialize_limit")]
            #[param(minimum = 1, maximum = 1000)]
            limit: Option<usize>,
        }
    };
}
pub(super) use page_query;

/// Parses a limit. Rejects 0, which would otherwise be answered with items, and more than a page has, which would otherwise be
/// answered with fewer.
pub(super) fn deserialize_limit<'de, D: Deserializer<'de>>(text: D) -> Result<Option<usize>, D::Error> {
    match usize::deserialize(text)? {
        limit @ 1..=PAGE_LIMIT => Ok(Some(limit)),
        _ => Err(D::Error::custom(format_args!("write a number from 1 to {PAGE_LIMIT}, or leave it out"))),
    }
}

/// Returns the next page of `items`, which are in the order of their keys, with the value of `after` for the
/// page that follows; `None` on the last page.
pub(super) fn paginate<T, K: PartialOrd + Copy>(
    items: impl IntoIterator<Item = T>,
    after: Option<K>,
    asked: Option<usize>,
    key: impl Fn(&T) -> K,
) -> (Vec<T>, Option<K>) {
    let limit = page_limit(asked);
    let mut rest = items.into_iter().filter(|item| after.is_none_or(|after| key(item) > after));
    let page: Vec<T> = rest.by_ref().take(limit).collect();
    let next = page.last().map(&key).filter(|_| rest.next().is_some());
    (page, next)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pages_follow_one_another_without_gap_or_repeat() {
        let all = || 0..5_u64;
        let page = |after, limit| paginate(all(), after, limit, |item| *item);
        assert_eq!(page(None, Some(2)), (vec![0, 1], Some(1)));
        assert_eq!(page(Some(1), Some(2)), (vec![2, 3], Some(3)));
        assert_eq!(page(Some(3), Some(2)), (vec![4], None));
        assert_eq!(page(None, None), (all().collect(), None));
        assert_eq!(page(Some(9), Some(0)).0, Vec::<u64>::new());
    }
}
