//! The transfer engine: moves buffers between the devices of a cluster's tasks.
//!
//! The engine is a library of its own and contains nothing about the service. Its caller passes a [`Membership`], and
//! the engine moves bytes only with the incarnations in it. Begin at [`TransferEngine`], the handle of programs. Then
//! read `engine/prepare.rs` (prepare), `engine/prepared_transfers.rs` (launch) and `protocol/link` (the messages of
//! two engines). `ARCHITECTURE.md` has the flow of a transfer.
//!
//! Layers, the highest first; each imports only the layers below it (`tests/structure` enforces it):
//!
//! | layer | what it owns |
//! | --- | --- |
//! | `engine` | the interface of programs; finding, making, repairing and ending connections; resharding |
//! | `session` | one connection to one incarnation of one peer |
//! | `io` | wires, lanes, rings, and the threads that serve them |
//! | `launch` | the outcomes of a launch, and the guards of its bytes |
//! | `protocol` | the messages of two engines, without IO |
//! | `memory` | regions, buffers, and views of their bytes |
//! | [`plan`] | which bytes of a sharded array move where; pure, beside `memory` |
//! | `base` | the types of all layers: members, errors, events |
//!
//! A lower layer calls a higher one through a trait that the lower layer defines: `RegionUnmapListener` (`memory`),
//! `SessionHandle` and `LaunchPart` (`launch`), `LaneHost`, `FetchHost`, `DoorbellHost` and `WireEventHandler`
//! (`io`), `SessionHost` (`session`).
//!
//! | word | meaning |
//! | --- | --- |
//! | region | memory that the engine knows: an [`Arena`], or memory of the program |
//! | buffer, span | a [`Buffer`] is a range of a region, and a [`Span`] a range of a buffer |
//! | event | completes when a buffer is *defined* (may be sent, or received into): [`BufferDefinitionEvent`] |
//! | transfer | bytes that move between two devices under one key, as a [`TransferSpec`] requests |
//! | handle | a [`TransferHandle`] stands for one or more transfers in flight |
//! | prepared | describes transfers whose slow work is done, so that they can be launched: [`PreparedTransfers`] |
//! | part | a launch has one part for each peer, and one for copies within its task |
//! | channel | a series of parts of launches between two engines; each engine numbers its own parts |
//! | group | the two parts, one of each engine, that have the same number on the same channel |
//! | clique | the two incarnations that share a connection: [`CliqueKey`] |
//! | wire | a byte stream between two engines, over any transport |
//! | lane | a wire that belongs to a connection |
//! | plan | the byte ranges to move in order to change the sharding of an array: [`plan`] |
//! | chunk | the unit in which a group's bytes are cut, checked, resent and interleaved |
//!
//! Invariants, besides those of `protocol/link` and the rules of guards in `launch`. A byte *lands* when it is
//! written to its destination.
//!
//! 1. No byte lands until both sides' lists are found equal and the receiving launch has reserved the destination.
//! 2. At most one lane receives a chunk at any moment. After a chunk was received whole, no lane receives it again.
//! 3. After a transfer has failed, its engine writes no byte to the transfer's buffers. After the peers have
//!    confirmed that a launch is cancelled, no engine writes a byte to the buffers of the launch. If a transfer
//!    succeeds, the receiver has the bytes that the sender's buffers held while the transfer used them, even if one
//!    side shuts down meanwhile.
//! 4. While a transfer writes a span, nothing else in the span's process uses the span. While a transfer reads a
//!    span, nothing writes it.
//! 5. Every connection belongs to two incarnations. A frame from another incarnation ends the connection and is
//!    counted. The hello, every frame and the key of a clique contain the incarnations. A restarted task has nothing
//!    in common with its former incarnation but its task id.
//! 6. Every launch ends: it completes or fails, its deadline or its stall limit passes, its connection ends, or one
//!    side cancels it. The exceptions are launches without a deadline: one whose peer is alive and never launches, and one
//!    whose dependencies never complete, end only when their callers cancel them.
//! 7. An engine exchanges bytes with a task of another job only while its membership has that incarnation under that
//!    job. A hello says whether it crosses jobs. If it does, the acceptor looks for the dialler only among the jobs
//!    that its own program has named.
//! 8. A connection is ended to make room for others only if neither side has a launch or a list of transfers on it.
//!    The two parts of a group are always on the same connection.
#![warn(clippy::too_many_lines)]

mod base;
mod engine;
#[cfg(any(test, feature = "fuzzing"))]
#[doc(hidden)]
pub mod fuzzing;
mod io;
mod launch;
mod memory;
pub mod plan;
mod protocol;
mod session;
#[cfg(all(test, loom))]
mod tests;

pub use base::buffer_definition::{BufferDefinitionEvent, BufferDefinitionPromise};
pub use base::client_subnet::client_subnet;
pub use base::counters::FailureCounters;
pub use base::error::{MemoryError, PrepareError, TransferError};
pub use base::key::TransferKey;
pub use base::launch_metrics::{
    FailedLaunch, LaunchMetrics, LaunchStage, TIMES_US, TimeHistogram, size_class_names,
};
pub use base::layout::{BufferLayout, LayoutFingerprint};
pub use base::membership::{
    DeviceId, EngineAddress, Incarnation, MemberId, MemberInfo, Membership, PeerJobAccess, PeerTask, TaskId,
};
pub use base::peer_job::{PeerJob, TooManyJobs};
pub use base::transport::{CliqueChoice, TransportChoice, TransportKind};
pub use engine::clique_cache::CliqueKey;
pub use engine::config::EngineConfig;
pub use engine::handle::{Batch, BytesByTransport, ConnectionStatus, LaunchInFlight, TransferEngine};
pub use engine::prepare_future::PrepareFuture;
pub use engine::prepared_transfers::{LaunchOptions, PreparedTransfers, TransferSpec};
pub use engine::reserved_launch::ReservedLaunch;
pub use engine::resharding::{ReshardArray, ReshardError, ReshardStats, ShardBuffers};
#[cfg(feature = "faults")]
pub use io::wire::FaultInjector;
pub use io::wire::PemCertificates;
pub use launch::outcome::LaunchStats;
pub use launch::transfer::{QuiescenceFuture, TransferHandle};
pub use memory::{Arena, ArenaPool, Buffer, BufferExport, Span, registered_bytes};
pub use muster_cliques::{CliqueOptions, StopMethod};
pub use muster_gpu::{Gpu, GpuEvent, device_memory_bytes as registered_device_bytes, lost_gpus};
pub use protocol::link::PriorityClass;
