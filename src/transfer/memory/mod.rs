//! Memory that transfers move: regions, and buffers in them.
//!
//! | word | meaning |
//! | --- | --- |
//! | region | a contiguous range of memory that the engine knows: an *arena* of shared memory, or *foreign* memory of a program |
//! | buffer | a range of a region that has one owner; it is freed with its last handle |
//! | span | a range of a buffer: the bytes that one transfer reads or writes |
//!
//! Reservations ([`Buffer`]) guard a buffer's bytes. While a transfer reads or writes a range, a conflicting access
//! fails with an error that the range is busy. Transfers never write memory that a program has exported, or memory
//! that may only be read. Other processes of the host can map an arena only read-only (seals prevent any other
//! mapping), so only this process writes the bytes that it receives.

mod arena;
mod arena_pool;
mod buffer;
mod free_ranges;
mod mapping;
mod region;
mod shared_memory_copy;
mod span_stream;
mod view;

pub use arena::Arena;
pub use arena_pool::ArenaPool;
pub use buffer::{Buffer, BufferExport, Span};
pub use region::registered_bytes;

pub(crate) use buffer::{AccessKind, BufferClaim, Reservation};
pub(crate) use mapping::Mapping;
pub(crate) use region::{MemoryRegion, RegionUnmapListener};
pub(crate) use span_stream::SpanStream;
pub(crate) use view::{PeerView, ReadView, WriteView, total_len_of_views};
