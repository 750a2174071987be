//! Operations, which a group collects.

use std::sync::Arc;

use super::communicator::Communicator;
use super::reduction::Reduction;
use crate::stream::Stream;

/// The movement of bytes that an operation asks for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum OperationKind {
    Send { peer: usize },
    Receive { peer: usize },
    AllReduce(Reduction),
}

/// One call between group start and end.
pub struct Operation {
    pub communicator: Arc<Communicator>,
    pub stream: Arc<Stream>,
    pub kind: OperationKind,
    /// The addresses of the bytes that are read and written.
    pub from: u64,
    pub to: u64,
    pub bytes: usize,
    /// The number of `ncclDataType_t`.
    pub datatype: u32,
}

/// Returns whether the messages of a rank to itself have receivers of the same sizes, in their order.
pub fn check_own_messages(batch: &[Operation]) -> bool {
    let of_kind =
        |kind| batch.iter().filter(move |operation| operation.kind == kind).map(|operation| operation.bytes);
    let own = batch[0].communicator.rank;
    of_kind(OperationKind::Send { peer: own }).eq(of_kind(OperationKind::Receive { peer: own }))
}
