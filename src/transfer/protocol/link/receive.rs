//! Processes the peer's control frames.
//!
//! `chunk_flow.rs` decides where the chunks of data frames are written. Begin at [`LinkSide::receive_control_frame`].

use std::sync::Arc;

use super::chunk_scheduler::GroupId;
use super::chunks::OutboundStream;
use super::interface::{LinkOutput, ProtocolViolation};
use super::launch_definition::{ENTRIES_MAX, ENTRY, LaunchDefinition};
use super::link_side::{
    EARLY_MAX, FAILED_EARLIER, GroupCancellation, GroupState, INLINE_MAX, INLINE_PENDING_MAX, LinkSide,
    REASON_MAX, REMOTE_ENTRIES_MAX, RemoteLaunch, UNHEARD_MAX, WITHDRAWN_MAX,
};
use crate::protocol::frame::{FrameKind, Header, flag};

/// The most messages of the peer about cliques that wait to be processed.
const CLIQUE_MESSAGES_MAX: usize = 4096;

impl<T: Clone> LinkSide<T> {
    /// Processes a control frame.
    ///
    /// # Errors
    /// Returns the [`ProtocolViolation`] if the peer broke the protocol. The link must not be used any more.
    pub fn receive_control_frame(
        &mut self,
        header: &Header,
        payload: Vec<u8>,
    ) -> Result<(), ProtocolViolation> {
        if !self.control.accept_frame_numbers(header)? {
            return Ok(());
        }
        if self.control.queued_or_unacknowledged_bytes() > UNHEARD_MAX {
            return Err(ProtocolViolation("it asks and does not listen"));
        }
        let at = (header.channel, header.sequence);
        match header.kind {
            FrameKind::Define => self.on_definition_part(header, payload)?,
            FrameKind::Undefine => {
                if let Some(gone) = self.remote.remove(&header.index) {
                    self.withdrawn.push(gone);
                }
            }
            FrameKind::Go => self.on_peer_launch(header, payload)?,
            FrameKind::Ready => {
                if let Some(remote) = self.groups.get_mut(&at).and_then(|group| group.remote.as_mut()) {
                    remote.source |= header.has(flag::SOURCE);
                    remote.destination |= header.has(flag::DESTINATION);
                    self.advance_group(at);
                }
            }
            FrameKind::Stop => self.on_peer_cancel(at, &payload)?,
            FrameKind::Stopped => self.on_cancel_confirmed(at),
            FrameKind::Done => self.on_receipt_confirmed(at)?,
            FrameKind::Push => {
                if let Some(group) = self.groups.get_mut(&at)
                    && group.out == OutboundStream::Waiting
                {
                    group.out = OutboundStream::Wanted;
                    self.advance_group(at);
                }
            }
            FrameKind::Progress => self.on_fetch_progress(at, &payload),
            FrameKind::Clique if !self.terms.pushes_unsourced => {
                return Err(ProtocolViolation("cliques were not agreed on"));
            }
            FrameKind::Clique => {
                if self.clique_messages.len() >= CLIQUE_MESSAGES_MAX {
                    return Err(ProtocolViolation("too many messages about cliques wait"));
                }
                self.clique_messages.push_back(payload);
            }
            FrameKind::Damaged => self.on_resend_request(at, header.index),
            FrameKind::Lost => self.outputs.push(LinkOutput::CloseLane(header.lane)),
            FrameKind::Have => self.on_chunk_report(at, header.lane, header.index, &payload),
            FrameKind::Ping => self.queue_control_frame(self.new_header(FrameKind::Pong), Vec::new()),
            FrameKind::Unregion => self.outputs.push(LinkOutput::Unregion(header.index)),
            FrameKind::Switch => self.outputs.push(LinkOutput::Switched),
            FrameKind::Leave => self.on_leave()?,
            FrameKind::Agree => self.on_leave_agreed()?,
            FrameKind::Refuse => self.on_leave_refused()?,
            FrameKind::Gone => self.on_peer_left()?,
            FrameKind::Stay => self.on_leave_withdrawn()?,
            // The connection processes the memory, descriptors and addresses that these frames carry.
            FrameKind::Ack
            | FrameKind::Pong
            | FrameKind::Ring
            | FrameKind::Region
            | FrameKind::Descriptor
            | FrameKind::FabricAddress
            | FrameKind::FabricRegion
            | FrameKind::FabricReady => {}
            FrameKind::Data => return Err(ProtocolViolation("data among control frames")),
        }
        Ok(())
    }

    fn on_definition_part(&mut self, header: &Header, payload: Vec<u8>) -> Result<(), ProtocolViolation> {
        let mut bytes = match self.partial.take() {
            Some((number, bytes)) if number == header.index => bytes,
            Some(_) => return Err(ProtocolViolation("a definition was begun and not ended")),
            None => Vec::new(),
        };
        bytes.extend_from_slice(&payload);
        if bytes.len() > ENTRIES_MAX * ENTRY {
            return Err(ProtocolViolation("a definition is too long"));
        }
        if header.has(flag::MORE) {
            self.partial = Some((header.index, bytes));
            return Ok(());
        }
        let definition =
            LaunchDefinition::decode(&bytes).ok_or(ProtocolViolation("a definition cannot be read"))?;
        self.remote_entries += definition_weight(&definition);
        if self.remote_entries > REMOTE_ENTRIES_MAX || self.withdrawn.len() >= WITHDRAWN_MAX {
            self.drop_unused_definitions();
        }
        if self.remote_entries > REMOTE_ENTRIES_MAX {
            return Err(ProtocolViolation("too many transfers are defined"));
        }
        match self.remote.insert(header.index, Arc::new(definition)) {
            None => Ok(()),
            Some(_) => Err(ProtocolViolation("a definition was made twice")),
        }
    }

    /// Forgets the withdrawn definitions that no launch uses.
    fn drop_unused_definitions(&mut self) {
        let entries = &mut self.remote_entries;
        self.withdrawn.retain(|definition| {
            let used = Arc::strong_count(definition) > 1;
            *entries -= if used { 0 } else { definition_weight(definition) };
            used
        });
    }

    fn on_peer_launch(&mut self, header: &Header, payload: Vec<u8>) -> Result<(), ProtocolViolation> {
        let at = (header.channel, header.sequence);
        let passed = self.numbers.is_retired(at);
        if passed && !self.groups.contains_key(&at) {
            // This side's launch of that number failed before this connection existed.
            let (channel, sequence) = at;
            let why = FAILED_EARLIER.as_bytes().to_vec();
            self.queue_control_frame(Header { channel, sequence, ..self.new_header(FrameKind::Stop) }, why);
            return Ok(());
        }
        let definition =
            self.remote.get(&header.index).ok_or(ProtocolViolation("an unknown definition was launched"))?;
        let inline = header.has(flag::INLINE).then_some(payload);
        if inline
            .as_ref()
            .is_some_and(|bytes| bytes.len() as u64 != definition.received || bytes.len() > INLINE_MAX)
        {
            return Err(ProtocolViolation("a launch brought other bytes than its definition says"));
        }
        let remote = RemoteLaunch {
            definition: Arc::clone(definition),
            source: header.has(flag::SOURCE),
            destination: header.has(flag::DESTINATION),
            inline,
        };
        if !passed && self.groups.len() - self.launched >= EARLY_MAX {
            return Err(ProtocolViolation("too many launches wait for this side's"));
        }
        self.inline_held += usize::from(remote.inline.is_some());
        if self.inline_held > INLINE_PENDING_MAX {
            return Err(ProtocolViolation("too many launches brought their bytes along"));
        }
        let group = self.groups.entry(at).or_insert_with(GroupState::new);
        if group.remote.replace(remote).is_some() {
            return Err(ProtocolViolation("a group was launched twice"));
        }
        self.advance_group(at);
        Ok(())
    }

    fn on_peer_cancel(&mut self, at: GroupId, why: &[u8]) -> Result<(), ProtocolViolation> {
        let passed = self.numbers.is_retired(at);
        if !passed && self.groups.len() - self.launched >= EARLY_MAX {
            return Err(ProtocolViolation("too many launches were given up before this side's"));
        }
        let why = String::from_utf8_lossy(&why[..why.len().min(REASON_MAX)]).into_owned();
        match self.groups.get_mut(&at) {
            None if passed => self.queue_group_frame(FrameKind::Stopped, at),
            Some(group) if group.local.is_some() => {
                if group.stop.is_some() {
                    // Both sides cancelled it: the peer's `Stop` is the confirmation of this side's.
                    self.on_cancel_confirmed(at);
                } else {
                    self.inline_held -= group.drop_inline_payload();
                    group.stop = Some(GroupCancellation { why: None, quiesced: false, confirmed: true });
                    if let Some(local) = &group.local {
                        self.outputs.push(LinkOutput::StoppedByPeer(local.token.clone(), why));
                    }
                }
            }
            _ => {
                let group = self.groups.entry(at).or_insert_with(GroupState::new);
                self.inline_held -= group.drop_inline_payload();
                group.remote = None;
                group.given_up = Some(why);
                self.queue_group_frame(FrameKind::Stopped, at);
            }
        }
        Ok(())
    }

    fn on_cancel_confirmed(&mut self, at: GroupId) {
        let Some(group) = self.groups.get_mut(&at) else { return };
        let (Some(stop), Some(local)) = (&mut group.stop, &group.local) else { return };
        if !std::mem::replace(&mut stop.confirmed, true) {
            self.outputs.push(LinkOutput::StopConfirmed(local.token.clone()));
            if stop.quiesced {
                self.forget_group(at);
            }
        }
    }

    fn on_fetch_progress(&mut self, at: GroupId, payload: &[u8]) {
        let Ok(bytes) = <[u8; 8]>::try_from(payload).map(u64::from_le_bytes) else { return };
        let Some(group) = self.groups.get(&at) else { return };
        // Only what may be fetched progresses without this side's help.
        let Some(local) = group.local.as_ref().filter(|_| self.terms.fetch && group.stop.is_none()) else {
            return;
        };
        let bytes = bytes.min(local.definition.sent);
        self.outputs.push(LinkOutput::Progress(local.token.clone(), bytes));
    }

    fn on_receipt_confirmed(&mut self, at: GroupId) -> Result<(), ProtocolViolation> {
        let Some(group) = self.groups.get_mut(&at) else { return Ok(()) };
        let Some(local) = group.local.as_ref().filter(|_| group.stop.is_none()) else { return Ok(()) };
        let early = matches!(group.out, OutboundStream::Waiting | OutboundStream::Wanted)
            && !(self.terms.fetch && local.source);
        if early || !group.matched && group.out != OutboundStream::Inline {
            return Err(ProtocolViolation("what was not sent is said to be there"));
        }
        if group.out != OutboundStream::Done {
            self.inline_pending -= usize::from(group.out == OutboundStream::Inline);
            let fetched = group.out == OutboundStream::Waiting;
            group.out = OutboundStream::Done;
            self.outputs.push(LinkOutput::Sent(local.token.clone(), fetched));
            self.forget_if_complete(at);
        }
        Ok(())
    }
}

/// Returns the weight of a definition in the bound of a peer. An empty one counts too, because it takes
/// memory.
fn definition_weight(definition: &LaunchDefinition) -> usize {
    definition.entries.len() + 1
}
