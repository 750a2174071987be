//! The sockets of client connections that the keeper holds, so that they stay open when the core dies. Begin at
//! [`HeldConnections`].

use std::collections::HashMap;
use std::io;
use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};

use muster_kept::{HeldSlot, KeptMemory, SlotSerials};

use super::channel::{DESCRIPTORS_MAX, KeeperChannel, KeeperMessage};

/// The sockets of client connections, and the memory in which cores write down what the next one has to know.
#[derive(Debug)]
pub struct HeldConnections {
    memory: OwnedFd,
    serials: SlotSerials,
    /// By the numbers of their slots.
    sockets: HashMap<u32, (u64, OwnedFd)>,
}

impl HeldConnections {
    /// Creates the memory.
    ///
    /// # Errors
    /// If the system has none.
    pub fn create() -> io::Result<Self> {
        let memory = KeptMemory::create()?;
        Ok(Self { serials: SlotSerials::map(&memory)?, memory, sockets: HashMap::new() })
    }

    /// Holds the socket of a connection.
    pub fn hold(&mut self, held: HeldSlot, socket: OwnedFd) {
        self.sockets.insert(held.slot, (held.serial, socket));
    }

    /// Lets go of the socket of a connection that has ended.
    pub fn release(&mut self, held: HeldSlot) {
        if self.sockets.get(&held.slot).is_some_and(|(serial, _)| *serial == held.serial) {
            self.sockets.remove(&held.slot);
        }
    }

    /// Lets go of all sockets.
    pub fn release_all(&mut self) {
        self.sockets.clear();
    }

    /// Lets go of the sockets of all connections that have ended. A core whose message did not come has told of them by the
    /// memory.
    pub fn release_ended(&mut self) {
        let serials = &self.serials;
        self.sockets.retain(|slot, (serial, _)| serials.is_open(HeldSlot { slot: *slot, serial: *serial }));
    }

    /// Hands the memory and all sockets over to a new core.
    ///
    /// # Errors
    /// If it does not take them.
    pub async fn hand_over(&self, to: &KeeperChannel) -> io::Result<()> {
        to.send(&KeeperMessage::Memory, &[self.memory.as_fd()]).await?;
        let sockets: Vec<_> = self.sockets.iter().collect();
        for part in sockets.chunks(DESCRIPTORS_MAX) {
            let slots = part.iter().map(|(slot, (serial, _))| (**slot, *serial)).collect();
            let descriptors: Vec<BorrowedFd<'_>> =
                part.iter().map(|(_, (_, socket))| socket.as_fd()).collect();
            to.send(&KeeperMessage::Connections(slots), &descriptors).await?;
        }
        Ok(())
    }
}
