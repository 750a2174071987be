//! The interface by which fetches call their session. Begin at [`FetchHost`].

use std::sync::Arc;

use muster_fabric::FabricError;
use rustix::io::Errno;

use super::clique::{CliqueExchange, CliqueHost};
use super::fabric_reads::FabricReads;
use super::gpu_copies::CopyFailure;
use super::peer_memory::PeerMemory;
use crate::base::transport::TransportKind;
use crate::launch::peer_launch::PeerLaunch;
use crate::protocol::link::GroupId;
use crate::protocol::link::launch_definition::FetchSource;

/// The session of a fetch, as the fetching threads see it.
pub trait FetchHost: CliqueHost {
    /// Returns the id of the peer's process, if its memory can be read.
    fn readable_peer_pid(&self) -> Option<i32>;

    /// Returns the mapped memory of the peer that contains a source.
    fn peer_memory(&self, source: FetchSource) -> Option<Arc<PeerMemory>>;

    /// Returns the reads over a fabric, if that is how this session fetches.
    fn fabric_reads(&self) -> Option<&FabricReads>;

    /// Returns the exchange between GPUs through a clique, if that is how bytes between them move.
    fn clique_exchange(&self) -> Option<&Arc<CliqueExchange>>;

    /// Returns whether the session can fetch: this side must be able to read the peer's mark.
    fn can_fetch(&self) -> bool;

    /// Returns whether all bytes that were read from the peer's memory before this call are valid. A side
    /// that ends a connection sets the mark first and then reuses its memory, however long the other side
    /// goes on reading.
    fn fetched_bytes_are_valid(&self) -> bool;

    /// Reports that fetched bytes are invalid, because one side is ending the connection.
    fn on_fetch_invalidated(&self, launch: &Arc<PeerLaunch>);

    /// Reports that a launch cannot be fetched. With `nothing_yet` no byte has been fetched, and the peer may
    /// push instead.
    fn on_fetch_failed(&self, launch: &Arc<PeerLaunch>, kind: TransportKind, error: Errno, nothing_yet: bool);

    /// Reports that a GPU failed to copy bytes of a launch.
    fn on_device_fetch_failed(&self, launch: &Arc<PeerLaunch>, failure: CopyFailure);

    /// Reports that a launch cannot be fetched over the fabric, and that no read of it is under way. With `nothing_yet` no byte has been
    /// fetched, and the peer may push instead.
    fn on_fabric_read_failed(&self, launch: &Arc<PeerLaunch>, error: &FabricError, nothing_yet: bool);

    /// Reports that so many more inbound bytes of a group were fetched; others are missing.
    fn on_group_fetched_in_part(&self, at: GroupId, bytes: u64);
}
