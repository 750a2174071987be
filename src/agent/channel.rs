//! Makes the gRPC channel to the service, plain or TLS, and recognizes ports that speak another protocol.
//!
//! This module does not repeat failed calls; `engine_host.rs` does. Begin at `create_service_channel`.

use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering};
use std::task::{Context, Poll};
use std::time::Duration;

use hyper_util::rt::TokioIo;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tonic::transport::{Channel, Endpoint, Uri};

use super::config::{AgentConfig, AgentTlsFiles};
use super::error::AgentError;
use super::timed_connector::TimedConnector;
use crate::tls::{self, IoStream, TlsClientForHost};

/// The timeout of a connection attempt.
const CONNECT: Duration = Duration::from_secs(10);
/// HTTP/2 keepalive: the silence after which the service's host is probed, and the time that it has to
/// answer.
const KEEP_ALIVE: (Duration, Duration) = (Duration::from_secs(20), Duration::from_secs(10));

/// The detected protocol of a dialled port.
#[derive(Debug, Clone, Default)]
pub struct DetectedPortProtocol(Arc<AtomicU8>);

/// The protocol of a port, as far as it is known.
#[derive(Debug, Clone, Copy)]
#[repr(u8)]
enum PortProtocol {
    Unknown,
    Http2,
    Http1,
    Tls,
    Nothing,
}

impl PortProtocol {
    /// Returns the protocol by the first bytes: HTTP/2 begins with a SETTINGS frame, whose length comes
    /// first.
    fn from_first_bytes(first: &[u8]) -> Self {
        match first {
            [b'H', b'T', ..] => Self::Http1,
            [0x15, 3, ..] => Self::Tls,
            _ => Self::Http2,
        }
    }
}

impl DetectedPortProtocol {
    fn record_protocol(&self, answered: PortProtocol) {
        self.0.store(answered as u8, Ordering::Release);
    }

    /// Returns why the port cannot be a gRPC port, if its protocol is known to be another.
    pub fn mismatch_hint(&self) -> Option<&'static str> {
        const HTTP1: u8 = PortProtocol::Http1 as u8;
        const TLS: u8 = PortProtocol::Tls as u8;
        const NOTHING: u8 = PortProtocol::Nothing as u8;
        match self.0.load(Ordering::Acquire) {
            HTTP1 => Some(
                "it answers in HTTP/1, so this does not look like the gRPC port of `muster serve` (8476 unless told otherwise; \
                 8477 is for browsers): correct --service or JAX_COORDINATOR_ADDRESS",
            ),
            TLS => Some("it speaks TLS: give --ca, and --cert and --key if it asks who comes"),
            NOTHING => Some(
                "it ended the connection without a word, so this does not look like the gRPC port of `muster serve` (8476 unless \
                 told otherwise; 8477 is for browsers), or it wants TLS: correct --service or JAX_COORDINATOR_ADDRESS, or give --ca",
            ),
            _ => None,
        }
    }
}

/// Returns a channel to the service of a configuration. It connects with the first call, and again after a lost connection.
pub fn create_service_channel(config: &AgentConfig) -> Result<(Channel, DetectedPortProtocol), AgentError> {
    open_channel(&config.service, config.authority.as_deref(), config.tls.as_ref())
}

/// Returns a channel to the service at `service`, as [`create_service_channel`].
pub fn open_channel(
    service: &str,
    authority: Option<&str>,
    tls: Option<&AgentTlsFiles>,
) -> Result<(Channel, DetectedPortProtocol), AgentError> {
    let uri = |address: &str| {
        format!("http://{address}")
            .parse::<Uri>()
            .map_err(|error| AgentError::Settings(format!("{address:?} is no address: {error}")))
    };
    let mut endpoint = Endpoint::from(uri(service)?);
    if let Some(authority) = authority {
        endpoint = endpoint.origin(uri(authority)?);
    }
    let endpoint = endpoint.http2_keep_alive_interval(KEEP_ALIVE.0).keep_alive_timeout(KEEP_ALIVE.1);
    let (host, _) =
        service.rsplit_once(':').ok_or_else(|| AgentError::Settings(format!("{service:?} has no port")))?;
    let tls = tls.map(|files| {
        let own = files.own.as_ref().map(|(cert, key)| (cert.as_path(), key.as_path()));
        let config = tls::client_config(&files.ca, own, &[b"h2"])
            .map_err(|error| AgentError::Tls(error.to_string()))?;
        TlsClientForHost::new(Arc::new(config), host).map_err(|error| AgentError::Tls(error.to_string()))
    });
    let port = DetectedPortProtocol::default();
    let dialler = ServiceConnector { address: service.to_owned(), tls: tls.transpose()?, port: port.clone() };
    let connector = TimedConnector::new(CONNECT, move || dialler.clone().connect());
    Ok((endpoint.connect_with_connector_lazy(connector), port))
}

/// A stream that reports its first bytes to a [`DetectedPortProtocol`].
struct SniffedStream {
    stream: Box<dyn IoStream>,
    /// `None` once bytes have been received.
    port: Option<DetectedPortProtocol>,
}

impl SniffedStream {
    fn record_port_protocol(&mut self, answered: PortProtocol) {
        if let Some(port) = self.port.take() {
            port.record_protocol(answered);
        }
    }
}

impl AsyncRead for SniffedStream {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let before = buffer.filled().len();
        let read = Pin::new(&mut self.stream).poll_read(cx, buffer);
        if read.is_ready() {
            let first = &buffer.filled()[before..];
            self.record_port_protocol(if first.is_empty() {
                PortProtocol::Nothing
            } else {
                PortProtocol::from_first_bytes(first)
            });
        }
        read
    }
}

impl AsyncWrite for SniffedStream {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        let written = Pin::new(&mut self.stream).poll_write(cx, bytes);
        if matches!(written, Poll::Ready(Err(_))) {
            self.record_port_protocol(PortProtocol::Nothing);
        }
        written
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(cx)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bytes: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let written = Pin::new(&mut self.stream).poll_write_vectored(cx, bytes);
        if matches!(written, Poll::Ready(Err(_))) {
            self.record_port_protocol(PortProtocol::Nothing);
        }
        written
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }
}

#[derive(Clone)]
struct ServiceConnector {
    address: String,
    port: DetectedPortProtocol,
    tls: Option<TlsClientForHost>,
}

impl ServiceConnector {
    async fn connect(self) -> io::Result<TokioIo<SniffedStream>> {
        self.port.record_protocol(PortProtocol::Unknown);
        let stream = tls::dial(&self.address, self.tls.as_ref()).await?;
        Ok(TokioIo::new(SniffedStream { stream, port: Some(self.port) }))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_port_is_known_by_its_first_bytes() {
        for (first, said) in [
            (&b"HTTP/1.1 400 Bad Request"[..], Some("HTTP/1")),
            (&[0x15, 3, 3, 0, 2, 2, 70], Some("TLS")),
            (&[0, 0, 24, 4, 0, 0, 0, 0, 0], None),
        ] {
            let port = DetectedPortProtocol::default();
            port.record_protocol(PortProtocol::from_first_bytes(first));
            assert_eq!(port.mismatch_hint().is_some(), said.is_some(), "{first:?}");
            assert!(
                port.mismatch_hint().is_none_or(|text| text.contains(said.unwrap_or_default())),
                "{first:?}"
            );
        }
        assert_eq!(DetectedPortProtocol::default().mismatch_hint(), None);
    }
}
