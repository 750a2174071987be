//! TLS, the same for both edges: which connections it takes, with which certificates, and why it turned one away.
//!
//! | file | its reason to exist |
//! | --- | --- |
//! | `listener_tls.rs` | what a listener does with a new connection: plaintext, TLS, or neither |
//! | `acceptor.rs` | the handshake, with certificates that are read again when their files change |
//! | `files.rs` | certificates and keys out of files; what is wrong with them and what to do |
//! | `client_certificates.rs` | who proves to be whom with a certificate, and what was shown by who could not |
//! | `handshake_failures.rs` | the handshakes that failed: counted, logged and kept, within bounds |
//! | `prefixed_stream.rs` | a stream whose first bytes were read already |
//! | `check.rs` | what a certificate lacks, for `muster tls check` |
//! | `messages.rs` | what the checks say, in words |
//! | `issue.rs` | certificates for trying things out, for `muster tls new` |
//!
//! A client of JAX never says that TLS is why it cannot connect: it retries until its time is up and then speaks of a
//! deadline. So the reason has to be found here.

mod acceptor;
pub mod check;
mod client_certificates;
mod files;
mod handshake_failures;
pub mod issue;
mod listener_tls;
mod messages;
mod prefixed_stream;

use std::fmt;
use std::sync::Arc;

use rustls::crypto::CryptoProvider;

pub use acceptor::{Acceptor, HandshakeError, HandshakeFault, TlsStream};
pub use client_certificates::subject;
pub use files::{TlsError, TlsFiles, certificates, client, system_authorities};
pub use handshake_failures::{FailedHandshake, HandshakeFailures, HandshakeFailuresPage, LISTENERS};
pub use listener_tls::ListenerTls;
pub use messages::describe_dial_error;
pub use prefixed_stream::PrefixedStream;

/// The first byte of every TLS connection. HTTP/1 and HTTP/2 begin with a letter.
pub const FIRST_BYTE: u8 = 0x16;

/// Which connections a listener takes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum TlsMode {
    /// TLS if there is a certificate, plaintext if not.
    #[default]
    Auto,
    /// Plaintext only.
    Off,
    /// Both, told apart by their first byte.
    Optional,
    /// TLS only.
    Required,
}

impl TlsMode {
    /// Reads a mode.
    ///
    /// # Errors
    /// How to write one.
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

/// The cryptography in use. It is named everywhere, so that a dependency that brings another one changes nothing.
fn provider() -> Arc<CryptoProvider> {
    Arc::new(rustls::crypto::ring::default_provider())
}
