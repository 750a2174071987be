//! Holds token buckets (rate limits) by key. The number of buckets is bounded.
//!
//! Begin at `RateLimiter::take_token`.

use std::collections::HashMap;
use std::sync::{Mutex, PoisonError};

use crate::coordination::Timestamp;

/// The maximum number of buckets. When all are in use, the keys without one share a bucket.
const BUCKETS_MAX: usize = 4096;

/// A rate: the burst and the average per second.
#[derive(Debug, Clone, Copy)]
pub(super) struct RateLimit {
    pub burst: f64,
    pub per_second: f64,
}

struct TokenBucket {
    left: f64,
    at: Timestamp,
}

/// The token buckets of one rate, by key.
pub(super) struct RateLimiter {
    rate: RateLimit,
    buckets: Mutex<HashMap<String, TokenBucket>>,
}

impl RateLimiter {
    pub fn new(rate: RateLimit) -> Self {
        Self { rate, buckets: Mutex::default() }
    }

    /// Returns the number of tokens in a bucket at `now`.
    fn available_tokens(&self, now: Timestamp, bucket: &TokenBucket) -> f64 {
        let RateLimit { burst, per_second } = self.rate;
        (bucket.left + now.since(bucket.at).as_secs_f64() * per_second).min(burst)
    }

    /// Returns whether the bucket of `who` has a token at `now`. Takes none.
    pub fn has_token(&self, now: Timestamp, who: &str) -> bool {
        let buckets = self.buckets.lock().unwrap_or_else(PoisonError::into_inner);
        buckets.get(who).is_none_or(|bucket| self.available_tokens(now, bucket) >= 1.0)
    }

    /// Returns whether `who` has taken a token that is not refilled yet.
    pub fn has_used_tokens_recently(&self, now: Timestamp, who: &str) -> bool {
        let buckets = self.buckets.lock().unwrap_or_else(PoisonError::into_inner);
        buckets.get(who).is_some_and(|bucket| self.available_tokens(now, bucket) < self.rate.burst)
    }

    /// Takes a token from the bucket of `who`. Returns whether there was one.
    pub fn take_token(&self, now: Timestamp, who: String) -> bool {
        let burst = self.rate.burst;
        if burst.is_infinite() {
            return true;
        }
        let refilled = |bucket: &TokenBucket| self.available_tokens(now, bucket);
        let mut buckets = self.buckets.lock().unwrap_or_else(PoisonError::into_inner);
        if buckets.len() >= BUCKETS_MAX && !buckets.contains_key(&who) {
            buckets.retain(|_, bucket| refilled(bucket) < burst);
        }
        let shared = buckets.len() >= BUCKETS_MAX && !buckets.contains_key(&who);
        let key = if shared { String::new() } else { who };
        let bucket = buckets.entry(key).or_insert(TokenBucket { left: burst, at: now });
        bucket.left = refilled(bucket);
        bucket.at = now;
        let allowed = bucket.left >= 1.0;
        if allowed {
            bucket.left -= 1.0;
        }
        allowed
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn a_bucket_empties_and_fills_again_and_there_are_only_so_many() {
        let rates = RateLimiter::new(RateLimit { burst: 2.0, per_second: 1.0 });
        let now = Timestamp(1);
        let allow = |now, who: &str| rates.take_token(now, who.into());
        assert_eq!(
            [allow(now, "a"), allow(now, "a"), allow(now, "a"), allow(now, "b")],
            [true, true, false, true]
        );
        assert!(allow(now.after(Duration::from_secs(1)), "a"));
        for n in 0..BUCKETS_MAX * 2 {
            allow(now, &n.to_string());
        }
        assert!(rates.buckets.lock().unwrap().len() <= BUCKETS_MAX + 1);
        assert!(!allow(now, "another"), "those for whom there is no room share one");
    }
}
