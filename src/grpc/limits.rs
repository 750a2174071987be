//! The bounds and timeouts of the gRPC port.
//!
//! The bounds on the state of one job are in its settings ([`JobBounds`](crate::coordination::JobBounds)). Begin at
//! [`GrpcLimits`].

use std::time::Duration;

/// The limits of the gRPC port. The settings of a job bound what that job may hold.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GrpcLimits {
    /// Connections at once, over all listeners. Further ones are closed at once.
    pub connections: usize,
    /// Calls in progress at once on one connection.
    pub streams_per_connection: u32,
    /// Calls to the auxiliary services (health, reflection) in progress at once on one connection.
    pub auxiliary_calls_per_connection: usize,
    /// Length of one message, in either direction and after inflation, in bytes.
    pub message_bytes: usize,
    /// Memory for requests that arrive in pieces or are being inflated, over all connections, in bytes. A
    /// body takes it as it arrives. Bodies without room wait, held back by flow control: one half of the
    /// memory is reserved for them, and the body that misses the fewest bytes comes first.
    pub bodies_in_flight_bytes: usize,
    /// Memory for the requests in progress on one connection, in bytes: streams, incomplete frames and header blocks, deferred
    /// requests and unread bytes of bodies. A request that would need more is refused.
    pub state_bytes_per_connection: usize,
    /// The same for all connections together, beyond a small allowance of each.
    pub state_bytes: usize,
    /// Answers that the peer of one connection has not taken yet, in bytes. Beyond this no further calls are
    /// accepted from it.
    pub unsent_bytes_per_connection: usize,
    /// The time for a new connection to prove that it speaks HTTP/2, and for any connection to complete a
    /// frame or a header block that is processed as a whole.
    pub handshake: Duration,
    /// The time for a request's body to arrive, or for its next 4 MiB if it is longer.
    pub body_stall: Duration,
    /// The time for which a peer may leave an answer untaken, or data incomplete that it has begun to send. A
    /// peer that is only stopped continues within it.
    pub unread: Duration,
    /// The time that connections have to finish their work when the server stops.
    pub drain: Duration,
    /// The time for which a peer's host may leave data unacknowledged before it counts as vanished.
    pub unacknowledged: Duration,
    /// Whether calls are counted by method and code.
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
