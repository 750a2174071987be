//! The transport of a new connection on a listener: plaintext, TLS, or refusal.
//!
//! It performs no handshake: `acceptor.rs` does. Begin at [`Entrance::secure`].

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncWrite};

use super::{Acceptor, Failed, Failures, Fault, Files, Mode, Rewind, Stream, TlsError};
use crate::clock::Clock;

/// The way into one edge.
pub struct Entrance {
    listener: &'static str,
    plain: bool,
    acceptor: Option<Acceptor>,
    failures: Arc<Failures>,
}

impl Entrance {
    /// An entrance without TLS.
    #[must_use]
    pub fn plain(listener: &'static str, failures: Arc<Failures>) -> Self {
        Self { listener, plain: true, acceptor: None, failures }
    }

    /// An entrance that does what `mode` says, with the certificates in `files`.
    ///
    /// # Errors
    /// If they cannot be used.
    pub fn new(
        listener: &'static str,
        mode: Mode,
        files: Option<Files>,
        protocols: &'static [&'static [u8]],
        (clock, failures): (Clock, Arc<Failures>),
    ) -> Result<Self, TlsError> {
        let Some(files) = files.filter(|_| mode != Mode::Off) else {
            return Ok(Self::plain(listener, failures));
        };
        let acceptor = Some(Acceptor::new(files, protocols, clock)?);
        Ok(Self { listener, plain: mode == Mode::Optional, acceptor, failures })
    }

    /// Whether plaintext is taken.
    #[must_use]
    pub fn takes_plain(&self) -> bool {
        self.plain
    }

    /// Makes a connection whose first byte is that of TLS a safe one.
    pub async fn secure<S>(&self, stream: Rewind<S>, peer: SocketAddr) -> Option<Stream<S>>
    where
        S: AsyncRead + AsyncWrite + Unpin,
    {
        let Some(acceptor) = &self.acceptor else {
            self.turned_away(
                peer,
                Fault::NotHere,
                "the client speaks TLS, and this port does not: give the port a certificate, or take the client's \
                 mTLS settings away",
            );
            return None;
        };
        match acceptor.accept(stream).await {
            Ok(stream) => {
                self.failures.succeeded();
                Some(stream)
            }
            Err(failed) => {
                self.failures.failed(self.listener, peer, failed);
                None
            }
        }
    }

    /// A client spoke plaintext where that is not taken.
    pub fn refused_plain(&self, peer: SocketAddr) {
        self.turned_away(
            peer,
            Fault::Plaintext,
            "the client speaks plaintext, and this port takes TLS only: give the client its mTLS settings \
             (JAX_MTLS_CERT_FILE, JAX_MTLS_KEY_FILE, JAX_MTLS_CA_FILE)",
        );
    }

    /// A client began a handshake and did not end it in time.
    pub fn too_slow(&self, peer: SocketAddr, within: Duration) {
        let reason = format!("the client did not finish the handshake within {within:?}");
        self.turned_away(peer, Fault::TooSlow, &reason);
    }

    fn turned_away(&self, peer: SocketAddr, fault: Fault, reason: &str) {
        let failed = Failed { fault, reason: reason.into(), name: None, shown: None };
        self.failures.failed(self.listener, peer, failed);
    }
}
