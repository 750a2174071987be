//! The interface of a launch to the session that carries it.
//!
//! It has no implementation here: sessions are above. Begin at [`SessionHandle`].

use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use crate::base::error::TransferError;
use crate::base::identity::Member;
use crate::protocol::link::GroupId;

/// A thread that waits looks again after so long, at what the peer did not wake it for and at its own time.
pub const POLL_INTERVAL: Duration = Duration::from_millis(50);

/// The session of a launch, as the launch sees it.
pub trait SessionHandle: Send + Sync {
    /// Counts a launch that waits to hear that the peer has what was sent: that wakes this side's threads from now on.
    fn add_send_waiter(&self);

    /// Counts one launch less that waits for that.
    fn remove_send_waiter(&self);

    /// Has the lanes look at the chunks that they are in the middle of.
    fn wake_lanes(&self);

    /// Wakes the thread that polls the ring: something that it may wait for has happened elsewhere.
    fn wake_poller(&self);

    /// Polls the ring on this thread until `done`, if no other thread does. Returns whether it is done. What is small
    /// may be there `soon`: sooner than this thread could be woken.
    fn poll_until(&self, until: Option<Instant>, soon: bool, done: &dyn Fn() -> bool) -> bool;

    /// Says that the buffers of a group are defined.
    fn mark_ready(&self, at: GroupId);

    /// Gives a group up at the peer. Returns whether it was under way.
    fn stop(&self, at: GroupId, why: &str) -> bool;

    /// Says that nothing can land in a group any more.
    fn mark_quiesced(&self, at: GroupId);

    /// Ends the session: every launch under way fails with this.
    fn end(&self, error: TransferError);
}

/// The session of a launch, and what of it does not change. The session owns its launches, so they do not own it.
#[derive(Clone)]
pub struct Carrier {
    /// The session, as long as there is one.
    pub session: Weak<dyn SessionHandle>,
    /// The life at the other end.
    pub peer: Member,
    /// Whether receivers fetch from the memory of senders.
    pub fetches: bool,
}

impl Carrier {
    /// Returns the session, if there still is one.
    pub fn session(&self) -> Option<Arc<dyn SessionHandle>> {
        self.session.upgrade()
    }
}
