//! Access control of the HTTP port: every request is authorized here before its handler runs.
//!
//! It knows no routes: `routes.rs` states what each route requires. Begin at [`AccessControl`], then `middleware.rs`.
//!
//! | file | what it holds |
//! | --- | --- |
//! | `middleware.rs` | the checks of a request: host, identity, origin, role, forgery, rate, body |
//! | `roles.rs` | what a route requires: nothing, or a role |
//! | `tokens.rs` | names, roles and hashes of tokens, from a file |
//! | `sessions.rs` | logins of browsers |
//! | `csrf.rs` | proof that a page of this server made a form |
//! | `rate_limit.rs` | rate limits by key |
//! | `login_throttle.rs` | limits on wrong tokens |
//! | `login.rs` | `/login` and `/logout` |
//!
//! - Without a token file every client that reaches the server may do everything; therefore the server then listens
//!   on loopback only, unless told otherwise.
//! - A browser needs a CSRF proof for a change even then, because any page that it shows can make it send requests
//!   to this machine. The proof is derived from a cookie with a key of the process, so the server stores nothing
//!   for it.
//! - A viewer sees no values of keys: they are addresses and ids by which tasks find and trust one another.
//! - The role of every route stands in the table of `routes.rs`. One test compares the table with the routes;
//!   another calls each route without the role, the proof, the origin and the host.

mod csrf;
pub mod login;
mod login_throttle;
mod middleware;
mod rate_limit;
mod roles;
mod sessions;
mod tokens;

#[cfg(any(test, feature = "fuzzing"))]
pub(crate) use tokens::fuzz as fuzz_tokens;

use std::sync::Arc;
use std::time::Duration;

use axum::extract::FromRequestParts;
use axum::http::request::Parts;

pub(super) use middleware::{AccessLayerState, CsrfProof, authorize};
pub use roles::Access;
pub use tokens::{NewToken, TokenError, TokenFile, append_token};

use super::AllowedHosts;
use crate::clock::Clock;
use crate::coordination::Actor;
use crate::service::Role;
use csrf::CsrfKey;
use login_throttle::LoginThrottle;
use rate_limit::{RateLimit, RateLimiter};
use sessions::SessionStore;

/// Refusals of requests from one address that are written down.
const REFUSALS: RateLimit = RateLimit { burst: 20.0, per_second: 1.0 };
/// How long a login holds if nobody says otherwise.
const SESSION_TIMEOUT: Duration = Duration::from_secs(12 * 60 * 60);

/// How somebody has shown who they are.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AuthMethod {
    /// They did not have to.
    Open,
    /// By a token in the request.
    Token,
    /// By a login in a browser.
    Session,
}

/// Who makes a request, and what they may do: in the extensions of every request that has passed.
#[derive(Debug, Clone)]
pub struct Principal {
    /// Who, from where, by what means.
    pub actor: Actor,
    /// What they may do.
    pub role: Role,
    /// How that is known.
    pub auth_method: AuthMethod,
    /// What the forms of a page for this visitor must carry in their field `csrf`, and its scripts in the header
    /// `x-csrf-token`; empty for a visitor that is no browser.
    pub csrf: Arc<str>,
}

impl<S: Sync> FromRequestParts<S> for Principal {
    type Rejection = super::Problem;

    async fn from_request_parts(parts: &mut Parts, _state: &S) -> Result<Self, super::Problem> {
        parts.extensions.get::<Self>().cloned().ok_or_else(super::Problem::internal)
    }
}

/// What is checked, and against what.
pub struct AccessControl {
    clock: Clock,
    tokens: Option<Arc<TokenFile>>,
    hosts: AllowedHosts,
    sessions: SessionStore,
    csrf: CsrfKey,
    attempts: LoginThrottle,
    refusals: RateLimiter,
    changes: RateLimiter,
}

impl AccessControl {
    /// A guard that lets everybody do everything.
    ///
    /// # Panics
    /// If the operating system has no entropy to give.
    #[must_use]
    pub fn open(clock: Clock) -> Self {
        Self {
            clock,
            tokens: None,
            hosts: AllowedHosts::default(),
            sessions: SessionStore::new(SESSION_TIMEOUT),
            csrf: CsrfKey::new(),
            attempts: LoginThrottle::new(),
            refusals: RateLimiter::new(REFUSALS),
            changes: RateLimiter::new(RateLimit { burst: f64::INFINITY, per_second: 1.0 }),
        }
    }

    /// The same for those who have one of these tokens only.
    #[must_use]
    pub fn with_tokens(self, tokens: Option<TokenFile>, session_timeout: Duration) -> Self {
        Self { tokens: tokens.map(Arc::new), sessions: SessionStore::new(session_timeout), ..self }
    }

    /// The same for a server that is reached by these names too.
    #[must_use]
    pub fn with_hosts(self, hosts: AllowedHosts) -> Self {
        Self { hosts, ..self }
    }

    /// The same with so many changes a second at most by one actor.
    #[must_use]
    pub fn with_changes(self, per_second: usize) -> Self {
        let per_second = f64::from(u32::try_from(per_second).unwrap_or(u32::MAX));
        Self { changes: RateLimiter::new(RateLimit { burst: per_second * 2.0, per_second }), ..self }
    }

    /// Looks whether the tokens have changed, if it is time to.
    async fn refresh(&self) {
        if let Some(tokens) = &self.tokens {
            tokens.refresh().await;
        }
    }

    /// Reads the tokens again.
    pub fn reload(&self) {
        if let Some(tokens) = &self.tokens {
            tokens.reload();
        }
    }

    /// Whether everybody may do everything.
    #[must_use]
    pub fn is_open(&self) -> bool {
        self.tokens.is_none()
    }
}
