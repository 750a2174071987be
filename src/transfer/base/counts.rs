//! The counters of an engine beside those of its launches.
//!
//! It holds counters only; metrics are made of them elsewhere. Begin at [`Counters`].

use std::sync::atomic::{AtomicU64, Ordering};

use super::transport::TransportKind;

/// What is counted beside the bytes of connections.
#[derive(Debug, Default)]
pub struct EngineCounts {
    /// Frames and hellos of another life.
    pub fenced: AtomicU64,
    /// Chunks that came damaged.
    pub damaged: AtomicU64,
    /// Lanes that were lost.
    pub lanes_lost: AtomicU64,
    /// Lanes that were made anew.
    pub lanes_made: AtomicU64,
    /// Fetches that became pushes.
    pub fallbacks: AtomicU64,
}

/// Bytes by transport, sent and received.
#[derive(Debug, Default)]
pub struct Counters([[AtomicU64; 2]; TransportKind::ALL.len()]);

impl Counters {
    /// Adds bytes that were sent or received.
    pub fn add(&self, kind: TransportKind, received: bool, bytes: u64) {
        self.0[kind as usize][usize::from(received)].fetch_add(bytes, Ordering::Relaxed);
    }

    /// Returns the bytes sent and received by this transport.
    pub fn get(&self, kind: TransportKind) -> (u64, u64) {
        let [sent, received] = &self.0[kind as usize];
        (sent.load(Ordering::Relaxed), received.load(Ordering::Relaxed))
    }
}
