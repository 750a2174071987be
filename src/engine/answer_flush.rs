//! The connections that go on when the process dies, and the wait until the answers that were delivered to them are in their
//! logs. Begin at [`LoggedConnections`].

use std::convert::Infallible;
use std::sync::mpsc;
use std::time::Duration;

/// How long connections may take. They need microseconds, once they have their turn.
const FLUSH_TIMEOUT: Duration = Duration::from_secs(30);

/// Held by a connection that has been asked to write answers to its log, and dropped when it has.
#[derive(Debug, Clone)]
pub struct FlushToken {
    _flushed: mpsc::Sender<Infallible>,
}

/// The connections that go on when this process dies.
pub trait LoggedConnections: Send + Sync {
    /// Asks every connection to write the answers that were delivered to it to its log. Each keeps a copy of `token` until it has.
    fn request_flush(&self, token: FlushToken);
}

/// Waits until all answers that were delivered to `connections` are in their logs, for a limited time.
pub(super) fn wait_until_flushed(connections: &dyn LoggedConnections) {
    let (flushed, all_flushed) = mpsc::channel::<Infallible>();
    connections.request_flush(FlushToken { _flushed: flushed });
    // Nothing is ever sent: the channel ends when the last copy is dropped.
    let _ = all_flushed.recv_timeout(FLUSH_TIMEOUT);
}
