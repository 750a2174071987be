//! Memory that transfers move: regions, and buffers in them.
//!
//! | word | meaning |
//! | --- | --- |
//! | region | a contiguous range of memory that the engine knows: an *arena* of shared memory, or *foreign* memory of a program |
//! | buffer | a range of a region that has one owner; freed with its last handle |
//! | span | a range of a buffer: what one transfer reads or writes |
//!
//! Reservations ([`Buffer`]) guard a buffer's bytes: while a transfer reads or writes a range, a conflicting
//! access returns an error that says that the range is busy. Processes on the same host map arenas read-only
//! (seals prevent any other mapping), so only this process writes what it receives.

mod arena;
mod buffer;
mod copy;
mod mapping;
mod pool;
mod region;
mod stream;
mod view;

pub use arena::Arena;
pub use buffer::{Buffer, Span};
pub use region::registered_bytes;

pub(crate) use buffer::{Claim, Reservation, Use};
pub(crate) use mapping::Mapping;
pub(crate) use region::{MemoryRegion, RegionListener};
pub(crate) use stream::SpanStream;
pub(crate) use view::{PeerView, ReadView, WriteView, total};
