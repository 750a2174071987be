//! Decides whether a new connection of a listener uses plaintext, uses TLS, or is refused.
//!
//! `acceptor.rs` performs the handshake. Begin at [`TransportPolicy::accept_tls`].

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncWrite};

use super::{
    Acceptor, HandshakeError, HandshakeFailures, HandshakeFault, PrefixedStream, TlsError, TlsFiles, TlsMode,
    TlsStream,
};
use crate::clock::Clock;

/// The transports that a listener accepts, and its certificates.
pub struct TransportPolicy {
    listener: &'static str,
    plain: bool,
    acceptor: Option<Acceptor>,
    failures: Arc<HandshakeFailures>,
}

impl TransportPolicy {
    /// Returns a listener without TLS.
    #[must_use]
    pub fn plaintext_only(listener: &'static str, failures: Arc<HandshakeFailures>) -> Self {
        Self { listener, plain: true, acceptor: None, failures }
    }

    /// Returns a listener with this mode and the certificates in `files`.
    ///
    /// # Errors
    /// If the certificates are unusable.
    pub fn new(
        listener: &'static str,
        mode: TlsMode,
        files: Option<TlsFiles>,
        protocols: &'static [&'static [u8]],
        (clock, failures): (Clock, Arc<HandshakeFailures>),
    ) -> Result<Self, TlsError> {
        let Some(files) = files.filter(|_| mode != TlsMode::Off) else {
            return Ok(Self::plaintext_only(listener, failures));
        };
        let acceptor = Some(Acceptor::new(files, protocols, clock)?);
        Ok(Self { listener, plain: mode == TlsMode::Optional, acceptor, failures })
    }

    /// Returns whether plaintext is accepted.
    #[must_use]
    pub fn allows_plaintext(&self) -> bool {
        self.plain
    }

    /// Performs the TLS handshake on a connection; a failure is recorded.
    pub async fn accept_tls<S>(&self, stream: PrefixedStream<S>, peer: SocketAddr) -> Option<TlsStream<S>>
    where
        S: AsyncRead + AsyncWrite + Unpin,
    {
        let Some(acceptor) = &self.acceptor else {
            self.record_refusal(
                peer,
                HandshakeFault::NotHere,
                "the client speaks TLS, and this port does not: give the port a certificate, or take the client's \
                 mTLS settings away",
            );
            return None;
        };
        match acceptor.accept_handshake(stream).await {
            Ok(stream) => {
                self.failures.record_success();
                Some(stream)
            }
            Err(failed) => {
                self.failures.record_failure(self.listener, peer, failed);
                None
            }
        }
    }

    /// Records a client that used plaintext where it is not accepted.
    pub fn record_plaintext_refused(&self, peer: SocketAddr) {
        self.record_refusal(
            peer,
            HandshakeFault::Plaintext,
            "the client speaks plaintext, and this port takes TLS only: give the client its mTLS settings \
             (JAX_MTLS_CERT_FILE, JAX_MTLS_KEY_FILE, JAX_MTLS_CA_FILE)",
        );
    }

    /// Records a client that did not finish its handshake in time.
    pub fn record_handshake_timeout(&self, peer: SocketAddr, within: Duration) {
        let reason = format!("the client did not finish the handshake within {within:?}");
        self.record_refusal(peer, HandshakeFault::TooSlow, &reason);
    }

    fn record_refusal(&self, peer: SocketAddr, fault: HandshakeFault, reason: &str) {
        let failed = HandshakeError { fault, reason: reason.into(), name: None, shown: None };
        self.failures.record_failure(self.listener, peer, failed);
    }
}
