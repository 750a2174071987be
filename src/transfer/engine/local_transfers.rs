//! Transfers between devices of this task: a request names their sends and their receives, and the engine copies the bytes.
//!
//! They are a part of a launch as those with a peer are: with the same reservations, dependencies, limits and cancellation. There is
//! no connection, and so no number of a launch. `io/local_copy.rs` copies. Begin at [`LocalTransfers::new`], then
//! `EngineShared::start_local_copy`.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use super::shared::EngineShared;
use crate::base::error::TransferError;
use crate::io::local_copy::LocalCopy;
use crate::launch::launch_spans::LaunchSpans;
use crate::launch::outcome::Launch;
use crate::launch::peer_launch::{LaunchLimits, PeerLaunch};
use crate::launch::session_handle::LaunchSession;
use crate::memory::{Span, SpanStream};
use crate::protocol::link::launch_definition::{DefinitionEntry, LaunchDefinition};
use crate::protocol::link::{DefinitionMismatch, find_definition_mismatch};

/// The transfers within this task of a prepared request.
pub struct LocalTransfers {
    /// The sends and the receives, in the same order.
    lists: Arc<LaunchSpans>,
    /// The error of every launch, if a send and its receive differ.
    mismatch: Option<TransferError>,
}

impl LocalTransfers {
    /// Makes them of the sends and receives of a checked request, each with its number and its bytes; none if there are none.
    pub fn new(mut list: Vec<(DefinitionEntry, u32, Span)>) -> Option<Self> {
        if list.is_empty() {
            return None;
        }
        list.sort_by_key(|(entry, ..)| entry.sort_key());
        let side = |outgoing: bool| list.iter().filter(move |(entry, ..)| entry.outgoing == outgoing);
        let stream =
            |outgoing| SpanStream::new(side(outgoing).map(|(_, number, span)| (*number, span.clone())));
        // Both as their receiver sees them, so that they compare as the lists of two engines do.
        let entry =
            |(entry, ..): &(DefinitionEntry, u32, Span)| DefinitionEntry { outgoing: false, ..*entry };
        let definition = |outgoing| LaunchDefinition::new(side(outgoing).map(entry).collect());
        let (sends, receives) = (definition(true), definition(false));
        let mismatch = (sends.digest != receives.digest).then(|| mismatch_error(&sends, &receives));
        let lists = Arc::new(LaunchSpans { outbound: stream(true), inbound: stream(false) });
        Some(Self { lists, mismatch })
    }

    /// Returns the spans.
    pub const fn lists(&self) -> &Arc<LaunchSpans> {
        &self.lists
    }

    /// Makes the part of a launch.
    pub fn begin_launch(
        &self,
        shared: &EngineShared,
        launch: &Arc<Launch>,
        limits: LaunchLimits,
    ) -> Arc<PeerLaunch> {
        let carrier = LaunchSession { session: None, peer: shared.here(), fetches: false };
        let part = PeerLaunch::new(launch, carrier, &self.lists, limits);
        part.mark_peer_quiescent();
        shared.local_launches.add(&part);
        // The end of the engine either finds the part in the list, or is seen here.
        if shared.closed.load(Ordering::Acquire) {
            part.fail_locally(TransferError::Closed);
        }
        part
    }

    /// Fails a part if a send and its receive differ.
    pub fn fail_if_mismatched(&self, part: &Arc<PeerLaunch>) {
        if let Some(error) = &self.mismatch {
            part.fail_locally(error.clone());
        }
    }
}

/// Returns how the sends and the receives differ.
fn mismatch_error(sends: &LaunchDefinition, receives: &LaunchDefinition) -> TransferError {
    match find_definition_mismatch(sends, receives) {
        DefinitionMismatch::Layout { key, here, there } => TransferError::LayoutMismatch { key, here, there },
        DefinitionMismatch::Order { here, there } => {
            TransferError::OrderMismatch { channel: 0, sequence: 0, here, there }
        }
    }
}

impl EngineShared {
    /// Copies the bytes of a part whose memory is reserved.
    pub(super) fn start_local_copy(&self, part: &Arc<PeerLaunch>) {
        let here = self.here().peer_task();
        LocalCopy::start(&self.io, part, here, self.byte_counters(here));
    }
}
