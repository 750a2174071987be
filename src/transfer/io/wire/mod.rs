//! Wires: byte streams between two engines, and the transports that make them.
//!
//! A [lane](super::lane) sends and receives on a [`Wire`] and asks it for its capabilities (can it share
//! memory, can it break while the peer lives); it knows no kind of wire. Wires do not block, and a lane waits for edges of their descriptor,
//! so a wire must report exactly when nothing is left in it. The trait costs one virtual call per system call. To
//! add a kind, add a file here and lines to the two tables of `select.rs`.
//!
//! | file | what it owns |
//! | --- | --- |
//! | `traits.rs` | the traits of a wire, a listener, an endpoint and a transport |
//! | `select.rs` | the choice of the transports of an engine |
//! | `blocking.rs` | a blocking wire with one time limit, for the handshake |
//! | `socket.rs` | the code that all socket wires share |
//! | `tcp.rs` | TCP connections |
//! | `unix.rs` | Unix sockets of this host, which carry descriptors |
//! | `loopback.rs` | engines of one process, without a listening socket |
//! | `tls.rs` | TLS, around wires that leave the host |
//! | `certificates.rs` | the certificates by which engines authenticate each other |
//! | `faulty.rs` | fault injection around any wire, for tests |

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
