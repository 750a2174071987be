//! The connections of simulated tasks to the service: opens them from the address of their host, and resets them when
//! the story kills their tasks.
//!
//! Tasks share connections (`layout.rs`). Begin at [`ConnectionPool::acquire`].

use std::io;
use std::net::{IpAddr, SocketAddr};
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll};
use std::time::Duration;

use futures_util::task::AtomicWaker;
use http::Uri;
use hyper_util::rt::TokioIo;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::{TcpSocket, TcpStream};
use tonic::transport::{Channel, Endpoint};

use super::layout::{ClusterLayout, ConnectionPlan, loopback_address_of_host};
use crate::agent::TimedConnector;
use crate::tls::{IoStream, TlsClientForHost};

/// The timeout of a connection attempt with its TLS handshake.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(30);

/// The gRPC port that simulated tasks connect to.
#[derive(Debug, Clone)]
pub struct SimulatedTarget {
    /// The address of the port.
    pub address: SocketAddr,
    /// The `host:port` that the calls name, by which the service finds the job.
    pub authority: String,
    /// TLS, if the port wants it.
    pub tls: Option<TlsClientForHost>,
}

impl SimulatedTarget {
    /// Returns whether each simulated host can have an address of its own: all of 127.0.0.0/8 belongs to a Linux
    /// machine, and no other simulated address does.
    #[must_use]
    pub fn has_address_for_each_host(&self) -> bool {
        cfg!(target_os = "linux") && matches!(self.address.ip(), IpAddr::V4(ip) if ip.is_loopback())
    }
}

/// A switch that resets a connection: its socket is closed with RST, and nothing is sent before.
#[derive(Debug, Default)]
struct ResetSwitch {
    is_reset: AtomicBool,
    /// The task of tokio that reads the socket.
    reader: AtomicWaker,
}

/// A connection to the service.
#[derive(Debug)]
pub struct SimulatedConnection {
    channel: Channel,
    switch: Arc<ResetSwitch>,
}

impl SimulatedConnection {
    /// Returns the channel for calls on this connection.
    #[must_use]
    pub fn channel(&self) -> Channel {
        self.channel.clone()
    }

    /// Resets the connection, and refuses to open it again.
    pub fn reset(&self) {
        self.switch.is_reset.store(true, Ordering::Release);
        self.switch.reader.wake();
    }

    /// Returns whether the story has reset the connection.
    #[must_use]
    pub fn is_reset(&self) -> bool {
        self.switch.is_reset.load(Ordering::Acquire)
    }
}

/// All connections of a simulated job.
#[derive(Debug)]
pub struct ConnectionPool {
    target: SimulatedTarget,
    layout: ClusterLayout,
    plan: ConnectionPlan,
    connections: Vec<Mutex<Option<Arc<SimulatedConnection>>>>,
}

impl ConnectionPool {
    /// Creates the pool. It opens no connection.
    #[must_use]
    pub fn new(target: SimulatedTarget, layout: ClusterLayout, plan: ConnectionPlan) -> Self {
        let connections = (0..plan.connections()).map(|_| Mutex::default()).collect();
        Self { target, layout, plan, connections }
    }

    /// Returns the connection that a task uses, and replaces it if it was reset. It opens with its first call.
    pub fn acquire(&self, task: u32) -> Arc<SimulatedConnection> {
        let number = self.plan.connection_of_task(task);
        let mut slot = self.connections[number].lock().unwrap_or_else(PoisonError::into_inner);
        match &*slot {
            Some(connection) if !connection.is_reset() => Arc::clone(connection),
            _ => Arc::clone(slot.insert(Arc::new(self.create_connection(number)))),
        }
    }

    fn create_connection(&self, number: usize) -> SimulatedConnection {
        let source = self.target.has_address_for_each_host().then(|| {
            IpAddr::V4(loopback_address_of_host(self.layout.host_of_task(self.plan.first_task(number))))
        });
        let switch = Arc::new(ResetSwitch::default());
        let connector = HostConnector {
            address: self.target.address,
            source,
            tls: self.target.tls.clone(),
            switch: Arc::clone(&switch),
        };
        // The authority is a host and a port, as the caller has checked.
        let uri = format!("http://{}", self.target.authority).parse::<Uri>().unwrap_or_default();
        let connector = TimedConnector::new(CONNECT_TIMEOUT, move || connector.clone().connect());
        let channel = Endpoint::from(uri).connect_with_connector_lazy(connector);
        SimulatedConnection { channel, switch }
    }
}

#[derive(Clone)]
struct HostConnector {
    address: SocketAddr,
    source: Option<IpAddr>,
    tls: Option<TlsClientForHost>,
    switch: Arc<ResetSwitch>,
}

impl HostConnector {
    async fn connect(self) -> io::Result<TokioIo<Box<dyn IoStream>>> {
        let socket = if self.address.is_ipv4() { TcpSocket::new_v4() } else { TcpSocket::new_v6() }?;
        if let Some(source) = self.source {
            socket.bind(SocketAddr::new(source, 0))?;
        }
        let stream = socket.connect(self.address).await?;
        stream.set_nodelay(true)?;
        let stream = ResettableStream { stream, switch: self.switch };
        stream.check_switch()?;
        Ok(TokioIo::new(match &self.tls {
            None => Box::new(stream),
            Some(tls) => tls.connect(stream).await?,
        }))
    }
}

/// A stream that a [`ResetSwitch`] resets.
struct ResettableStream {
    stream: TcpStream,
    switch: Arc<ResetSwitch>,
}

impl ResettableStream {
    fn check_switch(&self) -> io::Result<()> {
        if !self.switch.is_reset.load(Ordering::Acquire) {
            return Ok(());
        }
        // With a linger time of zero, the kernel sends RST when the socket is closed. A socket that cannot be set so
        // is closed in the usual way, which ends its tasks too.
        let _ = socket2::SockRef::from(&self.stream).set_linger(Some(Duration::ZERO));
        Err(io::ErrorKind::ConnectionReset.into())
    }
}

impl AsyncRead for ResettableStream {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        self.switch.reader.register(cx.waker());
        self.check_switch()?;
        Pin::new(&mut self.stream).poll_read(cx, buffer)
    }
}

impl AsyncWrite for ResettableStream {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        self.check_switch()?;
        Pin::new(&mut self.stream).poll_write(cx, bytes)
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        // Without this, the kernel would send FIN.
        self.check_switch()?;
        Pin::new(&mut self.stream).poll_shutdown(cx)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bytes: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        self.check_switch()?;
        Pin::new(&mut self.stream).poll_write_vectored(cx, bytes)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }
}
