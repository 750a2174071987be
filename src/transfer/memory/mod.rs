//! Memory that transfers move: regions, and buffers in them. `launch` reserves the memory of transfers.
//!
//! | word | meaning |
//! | --- | --- |
//! | region | contiguous memory that the engine knows: an *arena* of shared memory, a program's *foreign* memory, or memory of a GPU |
//! | buffer | a range of a region; its handles share it, and it is freed with the last one |
//! | span | a range of a buffer: the bytes that one transfer reads or writes |
//!
//! Reservations ([`Span`]) guard a buffer's bytes. While a transfer reads or writes a range, a conflicting access
//! fails with an error that the range is busy. No transfer begins to write memory that a program has exported, or
//! memory that may only be read. Other processes of the host can map an arena only read-only (seals prevent any other
//! mapping), so only this process writes the bytes that it receives. Begin at [`Arena`] and [`Buffer`].

mod arena;
mod arena_pool;
mod buffer;
pub mod device_copy;
mod device_mappings;
mod fabric_registrations;
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
pub(crate) use device_mappings::DeviceMappings;
pub(crate) use mapping::Mapping;
pub(crate) use region::{MemoryRegion, RegionUnmapListener};
pub(crate) use span_stream::SpanStream;
pub(crate) use view::{PeerView, ReadView, WriteView, total_len_of_views};
