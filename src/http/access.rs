//! Access control of the HTTP port: authorizes every request before its handler runs. Only a separate listener for
//! health checks has no access control.
//!
//! `routes.rs` lists the routes, each with the access that it requires. Begin at [`AccessControl`], then
//! `middleware.rs`.
//!
//! | file | contents |
//! | --- | --- |
//! | `middleware.rs` | the checks of a request: host, identity, origin, role, CSRF proof, rate, audit policy, body |
//! | `request_authorizer.rs` | the head of a request during its authorization |
//! | `refusals.rs` | the answers to refused requests, and their audit |
//! | `cookies.rs` | the cookies of browsers |
//! | `required_access.rs` | the role, if any, that a route requires |
//! | `tokens.rs` | names, roles and hashes of tokens, from a file |
//! | `sessions.rs` | logins of browsers |
//! | `csrf.rs` | the proof that a form comes from a page of this server |
//! | `rate_limit.rs` | rate limits by key |
//! | `wrong_token_throttle.rs` | limits on wrong tokens |
//! | `login.rs` | `/login` and `/logout` |
//!
//! - Without a token file, every client that reaches the server may do everything. In this case the server listens
//!   only on loopback, unless it requires client certificates or a setting allows other addresses.
//! - Even without a token file, a browser needs a CSRF proof for a change, because any web page that is open in this
//!   browser can make it send requests to this machine. The proof is derived from a cookie and a key of this
//!   process, so the server stores no proofs.
//! - A viewer cannot read the values of keys, because tasks find and trust one another by the addresses and ids in
//!   these values.
//! - The access that a route requires is declared where the route is registered (`route_builder.rs`). For each route,
//!   a test sends requests without the required role, and with a missing or wrong proof, origin and host.

mod cookies;
mod csrf;
pub mod login;
mod middleware;
mod rate_limit;
mod refusals;
mod request_authorizer;
mod required_access;
mod sessions;
mod tokens;
mod wrong_token_throttle;

#[cfg(any(test, feature = "fuzzing"))]
pub(crate) use tokens::check_token_file_round_trip;

use std::sync::Arc;
use std::time::Duration;

use axum::extract::FromRequestParts;
use axum::http::request::Parts;

pub(super) use cookies::cookie_value;
pub(super) use csrf::CsrfProof;
pub(super) use middleware::{AccessLayerState, authorize_and_call_handler};
pub use required_access::RequiredAccess;
pub use tokens::{NewToken, TokenError, TokenFile, append_token_to_file};

use super::{AllowedHosts, Problem};
use crate::clock::Clock;
use crate::coordination::Actor;
use crate::service::AccessRole;
use csrf::CsrfKey;
use rate_limit::{RateLimit, RateLimiter};
use sessions::SessionStore;
use wrong_token_throttle::WrongTokenThrottle;

/// The rate of audit lines for refused requests of one client network.
const REFUSALS: RateLimit = RateLimit { burst: 20.0, per_second: 1.0 };
/// The default lifetime of a session.
const SESSION_TIMEOUT: Duration = Duration::from_secs(12 * 60 * 60);

/// The way in which a client authenticated.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AuthMethod {
    /// No authentication: the server has no token file.
    Open,
    /// A token in the request.
    Token,
    /// A session cookie.
    Session,
}

/// The author of an authorized request and its role. The middleware puts it into the extensions of the
/// request.
#[derive(Debug, Clone)]
pub struct Principal {
    /// The actor: name, address and kind of client.
    pub actor: Actor,
    /// The role of the actor.
    pub role: AccessRole,
    /// The way in which the actor authenticated.
    pub auth_method: AuthMethod,
    /// The CSRF proof that forms send in the field `csrf` and scripts in the header `x-csrf-token`; empty if
    /// the client is no browser.
    pub csrf: Arc<str>,
}

impl<S: Sync> FromRequestParts<S> for Principal {
    type Rejection = Problem;

    async fn from_request_parts(parts: &mut Parts, _state: &S) -> Result<Self, Problem> {
        parts.extensions.get::<Self>().cloned().ok_or_else(Problem::internal_error)
    }
}

/// The state of access control: tokens, hosts, sessions, CSRF key and rate limits.
pub struct AccessControl {
    clock: Clock,
    tokens: Option<Arc<TokenFile>>,
    hosts: AllowedHosts,
    sessions: SessionStore,
    csrf: CsrfKey,
    attempts: WrongTokenThrottle,
    refusals: RateLimiter,
    changes: RateLimiter,
}

impl AccessControl {
    /// Returns an access control that lets every client do everything.
    ///
    /// # Panics
    /// If the operating system provides no entropy.
    #[must_use]
    pub fn without_tokens(clock: Clock) -> Self {
        Self {
            clock,
            tokens: None,
            hosts: AllowedHosts::default(),
            sessions: SessionStore::new(SESSION_TIMEOUT),
            csrf: CsrfKey::new(),
            attempts: WrongTokenThrottle::new(),
            refusals: RateLimiter::new(REFUSALS),
            changes: RateLimiter::new(RateLimit { burst: f64::INFINITY, per_second: 1.0 }),
        }
    }

    /// Requires one of these tokens of every client.
    #[must_use]
    pub fn with_tokens(self, tokens: Option<TokenFile>, session_timeout: Duration) -> Self {
        Self { tokens: tokens.map(Arc::new), sessions: SessionStore::new(session_timeout), ..self }
    }

    /// Allows these host names, besides those that are always allowed.
    #[must_use]
    pub fn with_hosts(self, hosts: AllowedHosts) -> Self {
        Self { hosts, ..self }
    }

    /// Limits the changes of one actor to this many a second.
    #[must_use]
    pub fn with_change_rate_limit(self, per_second: usize) -> Self {
        let per_second = f64::from(u32::try_from(per_second).unwrap_or(u32::MAX));
        Self { changes: RateLimiter::new(RateLimit { burst: per_second * 2.0, per_second }), ..self }
    }

    /// Reloads the token file if it has changed; it checks at intervals.
    async fn reload_changed_tokens(&self) {
        if let Some(tokens) = &self.tokens {
            tokens.reload_if_changed().await;
        }
    }

    /// Reloads the token file now.
    pub fn reload_tokens(&self) {
        if let Some(tokens) = &self.tokens {
            tokens.reload();
        }
    }

    /// Returns whether the server may be reached as `host`, which may include a port.
    #[must_use]
    pub fn allows_host(&self, host: &str) -> bool {
        self.hosts.allows(host)
    }

    /// Returns whether the server has no tokens, so that every client may do everything.
    #[must_use]
    pub fn has_no_tokens(&self) -> bool {
        self.tokens.is_none()
    }
}
