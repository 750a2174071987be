//! A cache of encoded replies that have many recipients. Such a reply is encoded once for each *dialect*, the
//! encoding of tasks that a client expects (`dialect.rs`), even if its recipients are on different connections.
//!
//! The state machine returns a live set, task states or devices as one shared object to all callers.
//! `reply_encoder.rs` encodes the object. Begin at [`EncodedReplyCache::get_or_encode`].

use std::any::Any;
use std::collections::VecDeque;
use std::sync::{Arc, Mutex, OnceLock, PoisonError, Weak};

use bytes::Bytes;

use super::dialect::Dialect;

/// The greatest number of kept encodings.
const KEPT: usize = 64;

/// The encoding of one reply.
struct EncodedReply {
    /// While this pointer exists, no other reply has the same address.
    reply: Weak<dyn Any + Send + Sync>,
    dialect: Dialect,
    bytes: Arc<OnceLock<Bytes>>,
}

/// The encodings of the latest shared replies, the newest first.
#[derive(Default)]
pub(super) struct EncodedReplyCache {
    kept: Mutex<VecDeque<EncodedReply>>,
}

impl EncodedReplyCache {
    /// Returns the encoding of a reply; calls `encode` the first time. The lock is free meanwhile.
    pub(super) fn get_or_encode<T: Any + Send + Sync>(
        &self,
        reply: &Arc<T>,
        dialect: Dialect,
        encode: impl FnOnce(&T) -> Bytes,
    ) -> Bytes {
        self.find_or_insert_cell(reply, dialect).get_or_init(|| encode(reply)).clone()
    }

    fn find_or_insert_cell<T: Any + Send + Sync>(
        &self,
        reply: &Arc<T>,
        dialect: Dialect,
    ) -> Arc<OnceLock<Bytes>> {
        let mut kept = self.kept.lock().unwrap_or_else(PoisonError::into_inner);
        let address = Arc::as_ptr(reply).cast::<()>();
        let known = kept.iter().find(|known| {
            known.dialect == dialect && std::ptr::eq(known.reply.as_ptr().cast::<()>(), address)
        });
        if let Some(known) = known {
            return Arc::clone(&known.bytes);
        }
        kept.retain(|known| known.reply.strong_count() > 0);
        kept.truncate(KEPT - 1);
        let bytes = Arc::default();
        let reply: Weak<T> = Arc::downgrade(reply);
        kept.push_front(EncodedReply { reply, dialect, bytes: Arc::clone(&bytes) });
        bytes
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_reply_is_encoded_once_a_dialect_and_dropped_with_its_last_holder() {
        let replies = EncodedReplyCache::default();
        let (one, other) = (Arc::new(vec![1_u8]), Arc::new(vec![1_u8]));
        let mut encoded = 0;
        let mut get = |reply: &Arc<Vec<u8>>, dialect| {
            replies.get_or_encode(reply, dialect, |value| {
                encoded += 1;
                Bytes::copy_from_slice(value)
            })
        };
        let first = get(&one, Dialect::Number);
        assert_eq!(get(&one, Dialect::Number).as_ptr(), first.as_ptr());
        assert_ne!(get(&one, Dialect::Named).as_ptr(), first.as_ptr());
        assert_ne!(get(&other, Dialect::Number).as_ptr(), first.as_ptr(), "equal, and another reply");
        drop(one);
        get(&other, Dialect::Named);
        assert_eq!(encoded, 4);
        let kept = replies.kept.lock().unwrap();
        assert_eq!(kept.len(), 2, "those of the dropped reply are gone");
    }

    #[test]
    fn the_number_of_encodings_is_bounded() {
        let replies = EncodedReplyCache::default();
        let held: Vec<Arc<usize>> = (0..3 * KEPT).map(Arc::new).collect();
        for reply in &held {
            replies.get_or_encode(reply, Dialect::Number, |_| Bytes::new());
        }
        assert_eq!(replies.kept.lock().unwrap().len(), KEPT);
    }
}
