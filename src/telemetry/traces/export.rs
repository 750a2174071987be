//! How traces leave: by gRPC, or by HTTP over a small client of our own.

use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::time::Duration;

use bytes::Bytes;
use http::{Request, Response, Uri, header};
use http_body_util::{BodyExt as _, Full, Limited};
use hyper::client::conn::http1;
use hyper_util::rt::TokioIo;
use opentelemetry_http::{HttpClient, HttpError};
use opentelemetry_otlp::{SpanExporter, WithExportConfig as _, WithHttpConfig as _};
use tokio::net::TcpStream;
use tokio::runtime::Handle;

/// How long one request may take.
const PATIENCE: Duration = Duration::from_secs(10);
/// How long an answer may be, in bytes.
const ANSWER_BYTES_MAX: usize = 1 << 20;
/// Where traces go on an endpoint that names no place.
const PLACE: &str = "/v1/traces";

/// How traces are sent.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Protocol {
    /// OTLP over gRPC.
    Grpc,
    /// OTLP over HTTP, as protobuf.
    Http,
}

impl Protocol {
    /// Reads what settings and `OTEL_EXPORTER_OTLP_PROTOCOL` say.
    ///
    /// # Errors
    /// What to write instead.
    pub fn parse(text: &str) -> Result<Self, String> {
        match text {
            "grpc" => Ok(Self::Grpc),
            "http" | "http/protobuf" => Ok(Self::Http),
            _ => Err("write grpc or http".into()),
        }
    }
}

impl fmt::Display for Protocol {
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
/// What is wrong with it and what to write instead.
pub fn check_endpoint(text: &str) -> Result<(), String> {
    let uri: Uri = text.parse().map_err(|error| format!("{error}: write a URL such as http://HOST:4317"))?;
    match (uri.scheme_str(), uri.host()) {
        (Some("http"), Some(_)) => Ok(()),
        (Some("https"), _) => {
            Err("traces are sent in plain text: write an http:// URL, of a collector nearby".into())
        }
        _ => Err("write a URL such as http://HOST:4317".into()),
    }
}

/// What sends spans to `endpoint`.
pub(super) fn exporter(endpoint: &str, protocol: Protocol) -> Result<SpanExporter, String> {
    check_endpoint(endpoint)?;
    let built = match protocol {
        Protocol::Grpc => SpanExporter::builder().with_tonic().with_endpoint(endpoint).build(),
        Protocol::Http => {
            let whole = match endpoint.parse::<Uri>() {
                Ok(uri) if uri.path() == "/" => format!("{}{PLACE}", endpoint.trim_end_matches('/')),
                _ => endpoint.to_owned(),
            };
            let client = Client(Handle::current());
            SpanExporter::builder().with_http().with_http_client(client).with_endpoint(whole).build()
        }
    };
    built.map_err(|error| error.to_string())
}

/// Sends requests from any thread, by tasks of the runtime.
#[derive(Debug)]
struct Client(Handle);

type Answered<'a> = Pin<Box<dyn Future<Output = Result<Response<Bytes>, HttpError>> + Send + 'a>>;

impl HttpClient for Client {
    fn send_bytes<'a, 'b>(&'a self, request: Request<Bytes>) -> Answered<'b>
    where
        'a: 'b,
        Self: 'b,
    {
        let sent = self.0.spawn(async move { tokio::time::timeout(PATIENCE, send(request)).await });
        Box::pin(async move { sent.await?? })
    }
}

async fn send(mut request: Request<Bytes>) -> Result<Response<Bytes>, HttpError> {
    let uri = request.uri().clone();
    let host = uri.host().ok_or("the endpoint names no host")?;
    let address = (host.trim_start_matches('[').trim_end_matches(']'), uri.port_u16().unwrap_or(80));
    let stream = TcpStream::connect(address).await?;
    let (mut sender, connection) = http1::handshake(TokioIo::new(stream)).await?;
    tokio::spawn(async move {
        // Its error is the request's, too.
        let _ = connection.await;
    });
    let authority = uri.authority().map(|authority| authority.as_str().parse()).transpose()?;
    if let Some(authority) = authority {
        request.headers_mut().insert(header::HOST, authority);
    }
    *request.uri_mut() = uri.path_and_query().map_or("/", |place| place.as_str()).parse()?;
    let (head, body) = sender.send_request(request.map(Full::new)).await?.into_parts();
    let body = Limited::new(body, ANSWER_BYTES_MAX).collect().await?.to_bytes();
    Ok(Response::from_parts(head, body))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn endpoints_are_plain_urls() {
        assert_eq!(check_endpoint("http://collector:4317"), Ok(()));
        assert_eq!(check_endpoint("http://[::1]:4318/v1/traces"), Ok(()));
        assert!(check_endpoint("https://collector:4317").is_err_and(|wrong| wrong.contains("plain")));
        assert!(check_endpoint("collector:4317").is_err() && check_endpoint("").is_err());
    }
}
