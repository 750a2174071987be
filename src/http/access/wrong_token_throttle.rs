//! Limits the number of wrong tokens: for each client network, for each token, and overall.
//!
//! `tokens.rs` checks tokens. A token is 256 random bits, so no client finds one by trying. The limits bound the
//! work and the log lines that wrong tokens cause. Only wrong tokens are counted. The limits of client
//! networks and of browsers are checked before the body of a login is read. Begin at
//! `WrongTokenThrottle::identify_login_client`.
//!
//! Through these limits, no client can lock out a client of another network:
//!
//! - A request with a valid token in the header `authorization` is never limited.
//! - A browser that has logged in once has a cookie that proves this. Such a browser has a limit of its own, from
//!   whatever network it connects.
//! - The overall limit applies only to client networks that have recently sent a wrong token themselves.
//!
//! A wrong token that is sent from many networks, such as a revoked token, has a limit of its own.

use std::fmt::Write as _;

use super::csrf::CsrfKey;
use super::rate_limit::{RateLimit, RateLimiter};
use super::tokens::{SecretHash, random_secret};
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
pub(super) struct WrongTokenThrottle {
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
pub(super) struct LoginClient {
    source: String,
    browser: Option<String>,
}

impl WrongTokenThrottle {
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
    pub fn new_browser_cookie_value(&self) -> String {
        let name = random_secret();
        format!("{name}.{}", self.browsers.proof_for_cookie(&name))
    }

    /// Returns the client of a login. A cookie that this process did not issue is ignored.
    pub fn identify_login_client(&self, source: ClientNetwork, cookie: Option<&str>) -> LoginClient {
        let browser = cookie.and_then(|cookie| cookie.split_once('.'));
        let browser = browser.filter(|(name, proof)| self.browsers.verifies_proof(name, proof));
        LoginClient { source: source.to_string(), browser: browser.map(|(name, _)| name.to_owned()) }
    }

    /// Returns whether the client may try one more token. Counts nothing.
    pub fn may_try_token(&self, now: Timestamp, attempt: &LoginClient) -> bool {
        if let Some(browser) = &attempt.browser {
            return self.by_browser.has_token(now, browser);
        }
        self.by_source.has_token(now, &attempt.source)
            && (!self.by_source.has_used_tokens_recently(now, &attempt.source)
                || self.of_all.has_token(now, ALL))
    }

    /// Counts a wrong token in the header `authorization`. Returns whether it is still within the limits.
    pub fn record_wrong_header_token(
        &self,
        now: Timestamp,
        source: ClientNetwork,
        token: &SecretHash,
    ) -> bool {
        let of_token = self.by_token.take_token(now, rate_limit_key_of_token(token));
        self.by_source_of_tools.take_token(now, source.to_string()) && of_token
    }

    /// Counts a wrong token of a login. Returns whether it is still within the limits.
    pub fn record_wrong_login_token(&self, now: Timestamp, attempt: LoginClient, token: &SecretHash) -> bool {
        let of_token = self.by_token.take_token(now, rate_limit_key_of_token(token));
        let of_one = match attempt.browser {
            Some(browser) => self.by_browser.take_token(now, browser),
            None => {
                let tried_before = self.by_source.has_used_tokens_recently(now, &attempt.source);
                let of_all = self.of_all.take_token(now, ALL.to_owned());
                self.by_source.take_token(now, attempt.source) && (of_all || !tried_before)
            }
        };
        of_token && of_one
    }
}

/// Returns the key under which the uses of a token are counted.
fn rate_limit_key_of_token(token: &SecretHash) -> String {
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

    fn network_of_host_number(host: u32) -> ClientNetwork {
        ClientNetwork::of_address(std::net::Ipv4Addr::from(host).into())
    }

    #[test]
    fn other_networks_cannot_lock_out_a_clean_network() {
        let (attempts, now) = (WrongTokenThrottle::new(), Timestamp(1));
        let mut refused = 0;
        // More networks than there are buckets.
        for host in 0..5_000 {
            for token in 0..3_u8 {
                let attempt = attempts.identify_login_client(network_of_host_number(host), None);
                let may = attempts.may_try_token(now, &attempt);
                refused += u32::from(
                    !may || !attempts.record_wrong_login_token(now, attempt, &[token ^ host as u8; 32]),
                );
            }
        }
        assert!(refused > 7_500, "{refused}: the limit over all sources holds");
        assert!(
            attempts
                .may_try_token(now, &attempts.identify_login_client(network_of_host_number(50_000), None))
        );
    }

    #[test]
    fn an_expired_token_in_a_tool_does_not_block_logins() {
        let (attempts, now) = (WrongTokenThrottle::new(), Timestamp(1));
        let allowed = (0..50)
            .filter(|token| attempts.record_wrong_header_token(now, network_of_host_number(1), &[*token; 32]))
            .count();
        assert_eq!(allowed, 10);
        assert!(
            attempts.may_try_token(now, &attempts.identify_login_client(network_of_host_number(1), None))
        );
    }

    #[test]
    fn a_browser_that_has_logged_in_is_not_locked_out_by_its_neighbours() {
        let (attempts, now) = (WrongTokenThrottle::new(), Timestamp(1));
        for token in 0..50 {
            attempts.record_wrong_login_token(
                now,
                attempts.identify_login_client(network_of_host_number(1), None),
                &[token; 32],
            );
        }
        assert!(
            !attempts.may_try_token(now, &attempts.identify_login_client(network_of_host_number(1), None))
        );
        let cookie = attempts.new_browser_cookie_value();
        assert!(
            attempts.may_try_token(
                now,
                &attempts.identify_login_client(network_of_host_number(1), Some(&cookie))
            )
        );
        for forged in ["x.y", "", ".", &cookie[1..], &WrongTokenThrottle::new().new_browser_cookie_value()] {
            assert!(
                !attempts.may_try_token(
                    now,
                    &attempts.identify_login_client(network_of_host_number(1), Some(forged))
                ),
                "{forged}"
            );
        }
        for token in 0..11 {
            attempts.record_wrong_login_token(
                now,
                attempts.identify_login_client(network_of_host_number(1), Some(&cookie)),
                &[token; 32],
            );
        }
        assert!(
            !attempts.may_try_token(
                now,
                &attempts.identify_login_client(network_of_host_number(1), Some(&cookie))
            ),
            "it has its own limit"
        );
    }

    #[test]
    fn one_wrong_token_from_many_sources_has_a_limit() {
        let (attempts, now) = (WrongTokenThrottle::new(), Timestamp(1));
        let within = (0..20).filter(|host| {
            attempts.record_wrong_login_token(
                now,
                attempts.identify_login_client(network_of_host_number(*host), None),
                &[7; 32],
            )
        });
        assert_eq!(within.count(), 10);
    }
}
