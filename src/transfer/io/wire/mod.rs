//! Wires: byte streams between two engines, and the transports that make them.
//!
//! A [lane](super::lane) sends and receives on a [`Wire`]. The lane and its connection ask the wire for its
//! [`WireCapabilities`], for example whether it can share memory, and whether it can break while the peer lives.
//! Apart from these, they do not depend on the kind of wire. Wires do not block. A lane waits for edge-triggered
//! events of the wire's descriptor, so the wire must report exactly when nothing is left to read. The trait costs one
//! virtual call per system call. To add a kind of wire, add a file here and lines to the two tables of
//! `transport_selection.rs`. Begin at [`Wire`].
//!
//! | file | what it owns |
//! | --- | --- |
//! | `traits.rs` | the traits of a wire, a listener, an endpoint and a transport |
//! | `transport_selection.rs` | the choice of the transports of an engine |
//! | `blocking.rs` | a blocking wire with one time limit, for the handshake |
//! | `socket.rs` | the code that all socket wires share |
//! | `tcp.rs` | TCP connections |
//! | `unix.rs` | Unix sockets of this host, which carry descriptors |
//! | `loopback.rs` | engines of one process, without a listening socket |
//! | `tls.rs` | TLS, around wires that leave the host |
//! | `certificates.rs` | the certificates by which engines authenticate each other |
//! | `fault_injection.rs` | fault injection around any wire, for tests |

mod blocking;
mod certificates;
#[cfg(feature = "faults")]
mod fault_injection;

mod loopback;
mod socket;
mod tcp;
mod tls;
mod traits;
mod transport_selection;
mod unix;

pub use blocking::BlockingWire;
pub use certificates::{EngineTlsConfigs, PemCertificates};
#[cfg(feature = "faults")]
pub use fault_injection::FaultInjector;
pub use traits::{
    Endpoint, HandshakeRole, ListenSettings, Listener, ReceivedCount, Wire, WireCapabilities, WireError,
    WireEventHandler, WireWaker,
};
pub use transport_selection::{WireWrappers, endpoints, listen};
