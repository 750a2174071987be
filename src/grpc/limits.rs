//! The bounds and timeouts of the gRPC port.
//!
//! The settings of a job bound what that job may hold ([`Bounds`](crate::coordination::Bounds)). Begin at
//! [`GrpcLimits`].

use std::time::Duration;

/// The bounds of the wire edge. What a job may hold is bounded by its own settings.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GrpcLimits {
    /// Connections at once, over all listeners. Those that come on top are closed at once.
    pub connections: usize,
    /// Calls in progress at once on one connection.
    pub streams_per_connection: u32,
    /// Calls to the other services of the port (health, reflection) in progress at once on one connection.
    pub auxiliary_calls_per_connection: usize,
    /// Length of one message, in either direction and after inflation, in bytes.
    pub message_bytes: usize,
    /// Memory for requests that arrive in pieces or are being inflated, over all connections, in
    /// bytes. A body takes it as it arrives. Those for which there is no room wait their turn, held back by flow control: one
    /// half of the memory is kept for them, and who lacks least comes first.
    pub bodies_in_flight_bytes: usize,
    /// Memory for the requests in progress on one connection, in bytes: streams, header blocks, and requests and bytes of
    /// bodies that are kept until it is their turn. What would need more is refused.
    pub state_bytes_per_connection: usize,
    /// The same for all connections together, beyond a small allowance of each.
    pub state_bytes: usize,
    /// Answers that the peer of one connection has not taken yet, in bytes. With more than this no
    /// further calls are taken from it.
    pub unsent_bytes_per_connection: usize,
    /// How long a new connection may take to show that it speaks HTTP/2, and any connection to complete a frame or a header block
    /// that must be there as a whole.
    pub handshake: Duration,
    /// How long a request's body may take to arrive, or the next 4 MiB of it if it is longer.
    pub body_stall: Duration,
    /// How long a peer may leave an answer, or data that it has begun to send, where it is. A peer that is only stopped
    /// comes back within that time.
    pub unread: Duration,
    /// How long connections may take to finish what they are at when the server stops.
    pub drain: Duration,
    /// A host that leaves data unacknowledged for this long is gone.
    pub unacknowledged: Duration,
    /// Calls are counted by method and code.
    pub count_calls: bool,
}

impl Default for GrpcLimits {
    fn default() -> Self {
        Self {
            connections: 65_536,
            streams_per_connection: 16_384,
            auxiliary_calls_per_connection: 32,
            message_bytes: 512 << 20,
            bodies_in_flight_bytes: 1 << 30,
            state_bytes_per_connection: 32 << 20,
            state_bytes: 1 << 30,
            unsent_bytes_per_connection: 16 << 20,
            handshake: Duration::from_secs(10),
            body_stall: Duration::from_secs(60),
            unread: Duration::from_secs(600),
            drain: Duration::from_secs(5),
            unacknowledged: Duration::from_secs(20),
            count_calls: true,
        }
    }
}
