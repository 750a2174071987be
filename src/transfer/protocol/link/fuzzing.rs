//! Properties of a link that hold whatever its peer sends.
//!
//! It owns the property; the fuzz target and the tests feed it (`fuzzing.rs` of the crate). Begin at [`conversation`].

use std::sync::Arc;

use super::definition::{Definition, DefinitionEntry, Source};
use super::state::{GroupState, Link};
use super::{GroupId, Landing, Launching, Numbers, Output, Terms};
use crate::base::identity::{DeviceId, Incarnation, Member, TaskId};
use crate::base::key::TransferKey;
use crate::base::layout::LayoutFingerprint;
use crate::protocol::frame::{Header, Kind};
use crate::protocol::link::Class;

/// Bytes of a chunk.
const CHUNK: u32 = 16;
/// Bytes that each launch receives.
const RECEIVED: u64 = 120;
/// The most that a link holds of what a peer sends in one input, beside the bytes of that input.
const HELD_MAX: usize = 1 << 20;

fn member(task: u32) -> Option<Member> {
    Some(Member { task: TaskId(task), incarnation: Incarnation::new(u64::from(task) + 70)? })
}

/// Returns the list of transfers between the two as one of them knows it.
fn list(here: u32) -> Definition {
    let entry = |key, from: u32, bytes| DefinitionEntry {
        key: TransferKey(key),
        from: DeviceId(from),
        to: DeviceId(1 - from),
        bytes,
        fingerprint: LayoutFingerprint(key),
        outgoing: from == here,
        source: if from == here { Source::Region(1, 0) } else { Source::None },
    };
    Definition::new(vec![entry(1, 0, 90), entry(2, 1, RECEIVED)])
}

/// Returns what a link holds of what a peer sent, in bytes, roughly.
pub(super) fn held(link: &Link<usize>) -> usize {
    let definition = |definition: &Arc<Definition>| 64 * (definition.entries.len() + 1);
    let of_groups = |group: &GroupState<usize>| {
        let remote = group.remote.as_ref();
        let inline = remote.and_then(|remote| remote.inline.as_ref()).map_or(0, Vec::len);
        size_of::<GroupState<usize>>() + inline + group.given_up.as_ref().map_or(0, String::len)
    };
    link.groups.values().map(of_groups).sum::<usize>()
        + link.remote.values().map(definition).sum::<usize>()
        + link.withdrawn.iter().map(definition).sum::<usize>()
        + link.control.unacknowledged_bytes()
        + link.partial.as_ref().map_or(0, |(_, bytes)| bytes.len())
}

/// The input, taken piece by piece; zeros once it is over.
struct Script<'a>(&'a [u8]);

impl Script<'_> {
    fn byte(&mut self) -> u8 {
        let Some((first, rest)) = self.0.split_first() else { return 0 };
        self.0 = rest;
        *first
    }

    fn word(&mut self) -> u32 {
        u32::from_le_bytes([self.byte(), self.byte(), self.byte(), self.byte()])
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
pub(crate) fn conversation(input: &[u8]) {
    let (Some(here), Some(there)) = (member(0), member(1)) else { return };
    let mut script = Script(input);
    let terms = script.byte();
    let terms = Terms { chunk: CHUNK, fetch: terms & 1 != 0, lasting: terms & 2 != 0 };
    let mut link: Link<usize> = Link::new(here, there, terms, Numbers::default());
    let mut control = 0u32;
    let mut launched: Vec<GroupId> = Vec::new();
    let own = link.define(list(0));
    while !script.0.is_empty() {
        let what = script.byte();
        match what {
            200.. => ours(&mut link, &mut script, what, own, &mut launched),
            _ => {
                let Some(kind) = Kind::from_byte(what % 26) else { continue };
                let mut header = Header::new(kind, there, here);
                let small = script.byte();
                header.flags = script.byte();
                header.class = small >> 6;
                header.lane = u16::from(small & 3);
                header.channel = u32::from(small >> 2 & 1);
                header.index = u32::from(small >> 3 & 7);
                header.sequence = u64::from(script.byte() & 7);
                header.ack = u32::from(script.byte());
                if what >= 100 {
                    // One field that makes no sense.
                    match small & 3 {
                        0 => header.index = script.word(),
                        1 => header.sequence = u64::from(script.word()) << 20,
                        2 => header.ack = script.word(),
                        _ => header.control = script.word(),
                    }
                }
                let payload = match header.flags >> 5 {
                    0 => Vec::new(),
                    1 | 2 => list(1).encode(),
                    3 => {
                        let mut edited = list(1).encode();
                        let (at, to) = (usize::from(script.byte()) % edited.len(), script.byte());
                        edited[at] = to;
                        edited
                    }
                    _ => {
                        let most = usize::from(script.byte());
                        script.bytes(most)
                    }
                };
                if kind == Kind::Data {
                    header.len = u32::from(script.byte() % 20);
                    land(&mut link, &header, what);
                } else {
                    control += 1;
                    if header.control == 0 {
                        header.control = control;
                    }
                    if link.receive(&header, payload).is_err() {
                        break;
                    }
                }
            }
        }
        for output in link.outputs() {
            match output {
                Output::StoppedByPeer(token, _) => drop(link.quiesced(launched[token])),
                Output::Fetch(token, _) | Output::Inline(token, _) if token % 2 == 0 => {
                    link.received(launched[token])
                }
                Output::CloseLane(lane) => link.lane_closed(lane),
                _ => {}
            }
        }
        link.audit();
    }
    let held = held(&link);
    assert!(held <= HELD_MAX + 64 * input.len(), "{held} bytes are held");
}

/// Lets a chunk arrive.
fn land(link: &mut Link<usize>, header: &Header, what: u8) {
    if let Landing::At(_, start) = link.begin_landing(header) {
        assert!(start + u64::from(header.len) <= RECEIVED, "a chunk beyond what is received");
        match what % 3 {
            0 => drop(link.landed(header)),
            1 => link.damaged(header),
            _ => link.abandon_chunk(header),
        }
    }
}

/// Does something that this side's programs and lanes do.
fn ours(link: &mut Link<usize>, script: &mut Script<'_>, what: u8, own: u32, launched: &mut Vec<GroupId>) {
    let which = usize::from(script.byte());
    let one = launched.get(which % launched.len().max(1)).copied();
    match (what % 8, one) {
        (0, _) if launched.len() < 64 => {
            let at = link.numbers.take(u32::from(which as u8 & 1));
            let (source, destination) = (which & 2 != 0, which & 4 != 0);
            let token = launched.len();
            launched.push(at);
            let launching = Launching {
                token,
                definition: own,
                at,
                class: Class::Normal,
                source,
                destination,
                inline: None,
            };
            assert!(link.launch(launching));
        }
        (1, _) => while link.next_control(true).is_some() {},
        (2, _) => while link.next_chunk(1).is_some() {},
        (3, _) => link.lane_closed(u16::from(which as u8 & 3)),
        (4, Some(at)) => drop(link.stop(at, "no more")),
        (5, Some(at)) => drop(link.quiesced(at)),
        (6, Some(at)) => link.ready(at, true, true),
        (7, _) => drop(link.next_for_ring(which * 64)),
        _ => {}
    }
}
