//! Sends spans by OTLP over gRPC or HTTP, with or without TLS.
//!
//! The SDK queues the spans. Begin at `build_exporter`.

use std::fmt;
use std::future::Future;
use std::io;
use std::path::PathBuf;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::Bytes;
use http::{Request, Response, Uri, header};
use http_body_util::{BodyExt as _, Full, Limited};
use hyper::client::conn::http1;
use hyper_util::rt::TokioIo;
use opentelemetry_http::{HttpClient, HttpError};
use opentelemetry_otlp::{SpanExporter, WithExportConfig as _, WithHttpConfig as _, WithTonicConfig as _};
use rustls::ClientConfig;
use tokio::runtime::Handle;
use tonic::transport::Endpoint;
use tower_service::Service;

use crate::tls::{self, IoStream, TlsClientForHost};

/// The timeout of one request.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(10);
/// The maximum length of a response, in bytes.
const RESPONSE_BYTES_MAX: usize = 1 << 20;
/// The path of traces at an endpoint without a path.
const DEFAULT_PATH: &str = "/v1/traces";

/// The protocol of the export.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum OtlpProtocol {
    /// OTLP over gRPC.
    Grpc,
    /// OTLP over HTTP, as protobuf.
    Http,
}

impl OtlpProtocol {
    /// Parses the value of the setting and of `OTEL_EXPORTER_OTLP_PROTOCOL`.
    ///
    /// # Errors
    /// The replacement.
    pub fn parse(text: &str) -> Result<Self, String> {
        match text {
            "grpc" => Ok(Self::Grpc),
            "http" | "http/protobuf" => Ok(Self::Http),
            _ => Err("write grpc or http".into()),
        }
    }
}

impl fmt::Display for OtlpProtocol {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Grpc => "grpc",
            Self::Http => "http",
        })
    }
}

/// Checks an endpoint without using it.
///
/// # Errors
/// The reason, and what to write instead.
pub fn check_collector_endpoint(text: &str) -> Result<(), String> {
    let uri: Uri = text.parse().map_err(|error| format!("{error}: write a URL such as http://HOST:4317"))?;
    match (uri.scheme_str(), uri.host()) {
        (Some("http" | "https"), Some(_)) => Ok(()),
        _ => Err("write a URL such as http://HOST:4317".into()),
    }
}

/// The certificates for a collector behind `https`.
#[derive(Debug, Clone, Default)]
pub struct CollectorTls {
    /// The CA certificates that the collector's certificate must chain to; `None` for those of the system.
    pub ca: Option<PathBuf>,
    /// The client certificate and its key.
    pub own: Option<(PathBuf, PathBuf)>,
}

impl CollectorTls {
    /// Returns the TLS configuration for an endpoint; `None` if it uses plaintext.
    fn client_config(
        &self,
        endpoint: &Uri,
        protocol: &'static [u8],
    ) -> Result<Option<Arc<ClientConfig>>, String> {
        if endpoint.scheme_str() != Some("https") {
            return Ok(None);
        }
        let ca =
            self.ca.clone().or_else(tls::system_authorities_path).ok_or(
                "this system has no file of authorities: name one with OTEL_EXPORTER_OTLP_CERTIFICATE",
            )?;
        let own = self.own.as_ref().map(|(cert, key)| (cert.as_path(), key.as_path()));
        tls::client_config(&ca, own, &[protocol])
            .map(|config| Some(Arc::new(config)))
            .map_err(|error| error.to_string())
    }
}

/// Returns an exporter that sends spans to `endpoint`.
pub(super) fn build_exporter(
    endpoint: &str,
    protocol: OtlpProtocol,
    trust: &CollectorTls,
) -> Result<SpanExporter, String> {
    check_collector_endpoint(endpoint)?;
    let mut uri: Uri = endpoint.parse().map_err(|error| format!("{error}"))?;
    let built = match protocol {
        OtlpProtocol::Grpc => {
            let connector = CollectorConnector { tls: trust.client_config(&uri, b"h2")? };
            let channel = Endpoint::from(uri).timeout(REQUEST_TIMEOUT).connect_timeout(REQUEST_TIMEOUT);
            let channel = channel.connect_with_connector_lazy(connector);
            SpanExporter::builder().with_tonic().with_channel(channel).with_timeout(REQUEST_TIMEOUT).build()
        }
        OtlpProtocol::Http => {
            if uri.path() == "/" {
                let whole = format!("{}{DEFAULT_PATH}", endpoint.trim_end_matches('/'));
                uri = whole.parse().map_err(|error| format!("{error}"))?;
            }
            let connector = CollectorConnector { tls: trust.client_config(&uri, b"http/1.1")? };
            let client = OtlpHttpClient { runtime: Handle::current(), connector };
            SpanExporter::builder()
                .with_http()
                .with_http_client(client)
                .with_endpoint(uri.to_string())
                .build()
        }
    };
    built.map_err(|error| error.to_string())
}

type CollectorStream = TokioIo<Box<dyn IoStream>>;

/// Opens connections to a collector.
#[derive(Debug, Clone)]
struct CollectorConnector {
    tls: Option<Arc<ClientConfig>>,
}

impl CollectorConnector {
    async fn connect(self, endpoint: Uri) -> io::Result<CollectorStream> {
        let invalid = |error| io::Error::new(io::ErrorKind::InvalidInput, error);
        let host = endpoint.host().ok_or_else(|| invalid("the endpoint names no host".to_owned()))?;
        let port = endpoint.port_u16().unwrap_or(if self.tls.is_some() { 443 } else { 80 });
        let client = self.tls.map(|config| TlsClientForHost::new(config, host)).transpose();
        let client = client.map_err(|error| invalid(error.to_string()))?;
        Ok(TokioIo::new(tls::dial((tls::host_without_brackets(host), port), client.as_ref()).await?))
    }
}

impl Service<Uri> for CollectorConnector {
    type Response = CollectorStream;
    type Error = io::Error;
    type Future = Pin<Box<dyn Future<Output = io::Result<CollectorStream>> + Send>>;

    fn poll_ready(&mut self, _cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, endpoint: Uri) -> Self::Future {
        Box::pin(self.clone().connect(endpoint))
    }
}

/// Sends requests from any thread, by tasks of the runtime.
#[derive(Debug)]
struct OtlpHttpClient {
    runtime: Handle,
    connector: CollectorConnector,
}

type ResponseFuture<'a> = Pin<Box<dyn Future<Output = Result<Response<Bytes>, HttpError>> + Send + 'a>>;

impl HttpClient for OtlpHttpClient {
    fn send_bytes<'a, 'b>(&'a self, request: Request<Bytes>) -> ResponseFuture<'b>
    where
        'a: 'b,
        Self: 'b,
    {
        let connector = self.connector.clone();
        let send =
            async move { tokio::time::timeout(REQUEST_TIMEOUT, send_otlp_request(connector, request)).await };
        let sent = self.runtime.spawn(send);
        Box::pin(async move { sent.await?? })
    }
}

async fn send_otlp_request(
    connector: CollectorConnector,
    mut request: Request<Bytes>,
) -> Result<Response<Bytes>, HttpError> {
    let uri = request.uri().clone();
    let stream = connector.connect(uri.clone()).await?;
    let (mut sender, connection) = http1::handshake(stream).await?;
    tokio::spawn(async move {
        // The request reports the same error.
        let _ = connection.await;
    });
    let authority = uri.authority().map(|authority| authority.as_str().parse()).transpose()?;
    if let Some(authority) = authority {
        request.headers_mut().insert(header::HOST, authority);
    }
    *request.uri_mut() = uri.path_and_query().map_or("/", |place| place.as_str()).parse()?;
    let (head, body) = sender.send_request(request.map(Full::new)).await?.into_parts();
    let body = Limited::new(body, RESPONSE_BYTES_MAX).collect().await?.to_bytes();
    Ok(Response::from_parts(head, body))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn endpoints_are_urls() {
        for good in ["http://collector:4317", "http://[::1]:4318/v1/traces", "https://collector:4317"] {
            assert_eq!(check_collector_endpoint(good), Ok(()));
        }
        assert!(
            check_collector_endpoint("ftp://collector:4317")
                .is_err_and(|wrong| wrong.contains("http://HOST"))
        );
        assert!(check_collector_endpoint("collector:4317").is_err() && check_collector_endpoint("").is_err());
    }
}
