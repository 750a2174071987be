//! Performs the TLS handshake on the server's side. The certificates are reloaded when their files change.
//!
//! `transport_policy.rs` decides whether a connection may be plaintext. Begin at [`Acceptor::accept_handshake`].

use std::cell::RefCell;
use std::io;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use rustls::{AlertDescription, CertificateError, Error, ServerConfig};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio_rustls::LazyConfigAcceptor;

use super::client_certificates::REFUSED_CERTIFICATE;
use super::{PrefixedStream, TlsError, TlsFiles, messages};
use crate::clock::Clock;
use crate::file_watch::{FileCheckSchedule, FileStamp};

/// A connection over TLS.
pub type TlsStream<S> = tokio_rustls::server::TlsStream<PrefixedStream<S>>;

/// The kinds of failed handshakes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum HandshakeFault {
    /// The client uses TLS, and the port does not.
    NotHere,
    /// The client uses plaintext, and the port accepts only TLS.
    Plaintext,
    /// The client did not finish in time.
    TooSlow,
    /// The client closed the connection, or it broke.
    HungUp,
    /// The client sent no certificate, and one is required.
    NoCertificate,
    /// The client's certificate was refused.
    BadCertificate,
    /// The client refused this server, usually its certificate.
    Distrusted,
    /// Client and server have no protocol version or cipher in common.
    Incompatible,
    /// The data is not TLS, or the error is of another kind.
    Other,
}

impl HandshakeFault {
    /// Every kind.
    pub const ALL: [Self; 9] = [
        Self::NotHere,
        Self::Plaintext,
        Self::TooSlow,
        Self::HungUp,
        Self::NoCertificate,
        Self::BadCertificate,
        Self::Distrusted,
        Self::Incompatible,
        Self::Other,
    ];

    /// Returns the name of the kind.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::NotHere => "no-tls-here",
            Self::Plaintext => "plaintext",
            Self::TooSlow => "too-slow",
            Self::HungUp => "hung-up",
            Self::NoCertificate => "no-certificate",
            Self::BadCertificate => "bad-certificate",
            Self::Distrusted => "distrusted",
            Self::Incompatible => "incompatible",
            Self::Other => "other",
        }
    }
}

/// The error of a failed handshake.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HandshakeError {
    /// The kind of failure.
    pub fault: HandshakeFault,
    /// The reason in words, with what to do where that is known.
    pub reason: String,
    /// The server name that the client dialled, if it sent one.
    pub name: Option<String>,
    /// The refused certificate of the client.
    pub shown: Option<String>,
}

struct LoadedConfig {
    config: Arc<ServerConfig>,
    stamps: Vec<FileStamp>,
}

/// The certificates of a listener, and their files.
struct ReloadingCertificates {
    files: TlsFiles,
    protocols: &'static [&'static [u8]],
    current: Mutex<LoadedConfig>,
}

/// The server side of TLS handshakes.
pub struct Acceptor {
    certificates: Arc<ReloadingCertificates>,
    watch: FileCheckSchedule,
}

impl Acceptor {
    /// Returns an acceptor with the certificates in `files`, for clients that speak one of `protocols`.
    ///
    /// # Errors
    /// If the certificates are unusable.
    pub fn new(files: TlsFiles, protocols: &'static [&'static [u8]], clock: Clock) -> Result<Self, TlsError> {
        let stamps = file_stamps(&files);
        let config = Arc::new(files.server_config(protocols)?);
        let current = Mutex::new(LoadedConfig { config, stamps });
        let certificates = Arc::new(ReloadingCertificates { files, protocols, current });
        Ok(Self { certificates, watch: FileCheckSchedule::new(clock) })
    }

    /// Returns the present configuration, reloaded if a file has changed.
    async fn current_config(&self) -> Arc<ServerConfig> {
        let certificates = Arc::clone(&self.certificates);
        self.watch.run_check_if_due(move || certificates.reload_if_changed()).await;
        Arc::clone(&self.certificates.lock_current().config)
    }

    /// Performs the handshake. The caller sets a timeout.
    ///
    /// # Errors
    /// With the reason of the failure.
    pub async fn accept_handshake<S: AsyncRead + AsyncWrite + Unpin>(
        &self,
        stream: PrefixedStream<S>,
    ) -> Result<TlsStream<S>, HandshakeError> {
        let hello = LazyConfigAcceptor::new(rustls::server::Acceptor::default(), stream);
        let failed = |error: &io::Error, name, shown| {
            let (fault, reason) = describe_handshake_error(error);
            HandshakeError { fault, reason, name, shown }
        };
        let started = hello.await.map_err(|error| failed(&error, None, None))?;
        let name = started
            .client_hello()
            .server_name()
            .map(|name| crate::text::escape_to_one_line(name).into_owned());
        let shake = async {
            let shaken = started.into_stream(self.current_config().await).await;
            let shown = REFUSED_CERTIFICATE.with(|shown| shown.borrow_mut().take());
            shaken.map_err(|error| failed(&error, name, shown))
        };
        REFUSED_CERTIFICATE.scope(RefCell::new(None), shake).await
    }
}

impl ReloadingCertificates {
    fn lock_current(&self) -> MutexGuard<'_, LoadedConfig> {
        self.current.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Reloads the certificates if a file has changed. If the new ones are unusable, the old ones stay.
    fn reload_if_changed(&self) {
        // The stamps are taken first, so that a change during the read causes another read.
        let stamps = file_stamps(&self.files);
        if stamps == self.lock_current().stamps {
            return;
        }
        let found = self.files.server_config(self.protocols);
        let mut current = self.lock_current();
        current.stamps = stamps;
        match found {
            Ok(config) => {
                current.config = Arc::new(config);
                tracing::info!(certificate = %self.files.cert.display(), "certificates were read again");
            }
            Err(error) => tracing::error!(
                %error,
                "certificates have changed and cannot be used; the former ones stay in use"
            ),
        }
    }
}

fn file_stamps(files: &TlsFiles) -> Vec<FileStamp> {
    files.paths().map(FileStamp::of_file).collect()
}

/// Returns the kind of a failed handshake and its reason, for the person who has to correct it.
fn describe_handshake_error(error: &io::Error) -> (HandshakeFault, String) {
    let Some(error) = error.get_ref().and_then(|inner| inner.downcast_ref::<Error>()) else {
        let reason = match error.kind() {
            io::ErrorKind::UnexpectedEof => "the client hung up in the middle of the handshake: it gave up waiting, or \
                                             it does not trust this server's certificate and does not say so (for \
                                             JAX, JAX_MTLS_CA_FILE names the authority to trust)"
                .into(),
            _ => format!("the connection broke in the middle of the handshake: {error}"),
        };
        return (HandshakeFault::HungUp, reason);
    };
    let fault = match error {
        Error::NoCertificatesPresented => HandshakeFault::NoCertificate,
        Error::InvalidCertificate(_) => HandshakeFault::BadCertificate,
        Error::AlertReceived(_) => HandshakeFault::Distrusted,
        Error::NoApplicationProtocol | Error::PeerIncompatible(_) => HandshakeFault::Incompatible,
        _ => HandshakeFault::Other,
    };
    let reason = match error {
        Error::NoCertificatesPresented => {
            "the client showed no certificate, and this port asks for one: give it one (JAX_MTLS_CERT_FILE and \
             JAX_MTLS_KEY_FILE)"
                .into()
        }
        Error::InvalidCertificate(wrong) => format!("the client's certificate is refused: {}", describe_client_certificate_error(wrong)),
        Error::AlertReceived(alert) => format!("the client refuses this server: {}", describe_client_alert(*alert)),
        Error::NoApplicationProtocol => {
            "the client speaks no protocol that is spoken here: the gRPC port speaks HTTP/2 (ALPN h2), the HTTP port \
             HTTP/1.1"
                .into()
        }
        Error::PeerIncompatible(wrong) => {
            format!("the client and this server have nothing in common (TLS 1.2 and 1.3 are spoken): {}", messages::split_camel_case(&format!("{wrong:?}")))
        }
        Error::InvalidMessage(_) | Error::InappropriateMessage { .. } => {
            format!("what the client sent is no TLS: {error}")
        }
        Error::PeerMisbehaved(wrong) => {
            format!("the client does not keep to the protocol: {}", messages::split_camel_case(&format!("{wrong:?}")))
        }
        other => other.to_string(),
    };
    (fault, reason)
}

fn describe_client_certificate_error(wrong: &CertificateError) -> String {
    match wrong {
        CertificateError::UnknownIssuer => {
            "no authority that this port trusts has issued it: compare its issuer with the client CA file, and let the \
             client send the certificates in between"
                .into()
        }
        CertificateError::BadSignature => {
            "another authority of the same name than the one that this port trusts has signed it: was the authority made \
             anew?"
                .into()
        }
        CertificateError::InvalidPurpose | CertificateError::InvalidPurposeContext { .. } => {
            "it is not made for clients: its extended key usage lacks clientAuth".into()
        }
        other => messages::describe_certificate_error(other),
    }
}

fn describe_client_alert(alert: AlertDescription) -> String {
    match alert {
        AlertDescription::UnknownCA => {
            "it does not trust the authority of this server's certificate: its CA file (JAX_MTLS_CA_FILE) must hold the \
             issuer"
                .into()
        }
        AlertDescription::CertificateExpired => "this server's certificate has expired: renew it".into(),
        AlertDescription::BadCertificate | AlertDescription::CertificateUnknown => {
            "this server's certificate does not hold, mostly because the name that was dialled does not stand in it: see \
             `muster tls check`"
                .into()
        }
        AlertDescription::UnsupportedCertificate => {
            "this server's certificate is of a kind that it does not know: JAX knows no Ed25519".into()
        }
        AlertDescription::HandshakeFailure => {
            "it has nothing in common with this server; JAX, for one, knows no Ed25519 certificates".into()
        }
        other => format!("it says {:?}", messages::split_camel_case(&format!("{other:?}"))),
    }
}
