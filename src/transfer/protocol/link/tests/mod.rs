//! Tests of links: two links against each other in virtual time, and links whose peers violate the protocol.
//!
//! Begin at `simulation.rs`.

mod hostile;
mod pairs;
mod simulation;
mod world;

use super::chunk_scheduler::GroupId;
use super::launch_definition::{DefinitionEntry, FetchSource};
use crate::base::key::TransferKey;
use crate::base::layout::LayoutFingerprint;
use crate::base::membership::{DeviceId, Incarnation, MemberId, TaskId};

const CHUNK: u32 = 16;
const NEVER: &str = "never";

fn member(task: u32) -> MemberId {
    MemberId::of_own_job(TaskId(task), Incarnation::new(u64::from(task) + 70).unwrap())
}

fn transfer_entry(key: u64, from: u32, bytes: u64, fingerprint: u64, here: u32) -> DefinitionEntry {
    DefinitionEntry {
        key: TransferKey(key),
        from: DeviceId(from),
        to: DeviceId(1 - from),
        bytes,
        fingerprint: LayoutFingerprint(fingerprint),
        outgoing: from == here,
        source: if from == here { FetchSource::Region(1, 0) } else { FetchSource::None },
    }
}
