//! TLS for both ports and for clients: modes, certificates, handshakes, and the reasons of failed handshakes.
//!
//! Begin at [`TransportPolicy`] for servers, and at [`dial()`] for clients.
//!
//! | file | what it owns |
//! | --- | --- |
//! | `transport_policy.rs` | the transport of a new connection: plaintext, TLS, or refusal |
//! | `acceptor.rs` | the handshake, with certificates that are reloaded when their files change |
//! | `files.rs` | certificates and keys from PEM files, with errors that say what is wrong and what to do |
//! | `client_certificates.rs` | the verification of client certificates, and the record of a refused one |
//! | `handshake_failures.rs` | the failed handshakes: counted, logged and kept, within bounds |
//! | `prefixed_stream.rs` | a stream whose first bytes were already read |
//! | `check.rs` | the checks of a certificate, for `muster tls check` |
//! | `dial.rs` | the client side: a connection to a server, with TLS or without |
//! | `messages.rs` | the messages for errors |
//! | `certificate_authority.rs` | trial certificates, for `muster tls new` |
//!
//! A JAX client never reports that TLS prevents its connection: it retries until its deadline and reports only
//! the deadline. The server must therefore show the reason.

mod acceptor;
pub mod certificate_authority;
pub mod check;
mod client_certificates;
mod dial;
mod files;
mod handshake_failures;
mod messages;
mod prefixed_stream;
mod transport_policy;

use std::fmt;
use std::sync::Arc;

use rustls::crypto::CryptoProvider;

pub use acceptor::{Acceptor, HandshakeError, HandshakeFault, TlsStream};
pub use client_certificates::certificate_holder_name;
pub use dial::{DialError, IoStream, TlsClientForHost, dial, host_without_brackets};
pub use files::{TlsError, TlsFiles, client_config, read_certificates, system_authorities_path};
pub use handshake_failures::{FailedHandshake, HandshakeFailures, HandshakeFailuresView, LISTENERS};
pub use messages::describe_dial_error;
pub use prefixed_stream::PrefixedStream;
pub use transport_policy::TransportPolicy;

/// The first byte of every TLS connection: a handshake record. HTTP/1 and HTTP/2 begin with a letter.
pub const FIRST_BYTE: u8 = 0x16;

/// The transports that a listener accepts.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum TlsMode {
    /// TLS if there is a certificate, otherwise plaintext.
    #[default]
    Auto,
    /// Plaintext only.
    Off,
    /// Both, distinguished by their first byte.
    Optional,
    /// TLS only.
    Required,
}

impl TlsMode {
    /// Parses a mode.
    ///
    /// # Errors
    /// With the valid spellings, if the text is none of them.
    pub fn parse(text: &str) -> Result<Self, String> {
        match text {
            "auto" => Ok(Self::Auto),
            "off" => Ok(Self::Off),
            "optional" => Ok(Self::Optional),
            "required" => Ok(Self::Required),
            _ => Err("write auto, off, optional or required".into()),
        }
    }
}

impl fmt::Display for TlsMode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Auto => "auto",
            Self::Off => "off",
            Self::Optional => "optional",
            Self::Required => "required",
        })
    }
}

/// Returns the cryptography provider. It is always passed explicitly, so that a dependency with another
/// provider changes nothing.
fn crypto_provider() -> Arc<CryptoProvider> {
    Arc::new(rustls::crypto::ring::default_provider())
}
