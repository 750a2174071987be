//! The actor of a request: extractors for its address, its transport and its author.
//!
//! It does not authenticate: `access/middleware.rs` does, and puts an [`ActorContext`] into the request's
//! extensions. Without one the actor has no name; its address and its kind of client are known. Begin at
//! [`RequestActor`].

use std::convert::Infallible;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use axum::extract::FromRequestParts;
use axum::http::header::USER_AGENT;
use axum::http::request::Parts;

use super::Role;
use super::audit::AuditEntry;
use crate::coordination::{Actor, ActorOrigin, JobName, Reason};
use crate::telemetry::traces::TraceParent;

/// The peer address of a request. The listener puts it into the extensions of every request.
#[derive(Debug, Clone, Copy)]
pub struct PeerAddress(pub SocketAddr);

/// The transport of a request. The listener puts it into the extensions of every request.
#[derive(Debug, Clone, Default)]
pub struct TransportSecurity {
    /// The connection uses TLS.
    pub secure: bool,
    /// The name in the client certificate, if the client presented one.
    pub certificate: Option<Arc<str>>,
}

/// The author of a change: actor, role, trace and audit mark.
#[derive(Debug, Clone)]
pub struct ActorContext {
    /// The actor: name, address and kind of client.
    pub actor: Actor,
    /// The role; `None` for clients without credentials and for rules of the server.
    pub role: Option<Role>,
    /// The parent span that the caller sent.
    pub parent: Option<TraceParent>,
    audited: Arc<AtomicBool>,
}

impl ActorContext {
    /// Returns a context whose change is not audited yet.
    #[must_use]
    pub fn new(actor: Actor, role: Option<Role>, parent: Option<TraceParent>) -> Self {
        Self { actor, role, parent, audited: Arc::default() }
    }

    /// Returns the audit entry of an action. `act` is the action in a word, `subject` its object.
    pub(super) fn audit_entry(
        &self,
        job: Option<JobName>,
        act: &'static str,
        subject: String,
        reason: Option<Reason>,
    ) -> AuditEntry {
        self.audited.store(true, Ordering::Relaxed);
        AuditEntry { actor: self.actor.clone(), role: self.role, job, act, subject, reason }
    }

    /// Returns whether the audit has a line for this request.
    pub(super) fn is_audited(&self) -> bool {
        self.audited.load(Ordering::Relaxed)
    }
}

/// The extractor of the author of a request.
#[derive(Debug, Clone)]
pub struct RequestActor(pub ActorContext);

impl<S: Sync> FromRequestParts<S> for RequestActor {
    type Rejection = Infallible;

    async fn from_request_parts(parts: &mut Parts, _state: &S) -> Result<Self, Infallible> {
        if let Some(known) = parts.extensions.get::<ActorContext>() {
            return Ok(Self(known.clone()));
        }
        let agent = parts.headers.get(USER_AGENT).and_then(|agent| agent.to_str().ok()).unwrap_or_default();
        let address = parts.extensions.get::<PeerAddress>().map(|peer| peer.0);
        let actor = Actor { who: Actor::ANONYMOUS.into(), address, means: means_of_agent(agent) };
        Ok(Self(ActorContext::new(actor, None, TraceParent::of(&parts.headers))))
    }
}

/// Returns the kind of client that this user agent states. It is a hint for people and no proof.
pub(super) fn means_of_agent(agent: &str) -> ActorOrigin {
    if agent.starts_with("muster/") {
        ActorOrigin::Cli
    } else if agent.contains("Mozilla/") {
        ActorOrigin::Page
    } else {
        ActorOrigin::Api
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use axum::http::Request;

    async fn acting(request: Request<()>) -> Actor {
        let mut parts = request.into_parts().0;
        RequestActor::from_request_parts(&mut parts, &()).await.unwrap().0.actor
    }

    #[tokio::test]
    async fn an_authenticated_actor_overrides_the_user_agent() {
        let agent = |agent: &str| Request::builder().header("user-agent", agent).body(()).unwrap();
        assert_eq!(acting(agent("muster/0.1.0")).await.means, ActorOrigin::Cli);
        assert_eq!(acting(agent("Mozilla/5.0 (X11)")).await.means, ActorOrigin::Page);
        let mut request = agent("curl/8");
        request.extensions_mut().insert(PeerAddress(([10, 0, 0, 5], 4).into()));
        let seen = acting(request).await;
        assert_eq!((&*seen.who, seen.means), (Actor::ANONYMOUS, ActorOrigin::Api));
        assert_eq!(seen.to_string(), "anonymous (by the REST API from 10.0.0.5)");
        let known = Actor { who: "alice".into(), address: None, means: ActorOrigin::Page };
        let mut request = agent("curl/8");
        request.extensions_mut().insert(ActorContext::new(known.clone(), Some(Role::Viewer), None));
        assert_eq!(acting(request).await, known);
    }
}
