//! Prepared transfers: everything slow is done, launching only queues.

use std::sync::Arc;
use std::time::Duration;

use crate::base::error::{TransferError, TransferKey};
use crate::base::event::Event;
use crate::base::identity::DeviceId;
use crate::base::layout::Layout;
use crate::engine::request::Ticket;
use crate::engine::shared::Core;
use crate::launch::outcome::Launch;
use crate::launch::peer_launch::{Limits, Part, Work, give_up};
use crate::launch::transfer::Transfer;
use crate::memory::Span;
use crate::protocol::link::Class;
use crate::session::connection::Connection;

/// One transfer that is asked for.
#[derive(Debug, Clone)]
pub struct Spec {
    pub(crate) outgoing: bool,
    pub(crate) from: DeviceId,
    pub(crate) to: DeviceId,
    pub(crate) key: TransferKey,
    pub(crate) span: Span,
    pub(crate) layout: Layout,
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
pub struct Options {
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

impl Default for Options {
    fn default() -> Self {
        Self { channel: 0, class: Class::Normal, deadline: None, stall: Duration::from_secs(30) }
    }
}

/// What a prepared transfer does with one peer.
pub(crate) struct Share {
    pub connection: Arc<Connection>,
    pub definition: u32,
    pub work: Arc<Work>,
}

/// Transfers that can be launched, again and again.
///
/// Dropped, it fails what was promised by [`next`](Prepared::next) and never launched.
pub struct Prepared {
    core: Arc<Core>,
    shares: Vec<Share>,
    options: Options,
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
    pub(crate) fn new(core: &Arc<Core>, shares: Vec<Share>, options: Options, count: usize) -> Self {
        let total = |of: fn(&Work) -> u64| shares.iter().map(|share| of(&share.work)).sum();
        let (sent, received) = (total(|work| work.out.total()), total(|work| work.inbound.total()));
        let next = Launch::new(&core.meters, count, sent, received);
        Self { core: Arc::clone(core), shares, options, count, sent, received, next }
    }

    /// How many transfers it has.
    #[must_use]
    pub const fn len(&self) -> usize {
        self.count
    }

    /// Whether it has none.
    #[must_use]
    pub const fn is_empty(&self) -> bool {
        self.count == 0
    }

    /// The transfer that the next launch will be. If there is none, it fails.
    #[must_use]
    pub fn next(&self) -> Transfer {
        Transfer::new(Arc::clone(&self.next), self.core.here().task)
    }

    /// Launches it. It takes its place in the order of its channel now, and begins when all of `dependencies` have
    /// happened: until then its memory may be used otherwise. This thread waits for nothing.
    pub fn launch(&mut self, dependencies: &[Event]) -> Transfer {
        let following = Launch::new(&self.core.meters, self.count, self.sent, self.received);
        let launch = std::mem::replace(&mut self.next, following);
        self.launch_as(launch, dependencies, Vec::new())
    }

    /// Launches it as this launch, with the numbers that were taken for it; where there are none, they are taken now.
    pub(crate) fn launch_as(
        &self,
        launch: Arc<Launch>,
        dependencies: &[Event],
        mut tickets: Vec<Ticket>,
    ) -> Transfer {
        launch.begin();
        let deadline = self.options.deadline.map(|after| launch.began() + after);
        let limits = Limits { deadline, stall: self.options.stall, class: self.options.class };
        let part = |share: &Share| Part::new(&launch, &share.connection, &share.work, limits);
        let parts: Vec<_> = self.shares.iter().map(part).collect();
        let waits: Vec<_> =
            dependencies.iter().filter(|event| event.outcome() != Some(Ok(()))).cloned().collect();
        let refused = match launch.attach(&parts) {
            // Its bytes are the caller's again.
            Some((by, reason)) => Some(TransferError::Cancelled { by, reason }),
            None if waits.is_empty() => {
                parts.iter().find_map(|part| part.reserve().err()).map(TransferError::Memory)
            }
            // Until then the memory belongs to whoever defines it: another transfer that receives into it, say.
            None => None,
        };
        let ready = refused.is_none() && waits.is_empty();
        for (share, part) in self.shares.iter().zip(&parts) {
            let ticket = tickets.iter().position(|ticket| ticket.peer() == share.connection.peer);
            let number = ticket.and_then(|ticket| tickets.swap_remove(ticket).used());
            let at = number.unwrap_or_else(|| share.connection.number(self.options.channel));
            // Even what is refused takes its place: the peer counts launches too, and is told that this one is over.
            if let Err(error) = share.connection.launch(part, share.definition, at, self.options.class, ready)
            {
                part.peer_is_quiet();
                part.fail(error);
            } else if let Some(error) = &refused {
                give_up(part, error.clone());
            } else {
                part.has_begun();
            }
        }
        self.core.watch(&limits);
        if !ready && refused.is_none() {
            begin_when(waits, Arc::clone(&launch), parts);
        }
        Transfer::new(launch, self.core.here().task)
    }
}

/// Declares the parts ready when all events have happened, or gives them up with the first that failed.
fn begin_when(mut waits: Vec<Event>, launch: Arc<Launch>, parts: Vec<Arc<Part>>) {
    let Some(event) = waits.pop() else {
        launch.is_ready();
        for part in parts {
            match (part.reserve(), part.at()) {
                (Ok(()), Some(at)) => part.connection.ready(at),
                (Ok(()), None) => {}
                (Err(error), _) => give_up(&part, error.into()),
            }
        }
        return;
    };
    event.when_over(move |outcome| match outcome {
        Ok(()) => begin_when(waits, launch, parts),
        Err(why) => {
            for part in &parts {
                give_up(part, TransferError::Dependency(why.clone()));
            }
        }
    });
}

impl Drop for Prepared {
    fn drop(&mut self) {
        self.next.fail_all(&TransferError::Dropped);
        for share in &self.shares {
            share.connection.undefine(share.definition);
        }
    }
}
