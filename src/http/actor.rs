//! The actor of a request: extractors for its address, its transport and its author.
//!
//! It does not authenticate: `access/middleware.rs` does, and puts an [`ActorContext`] into the request's
//! extensions. Without one the actor has no name; its address and its kind of client are known. Begin at
//! [`RequestActor`].

use std::convert::Infallible;
use std::net::SocketAddr;
use std::sync::Arc;

use axum::extract::FromRequestParts;
use axum::http::header::USER_AGENT;
use axum::http::request::Parts;

use crate::coordination::{Actor, ActorOrigin};
use crate::service::ActorContext;
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

/// The author of a request.
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
    use crate::service::Role;
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
