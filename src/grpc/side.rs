//! The other services of the port: health and reflection. Their calls are rare; each is a task.

use std::pin::{Pin, pin};
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use bytes::{Buf, Bytes};
use h2::RecvStream;
use http::{Request, Response};
use http_body::{Body, Frame};
use tokio::sync::Semaphore;
use tonic::service::Routes;
use tonic_health::ServingStatus;
use tonic_health::server::HealthReporter;
use tower_service::Service as _;

use super::call::Dialect;
use super::mailbox::Mailbox;
use super::respond::{self, Piece, Respond};
use super::{generation_a, generation_c};
use crate::coordination::{Code, Failure};
use crate::proto::DESCRIPTORS;

/// The other services.
pub(super) struct Services {
    routes: Routes,
    health: HealthReporter,
}

/// Every name that health is told of; the empty one is the server as a whole.
const NAMES: [&str; 3] = ["", generation_a::SERVICE, generation_c::SERVICE];

impl Services {
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

    /// Tells of every service that it serves.
    pub(super) async fn serving(&self) {
        for name in NAMES {
            self.health.set_service_status(name, ServingStatus::Serving).await;
        }
    }

    /// Tells of every service that it does not serve any more.
    pub(super) async fn stopping(&self) {
        for name in NAMES {
            self.health.set_service_status(name, ServingStatus::NotServing).await;
        }
    }
}

/// The calls of one connection to the other services.
pub(super) struct Side {
    most: usize,
    free: Option<Arc<Semaphore>>,
}

impl Side {
    pub(super) fn new(most: usize) -> Self {
        Self { most, free: None }
    }

    /// Takes a call, and has it answered by a task of its own.
    pub(super) fn take(
        &mut self,
        services: &Services,
        request: Request<RecvStream>,
        mut respond: Respond,
        mailbox: &Arc<Mailbox>,
    ) {
        let free = self.free.get_or_insert_with(|| Arc::new(Semaphore::new(self.most)));
        let Ok(permit) = Arc::clone(free).try_acquire_owned() else {
            let text =
                format!("{} calls to this service are in progress on this connection already", self.most);
            let why = Failure::plain(Code::ResourceExhausted, text);
            return respond::failure(&mut respond, &why, Dialect::Number);
        };
        let (routes, mailbox) = (services.routes.clone(), Arc::clone(mailbox));
        tokio::spawn(async move {
            let _permit = permit;
            answer(routes, request, respond, &mailbox).await;
        });
    }
}

async fn answer(
    mut routes: Routes,
    request: Request<RecvStream>,
    mut respond: Respond,
    mailbox: &Arc<Mailbox>,
) {
    let request = request.map(|stream| tonic::body::Body::new(Incoming(stream)));
    let response = tokio::select! {
        biased;
        _ = std::future::poll_fn(|cx| respond.poll_reset(cx)) => return,
        response = routes.call(request) => response,
    };
    let Ok(response) = response;
    let (head, body) = response.into_parts();
    let ended = body.is_end_stream();
    let Ok(mut stream) = respond.send_response(Response::from_parts(head, ()), ended) else { return };
    if ended {
        return;
    }
    let mut body = pin!(body);
    loop {
        let frame = tokio::select! {
            biased;
            _ = std::future::poll_fn(|cx| stream.poll_reset(cx)) => return,
            frame = std::future::poll_fn(|cx| body.as_mut().poll_frame(cx)) => frame,
        };
        let sent = match frame {
            None => {
                let _ = stream.send_data(Piece::new(Bytes::new(), mailbox), true);
                return;
            }
            Some(Err(_)) => return stream.send_reset(h2::Reason::INTERNAL_ERROR),
            Some(Ok(frame)) => match frame.into_data() {
                Ok(data) => send(&mut stream, data, mailbox).await,
                Err(frame) => {
                    if let Ok(trailers) = frame.into_trailers() {
                        let _ = stream.send_trailers(trailers);
                    }
                    return;
                }
            },
        };
        if !sent {
            return;
        }
    }
}

/// Sends as fast as the peer reads; `false` once it is gone.
async fn send(stream: &mut h2::SendStream<Piece>, mut data: Bytes, mailbox: &Arc<Mailbox>) -> bool {
    while data.has_remaining() {
        stream.reserve_capacity(data.len());
        match std::future::poll_fn(|cx| stream.poll_capacity(cx)).await {
            Some(Ok(capacity)) => {
                let piece = data.split_to(capacity.min(data.len()));
                if stream.send_data(Piece::new(piece, mailbox), false).is_err() {
                    return false;
                }
            }
            _ => return false,
        }
    }
    true
}

/// A request's body as these services want it.
struct Incoming(RecvStream);

impl Body for Incoming {
    type Data = Bytes;
    type Error = h2::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, h2::Error>>> {
        match ready!(self.0.poll_data(cx)) {
            Some(Ok(data)) => {
                let _ = self.0.flow_control().release_capacity(data.len());
                Poll::Ready(Some(Ok(Frame::data(data))))
            }
            Some(Err(error)) => Poll::Ready(Some(Err(error))),
            None => match ready!(self.0.poll_trailers(cx)) {
                Ok(Some(trailers)) => Poll::Ready(Some(Ok(Frame::trailers(trailers)))),
                Ok(None) => Poll::Ready(None),
                Err(error) => Poll::Ready(Some(Err(error))),
            },
        }
    }

    fn is_end_stream(&self) -> bool {
        self.0.is_end_stream()
    }
}
