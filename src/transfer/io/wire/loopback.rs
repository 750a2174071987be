//! Engines of one process: a dialler finds the listener in a table, and hands it one end of a pair of sockets.
//!
//! Nothing listens that another process could reach. Apart from that it is used as a network is: several lanes, checksums,
//! lost lanes made anew. So tests of all that need no network, and programs that embed several engines no port.

use std::collections::BTreeMap;
use std::fmt;
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::UnixStream;
use std::sync::mpsc::{Receiver, SyncSender, TrySendError, sync_channel};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use crate::base::identity::Address;
use crate::base::sync::lock;
use crate::base::transport::TransportKind;
use crate::engine::config::Config;
use crate::io::wire::socket::Socket;
use crate::io::wire::{Listener, Medium, Nature, Received, Way, Wire, WireError, name_of};
use crate::memory::raw::Piece;

/// How many wires may wait to be accepted.
const BACKLOG: usize = 128;

const NATURE: Nature = Nature { shares: false, breaks: true, exposed: false, keeps: false };

/// Who listens in this process, by name.
static LISTENING: Mutex<BTreeMap<String, SyncSender<UnixStream>>> = Mutex::new(BTreeMap::new());

/// Makes them.
pub struct Loopback;

impl Medium for Loopback {
    fn listen(&self, config: &Config, address: &mut Address) -> io::Result<Option<Arc<dyn Listener>>> {
        address.inside = name_of(config);
        let (queue, come) = sync_channel(BACKLOG);
        lock(&LISTENING).insert(address.inside.clone(), queue);
        Ok(Some(Arc::new(Listening { name: address.inside.clone(), come: Mutex::new(come) })))
    }

    fn ways(&self, _here: &Address, peer: &Address) -> Vec<Box<dyn Way>> {
        if peer.inside.is_empty() { Vec::new() } else { vec![Box::new(To(peer.inside.clone()))] }
    }
}

struct Listening {
    name: String,
    come: Mutex<Receiver<UnixStream>>,
}

impl Listener for Listening {
    fn kind(&self) -> TransportKind {
        TransportKind::Loopback
    }

    fn accept(&self) -> io::Result<Box<dyn Wire>> {
        let socket = lock(&self.come).recv().map_err(|_| io::ErrorKind::NotConnected)?;
        Ok(Box::new(Connected(Socket::new(socket.into()))))
    }

    fn stop(&self) {
        // With its only sender gone, whoever waits is woken.
        lock(&LISTENING).remove(&self.name);
    }
}

impl Drop for Listening {
    fn drop(&mut self) {
        self.stop();
    }
}

struct To(String);

impl fmt::Display for To {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "loopback:{}", self.0)
    }
}

impl Way for To {
    fn nature(&self) -> Nature {
        NATURE
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
        Ok(Box::new(Connected(Socket::new(near.into()))))
    }
}

struct Connected(Socket);

impl Wire for Connected {
    fn kind(&self) -> TransportKind {
        TransportKind::Loopback
    }

    fn nature(&self) -> Nature {
        NATURE
    }

    fn descriptor(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }

    fn send(&self, pieces: &[Piece<'_>]) -> Result<usize, WireError> {
        self.0.send(pieces)
    }

    fn receive(&self, pieces: &[Piece<'_>]) -> Result<Received, WireError> {
        self.0.receive(pieces)
    }

    fn discard(&self, len: usize) -> Result<usize, WireError> {
        self.0.waste(len)
    }

    fn end(&self) {
        self.0.end();
    }
}
