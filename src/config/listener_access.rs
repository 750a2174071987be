//! The TLS settings of a listener, and the error text about an address that other machines can reach without access
//! control.
//!
//! `exposure.rs` makes the checks. Begin at [`TlsConfig`].

use std::fmt;
use std::net::SocketAddr;
use std::path::PathBuf;

use crate::tls::TlsMode;

/// The TLS settings of one listener.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct TlsConfig {
    /// The kind of connections that the listener accepts.
    pub mode: TlsMode,
    /// The certificate.
    pub cert: Option<PathBuf>,
    /// The private key.
    pub key: Option<PathBuf>,
    /// The CA certificates for client certificates.
    pub client_ca: Option<PathBuf>,
}

impl TlsConfig {
    /// Returns whether every client must present a certificate.
    pub(super) fn requires_client_certificates(&self) -> bool {
        self.cert.is_some()
            && self.client_ca.is_some()
            && matches!(self.mode, TlsMode::Auto | TlsMode::Required)
    }
}

/// An address that would be open to other machines without access control.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ExposedAddress {
    /// `HTTP` or `gRPC`.
    pub edge: &'static str,
    /// The address.
    pub address: SocketAddr,
}

impl fmt::Display for ExposedAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { edge, address } = self;
        let all = format!(
            "the {edge} address {address} can be reached from other machines, and nothing would ask who they are; do one of these:"
        );
        if *edge == "HTTP" {
            return write!(
                f,
                "{all}\n  \
                 - make a token for each who needs one: muster token new --name NAME --role viewer|operator|admin --file \
                 tokens.toml, and serve with --tokens-file tokens.toml\n  \
                 - ask for certificates: --http-tls-cert, --http-tls-key and --http-tls-client-ca\n  \
                 - stay on this machine: --http 127.0.0.1:{port}\n  \
                 - let everybody in who can reach it: --insecure",
                port = address.port()
            );
        }
        write!(
            f,
            "{all}\n  \
             - ask for certificates (mutual TLS: jaxlib 0.11.2 and later): --grpc-tls-cert, --grpc-tls-key and \
             --grpc-tls-client-ca; `muster tls new DIR` makes some to try with\n  \
             - stay on this machine: --grpc 127.0.0.1:{port}\n  \
             - let everybody in who can reach it, which is the only way for clients that speak nothing but plaintext \
             (jaxlib before 0.11.2): --insecure-grpc, inside a network that you trust",
            port = address.port()
        )
    }
}
