//! A place in the order of a channel, taken before there is a connection.
//!
//! It launches nothing: the launch uses the number up. Without tickets, requests made before there are
//! connections would be matched in the order in which the connections come, which differs on the two sides. A
//! ticket that is dropped unused closes its number and tells the peer. Begin at [`Ticket::take`].

use std::sync::Arc;

use super::shared::EngineShared;
use crate::base::identity::Member;
use crate::protocol::link::{GroupId, Numbers};

/// A place in the order of a channel with a peer, for a launch that may have no connection yet. A ticket that
/// is dropped unused tells the peer that no launch comes.
pub struct Ticket {
    shared: Arc<EngineShared>,
    numbers: Numbers,
    peer: Member,
    at: Option<GroupId>,
}

impl Ticket {
    /// Takes the next place.
    pub(super) fn take(shared: &Arc<EngineShared>, peer: Member, channel: u32) -> Self {
        let numbers = shared.numbers(peer);
        let at = Some(numbers.take(channel));
        Self { shared: Arc::clone(shared), numbers, peer, at }
    }

    /// Returns the peer.
    pub(super) const fn peer(&self) -> Member {
        self.peer
    }

    /// Returns the number, for a launch that is made now.
    pub(super) fn take_number(mut self) -> Option<GroupId> {
        self.at.take()
    }
}

impl Drop for Ticket {
    fn drop(&mut self) {
        if let Some(at) = self.at {
            // The number is closed first, so that a launch of the peer either finds it closed or is found by
            // `withdraw`.
            self.numbers.close(at);
            self.shared.withdraw(self.peer, at);
        }
    }
}
