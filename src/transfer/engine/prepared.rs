//! Prepared transfers: everything slow is done, a launch only queues.
//!
//! It does not know how connections are made. Begin at [`Prepared::launch`]. From the second launch on, the only
//! system calls are those that move bytes and wake threads (`tests/transfer/calls.rs` observes every one).
//!
//! - A launch takes its number when it is requested, so the order of launches is the order of the calls on every
//!   rank, whatever becomes ready first. Dependencies hold back its bytes, not its number.
//! - A launch that is refused here still takes its number and is given up at the peer: the peer counts launches
//!   too, and the sides would be one apart for ever.
//! - The memory of a launch is reserved when all its dependencies have completed. Until then it belongs to the
//!   transfer that defines it.

use std::sync::Arc;
use std::time::Duration;

use super::shared::EngineShared;
use super::ticket::Ticket;
use crate::base::error::TransferError;
use crate::base::event::Event;
use crate::base::identity::DeviceId;
use crate::base::key::TransferKey;
use crate::base::layout::Layout;
use crate::launch::io_lists::IoLists;
use crate::launch::outcome::{Launch, LaunchPart};
use crate::launch::peer_launch::{LaunchLimits, PeerLaunch, give_up};
use crate::launch::transfer::Transfer;
use crate::memory::Span;
use crate::protocol::link::Class;
use crate::session::connection::Connection;

/// One transfer that is asked for.
#[derive(Debug, Clone)]
pub struct Spec {
    pub(super) outgoing: bool,
    pub(super) from: DeviceId,
    pub(super) to: DeviceId,
    pub(super) key: TransferKey,
    pub(super) span: Span,
    pub(super) layout: Layout,
}

impl Spec {
    /// Sends a span from a device of this task to one of another, with the layout that the span has.
    #[must_use]
    pub fn send(span: Span, from: DeviceId, to: DeviceId, key: TransferKey) -> Self {
        let layout = span.layout();
        Self { outgoing: true, from, to, key, span, layout }
    }

    /// Receives into a span of a device of this task what one of another sends, with the layout that the span has.
    #[must_use]
    pub fn receive(span: Span, from: DeviceId, to: DeviceId, key: TransferKey) -> Self {
        let layout = span.layout();
        Self { outgoing: false, from, to, key, span, layout }
    }

    /// Says what the bytes are; the other side has to say the same. It must take as many bytes as the span has.
    #[must_use]
    pub fn with_layout(mut self, layout: Layout) -> Self {
        self.layout = layout;
        self
    }
}

/// How a request is carried out.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LaunchOptions {
    /// Launches are matched in their order on a channel; threads that launch independently use channels of their own.
    pub channel: u32,
    /// How urgent it is.
    pub class: Class,
    /// It must be done so long after the launch.
    pub deadline: Option<Duration>,
    /// It fails when nothing has moved for so long after both sides have launched, and when nothing has been heard of
    /// the peer for so long.
    pub stall: Duration,
}

impl Default for LaunchOptions {
    fn default() -> Self {
        Self { channel: 0, class: Class::Normal, deadline: None, stall: Duration::from_secs(30) }
    }
}

/// What a prepared transfer does with one peer.
pub struct PreparedPeer {
    /// Its connection.
    pub connection: Arc<Connection>,
    /// The number of its definition.
    pub definition: u32,
    /// What is moved.
    pub lists: Arc<IoLists>,
}

/// Transfers that can be launched, again and again.
///
/// Dropped, it fails what was promised by [`next`](Prepared::next) and never launched.
pub struct Prepared {
    shared: Arc<EngineShared>,
    peers: Vec<PreparedPeer>,
    options: LaunchOptions,
    count: usize,
    sent: u64,
    received: u64,
    next: Arc<Launch>,
}

impl std::fmt::Debug for Prepared {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Prepared").field("count", &self.count).finish_non_exhaustive()
    }
}

impl Prepared {
    pub(super) fn new(
        shared: &Arc<EngineShared>,
        peers: Vec<PreparedPeer>,
        options: LaunchOptions,
        count: usize,
    ) -> Self {
        let total = |of: fn(&IoLists) -> u64| peers.iter().map(|peer| of(&peer.lists)).sum();
        let (sent, received) = (total(|lists| lists.outbound.total()), total(|lists| lists.inbound.total()));
        let next = Launch::new(&shared.meters, count, sent, received);
        Self { shared: Arc::clone(shared), peers, options, count, sent, received, next }
    }

    /// Returns how many transfers it has.
    #[must_use]
    pub const fn len(&self) -> usize {
        self.count
    }

    /// Returns whether it has none.
    #[must_use]
    pub const fn is_empty(&self) -> bool {
        self.count == 0
    }

    /// Returns the transfer that the next launch will be. If there is none, it fails.
    #[must_use]
    pub fn next(&self) -> Transfer {
        Transfer::new(Arc::clone(&self.next), self.shared.here().task)
    }

    /// Launches it. It takes its place in the order of its channel now, and begins when all of `dependencies` have
    /// happened: until then its memory may be used otherwise. This thread waits for nothing.
    pub fn launch(&mut self, dependencies: &[Event]) -> Transfer {
        let following = Launch::new(&self.shared.meters, self.count, self.sent, self.received);
        let launch = std::mem::replace(&mut self.next, following);
        self.launch_as(launch, dependencies, Vec::new())
    }

    /// Launches it as this launch, with the numbers that were taken for it; where there are none, they are taken now.
    pub(super) fn launch_as(
        &self,
        launch: Arc<Launch>,
        dependencies: &[Event],
        mut tickets: Vec<Ticket>,
    ) -> Transfer {
        launch.begin();
        let deadline = self.options.deadline.map(|after| launch.began() + after);
        let limits = LaunchLimits { deadline, stall: self.options.stall, class: self.options.class };
        let peer_launch =
            |peer: &PreparedPeer| PeerLaunch::new(&launch, peer.connection.carrier(), &peer.lists, limits);
        let launches: Vec<_> = self.peers.iter().map(peer_launch).collect();
        let waits: Vec<_> =
            dependencies.iter().filter(|event| event.outcome() != Some(Ok(()))).cloned().collect();
        let refused = match launch.attach(launches.iter().map(PeerLaunch::as_part).collect()) {
            // Its bytes are the caller's again.
            Some((by, reason)) => Some(TransferError::Cancelled { by, reason }),
            None if waits.is_empty() => {
                launches.iter().find_map(|launch| launch.reserve().err()).map(TransferError::Memory)
            }
            // Until then the memory belongs to what defines it: another transfer that receives into it, say.
            None => None,
        };
        let ready = refused.is_none() && waits.is_empty();
        for (peer, peer_launch) in self.peers.iter().zip(&launches) {
            let ticket = tickets.iter().position(|ticket| ticket.peer() == peer.connection.peer);
            let number = ticket.and_then(|ticket| tickets.swap_remove(ticket).take_number());
            let at = number.unwrap_or_else(|| peer.connection.take_number(self.options.channel));
            // Even what is refused takes its place: the peer counts launches too, and is told that this one is over.
            let launched =
                peer.connection.launch(peer_launch, peer.definition, at, self.options.class, ready);
            if let Err(error) = launched {
                peer_launch.mark_peer_quiet();
                peer_launch.fail(error);
            } else if let Some(error) = &refused {
                give_up(peer_launch, error.clone());
            } else {
                peer_launch.stop_if_failed();
            }
        }
        self.shared.watch(&limits);
        if !ready && refused.is_none() {
            begin_when(waits, Arc::clone(&launch), launches);
        }
        Transfer::new(launch, self.shared.here().task)
    }
}

/// Declares the launches ready when all events have happened, or gives them up with the first that failed.
fn begin_when(mut waits: Vec<Event>, launch: Arc<Launch>, launches: Vec<Arc<PeerLaunch>>) {
    let Some(event) = waits.pop() else {
        launch.mark_ready();
        for peer_launch in launches {
            match (peer_launch.reserve(), peer_launch.group()) {
                (Ok(()), Some(at)) => {
                    if let Some(session) = peer_launch.session() {
                        session.mark_ready(at);
                    }
                }
                (Ok(()), None) => {}
                (Err(error), _) => give_up(&peer_launch, error.into()),
            }
        }
        return;
    };
    event.when_over(move |outcome| match outcome {
        Ok(()) => begin_when(waits, launch, launches),
        Err(why) => {
            for peer_launch in &launches {
                give_up(peer_launch, TransferError::Dependency(why.clone()));
            }
        }
    });
}

impl Drop for Prepared {
    fn drop(&mut self) {
        self.next.fail_all(&TransferError::Dropped);
        for peer in &self.peers {
            peer.connection.undefine(peer.definition);
        }
    }
}
