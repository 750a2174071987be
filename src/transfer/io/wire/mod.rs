//! Wires: byte streams between two engines, and the ways to make them.
//!
//! | file | its reason to exist |
//! | --- | --- |
//! | `traits.rs` | what a wire, a listener, an endpoint and a transport are |
//! | `select.rs` | which transports an engine uses |
//! | `blocking.rs` | a wire that blocks, with a time limit for all of it: for the hello |
//! | `socket.rs` | what all wires over sockets share |
//! | `tcp.rs` | TCP connections |
//! | `unix.rs` | Unix sockets of this host, which carry descriptors |
//! | `loopback.rs` | engines of one process, without any listening socket |
//! | `tls.rs` | around those that leave the host: TLS |
//! | `certificates.rs` | by what engines know one another under TLS |
//! | `faulty.rs` | around any of them: what goes wrong on purpose, for tests |
//!
//! A [lane](super::lane) sends and receives on a [`Wire`] and asks it what it can; it knows no kind of them. To add a kind:
//! a file here, and lines in the two tables of `select.rs`.
//!
//! Wires do not block: what waits waits for their descriptor, by edges. So a wire has to be exact about when it is dry.

mod blocking;
mod certificates;
#[cfg(feature = "faults")]
mod faulty;

mod loopback;
mod select;
mod socket;
mod tcp;
mod tls;
mod traits;
mod unix;

pub use blocking::BlockingWire;
pub use certificates::{Certificates, Identity};
#[cfg(feature = "faults")]
pub use faulty::Faults;
pub use select::{Wrapping, endpoints, listen};
pub use traits::{
    Endpoint, ListenSettings, Listener, Received, Wire, WireAttendant, WireCapabilities, WireEnd, WireError,
    WireWaker,
};
