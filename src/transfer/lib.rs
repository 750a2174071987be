//! The transfer engine: buffers move between the devices of a cluster's tasks.
//!
//! It is a library of its own: it takes a [`Membership`] and fences by incarnation, and knows nothing of the service.
//! Begin at [`Engine`], which programs hold, and `protocol/link`, which has what two engines say.
//!
//! Layers, the highest first; each knows those below it only (`tests/structure` holds that):
//!
//! | layer | what it has |
//! | --- | --- |
//! | `engine` | what programs call; how connections are found, made, mended and ended; plans, carried out |
//! | `session` | one connection to one life of one peer |
//! | `io` | wires, lanes, rings, and the threads that attend to them |
//! | `launch` | the outcomes of a launch, and the guards of its bytes |
//! | `protocol` | what two engines say, without IO |
//! | `memory` | regions, buffers, and views of their bytes |
//! | [`plan`] | which bytes of a sharded array move where; pure, beside `memory` |
//! | `base` | the nouns of all layers: members, errors, events |
//!
//! A lower layer speaks to a higher one by a trait that it defines itself: `LaneHost`, `FetchHost`, `BellHost` (`io`),
//! `SessionHandle`, `LaunchPart` (`launch`), `SessionHost` (`session`), `WireAttendant` (wires).
//!
//! | word | meaning |
//! | --- | --- |
//! | region, buffer, span | memory that the engine knows, a stretch of it, and a range of that: [`Arena`], [`Buffer`], [`Span`] |
//! | event | says when a buffer is defined: [`Event`] |
//! | transfer | bytes that move between two devices under one key: [`Spec`] asks for one, [`Transfer`] is some of them under way |
//! | prepared | everything slow is done: [`Prepared`] |
//! | group | what one launch moves between two tasks: the n-th launch of a channel on both sides |
//! | clique | the lives that share connections: [`CliqueKey`] |
//! | wire | a byte stream between two engines, whatever it is made of |
//! | lane | one wire of a connection |
//! | plan | which bytes move where so that an array becomes sharded in another way: [`plan`] |
//! | chunk | the unit in which a group's bytes are cut, checked, sent again and interleaved |

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

pub use base::counts::Counts;
pub use base::error::{MemoryError, PrepareError, TransferError};
pub use base::event::{Definer, Event};
pub use base::identity::{Address, DeviceId, Incarnation, Member, Membership, Peer, TaskId};
pub use base::key::TransferKey;
pub use base::layout::{Fingerprint, Layout};
pub use base::meters::{Failed, Meters, Stage, TIMES_US, Times, size_classes};
pub use base::network::source_network;
pub use base::transport::{Choice, TransportKind};
pub use engine::cliques::CliqueKey;
pub use engine::config::Config;
pub use engine::handle::{Batch, Engine, LinkState, Traffic};
pub use engine::prepared::{Options, Prepared, Spec};
pub use engine::preparing::Preparing;
pub use engine::resharding::{Moved, ReshardError, ShardBuffers};
pub use io::wire::Certificates;
#[cfg(feature = "faults")]
pub use io::wire::Faults;
pub use launch::outcome::Stats;
pub use launch::transfer::{Completion, Quiesced, Transfer};
pub use memory::{Arena, Buffer, Span, registered_bytes};
pub use protocol::link::Class;
