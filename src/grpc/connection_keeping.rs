//! Keeps connections when this process dies: by the memory of their logs, and by another process that holds their sockets.
//! Begin at [`ConnectionKeeper`].

use std::io;
use std::os::fd::BorrowedFd;
use std::sync::Arc;

use muster_kept::{HeldSlot, KeptMemory};

/// Holds a second descriptor of the sockets of kept connections, in another process.
pub trait ConnectionKeeper: Send + Sync {
    /// Gives the socket of the connection with this slot to the other process.
    ///
    /// # Errors
    /// If that process does not receive it. Then the connection is not kept.
    fn hold(&self, socket: BorrowedFd<'_>, slot: HeldSlot) -> io::Result<()>;

    /// Tells the other process that the connection has ended.
    fn release(&self, slot: HeldSlot);
}

/// The memory of the logs, and the keeper of the sockets.
#[derive(Clone)]
pub(super) struct ConnectionKeeping {
    pub(super) memory: Arc<KeptMemory>,
    pub(super) keeper: Arc<dyn ConnectionKeeper>,
}
