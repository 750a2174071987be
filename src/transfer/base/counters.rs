//! Counters of an engine: failures, and the bytes of each transport.
//!
//! `launch_metrics.rs` counts launches. Other crates export the counters as metrics. Begin at [`ByteCounters`].

use std::sync::atomic::{AtomicU64, Ordering};

use super::transport::TransportKind;

/// The counters of an engine that are not bytes.
#[derive(Debug, Default)]
pub struct FailureCounters {
    /// Frames and hellos that were refused because they name another incarnation.
    pub fenced: AtomicU64,
    /// Chunks whose checksum was wrong.
    pub damaged: AtomicU64,
    /// Lanes that failed.
    pub lanes_lost: AtomicU64,
    /// Lanes that were connected again after a failure.
    pub lanes_made: AtomicU64,
    /// Fetches that failed, after which the sender pushed the bytes.
    pub fallbacks: AtomicU64,
}

/// The bytes sent and received, by transport.
#[derive(Debug, Default)]
pub struct ByteCounters([[AtomicU64; 2]; TransportKind::ALL.len()]);

impl ByteCounters {
    /// Adds `bytes` to those sent by this transport, or to those received if `received`.
    pub fn add(&self, kind: TransportKind, received: bool, bytes: u64) {
        self.0[kind as usize][usize::from(received)].fetch_add(bytes, Ordering::Relaxed);
    }

    /// Returns the bytes sent and the bytes received by this transport.
    pub fn sent_and_received(&self, kind: TransportKind) -> (u64, u64) {
        let [sent, received] = &self.0[kind as usize];
        (sent.load(Ordering::Relaxed), received.load(Ordering::Relaxed))
    }
}
