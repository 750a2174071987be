//! Wires: byte streams between two engines, and the ways to make them.
//!
//! A [lane](super::lane) sends and receives on a [`Wire`] and asks it for its capabilities (sharing memory,
//! breaking); it knows no kind of wire. Only a wire knows when it is dry: wires do not block, a lane waits for
//! their descriptor by edges, so a wire has to report exactly that nothing is left in it. That costs one virtual
//! call a system call. To add a kind: a file here, and lines in the two tables of `select.rs`.
//!
//! | file | what it holds |
//! | --- | --- |
//! | `traits.rs` | the traits of a wire, a listener, an endpoint and a transport |
//! | `select.rs` | which transports an engine uses |
//! | `blocking.rs` | a wire that blocks, with a time limit for all of it: for the hello |
//! | `socket.rs` | the code that all socket wires share |
//! | `tcp.rs` | TCP connections |
//! | `unix.rs` | Unix sockets of this host, which carry descriptors |
//! | `loopback.rs` | engines of one process, without any listening socket |
//! | `tls.rs` | TLS, around wires that leave the host |
//! | `certificates.rs` | the certificates by which engines know one another |
//! | `faulty.rs` | a wrapper around any wire that makes faults, for tests |

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
