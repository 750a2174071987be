//! Tests of links whose peers violate the protocol or never stop sending.
//!
//! Begin at `a_peer_that_knows_no_rules_makes_a_link_neither_panic_nor_grow`.

use super::*;
use crate::protocol::frame::{FrameKind, Header, flag};
use crate::protocol::link::fuzzing::bytes_held_for_peer;
use crate::protocol::link::launch_definition::LaunchDefinition;
use crate::protocol::link::*;

const KINDS: [FrameKind; 24] = [
    FrameKind::Clique,
    FrameKind::Define,
    FrameKind::Undefine,
    FrameKind::Go,
    FrameKind::Ready,
    FrameKind::Stop,
    FrameKind::Stopped,
    FrameKind::Done,
    FrameKind::Damaged,
    FrameKind::Lost,
    FrameKind::Have,
    FrameKind::Ping,
    FrameKind::Pong,
    FrameKind::Data,
    FrameKind::Ack,
    FrameKind::Region,
    FrameKind::Unregion,
    FrameKind::Push,
    FrameKind::Switch,
    FrameKind::Leave,
    FrameKind::Agree,
    FrameKind::Refuse,
    FrameKind::Gone,
    FrameKind::Stay,
];

/// Returns a link with a few launches, for a peer that breaks the protocol.
fn link_with_launches(random: &mut fastrand::Rng) -> LinkSide<usize> {
    let terms = LinkTerms {
        chunk: CHUNK,
        fetch: random.bool(),
        pushes_unsourced: random.bool(),
        lasting: random.bool(),
    };
    let mut link = LinkSide::new(member(0), member(1), terms, LaunchNumbers::default());
    for token in 0..4 {
        let definition = link.send_definition(LaunchDefinition::new(vec![
            transfer_entry(1, 0, 90, 1, 0),
            transfer_entry(2, 1, 120, 2, 0),
        ]));
        let (source, destination, class) = (true, random.bool(), PriorityClass::Normal);
        let at = link.numbers.take_next(0);
        assert!(link.launch(LaunchParameters {
            token,
            definition,
            at,
            class,
            source,
            destination,
            inline: None
        }));
    }
    link
}

#[test]
fn a_peer_that_knows_no_rules_makes_a_link_neither_panic_nor_grow() {
    let list = |here| {
        LaunchDefinition::new(vec![transfer_entry(1, 0, 90, 1, here), transfer_entry(2, 1, 120, 2, here)])
            .encode()
    };
    let mut violations = 0;
    for seed in 0..3000 {
        let mut random = fastrand::Rng::with_seed(seed);
        let mut link = link_with_launches(&mut random);
        let mut number = 0;
        for _ in 0..random.usize(1..300) {
            let kind = KINDS[random.usize(0..KINDS.len())];
            number += 1;
            let mut header = Header {
                flags: random.u8(0..32),
                lane: random.u16(0..3),
                channel: random.u32(0..2),
                index: random.u32(0..9),
                sequence: random.u64(0..6),
                control: number,
                ack: random.u32(0..40),
                ..Header::new(kind, member(1), member(0))
            };
            let mut payload = match random.u8(0..4) {
                0 => list(1),
                1 => vec![random.u8(..); random.usize(0..300)],
                _ => Vec::new(),
            };
            if kind == FrameKind::Define {
                header.flags &= !flag::MORE | if random.bool() { flag::MORE } else { 0 };
            }
            if random.u8(0..20) == 0 {
                header.index = random.u32(..);
                header.sequence = random.u64(..);
                payload.truncate(random.usize(0..=payload.len()));
            }
            if random.u8(0..40) == 0 {
                header.control = random.u32(..);
            }
            if kind == FrameKind::Data {
                header.len = random.u32(0..20);
                if let ChunkDestination::At(token, start) = link.begin_chunk_receive(&header) {
                    assert!(start + u64::from(header.len) <= 120);
                    match random.u8(0..3) {
                        0 => drop(link.finish_chunk_receive(&header)),
                        1 => link.on_chunk_damaged(&header),
                        _ => link.abandon_chunk_receive(&header),
                    }
                    let _launch = token;
                }
                number -= 1;
            } else if link.receive_control_frame(&header, payload).is_err() {
                violations += 1;
                break;
            }
            for output in link.take_outputs() {
                match output {
                    LinkOutput::StoppedByPeer(token, _) => {
                        _ = link.announce_group_quiescence((0, token as u64));
                    }
                    LinkOutput::Fetch(token, _) | LinkOutput::Inline(token, _) if random.bool() => {
                        _ = link.announce_received((0, token as u64));
                    }
                    LinkOutput::CloseLane(lane) => link.report_received_chunks(lane),
                    _ => {}
                }
            }
            while random.bool() && link.next_control_frame(true).is_some() {}
            while random.bool() && link.next_chunk(1).is_some() {}
            link.assert_invariants();
        }
        assert!(bytes_held_for_peer(&link) < 4 << 20, "seed {seed}: {} bytes", bytes_held_for_peer(&link));
    }
    assert!(violations > 1000);
}

/// The frames of one round of a flood.
type FloodRoundFrames = Box<dyn FnMut(u64, Header) -> Vec<(Header, Vec<u8>)>>;

/// Sends frames of one kind until the link refuses one, at most 1.1 million rounds.
fn flood_link_until_refused(
    lasting: bool,
    mut next: impl FnMut(u64, Header) -> Vec<(Header, Vec<u8>)>,
) -> (usize, bool) {
    let mut link: LinkSide<usize> = LinkSide::new(
        member(0),
        member(1),
        LinkTerms { chunk: CHUNK, fetch: false, pushes_unsourced: false, lasting },
        LaunchNumbers::default(),
    );
    let mut control = 0;
    let mut most = 0;
    for round in 0..1_100_000 {
        for (mut header, payload) in next(round, Header::new(FrameKind::Ping, member(1), member(0))) {
            control += 1;
            header.control = control;
            let refused = link.receive_control_frame(&header, payload).is_err();
            if round % (1 << 17) == 0 || refused {
                most = most.max(bytes_held_for_peer(&link));
            }
            if refused {
                return (most, true);
            }
            link.take_outputs();
        }
    }
    (most.max(bytes_held_for_peer(&link)), false)
}

#[test]
fn whatever_a_peer_sends_without_end_takes_only_so_much_memory() {
    const BOUND: usize = 400 << 20;
    let small = LaunchDefinition::new(vec![transfer_entry(1, 1, 4000, 1, 1)]).encode();
    let wide: Vec<u8> =
        LaunchDefinition::new((0..1000).map(|key| transfer_entry(key, 1, 10, 1, 1)).collect()).encode();
    let of = |kind, header: Header| Header { kind, ..header };
    let floods: [(&str, FloodRoundFrames); 6] = [
        ("pings", Box::new(move |_, header| vec![(header, Vec::new()); 4])),
        (
            "definitions of nothing",
            Box::new(move |n, header| {
                vec![(Header { index: n as u32 + 1, ..of(FrameKind::Define, header) }, Vec::new()); 1]
            }),
        ),
        ("launches with their bytes", {
            let small = small.clone();
            Box::new(move |n, header| {
                let define = (Header { index: 1, ..of(FrameKind::Define, header) }, small.clone());
                let header =
                    Header { index: 1, flags: flag::INLINE, sequence: n, ..of(FrameKind::Go, header) };
                let go = (header, vec![1; 4000]);
                if n == 0 { vec![define, go] } else { vec![go] }
            })
        }),
        (
            "launches of lists that are withdrawn",
            Box::new(move |n, header| {
                let index = n as u32 + 1;
                let define = (Header { index, ..of(FrameKind::Define, header) }, wide.clone());
                let go = (Header { index, sequence: n, ..of(FrameKind::Go, header) }, Vec::new());
                let withdraw_definition = (Header { index, ..of(FrameKind::Undefine, header) }, Vec::new());
                vec![define, go, withdraw_definition]
            }),
        ),
        (
            "launches that are given up",
            Box::new(move |n, header| {
                vec![(Header { sequence: n, ..of(FrameKind::Stop, header) }, vec![b'x'; 2000])]
            }),
        ),
        (
            "one definition without end",
            Box::new(move |_, header| {
                vec![(Header { index: 1, flags: flag::MORE, ..of(FrameKind::Define, header) }, vec![0; 4800])]
            }),
        ),
    ];
    for (what, next) in floods {
        let (most, refused) = flood_link_until_refused(what.len() % 2 == 0, next);
        println!("{what}: at most {} KiB, refused: {refused}", most >> 10);
        assert!(most < BOUND && refused, "{what}: {most} bytes, refused: {refused}");
    }
}
