//! Links against each other in virtual time, and against peers that break the protocol.

mod hostile;
mod pairs;
mod simulation;
mod world;

use super::definition::{DefinitionEntry, Source};
use super::schedule::GroupId;
use crate::base::identity::{DeviceId, Incarnation, Member, TaskId};
use crate::base::key::TransferKey;
use crate::base::layout::LayoutFingerprint;

const CHUNK: u32 = 16;
const NEVER: &str = "never";

fn member(task: u32) -> Member {
    Member { task: TaskId(task), incarnation: Incarnation::new(u64::from(task) + 70).unwrap() }
}

fn entry(key: u64, from: u32, bytes: u64, fingerprint: u64, here: u32) -> DefinitionEntry {
    DefinitionEntry {
        key: TransferKey(key),
        from: DeviceId(from),
        to: DeviceId(1 - from),
        bytes,
        fingerprint: LayoutFingerprint(fingerprint),
        outgoing: from == here,
        source: if from == here { Source::Region(1, 0) } else { Source::None },
    }
}
