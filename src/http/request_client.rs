//! The client of a request: its address, its transport, and its kind.
//!
//! `access/middleware.rs` authenticates the client. If the client is a known principal, the middleware stores the
//! principal's name, address and role (`ActorContext`) in the extensions of the request. Begin at [`PeerAddress`].

use std::net::SocketAddr;
use std::sync::Arc;

use crate::coordination::ActorOrigin;

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

/// Returns the kind of client that this user agent states. It is a hint for people and no proof.
pub(super) fn actor_origin_from_user_agent(agent: &str) -> ActorOrigin {
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

    #[test]
    fn a_user_agent_states_the_kind_of_client() {
        let agents = ["muster/0.1.0", "Mozilla/5.0 (X11)", "curl/8", ""];
        let means = [ActorOrigin::Cli, ActorOrigin::Page, ActorOrigin::Api, ActorOrigin::Api];
        assert_eq!(agents.map(actor_origin_from_user_agent), means);
    }
}
