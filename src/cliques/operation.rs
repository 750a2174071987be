//! The operations of batches. Begin at [`CliqueOperation`].

/// Whether a member sends or receives.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum OperationDirection {
    /// From the member to the peer.
    Send,
    /// From the peer to the member.
    Receive,
}

/// One operation of a member of this process. The peer has one in the other direction, of the same length, in the same place among those
/// of the two.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CliqueOperation {
    /// The rank of the member of this process.
    pub rank: usize,
    /// The rank of the other side, which may be a member of this process too.
    pub peer: usize,
    /// The direction.
    pub direction: OperationDirection,
    /// The first address, in memory of the member's device.
    pub address: u64,
    /// The number of bytes.
    pub len: usize,
}
