//! Limits the concurrent handshakes with diallers: in total, and for each client network.
//!
//! A handshake occupies a thread. At a limit, a new handshake is still admitted, and an older one ends in its place.
//! If the dialler's own network is at its limit, the oldest handshake of that network ends. If the total is at its
//! limit, the oldest handshake of the network with the most handshakes ends. A handshake whose dialler has proven its
//! identity never ends in this way. So silent or slow diallers keep out neither other networks nor new diallers of
//! their own network. If new handshakes were refused instead, silent diallers could keep out both.
//!
//! A new handshake is refused only if no other can end in its place, or if ended handshakes still occupy too many
//! threads. Begin at [`HandshakeLimits::admit`].

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex};

use crate::base::client_subnet::client_subnet;
use crate::base::sync::lock;
use crate::io::wire::Wire;

/// The most concurrent handshakes: in total, and for one network.
pub const HANDSHAKES_MAX: usize = 256;
const PER_SOURCE_MAX: usize = 64;
/// The most threads: a handshake that was ended occupies its thread until the thread notices.
const THREADS_MAX: usize = HANDSHAKES_MAX + PER_SOURCE_MAX;

/// The network of a dialler; none for one on this host.
type DiallerNetwork = Option<IpAddr>;

/// A handshake whose dialler has not proven its identity.
struct UnprovenDialler {
    source: DiallerNetwork,
    /// The socket, which is shut down to end the handshake.
    socket: OwnedFd,
}

#[derive(Default)]
struct HandshakeTable {
    next: u64,
    threads: usize,
    /// The handshakes that may be ended, the oldest first; `proven` counts the others.
    unproven: BTreeMap<u64, UnprovenDialler>,
    proven: usize,
    closed: bool,
}

/// The concurrent handshakes of an engine.
#[derive(Clone, Default)]
pub struct HandshakeLimits(Arc<Mutex<HandshakeTable>>);

/// A handshake that occupies its place until this is dropped.
pub struct HandshakeGuard {
    limits: HandshakeLimits,
    number: u64,
    is_proven: bool,
}

impl HandshakeLimits {
    /// Admits a dialler to a handshake, and ends another handshake if there are too many. None if that is not
    /// possible either.
    pub fn admit(&self, wire: &dyn Wire) -> Option<HandshakeGuard> {
        let socket = wire.descriptor().try_clone_to_owned().ok()?;
        let source = wire.source().map(client_subnet);
        let mut state = lock(&self.0);
        if state.closed || state.threads >= THREADS_MAX {
            return None;
        }
        let of_source = state.unproven.values().filter(|other| other.source == source).count();
        if of_source >= PER_SOURCE_MAX {
            state.end_oldest_handshake_of(source);
        } else if state.unproven.len() + state.proven >= HANDSHAKES_MAX {
            let network_with_most_handshakes = state.network_with_most_handshakes()?;
            state.end_oldest_handshake_of(network_with_most_handshakes);
        }
        let number = state.next;
        state.next += 1;
        state.threads += 1;
        state.unproven.insert(number, UnprovenDialler { source, socket });
        Some(HandshakeGuard { limits: self.clone(), number, is_proven: false })
    }

    /// Ends the unproven handshakes, and admits no more.
    pub fn close(&self) {
        let mut state = lock(&self.0);
        state.closed = true;
        for dialler in std::mem::take(&mut state.unproven).into_values() {
            dialler.shut_down_socket();
        }
    }
}

impl HandshakeTable {
    /// Returns the network with the most handshakes that may be ended.
    fn network_with_most_handshakes(&self) -> Option<DiallerNetwork> {
        let mut counts: BTreeMap<DiallerNetwork, usize> = BTreeMap::new();
        for dialler in self.unproven.values() {
            *counts.entry(dialler.source).or_default() += 1;
        }
        counts.into_iter().max_by_key(|(_, count)| *count).map(|(source, _)| source)
    }

    fn end_oldest_handshake_of(&mut self, source: DiallerNetwork) {
        let oldest =
            self.unproven.iter().find(|(_, other)| other.source == source).map(|(number, _)| *number);
        if let Some(dialler) = oldest.and_then(|number| self.unproven.remove(&number)) {
            dialler.shut_down_socket();
        }
    }
}

impl UnprovenDialler {
    /// Shuts down the socket, which wakes the thread that reads it.
    fn shut_down_socket(self) {
        // A socket that is gone already needs no end.
        let _gone = rustix::net::shutdown(&self.socket, rustix::net::Shutdown::Both);
    }
}

impl HandshakeGuard {
    /// Records that the dialler has proven its identity. Returns false if the handshake was ended before.
    pub fn mark_proven(&mut self) -> bool {
        let mut state = lock(&self.limits.0);
        let there = state.unproven.remove(&self.number).is_some();
        if there {
            state.proven += 1;
            self.is_proven = true;
        }
        there
    }
}

impl Drop for HandshakeGuard {
    fn drop(&mut self) {
        let mut state = lock(&self.limits.0);
        state.threads -= 1;
        state.unproven.remove(&self.number);
        state.proven -= usize::from(self.is_proven);
    }
}

#[cfg(test)]
mod tests {
    use std::io::Read as _;
    use std::os::fd::{AsFd as _, BorrowedFd};
    use std::os::unix::net::UnixStream;

    use super::*;
    use crate::base::transport::TransportKind;
    use crate::io::wire::{ReceivedCount, WireCapabilities, WireError};
    use crate::memory::{ReadView, WriteView};

    /// One end of a socket pair that claims a peer address.
    struct WireFromAddress(UnixStream, Option<IpAddr>);

    impl Wire for WireFromAddress {
        fn kind(&self) -> TransportKind {
            TransportKind::Tcp
        }
        fn capabilities(&self) -> WireCapabilities {
            WireCapabilities {
                shares_memory: false,
                is_breakable: true,
                is_exposed: true,
                is_buffered: false,
            }
        }
        fn source(&self) -> Option<IpAddr> {
            self.1
        }
        fn descriptor(&self) -> BorrowedFd<'_> {
            self.0.as_fd()
        }
        fn send(&self, _: &[ReadView<'_>]) -> Result<usize, WireError> {
            Err(WireError::Later)
        }
        fn receive(&self, _: &mut [WriteView<'_>]) -> Result<ReceivedCount, WireError> {
            Err(WireError::Later)
        }
        fn discard(&self, _: usize) -> Result<usize, WireError> {
            Err(WireError::Later)
        }
        fn end(&self) {}
    }

    struct TestDialler {
        near: UnixStream,
        /// The accepted end, kept open as long as the dialler.
        _far: WireFromAddress,
        guard: Option<HandshakeGuard>,
    }

    fn dial(handshakes: &HandshakeLimits, from: &str) -> TestDialler {
        let (near, far) = UnixStream::pair().unwrap();
        near.set_nonblocking(true).unwrap();
        let far = WireFromAddress(far, Some(from.parse().unwrap()));
        let guard = handshakes.admit(&far);
        TestDialler { near, _far: far, guard }
    }

    impl TestDialler {
        fn is_ended(&mut self) -> bool {
            matches!(self.near.read(&mut [0]), Ok(0))
        }
    }

    #[test]
    fn a_source_with_too_many_loses_its_oldest_and_no_other_source_does() {
        let handshakes = HandshakeLimits::default();
        let mut other = dial(&handshakes, "10.0.0.2");
        let mut many: Vec<_> = (0..PER_SOURCE_MAX + 10).map(|_| dial(&handshakes, "10.0.0.1")).collect();
        let ended: Vec<_> = many.iter_mut().map(TestDialler::is_ended).collect();
        assert_eq!(ended.iter().filter(|ended| **ended).count(), 10);
        assert!(ended[..10].iter().all(|ended| *ended), "the oldest");
        assert!(!other.is_ended() && many.iter().all(|dialler| dialler.guard.is_some()));
        assert_eq!(lock(&handshakes.0).threads, PER_SOURCE_MAX + 11);
        // Their threads end, and there is room again.
        many.truncate(0);
        let state = lock(&handshakes.0);
        assert_eq!((state.threads, state.unproven.len()), (1, 1));
        drop(state);
    }

    #[test]
    fn one_network_is_one_source() {
        let handshakes = HandshakeLimits::default();
        let mut many: Vec<_> =
            (0..=PER_SOURCE_MAX).map(|n| dial(&handshakes, &format!("2001:db8::{n:x}"))).collect();
        assert!(many[0].is_ended() && !many[1].is_ended());
        let mut mapped: Vec<_> =
            (0..=PER_SOURCE_MAX).map(|n| dial(&handshakes, &format!("::ffff:10.0.0.{n}"))).collect();
        assert!(!mapped[0].is_ended(), "addresses of the older kind are sources of their own");
    }

    #[test]
    fn many_sources_lose_the_oldest_of_the_busiest_and_a_proven_dialler_stays() {
        let handshakes = HandshakeLimits::default();
        let mut proven = dial(&handshakes, "10.9.9.9");
        assert!(proven.guard.as_mut().unwrap().mark_proven());
        let mut single = dial(&handshakes, "10.8.8.8");
        let mut many: Vec<_> =
            (0..HANDSHAKES_MAX + 20).map(|n| dial(&handshakes, &format!("10.0.0.{}", n % 8))).collect();
        assert!(!proven.is_ended() && !single.is_ended());
        let alive = many.iter_mut().filter_map(|dialler| (!dialler.is_ended()).then_some(())).count();
        assert_eq!(alive + 2, HANDSHAKES_MAX);
        assert!(lock(&handshakes.0).threads <= THREADS_MAX);
        // No thread has ended yet: at some point none is left.
        let refused = (0..THREADS_MAX).filter(|_| dial(&handshakes, "10.7.7.7").guard.is_none()).count();
        assert!(refused == 0, "each of these was dropped at once");
        let kept: Vec<_> = (0..THREADS_MAX).map(|_| dial(&handshakes, "10.7.7.7")).collect();
        assert!(kept.iter().any(|dialler| dialler.guard.is_none()));
        assert_eq!(lock(&handshakes.0).threads, THREADS_MAX);
        // A handshake that was ended cannot be proven any more.
        let ended = many.iter_mut().find_map(|dialler| dialler.is_ended().then_some(&mut dialler.guard));
        assert!(!ended.unwrap().as_mut().unwrap().mark_proven());
        handshakes.close();
        assert!(single.is_ended() && !proven.is_ended());
        assert!(dial(&handshakes, "10.6.6.6").guard.is_none());
    }
}
