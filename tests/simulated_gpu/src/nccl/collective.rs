//! Collectives: which part of its source a rank sends to which peer, and where results go.
//!
//! Every rank exchanges a message with every other one, also where it has nothing to send. So a collective ends on no rank
//! before all ranks have begun it.

use std::ffi::CStr;

use super::reduction::Reduction;

/// A collective function. Its number is its place in tables.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Function {
    AllReduce,
    AllGather,
    ReduceScatter,
    Broadcast,
    Reduce,
}

impl Function {
    /// The number of functions.
    pub const COUNT: usize = Self::Reduce as usize + 1;

    /// Returns the name that a profiler gets.
    pub fn name(self) -> &'static CStr {
        match self {
            Self::AllReduce => c"AllReduce",
            Self::AllGather => c"AllGather",
            Self::ReduceScatter => c"ReduceScatter",
            Self::Broadcast => c"Broadcast",
            Self::Reduce => c"Reduce",
        }
    }

    /// Returns whether the events of launches count bytes: NCCL treats all types alike if nothing is computed.
    pub fn is_counted_in_bytes(self) -> bool {
        matches!(self, Self::AllGather | Self::Broadcast)
    }
}

/// The properties that the ranks of a collective must share, besides type and size.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Collective {
    pub function: Function,
    /// Sum where nothing is computed.
    pub reduction: Reduction,
    /// 0 where there is none.
    pub root: usize,
}

impl Collective {
    /// Returns where in its source a rank finds the message for another one; `None` if it sends nothing.
    pub fn sent_part(&self, own: usize, peer: usize, message_len: usize) -> Option<usize> {
        match self.function {
            Function::AllReduce | Function::AllGather => Some(0),
            Function::ReduceScatter => Some(peer * message_len),
            Function::Broadcast => (own == self.root).then_some(0),
            Function::Reduce => (peer == self.root).then_some(0),
        }
    }

    /// Returns whether a rank receives contents from another one.
    pub fn is_received(&self, own: usize, peer: usize) -> bool {
        self.sent_part(peer, own, 0).is_some()
    }

    /// Returns the result of a rank, if it has one, from the messages of all ranks.
    pub fn result(&self, own: usize, datatype: u32, parts: &[Vec<u8>]) -> Option<Vec<u8>> {
        match self.function {
            Function::AllReduce | Function::ReduceScatter => {
                Some(super::reduction::reduce(self.reduction, datatype, parts))
            }
            Function::Reduce => {
                (own == self.root).then(|| super::reduction::reduce(self.reduction, datatype, parts))
            }
            Function::AllGather => Some(parts.concat()),
            Function::Broadcast => Some(parts[self.root].clone()),
        }
    }
}
