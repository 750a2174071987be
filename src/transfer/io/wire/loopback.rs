//! Wires between engines of one process. A dialler finds the listener in a table, and passes it one end of a socket
//! pair.
//!
//! No other process can reach such a listener. In all other respects, engines treat these wires like a network: a
//! connection has several lanes and checksums, and lost lanes are dialled again. So tests of lanes need no network,
//! and programs that embed several engines need no port. Begin at [`Loopback`].

use std::collections::BTreeMap;
use std::fmt;
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::UnixStream;
use std::sync::mpsc::{Receiver, SyncSender, TrySendError, sync_channel};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use super::socket::Socket;
use super::traits::{
    Endpoint, ListenSettings, Listener, ReceivedCount, Transport, Wire, WireCapabilities, WireError,
};
use crate::base::membership::EngineAddress;
use crate::base::sync::lock;
use crate::base::transport::TransportKind;
use crate::memory::{ReadView, WriteView};

/// The most wires that may wait to be accepted.
const BACKLOG: usize = 128;

const CAPABILITIES: WireCapabilities =
    WireCapabilities { shares_memory: false, is_breakable: true, is_exposed: false, is_buffered: false };

/// The listeners of this process, by name.
static LISTENING: Mutex<BTreeMap<String, SyncSender<UnixStream>>> = Mutex::new(BTreeMap::new());

/// The transport within one process.
pub struct Loopback;

impl Transport for Loopback {
    fn listen(
        &self,
        settings: &ListenSettings<'_>,
        address: &mut EngineAddress,
    ) -> io::Result<Option<Arc<dyn Listener>>> {
        address.inside = settings.unique_name();
        let (sender, queue) = sync_channel(BACKLOG);
        lock(&LISTENING).insert(address.inside.clone(), sender);
        Ok(Some(Arc::new(LoopbackListener { name: address.inside.clone(), queue: Mutex::new(queue) })))
    }

    fn endpoints(&self, _here: &EngineAddress, peer: &EngineAddress) -> Vec<Box<dyn Endpoint>> {
        if peer.inside.is_empty() {
            Vec::new()
        } else {
            vec![Box::new(LoopbackEndpoint(peer.inside.clone()))]
        }
    }
}

struct LoopbackListener {
    name: String,
    queue: Mutex<Receiver<UnixStream>>,
}

impl Listener for LoopbackListener {
    fn kind(&self) -> TransportKind {
        TransportKind::Loopback
    }

    fn accept(&self) -> io::Result<Box<dyn Wire>> {
        let socket = lock(&self.queue).recv().map_err(|_| io::ErrorKind::NotConnected)?;
        Ok(Box::new(LoopbackWire(Socket::new(socket.into()))))
    }

    fn stop(&self) {
        // Dropping the only sender wakes the thread that waits.
        lock(&LISTENING).remove(&self.name);
    }
}

impl Drop for LoopbackListener {
    fn drop(&mut self) {
        self.stop();
    }
}

struct LoopbackEndpoint(String);

impl fmt::Display for LoopbackEndpoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "loopback:{}", self.0)
    }
}

impl Endpoint for LoopbackEndpoint {
    fn capabilities(&self) -> WireCapabilities {
        CAPABILITIES
    }

    fn dial(&self, _time: Duration) -> io::Result<Box<dyn Wire>> {
        let queue = lock(&LISTENING).get(&self.0).cloned().ok_or(io::ErrorKind::ConnectionRefused)?;
        let (near, far) = UnixStream::pair()?;
        near.set_nonblocking(true)?;
        far.set_nonblocking(true)?;
        queue.try_send(far).map_err(|error| match error {
            TrySendError::Full(_) => io::ErrorKind::WouldBlock,
            TrySendError::Disconnected(_) => io::ErrorKind::ConnectionRefused,
        })?;
        Ok(Box::new(LoopbackWire(Socket::new(near.into()))))
    }
}

struct LoopbackWire(Socket);

impl Wire for LoopbackWire {
    fn kind(&self) -> TransportKind {
        TransportKind::Loopback
    }

    fn capabilities(&self) -> WireCapabilities {
        CAPABILITIES
    }

    fn descriptor(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }

    fn send(&self, views: &[ReadView<'_>]) -> Result<usize, WireError> {
        self.0.send(views)
    }

    fn receive(&self, views: &mut [WriteView<'_>]) -> Result<ReceivedCount, WireError> {
        self.0.receive(views)
    }

    fn discard(&self, len: usize) -> Result<usize, WireError> {
        self.0.discard(len)
    }

    fn end(&self) {
        self.0.end();
    }
}
