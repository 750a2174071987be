//! The transports that an engine listens on and dials by, and the wrappers around their wires.
//!
//! It knows the kinds of wires, and nothing of how they work. Begin at [`listen`] and [`endpoints`].

use std::io;
use std::sync::Arc;

use super::certificates::Identity;
#[cfg(feature = "faults")]
use super::faulty::Faults;
use super::loopback::Loopback;
use super::tcp::Tcp;
use super::tls::Tls;
use super::traits::{Endpoint, ListenSettings, Listener, Transport, Wire, WireEnd, WireError};
use super::unix::Unix;
use crate::base::identity::Address;
use crate::base::transport::Choice;

/// Returns what an engine dials by, the best first.
const fn dials(choice: Choice) -> &'static [&'static dyn Transport] {
    match choice {
        Choice::Auto => &[&Unix, &Tcp],
        Choice::Shm | Choice::Pvm | Choice::Unix => &[&Unix],
        Choice::Tcp => &[&Tcp],
        Choice::Loopback => &[&Loopback],
    }
}

/// Returns what an engine is reached by: what it insists on itself is not what others have to.
const fn listens(choice: Choice) -> &'static [&'static dyn Transport] {
    match choice {
        Choice::Auto | Choice::Shm | Choice::Pvm | Choice::Unix => &[&Unix, &Tcp],
        Choice::Tcp => &[&Tcp],
        Choice::Loopback => &[&Loopback],
    }
}

/// Begins to listen. Returns where the engine is reached, and what takes the wires.
pub fn listen(settings: &ListenSettings<'_>) -> io::Result<(Address, Vec<Arc<dyn Listener>>)> {
    let mut address = Address { host: host(), ..Address::default() };
    let mut listeners = Vec::new();
    for transport in listens(settings.transport) {
        listeners.extend(transport.listen(settings, &mut address)?);
    }
    Ok((address, listeners))
}

/// Returns where a peer can be dialled from here, the best first.
pub fn endpoints(choice: Choice, here: &Address, peer: &Address) -> Vec<Box<dyn Endpoint>> {
    dials(choice).iter().flat_map(|transport| transport.endpoints(here, peer)).collect()
}

/// What an engine puts around its wires.
pub struct Wrapping {
    /// What TLS connections are made of, if there are some.
    pub identity: Option<Identity>,
    /// What goes wrong on purpose.
    #[cfg(feature = "faults")]
    pub faults: Option<Faults>,
}

impl Wrapping {
    /// Returns a wire as the engine uses it: under TLS if it has certificates and others could listen, and with faults if
    /// there are to be some. They happen below TLS, where a network's would.
    pub fn around(&self, wire: Box<dyn Wire>, side: WireEnd) -> Result<Box<dyn Wire>, WireError> {
        #[cfg(feature = "faults")]
        let wire = match &self.faults {
            Some(faults) => faults.around(wire),
            None => wire,
        };
        match self.identity.as_ref().filter(|_| wire.capabilities().is_exposed) {
            Some(identity) => Ok(Box::new(Tls::new(wire, identity, side)?)),
            None => Ok(wire),
        }
    }
}

/// Returns what names this host and its boot.
fn host() -> String {
    std::fs::read_to_string("/proc/sys/kernel/random/boot_id")
        .map_or_else(|_| String::new(), |id| id.trim().to_owned())
}
