//! The auxiliary services of the gRPC port: health and reflection. Each call runs in a separate tokio task.
//!
//! `call_table.rs` serves coordination calls. Begin at [`AuxiliaryCalls::begin_call`].

use std::pin::{Pin, pin};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::task::{Context, Poll, Waker};

use bytes::Bytes;
use http::{HeaderMap, Method, Request, Uri};
use http_body::{Body, Frame};
use tokio::sync::{Semaphore, mpsc};
use tonic::service::Routes;
use tonic_health::ServingStatus;
use tonic_health::server::HealthReporter;
use tower_service::Service as _;

use super::dialect::{GENERATION_A_SERVICE, GENERATION_C_SERVICE, PEER_JOBS_SERVICE};
use super::{collectives_service, stacks_service, task_claims_service, transfers_service};
use crate::coordination::{Code, Failure};
use crate::http2::{ErrorCode, Http2Sender, StreamId, encode_header_block};
use crate::proto::DESCRIPTORS;

/// The auxiliary services: health and reflection.
pub(super) struct AuxiliaryServices {
    routes: Routes,
    health: HealthReporter,
}

/// The service names in health checks; the empty name is the server as a whole.
const NAMES: [&str; 8] = [
    "",
    GENERATION_A_SERVICE,
    GENERATION_C_SERVICE,
    task_claims_service::SERVICE,
    PEER_JOBS_SERVICE,
    transfers_service::SERVICE,
    stacks_service::SERVICE,
    collectives_service::SERVICE,
];

impl AuxiliaryServices {
    pub(super) fn new() -> Self {
        let health = HealthReporter::new();
        let service = tonic_health::pb::health_server::HealthServer::new(
            tonic_health::server::HealthService::from_health_reporter(health.clone()),
        );
        let mut routes = Routes::new(service);
        let reflection = || {
            tonic_reflection::server::Builder::configure()
                .register_encoded_file_descriptor_set(DESCRIPTORS)
                .register_encoded_file_descriptor_set(tonic_health::pb::FILE_DESCRIPTOR_SET)
        };
        match (reflection().build_v1(), reflection().build_v1alpha()) {
            (Ok(v1), Ok(v1alpha)) => routes = routes.add_service(v1).add_service(v1alpha),
            (Err(error), _) | (_, Err(error)) => {
                tracing::error!(%error, "the server cannot describe its services");
            }
        }
        Self { routes: routes.prepare(), health }
    }

    /// Reports every service as serving.
    pub(super) async fn set_serving(&self) {
        for name in NAMES {
            self.health.set_service_status(name, ServingStatus::Serving).await;
        }
    }

    /// Reports every service as not serving.
    pub(super) async fn set_not_serving(&self) {
        for name in NAMES {
            self.health.set_service_status(name, ServingStatus::NotServing).await;
        }
    }
}

/// The auxiliary calls of one connection.
pub(super) struct AuxiliaryCalls {
    most: usize,
    free: Option<Arc<Semaphore>>,
}

impl AuxiliaryCalls {
    pub(super) fn new(most: usize) -> Self {
        Self { most, free: None }
    }

    /// Begins a call, which its own task answers. `waker` is woken when a part of the response is ready.
    pub(super) fn begin_call(
        &mut self,
        services: &AuxiliaryServices,
        (path, fields): (&str, &HeaderMap),
        stream: StreamId,
        waker: Waker,
    ) -> Result<AuxiliaryCall, Failure> {
        let free = self.free.get_or_insert_with(|| Arc::new(Semaphore::new(self.most)));
        let Ok(permit) = Arc::clone(free).try_acquire_owned() else {
            let text =
                format!("{} calls to this service are in progress on this connection already", self.most);
            return Err(Failure::without_details(Code::ResourceExhausted, text));
        };
        let (incoming, received) = mpsc::unbounded_channel();
        let (sent, outgoing) = mpsc::channel(RESPONSE_PARTS_QUEUED);
        let unread = Arc::new(AtomicUsize::new(0));
        let body = AuxiliaryRequestBody { received, unread: Arc::clone(&unread) };
        let mut request = Request::new(tonic::body::Body::new(body));
        *request.method_mut() = Method::POST;
        *request.uri_mut() = Uri::try_from(path).unwrap_or_default();
        *request.headers_mut() = fields.clone();
        let routes = services.routes.clone();
        tokio::spawn(async move {
            let _permit = permit;
            tokio::select! {
                biased;
                () = sent.closed() => {}
                () = serve_call(routes, request, &sent) => {}
            }
        });
        Ok(AuxiliaryCall { stream, incoming: Some(incoming), outgoing, unread, waker, deferred: false })
    }
}

/// The number of response parts that may wait between the task and the connection.
const RESPONSE_PARTS_QUEUED: usize = 4;
/// The bytes of a request that its service has not read yet; requests to these services are short.
const UNREAD_MAX: usize = 64 << 10;
/// The size that each queued piece counts beside its bytes.
const CHUNK_OVERHEAD_BYTES: usize = 128;

/// A part of a response.
enum ResponsePart {
    Head(Vec<u8>, bool),
    Data(Bytes),
    Trailers(Vec<u8>),
    End,
}

/// A call to an auxiliary service.
pub(super) struct AuxiliaryCall {
    stream: StreamId,
    /// The request's body; `None` once the request has ended.
    incoming: Option<mpsc::UnboundedSender<Bytes>>,
    outgoing: mpsc::Receiver<ResponsePart>,
    unread: Arc<AtomicUsize>,
    waker: Waker,
    /// Whether it continues only when the peer has taken its answers.
    pub(super) deferred: bool,
}

impl AuxiliaryCall {
    /// Passes on received bytes of the request.
    pub(super) fn push_request_data(&mut self, bytes: &[u8], ended: bool) {
        if let Some(incoming) = &self.incoming
            && !bytes.is_empty()
        {
            let length = bytes.len() + CHUNK_OVERHEAD_BYTES;
            if self.unread.fetch_add(length, Ordering::Relaxed) + length > UNREAD_MAX {
                // The service sees an incomplete request, and answers that.
                self.incoming = None;
            } else {
                // A service that has answered reads no further.
                let _ = incoming.send(Bytes::copy_from_slice(bytes));
            }
        }
        if ended {
            self.incoming = None;
        }
    }

    /// Forwards the next part of the response; returns whether it was the last one.
    pub(super) fn forward_response(&mut self, sender: &mut Http2Sender) -> bool {
        let mut cx = Context::from_waker(&self.waker);
        // One part in each turn, so that the peer's backlog is checked in between.
        let Poll::Ready(piece) = self.outgoing.poll_recv(&mut cx) else { return false };
        let stream = self.stream;
        match piece {
            Some(ResponsePart::Head(block, ended)) => {
                sender.send_response_head(stream, &block, ended);
                if ended {
                    return true;
                }
            }
            Some(ResponsePart::Data(data)) => sender.send_data(stream, data),
            Some(ResponsePart::Trailers(block)) => {
                sender.send_trailers(stream, &block);
                return true;
            }
            Some(ResponsePart::End) => {
                sender.end_stream(stream);
                return true;
            }
            None => {
                sender.reset_stream(stream, ErrorCode::Internal);
                return true;
            }
        }
        self.waker.wake_by_ref();
        false
    }
}

/// Answers a request part by part. The task ends when the connection no longer receives the parts.
async fn serve_call(
    mut routes: Routes,
    request: Request<tonic::body::Body>,
    sent: &mpsc::Sender<ResponsePart>,
) {
    let Ok(response) = routes.call(request).await;
    let (head, body) = response.into_parts();
    let ended = body.is_end_stream();
    let _ = sent
        .send(ResponsePart::Head(encode_header_block(Some(head.status.as_u16()), &head.headers), ended))
        .await;
    if ended {
        return;
    }
    let mut body = pin!(body);
    loop {
        let piece = match std::future::poll_fn(|cx| body.as_mut().poll_frame(cx)).await {
            None => ResponsePart::End,
            Some(Err(_)) => return,
            Some(Ok(frame)) => match frame.into_data() {
                Ok(data) => ResponsePart::Data(data),
                Err(frame) => match frame.into_trailers() {
                    Ok(trailers) => ResponsePart::Trailers(encode_header_block(None, &trailers)),
                    Err(_) => continue,
                },
            },
        };
        let last = !matches!(piece, ResponsePart::Data(_));
        let _ = sent.send(piece).await;
        if last {
            return;
        }
    }
}

/// The body of a request in the form that tonic's services take.
struct AuxiliaryRequestBody {
    received: mpsc::UnboundedReceiver<Bytes>,
    unread: Arc<AtomicUsize>,
}

impl Body for AuxiliaryRequestBody {
    type Data = Bytes;
    type Error = std::convert::Infallible;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Self::Error>>> {
        self.received.poll_recv(cx).map(|next| {
            next.map(|bytes| {
                self.unread.fetch_sub(bytes.len() + CHUNK_OVERHEAD_BYTES, Ordering::Relaxed);
                Ok(Frame::data(bytes))
            })
        })
    }
}
