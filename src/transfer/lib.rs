//! The transfer engine: moves buffers between the devices of a cluster's tasks.
//!
//! It is a library of its own: it takes a [`Membership`], fences by incarnation, and knows nothing of the
//! service. Begin at [`Engine`], the handle of programs, then `engine/request.rs` (prepare),
//! `engine/prepared.rs` (launch) and `protocol/link` (the messages of two engines). `ARCHITECTURE.md` has the
//! flow of a transfer.
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
//! A lower layer calls a higher one through a trait that the lower one defines: `LaneHost`, `FetchHost`, `BellHost`
//! (`io`), `SessionHandle`, `LaunchPart` (`launch`), `SessionHost` (`session`), `WireAttendant` (wires).
//!
//! | word | meaning |
//! | --- | --- |
//! | region, buffer, span | memory that the engine knows, a range of it, and a range of that: [`Arena`], [`Buffer`], [`Span`] |
//! | event | completes when a buffer is defined: [`Event`] |
//! | transfer | bytes that move between two devices under one key: [`Spec`] requests one, [`Transfer`] is some of them in flight |
//! | prepared | all slow work is done: [`Prepared`] |
//! | group | the transfers of one launch between two tasks: the n-th launch of a channel on both sides |
//! | clique | the incarnations that share connections: [`CliqueKey`] |
//! | wire | a byte stream between two engines, over any transport |
//! | lane | one wire of a connection |
//! | plan | the list of byte ranges to move so that an array becomes sharded in another way: [`plan`] |
//! | chunk | the unit in which a group's bytes are cut, checked, resent and interleaved |
//!
//! Invariants, beside those of `protocol/link` and the rule of guards in `launch`:
//!
//! 1. No byte lands before both sides' lists were found equal and the destination may be written.
//! 2. A chunk lands on one lane at a time, and never after it has landed.
//! 3. After a failure or a confirmed cancellation of a transfer no byte lands in its buffers. Bytes that are
//!    received without an error are the bytes that the sender's buffers held while the transfer used them,
//!    whichever side shuts down when.
//! 4. While a transfer writes a buffer, nothing else in its process uses the buffer; while a transfer reads
//!    one, nothing writes it.
//! 5. A frame of another incarnation than the connection's ends the connection and is counted. Incarnations
//!    are in the hello, in every frame and in the key of a clique: a restarted task shares its number with
//!    its former incarnation and nothing else.
//! 6. Every launch ends: by completion, by its limits, by the end of its peer, or by a cancellation of its
//!    caller.
//! 7. Making room for other connections costs no launch: a connection that ends for it has nothing in flight
//!    or defined on either side, and both sides' launches of one number are on one connection.

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

pub use base::counts::EngineCounts;
pub use base::error::{MemoryError, PrepareError, TransferError};
pub use base::event::{Definer, Event};
pub use base::identity::{Address, DeviceId, Incarnation, Member, Membership, Peer, TaskId};
pub use base::key::TransferKey;
pub use base::layout::{Layout, LayoutFingerprint};
pub use base::meters::{Failed, Meters, Stage, TIMES_US, Times, size_classes};
pub use base::network::source_network;
pub use base::transport::{Choice, TransportKind};
pub use engine::cliques::CliqueKey;
pub use engine::config::Config;
pub use engine::handle::{Batch, Engine, LinkState, Traffic};
pub use engine::prepared::{LaunchOptions, Prepared, Spec};
pub use engine::preparing::Preparing;
pub use engine::resharding::{Moved, ReshardError, ShardBuffers};
pub use io::wire::Certificates;
#[cfg(feature = "faults")]
pub use io::wire::Faults;
pub use launch::outcome::Stats;
pub use launch::transfer::{Completion, Quiesced, Transfer};
pub use memory::{Arena, Buffer, Span, registered_bytes};
pub use protocol::link::Class;
