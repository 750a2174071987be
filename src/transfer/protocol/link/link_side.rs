//! One side of a link: announces lists of transfers, and begins, ends and cancels groups.
//!
//! `receive.rs` processes the frames of the peer. Begin at [`LinkSide::launch`].

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::sync::Arc;

use super::chunk_scheduler::{ChunkSchedule, GroupId, PriorityClass};
use super::chunks::{InboundStream, OutboundStream};
use super::control_queue::ControlQueue;
use super::interface::{ControlFrame, DefinitionMismatch, LaunchParameters, LinkOutput, LinkTerms};
use super::launch_definition::{ENTRY, LaunchDefinition};
use super::launch_numbers::LaunchNumbers;
use crate::base::membership::MemberId;
use crate::protocol::frame::{FrameKind, Header, flag};

/// The most launches of this side that may be in flight on one link.
pub const LAUNCHES_MAX: usize = 4096;
/// The most groups that wait for this side's launch, including those that the peer cancelled again.
pub(super) const EARLY_MAX: usize = 16 * LAUNCHES_MAX;
/// The most transfers in all definitions of a peer.
pub(super) const REMOTE_ENTRIES_MAX: usize = 1 << 20;
/// The number of withdrawn definitions at which unused ones are removed.
pub(super) const WITHDRAWN_MAX: usize = 1024;
/// The most bytes of a group that go with its `Go` frame.
pub const INLINE_MAX: usize = 8 << 10;
/// The most groups that were sent inline and are not yet acknowledged: a bound on what the peer keeps for
/// launches that it has not made.
pub(super) const INLINE_PENDING_MAX: usize = 256;
/// The most bytes of control frames that may be queued or unacknowledged when a further frame arrives. A peer
/// that requests answers without reading them exceeds it.
pub(super) const UNHEARD_MAX: usize = 256 << 20;
/// The longest reason in bytes that is passed on.
pub(super) const REASON_MAX: usize = 1024;

/// The reason of the `Stop` for a launch whose counterpart on this side ended before it arrived.
pub(super) const FAILED_EARLIER: &str = "the other side's launch of the same number failed earlier";

/// This side's launch of a group.
pub(super) struct LocalLaunch<T> {
    pub(super) token: T,
    pub(super) definition: Arc<LaunchDefinition>,
    pub(super) class: PriorityClass,
    pub(super) source: bool,
    pub(super) destination: bool,
}

/// The other side's launch of a group.
pub(super) struct RemoteLaunch {
    pub(super) definition: Arc<LaunchDefinition>,
    pub(super) source: bool,
    pub(super) destination: bool,
    pub(super) inline: Option<Vec<u8>>,
}

/// The state of a group that was cancelled.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct GroupCancellation {
    /// The reason, if this side cancelled it and has not sent it yet; none if the peer did, which then waits
    /// for `Stopped`.
    pub(super) why: Option<String>,
    /// Whether no byte can land here any more, and the peer was told.
    pub(super) quiesced: bool,
    /// Whether the peer has said the same.
    pub(super) confirmed: bool,
}

pub(super) struct GroupState<T> {
    pub(super) local: Option<LocalLaunch<T>>,
    pub(super) remote: Option<RemoteLaunch>,
    /// The reason, if the peer cancelled the group before this side launched it.
    pub(super) given_up: Option<String>,
    pub(super) stop: Option<GroupCancellation>,
    pub(super) matched: bool,
    pub(super) out: OutboundStream,
    pub(super) inbound: InboundStream,
}

impl<T> GroupState<T> {
    pub(super) const fn new() -> Self {
        Self {
            local: None,
            remote: None,
            given_up: None,
            stop: None,
            matched: false,
            out: OutboundStream::Waiting,
            inbound: InboundStream::Waiting,
        }
    }

    /// Drops the bytes that came inline. Returns how many such groups that are: 0 or 1.
    pub(super) fn drop_inline_payload(&mut self) -> usize {
        usize::from(self.remote.as_mut().and_then(|remote| remote.inline.take()).is_some())
    }
}

/// The users of a link, and the state of the handshake about its end.
#[derive(Debug, Default)]
pub struct LeaveState {
    /// The number of requests that are about to prepare something on it.
    pub(super) kept: usize,
    /// Whether this side has asked, and has no answer.
    pub(super) asked: bool,
    /// Whether this side has agreed, and knows no decision.
    pub(super) agreed: bool,
    /// Whether this side has sent `Gone`.
    pub(super) gone: bool,
}

/// One side of a link. `T` identifies a launch of the caller.
pub struct LinkSide<T> {
    pub(super) me: MemberId,
    pub(super) peer: MemberId,
    pub(super) terms: LinkTerms,
    pub(super) definitions: HashMap<u32, Arc<LaunchDefinition>>,
    pub(super) next_definition: u32,
    pub(super) remote: HashMap<u32, Arc<LaunchDefinition>>,
    /// The definitions that the peer has withdrawn and launches may still use.
    pub(super) withdrawn: Vec<Arc<LaunchDefinition>>,
    pub(super) remote_entries: usize,
    pub(super) partial: Option<(u32, Vec<u8>)>,
    pub(super) numbers: LaunchNumbers,
    pub(super) groups: BTreeMap<GroupId, GroupState<T>>,
    pub(super) launched: usize,
    pub(super) inline_pending: usize,
    /// The number of groups that the peer sent inline and whose bytes are not yet taken by an output.
    pub(super) inline_held: usize,
    pub(super) schedule: ChunkSchedule,
    pub(super) control: ControlQueue,
    pub(super) departure: LeaveState,
    /// Whether lists were found to differ since the ring was last filled.
    pub(super) differed: bool,
    pub(super) outputs: Vec<LinkOutput<T>>,
    /// The messages of the peer about cliques, in their order. Threads may perform outputs in another one.
    pub(super) clique_messages: VecDeque<Vec<u8>>,
}

impl<T: Clone> LinkSide<T> {
    /// Creates a link of two members with the terms that they agreed on.
    pub fn new(me: MemberId, peer: MemberId, terms: LinkTerms, numbers: LaunchNumbers) -> Self {
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
            schedule: ChunkSchedule::default(),
            control: ControlQueue::new(!terms.lasting),
            departure: LeaveState::default(),
            differed: false,
            outputs: Vec::new(),
            clique_messages: VecDeque::new(),
        }
    }

    /// Removes and returns the outputs since the last call.
    pub fn take_outputs(&mut self) -> Vec<LinkOutput<T>> {
        std::mem::take(&mut self.outputs)
    }

    pub(super) fn new_header(&self, kind: FrameKind) -> Header {
        Header::new(kind, self.me, self.peer)
    }

    pub(super) fn queue_control_frame(&mut self, header: Header, payload: Vec<u8>) {
        self.control.push(ControlFrame { header: Header { len: payload.len() as u32, ..header }, payload });
    }

    pub(super) fn queue_group_frame(&mut self, kind: FrameKind, (channel, sequence): GroupId) {
        self.queue_control_frame(Header { channel, sequence, ..self.new_header(kind) }, Vec::new());
    }

    /// Sends a list of transfers to the peer. Returns the number by which it is launched.
    pub fn send_definition(&mut self, definition: LaunchDefinition) -> u32 {
        const PART: usize = 256 * ENTRY;
        let number = self.next_definition;
        self.next_definition += 1;
        let bytes = definition.encode();
        let mut parts = bytes.chunks(PART).peekable();
        while let Some(part) = parts.next() {
            let flags = if parts.peek().is_some() { flag::MORE } else { 0 };
            self.queue_control_frame(
                Header { flags, index: number, ..self.new_header(FrameKind::Define) },
                part.to_vec(),
            );
        }
        self.definitions.insert(number, Arc::new(definition));
        number
    }

    /// Withdraws a list. Launches of it that are in flight go on.
    pub fn withdraw_definition(&mut self, number: u32) {
        if self.definitions.remove(&number).is_some() {
            self.queue_control_frame(
                Header { index: number, ..self.new_header(FrameKind::Undefine) },
                Vec::new(),
            );
        }
    }

    /// Announces memory that the peer may map: host memory, or that of a GPU. The descriptor goes with the frame.
    pub fn share_region(&mut self, region: u32, len: u64, is_device: bool) {
        let flags = if is_device { flag::DEVICE } else { 0 };
        self.queue_control_frame(
            Header { flags, index: region, sequence: len, ..self.new_header(FrameKind::Region) },
            Vec::new(),
        );
    }

    /// Announces this side's endpoint of the fabric.
    pub fn announce_fabric_address(&mut self, announcement: Vec<u8>) {
        self.queue_control_frame(self.new_header(FrameKind::FabricAddress), announcement);
    }

    /// Announces that the fabric works.
    pub fn announce_fabric_ready(&mut self) {
        self.queue_control_frame(self.new_header(FrameKind::FabricReady), Vec::new());
    }

    /// Sends a message about cliques.
    pub fn send_clique_message(&mut self, message: Vec<u8>) {
        self.queue_control_frame(self.new_header(FrameKind::Clique), message);
    }

    /// Removes and returns the next message of the peer about cliques.
    pub fn take_clique_message(&mut self) -> Option<Vec<u8>> {
        self.clique_messages.pop_front()
    }

    /// Returns whether there is a message of the peer about cliques.
    pub fn has_clique_messages(&self) -> bool {
        !self.clique_messages.is_empty()
    }

    /// Returns the launch that sends the bytes of a group which the peer may fetch: its list is matched, its bytes are defined, and it
    /// is not cancelled.
    pub fn launch_that_sends(&self, at: GroupId) -> Option<T> {
        let group = self.groups.get(&at).filter(|group| group.matched && group.stop.is_none())?;
        let is_fetched = matches!(group.out, OutboundStream::Waiting);
        group.local.as_ref().filter(|local| local.source && is_fetched).map(|local| local.token.clone())
    }

    /// Announces memory that the peer may read over the fabric, by its key and the address of its first byte.
    pub fn share_fabric_region(&mut self, region: u32, len: u64, key: u64, address: u64) {
        let header = Header { index: region, sequence: len, ..self.new_header(FrameKind::FabricRegion) };
        self.queue_control_frame(header, [key.to_le_bytes(), address.to_le_bytes()].concat());
    }

    /// Withdraws memory from the peer.
    pub fn unshare_region(&mut self, region: u32) {
        self.queue_control_frame(
            Header { index: region, ..self.new_header(FrameKind::Unregion) },
            Vec::new(),
        );
    }

    /// Offers the peer a ring for its control frames. The descriptors go with the frame.
    pub fn offer_ring(&mut self) {
        self.queue_control_frame(self.new_header(FrameKind::Ring), Vec::new());
    }

    /// Switches to the ring that the peer offered.
    pub fn switch_to_ring(&mut self) {
        self.queue_control_frame(self.new_header(FrameKind::Switch), Vec::new());
    }

    /// Sends a ping.
    pub fn ping(&mut self) {
        self.queue_control_frame(self.new_header(FrameKind::Ping), Vec::new());
    }

    /// Returns whether a launch that sends `bytes` bytes should carry them in its `Go`.
    pub fn should_inline(&self, bytes: u64) -> bool {
        bytes > 0 && bytes <= INLINE_MAX as u64 && self.inline_pending < INLINE_PENDING_MAX
    }

    /// Launches a definition as a group of its channel. Returns false if too many launches are in flight or
    /// the definition is unknown.
    pub fn launch(&mut self, launching: LaunchParameters<T>) -> bool {
        let LaunchParameters { token, definition: number, at, class, source, destination, inline } =
            launching;
        let (channel, sequence) = at;
        let definition = self.definitions.get(&number).filter(|_| self.launched < LAUNCHES_MAX);
        let Some(definition) = definition.cloned() else {
            self.withdraw_launch_number(at, "too many launches were under way on the other side");
            return false;
        };
        self.numbers.retire(at);
        let group = self.groups.entry(at).or_insert_with(GroupState::new);
        if let Some(why) = group.given_up.take() {
            // The group was over before it began; the peer knows, and does not wait for a `Go`.
            self.inline_held -= group.drop_inline_payload();
            self.groups.remove(&at);
            self.outputs.push(LinkOutput::StoppedByPeer(token, why));
            return true;
        }
        let mut flags = if source { flag::SOURCE } else { 0 };
        flags |= if destination { flag::DESTINATION } else { 0 };
        if inline.is_some() {
            flags |= flag::INLINE;
            group.out = OutboundStream::Inline;
            self.inline_pending += 1;
        }
        group.local = Some(LocalLaunch { token, definition, class, source, destination });
        self.launched += 1;
        let header = self.new_header(FrameKind::Go);
        let class = class as u8;
        self.queue_control_frame(
            Header { flags, class, channel, sequence, index: number, ..header },
            inline.unwrap_or_default(),
        );
        self.advance_group(at);
        true
    }

    /// Announces that no launch will come for a number that was taken, whether the peer has launched its own
    /// or will.
    pub fn withdraw_launch_number(&mut self, at: GroupId, why: &str) {
        self.numbers.retire(at);
        let given_up = self.groups.remove(&at).is_some_and(|mut early| {
            self.inline_held -= early.drop_inline_payload();
            early.given_up.is_some()
        });
        if !given_up {
            let (channel, sequence) = at;
            self.queue_control_frame(
                Header { channel, sequence, ..self.new_header(FrameKind::Stop) },
                why.as_bytes().to_vec(),
            );
        }
    }

    /// Announces that the source of a launch is defined, or that its destination may be written.
    pub fn announce_buffers_ready(&mut self, at: GroupId, source: bool, destination: bool) {
        let Some(group) = self.groups.get_mut(&at) else { return };
        let Some(local) = group.local.as_mut().filter(|_| group.stop.is_none()) else { return };
        let (source, destination) = (source && !local.source, destination && !local.destination);
        local.source |= source;
        local.destination |= destination;
        let flags = (u8::from(source) * flag::SOURCE) | (u8::from(destination) * flag::DESTINATION);
        if flags != 0 {
            let (channel, sequence) = at;
            self.queue_control_frame(
                Header { flags, channel, sequence, ..self.new_header(FrameKind::Ready) },
                Vec::new(),
            );
            self.advance_group(at);
        }
    }

    /// Announces that all bytes to be received are in place. Returns whether that counts: it does not if the group was
    /// cancelled meanwhile.
    pub fn announce_received(&mut self, at: GroupId) -> bool {
        let Some(group) = self.groups.get_mut(&at) else { return false };
        let counts = group.stop.is_none() && group.matched && group.inbound != InboundStream::Done;
        if counts {
            group.inbound = InboundStream::Done;
            self.queue_group_frame(FrameKind::Done, at);
            self.forget_if_complete(at);
        }
        counts
    }

    /// Tells the peer that more bytes of a group were fetched.
    pub fn announce_fetch_progress(&mut self, (channel, sequence): GroupId, bytes: u64) {
        let header = Header { channel, sequence, ..self.new_header(FrameKind::Progress) };
        self.queue_control_frame(header, bytes.to_le_bytes().to_vec());
    }

    /// Asks the peer to push bytes that could not be fetched. None of them has been fetched.
    pub fn request_push(&mut self, at: GroupId) {
        let Some(group) = self.groups.get_mut(&at) else { return };
        let Some(local) = group.local.as_ref().filter(|_| group.inbound == InboundStream::Fetching) else {
            return;
        };
        group.inbound = InboundStream::new_chunked_receive(local.definition.received, self.terms.chunk);
        self.queue_group_frame(FrameKind::Push, at);
    }

    /// Stops a group. Returns whether it is in flight, or being stopped already: if so, stop all landing and
    /// call [`LinkSide::announce_group_quiescence`], which tells the peer. [`LinkOutput::StopConfirmed`] follows when no byte can land
    /// there either.
    pub fn mark_group_cancelled(&mut self, at: GroupId, why: &str) -> bool {
        let Some(group) = self.groups.get_mut(&at).filter(|group| group.local.is_some()) else {
            return false;
        };
        if group.stop.is_none() {
            let cut = (0..=REASON_MAX.min(why.len())).rev().find(|at| why.is_char_boundary(*at)).unwrap_or(0);
            self.inline_held -= group.drop_inline_payload();
            group.stop = Some(GroupCancellation {
                why: Some(why[..cut].to_owned()),
                quiesced: false,
                confirmed: false,
            });
        }
        true
    }

    /// Announces that no byte can land any more in a group that was cancelled. If the peer has said the same,
    /// forgets the group and returns its launch: no further output names it.
    pub fn announce_group_quiescence(&mut self, at: GroupId) -> Option<T> {
        let stop = self.groups.get_mut(&at)?.stop.as_mut()?;
        if std::mem::replace(&mut stop.quiesced, true) {
            return None;
        }
        let (why, over) = (stop.why.take(), stop.confirmed);
        let (channel, sequence) = at;
        match why {
            Some(why) => self.queue_control_frame(
                Header { channel, sequence, ..self.new_header(FrameKind::Stop) },
                why.into_bytes(),
            ),
            None => self.queue_group_frame(FrameKind::Stopped, at),
        }
        if over { self.remove_group(at) } else { None }
    }

    pub(super) fn forget_group(&mut self, at: GroupId) {
        let over = self.remove_group(at);
        self.outputs.extend(over.map(LinkOutput::Over));
    }

    pub(super) fn remove_group(&mut self, at: GroupId) -> Option<T> {
        let mut group = self.groups.remove(&at)?;
        let local = group.local.take()?;
        self.launched -= 1;
        self.inline_held -= group.drop_inline_payload();
        self.inline_pending -= usize::from(group.out == OutboundStream::Inline);
        Some(local.token)
    }

    /// Advances a group as far as it can: matches the lists, then starts the streams whose ends are ready.
    pub(super) fn advance_group(&mut self, at: GroupId) {
        let Some(group) = self.groups.get_mut(&at) else { return };
        let (Some(local), Some(remote)) = (&mut group.local, &mut group.remote) else { return };
        if group.stop.is_some() {
            return;
        }
        if !group.matched {
            if local.definition.digest != remote.definition.digest {
                let difference = find_definition_mismatch(&local.definition, &remote.definition);
                self.outputs.push(LinkOutput::Differ(local.token.clone(), difference));
                self.differed = true;
                self.forget_group(at);
                return;
            }
            group.matched = true;
            self.outputs.push(LinkOutput::Matched(local.token.clone()));
        }
        if local.definition.sent == 0 && group.out != OutboundStream::Done {
            group.out = OutboundStream::Done;
            self.outputs.push(LinkOutput::Sent(local.token.clone(), false));
        }
        let may_fetch = |sender: &LaunchDefinition| {
            self.terms.fetch && !(self.terms.pushes_unsourced && sender.is_without_sources())
        };
        let pushes = !may_fetch(&local.definition) || group.out == OutboundStream::Wanted;
        if matches!(group.out, OutboundStream::Waiting | OutboundStream::Wanted)
            && pushes
            && local.source
            && remote.destination
        {
            group.out = OutboundStream::new_chunked_send(local.definition.sent, self.terms.chunk);
            self.schedule.add(local.class, at);
        }
        if group.inbound == InboundStream::Waiting {
            if local.definition.received == 0 {
                group.inbound = InboundStream::Done;
            } else if local.destination {
                if let Some(bytes) = remote.inline.take() {
                    self.inline_held -= 1;
                    group.inbound = InboundStream::Fetching;
                    self.outputs.push(LinkOutput::Inline(local.token.clone(), bytes));
                } else if !may_fetch(&remote.definition) {
                    group.inbound =
                        InboundStream::new_chunked_receive(local.definition.received, self.terms.chunk);
                } else if remote.source {
                    group.inbound = InboundStream::Fetching;
                    self.outputs.push(LinkOutput::Fetch(local.token.clone(), Arc::clone(&remote.definition)));
                }
            }
        }
        self.forget_if_complete(at);
    }

    /// Forgets a group whose streams are complete.
    pub(super) fn forget_if_complete(&mut self, at: GroupId) {
        let done = |group: &GroupState<T>| {
            group.stop.is_none() && group.out == OutboundStream::Done && group.inbound == InboundStream::Done
        };
        if self.groups.get(&at).is_some_and(done) {
            self.forget_group(at);
        }
    }

    /// Removes and returns every launch in flight, when the link itself is over.
    pub fn take_launches(&mut self) -> Vec<T> {
        self.schedule = ChunkSchedule::default();
        let groups = std::mem::take(&mut self.groups);
        self.launched = 0;
        self.inline_held = 0;
        groups.into_values().filter_map(|group| group.local.map(|local| local.token)).collect()
    }

    /// Returns the number of launches of this side in flight.
    pub const fn in_flight_count(&self) -> usize {
        self.launched
    }
}

/// Returns how two lists differ. A transfer that is in both lists, with different layouts, says more than the order.
fn find_definition_mismatch(here: &LaunchDefinition, there: &LaunchDefinition) -> DefinitionMismatch {
    let mut others = there.entries.iter().peekable();
    for a in &here.entries {
        while others.next_if(|b| b.sort_key() < a.sort_key()).is_some() {}
        let Some(b) = others.next_if(|b| b.sort_key() == a.sort_key() && b.outgoing == a.outgoing) else {
            continue;
        };
        if !a.has_layout_of(b) {
            let (here, there) = (a.layout_text(), b.layout_text());
            return DefinitionMismatch::Layout { key: a.key, here, there };
        }
    }
    DefinitionMismatch::Order { here: here.describe_keys(), there: there.describe_keys() }
}
