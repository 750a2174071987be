//! The reader of a record, in its own process or in another. Begin at [`RecordSnapshot`].

use std::sync::atomic::AtomicU8;
use std::sync::atomic::Ordering::{Acquire, Relaxed};
use std::sync::atomic::fence;
use std::time::Duration;

use crate::collective_function::CollectiveFunction;
use crate::layout::{CommunicatorSlot, NAME_BYTES, RecordLayout};
use crate::operation_ring::{COLLECTIVES_KEPT, Collective, ReadEntry};
use crate::record::{Record, entry_of};

/// The number of operations of a communicator that [`CommunicatorSnapshot::unfinished`] has at most.
const UNFINISHED_MAX: usize = 4;

/// The contents of a record at a moment.
#[derive(Debug, Clone, PartialEq)]
pub struct RecordSnapshot {
    /// The process.
    pub pid: u32,
    /// The start of the record, in microseconds since the Unix epoch.
    pub started_unix_us: u64,
    /// The job and the task, where the environment of the process told them.
    pub job: Option<String>,
    /// See `job`.
    pub task: Option<u32>,
    /// Whether the process asks NCCL for the times on the GPU.
    pub is_timed: bool,
    /// The number of communicators that had no room in the record.
    pub communicators_not_recorded: u64,
    /// The communicators, in the order in which they were opened.
    pub communicators: Vec<CommunicatorSnapshot>,
}

/// A communicator of the process. Ages count back from the moment of the snapshot.
#[derive(Debug, Clone, PartialEq)]
pub struct CommunicatorSnapshot {
    /// NCCL's hash of the unique id.
    pub hash: u64,
    /// The name that the program gave it; often empty.
    pub name: String,
    /// The rank of this process's device.
    pub rank: u32,
    /// The number of ranks.
    pub ranks: u32,
    /// The number of hosts.
    pub nodes: u32,
    /// Whether it has ended.
    pub is_ended: bool,
    /// The time since it was opened.
    pub opened_ago: Duration,
    /// The time since an operation was enqueued, began or ended.
    pub changed_ago: Duration,
    /// The number of collectives that were enqueued.
    pub collectives: u64,
    /// The totals of every function that was used.
    pub functions: Vec<FunctionTotals>,
    /// The latest collective.
    pub latest: Option<OperationSnapshot>,
    /// The latest collective of which the ring knows that it has ended on the GPU.
    pub latest_ended: Option<OperationSnapshot>,
    /// The first collectives of which the ring knows that they have not ended on the GPU. Empty if their times are not known.
    pub unfinished: Vec<OperationSnapshot>,
}

/// The totals of a function on a communicator.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FunctionTotals {
    /// The function.
    pub function: CollectiveFunction,
    /// The number of operations that were enqueued.
    pub enqueued: u64,
    /// One more than the number of the latest one that began on the GPU, as far as times were asked for.
    pub begun: u64,
    /// The same for the latest one that ended.
    pub ended: u64,
    /// The bytes of all that were enqueued.
    pub bytes: u64,
    /// The number of those whose time on the GPU is known.
    pub timed: u64,
    /// Their bytes.
    pub timed_bytes: u64,
    /// Their time on the GPU, in nanoseconds.
    pub gpu_ns: u64,
}

/// One collective. Ages count back from the moment of the snapshot.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct OperationSnapshot {
    /// Its number among the collectives of the communicator, from 0.
    pub number: u64,
    /// The enqueued collective.
    pub operation: Collective,
    /// The chain of all collectives up to this one.
    pub chain: u64,
    /// Whether its times on the GPU were asked for.
    pub is_timed: bool,
    /// The time since it was enqueued.
    pub enqueued_ago: Duration,
    /// The time since it began on the GPU.
    pub begun_ago: Option<Duration>,
    /// The time since it ended there.
    pub ended_ago: Option<Duration>,
}

impl Record {
    /// Returns the present contents. Communicators that have ended are left out.
    #[must_use]
    pub fn snapshot(&self, now_ns: u64) -> RecordSnapshot {
        let mut snapshot = read_record(self.layout(), now_ns);
        snapshot.communicators.retain(|communicator| !communicator.is_ended);
        snapshot
    }

    /// Returns the collectives of a communicator with the numbers from `first` on, at most `most`, as far as the ring has them.
    #[must_use]
    pub fn collectives_from(
        &self,
        hash: u64,
        rank: u32,
        first: u64,
        most: usize,
        now_ns: u64,
    ) -> Vec<OperationSnapshot> {
        let is_meant = |slot: &&CommunicatorSlot| {
            slot.generation.load(Acquire) != 0
                && slot.is_ended.load(Relaxed) == 0
                && (slot.hash.load(Relaxed), slot.rank.load(Relaxed)) == (hash, rank)
        };
        let Some(slot) = self.layout().used_slots().iter().find(is_meant) else { return Vec::new() };
        let end = slot.collectives.load(Acquire).min(first.saturating_add(most as u64));
        (first..end).filter_map(|number| read_operation(slot, number, now_ns)).collect()
    }
}

/// Returns the contents of a record, which another process may be changing, or may have left damaged.
pub(crate) fn read_record(layout: &RecordLayout, now_ns: u64) -> RecordSnapshot {
    let mut communicators: Vec<CommunicatorSnapshot> =
        layout.used_slots().iter().filter_map(|slot| read_communicator(slot, now_ns)).collect();
    communicators.sort_by_key(|communicator| std::cmp::Reverse(communicator.opened_ago));
    RecordSnapshot {
        pid: layout.pid.load(Relaxed),
        started_unix_us: layout.started_unix_us.load(Relaxed),
        job: Some(read_name(&layout.job)).filter(|job| !job.is_empty()),
        task: u32::try_from(layout.task.load(Relaxed)).ok(),
        is_timed: layout.is_timed.load(Relaxed) != 0,
        communicators_not_recorded: layout.communicators_not_recorded.load(Relaxed),
        communicators,
    }
}

/// Returns the communicator of a slot, if it has one that is not being replaced.
fn read_communicator(slot: &CommunicatorSlot, now_ns: u64) -> Option<CommunicatorSnapshot> {
    let generation = slot.generation.load(Acquire);
    if generation == 0 || generation % 2 == 1 {
        return None;
    }
    let collectives = slot.collectives.load(Acquire);
    let functions =
        CollectiveFunction::ALL.into_iter().zip(&slot.functions).filter_map(|(function, slot)| {
            let enqueued = slot.enqueued.load(Relaxed);
            (enqueued > 0).then(|| FunctionTotals {
                function,
                enqueued,
                begun: slot.begun.load(Relaxed),
                ended: slot.ended.load(Relaxed),
                bytes: slot.bytes.load(Relaxed),
                timed: slot.timed.load(Relaxed),
                timed_bytes: slot.timed_bytes.load(Relaxed),
                gpu_ns: slot.gpu_ns.load(Relaxed),
            })
        });
    let oldest = collectives.saturating_sub(COLLECTIVES_KEPT as u64);
    let operations: Vec<OperationSnapshot> =
        (oldest..collectives).filter_map(|number| read_operation(slot, number, now_ns)).collect();
    let snapshot = CommunicatorSnapshot {
        hash: slot.hash.load(Relaxed),
        name: read_name(&slot.name),
        rank: slot.rank.load(Relaxed),
        ranks: slot.ranks.load(Relaxed),
        nodes: slot.nodes.load(Relaxed),
        is_ended: slot.is_ended.load(Relaxed) != 0,
        opened_ago: age(slot.opened_ns.load(Relaxed), now_ns),
        changed_ago: age(slot.changed_ns.load(Relaxed), now_ns),
        collectives,
        functions: functions.collect(),
        latest: collectives.checked_sub(1).and_then(|number| read_operation(slot, number, now_ns)),
        latest_ended: operations.iter().rfind(|operation| operation.ended_ago.is_some()).copied(),
        unfinished: first_unfinished(&operations),
    };
    fence(Acquire);
    (slot.generation.load(Relaxed) == generation).then_some(snapshot)
}

/// Returns the first collectives that have not ended, of those that NCCL times. A GPU runs the collectives of a communicator in
/// order. So one that has shown no begin or end while a later one has is not timed, though the process asked for times: NCCL reads
/// what it is asked for earlier than the plug-in learns of the collective, and has kernels that it never times.
fn first_unfinished(operations: &[OperationSnapshot]) -> Vec<OperationSnapshot> {
    let latest =
        |has: fn(&OperationSnapshot) -> bool| operations.iter().rfind(|it| has(it)).map(|it| it.number);
    let ended = latest(|it| it.ended_ago.is_some());
    let begun = latest(|it| it.begun_ago.is_some()).max(ended);
    let is_unfinished = |it: &&OperationSnapshot| {
        let after = if it.begun_ago.is_some() { ended } else { begun };
        it.is_timed && it.ended_ago.is_none() && Some(it.number) > after
    };
    operations.iter().filter(is_unfinished).take(UNFINISHED_MAX).copied().collect()
}

fn read_operation(slot: &CommunicatorSlot, number: u64, now_ns: u64) -> Option<OperationSnapshot> {
    let ReadEntry { new, operation, begun_ns, ended_ns } = entry_of(slot, false, number).read(number)?;
    Some(OperationSnapshot {
        number,
        operation,
        chain: new.chain,
        is_timed: new.is_timed,
        enqueued_ago: age(new.enqueued_ns, now_ns),
        begun_ago: (begun_ns != 0).then(|| age(begun_ns, now_ns)),
        ended_ago: (ended_ns != 0).then(|| age(ended_ns, now_ns)),
    })
}

fn age(then_ns: u64, now_ns: u64) -> Duration {
    Duration::from_nanos(now_ns.saturating_sub(then_ns))
}

fn read_name(from: &[AtomicU8; NAME_BYTES]) -> String {
    let bytes: Vec<u8> = from.iter().map(|byte| byte.load(Relaxed)).take_while(|byte| *byte != 0).collect();
    String::from_utf8_lossy(&bytes).into_owned()
}
