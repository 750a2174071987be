//! Operations, which a group collects.

use std::ffi::CStr;
use std::sync::Arc;

use super::collective::Collective;
use super::communicator::Communicator;
use super::profiler::OperationTrace;
use crate::stream::Stream;

/// The movement of bytes that an operation asks for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum OperationKind {
    Send { peer: usize },
    Receive { peer: usize },
    Collective(Collective),
}

/// One call between group start and end.
pub struct Operation {
    pub communicator: Arc<Communicator>,
    pub stream: Arc<Stream>,
    /// The stream as the caller named it.
    pub stream_handle: usize,
    pub kind: OperationKind,
    /// The addresses of the bytes that are read and written.
    pub from: u64,
    pub to: u64,
    /// The elements and the bytes of one message.
    pub count: usize,
    pub bytes: usize,
    /// The number of `ncclDataType_t`.
    pub datatype: u32,
    pub trace: OperationTrace,
}

impl Operation {
    /// Returns whether a profiler is told of the operation. NCCL copies for a single rank, and drops empty collectives.
    pub fn has_events(&self) -> bool {
        !matches!(self.kind, OperationKind::Collective(_)) || (self.communicator.ranks > 1 && self.count > 0)
    }

    /// Returns the root of a collective, or the peer of a message.
    pub fn root(&self) -> usize {
        match self.kind {
            OperationKind::Send { peer } | OperationKind::Receive { peer } => peer,
            OperationKind::Collective(collective) => collective.root,
        }
    }

    /// Returns the name of the function that a profiler gets.
    pub fn function_name(&self) -> &'static CStr {
        match self.kind {
            OperationKind::Send { .. } => c"Send",
            OperationKind::Receive { .. } => c"Recv",
            OperationKind::Collective(collective) => collective.function.name(),
        }
    }

    /// Returns the name of the type that a profiler gets. NCCL has none for `ncclUint8`.
    pub fn datatype_name(&self) -> &'static CStr {
        match self.datatype {
            0 => c"ncclInt8",
            2 => c"ncclInt32",
            3 => c"ncclUint32",
            4 => c"ncclInt64",
            5 => c"ncclUint64",
            6 => c"ncclFloat16",
            7 => c"ncclFloat32",
            8 => c"ncclFloat64",
            9 => c"ncclBfloat16",
            10 => c"ncclFloat8e4m3",
            11 => c"ncclFloat8e5m2",
            _ => c"Unknown",
        }
    }
}

/// Returns whether the messages of a rank to itself have receivers of the same sizes, in their order.
pub fn check_own_messages(batch: &[Operation]) -> bool {
    let of_kind =
        |kind| batch.iter().filter(move |operation| operation.kind == kind).map(|operation| operation.bytes);
    let own = batch[0].communicator.rank;
    of_kind(OperationKind::Send { peer: own }).eq(of_kind(OperationKind::Receive { peer: own }))
}
