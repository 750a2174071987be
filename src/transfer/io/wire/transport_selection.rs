//! Decides on which transports an engine listens and dials, and which wrappers its wires get.
//!
//! This file lists the kinds of wires; each kind has its own file. Begin at [`listen`] and [`endpoints`].

use std::io;
use std::sync::Arc;

use super::certificates::EngineTlsConfigs;
#[cfg(feature = "faults")]
use super::fault_injection::FaultInjector;
use super::loopback::Loopback;
use super::tcp::Tcp;
use super::tls::TlsWire;
use super::traits::{Endpoint, HandshakeRole, ListenSettings, Listener, Transport, Wire, WireError};
use super::unix::Unix;
use crate::base::membership::EngineAddress;
use crate::base::transport::TransportChoice;

/// Returns the transports by which an engine dials, in order of preference.
const fn transports_to_dial(choice: TransportChoice) -> &'static [&'static dyn Transport] {
    match choice {
        TransportChoice::Auto => &[&Unix, &Tcp],
        TransportChoice::Shm | TransportChoice::Pvm | TransportChoice::Unix => &[&Unix],
        TransportChoice::Tcp => &[&Tcp],
        TransportChoice::Loopback => &[&Loopback],
    }
}

/// Returns the transports on which an engine listens: its own choice does not bind its peers.
const fn transports_to_listen_on(choice: TransportChoice) -> &'static [&'static dyn Transport] {
    match choice {
        TransportChoice::Auto | TransportChoice::Shm | TransportChoice::Pvm | TransportChoice::Unix => {
            &[&Unix, &Tcp]
        }
        TransportChoice::Tcp => &[&Tcp],
        TransportChoice::Loopback => &[&Loopback],
    }
}

/// Starts to listen. Returns the address of the engine, and its listeners.
pub fn listen(settings: &ListenSettings<'_>) -> io::Result<(EngineAddress, Vec<Arc<dyn Listener>>)> {
    let mut address = EngineAddress { host: host_boot_id(), ..EngineAddress::default() };
    let mut listeners = Vec::new();
    for transport in transports_to_listen_on(settings.transport) {
        listeners.extend(transport.listen(settings, &mut address)?);
    }
    Ok((address, listeners))
}

/// Returns the endpoints of a peer that can be dialled from here, in order of preference.
pub fn endpoints(
    choice: TransportChoice,
    here: &EngineAddress,
    peer: &EngineAddress,
) -> Vec<Box<dyn Endpoint>> {
    transports_to_dial(choice).iter().flat_map(|transport| transport.endpoints(here, peer)).collect()
}

/// The wrappers around the wires of an engine.
pub struct WireWrappers {
    /// The TLS configurations, if the engine has certificates.
    pub identity: Option<EngineTlsConfigs>,
    /// The faults to inject.
    #[cfg(feature = "faults")]
    pub faults: Option<FaultInjector>,
}

impl WireWrappers {
    /// Wraps a wire: in TLS if the engine has certificates and others could read the wire, and in faults if
    /// there are any. Faults happen below TLS, as those of a network do.
    pub fn wrap(&self, wire: Box<dyn Wire>, side: HandshakeRole) -> Result<Box<dyn Wire>, WireError> {
        #[cfg(feature = "faults")]
        let wire = match &self.faults {
            Some(faults) => faults.wrap(wire),
            None => wire,
        };
        match self.identity.as_ref().filter(|_| wire.capabilities().is_exposed) {
            Some(identity) => Ok(Box::new(TlsWire::new(wire, identity, side)?)),
            None => Ok(wire),
        }
    }
}

/// Returns the identity of this host and of its boot.
fn host_boot_id() -> String {
    std::fs::read_to_string("/proc/sys/kernel/random/boot_id")
        .map_or_else(|_| String::new(), |id| id.trim().to_owned())
}
