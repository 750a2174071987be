//! Kept memory: what a process needs to continue the TCP connections of another one that died at any instruction.
//!
//! Two processes share the memory. The *keeper* holds a duplicate of the socket of each connection, and never reads or
//! writes it. The *core* serves the connections. When a core has died, the next one gets the sockets and the memory from
//! the keeper, and continues each connection at the very byte at which the former core left it. The crate knows bytes,
//! sockets and memory. Its user decides what the bytes mean. Begin at [`KeptMemory`], then [`ConnectionLog`].
//!
//! The kernel counts how far both directions of a connection have come ([`stream_progress()`]), and keeps counting when the
//! process has died. So neither a read nor a write needs to be written down. The rest follows from the order of steps:
//!
//! 1. A core reads from a socket only into a [`ReadRoom`], which says whose bytes it has before it gets them. So bytes that the
//!    kernel has handed out, but that no log contains, are in the room.
//! 2. A core appends to the log of a connection its state, the input that it has not processed, and all output. Then one
//!    store of 8 bytes makes all of that valid ([`ConnectionLog::commit`]).
//! 3. Only then does the core write to the socket, or read into the room again.
//!
//! | file | owns |
//! | --- | --- |
//! | `areas.rs` | which parts of the memory are in use, without access to the memory |
//! | `memory.rs` | the layout of the memory, slots, and access to it |
//! | `connection_log.rs` | the log of one connection |
//! | `read_room.rs` | the buffers that cores read into |
//! | `stream_progress.rs` | the counters of the kernel |
#![warn(clippy::too_many_lines)]

mod areas;
mod connection_log;
mod memory;
mod read_room;
mod stream_progress;

pub use connection_log::{ConnectionLog, LogRecord};
pub use memory::{HeldSlot, KeptMemory, KeptMemoryError, LAYOUT_VERSION, SlotSerials};
pub use read_room::{ROOM_BYTES, ReadRoom};
pub use stream_progress::{StreamProgress, are_counters_exact, stream_progress};
