//! The interface by which a launch calls its *session*: the connection that carries the launch.
//!
//! The session layer, which is higher, implements the interface. Begin at [`SessionHandle`].

use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use crate::base::error::TransferError;
use crate::base::membership::MemberId;
use crate::protocol::link::GroupId;

/// The longest sleep of a waiting thread. It then checks its own time limit, and the frames for which the
/// peer did not wake it.
pub const POLL_INTERVAL: Duration = Duration::from_millis(50);

/// The session that carries a launch, as the launch sees it.
pub trait SessionHandle: Send + Sync {
    /// Adds a waiter for the acknowledgement of sent bytes. From then on acknowledgements wake this side's
    /// threads.
    fn add_send_waiter(&self);

    /// Removes a waiter that was added by [`add_send_waiter`](Self::add_send_waiter).
    fn remove_send_waiter(&self);

    /// Wakes the lanes, so that they check the chunks that they are sending or receiving.
    fn wake_lanes(&self);

    /// Wakes the thread that polls the ring, because the state that it waits for may have changed elsewhere.
    fn wake_poller(&self);

    /// Polls the ring on this thread until `done`, unless another thread polls it. Returns whether it is
    /// done. With `soon` it spins before it sleeps, because a small transfer may complete sooner than the
    /// thread would wake up.
    fn poll_ring_on_this_thread(&self, until: Option<Instant>, soon: bool, done: &dyn Fn() -> bool) -> bool;

    /// Announces to the peer that the buffers of a group are defined.
    fn announce_group_ready(&self, at: GroupId);

    /// Stops a group. Returns whether it was in flight.
    fn stop_group_of_launch(&self, at: GroupId, why: &str) -> bool;

    /// Announces to the peer that no byte of a group can land here any more.
    fn announce_quiescence(&self, at: GroupId);

    /// Ends the session: every launch in flight fails with this error.
    fn end_session(&self, error: TransferError);
}

/// The session of a launch, and its constant properties. The session owns its launches, so a launch refers to
/// it weakly.
#[derive(Clone)]
pub struct LaunchSession {
    /// The session; none of a copy within this task.
    pub session: Option<Weak<dyn SessionHandle>>,
    /// The peer; this task itself of a copy within it.
    pub peer: MemberId,
    /// Whether receivers fetch from the memory of senders.
    pub fetches: bool,
}

impl LaunchSession {
    /// Returns the session, or none if it is gone.
    pub fn session(&self) -> Option<Arc<dyn SessionHandle>> {
        self.session.as_ref()?.upgrade()
    }
}
