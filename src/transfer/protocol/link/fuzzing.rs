//! Properties of a link that hold for every sequence of frames that a peer may send.
//!
//! The fuzz target (`fuzzing.rs` of the crate) and the tests of links call these functions. Begin at
//! [`fuzz_link_conversation`].

use std::sync::Arc;

use super::launch_definition::{DefinitionEntry, FetchSource, LaunchDefinition};
use super::link_side::{GroupState, LinkSide};
use super::{ChunkDestination, GroupId, LaunchNumbers, LaunchParameters, LinkOutput, LinkTerms};
use crate::base::key::TransferKey;
use crate::base::layout::LayoutFingerprint;
use crate::base::membership::{DeviceId, Incarnation, MemberId, TaskId};
use crate::protocol::frame::{FrameKind, Header};
use crate::protocol::link::PriorityClass;

/// Bytes of a chunk.
const CHUNK: u32 = 16;
/// Bytes that each launch receives.
const RECEIVED: u64 = 120;
/// The most that a link holds of what a peer sends in one input, beside the bytes of that input.
const HELD_MAX: usize = 1 << 20;

fn member(task: u32) -> Option<MemberId> {
    Some(MemberId::of_own_job(TaskId(task), Incarnation::new(u64::from(task) + 70)?))
}

/// Returns the list of transfers between the two as one of them knows it.
fn sample_definition(here: u32) -> LaunchDefinition {
    let entry = |key, from: u32, bytes| DefinitionEntry {
        key: TransferKey(key),
        from: DeviceId(from),
        to: DeviceId(1 - from),
        bytes,
        fingerprint: LayoutFingerprint(key),
        outgoing: from == here,
        source: if from == here { FetchSource::Region(1, 0) } else { FetchSource::None },
    };
    LaunchDefinition::new(vec![entry(1, 0, 90), entry(2, 1, RECEIVED)])
}

/// Returns what a link holds of what a peer sent, in bytes, roughly.
pub(super) fn bytes_held_for_peer(link: &LinkSide<usize>) -> usize {
    let definition = |definition: &Arc<LaunchDefinition>| 64 * (definition.entries.len() + 1);
    let of_groups = |group: &GroupState<usize>| {
        let remote = group.remote.as_ref();
        let inline = remote.and_then(|remote| remote.inline.as_ref()).map_or(0, Vec::len);
        size_of::<GroupState<usize>>() + inline + group.given_up.as_ref().map_or(0, String::len)
    };
    link.groups.values().map(of_groups).sum::<usize>()
        + link.remote.values().map(definition).sum::<usize>()
        + link.withdrawn.iter().map(definition).sum::<usize>()
        + link.control.queued_or_unacknowledged_bytes()
        + link.partial.as_ref().map_or(0, |(_, bytes)| bytes.len())
}

/// The input, taken piece by piece; zeros once it is over.
struct FuzzInput<'a>(&'a [u8]);

impl FuzzInput<'_> {
    fn next_byte(&mut self) -> u8 {
        let Some((first, rest)) = self.0.split_first() else { return 0 };
        self.0 = rest;
        *first
    }

    fn next_u32(&mut self) -> u32 {
        u32::from_le_bytes([self.next_byte(), self.next_byte(), self.next_byte(), self.next_byte()])
    }

    fn bytes(&mut self, most: usize) -> Vec<u8> {
        let (bytes, rest) = self.0.split_at(most.min(self.0.len()));
        self.0 = rest;
        bytes.to_vec()
    }
}

/// Takes what a peer says on one connection, and what this side does between.
///
/// The link keeps its invariants after every frame, gives a chunk no place beyond the bytes that are received, and holds no more
/// of what it was sent than its bounds let it.
pub(crate) fn fuzz_link_conversation(input: &[u8]) {
    let (Some(here), Some(there)) = (member(0), member(1)) else { return };
    let mut script = FuzzInput(input);
    let terms = script.next_byte();
    let terms =
        LinkTerms { chunk: CHUNK, fetch: terms & 1 != 0, pushes_unsourced: false, lasting: terms & 2 != 0 };
    let mut link: LinkSide<usize> = LinkSide::new(here, there, terms, LaunchNumbers::default());
    let mut control = 0u32;
    let mut launched: Vec<GroupId> = Vec::new();
    let own = link.send_definition(sample_definition(0));
    while !script.0.is_empty() {
        let what = script.next_byte();
        match what {
            200.. => perform_local_action(&mut link, &mut script, what, own, &mut launched),
            _ => {
                let Some(kind) = FrameKind::from_byte(what % 26) else { continue };
                let mut header = Header::new(kind, there, here);
                let small = script.next_byte();
                header.flags = script.next_byte();
                header.class = small >> 6;
                header.lane = u16::from(small & 3);
                header.channel = u32::from(small >> 2 & 1);
                header.index = u32::from(small >> 3 & 7);
                header.sequence = u64::from(script.next_byte() & 7);
                header.ack = u32::from(script.next_byte());
                if what >= 100 {
                    // One field that makes no sense.
                    match small & 3 {
                        0 => header.index = script.next_u32(),
                        1 => header.sequence = u64::from(script.next_u32()) << 20,
                        2 => header.ack = script.next_u32(),
                        _ => header.control = script.next_u32(),
                    }
                }
                let payload = match header.flags >> 5 {
                    0 => Vec::new(),
                    1 | 2 => sample_definition(1).encode(),
                    3 => {
                        let mut edited = sample_definition(1).encode();
                        let (at, to) = (usize::from(script.next_byte()) % edited.len(), script.next_byte());
                        edited[at] = to;
                        edited
                    }
                    _ => {
                        let most = usize::from(script.next_byte());
                        script.bytes(most)
                    }
                };
                if kind == FrameKind::Data {
                    header.len = u32::from(script.next_byte() % 20);
                    receive_fuzzed_chunk(&mut link, &header, what);
                } else {
                    control += 1;
                    if header.control == 0 {
                        header.control = control;
                    }
                    if link.receive_control_frame(&header, payload).is_err() {
                        break;
                    }
                }
            }
        }
        for output in link.take_outputs() {
            match output {
                LinkOutput::StoppedByPeer(token, _) => drop(link.announce_group_quiescence(launched[token])),
                LinkOutput::Fetch(token, _) | LinkOutput::Inline(token, _) if token % 2 == 0 => {
                    _ = link.announce_received(launched[token]);
                }
                LinkOutput::CloseLane(lane) => link.report_received_chunks(lane),
                _ => {}
            }
        }
        link.assert_invariants();
    }
    let held = bytes_held_for_peer(&link);
    assert!(held <= HELD_MAX + 64 * input.len(), "{held} bytes are held");
}

/// Lets a chunk arrive.
fn receive_fuzzed_chunk(link: &mut LinkSide<usize>, header: &Header, what: u8) {
    if let ChunkDestination::At(_, start) = link.begin_chunk_receive(header) {
        assert!(start + u64::from(header.len) <= RECEIVED, "a chunk beyond what is received");
        match what % 3 {
            0 => drop(link.finish_chunk_receive(header)),
            1 => link.on_chunk_damaged(header),
            _ => link.abandon_chunk_receive(header),
        }
    }
}

/// Does something that this side's programs and lanes do.
fn perform_local_action(
    link: &mut LinkSide<usize>,
    script: &mut FuzzInput<'_>,
    what: u8,
    own: u32,
    launched: &mut Vec<GroupId>,
) {
    let which = usize::from(script.next_byte());
    let one = launched.get(which % launched.len().max(1)).copied();
    match (what % 8, one) {
        (0, _) if launched.len() < 64 => {
            let at = link.numbers.take_next(u32::from(which as u8 & 1));
            let (source, destination) = (which & 2 != 0, which & 4 != 0);
            let token = launched.len();
            launched.push(at);
            let launching = LaunchParameters {
                token,
                definition: own,
                at,
                class: PriorityClass::Normal,
                source,
                destination,
                inline: None,
            };
            assert!(link.launch(launching));
        }
        (1, _) => while link.next_control_frame(true).is_some() {},
        (2, _) => while link.next_chunk(1).is_some() {},
        (3, _) => link.report_received_chunks(u16::from(which as u8 & 3)),
        (4, Some(at)) => drop(link.mark_group_cancelled(at, "no more")),
        (5, Some(at)) => drop(link.announce_group_quiescence(at)),
        (6, Some(at)) => link.announce_buffers_ready(at, true, true),
        (7, _) => drop(link.next_control_frame_for_ring(which * 64)),
        _ => {}
    }
}
