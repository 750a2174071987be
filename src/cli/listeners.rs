//! The addresses at which a server listens, and their sockets.
//!
//! A socket comes from the keeper, if there is one and it holds the address, and is bound here otherwise. Begin at
//! [`listen_addresses`] and [`ListenerSource`].

use std::collections::HashMap;
use std::net::{SocketAddr, TcpListener};
use std::time::Duration;

use anyhow::{Context as _, Result};

use crate::clock;
use crate::config::{Config, JobConfig};
use crate::grpc;

/// The time that a process which was killed may take to release its addresses.
pub const ENDING_PROCESS_WAIT: Duration = Duration::from_secs(1);

/// An address of the configuration at which the server listens.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ListenAddress {
    address: SocketAddr,
    /// The protocol, for messages.
    protocol: &'static str,
    /// The flag that sets the address.
    flag: String,
}

impl ListenAddress {
    /// Returns the address of the shared gRPC listener.
    pub fn grpc(config: &Config) -> Self {
        Self { address: config.server.grpc, protocol: "gRPC", flag: "--grpc".to_owned() }
    }

    /// Returns the address of the gRPC listener of one job; `None`: the job uses the shared one.
    pub fn grpc_of_job(job: &JobConfig) -> Option<Self> {
        Some(Self { address: job.grpc?, protocol: "gRPC", flag: format!("--job {}=N@ADDR", job.name) })
    }

    /// Returns the address of the HTTP listener.
    pub fn http(config: &Config) -> Self {
        Self { address: config.server.http, protocol: "HTTP", flag: "--http".to_owned() }
    }

    /// Returns the address of the listener for metrics alone; `None`: there is none.
    pub fn metrics(config: &Config) -> Option<Self> {
        Some(Self { address: config.server.metrics?, protocol: "metrics", flag: "--metrics".to_owned() })
    }

    /// Returns the address of the listener for health alone; `None`: there is none.
    pub fn health(config: &Config) -> Option<Self> {
        Some(Self { address: config.server.health?, protocol: "health", flag: "--health".to_owned() })
    }

    /// Returns a name that no other address of the server has. It changes if the configuration changes the address.
    pub fn name(&self) -> String {
        format!("{} {}", self.flag, self.address)
    }

    /// Binds a listening socket. An address that is in use may be free after `wait`.
    ///
    /// # Errors
    /// If the address cannot be bound.
    pub fn bind(&self, wait: Duration) -> Result<TcpListener> {
        let Self { address, protocol, flag } = self;
        let began = clock::monotonic();
        let bind = || loop {
            match grpc::bind_listener(*address) {
                Err(error) if error.kind() == std::io::ErrorKind::AddrInUse && began.elapsed() < wait => {
                    std::thread::sleep(Duration::from_millis(5));
                }
                bound => return bound,
            }
        };
        bind().with_context(|| {
            format!("cannot listen for {protocol} at {address}: choose another address with {flag} (port 0 picks a free one)")
        })
    }
}

/// Returns all addresses at which a server of this configuration listens.
pub fn listen_addresses(config: &Config) -> Vec<ListenAddress> {
    let jobs = config.jobs.iter().filter_map(ListenAddress::grpc_of_job);
    let auxiliary = [ListenAddress::metrics(config), ListenAddress::health(config)].into_iter().flatten();
    [ListenAddress::http(config), ListenAddress::grpc(config)]
        .into_iter()
        .chain(jobs)
        .chain(auxiliary)
        .collect()
}

/// Where the listening sockets of a server come from.
#[derive(Debug, Default)]
pub struct ListenerSource {
    /// The sockets that the keeper holds, by the name of their address.
    pub kept: HashMap<String, TcpListener>,
    /// How long an address may still be in use by a process that is ending.
    pub wait: Duration,
}

impl ListenerSource {
    /// Returns the socket of an address, and the address with its port.
    ///
    /// # Errors
    /// If the keeper does not hold the address, and it cannot be bound.
    pub fn listen(&mut self, at: &ListenAddress) -> Result<(tokio::net::TcpListener, SocketAddr)> {
        let socket = match self.kept.remove(&at.name()) {
            Some(kept) => kept,
            None => at.bind(self.wait)?,
        };
        let bound = socket.local_addr().context("a listening socket has no address")?;
        let listener = tokio::net::TcpListener::from_std(socket).context("cannot use a listening socket")?;
        Ok((listener, bound))
    }
}
