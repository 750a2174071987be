//! Test properties of the transfer engine's decoders: of frames, handshakes, plans, and sequences of frames on a
//! link.
//!
//! This module is only for tests. Each property is a function that takes any bytes, and panics if the property does
//! not hold. The fuzz targets (`tests/fuzz`) call these functions. Begin at [`TARGETS`].

use crate::plan::{ArrayDescription, Placement, Plan, PlanOptions};
use crate::protocol::frame::{CHUNK_MAX, CONTROL_MAX, FrameKind, HEADER, Header, crc32c_of};
use crate::protocol::hello::{
    ANSWER_TERMS, CHALLENGE, HELLO_TERMS, Hello, HelloAnswer, NONCE_MESSAGE, OPENING, check_nonce_message,
    encode_nonce_message, write_checksum,
};
use crate::protocol::link::launch_definition::LaunchDefinition;

/// A property, by its name.
#[derive(Debug, Clone, Copy)]
pub struct FuzzTarget {
    /// Its name, and that of its folder in the corpus.
    pub name: &'static str,
    /// The property: takes any bytes, and panics if it does not hold of them.
    pub property: fn(&[u8]),
    /// The bytes of memory that it may take for each byte of the input, beside a constant.
    pub growth: usize,
}

impl FuzzTarget {
    /// Creates a target.
    #[must_use]
    pub const fn new(name: &'static str, property: fn(&[u8]), growth: usize) -> Self {
        Self { name, property, growth }
    }
}

/// The properties of this crate.
pub static TARGETS: [FuzzTarget; 4] = [
    FuzzTarget::new("frame", check_frame, 1 << 10),
    FuzzTarget::new("hello", check_hello, 1 << 10),
    FuzzTarget::new("link", crate::protocol::link::fuzzing::fuzz_link_conversation, 1 << 10),
    FuzzTarget::new("plan", check_plan, 4 << 10),
];

/// The steps of a plan that are looked at one by one.
const STEPS_MAX: usize = 500;

/// A header keeps its bounds and is the same after it was written and read again; so is a list of transfers.
fn check_frame(input: &[u8]) {
    let mut bytes = [0; HEADER];
    let length = input.len().min(HEADER);
    bytes[..length].copy_from_slice(&input[..length]);
    // As it is, and with what would be refused at once put right.
    for mend in [false, true] {
        if mend {
            bytes[..3].copy_from_slice(&Header { kind: FrameKind::Ping, ..empty_header() }.encode()[..3]);
            let sum = crc32c_of(&bytes[..HEADER - 4]);
            bytes[HEADER - 4..].copy_from_slice(&sum.to_le_bytes());
        }
        if let Ok(header) = Header::decode(&bytes) {
            let bound = if header.kind == FrameKind::Data { CHUNK_MAX } else { CONTROL_MAX };
            assert!(header.len as usize <= bound);
            assert_eq!(Header::decode(&header.encode()), Ok(header));
        }
    }
    if let Some(list) = LaunchDefinition::decode(input) {
        assert!(list.entries.is_sorted_by_key(|entry| entry.sort_key()));
        // The other side's view of it is written as this side's: the second reading is the first one again.
        let theirs = LaunchDefinition::decode(&list.encode());
        let again = theirs.as_ref().and_then(|list| LaunchDefinition::decode(&list.encode()));
        assert_eq!(again.as_ref(), Some(&list));
        assert!(theirs.is_some_and(|theirs| (theirs.sent, theirs.received) == (list.received, list.sent)));
        assert!(list.describe_keys().len() < 1 << 10);
    }
}

fn empty_header() -> Header {
    Header {
        kind: FrameKind::Ping,
        flags: 0,
        class: 0,
        lane: 0,
        source: 0,
        destination: 0,
        channel: 0,
        index: 0,
        sequence: 0,
        control: 0,
        ack: 0,
        len: 0,
        payload_crc: 0,
    }
}

/// A message of a handshake survives encoding and decoding.
fn check_hello(input: &[u8]) {
    if let Some(terms) = input.first_chunk::<HELLO_TERMS>()
        && let Some((hello, token)) = Hello::decode(terms)
    {
        assert_eq!(Hello::decode(&hello.encode_without_proof(token)), Some((hello, token)));
    }
    if let Some(terms) = input.first_chunk::<ANSWER_TERMS>()
        && let Some(answer) = HelloAnswer::decode(terms)
    {
        assert_eq!(
            HelloAnswer::decode(&answer.encode_without_proof()).map(|answer| answer.encode_without_proof()),
            Some(answer.encode_without_proof())
        );
    }
    if let Some(bytes) = input.first_chunk::<NONCE_MESSAGE>() {
        let mut sealed = *bytes;
        write_checksum(&mut sealed);
        for (which, other) in [(OPENING, CHALLENGE), (CHALLENGE, OPENING)] {
            for bytes in [*bytes, sealed] {
                if check_nonce_message(which, &bytes).is_ok() {
                    assert!(check_nonce_message(other, &bytes).is_err(), "one is never taken for the other");
                }
            }
        }
    }
    if let Some(nonce) = input.first_chunk() {
        assert_eq!(check_nonce_message(OPENING, &encode_nonce_message(OPENING, nonce)), Ok(()));
    }
}

/// Takes a plan, or the descriptions that one is made of: source, destination and placement, a line each. A plan is the same
/// after it was written and read again, and every description too.
fn check_plan(input: &[u8]) {
    let Ok(text) = str::from_utf8(input) else { return };
    if let Ok(plan) = Plan::from_json(text) {
        assert_round_trip(&plan);
    }
    let mut lines = text.lines();
    let mut described = || {
        let found = ArrayDescription::from_json(lines.next()?).ok()?;
        let text = serde_json::to_string(&found).expect("a description is written as it was read");
        assert_eq!(ArrayDescription::from_json(&text).as_ref(), Ok(&found));
        Some(found)
    };
    let (Some(source), Some(destination)) = (described(), described()) else { return };
    let placement = lines.next().map(Placement::from_json).and_then(Result::ok).unwrap_or_else(|| {
        let devices = source.sharding.mesh.devices.iter().chain(&destination.sharding.mesh.devices);
        Placement::blocks(devices.copied(), 2, 2)
    });
    if let Ok(plan) = Plan::new(source, destination, &placement, PlanOptions::default()) {
        assert_round_trip(&plan);
    }
}

fn assert_round_trip(plan: &Plan) {
    if plan.len() > STEPS_MAX {
        return;
    }
    let text = plan.to_json().expect("so few steps are written");
    let again = Plan::from_json(&text).expect("a plan that was written is read");
    assert_eq!(again.to_json().as_ref(), Ok(&text));
    assert_eq!(again.fingerprint(), plan.fingerprint());
    let bytes: u64 = plan.steps().map(|step| step.bytes).sum();
    let cost = plan.cost();
    assert_eq!(cost.classes.iter().map(|class| class.bytes).sum::<u64>(), bytes);
    for task in plan.tasks().iter().take(4) {
        let steps = plan.steps_of_task(*task).count();
        assert!(steps <= plan.len());
    }
}
