//! Tests with scripted frames: between two links, or from a test to one link.
//!
//! `simulation.rs` has random exchanges. Begin at
//! `sides_stay_in_step_when_their_connection_breaks_between_two_launches`.

use super::*;
use crate::protocol::frame::{FrameKind, Header};
use crate::protocol::link::launch_definition::LaunchDefinition;
use crate::protocol::link::*;

#[test]
fn what_has_come_of_a_long_stream_is_told_in_parts() {
    let terms = LinkTerms { chunk: CHUNK, fetch: false, pushes_unsourced: false, lasting: false };
    let total = 700_000 * u64::from(CHUNK);
    let mut sides = [0, 1].map(|me| {
        let mut link: LinkSide<usize> =
            LinkSide::new(member(me), member(1 - me), terms, LaunchNumbers::default());
        let definition =
            link.send_definition(LaunchDefinition::new(vec![transfer_entry(1, 0, total, 1, me)]));
        let (source, destination, class) = (true, true, PriorityClass::Normal);
        let at = link.numbers.take_next(0);
        assert!(link.launch(LaunchParameters {
            token: 0,
            definition,
            at,
            class,
            source,
            destination,
            inline: None
        }));
        link
    });
    fn exchange(sides: &mut [LinkSide<usize>; 2]) {
        for _ in 0..4 {
            for side in 0..2 {
                while let Some(frame) = sides[side].next_control_frame(true) {
                    assert!(Header::decode(&frame.header.encode()).is_ok(), "it is too long to be sent");
                    sides[1 - side].receive_control_frame(&frame.header, frame.payload).unwrap();
                    for output in sides[1 - side].take_outputs() {
                        if let LinkOutput::CloseLane(lane) = output {
                            sides[1 - side].report_received_chunks(lane);
                        }
                    }
                }
            }
        }
    }
    exchange(&mut sides);
    let mut lost = Vec::new();
    let mut count = 0;
    while let Some(push) = sides[0].next_chunk(count % 2) {
        if push.header.index % 1000 == 7 && count % 2 == 1 {
            lost.push(push.header.index);
        } else {
            assert!(matches!(sides[1].begin_chunk_receive(&push.header), ChunkDestination::At(..)));
            assert!(sides[1].finish_chunk_receive(&push.header));
        }
        count = count.wrapping_add(1);
    }
    sides[0].query_received_chunks(1);
    exchange(&mut sides);
    let mut again: Vec<u32> =
        std::iter::from_fn(|| sides[0].next_chunk(5)).map(|push| push.header.index).collect();
    again.sort_unstable();
    assert_eq!(again, lost);
}

/// Delivers control frames until neither side has any.
fn deliver_control_frames(links: &mut [LinkSide<u32>; 2]) {
    let mut silent = 0;
    for side in (0..2).cycle() {
        match links[side].next_control_frame(true) {
            Some(frame) => {
                links[1 - side]
                    .receive_control_frame(&frame.header, frame.payload)
                    .expect("nobody breaks a rule");
                silent = 0;
            }
            None if silent == 2 => return,
            None => silent += 1,
        }
    }
}

#[test]
fn sides_stay_in_step_when_their_connection_breaks_between_two_launches() {
    let numbers = [LaunchNumbers::default(), LaunchNumbers::default()];
    let terms = LinkTerms { chunk: CHUNK, fetch: false, pushes_unsourced: false, lasting: true };
    let connect = || {
        [0, 1].map(|me| {
            let mut link = LinkSide::new(member(me), member(1 - me), terms, numbers[me as usize].clone());
            assert_eq!(link.send_definition(LaunchDefinition::new(vec![transfer_entry(1, 0, 10, 1, me)])), 1);
            link
        })
    };
    let launch = |link: &mut LinkSide<u32>, token| {
        let at = link.numbers.take_next(0);
        let launching = LaunchParameters {
            token,
            definition: 1,
            at,
            class: PriorityClass::Normal,
            source: true,
            destination: true,
            inline: None,
        };
        link.launch(launching).then_some(at.1)
    };
    let mut first = connect();
    assert_eq!(launch(&mut first[0], 100), Some(0));
    deliver_control_frames(&mut first);
    assert_eq!(first[0].take_launches(), [100], "it fails with the connection");

    let mut second = connect();
    assert_eq!(launch(&mut second[1], 200), Some(0));
    deliver_control_frames(&mut second);
    assert!(
        matches!(&second[1].take_outputs()[..], [LinkOutput::StoppedByPeer(200, why)] if why.contains("earlier"))
    );
    second[1].announce_group_quiescence((0, 0));
    deliver_control_frames(&mut second);
    for side in [0, 1] {
        assert_eq!(launch(&mut second[side], 300), Some(1));
    }
    deliver_control_frames(&mut second);
    assert!(second.iter_mut().all(|link| link.take_outputs().contains(&LinkOutput::Matched(300))));
    second.iter().for_each(LinkSide::assert_invariants);
}

#[test]
fn a_question_that_nobody_answers_changes_nothing() {
    let terms = LinkTerms { chunk: CHUNK, fetch: false, pushes_unsourced: false, lasting: true };
    let mut link: LinkSide<u32> = LinkSide::new(member(0), member(1), terms, LaunchNumbers::default());
    let said = |link: &mut LinkSide<u32>| {
        std::iter::from_fn(|| link.next_control_frame(true))
            .map(|frame| frame.header.kind)
            .collect::<Vec<_>>()
    };
    assert!(link.try_lease());
    link.request_leave();
    assert_eq!(said(&mut link), [], "somebody is about to use it");
    link.release_lease();
    link.request_leave();
    link.request_leave();
    assert_eq!(said(&mut link), [FrameKind::Leave], "it is asked once");
    assert!(link.try_lease() && link.has_requested_leave());
    let definition = link.send_definition(LaunchDefinition::new(vec![transfer_entry(1, 0, 10, 1, 0)]));
    link.release_lease();
    let at = link.numbers.take_next(0);
    let (source, destination, class) = (true, true, PriorityClass::Normal);
    assert!(link.launch(LaunchParameters {
        token: 1,
        definition,
        at,
        class,
        source,
        destination,
        inline: None
    }));
    assert_eq!(said(&mut link), [FrameKind::Define, FrameKind::Go]);
    // The peer agrees late: the connection was used meanwhile.
    let agreed = Header { control: 1, ..Header::new(FrameKind::Agree, member(1), member(0)) };
    link.receive_control_frame(&agreed, Vec::new()).unwrap();
    assert_eq!(said(&mut link), [FrameKind::Stay]);
    assert!(link.try_lease() && !link.has_requested_leave() && link.take_outputs().is_empty());
}

#[test]
fn of_a_transfer_that_is_not_prepared_only_the_launch_of_the_sender_wakes_a_waiter_that_receives() {
    let terms = LinkTerms { chunk: CHUNK, fetch: true, pushes_unsourced: false, lasting: true };
    for (me, woken) in [(0, WaitersToWake::Everyone), (1, WaitersToWake::Lazy)] {
        let mut link = LinkSide::new(member(me), member(1 - me), terms, LaunchNumbers::default());
        let definition = link.send_definition(LaunchDefinition::new(vec![transfer_entry(1, 0, 10, 1, me)]));
        let launching = LaunchParameters {
            token: 1,
            definition,
            at: link.numbers.take_next(0),
            class: PriorityClass::Normal,
            source: true,
            destination: true,
            inline: None,
        };
        assert!(link.launch(launching));
        let mut told = Vec::new();
        while let Some(frame) = link.next_control_frame(true) {
            told.push((frame.header.kind, link.waiters_to_wake(&frame.header)));
        }
        assert_eq!(told, [(FrameKind::Define, WaitersToWake::Lazy), (FrameKind::Go, woken)], "task {me}");
    }
}
