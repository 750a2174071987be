//! Memory that transfers move: regions, and buffers in them.
//!
//! | word | meaning |
//! | --- | --- |
//! | region | one stretch of memory that the engine knows: an *arena* of shared memory, or *foreign* memory as it is |
//! | buffer | a stretch of a region that belongs to one holder; freed with its last handle |
//! | span | a range of a buffer: what one transfer reads or writes |
//!
//! A buffer's bytes are guarded by its [usage](Buffer): while a transfer reads or writes a range, this
//! interface refuses to write it or to read it with an error that says that it is busy. Processes on the same host map
//! arenas read-only (the memory is sealed against any other use), so what is received is only ever written here.

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
