//! The actor of a request: extractors for its address, its transport and its author.
//!
//! It does not authenticate: `guard/pass.rs` does, and puts an [`Author`] into the request's extensions. Without
//! one the actor has no name; its address and its kind of client are known. Begin at [`Acting`].

use std::convert::Infallible;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use axum::extract::FromRequestParts;
use axum::http::header::USER_AGENT;
use axum::http::request::Parts;

use super::Role;
use super::audit::Deed;
use crate::coordination::{Actor, JobName, Means, Reason};
use crate::telemetry::traces::Parent;

/// Where a request comes from: the listener puts it into the extensions of every request.
#[derive(Debug, Clone, Copy)]
pub struct Peer(pub SocketAddr);

/// How a request comes: the listener puts it into the extensions of every request.
#[derive(Debug, Clone, Default)]
pub struct Channel {
    /// Under TLS.
    pub secure: bool,
    /// By what name the certificate goes that the client has shown, if it was asked for one.
    pub certificate: Option<Arc<str>>,
}

/// Who asks for a change, with what else is known of the request.
#[derive(Debug, Clone)]
pub struct Author {
    /// Who, from where, by what means.
    pub actor: Actor,
    /// What they may do; `None` for strangers, and for rules of the server.
    pub role: Option<Role>,
    /// What the request is a part of, as its caller says.
    pub parent: Option<Parent>,
    written: Arc<AtomicBool>,
}

impl Author {
    /// Somebody of whom no more is known.
    #[must_use]
    pub fn new(actor: Actor, role: Option<Role>, parent: Option<Parent>) -> Self {
        Self { actor, role, parent, written: Arc::default() }
    }

    /// What they do, for the audit; `act` is what, in a word, and `subject` upon what.
    pub(super) fn deed(
        &self,
        job: Option<JobName>,
        act: &'static str,
        subject: String,
        reason: Option<Reason>,
    ) -> Deed {
        self.written.store(true, Ordering::Relaxed);
        Deed { actor: self.actor.clone(), role: self.role, job, act, subject, reason }
    }

    /// Whether what they asked for stands in the audit.
    pub(super) fn is_written(&self) -> bool {
        self.written.load(Ordering::Relaxed)
    }
}

/// The author of a request.
#[derive(Debug, Clone)]
pub struct Acting(pub Author);

impl<S: Sync> FromRequestParts<S> for Acting {
    type Rejection = Infallible;

    async fn from_request_parts(parts: &mut Parts, _state: &S) -> Result<Self, Infallible> {
        if let Some(known) = parts.extensions.get::<Author>() {
            return Ok(Self(known.clone()));
        }
        let agent = parts.headers.get(USER_AGENT).and_then(|agent| agent.to_str().ok()).unwrap_or_default();
        let address = parts.extensions.get::<Peer>().map(|peer| peer.0);
        let actor = Actor { who: Actor::ANONYMOUS.into(), address, means: means(agent) };
        Ok(Self(Author::new(actor, None, Parent::of(&parts.headers))))
    }
}

/// By what means a client with this user agent acts. It says so itself: a hint for people, and no proof.
pub(super) fn means(agent: &str) -> Means {
    if agent.starts_with("muster/") {
        Means::Cli
    } else if agent.contains("Mozilla/") {
        Means::Page
    } else {
        Means::Api
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use axum::http::Request;

    async fn acting(request: Request<()>) -> Actor {
        let mut parts = request.into_parts().0;
        Acting::from_request_parts(&mut parts, &()).await.unwrap().0.actor
    }

    #[tokio::test]
    async fn whoever_is_known_counts_before_what_the_client_looks_like() {
        let agent = |agent: &str| Request::builder().header("user-agent", agent).body(()).unwrap();
        assert_eq!(acting(agent("muster/0.1.0")).await.means, Means::Cli);
        assert_eq!(acting(agent("Mozilla/5.0 (X11)")).await.means, Means::Page);
        let mut request = agent("curl/8");
        request.extensions_mut().insert(Peer(([10, 0, 0, 5], 4).into()));
        let seen = acting(request).await;
        assert_eq!((&*seen.who, seen.means), (Actor::ANONYMOUS, Means::Api));
        assert_eq!(seen.to_string(), "anonymous (by the REST API from 10.0.0.5)");
        let known = Actor { who: "alice".into(), address: None, means: Means::Page };
        let mut request = agent("curl/8");
        request.extensions_mut().insert(Author::new(known.clone(), Some(Role::Viewer), None));
        assert_eq!(acting(request).await, known);
    }
}
