//! What two engines say to each other, without IO: one side of a link.
//!
//! A launch is the next *group* of its channel on both sides. Each side says `Go` with its list of transfers; when both
//! have, the lists are compared, and the bytes move as soon as what is sent is defined and what is received into may be
//! written. The bytes of a group in one direction are one stream, in the order of the definition, cut into chunks.
//!
//! | file | what it decides |
//! | --- | --- |
//! | `mod.rs` | when a group begins, ends, or is given up |
//! | `control.rs` | that control frames arrive once, in order, over whatever connection there is |
//! | `stream.rs` | which chunks are sent by which lane, landed, lost, sent again |
//! | `schedule.rs` | whose chunk is next |
//! | `definition.rs` | what both sides must agree on |
//! | `leaving.rs` | when a connection that nobody uses may end |
//!
//! Invariants (checked by [`Link::audit`] after every step of the simulation in `tests.rs`):
//! 1. A chunk is landing on one lane at most, and never after it has landed.
//! 2. Nothing lands before both sides' lists were found equal and the receiver's buffers were free to be written.
//! 3. `Stop` and `Stopped` are said only when nothing can land here any more; nothing is accepted for the group
//!    afterwards.
//! 4. A group is forgotten only when neither side waits for anything of it.
//! 5. Every table is within its bound.
//!
//! `leaving.rs` has those of the end of a connection.

mod control;
pub(crate) mod definition;
mod leaving;
mod schedule;
mod stream;
#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, HashMap};
use std::sync::{Arc, Mutex};

use control::Control;
pub use control::{Frame, Urgency};
use definition::Definition;
use leaving::Leaving;
pub use schedule::Class;
use schedule::Schedule;
use stream::{Inbound, Outbound};

use crate::base::identity::Member;
use crate::base::sync::lock;
use crate::protocol::frame::{Header, Kind, flag};

/// The most launches of this side that may be under way on one link.
pub const LAUNCHES_MAX: usize = 4096;
/// The most groups of the peer that wait for this side's launch, those that it gave up again among them.
const EARLY_MAX: usize = 16 * LAUNCHES_MAX;
/// The most transfers in all definitions of a peer.
const REMOTE_ENTRIES_MAX: usize = 1 << 20;
/// Withdrawn definitions are looked through when there are so many.
const WITHDRAWN_MAX: usize = 1024;
/// Groups that send no more than this send it with their `Go`.
pub const INLINE_MAX: usize = 8 << 10;
/// The most groups that were sent inline and not yet acknowledged: what a peer keeps for launches that have not come.
const INLINE_PENDING_MAX: usize = 256;
/// The most bytes that wait to be said when something comes that asks for more of them. A peer that asks and does not
/// listen is not served on and on.
const UNHEARD_MAX: usize = 256 << 20;
/// The longest reason that is passed on.
const REASON_MAX: usize = 1024;

/// Why a launch is stopped whose counterpart was over before it came.
const FAILED_EARLIER: &str = "the other side's launch of the same number failed earlier";

/// A group: its channel and its number on it.
pub type GroupId = (u32, u64);

/// The peer broke the rules; the link cannot go on.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("the peer broke the protocol: {0}")]
pub struct Violation(pub &'static str);

/// What the caller has to do or to know, in order. `T` is the caller's name for its launch.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Output<T> {
    /// Both sides have launched the same transfers.
    Matched(T),
    /// All that is received in the group; call [`Link::received`] when it is in place.
    Inline(T, Vec<u8>),
    /// What is received may be fetched, from the sources that the definition names; then call [`Link::received`], or
    /// [`Link::push_instead`].
    Fetch(T, Arc<Definition>),
    /// The peer has all that was sent; whether it has fetched it.
    Sent(T, bool),
    /// The peer gave the group up, for this reason, and nothing can land there any more. Let nothing land here either,
    /// then call [`Link::quiesced`].
    StoppedByPeer(T, String),
    /// Nothing can land at the peer any more.
    StopConfirmed(T),
    /// The lists differ; the group is over, and nothing has moved.
    Differ(T, Difference),
    /// Nothing more will be said of it.
    Over(T),
    /// The peer has lost this lane: close it, let nothing land from it any more, then call [`Link::lane_closed`].
    CloseLane(u16),
    /// A chunk came damaged for the second time: the group cannot be completed.
    Damaged(T, u32),
    /// The peer does so no more.
    Unregion(u32),
    /// The peer's further control frames are in the ring.
    Switched,
    /// The peer uses the connection that this side asked to end.
    Refused,
    /// Both sides have agreed, and this one has let go of the connection. The peer closes it.
    Left,
    /// The connection that this side agreed to end stays: it may be used again.
    Stays,
    /// Both sides have let go of the connection: send what there is, and close it.
    Ended,
}

/// How the lists of the two sides differ.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Difference {
    /// The same transfer has two layouts: its key, and fingerprint and bytes on both sides.
    Layout {
        /// Its key.
        key: crate::base::key::TransferKey,
        /// On this side.
        here: String,
        /// On the other side.
        there: String,
    },
    /// Other transfers, or another order.
    Order {
        /// The keys of this side.
        here: String,
        /// The keys of the other side.
        there: String,
    },
}

/// The next number of each channel between two lives. It outlives their connections: launches are counted, not those
/// that came through, so the sides stay in step when a connection breaks between two launches. A number is taken when a
/// launch is asked for, and the launch may follow later: when there is a connection, or never.
#[derive(Debug, Clone, Default)]
pub struct Numbers(Arc<Mutex<HashMap<u32, Channel>>>);

#[derive(Debug, Default)]
struct Channel {
    next: u64,
    /// Numbers that are taken and whose launches are still to come.
    open: Vec<u64>,
}

impl Numbers {
    /// The number of a launch that is to come: [`Link::launch`] uses it up, or [`close`](Self::close).
    pub fn take(&self, channel: u32) -> GroupId {
        let mut channels = lock(&self.0);
        let numbers = channels.entry(channel).or_default();
        let sequence = numbers.next;
        numbers.next += 1;
        numbers.open.push(sequence);
        (channel, sequence)
    }

    /// Its launch has come, or does not.
    pub fn close(&self, (channel, sequence): GroupId) {
        if let Some(numbers) = lock(&self.0).get_mut(&channel)
            && let Some(at) = numbers.open.iter().position(|open| *open == sequence)
        {
            numbers.open.swap_remove(at);
        }
    }

    /// Whether this side has launched it, or never will.
    fn has_passed(&self, (channel, sequence): GroupId) -> bool {
        lock(&self.0)
            .get(&channel)
            .is_some_and(|numbers| sequence < numbers.next && !numbers.open.contains(&sequence))
    }
}

/// What this side launched.
struct Local<T> {
    token: T,
    definition: Arc<Definition>,
    class: Class,
    source: bool,
    destination: bool,
}

/// What the other side launched.
struct Remote {
    definition: Arc<Definition>,
    source: bool,
    destination: bool,
    inline: Option<Vec<u8>>,
}

/// A group that is being given up.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Stop {
    /// Why this side gave it up; none if the peer did, and waits for `Stopped`.
    why: Option<String>,
    /// Nothing can land here any more, and the peer was told.
    quiesced: bool,
    /// The peer has said the same.
    confirmed: bool,
}

struct Group<T> {
    local: Option<Local<T>>,
    remote: Option<Remote>,
    /// Why the peer gave it up before this side launched it.
    given_up: Option<String>,
    stop: Option<Stop>,
    matched: bool,
    out: Outbound,
    inbound: Inbound,
}

impl<T> Group<T> {
    const fn new() -> Self {
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
    fn drop_inline(&mut self) -> usize {
        usize::from(self.remote.as_mut().and_then(|remote| remote.inline.take()).is_some())
    }
}

/// How a link works; the same on both sides.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Terms {
    /// Bytes of a chunk.
    pub chunk: u32,
    /// The receiver fetches what is sent; else the sender sends it.
    pub fetch: bool,
    /// The control connection cannot be replaced when it is lost: nothing is kept to be sent again.
    pub lasting: bool,
}

/// What a launch is made of.
#[derive(Debug)]
pub struct Launching<T> {
    /// The caller's name for it.
    pub token: T,
    /// Which definition.
    pub definition: u32,
    /// The number that was taken for it.
    pub at: GroupId,
    /// How urgent.
    pub class: Class,
    /// Whether what is sent is defined.
    pub source: bool,
    /// Whether what is received into may be written.
    pub destination: bool,
    /// All that is sent, if it is small, defined, and [`Link::inlines`].
    pub inline: Option<Vec<u8>>,
}

/// A chunk to be sent.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Push<T> {
    /// Of which launch.
    pub token: T,
    /// Its header, but for checksum and acknowledgement.
    pub header: Header,
    /// Its first byte in the group's stream.
    pub start: u64,
}

/// Where a chunk belongs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Landing<T> {
    /// To this launch, from this byte of the group's stream on.
    At(T, u64),
    /// It overtook the peer's `Go`, which comes by another lane: ask again when [`Output::Matched`] was told.
    Early,
    /// Nowhere (any more).
    Nowhere,
}

/// One side of a link. `T` names a launch of the caller's.
pub struct Link<T> {
    me: Member,
    peer: Member,
    terms: Terms,
    definitions: HashMap<u32, Arc<Definition>>,
    next_definition: u32,
    remote: HashMap<u32, Arc<Definition>>,
    /// Definitions that the peer has withdrawn, as far as launches of them are still here.
    withdrawn: Vec<Arc<Definition>>,
    remote_entries: usize,
    partial: Option<(u32, Vec<u8>)>,
    numbers: Numbers,
    groups: BTreeMap<GroupId, Group<T>>,
    launched: usize,
    inline_pending: usize,
    /// Groups that the peer sent inline, and whose bytes are not yet in place.
    inline_held: usize,
    schedule: Schedule,
    control: Control,
    leaving: Leaving,
    /// Lists were found to differ since the ring was last filled.
    differed: bool,
    outputs: Vec<Output<T>>,
}

impl<T: Clone> Link<T> {
    /// A link of two members, as they agreed on it.
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
            leaving: Leaving::default(),
            differed: false,
            outputs: Vec::new(),
        }
    }

    /// What there is to do since the last call.
    pub fn outputs(&mut self) -> Vec<Output<T>> {
        std::mem::take(&mut self.outputs)
    }

    fn header(&self, kind: Kind) -> Header {
        Header::new(kind, self.me, self.peer)
    }

    fn tell(&mut self, header: Header, payload: Vec<u8>) {
        self.control.push(Frame { header: Header { len: payload.len() as u32, ..header }, payload });
    }

    fn tell_of(&mut self, kind: Kind, (channel, sequence): GroupId) {
        self.tell(Header { channel, sequence, ..self.header(kind) }, Vec::new());
    }

    /// Makes a list of transfers known to the peer. It is launched by the number that is returned.
    pub fn define(&mut self, definition: Definition) -> u32 {
        const PART: usize = 256 * definition::ENTRY;
        let number = self.next_definition;
        self.next_definition += 1;
        let bytes = definition.encode();
        let mut parts = bytes.chunks(PART).peekable();
        while let Some(part) = parts.next() {
            let flags = if parts.peek().is_some() { flag::MORE } else { 0 };
            self.tell(Header { flags, index: number, ..self.header(Kind::Define) }, part.to_vec());
        }
        self.definitions.insert(number, Arc::new(definition));
        number
    }

    /// Forgets a list. Launches of it that are under way go on.
    pub fn undefine(&mut self, number: u32) {
        if self.definitions.remove(&number).is_some() {
            self.tell(Header { index: number, ..self.header(Kind::Undefine) }, Vec::new());
        }
    }

    /// Tells the peer of memory that it may map. The descriptor goes with the frame.
    pub fn share(&mut self, region: u32, len: u64) {
        self.tell(Header { index: region, sequence: len, ..self.header(Kind::Region) }, Vec::new());
    }

    /// Tells the peer that the memory goes.
    pub fn unshare(&mut self, region: u32) {
        self.tell(Header { index: region, ..self.header(Kind::Unregion) }, Vec::new());
    }

    /// Offers the peer a ring for its control frames. The descriptors go with the frame.
    pub fn offer_ring(&mut self) {
        self.tell(self.header(Kind::Ring), Vec::new());
    }

    /// Moves to the ring that the peer offered.
    pub fn switch(&mut self) {
        self.tell(self.header(Kind::Switch), Vec::new());
    }

    /// Asks whether the peer lives.
    pub fn ping(&mut self) {
        self.tell(self.header(Kind::Ping), Vec::new());
    }

    /// Whether a launch that sends so many bytes should bring them along.
    pub fn inlines(&self, bytes: u64) -> bool {
        bytes > 0 && bytes <= INLINE_MAX as u64 && self.inline_pending < INLINE_PENDING_MAX
    }

    /// Launches a definition as a group of its channel. Whether it did: not if too many are under way.
    pub fn launch(&mut self, launching: Launching<T>) -> bool {
        let Launching { token, definition: number, at, class, source, destination, inline } = launching;
        let (channel, sequence) = at;
        let definition = self.definitions.get(&number).filter(|_| self.launched < LAUNCHES_MAX);
        let Some(definition) = definition.cloned() else {
            self.withdraw(at, "too many launches were under way on the other side");
            return false;
        };
        self.numbers.close(at);
        let group = self.groups.entry(at).or_insert_with(Group::new);
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
        self.tell(
            Header { flags, class, channel, sequence, index: number, ..header },
            inline.unwrap_or_default(),
        );
        self.advance(at);
        true
    }

    /// Nothing is launched with a number that was taken: whether it has launched its own or will, the peer is told.
    pub fn withdraw(&mut self, at: GroupId, why: &str) {
        self.numbers.close(at);
        let given_up = self.groups.remove(&at).is_some_and(|mut early| {
            self.inline_held -= early.drop_inline();
            early.given_up.is_some()
        });
        if !given_up {
            let (channel, sequence) = at;
            self.tell(Header { channel, sequence, ..self.header(Kind::Stop) }, why.as_bytes().to_vec());
        }
    }

    /// What a launch sends is defined, or what it receives into may be written.
    pub fn ready(&mut self, at: GroupId, source: bool, destination: bool) {
        let Some(group) = self.groups.get_mut(&at) else { return };
        let Some(local) = group.local.as_mut().filter(|_| group.stop.is_none()) else { return };
        let (source, destination) = (source && !local.source, destination && !local.destination);
        local.source |= source;
        local.destination |= destination;
        let flags = (u8::from(source) * flag::SOURCE) | (u8::from(destination) * flag::DESTINATION);
        if flags != 0 {
            let (channel, sequence) = at;
            self.tell(Header { flags, channel, sequence, ..self.header(Kind::Ready) }, Vec::new());
            self.advance(at);
        }
    }

    /// What was to be received is in place.
    pub fn received(&mut self, at: GroupId) {
        let Some(group) = self.groups.get_mut(&at) else { return };
        if group.stop.is_none() && group.matched && group.inbound != Inbound::Done {
            group.inbound = Inbound::Done;
            self.tell_of(Kind::Done, at);
            self.finish(at);
        }
    }

    /// What was to be fetched cannot be, and nothing has been: asks for it to be sent.
    pub fn push_instead(&mut self, at: GroupId) {
        let Some(group) = self.groups.get_mut(&at) else { return };
        let Some(local) = group.local.as_ref().filter(|_| group.inbound == Inbound::Fetching) else { return };
        group.inbound = Inbound::landing(local.definition.received, self.terms.chunk);
        self.tell_of(Kind::Push, at);
    }

    /// Gives a group up. Whether it was under way, or is being given up already: if so, let nothing land any more and
    /// call [`Link::quiesced`], which tells the peer; [`Output::StopConfirmed`] follows when nothing can land there
    /// either.
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

    /// Nothing can land in a group that is given up any more: tells the peer. If the peer has said the same, the group is
    /// forgotten, and its launch returned: nothing more will be said of it.
    pub fn quiesced(&mut self, at: GroupId) -> Option<T> {
        let stop = self.groups.get_mut(&at)?.stop.as_mut()?;
        if std::mem::replace(&mut stop.quiesced, true) {
            return None;
        }
        let (why, over) = (stop.why.take(), stop.confirmed);
        let (channel, sequence) = at;
        match why {
            Some(why) => self.tell(Header { channel, sequence, ..self.header(Kind::Stop) }, why.into_bytes()),
            None => self.tell_of(Kind::Stopped, at),
        }
        if over { self.let_go(at) } else { None }
    }

    fn forget(&mut self, at: GroupId) {
        let over = self.let_go(at);
        self.outputs.extend(over.map(Output::Over));
    }

    fn let_go(&mut self, at: GroupId) -> Option<T> {
        let mut group = self.groups.remove(&at)?;
        let local = group.local.take()?;
        self.launched -= 1;
        self.inline_held -= group.drop_inline();
        self.inline_pending -= usize::from(group.out == Outbound::Inline);
        Some(local.token)
    }

    /// Does what can be done in a group now.
    fn advance(&mut self, at: GroupId) {
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
    fn finish(&mut self, at: GroupId) {
        let done = |group: &Group<T>| {
            group.stop.is_none() && group.out == Outbound::Done && group.inbound == Inbound::Done
        };
        if self.groups.get(&at).is_some_and(done) {
            self.forget(at);
        }
    }

    /// Takes a control frame.
    ///
    /// # Errors
    /// If the peer broke the protocol: nothing that it says can be relied on any more.
    pub fn receive(&mut self, header: &Header, payload: Vec<u8>) -> Result<(), Violation> {
        if !self.control.accept(header)? {
            return Ok(());
        }
        if self.control.unheard() > UNHEARD_MAX {
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
            Kind::Ping => self.tell(self.header(Kind::Pong), Vec::new()),
            Kind::Unregion => self.outputs.push(Output::Unregion(header.index)),
            Kind::Switch => self.outputs.push(Output::Switched),
            Kind::Leave => self.on_leave()?,
            Kind::Agree => self.on_agree()?,
            Kind::Refuse => self.on_refuse()?,
            Kind::Gone => self.on_gone()?,
            Kind::Stay => self.on_stay()?,
            // What these bring is the connection's business.
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
        if bytes.len() > definition::ENTRIES_MAX * definition::ENTRY {
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

    /// Forgets the withdrawn definitions of which no launch is left.
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
            // This side's launch of that number is over: it failed before this connection was there.
            let (channel, sequence) = at;
            let why = FAILED_EARLIER.as_bytes().to_vec();
            self.tell(Header { channel, sequence, ..self.header(Kind::Stop) }, why);
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
        let group = self.groups.entry(at).or_insert_with(Group::new);
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
            None if passed => self.tell_of(Kind::Stopped, at),
            Some(group) if group.local.is_some() => {
                if group.stop.is_some() {
                    // Both gave it up: each hears of the other's quiescence by its `Stop`.
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
                let group = self.groups.entry(at).or_insert_with(Group::new);
                self.inline_held -= group.drop_inline();
                group.remote = None;
                group.given_up = Some(why);
                self.tell_of(Kind::Stopped, at);
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

    /// Every launch that is under way, for when the link itself is over.
    pub fn drain(&mut self) -> Vec<T> {
        self.schedule = Schedule::default();
        let groups = std::mem::take(&mut self.groups);
        self.launched = 0;
        self.inline_held = 0;
        groups.into_values().filter_map(|group| group.local.map(|local| local.token)).collect()
    }

    /// How many launches of this side are under way.
    pub const fn launched(&self) -> usize {
        self.launched
    }
}

/// What a definition counts for among those of a peer: an empty one takes room too.
fn weight(definition: &Definition) -> usize {
    definition.entries.len() + 1
}

fn difference(here: &Definition, there: &Definition) -> Difference {
    let same = here.entries.len() == there.entries.len()
        && here
            .entries
            .iter()
            .zip(&there.entries)
            .all(|(a, b)| a.order() == b.order() && a.outgoing == b.outgoing);
    let told = |entry: &definition::Entry| format!("{} bytes of layout {}", entry.bytes, entry.fingerprint);
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
