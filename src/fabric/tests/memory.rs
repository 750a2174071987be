//! Memory of the tests, and a pair of endpoints over it.
#![allow(unsafe_code, reason = "lends memory to a fabric")]

use std::net::{IpAddr, Ipv4Addr};
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, channel};
use std::time::Duration;

use muster_fabric::{Fabric, FabricEndpoint, FabricError, RegisteredMemory, RemoteBytes};

use crate::fabric_provider::fabric_over_tcp;

/// The provider under test.
pub fn provider() -> String {
    std::env::var("MUSTER_FABRIC").unwrap_or_else(|_| fabric_over_tcp().to_owned())
}

/// Opens the fabric under test, as a process of its own does.
pub fn open() -> Fabric {
    let address = ["tcp", "net", "sockets"].iter().any(|over_ip| provider().starts_with(over_ip));
    let address = address.then_some(IpAddr::V4(Ipv4Addr::LOCALHOST));
    Fabric::open(&provider(), address).unwrap()
}

/// Bytes that a fabric may use. They are never freed: a test may end before a read of a peer.
pub struct Memory {
    pub bytes: &'static mut [u8],
    pub registered: Arc<RegisteredMemory>,
}

impl Memory {
    pub fn new(fabric: &Fabric, contents: Vec<u8>) -> Self {
        let bytes = contents.leak();
        // SAFETY: the bytes are never freed.
        let registered = unsafe { fabric.register(NonNull::from(&mut *bytes).cast(), bytes.len()) }.unwrap();
        Self { bytes, registered: Arc::new(registered) }
    }

    /// Returns how a peer names the byte at an offset.
    pub fn remote(&self, offset: usize) -> RemoteBytes {
        let RemoteBytes { key, address } = self.registered.remote();
        RemoteBytes { key, address: address + offset as u64 }
    }
}

pub fn random_bytes(seed: u64, len: usize) -> Vec<u8> {
    let mut random = fastrand::Rng::with_seed(seed);
    (0..len).map(|_| random.u8(..)).collect()
}

pub type Outcome = Result<(), FabricError>;

/// Asks for a read into memory. The test leaves the bytes alone until it has the outcome.
pub fn read(
    endpoint: &FabricEndpoint,
    into: &mut Memory,
    range: std::ops::Range<usize>,
    from: RemoteBytes,
) -> Receiver<Outcome> {
    let (tell, told) = channel();
    let (registered, bytes) = (Arc::clone(&into.registered), &mut into.bytes[range]);
    let kept = Arc::clone(&registered);
    // SAFETY: the bytes are never freed, and the test uses them only after the outcome.
    unsafe {
        endpoint.read(
            NonNull::from(&mut *bytes).cast(),
            bytes.len(),
            Some(&registered),
            from,
            move |outcome| {
                drop(kept);
                // A test that does not wait is over.
                let _sent = tell.send(outcome);
            },
        )
    }
    .unwrap();
    told
}

pub fn wait(told: &Receiver<Outcome>) -> Outcome {
    told.recv_timeout(Duration::from_secs(20)).expect("the end of a read is told")
}

/// Returns two endpoints that know each other.
pub fn connected(one: &Fabric, other: &Fabric) -> [FabricEndpoint; 2] {
    let ends = [one.open_endpoint().unwrap(), other.open_endpoint().unwrap()];
    ends[0].connect(&ends[1].address().unwrap()).unwrap();
    ends[1].connect(&ends[0].address().unwrap()).unwrap();
    ends
}
