//! A trace collector.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::{Arc, Mutex};

use axum::body::Bytes;
use axum::extract::State;
use axum::routing::post;
use muster::tls::certificate_authority::{CertificateAuthority, CertificatePurpose};
use opentelemetry_proto::tonic::collector::trace::v1::trace_service_server::{
    TraceService, TraceServiceServer,
};
use opentelemetry_proto::tonic::collector::trace::v1::{
    ExportTraceServiceRequest, ExportTraceServiceResponse,
};
use opentelemetry_proto::tonic::common::v1::{KeyValue, any_value::Value};
use opentelemetry_proto::tonic::trace::v1::Span;
use prost::Message as _;
use rustls::ServerConfig;
use rustls::pki_types::pem::PemObject as _;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use tokio::net::{TcpListener, TcpStream};
use tokio_rustls::TlsAcceptor;
use tokio_rustls::server::TlsStream;
use tonic::{Request, Response, Status};

#[derive(Clone, Default)]
struct CollectedSpans(Arc<Mutex<Vec<Span>>>);

impl CollectedSpans {
    fn add_spans_of_request(&self, request: ExportTraceServiceRequest) {
        let mut kept = self.0.lock().expect("no holder panics");
        for resource in request.resource_spans {
            let of = resource.resource.expect("it says whose they are");
            let name = of.attributes.iter().find(|attribute| attribute.key == "service.name");
            assert_eq!(name.map(string_value), Some("muster".to_owned()));
            kept.extend(resource.scope_spans.into_iter().flat_map(|scope| scope.spans));
        }
    }
}

#[tonic::async_trait]
impl TraceService for CollectedSpans {
    async fn export(
        &self,
        request: Request<ExportTraceServiceRequest>,
    ) -> Result<Response<ExportTraceServiceResponse>, Status> {
        self.add_spans_of_request(request.into_inner());
        Ok(Response::new(ExportTraceServiceResponse::default()))
    }
}

/// A collector that stores the received spans.
pub struct Collector {
    kept: CollectedSpans,
    address: SocketAddr,
    scheme: &'static str,
}

/// The TLS identity of a collector.
pub struct CollectorIdentity {
    /// The file with the CA certificate.
    pub ca: PathBuf,
    acceptor: TlsAcceptor,
}

impl CollectorIdentity {
    /// Returns a new identity for a collector on this machine with this protocol.
    pub fn new(name: &str, protocol: &str) -> Self {
        let authority = CertificateAuthority::new(name).expect("there is entropy");
        let made = authority
            .issue_certificate(CertificatePurpose::Server, &["localhost".into()], 2)
            .expect("the name is one");
        let ca = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join(format!("{name}.pem"));
        std::fs::write(&ca, authority.certificate_pem()).expect("it can be written");
        let certificate = CertificateDer::from_pem_slice(made.cert.as_bytes()).expect("it is PEM");
        let key = PrivateKeyDer::from_pem_slice(made.key.as_bytes()).expect("it is PEM");
        let config = ServerConfig::builder_with_provider(Arc::new(rustls::crypto::ring::default_provider()));
        let config =
            config.with_safe_default_protocol_versions().expect("there are some").with_no_client_auth();
        let mut config = config.with_single_cert(vec![certificate], key).expect("they belong together");
        config.alpn_protocols = vec![protocol.as_bytes().to_vec()];
        Self { ca, acceptor: TlsAcceptor::from(Arc::new(config)) }
    }
}

/// A TLS listener that ignores clients whose handshake fails.
struct CollectorTlsListener(TcpListener, TlsAcceptor);

impl axum::serve::Listener for CollectorTlsListener {
    type Io = TlsStream<TcpStream>;
    type Addr = SocketAddr;

    async fn accept(&mut self) -> (Self::Io, SocketAddr) {
        loop {
            let (stream, peer) = self.0.accept().await.expect("somebody comes");
            if let Ok(stream) = self.1.accept(stream).await {
                return (stream, peer);
            }
        }
    }

    fn local_addr(&self) -> std::io::Result<SocketAddr> {
        self.0.local_addr()
    }
}

impl Collector {
    /// Starts a collector that speaks gRPC.
    pub async fn start_grpc(identity: Option<&CollectorIdentity>) -> Self {
        let kept = CollectedSpans::default();
        let service = TraceServiceServer::new(kept.clone());
        Self::serve_app(kept, tonic::service::Routes::new(service).into_axum_router(), identity).await
    }

    /// Starts a collector that speaks HTTP.
    pub async fn start_http(identity: Option<&CollectorIdentity>) -> Self {
        let kept = CollectedSpans::default();
        let take = async |State(kept): State<CollectedSpans>, body: Bytes| {
            kept.add_spans_of_request(ExportTraceServiceRequest::decode(body).expect("it is a request"));
            ExportTraceServiceResponse::default().encode_to_vec()
        };
        let app = axum::Router::new().route("/v1/traces", post(take)).with_state(kept.clone());
        Self::serve_app(kept, app, identity).await
    }

    async fn serve_app(
        kept: CollectedSpans,
        app: axum::Router,
        identity: Option<&CollectorIdentity>,
    ) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a free port");
        let address = listener.local_addr().expect("it is bound");
        let scheme = if identity.is_some() { "https" } else { "http" };
        match identity {
            Some(identity) => {
                let listener = CollectorTlsListener(listener, identity.acceptor.clone());
                tokio::spawn(async move { axum::serve(listener, app).await });
            }
            None => {
                tokio::spawn(async move { axum::serve(listener, app).await });
            }
        }
        Self { kept, address, scheme }
    }

    pub fn endpoint(&self) -> String {
        format!("{}://localhost:{}", self.scheme, self.address.port())
    }

    /// Returns the spans received so far.
    pub fn spans(&self) -> Vec<Span> {
        self.kept.0.lock().expect("no holder panics").clone()
    }
}

fn string_value(attribute: &KeyValue) -> String {
    match attribute.value.as_ref().and_then(|value| value.value.as_ref()) {
        Some(Value::StringValue(text)) => text.clone(),
        other => panic!("{} is {other:?}", attribute.key),
    }
}

/// Returns a text attribute.
#[track_caller]
pub fn text_attribute(span: &Span, key: &str) -> String {
    let found = span.attributes.iter().find(|attribute| attribute.key == key);
    string_value(found.unwrap_or_else(|| panic!("no {key} in {span:?}")))
}

/// Returns an integer attribute.
#[track_caller]
pub fn integer_attribute(attributes: &[KeyValue], key: &str) -> i64 {
    let found = attributes.iter().find(|attribute| attribute.key == key);
    match found.and_then(|attribute| attribute.value.as_ref()).and_then(|value| value.value.as_ref()) {
        Some(Value::IntValue(number)) => *number,
        other => panic!("{key} is {other:?} in {attributes:?}"),
    }
}
