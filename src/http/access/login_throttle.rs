//! Limits on wrong tokens: by client network, by token, and overall.
//!
//! It checks no tokens: `tokens.rs` does. A token is 256 random bits, which no client finds by trying; the limits
//! bound the work and the noise of those who try. They count wrong tokens only, and apply to a login before its
//! body is read. Begin at `LoginThrottle::attempt_of`. No limit lets one client lock out another:
//!
//! - A right token in the header `authorization` is never limited.
//! - A browser that has logged in has a cookie that says so, and its own limit wherever it comes from.
//! - The overall limit applies only to networks that have lately tried a wrong token themselves.
//!
//! One wrong token that is tried from many networks, such as a revoked one, has a limit of its own.

use std::fmt::Write as _;

use super::csrf::CsrfKey;
use super::rate_limit::{RateLimit, RateLimiter};
use super::tokens::{Hash, random_secret};
use crate::coordination::Timestamp;
use crate::http::ClientNetwork;

/// The rate of wrong tokens of one client network, or of one browser that has logged in before.
const PER_NETWORK: RateLimit = RateLimit { burst: 10.0, per_second: 1.0 / 6.0 };
/// The rate of wrong tokens of all client networks together.
const OVERALL: RateLimit = RateLimit { burst: 100.0, per_second: 10.0 };
/// The rate at which one wrong token may be tried, by all clients together.
const PER_TOKEN: RateLimit = RateLimit { burst: 10.0, per_second: 1.0 / 6.0 };
/// The key of the bucket that all client networks share.
const ALL: &str = "all";

/// Counts wrong tokens and limits further attempts.
pub(super) struct LoginThrottle {
    by_source: RateLimiter,
    /// Wrong tokens in the header `authorization` have buckets of their own, so that a tool with an old token
    /// does not keep people on the same network from logging in.
    by_source_of_tools: RateLimiter,
    by_browser: RateLimiter,
    by_token: RateLimiter,
    of_all: RateLimiter,
    browsers: CsrfKey,
}

/// The client of a login: its network, and the browser if the request has a valid cookie of one that has
/// logged in before.
pub(super) struct LoginAttempt {
    source: String,
    browser: Option<String>,
}

impl LoginThrottle {
    pub fn new() -> Self {
        Self {
            by_source: RateLimiter::new(PER_NETWORK),
            by_source_of_tools: RateLimiter::new(PER_NETWORK),
            by_browser: RateLimiter::new(PER_NETWORK),
            by_token: RateLimiter::new(PER_TOKEN),
            of_all: RateLimiter::new(OVERALL),
            browsers: CsrfKey::new(),
        }
    }

    /// Returns a new value for the cookie that marks a browser as one that has logged in.
    pub fn browser_cookie(&self) -> String {
        let name = random_secret();
        format!("{name}.{}", self.browsers.proof_for(&name))
    }

    /// Returns the client of a login. A cookie that this process did not issue is ignored.
    pub fn attempt_of(&self, source: ClientNetwork, cookie: Option<&str>) -> LoginAttempt {
        let browser = cookie.and_then(|cookie| cookie.split_once('.'));
        let browser = browser.filter(|(name, proof)| self.browsers.verifies(name, proof));
        LoginAttempt { source: source.to_string(), browser: browser.map(|(name, _)| name.to_owned()) }
    }

    /// Returns whether the client may try one more token. Counts nothing.
    pub fn is_allowed(&self, now: Timestamp, attempt: &LoginAttempt) -> bool {
        if let Some(browser) = &attempt.browser {
            return self.by_browser.would_allow(now, browser);
        }
        self.by_source.would_allow(now, &attempt.source)
            && (!self.by_source.has_recent(now, &attempt.source) || self.of_all.would_allow(now, ALL))
    }

    /// Counts a wrong token in the header `authorization`. Returns whether it is still within the limits.
    pub fn failed_in_header(&self, now: Timestamp, source: ClientNetwork, token: &Hash) -> bool {
        let of_token = self.by_token.allow(now, key_of(token));
        self.by_source_of_tools.allow(now, source.to_string()) && of_token
    }

    /// Counts a wrong token of a login. Returns whether it is still within the limits.
    pub fn failed(&self, now: Timestamp, attempt: LoginAttempt, token: &Hash) -> bool {
        let of_token = self.by_token.allow(now, key_of(token));
        let of_one = match attempt.browser {
            Some(browser) => self.by_browser.allow(now, browser),
            None => {
                let tried_before = self.by_source.has_recent(now, &attempt.source);
                let of_all = self.of_all.allow(now, ALL.to_owned());
                self.by_source.allow(now, attempt.source) && (of_all || !tried_before)
            }
        };
        of_token && of_one
    }
}

/// Returns the key under which the uses of a token are counted.
fn key_of(token: &Hash) -> String {
    let mut name = String::with_capacity(16);
    for byte in token.iter().take(8) {
        // Writing to a string cannot fail.
        let _ = write!(name, "{byte:02x}");
    }
    name
}

#[cfg(test)]
mod tests {
    use super::*;

    fn from(host: u32) -> ClientNetwork {
        ClientNetwork::of(std::net::Ipv4Addr::from(host).into())
    }

    #[test]
    fn other_networks_cannot_lock_out_a_clean_network() {
        let (attempts, now) = (LoginThrottle::new(), Timestamp(1));
        let mut refused = 0;
        // More networks than there are buckets.
        for host in 0..5_000 {
            for token in 0..3_u8 {
                let attempt = attempts.attempt_of(from(host), None);
                let may = attempts.is_allowed(now, &attempt);
                refused += u32::from(!may || !attempts.failed(now, attempt, &[token ^ host as u8; 32]));
            }
        }
        assert!(refused > 7_500, "{refused}: the limit over all sources holds");
        assert!(attempts.is_allowed(now, &attempts.attempt_of(from(50_000), None)));
    }

    #[test]
    fn an_expired_token_in_a_tool_does_not_block_logins() {
        let (attempts, now) = (LoginThrottle::new(), Timestamp(1));
        let allowed = (0..50).filter(|token| attempts.failed_in_header(now, from(1), &[*token; 32])).count();
        assert_eq!(allowed, 10);
        assert!(attempts.is_allowed(now, &attempts.attempt_of(from(1), None)));
    }

    #[test]
    fn a_browser_that_has_logged_in_is_not_locked_out_by_its_neighbours() {
        let (attempts, now) = (LoginThrottle::new(), Timestamp(1));
        for token in 0..50 {
            attempts.failed(now, attempts.attempt_of(from(1), None), &[token; 32]);
        }
        assert!(!attempts.is_allowed(now, &attempts.attempt_of(from(1), None)));
        let cookie = attempts.browser_cookie();
        assert!(attempts.is_allowed(now, &attempts.attempt_of(from(1), Some(&cookie))));
        for forged in ["x.y", "", ".", &cookie[1..], &LoginThrottle::new().browser_cookie()] {
            assert!(!attempts.is_allowed(now, &attempts.attempt_of(from(1), Some(forged))), "{forged}");
        }
        for token in 0..11 {
            attempts.failed(now, attempts.attempt_of(from(1), Some(&cookie)), &[token; 32]);
        }
        assert!(
            !attempts.is_allowed(now, &attempts.attempt_of(from(1), Some(&cookie))),
            "it has its own limit"
        );
    }

    #[test]
    fn one_wrong_token_from_many_sources_has_a_limit() {
        let (attempts, now) = (LoginThrottle::new(), Timestamp(1));
        let within =
            (0..20).filter(|host| attempts.failed(now, attempts.attempt_of(from(*host), None), &[7; 32]));
        assert_eq!(within.count(), 10);
    }
}
