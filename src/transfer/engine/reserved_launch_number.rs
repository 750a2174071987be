//! The number of a launch on its channel with one peer. The engine takes the number when the launch is requested,
//! even if there is no connection yet.
//!
//! If numbers were taken only when there is a connection, requests would be matched in the order in which connections
//! are made, and this order may differ between the two sides. A launch consumes its number. If a number is dropped
//! unused, it is retired, and the peer is told that no launch comes. Begin at [`ReservedLaunchNumber::take`].

use std::sync::Arc;

use super::shared::EngineShared;
use crate::base::membership::MemberId;
use crate::protocol::link::{GroupId, LaunchNumbers};

/// A place in the order of a channel with a peer, for a launch that may have no connection yet. A ticket that
/// is dropped unused tells the peer that no launch comes.
pub struct ReservedLaunchNumber {
    shared: Arc<EngineShared>,
    numbers: LaunchNumbers,
    peer: MemberId,
    at: Option<GroupId>,
}

impl ReservedLaunchNumber {
    /// Takes the next place.
    pub(super) fn take(shared: &Arc<EngineShared>, peer: MemberId, channel: u32) -> Self {
        let numbers = shared.launch_numbers(peer);
        let at = Some(numbers.take_next(channel));
        Self { shared: Arc::clone(shared), numbers, peer, at }
    }

    /// Returns the peer.
    pub(super) const fn peer(&self) -> MemberId {
        self.peer
    }

    /// Returns the number, for a launch that is made now.
    pub(super) fn take_launch_number(mut self) -> Option<GroupId> {
        self.at.take()
    }
}

impl Drop for ReservedLaunchNumber {
    fn drop(&mut self) {
        if let Some(at) = self.at {
            // The number is closed first, so that a launch of the peer either finds it closed or is found by
            // `withdraw_launch_number`.
            self.numbers.retire(at);
            self.shared.withdraw_launch_number(self.peer, at);
        }
    }
}
