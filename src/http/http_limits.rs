//! The limits of one HTTP listener.
//!
//! `listener.rs` and `connection_slots.rs` enforce the limits. Begin at [`HttpLimits`].

use std::time::Duration;

/// The limits of a listener.
#[derive(Debug, Clone, Copy)]
pub struct HttpLimits {
    /// The maximum number of connections. When it is reached, connections that only wait are closed for new
    /// ones.
    pub connections: usize,
    /// The maximum number of connections of one client network.
    pub connections_per_source: usize,
    /// The timeout for the protocol detection, the TLS handshake and the head of a request.
    pub head_timeout: Duration,
    /// The timeout for the next request after a response.
    pub idle_timeout: Duration,
    /// The timeout for a client that does not read a response, and for sent bytes without an acknowledgement.
    pub send_timeout: Duration,
    /// The maximum size of the head of a request, in bytes.
    pub head_bytes: usize,
}

impl HttpLimits {
    /// Returns the default limits with this many connections.
    #[must_use]
    pub fn new(connections: usize) -> Self {
        Self {
            connections,
            connections_per_source: connections,
            head_timeout: Duration::from_secs(5),
            idle_timeout: Duration::from_secs(60),
            send_timeout: Duration::from_secs(30),
            head_bytes: 64 << 10,
        }
    }
}
