//! Connects to a server by TCP, with or without TLS.
//!
//! The callers set time limits and repeat failed attempts. Begin at [`dial`].

use std::io;
use std::sync::Arc;

use rustls::ClientConfig;
use rustls::pki_types::{InvalidDnsNameError, ServerName};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpStream, ToSocketAddrs};
use tokio_rustls::TlsConnector;

/// A byte stream, with TLS or without.
pub trait IoStream: AsyncRead + AsyncWrite + Send + Unpin {}

impl<S: AsyncRead + AsyncWrite + Send + Unpin> IoStream for S {}

/// The TLS of a client of one server.
#[derive(Debug, Clone)]
pub struct TlsClientForHost {
    config: Arc<ClientConfig>,
    name: ServerName<'static>,
}

impl TlsClientForHost {
    /// Returns the TLS for the server at `host`, which must be in its certificate.
    ///
    /// # Errors
    /// If `host` is neither a name nor an address.
    pub fn new(config: Arc<ClientConfig>, host: &str) -> Result<Self, InvalidDnsNameError> {
        Ok(Self { config, name: ServerName::try_from(host_without_brackets(host).to_owned())? })
    }

    /// Performs the TLS handshake over `stream`.
    ///
    /// # Errors
    /// If the two do not agree on TLS.
    pub async fn connect<S: IoStream + 'static>(&self, stream: S) -> io::Result<Box<dyn IoStream>> {
        let connector = TlsConnector::from(Arc::clone(&self.config));
        Ok(Box::new(connector.connect(self.name.clone(), stream).await?))
    }
}

/// Returns a host without the brackets that an IPv6 address has beside a port; resolvers and certificates have none.
#[must_use]
pub fn host_without_brackets(host: &str) -> &str {
    host.strip_prefix('[').and_then(|rest| rest.strip_suffix(']')).unwrap_or(host)
}

/// Why a server could not be dialled.
#[derive(Debug, thiserror::Error)]
pub enum DialError {
    /// There is no connection.
    #[error(transparent)]
    Connect(io::Error),
    /// The TLS handshake failed.
    #[error(transparent)]
    Handshake(io::Error),
}

impl From<DialError> for io::Error {
    fn from(error: DialError) -> Self {
        match error {
            DialError::Connect(error) | DialError::Handshake(error) => error,
        }
    }
}

/// Opens a connection to `address`, with TLS if there is a `client`.
///
/// # Errors
/// If nothing listens there, or the two do not agree on TLS.
pub async fn dial(
    address: impl ToSocketAddrs,
    client: Option<&TlsClientForHost>,
) -> Result<Box<dyn IoStream>, DialError> {
    let stream = TcpStream::connect(address).await.map_err(DialError::Connect)?;
    stream.set_nodelay(true).map_err(DialError::Connect)?;
    match client {
        None => Ok(Box::new(stream)),
        Some(client) => client.connect(stream).await.map_err(DialError::Handshake),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_pair_of_brackets_goes() {
        for (host, bare) in
            [("[::1]", "::1"), ("::1", "::1"), ("a.example", "a.example"), ("[a", "[a"), ("", "")]
        {
            assert_eq!(host_without_brackets(host), bare);
        }
    }
}
