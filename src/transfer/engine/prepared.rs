//! Prepared transfers: all slow work is done, and a launch only queues frames.
//!
//! It makes no connections. Begin at [`Prepared::launch`]. From the second launch on, the only system calls
//! are those that move bytes and wake threads (`tests/transfer/calls.rs` observes each one).
//!
//! - A launch takes its number when it is requested, so the order of launches is the order of the calls on
//!   every rank, whatever becomes ready first. Dependencies delay its bytes, not its number.
//! - A launch that this side refuses still takes its number and is stopped at the peer, because the peer
//!   counts launches too and the sides would be one apart for ever.
//! - The memory of a launch is reserved when all its dependencies have completed. Until then the transfer
//!   that defines it uses it.

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

/// A request of one transfer.
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
    /// Creates a send of a span from a device of this task to a device of another task, with the span's
    /// layout.
    #[must_use]
    pub fn send(span: Span, from: DeviceId, to: DeviceId, key: TransferKey) -> Self {
        let layout = span.layout();
        Self { outgoing: true, from, to, key, span, layout }
    }

    /// Creates a receive into a span of a device of this task from a device of another task, with the span's
    /// layout.
    #[must_use]
    pub fn receive(span: Span, from: DeviceId, to: DeviceId, key: TransferKey) -> Self {
        let layout = span.layout();
        Self { outgoing: false, from, to, key, span, layout }
    }

    /// Sets the layout of the bytes. The other side must set the same one, and its size must be the span's.
    #[must_use]
    pub fn with_layout(mut self, layout: Layout) -> Self {
        self.layout = layout;
        self
    }
}

/// The options of a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LaunchOptions {
    /// The channel. Launches are matched by their order on a channel; threads that launch independently need
    /// channels of their own.
    pub channel: u32,
    /// The priority class.
    pub class: Class,
    /// The time after the launch by which it must be complete; else it fails.
    pub deadline: Option<Duration>,
    /// The longest time without progress after both sides have launched, and the longest silence of the peer.
    /// If it passes, the launch fails.
    pub stall: Duration,
}

impl Default for LaunchOptions {
    fn default() -> Self {
        Self { channel: 0, class: Class::Normal, deadline: None, stall: Duration::from_secs(30) }
    }
}

/// The part of a prepared transfer that concerns one peer.
pub struct PreparedPeer {
    /// The connection.
    pub connection: Arc<Connection>,
    /// The number of its definition.
    pub definition: u32,
    /// The spans of both directions.
    pub lists: Arc<IoLists>,
}

/// Prepared transfers, which can be launched any number of times.
///
/// Dropping it fails the transfer that [`next`](Prepared::next) returned, if that was never launched.
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

    /// Returns the number of transfers.
    #[must_use]
    pub const fn len(&self) -> usize {
        self.count
    }

    /// Returns whether there are no transfers.
    #[must_use]
    pub const fn is_empty(&self) -> bool {
        self.count == 0
    }

    /// Returns the transfer of the next launch. If there is no next launch, it fails.
    #[must_use]
    pub fn next(&self) -> Transfer {
        Transfer::new(Arc::clone(&self.next), self.shared.here().task)
    }

    /// Launches the transfers. The launch takes its place in the order of its channel now, and begins when
    /// all `dependencies` have completed: until then its memory may be used otherwise. It does not block.
    pub fn launch(&mut self, dependencies: &[Event]) -> Transfer {
        let following = Launch::new(&self.shared.meters, self.count, self.sent, self.received);
        let launch = std::mem::replace(&mut self.next, following);
        self.launch_as(launch, dependencies, Vec::new())
    }

    /// Launches the transfers as `launch`, with the numbers that `tickets` hold; a missing number is taken
    /// now.
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
            // The launch was cancelled already, so the caller may use its bytes.
            Some((by, reason)) => Some(TransferError::Cancelled { by, reason }),
            None if waits.is_empty() => {
                launches.iter().find_map(|launch| launch.reserve().err()).map(TransferError::Memory)
            }
            // Until the dependencies complete, the memory belongs to its producer, for example another
            // transfer that receives into it.
            None => None,
        };
        let ready = refused.is_none() && waits.is_empty();
        for (peer, peer_launch) in self.peers.iter().zip(&launches) {
            let ticket = tickets.iter().position(|ticket| ticket.peer() == peer.connection.peer);
            let number = ticket.and_then(|ticket| tickets.swap_remove(ticket).take_number());
            let at = number.unwrap_or_else(|| peer.connection.take_number(self.options.channel));
            // A refused launch takes its number too: the peer counts launches as well, and is told that this
            // one is over.
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

/// Marks the launches ready when all events have completed, or cancels them with the first one that failed.
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
