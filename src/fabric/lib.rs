//! Reads of a peer's memory over a fabric (verbs, EFA, Slingshot, TCP) through libfabric, which is loaded at run time.
//!
//! A process registers memory, and tells a peer the address of an endpoint and the key of the memory. The peer reads: the processor of
//! the owner takes no part with a network card that can do so alone. A process without the library gets a [`FabricUnavailable`] that
//! says what is missing. Begin at [`Fabric::open`], then [`FabricEndpoint::read`].
//!
//! | file | contents |
//! | --- | --- |
//! | `library.rs` | the functions of the library, found once per process |
//! | `layouts.rs` | the structs of its interface, as far as this crate uses them |
//! | `error.rs` | why there is no fabric, and what a call answered |
//! | `domain.rs` | the handles of the library that everything else needs |
//! | `registered_memory.rs` | memory that peers may read, or into which reads go |
//! | `endpoint.rs` | the end of the reads between this process and one peer |
//! | `fabric.rs` | a fabric that is open, the thread that drives it, and the fabrics that a host has |
//!
//! Rules:
//!
//! 1. An endpoint belongs to one life of one peer. Closing it proves for that peer alone that no read of either side is under way.
//! 2. The end of a read is told exactly once: its bytes are in place, or it failed, or its endpoint was closed.
//! 3. Providers make progress only while a thread polls them, on the side that is read from, too. One thread per open fabric polls
//!    all endpoints, and sleeps longer and longer while nothing moves.
//! 4. Nothing here waits for a peer. Limits of time are the caller's: it closes the endpoint.

mod domain;
mod endpoint;
mod error;
mod fabric;
mod layouts;
mod library;
mod registered_memory;

pub use domain::FabricProvider;
pub use endpoint::FabricEndpoint;
pub use error::{FabricError, FabricUnavailable};
pub use fabric::{Fabric, library_version, providers};
pub use registered_memory::{RegisteredMemory, RemoteBytes};
