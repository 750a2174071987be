//! Scripted exchanges of two links.

use super::*;
use crate::protocol::frame::{Header, Kind};
use crate::protocol::link::definition::Definition;
use crate::protocol::link::*;

#[test]
fn what_has_come_of_a_long_stream_is_told_in_parts() {
    let terms = Terms { chunk: CHUNK, fetch: false, lasting: false };
    let total = 700_000 * u64::from(CHUNK);
    let mut sides = [0, 1].map(|me| {
        let mut link: Link<usize> = Link::new(member(me), member(1 - me), terms, Numbers::default());
        let definition = link.define(Definition::new(vec![entry(1, 0, total, 1, me)]));
        let (source, destination, class) = (true, true, Class::Normal);
        let at = link.numbers.take(0);
        assert!(link.launch(Launching {
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
    fn exchange(sides: &mut [Link<usize>; 2]) {
        for _ in 0..4 {
            for side in 0..2 {
                while let Some(frame) = sides[side].next_control(true) {
                    assert!(Header::decode(&frame.header.encode()).is_ok(), "it is too long to be sent");
                    sides[1 - side].receive(&frame.header, frame.payload).unwrap();
                    for output in sides[1 - side].outputs() {
                        if let Output::CloseLane(lane) = output {
                            sides[1 - side].lane_closed(lane);
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
            assert!(matches!(sides[1].begin_landing(&push.header), Landing::At(..)));
            assert!(sides[1].landed(&push.header));
        }
        count = count.wrapping_add(1);
    }
    sides[0].lane_lost(1);
    exchange(&mut sides);
    let mut again: Vec<u32> =
        std::iter::from_fn(|| sides[0].next_chunk(5)).map(|push| push.header.index).collect();
    again.sort_unstable();
    assert_eq!(again, lost);
}

/// Delivers control frames until neither side has any.
fn talk(links: &mut [Link<u32>; 2]) {
    let mut silent = 0;
    for side in (0..2).cycle() {
        match links[side].next_control(true) {
            Some(frame) => {
                links[1 - side].receive(&frame.header, frame.payload).expect("nobody breaks a rule");
                silent = 0;
            }
            None if silent == 2 => return,
            None => silent += 1,
        }
    }
}

#[test]
fn sides_stay_in_step_when_their_connection_breaks_between_two_launches() {
    let numbers = [Numbers::default(), Numbers::default()];
    let terms = Terms { chunk: CHUNK, fetch: false, lasting: true };
    let connect = || {
        [0, 1].map(|me| {
            let mut link = Link::new(member(me), member(1 - me), terms, numbers[me as usize].clone());
            assert_eq!(link.define(Definition::new(vec![entry(1, 0, 10, 1, me)])), 1);
            link
        })
    };
    let launch = |link: &mut Link<u32>, token| {
        let at = link.numbers.take(0);
        let launching = Launching {
            token,
            definition: 1,
            at,
            class: Class::Normal,
            source: true,
            destination: true,
            inline: None,
        };
        link.launch(launching).then_some(at.1)
    };
    let mut first = connect();
    assert_eq!(launch(&mut first[0], 100), Some(0));
    talk(&mut first);
    assert_eq!(first[0].drain(), [100], "it fails with the connection");

    let mut second = connect();
    assert_eq!(launch(&mut second[1], 200), Some(0));
    talk(&mut second);
    assert!(matches!(&second[1].outputs()[..], [Output::StoppedByPeer(200, why)] if why.contains("earlier")));
    second[1].quiesced((0, 0));
    talk(&mut second);
    for side in [0, 1] {
        assert_eq!(launch(&mut second[side], 300), Some(1));
    }
    talk(&mut second);
    assert!(second.iter_mut().all(|link| link.outputs().contains(&Output::Matched(300))));
    second.iter().for_each(Link::audit);
}

#[test]
fn a_question_that_nobody_answers_changes_nothing() {
    let terms = Terms { chunk: CHUNK, fetch: false, lasting: true };
    let mut link: Link<u32> = Link::new(member(0), member(1), terms, Numbers::default());
    let said = |link: &mut Link<u32>| {
        std::iter::from_fn(|| link.next_control(true)).map(|frame| frame.header.kind).collect::<Vec<_>>()
    };
    assert!(link.keep());
    link.ask_to_leave();
    assert_eq!(said(&mut link), [], "somebody is about to use it");
    link.release();
    link.ask_to_leave();
    link.ask_to_leave();
    assert_eq!(said(&mut link), [Kind::Leave], "it is asked once");
    assert!(link.keep() && link.is_asked());
    let definition = link.define(Definition::new(vec![entry(1, 0, 10, 1, 0)]));
    link.release();
    let at = link.numbers.take(0);
    let (source, destination, class) = (true, true, Class::Normal);
    assert!(link.launch(Launching { token: 1, definition, at, class, source, destination, inline: None }));
    assert_eq!(said(&mut link), [Kind::Define, Kind::Go]);
    // The peer agrees late: the connection was used meanwhile.
    let agreed = Header { control: 1, ..Header::new(Kind::Agree, member(1), member(0)) };
    link.receive(&agreed, Vec::new()).unwrap();
    assert_eq!(said(&mut link), [Kind::Stay]);
    assert!(link.keep() && !link.is_asked() && link.outputs().is_empty());
}
