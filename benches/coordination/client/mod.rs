//! The load generator's gRPC client. It runs on the same machine as the server under test, so it uses as little
//! processor time as possible: one thread, no tasks, no wakeups, no generated code.

mod calls;
mod connection;
mod hpack;

use std::net::SocketAddr;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail, ensure};
use bytes::Bytes;
use mio::{Events, Interest, Poll, Token};

pub use calls::Reply;
use calls::{Calls, Slot};
use connection::{Connection, Shared};
use hpack::{HeaderTable, StringCache};

use crate::clock::now;
use crate::wire::Method;

/// The time of a step after which the server counts as hung.
pub const PATIENCE: Duration = Duration::from_secs(120);

/// The number of connections that are opened at once.
const OPENING: usize = 64;

/// The number of calls after which the started ones are sent.
const BURST: usize = 64;

/// A call in progress.
#[derive(Debug)]
pub struct Call(Slot);

/// The connections to one server, and the calls on them.
pub struct Client {
    poll: Poll,
    events: Events,
    connections: Vec<Option<Connection>>,
    /// The connections that have output.
    to_flush: Vec<usize>,
    unsent: usize,
    phrases: HeaderTable,
    strings: StringCache,
    calls: Calls,
    buffer: Vec<u8>,
}

impl Client {
    /// Opens connections; they count as open once the server has answered on them, not once the kernel has
    /// accepted them.
    pub fn connect(address: SocketAddr, connections: usize) -> Result<Self> {
        let mut client = Self {
            poll: Poll::new()?,
            events: Events::with_capacity(1024),
            connections: Vec::with_capacity(connections),
            to_flush: Vec::new(),
            unsent: 0,
            phrases: HeaderTable::new(&address.to_string()),
            strings: StringCache::default(),
            calls: Calls::default(),
            buffer: vec![0; 256 << 10],
        };
        let patience = IdleTimer::begin();
        let mut opened = 0;
        while opened < connections {
            while client.connections.len() < connections && client.connections.len() - opened < OPENING {
                client.open(address).context("opening a connection")?;
            }
            while client
                .connections
                .get(opened)
                .is_some_and(|connection| connection.as_ref().is_some_and(|it| it.open))
            {
                opened += 1;
            }
            if opened < client.connections.len() {
                client.turn(&patience)?;
            }
        }
        Ok(client)
    }

    fn open(&mut self, address: SocketAddr) -> Result<()> {
        // Over loopback the kernel connects without waiting for the server.
        let stream = std::net::TcpStream::connect(address)?;
        stream.set_nodelay(true)?;
        stream.set_nonblocking(true)?;
        let mut connection = Connection::new(mio::net::TcpStream::from_std(stream));
        let token = Token(self.connections.len());
        self.poll.registry().register(connection.socket(), token, Interest::READABLE | Interest::WRITABLE)?;
        connection.flush()?;
        self.connections.push(Some(connection));
        Ok(())
    }

    pub fn connections(&self) -> usize {
        self.connections.len()
    }

    /// Starts a call on one of the connections.
    pub fn call(&mut self, connection: usize, method: Method, body: Bytes) -> Result<Call> {
        let slot = self.calls.begin(method);
        let Self { connections, phrases, strings, calls, .. } = self;
        let on = connections[connection].as_mut().context("the connection has been cut")?;
        on.start(&Shared { phrases, strings, calls }, slot, method, body)?;
        self.to_flush.push(connection);
        self.unsent += 1;
        if self.unsent == BURST {
            self.flush()?;
        }
        Ok(Call(slot))
    }

    /// Sends all started calls.
    pub fn flush(&mut self) -> Result<()> {
        self.unsent = 0;
        for connection in self.to_flush.drain(..) {
            if let Some(connection) = &mut self.connections[connection] {
                connection.flush()?;
            }
        }
        Ok(())
    }

    /// Waits for an answer; others are received meanwhile.
    pub fn reply(&mut self, call: Call) -> Result<Reply> {
        let patience = IdleTimer::begin();
        while !self.calls.is_finished(call.0) {
            self.turn(&patience)?;
        }
        self.calls.take(call.0)
    }

    /// Closes a connection as the death of a process does: without GOAWAY, by the kernel.
    pub fn cut(&mut self, connection: usize) -> Result<()> {
        let mut cut = self.connections[connection].take().context("it has been cut before")?;
        self.poll.registry().deregister(cut.socket())?;
        cut.fail(&mut self.calls, "its connection has been cut");
        Ok(())
    }

    /// Sends output, waits for input, and processes it.
    fn turn(&mut self, patience: &IdleTimer) -> Result<()> {
        self.flush()?;
        match self.poll.poll(&mut self.events, Some(patience.left()?)) {
            Err(error) if error.kind() == std::io::ErrorKind::Interrupted => return Ok(()),
            other => other?,
        }
        let Self { connections, phrases, strings, calls, buffer, events, .. } = self;
        for event in &*events {
            let Some(connection) = &mut connections[event.token().0] else { continue };
            if event.is_writable() {
                connection.flush()?;
            }
            if event.is_readable() {
                let mut shared = Shared { phrases, strings, calls };
                if let Err(error) = connection.receive(&mut shared, buffer) {
                    connection.fail(calls, &format!("{error:#}"));
                    ensure!(connection.open, "a connection was refused: {error:#}");
                }
            }
        }
        Ok(())
    }
}

/// The time that a server still has.
struct IdleTimer(Instant);

impl IdleTimer {
    fn begin() -> Self {
        Self(now() + PATIENCE)
    }

    fn left(&self) -> Result<Duration> {
        let left = self.0.saturating_duration_since(now());
        if left.is_zero() {
            bail!("the server has not answered within {PATIENCE:?}");
        }
        Ok(left)
    }
}
