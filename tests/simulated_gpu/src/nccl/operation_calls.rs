//! The calls of operations.

use std::ffi::c_int;

use super::communicator::Communicator;
use super::operation::{Operation, OperationKind};
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
        let stream = Stream::find(target.stream, communicator.device).map_err(|_| INVALID_ARGUMENT)?;
        if stream.device != communicator.device {
            return Err(INVALID_ARGUMENT);
        }
        let kind = kind(&communicator)?;
        group::add(Operation { communicator, stream, kind, from, to, bytes, datatype })
    };
    code_of(group::note_error(build()))
}

fn peer_of(communicator: &Communicator, peer: c_int) -> NcclAnswer<usize> {
    usize::try_from(peer).ok().filter(|peer| *peer < communicator.ranks).ok_or(INVALID_ARGUMENT)
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
    add(&target, from, 0, |communicator| Ok(OperationKind::Send { peer: peer_of(communicator, peer)? }))
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
    add(&target, 0, to, |communicator| Ok(OperationKind::Receive { peer: peer_of(communicator, peer)? }))
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
    add(&target, from, to, |_| {
        let reduction =
            Reduction::of(operation).filter(|_| is_reducible(datatype)).ok_or(INVALID_ARGUMENT)?;
        Ok(OperationKind::AllReduce(reduction))
    })
}
