//! Transfers between devices of this task: a request names their sends and their receives, and the engine copies the bytes.
//!
//! They are a part of a launch as those with a peer are: with the same reservations, dependencies, limits and cancellation. There is
//! no connection, and so no number of a launch. `io/local_copy.rs` copies. Begin at [`LocalTransfers::new`], then
//! `EngineShared::start_local_copy`.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use super::shared::EngineShared;
use crate::base::error::TransferError;
use crate::base::membership::MemberId;
use crate::io::local_copy::LocalCopy;
use crate::launch::launch_spans::LaunchSpans;
use crate::launch::outcome::Launch;
use crate::launch::peer_launch::{LaunchLimits, PeerLaunch};
use crate::launch::session_handle::LaunchSession;
use crate::memory::{Span, SpanStream};
use crate::protocol::link::launch_definition::DefinitionEntry;

/// The transfers within this task of a prepared request.
pub struct LocalTransfers {
    /// The sends and the receives, in the same order.
    lists: Arc<LaunchSpans>,
    /// The error of every launch, if the layouts of a send and its receive differ.
    mismatch: Option<TransferError>,
}

impl LocalTransfers {
    /// Makes them of the sends and receives of a checked request, each with its number and its bytes; none if there are none.
    pub fn new(mut list: Vec<(DefinitionEntry, u32, Span)>) -> Option<Self> {
        if list.is_empty() {
            return None;
        }
        list.sort_by_key(|(entry, ..)| entry.sort_key());
        // The check of the request has found a receive for each send, so both sides are in the same order.
        let side = |outgoing: bool| list.iter().filter(move |(entry, ..)| entry.outgoing == outgoing);
        let stream =
            |outgoing| SpanStream::new(side(outgoing).map(|(_, number, span)| (*number, span.clone())));
        let mut pairs = side(true).zip(side(false)).map(|((send, ..), (receive, ..))| (send, receive));
        let mismatch = pairs.find(|(send, receive)| !send.has_layout_of(receive));
        let mismatch = mismatch.map(|(send, receive)| TransferError::LayoutMismatch {
            key: send.key,
            here: send.layout_text(),
            there: receive.layout_text(),
        });
        let lists = Arc::new(LaunchSpans { outbound: stream(true), inbound: stream(false) });
        Some(Self { lists, mismatch })
    }

    /// Returns the spans.
    pub const fn lists(&self) -> &Arc<LaunchSpans> {
        &self.lists
    }

    /// Makes the part of a launch.
    pub fn new_part(&self, here: MemberId, launch: &Arc<Launch>, limits: LaunchLimits) -> Arc<PeerLaunch> {
        let carrier = LaunchSession { session: None, peer: here, fetches: false };
        let part = PeerLaunch::new(launch, carrier, &self.lists, limits);
        part.mark_peer_quiescent();
        part
    }

    /// Makes a part known, and fails it if the engine has ended, or if the layouts of a send and its receive differ. The part is
    /// attached to its launch, because a launch counts only the ends of attached parts.
    pub fn register_part(&self, shared: &EngineShared, part: &Arc<PeerLaunch>) {
        shared.local_launches.add(part);
        // The end of the engine either finds the part in the list, or is seen here.
        let ended = shared.closed.load(Ordering::Acquire).then_some(TransferError::Closed);
        if let Some(error) = ended.or_else(|| self.mismatch.clone()) {
            part.fail_locally(error);
        }
    }
}

impl EngineShared {
    /// Copies the bytes of a part whose memory is reserved, unless the part has failed.
    pub(super) fn start_local_copy(&self, part: &Arc<PeerLaunch>) {
        let here = self.here().peer_task();
        LocalCopy::start(&self.io, part, here, self.byte_counters(here));
    }
}
