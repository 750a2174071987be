//! A collector of traces.

use std::net::SocketAddr;
use std::sync::{Arc, Mutex};

use axum::body::Bytes;
use axum::extract::State;
use axum::routing::post;
use opentelemetry_proto::tonic::collector::trace::v1::trace_service_server::{
    TraceService, TraceServiceServer,
};
use opentelemetry_proto::tonic::collector::trace::v1::{
    ExportTraceServiceRequest, ExportTraceServiceResponse,
};
use opentelemetry_proto::tonic::common::v1::{KeyValue, any_value::Value};
use opentelemetry_proto::tonic::trace::v1::Span;
use prost::Message as _;
use tokio::net::TcpListener;
use tonic::{Request, Response, Status};

#[derive(Clone, Default)]
struct Kept(Arc<Mutex<Vec<Span>>>);

impl Kept {
    fn take(&self, request: ExportTraceServiceRequest) {
        let mut kept = self.0.lock().expect("no holder panics");
        for resource in request.resource_spans {
            let of = resource.resource.expect("it says whose they are");
            let name = of.attributes.iter().find(|attribute| attribute.key == "service.name");
            assert_eq!(name.map(value), Some("muster".to_owned()));
            kept.extend(resource.scope_spans.into_iter().flat_map(|scope| scope.spans));
        }
    }
}

#[tonic::async_trait]
impl TraceService for Kept {
    async fn export(
        &self,
        request: Request<ExportTraceServiceRequest>,
    ) -> Result<Response<ExportTraceServiceResponse>, Status> {
        self.take(request.into_inner());
        Ok(Response::new(ExportTraceServiceResponse::default()))
    }
}

/// A collector that keeps what it gets.
pub struct Collector {
    kept: Kept,
    address: SocketAddr,
}

impl Collector {
    /// One that speaks gRPC.
    pub async fn grpc() -> Self {
        let (kept, listener, address) = Self::open().await;
        let service = TraceServiceServer::new(kept.clone());
        let app = tonic::service::Routes::new(service).into_axum_router();
        tokio::spawn(async move { axum::serve(listener, app).await });
        Self { kept, address }
    }

    /// One that speaks HTTP.
    pub async fn http() -> Self {
        let (kept, listener, address) = Self::open().await;
        let take = async |State(kept): State<Kept>, body: Bytes| {
            kept.take(ExportTraceServiceRequest::decode(body).expect("it is a request"));
            ExportTraceServiceResponse::default().encode_to_vec()
        };
        let app = axum::Router::new().route("/v1/traces", post(take)).with_state(kept.clone());
        tokio::spawn(async move { axum::serve(listener, app).await });
        Self { kept, address }
    }

    async fn open() -> (Kept, TcpListener, SocketAddr) {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a free port");
        let address = listener.local_addr().expect("it is bound");
        (Kept::default(), listener, address)
    }

    pub fn endpoint(&self) -> String {
        format!("http://{}", self.address)
    }

    /// What has come so far.
    pub fn spans(&self) -> Vec<Span> {
        self.kept.0.lock().expect("no holder panics").clone()
    }
}

fn value(attribute: &KeyValue) -> String {
    match attribute.value.as_ref().and_then(|value| value.value.as_ref()) {
        Some(Value::StringValue(text)) => text.clone(),
        other => panic!("{} is {other:?}", attribute.key),
    }
}

/// An attribute that is text.
#[track_caller]
pub fn text(span: &Span, key: &str) -> String {
    let found = span.attributes.iter().find(|attribute| attribute.key == key);
    value(found.unwrap_or_else(|| panic!("no {key} in {span:?}")))
}

/// An attribute that is a whole number.
#[track_caller]
pub fn whole(attributes: &[KeyValue], key: &str) -> i64 {
    let found = attributes.iter().find(|attribute| attribute.key == key);
    match found.and_then(|attribute| attribute.value.as_ref()).and_then(|value| value.value.as_ref()) {
        Some(Value::IntValue(number)) => *number,
        other => panic!("{key} is {other:?} in {attributes:?}"),
    }
}
