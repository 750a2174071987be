//! The calls of operations.

use std::ffi::c_int;

use super::collective::{Collective, Function};
use super::communicator::Communicator;
use super::operation::{Operation, OperationKind};
use super::profiler::OperationTrace;
use super::reduction::{Reduction, is_reducible};
use super::{INVALID_ARGUMENT, NcclAnswer, code_of, group};
use crate::stream::Stream;

/// The bytes of an element of each `ncclDataType_t`.
const SIZES: [usize; 12] = [1, 1, 4, 4, 8, 8, 2, 4, 8, 2, 1, 1];

/// The arguments that all operations have.
struct OperationArguments {
    count: usize,
    datatype: c_int,
    communicator: usize,
    stream: usize,
}

/// Adds an operation to the thread's group.
fn add(
    target: &OperationArguments,
    from: u64,
    to: u64,
    kind: impl FnOnce(&Communicator) -> NcclAnswer<OperationKind>,
) -> c_int {
    let build = || {
        let communicator = Communicator::find_ready(target.communicator)?;
        let datatype = u32::try_from(target.datatype).map_err(|_| INVALID_ARGUMENT)?;
        let size = SIZES.get(datatype as usize).ok_or(INVALID_ARGUMENT)?;
        let bytes = target.count.checked_mul(*size).ok_or(INVALID_ARGUMENT)?;
        // The longest buffer of a collective.
        bytes.checked_mul(communicator.ranks).ok_or(INVALID_ARGUMENT)?;
        let stream = Stream::find(target.stream, communicator.device).map_err(|_| INVALID_ARGUMENT)?;
        if stream.device != communicator.device {
            return Err(INVALID_ARGUMENT);
        }
        let kind = kind(&communicator)?;
        group::add(Operation {
            communicator,
            stream,
            stream_handle: target.stream,
            kind,
            from,
            to,
            count: target.count,
            bytes,
            datatype,
            trace: OperationTrace::default(),
        })
    };
    code_of(group::note_error(build()))
}

/// Returns the rank of an argument: a peer or a root.
fn rank_of(communicator: &Communicator, rank: c_int) -> NcclAnswer<usize> {
    usize::try_from(rank).ok().filter(|rank| *rank < communicator.ranks).ok_or(INVALID_ARGUMENT)
}

/// Returns the operation of an argument, if elements of the type can be reduced.
fn reduction_of(operation: c_int, datatype: c_int) -> NcclAnswer<Reduction> {
    Reduction::of(operation).filter(|_| is_reducible(datatype)).ok_or(INVALID_ARGUMENT)
}

fn collective(function: Function, reduction: Reduction, root: usize) -> OperationKind {
    OperationKind::Collective(Collective { function, reduction, root })
}

/// Sends to a rank, which must receive as much of the same type. Messages between two ranks are matched in their order.
#[unsafe(no_mangle)]
pub extern "C" fn ncclSend(
    from: u64,
    count: usize,
    datatype: c_int,
    peer: c_int,
    communicator: usize,
    stream: usize,
) -> c_int {
    let target = OperationArguments { count, datatype, communicator, stream };
    add(&target, from, 0, |communicator| Ok(OperationKind::Send { peer: rank_of(communicator, peer)? }))
}

/// Receives from a rank; see `ncclSend`.
#[unsafe(no_mangle)]
pub extern "C" fn ncclRecv(
    to: u64,
    count: usize,
    datatype: c_int,
    peer: c_int,
    communicator: usize,
    stream: usize,
) -> c_int {
    let target = OperationArguments { count, datatype, communicator, stream };
    add(&target, 0, to, |communicator| Ok(OperationKind::Receive { peer: rank_of(communicator, peer)? }))
}

/// Reduces the contents of all ranks, for all ranks. Source and destination may be the same. Operations: sum 0, product 1,
/// maximum 2, minimum 3, average 4.
///
/// More lenient: types of 16 and 8 bits with a fraction, and other operations, give error 4. The result is computed in the order
/// of the ranks, so it is the same everywhere and every time; a real one may depend on the algorithm.
#[unsafe(no_mangle)]
pub extern "C" fn ncclAllReduce(
    from: u64,
    to: u64,
    count: usize,
    datatype: c_int,
    operation: c_int,
    communicator: usize,
    stream: usize,
) -> c_int {
    let target = OperationArguments { count, datatype, communicator, stream };
    add(&target, from, to, |_| Ok(collective(Function::AllReduce, reduction_of(operation, datatype)?, 0)))
}

/// Reduces the contents of all ranks, for the root. Other ranks ignore their destination. See `ncclAllReduce`.
#[unsafe(no_mangle)]
pub extern "C" fn ncclReduce(
    from: u64,
    to: u64,
    count: usize,
    datatype: c_int,
    operation: c_int,
    root: c_int,
    communicator: usize,
    stream: usize,
) -> c_int {
    let target = OperationArguments { count, datatype, communicator, stream };
    add(&target, from, to, |communicator| {
        let root = rank_of(communicator, root)?;
        Ok(collective(Function::Reduce, reduction_of(operation, datatype)?, root))
    })
}

/// Reduces the contents of all ranks, and gives each rank the part of its number. The count is that of one part. In place, the
/// destination is the rank's part of the source. See `ncclAllReduce`.
#[unsafe(no_mangle)]
pub extern "C" fn ncclReduceScatter(
    from: u64,
    to: u64,
    count: usize,
    datatype: c_int,
    operation: c_int,
    communicator: usize,
    stream: usize,
) -> c_int {
    let target = OperationArguments { count, datatype, communicator, stream };
    add(&target, from, to, |_| Ok(collective(Function::ReduceScatter, reduction_of(operation, datatype)?, 0)))
}

/// Gathers the contents of all ranks in their order, for all ranks. The count is that of one rank. In place, the source is the
/// rank's part of the destination.
#[unsafe(no_mangle)]
pub extern "C" fn ncclAllGather(
    from: u64,
    to: u64,
    count: usize,
    datatype: c_int,
    communicator: usize,
    stream: usize,
) -> c_int {
    let target = OperationArguments { count, datatype, communicator, stream };
    add(&target, from, to, |_| Ok(collective(Function::AllGather, Reduction::Sum, 0)))
}

/// Copies the contents of the root to all ranks. Other ranks ignore their source.
#[unsafe(no_mangle)]
pub extern "C" fn ncclBroadcast(
    from: u64,
    to: u64,
    count: usize,
    datatype: c_int,
    root: c_int,
    communicator: usize,
    stream: usize,
) -> c_int {
    let target = OperationArguments { count, datatype, communicator, stream };
    add(&target, from, to, |communicator| {
        Ok(collective(Function::Broadcast, Reduction::Sum, rank_of(communicator, root)?))
    })
}

/// Broadcasts in place; see `ncclBroadcast`.
#[unsafe(no_mangle)]
pub extern "C" fn ncclBcast(
    at: u64,
    count: usize,
    datatype: c_int,
    root: c_int,
    communicator: usize,
    stream: usize,
) -> c_int {
    ncclBroadcast(at, at, count, datatype, root, communicator, stream)
}
