//! The names of the transports between two engines, and the setting that says which transports may be used.
//!
//! [`crate::io`] moves the bytes. Begin at [`TransportKind`], by which bytes are counted, and [`TransportChoice`],
//! the setting.

use std::fmt;

/// The transport that moves bytes, between two processes or within one.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum TransportKind {
    /// Shared memory that both processes map; the receiver copies from it.
    Shm,
    /// The receiver reads the sender's memory through the kernel (`process_vm_readv`).
    Pvm,
    /// The receiver's GPU copies from the memory of the sender's GPU, which both processes map.
    Gpu,
    /// The sender writes to a Unix socket: on the same host, for memory that the receiver cannot read.
    Unix,
    /// The sender writes to TCP connections.
    Tcp,
    /// The receiver reads the sender's memory over a fabric, through libfabric.
    Fabric,
    /// The GPUs of both sides move the bytes through a clique of NCCL.
    Nccl,
    /// The sender writes to sockets that exist within one process only.
    Loopback,
    /// The task copies between its own buffers.
    Local,
}

impl TransportKind {
    /// All transports.
    pub const ALL: [Self; 9] = [
        Self::Shm,
        Self::Pvm,
        Self::Gpu,
        Self::Unix,
        Self::Tcp,
        Self::Fabric,
        Self::Nccl,
        Self::Loopback,
        Self::Local,
    ];

    /// Returns the name as a metric's label.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Shm => "shm",
            Self::Pvm => "pvm",
            Self::Gpu => "gpu",
            Self::Unix => "unix",
            Self::Tcp => "tcp",
            Self::Fabric => "fabric",
            Self::Nccl => "nccl",
            Self::Loopback => "loopback",
            Self::Local => "local",
        }
    }
}

impl fmt::Display for TransportKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// The setting that says where bytes between GPUs move through a clique of NCCL.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum CliqueChoice {
    /// Nowhere.
    #[default]
    Off,
    /// On TCP connections, which lead to other hosts as a rule. Within a host, GPUs copy from one another.
    Auto,
    /// On all connections between tasks of one job.
    Always,
}

impl std::str::FromStr for CliqueChoice {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "off" => Ok(Self::Off),
            "auto" => Ok(Self::Auto),
            "always" => Ok(Self::Always),
            other => Err(format!("cliques: {other:?} is none of off, auto and always")),
        }
    }
}

/// The setting that says which transports may be used.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum TransportChoice {
    /// The best transport that both sides support: shared memory, reads of the peer's memory, copies between GPUs, a Unix
    /// socket, TCP. If one fails, the engine chooses again.
    #[default]
    Auto,
    /// On this host: shared memory for arenas, also those on GPUs, and a Unix socket for other memory.
    Shm,
    /// On this host: reads of the peer's memory through the kernel (`process_vm_readv`), for all memory.
    Pvm,
    /// On this host: a Unix socket.
    Unix,
    /// TCP, even on this host.
    Tcp,
    /// Between engines of one process: as over TCP, but without a listening socket. For tests, and for
    /// programs that embed several engines.
    Loopback,
}
