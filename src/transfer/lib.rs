//! The transfer engine: buffers move between the devices of a cluster's tasks.
//!
//! Usable as a library alone: it takes a [`Membership`] and fences by incarnation, and knows nothing of the service.
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

mod accept;
mod cliques;
mod connection;
mod detours;
mod dialling;
mod engine;
mod error;
mod event;
mod frame;
mod handshakes;
mod hello;
mod identity;
mod inside;
mod launch;
mod layout;
mod link;
mod memory;
mod meters;
pub mod plan;
mod prepared;
mod request;
mod resharding;
mod sync;
mod sys;
mod threads;
mod transport;

pub use cliques::CliqueKey;
pub use engine::{Choice, Config, Engine, LinkState, Traffic};
pub use error::{MemoryError, PrepareError, TransferError, TransferKey};
pub use event::{Definer, Event};
pub use identity::{Address, DeviceId, Incarnation, Member, Membership, Peer, TaskId};
pub use inside::Counts;
pub use launch::{Completion, Quiesced, Stats, Transfer};
pub use layout::{Fingerprint, Layout};
pub use link::Class;
pub use memory::{Arena, Buffer, Span, registered_bytes};
pub use meters::{Failed, Meters, Stage, TIMES_US, Times, size_classes};
pub use prepared::{Options, Prepared, Spec};
pub use request::{Batch, Preparing};
pub use resharding::{Moved, ReshardError, ShardBuffers};
pub use transport::TransportKind;
pub use transport::wire::{Certificates, Faults};
