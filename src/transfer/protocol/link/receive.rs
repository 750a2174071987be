//! Processes the peer's control frames.
//!
//! Data frames do not come here: `stream.rs` places them. Begin at [`Link::receive`].

use std::sync::Arc;

use super::chunks::Outbound;
use super::definition::{Definition, ENTRIES_MAX, ENTRY};
use super::message::{Output, Violation};
use super::schedule::GroupId;
use super::state::{
    EARLY_MAX, FAILED_EARLIER, GroupState, INLINE_MAX, INLINE_PENDING_MAX, Link, REASON_MAX,
    REMOTE_ENTRIES_MAX, Remote, Stop, UNHEARD_MAX, WITHDRAWN_MAX,
};
use crate::protocol::frame::{Header, Kind, flag};

impl<T: Clone> Link<T> {
    /// Processes a control frame.
    ///
    /// # Errors
    /// Returns the [`Violation`] if the peer broke the protocol. The link must not be used any more.
    pub fn receive(&mut self, header: &Header, payload: Vec<u8>) -> Result<(), Violation> {
        if !self.control.accept(header)? {
            return Ok(());
        }
        if self.control.unacknowledged_bytes() > UNHEARD_MAX {
            return Err(Violation("it asks and does not listen"));
        }
        let at = (header.channel, header.sequence);
        match header.kind {
            Kind::Define => self.on_define(header, payload)?,
            Kind::Undefine => {
                if let Some(gone) = self.remote.remove(&header.index) {
                    self.withdrawn.push(gone);
                }
            }
            Kind::Go => self.on_go(header, payload)?,
            Kind::Ready => {
                if let Some(remote) = self.groups.get_mut(&at).and_then(|group| group.remote.as_mut()) {
                    remote.source |= header.has(flag::SOURCE);
                    remote.destination |= header.has(flag::DESTINATION);
                    self.advance(at);
                }
            }
            Kind::Stop => self.on_stop(at, &payload)?,
            Kind::Stopped => self.on_stopped(at),
            Kind::Done => self.on_done(at)?,
            Kind::Push => {
                if let Some(group) = self.groups.get_mut(&at)
                    && group.out == Outbound::Waiting
                {
                    group.out = Outbound::Wanted;
                    self.advance(at);
                }
            }
            Kind::Damaged => self.on_damaged(at, header.index),
            Kind::Lost => self.outputs.push(Output::CloseLane(header.lane)),
            Kind::Have => self.on_have(at, header.lane, header.index, &payload),
            Kind::Ping => self.send(self.header(Kind::Pong), Vec::new()),
            Kind::Unregion => self.outputs.push(Output::Unregion(header.index)),
            Kind::Switch => self.outputs.push(Output::Switched),
            Kind::Leave => self.on_leave()?,
            Kind::Agree => self.on_agree()?,
            Kind::Refuse => self.on_refuse()?,
            Kind::Gone => self.on_gone()?,
            Kind::Stay => self.on_stay()?,
            // The connection processes the memory and descriptors that these frames carry.
            Kind::Ack | Kind::Pong | Kind::Ring | Kind::Region | Kind::Descriptor => {}
            Kind::Data => return Err(Violation("data among control frames")),
        }
        Ok(())
    }

    fn on_define(&mut self, header: &Header, payload: Vec<u8>) -> Result<(), Violation> {
        let mut bytes = match self.partial.take() {
            Some((number, bytes)) if number == header.index => bytes,
            Some(_) => return Err(Violation("a definition was begun and not ended")),
            None => Vec::new(),
        };
        bytes.extend_from_slice(&payload);
        if bytes.len() > ENTRIES_MAX * ENTRY {
            return Err(Violation("a definition is too long"));
        }
        if header.has(flag::MORE) {
            self.partial = Some((header.index, bytes));
            return Ok(());
        }
        let definition = Definition::decode(&bytes).ok_or(Violation("a definition cannot be read"))?;
        self.remote_entries += weight(&definition);
        if self.remote_entries > REMOTE_ENTRIES_MAX || self.withdrawn.len() >= WITHDRAWN_MAX {
            self.forget_withdrawn();
        }
        if self.remote_entries > REMOTE_ENTRIES_MAX {
            return Err(Violation("too many transfers are defined"));
        }
        match self.remote.insert(header.index, Arc::new(definition)) {
            None => Ok(()),
            Some(_) => Err(Violation("a definition was made twice")),
        }
    }

    /// Forgets the withdrawn definitions that no launch uses.
    fn forget_withdrawn(&mut self) {
        let entries = &mut self.remote_entries;
        self.withdrawn.retain(|definition| {
            let used = Arc::strong_count(definition) > 1;
            *entries -= if used { 0 } else { weight(definition) };
            used
        });
    }

    fn on_go(&mut self, header: &Header, payload: Vec<u8>) -> Result<(), Violation> {
        let at = (header.channel, header.sequence);
        let passed = self.numbers.has_passed(at);
        if passed && !self.groups.contains_key(&at) {
            // This side's launch of that number failed before this connection existed.
            let (channel, sequence) = at;
            let why = FAILED_EARLIER.as_bytes().to_vec();
            self.send(Header { channel, sequence, ..self.header(Kind::Stop) }, why);
            return Ok(());
        }
        let definition =
            self.remote.get(&header.index).ok_or(Violation("an unknown definition was launched"))?;
        let inline = header.has(flag::INLINE).then_some(payload);
        if inline
            .as_ref()
            .is_some_and(|bytes| bytes.len() as u64 != definition.received || bytes.len() > INLINE_MAX)
        {
            return Err(Violation("a launch brought other bytes than its definition says"));
        }
        let remote = Remote {
            definition: Arc::clone(definition),
            source: header.has(flag::SOURCE),
            destination: header.has(flag::DESTINATION),
            inline,
        };
        if !passed && self.groups.len() - self.launched >= EARLY_MAX {
            return Err(Violation("too many launches wait for this side's"));
        }
        self.inline_held += usize::from(remote.inline.is_some());
        if self.inline_held > INLINE_PENDING_MAX {
            return Err(Violation("too many launches brought their bytes along"));
        }
        let group = self.groups.entry(at).or_insert_with(GroupState::new);
        if group.remote.replace(remote).is_some() {
            return Err(Violation("a group was launched twice"));
        }
        self.advance(at);
        Ok(())
    }

    fn on_stop(&mut self, at: GroupId, why: &[u8]) -> Result<(), Violation> {
        let passed = self.numbers.has_passed(at);
        if !passed && self.groups.len() - self.launched >= EARLY_MAX {
            return Err(Violation("too many launches were given up before this side's"));
        }
        let why = String::from_utf8_lossy(&why[..why.len().min(REASON_MAX)]).into_owned();
        match self.groups.get_mut(&at) {
            None if passed => self.send_about(Kind::Stopped, at),
            Some(group) if group.local.is_some() => {
                if group.stop.is_some() {
                    // Both sides cancelled it: the peer's `Stop` is the confirmation of this side's.
                    self.on_stopped(at);
                } else {
                    self.inline_held -= group.drop_inline();
                    group.stop = Some(Stop { why: None, quiesced: false, confirmed: true });
                    if let Some(local) = &group.local {
                        self.outputs.push(Output::StoppedByPeer(local.token.clone(), why));
                    }
                }
            }
            _ => {
                let group = self.groups.entry(at).or_insert_with(GroupState::new);
                self.inline_held -= group.drop_inline();
                group.remote = None;
                group.given_up = Some(why);
                self.send_about(Kind::Stopped, at);
            }
        }
        Ok(())
    }

    fn on_stopped(&mut self, at: GroupId) {
        let Some(group) = self.groups.get_mut(&at) else { return };
        let (Some(stop), Some(local)) = (&mut group.stop, &group.local) else { return };
        if !std::mem::replace(&mut stop.confirmed, true) {
            self.outputs.push(Output::StopConfirmed(local.token.clone()));
            if stop.quiesced {
                self.forget(at);
            }
        }
    }

    fn on_done(&mut self, at: GroupId) -> Result<(), Violation> {
        let Some(group) = self.groups.get_mut(&at) else { return Ok(()) };
        let Some(local) = group.local.as_ref().filter(|_| group.stop.is_none()) else { return Ok(()) };
        let early =
            matches!(group.out, Outbound::Waiting | Outbound::Wanted) && !(self.terms.fetch && local.source);
        if early || !group.matched && group.out != Outbound::Inline {
            return Err(Violation("what was not sent is said to be there"));
        }
        if group.out != Outbound::Done {
            self.inline_pending -= usize::from(group.out == Outbound::Inline);
            let fetched = group.out == Outbound::Waiting;
            group.out = Outbound::Done;
            self.outputs.push(Output::Sent(local.token.clone(), fetched));
            self.finish(at);
        }
        Ok(())
    }
}

/// Returns the weight of a definition in the bound of a peer. An empty one counts too, because it takes
/// memory.
fn weight(definition: &Definition) -> usize {
    definition.entries.len() + 1
}
