//! One side of a link: when a group begins, ends, or is given up.
//!
//! `receive.rs` processes the frames of the peer. Begin at [`Link::launch`].

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use super::chunks::{Inbound, Outbound};
use super::control::Control;
use super::definition::{Definition, DefinitionEntry, ENTRY};
use super::message::{Difference, Frame, Launching, Output, Terms};
use super::numbers::Numbers;
use super::schedule::{Class, GroupId, Schedule};
use crate::base::identity::Member;
use crate::protocol::frame::{Header, Kind, flag};

/// The most launches of this side that may be under way on one link.
pub const LAUNCHES_MAX: usize = 4096;
/// The most groups of the peer that wait for this side's launch, those that it gave up again among them.
pub(super) const EARLY_MAX: usize = 16 * LAUNCHES_MAX;
/// The most transfers in all definitions of a peer.
pub(super) const REMOTE_ENTRIES_MAX: usize = 1 << 20;
/// Withdrawn definitions are looked through when there are so many.
pub(super) const WITHDRAWN_MAX: usize = 1024;
/// Groups that send no more than this send it with their `Go`.
pub const INLINE_MAX: usize = 8 << 10;
/// The most groups that were sent inline and not yet acknowledged: what a peer keeps for launches that have not come.
pub(super) const INLINE_PENDING_MAX: usize = 256;
/// The most bytes that wait to be said when something comes that asks for more of them. A peer that asks and does not
/// listen is not served on and on.
pub(super) const UNHEARD_MAX: usize = 256 << 20;
/// The longest reason that is passed on.
pub(super) const REASON_MAX: usize = 1024;

/// Why a launch is stopped whose counterpart was over before it came.
pub(super) const FAILED_EARLIER: &str = "the other side's launch of the same number failed earlier";

/// What this side launched.
pub(super) struct Local<T> {
    pub(super) token: T,
    pub(super) definition: Arc<Definition>,
    pub(super) class: Class,
    pub(super) source: bool,
    pub(super) destination: bool,
}

/// What the other side launched.
pub(super) struct Remote {
    pub(super) definition: Arc<Definition>,
    pub(super) source: bool,
    pub(super) destination: bool,
    pub(super) inline: Option<Vec<u8>>,
}

/// A group that is being given up.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Stop {
    /// Why this side gave it up; none if the peer did, and waits for `Stopped`.
    pub(super) why: Option<String>,
    /// Nothing can land here any more, and the peer was told.
    pub(super) quiesced: bool,
    /// The peer has said the same.
    pub(super) confirmed: bool,
}

pub(super) struct GroupState<T> {
    pub(super) local: Option<Local<T>>,
    pub(super) remote: Option<Remote>,
    /// Why the peer gave it up before this side launched it.
    pub(super) given_up: Option<String>,
    pub(super) stop: Option<Stop>,
    pub(super) matched: bool,
    pub(super) out: Outbound,
    pub(super) inbound: Inbound,
}

impl<T> GroupState<T> {
    pub(super) const fn new() -> Self {
        Self {
            local: None,
            remote: None,
            given_up: None,
            stop: None,
            matched: false,
            out: Outbound::Waiting,
            inbound: Inbound::Waiting,
        }
    }

    /// Lets go of what came inline; how many of such there were.
    pub(super) fn drop_inline(&mut self) -> usize {
        usize::from(self.remote.as_mut().and_then(|remote| remote.inline.take()).is_some())
    }
}

/// What uses a link, and what was said about its end.
#[derive(Debug, Default)]
pub struct Departure {
    /// How many requests are about to prepare something on it.
    pub(super) kept: usize,
    /// This side asked, and has no answer.
    pub(super) asked: bool,
    /// This side agreed, and knows of no decision.
    pub(super) agreed: bool,
    /// This side has said that it is over.
    pub(super) gone: bool,
}

/// One side of a link. `T` names a launch of the caller's.
pub struct Link<T> {
    pub(super) me: Member,
    pub(super) peer: Member,
    pub(super) terms: Terms,
    pub(super) definitions: HashMap<u32, Arc<Definition>>,
    pub(super) next_definition: u32,
    pub(super) remote: HashMap<u32, Arc<Definition>>,
    /// Definitions that the peer has withdrawn, as far as launches of them are still here.
    pub(super) withdrawn: Vec<Arc<Definition>>,
    pub(super) remote_entries: usize,
    pub(super) partial: Option<(u32, Vec<u8>)>,
    pub(super) numbers: Numbers,
    pub(super) groups: BTreeMap<GroupId, GroupState<T>>,
    pub(super) launched: usize,
    pub(super) inline_pending: usize,
    /// Groups that the peer sent inline, and whose bytes are not yet in place.
    pub(super) inline_held: usize,
    pub(super) schedule: Schedule,
    pub(super) control: Control,
    pub(super) departure: Departure,
    /// Lists were found to differ since the ring was last filled.
    pub(super) differed: bool,
    pub(super) outputs: Vec<Output<T>>,
}

impl<T: Clone> Link<T> {
    /// Makes a link of two members, as they agreed on it.
    pub fn new(me: Member, peer: Member, terms: Terms, numbers: Numbers) -> Self {
        Self {
            me,
            peer,
            terms,
            definitions: HashMap::new(),
            next_definition: 1,
            remote: HashMap::new(),
            withdrawn: Vec::new(),
            remote_entries: 0,
            partial: None,
            numbers,
            groups: BTreeMap::new(),
            launched: 0,
            inline_pending: 0,
            inline_held: 0,
            schedule: Schedule::default(),
            control: Control::new(!terms.lasting),
            departure: Departure::default(),
            differed: false,
            outputs: Vec::new(),
        }
    }

    /// Returns what there is to do since the last call.
    pub fn outputs(&mut self) -> Vec<Output<T>> {
        std::mem::take(&mut self.outputs)
    }

    pub(super) fn header(&self, kind: Kind) -> Header {
        Header::new(kind, self.me, self.peer)
    }

    pub(super) fn send(&mut self, header: Header, payload: Vec<u8>) {
        self.control.push(Frame { header: Header { len: payload.len() as u32, ..header }, payload });
    }

    pub(super) fn send_about(&mut self, kind: Kind, (channel, sequence): GroupId) {
        self.send(Header { channel, sequence, ..self.header(kind) }, Vec::new());
    }

    /// Makes a list of transfers known to the peer. It is launched by the number that is returned.
    pub fn define(&mut self, definition: Definition) -> u32 {
        const PART: usize = 256 * ENTRY;
        let number = self.next_definition;
        self.next_definition += 1;
        let bytes = definition.encode();
        let mut parts = bytes.chunks(PART).peekable();
        while let Some(part) = parts.next() {
            let flags = if parts.peek().is_some() { flag::MORE } else { 0 };
            self.send(Header { flags, index: number, ..self.header(Kind::Define) }, part.to_vec());
        }
        self.definitions.insert(number, Arc::new(definition));
        number
    }

    /// Forgets a list. Launches of it that are under way go on.
    pub fn undefine(&mut self, number: u32) {
        if self.definitions.remove(&number).is_some() {
            self.send(Header { index: number, ..self.header(Kind::Undefine) }, Vec::new());
        }
    }

    /// Tells the peer of memory that it may map. The descriptor goes with the frame.
    pub fn share(&mut self, region: u32, len: u64) {
        self.send(Header { index: region, sequence: len, ..self.header(Kind::Region) }, Vec::new());
    }

    /// Tells the peer that the memory goes.
    pub fn unshare(&mut self, region: u32) {
        self.send(Header { index: region, ..self.header(Kind::Unregion) }, Vec::new());
    }

    /// Offers the peer a ring for its control frames. The descriptors go with the frame.
    pub fn offer_ring(&mut self) {
        self.send(self.header(Kind::Ring), Vec::new());
    }

    /// Moves to the ring that the peer offered.
    pub fn switch(&mut self) {
        self.send(self.header(Kind::Switch), Vec::new());
    }

    /// Asks whether the peer lives.
    pub fn ping(&mut self) {
        self.send(self.header(Kind::Ping), Vec::new());
    }

    /// Returns whether a launch that sends so many bytes should bring them along.
    pub fn inlines(&self, bytes: u64) -> bool {
        bytes > 0 && bytes <= INLINE_MAX as u64 && self.inline_pending < INLINE_PENDING_MAX
    }

    /// Launches a definition as a group of its channel, and returns whether it did: not if too many are under way.
    pub fn launch(&mut self, launching: Launching<T>) -> bool {
        let Launching { token, definition: number, at, class, source, destination, inline } = launching;
        let (channel, sequence) = at;
        let definition = self.definitions.get(&number).filter(|_| self.launched < LAUNCHES_MAX);
        let Some(definition) = definition.cloned() else {
            self.withdraw(at, "too many launches were under way on the other side");
            return false;
        };
        self.numbers.close(at);
        let group = self.groups.entry(at).or_insert_with(GroupState::new);
        if let Some(why) = group.given_up.take() {
            // It was over before it began; the peer knows, and does not wait for a `Go`.
            self.inline_held -= group.drop_inline();
            self.groups.remove(&at);
            self.outputs.push(Output::StoppedByPeer(token, why));
            return true;
        }
        let mut flags = if source { flag::SOURCE } else { 0 };
        flags |= if destination { flag::DESTINATION } else { 0 };
        if inline.is_some() {
            flags |= flag::INLINE;
            group.out = Outbound::Inline;
            self.inline_pending += 1;
        }
        group.local = Some(Local { token, definition, class, source, destination });
        self.launched += 1;
        let header = self.header(Kind::Go);
        let class = class as u8;
        self.send(
            Header { flags, class, channel, sequence, index: number, ..header },
            inline.unwrap_or_default(),
        );
        self.advance(at);
        true
    }

    /// Says that nothing is launched with a number that was taken. The peer is told, whether it has launched its own or
    /// will.
    pub fn withdraw(&mut self, at: GroupId, why: &str) {
        self.numbers.close(at);
        let given_up = self.groups.remove(&at).is_some_and(|mut early| {
            self.inline_held -= early.drop_inline();
            early.given_up.is_some()
        });
        if !given_up {
            let (channel, sequence) = at;
            self.send(Header { channel, sequence, ..self.header(Kind::Stop) }, why.as_bytes().to_vec());
        }
    }

    /// Says that what a launch sends is defined, or that what it receives into may be written.
    pub fn ready(&mut self, at: GroupId, source: bool, destination: bool) {
        let Some(group) = self.groups.get_mut(&at) else { return };
        let Some(local) = group.local.as_mut().filter(|_| group.stop.is_none()) else { return };
        let (source, destination) = (source && !local.source, destination && !local.destination);
        local.source |= source;
        local.destination |= destination;
        let flags = (u8::from(source) * flag::SOURCE) | (u8::from(destination) * flag::DESTINATION);
        if flags != 0 {
            let (channel, sequence) = at;
            self.send(Header { flags, channel, sequence, ..self.header(Kind::Ready) }, Vec::new());
            self.advance(at);
        }
    }

    /// Says that what was to be received is in place.
    pub fn received(&mut self, at: GroupId) {
        let Some(group) = self.groups.get_mut(&at) else { return };
        if group.stop.is_none() && group.matched && group.inbound != Inbound::Done {
            group.inbound = Inbound::Done;
            self.send_about(Kind::Done, at);
            self.finish(at);
        }
    }

    /// Asks for what was to be fetched to be sent: it cannot be fetched, and nothing of it has been.
    pub fn push_instead(&mut self, at: GroupId) {
        let Some(group) = self.groups.get_mut(&at) else { return };
        let Some(local) = group.local.as_ref().filter(|_| group.inbound == Inbound::Fetching) else { return };
        group.inbound = Inbound::landing(local.definition.received, self.terms.chunk);
        self.send_about(Kind::Push, at);
    }

    /// Gives a group up. Returns whether it was under way, or is being given up already: if so, let nothing land any
    /// more and call [`Link::quiesced`], which tells the peer; [`Output::StopConfirmed`] follows when nothing can land
    /// there either.
    pub fn stop(&mut self, at: GroupId, why: &str) -> bool {
        let Some(group) = self.groups.get_mut(&at).filter(|group| group.local.is_some()) else {
            return false;
        };
        if group.stop.is_none() {
            let cut = (0..=REASON_MAX.min(why.len())).rev().find(|at| why.is_char_boundary(*at)).unwrap_or(0);
            self.inline_held -= group.drop_inline();
            group.stop = Some(Stop { why: Some(why[..cut].to_owned()), quiesced: false, confirmed: false });
        }
        true
    }

    /// Says that nothing can land any more in a group that is given up, and tells the peer. If the peer has said the
    /// same, the group is forgotten, and its launch returned: nothing more will be said of it.
    pub fn quiesced(&mut self, at: GroupId) -> Option<T> {
        let stop = self.groups.get_mut(&at)?.stop.as_mut()?;
        if std::mem::replace(&mut stop.quiesced, true) {
            return None;
        }
        let (why, over) = (stop.why.take(), stop.confirmed);
        let (channel, sequence) = at;
        match why {
            Some(why) => self.send(Header { channel, sequence, ..self.header(Kind::Stop) }, why.into_bytes()),
            None => self.send_about(Kind::Stopped, at),
        }
        if over { self.remove_group(at) } else { None }
    }

    pub(super) fn forget(&mut self, at: GroupId) {
        let over = self.remove_group(at);
        self.outputs.extend(over.map(Output::Over));
    }

    pub(super) fn remove_group(&mut self, at: GroupId) -> Option<T> {
        let mut group = self.groups.remove(&at)?;
        let local = group.local.take()?;
        self.launched -= 1;
        self.inline_held -= group.drop_inline();
        self.inline_pending -= usize::from(group.out == Outbound::Inline);
        Some(local.token)
    }

    /// Does what can be done in a group now.
    pub(super) fn advance(&mut self, at: GroupId) {
        let Some(group) = self.groups.get_mut(&at) else { return };
        let (Some(local), Some(remote)) = (&mut group.local, &mut group.remote) else { return };
        if group.stop.is_some() {
            return;
        }
        if !group.matched {
            if local.definition.digest != remote.definition.digest {
                let difference = difference(&local.definition, &remote.definition);
                self.outputs.push(Output::Differ(local.token.clone(), difference));
                self.differed = true;
                self.forget(at);
                return;
            }
            group.matched = true;
            self.outputs.push(Output::Matched(local.token.clone()));
        }
        if local.definition.sent == 0 && group.out != Outbound::Done {
            group.out = Outbound::Done;
            self.outputs.push(Output::Sent(local.token.clone(), false));
        }
        let pushes = !self.terms.fetch || group.out == Outbound::Wanted;
        if matches!(group.out, Outbound::Waiting | Outbound::Wanted)
            && pushes
            && local.source
            && remote.destination
        {
            group.out = Outbound::pushing(local.definition.sent, self.terms.chunk);
            self.schedule.add(local.class, at);
        }
        if group.inbound == Inbound::Waiting {
            if local.definition.received == 0 {
                group.inbound = Inbound::Done;
            } else if local.destination {
                if let Some(bytes) = remote.inline.take() {
                    self.inline_held -= 1;
                    group.inbound = Inbound::Fetching;
                    self.outputs.push(Output::Inline(local.token.clone(), bytes));
                } else if !self.terms.fetch {
                    group.inbound = Inbound::landing(local.definition.received, self.terms.chunk);
                } else if remote.source {
                    group.inbound = Inbound::Fetching;
                    self.outputs.push(Output::Fetch(local.token.clone(), Arc::clone(&remote.definition)));
                }
            }
        }
        self.finish(at);
    }

    /// Forgets a group that has no more to do.
    pub(super) fn finish(&mut self, at: GroupId) {
        let done = |group: &GroupState<T>| {
            group.stop.is_none() && group.out == Outbound::Done && group.inbound == Inbound::Done
        };
        if self.groups.get(&at).is_some_and(done) {
            self.forget(at);
        }
    }

    /// Takes every launch that is under way, for when the link itself is over.
    pub fn drain(&mut self) -> Vec<T> {
        self.schedule = Schedule::default();
        let groups = std::mem::take(&mut self.groups);
        self.launched = 0;
        self.inline_held = 0;
        groups.into_values().filter_map(|group| group.local.map(|local| local.token)).collect()
    }

    /// Returns how many launches of this side are under way.
    pub const fn launched(&self) -> usize {
        self.launched
    }
}

fn difference(here: &Definition, there: &Definition) -> Difference {
    let same = here.entries.len() == there.entries.len()
        && here
            .entries
            .iter()
            .zip(&there.entries)
            .all(|(a, b)| a.order() == b.order() && a.outgoing == b.outgoing);
    let told = |entry: &DefinitionEntry| format!("{} bytes of layout {}", entry.bytes, entry.fingerprint);
    let layout = here
        .entries
        .iter()
        .zip(&there.entries)
        .find(|(a, b)| (a.bytes, a.fingerprint) != (b.bytes, b.fingerprint));
    match layout {
        Some((a, b)) if same => Difference::Layout { key: a.key, here: told(a), there: told(b) },
        _ => Difference::Order { here: here.keys(), there: there.keys() },
    }
}
