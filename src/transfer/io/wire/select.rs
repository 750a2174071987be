//! The transports on which an engine listens and dials, and the wrappers around their wires.
//!
//! It knows the kinds of wires, not how they work. Begin at [`listen`] and [`endpoints`].

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

/// Returns the transports by which an engine dials, in order of preference.
const fn dials(choice: Choice) -> &'static [&'static dyn Transport] {
    match choice {
        Choice::Auto => &[&Unix, &Tcp],
        Choice::Shm | Choice::Pvm | Choice::Unix => &[&Unix],
        Choice::Tcp => &[&Tcp],
        Choice::Loopback => &[&Loopback],
    }
}

/// Returns the transports on which an engine listens: its own choice does not bind its peers.
const fn listens(choice: Choice) -> &'static [&'static dyn Transport] {
    match choice {
        Choice::Auto | Choice::Shm | Choice::Pvm | Choice::Unix => &[&Unix, &Tcp],
        Choice::Tcp => &[&Tcp],
        Choice::Loopback => &[&Loopback],
    }
}

/// Starts to listen. Returns the address of the engine, and its listeners.
pub fn listen(settings: &ListenSettings<'_>) -> io::Result<(Address, Vec<Arc<dyn Listener>>)> {
    let mut address = Address { host: host(), ..Address::default() };
    let mut listeners = Vec::new();
    for transport in listens(settings.transport) {
        listeners.extend(transport.listen(settings, &mut address)?);
    }
    Ok((address, listeners))
}

/// Returns the endpoints of a peer that can be dialled from here, in order of preference.
pub fn endpoints(choice: Choice, here: &Address, peer: &Address) -> Vec<Box<dyn Endpoint>> {
    dials(choice).iter().flat_map(|transport| transport.endpoints(here, peer)).collect()
}

/// The wrappers around the wires of an engine.
pub struct Wrapping {
    /// The TLS configurations, if the engine has certificates.
    pub identity: Option<Identity>,
    /// The faults to inject.
    #[cfg(feature = "faults")]
    pub faults: Option<Faults>,
}

impl Wrapping {
    /// Wraps a wire: in TLS if the engine has certificates and others could read the wire, and in faults if
    /// there are any. Faults happen below TLS, as those of a network do.
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

/// Returns the identity of this host and of its boot.
fn host() -> String {
    std::fs::read_to_string("/proc/sys/kernel/random/boot_id")
        .map_or_else(|_| String::new(), |id| id.trim().to_owned())
}
