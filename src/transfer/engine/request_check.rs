//! Checks a request before any work is done for it.
//!
//! The check changes nothing. In particular, it reserves no memory; the launch does. Begin at [`check_request`].

use std::collections::{BTreeMap, HashMap, HashSet};
use std::sync::PoisonError;

use super::prepared_transfers::TransferSpec;
use super::shared::EngineShared;
use crate::base::error::PrepareError;
use crate::base::key::TransferKey;
use crate::base::membership::{DeviceId, MemberId, PeerTask};
use crate::base::peer_job::PeerJob;
use crate::protocol::link::launch_definition::ENTRIES_MAX;

/// Checks that the lists of a request are not empty and have the same length.
pub fn check_equal_lengths(buffers: usize, devices: usize, keys: usize) -> Result<(), PrepareError> {
    if buffers == 0 {
        return Err(PrepareError::Empty);
    }
    if buffers != devices || buffers != keys {
        return Err(PrepareError::Uneven { buffers, devices, keys });
    }
    Ok(())
}

/// Checks what a request says of this task: its size, the devices here, and the memory. Nothing is asked of its peers, so they
/// need not be members yet.
pub fn check_own_side(shared: &EngineShared, specs: &[TransferSpec]) -> Result<(), PrepareError> {
    if specs.is_empty() {
        return Err(PrepareError::Empty);
    }
    if specs.len() > ENTRIES_MAX {
        return Err(PrepareError::TooMany { given: specs.len(), bound: ENTRIES_MAX });
    }
    let mut seen = HashSet::new();
    // Transfers within this task of which the request has one side so far, and whether that is the send.
    let mut half_named: BTreeMap<(TransferKey, DeviceId, DeviceId), bool> = BTreeMap::new();
    let (mut written, mut read) = (Vec::new(), Vec::new());
    for spec in specs {
        let (near, far) = spec.near_and_far();
        if !shared.has_device(near) {
            let membership = shared.membership.read().unwrap_or_else(PoisonError::into_inner);
            let (owner, here) = (membership.device_owner(PeerJob::OWN, near), shared.here().task);
            return Err(match owner.filter(|owner| *owner != here) {
                Some(owner) => PrepareError::NotAddressable { device: near, owner, here },
                None => PrepareError::UnknownDevice(near),
            });
        }
        let is_local = spec.job.is_own() && shared.has_device(far);
        let transfer = (spec.key, spec.from, spec.to);
        if is_local && half_named.insert(transfer, spec.outgoing).is_some() {
            half_named.remove(&transfer);
        }
        let (layout, buffer) = (spec.layout.len(), spec.span.len() as u64);
        if layout != buffer {
            return Err(PrepareError::WrongSize { key: spec.key, layout, buffer });
        }
        // A transfer within this task has both sides in the request.
        if !seen.insert((spec.job, transfer, is_local && spec.outgoing)) {
            let (key, source_device, destination) = (spec.key, spec.from, spec.to);
            return Err(PrepareError::DuplicateKey { key, source_device, destination });
        }
        if !spec.span.is_empty() {
            if !spec.outgoing {
                spec.span.buffer().check_not_read_only()?;
            }
            let range = UsedRange::of_spec(spec);
            if spec.outgoing { read.push(range) } else { written.push(range) }
        }
    }
    if let Some(((key, source_device, destination), is_send)) = half_named.pop_first() {
        let named = if is_send { "send" } else { "receive" };
        return Err(PrepareError::SameTask { key, source_device, destination, named });
    }
    check_no_overlapping_writes(written, read)
}

/// Checks a request, and returns the peer of each of its transfers: this task itself, for a copy within it.
pub fn check_request(shared: &EngineShared, specs: &[TransferSpec]) -> Result<Vec<MemberId>, PrepareError> {
    check_own_side(shared, specs)?;
    let here = shared.here();
    let membership = shared.membership.read().unwrap_or_else(PoisonError::into_inner);
    let mut owners: HashMap<(PeerJob, DeviceId), MemberId> = HashMap::new();
    let mut peer_of = |job: PeerJob, device: DeviceId| -> Result<MemberId, PrepareError> {
        if job.is_own() && shared.has_device(device) {
            return Ok(here);
        }
        if let Some(known) = owners.get(&(job, device)) {
            return Ok(*known);
        }
        if let Some(why) = membership.job_refusal(job) {
            return Err(PrepareError::JobRefused { job, why: why.to_owned() });
        }
        let peer = membership
            .device_owner(job, device)
            .filter(|task| !job.is_own() || *task != here.task)
            .and_then(|task| membership.current_member(PeerTask { job, task }))
            .ok_or_else(|| unknown_device(job, device))?;
        owners.insert((job, device), peer);
        Ok(peer)
    };
    specs.iter().map(|spec| peer_of(spec.job, spec.near_and_far().1)).collect()
}

fn unknown_device(job: PeerJob, device: DeviceId) -> PrepareError {
    if job.is_own() {
        PrepareError::UnknownDevice(device)
    } else {
        PrepareError::UnknownPeerDevice { job, device }
    }
}

/// The bytes of a transfer, by their addresses: two buffers may be of the same memory of the program.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct UsedRange {
    start: u64,
    end: u64,
    key: TransferKey,
    /// The first byte within its buffer.
    offset: usize,
}

impl UsedRange {
    fn of_spec(spec: &TransferSpec) -> Self {
        let start = spec.span.address();
        let end = start.saturating_add(spec.span.len() as u64);
        Self { start, end, key: spec.key, offset: spec.span.buffer_offset() }
    }

    /// Returns the error of a range that another transfer writes.
    fn overlap_error(&self) -> PrepareError {
        let len = usize::try_from(self.end - self.start).unwrap_or(usize::MAX);
        PrepareError::Overlap { key: self.key, start: self.offset, end: self.offset + len }
    }
}

/// Checks that no range that is written shares bytes with another range.
fn check_no_overlapping_writes(
    mut written: Vec<UsedRange>,
    read: Vec<UsedRange>,
) -> Result<(), PrepareError> {
    written.sort_unstable();
    if let Some(pair) = written.windows(2).find(|pair| pair[1].start < pair[0].end) {
        return Err(pair[1].overlap_error());
    }
    for range in read {
        // The written ranges do not overlap, so only the last one that begins before `end` can reach into this one.
        let at = written.partition_point(|other| other.start < range.end);
        let last = at.checked_sub(1).and_then(|at| written.get(at));
        if last.is_some_and(|other| other.end > range.start) {
            return Err(range.overlap_error());
        }
    }
    Ok(())
}
