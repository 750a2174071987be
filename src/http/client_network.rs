//! The network of a client: its IPv4 address, or the /64 network of its IPv6 address. Each limit on clients counts
//! by this network.
//!
//! `connection_slots.rs`, `body.rs` and `access/` have the limits. Begin at `ClientNetwork::of_address`.

use std::convert::Infallible;
use std::fmt;
use std::net::{IpAddr, Ipv6Addr};

use axum::extract::FromRequestParts;
use axum::http::Extensions;
use axum::http::request::Parts;

use super::request_client::PeerAddress;
use crate::transfer::client_subnet;

/// The network that counts as one client: see [`client_subnet`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ClientNetwork(IpAddr);

impl ClientNetwork {
    /// The network of requests without a known peer: those of tests and of the server itself.
    pub const UNKNOWN: Self = Self(IpAddr::V6(Ipv6Addr::UNSPECIFIED));

    /// Returns the network of `address`.
    #[must_use]
    pub fn of_address(address: IpAddr) -> Self {
        Self(client_subnet(address))
    }

    /// Returns the network of the request with these extensions.
    #[must_use]
    pub fn of_request(extensions: &Extensions) -> Self {
        extensions.get::<PeerAddress>().map_or(Self::UNKNOWN, |peer| Self::of_address(peer.0.ip()))
    }
}

impl<S: Sync> FromRequestParts<S> for ClientNetwork {
    type Rejection = Infallible;

    async fn from_request_parts(parts: &mut Parts, _state: &S) -> Result<Self, Infallible> {
        Ok(Self::of_request(&parts.extensions))
    }
}

impl fmt::Display for ClientNetwork {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            IpAddr::V4(four) => write!(f, "{four}"),
            IpAddr::V6(six) => write!(f, "{six}/64"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_of_one_ipv6_network_are_one_source() {
        let of = |text: &str| ClientNetwork::of_address(text.parse().unwrap());
        assert_eq!(of("2001:db8::1"), of("2001:db8::ffff:1"));
        assert_ne!(of("2001:db8::1"), of("2001:db8:0:1::1"));
        assert_eq!(of("::ffff:10.0.0.1"), of("10.0.0.1"));
        assert_eq!(
            (of("10.0.0.1").to_string(), of("2001:db8::1").to_string()),
            ("10.0.0.1".into(), "2001:db8::/64".into())
        );
    }
}
