//! The interface by which the exchange through cliques calls its session. Begin at [`CliqueHost`].

use std::sync::Arc;

use crate::base::transport::TransportKind;
use crate::launch::peer_launch::PeerLaunch;
use crate::protocol::link::GroupId;

/// The session of an exchange.
pub trait CliqueHost: Send + Sync {
    /// Queues a message about cliques for the peer. The caller may hold locks of the exchange.
    fn send_clique_message(&self, message: Vec<u8>);

    /// Sends the queued frames.
    fn flush_control_frames(&self);

    /// Returns the launch that sends the bytes of a group, if its list is matched, its bytes are defined, and it is not cancelled.
    fn launch_that_sends(&self, at: GroupId) -> Option<Arc<PeerLaunch>>;

    /// Calls `work` on a thread that may wait. If the engine ends before, `work` is dropped.
    fn run_soon(&self, work: Box<dyn FnOnce() + Send>);

    /// Reports that the clique that was to move the bytes of a launch has failed. With `nothing_yet` no byte has moved, and none can
    /// any more, so the peer may push instead.
    fn on_clique_failed(&self, launch: &Arc<PeerLaunch>, why: &str, nothing_yet: bool);

    /// Asks the peer to push the bytes of a launch, of which none has been fetched.
    fn request_push(&self, launch: &Arc<PeerLaunch>);

    /// Reports that all inbound bytes of a group were fetched.
    fn on_group_fetched(&self, at: GroupId);

    /// Counts bytes that were fetched.
    fn count_received(&self, kind: TransportKind, bytes: u64);
}
