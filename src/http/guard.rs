//! Who may do what over HTTP. Every request passes here before it reaches its handler.
//!
//! | file | its reason to exist |
//! | --- | --- |
//! | `pass.rs` | the way of a request: host, identity, origin, role, forgery, rate |
//! | `roles.rs` | viewer < operator < admin |
//! | `tokens.rs` | who holds which role: names and hashes out of a file |
//! | `sessions.rs` | logins of browsers |
//! | `csrf.rs` | proof that a form was made by a page of this server |
//! | `rates.rs` | how often somebody may do something |
//! | `attempts.rs` | how often wrong tokens may be tried |
//! | `login.rs` | `/login` and `/logout` |
//!
//! Without a file of tokens everybody who reaches the server may do everything, which is why it then listens on loopback
//! only, unless told otherwise. Even there a browser is not trusted blindly: whatever page it shows can make it send
//! requests to this machine, so that a change that a browser asks for needs proof that a page of this server asked.

mod attempts;
mod csrf;
pub mod login;
mod pass;
mod rates;
mod roles;
mod sessions;
mod tokens;

#[cfg(any(test, feature = "fuzzing"))]
pub(crate) use tokens::fuzz as fuzz_tokens;

use std::sync::Arc;
use std::time::Duration;

use axum::extract::FromRequestParts;
use axum::http::request::Parts;

pub(super) use pass::{Gate, Proof, pass};
pub use roles::{Need, Role};
pub use tokens::{NewToken, TokenError, Tokens, append};

use super::Hosts;
use crate::clock::Clock;
use crate::coordination::Actor;
use attempts::Attempts;
use csrf::Csrf;
use rates::{Rate, Rates};
use sessions::Sessions;

/// Refusals of requests from one address that are written down.
const REFUSALS: Rate = Rate { burst: 20.0, per_second: 1.0 };
/// How long a login holds if nobody says otherwise.
const SESSION_TIMEOUT: Duration = Duration::from_secs(12 * 60 * 60);

/// How somebody has shown who they are.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum How {
    /// They did not have to.
    Open,
    /// By a token in the request.
    Token,
    /// By a login in a browser.
    Session,
}

/// Who makes a request, and what they may do: in the extensions of every request that has passed.
#[derive(Debug, Clone)]
pub struct Visitor {
    /// Who, from where, by what means.
    pub actor: Actor,
    /// What they may do.
    pub role: Role,
    /// How that is known.
    pub how: How,
    /// What the forms of a page for this visitor must carry in their field `csrf`, and its scripts in the header
    /// `x-csrf-token`; empty for a visitor that is no browser.
    pub csrf: Arc<str>,
}

impl<S: Sync> FromRequestParts<S> for Visitor {
    type Rejection = super::Problem;

    async fn from_request_parts(parts: &mut Parts, _state: &S) -> Result<Self, super::Problem> {
        parts.extensions.get::<Self>().cloned().ok_or_else(super::Problem::internal)
    }
}

/// What is checked, and against what.
pub struct Guard {
    clock: Clock,
    tokens: Option<Arc<Tokens>>,
    hosts: Hosts,
    sessions: Sessions,
    csrf: Csrf,
    attempts: Attempts,
    refusals: Rates,
    changes: Rates,
}

impl Guard {
    /// A guard that lets everybody do everything.
    ///
    /// # Panics
    /// If the operating system has no entropy to give.
    #[must_use]
    pub fn open(clock: Clock) -> Self {
        Self {
            clock,
            tokens: None,
            hosts: Hosts::default(),
            sessions: Sessions::new(SESSION_TIMEOUT),
            csrf: Csrf::new(),
            attempts: Attempts::new(),
            refusals: Rates::new(REFUSALS),
            changes: Rates::new(Rate { burst: f64::INFINITY, per_second: 1.0 }),
        }
    }

    /// The same for those who have one of these tokens only.
    #[must_use]
    pub fn with_tokens(self, tokens: Option<Tokens>, session_timeout: Duration) -> Self {
        Self { tokens: tokens.map(Arc::new), sessions: Sessions::new(session_timeout), ..self }
    }

    /// The same for a server that is reached by these names too.
    #[must_use]
    pub fn with_hosts(self, hosts: Hosts) -> Self {
        Self { hosts, ..self }
    }

    /// The same with so many changes a second at most by one actor.
    #[must_use]
    pub fn with_changes(self, per_second: usize) -> Self {
        let per_second = f64::from(u32::try_from(per_second).unwrap_or(u32::MAX));
        Self { changes: Rates::new(Rate { burst: per_second * 2.0, per_second }), ..self }
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
