//! Checks a request before anything is done for it.
//!
//! It changes nothing and reserves no memory: the launch does. Begin at [`check`].

use std::collections::{HashMap, HashSet};
use std::sync::PoisonError;

use super::prepared::Spec;
use super::shared::EngineShared;
use crate::base::error::PrepareError;
use crate::base::identity::{DeviceId, Member, TaskId};
use crate::base::key::TransferKey;
use crate::protocol::link::definition::ENTRIES_MAX;

/// Checks that the lists of a request are not empty and have the same length.
pub fn check_even(buffers: usize, devices: usize, keys: usize) -> Result<(), PrepareError> {
    if buffers == 0 {
        return Err(PrepareError::Empty);
    }
    if buffers != devices || buffers != keys {
        return Err(PrepareError::Uneven { buffers, devices, keys });
    }
    Ok(())
}

/// Checks a request, and returns the peer of each of its transfers.
pub fn check(shared: &EngineShared, specs: &[Spec]) -> Result<Vec<Member>, PrepareError> {
    if specs.is_empty() {
        return Err(PrepareError::Empty);
    }
    if specs.len() > ENTRIES_MAX {
        return Err(PrepareError::TooMany { given: specs.len(), bound: ENTRIES_MAX });
    }
    let here = shared.here().task;
    let membership = shared.membership.read().unwrap_or_else(PoisonError::into_inner);
    let mut owners: HashMap<DeviceId, TaskId> = HashMap::new();
    let mut owner = |device: DeviceId| -> Result<TaskId, PrepareError> {
        if shared.config.devices.binary_search(&device).is_ok() {
            return Ok(here);
        }
        if let Some(known) = owners.get(&device) {
            return Ok(*known);
        }
        let task = membership
            .owner(device)
            .filter(|task| *task != here)
            .ok_or(PrepareError::UnknownDevice(device))?;
        owners.insert(device, task);
        Ok(task)
    };
    let mut peers = Vec::with_capacity(specs.len());
    let mut seen = HashSet::new();
    let mut written: Vec<(usize, usize, usize, TransferKey)> = Vec::new();
    let mut read: Vec<(usize, usize, usize, TransferKey)> = Vec::new();
    for spec in specs {
        let (near, far) = if spec.outgoing { (spec.from, spec.to) } else { (spec.to, spec.from) };
        let (near_owner, far_owner) = (owner(near)?, owner(far)?);
        if near_owner != here {
            return Err(PrepareError::NotAddressable { device: near, owner: near_owner, here });
        }
        if far_owner == here {
            return Err(PrepareError::SameTask(spec.from, spec.to));
        }
        let (layout, buffer) = (spec.layout.len(), spec.span.len() as u64);
        if layout != buffer {
            return Err(PrepareError::WrongSize { key: spec.key, layout, buffer });
        }
        if !seen.insert((spec.key, spec.from, spec.to)) {
            let (key, source_device, destination) = (spec.key, spec.from, spec.to);
            return Err(PrepareError::DuplicateKey { key, source_device, destination });
        }
        if !spec.span.is_empty() {
            let range =
                (spec.span.buffer().id(), spec.span.start(), spec.span.start() + spec.span.len(), spec.key);
            if spec.outgoing { read.push(range) } else { written.push(range) }
        }
        peers.push(membership.member(far_owner).ok_or(PrepareError::UnknownDevice(far))?);
    }
    check_overlap(written, read)?;
    Ok(peers)
}

/// Checks that no range that is written shares bytes with another range.
fn check_overlap(
    mut written: Vec<(usize, usize, usize, TransferKey)>,
    read: Vec<(usize, usize, usize, TransferKey)>,
) -> Result<(), PrepareError> {
    written.sort_unstable();
    for pair in written.windows(2) {
        let ((buffer, _, end, _), (other, start, until, key)) = (pair[0], pair[1]);
        if buffer == other && start < end {
            return Err(PrepareError::Overlap { key, start, end: until });
        }
    }
    for (buffer, start, end, key) in read {
        // The written ranges do not overlap, so only the last one that begins before `end` can reach into
        // this one.
        let at = written.partition_point(|range| (range.0, range.1) < (buffer, end));
        if let Some(&(other, _, until, _)) = at.checked_sub(1).and_then(|at| written.get(at))
            && other == buffer
            && until > start
        {
            return Err(PrepareError::Overlap { key, start, end });
        }
    }
    Ok(())
}
