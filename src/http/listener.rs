//! Accepts HTTP connections, detects TLS or plaintext, and serves HTTP/1.1 within the limits of the listener.
//!
//! When the listener is full, `connection_slots.rs` decides which connection is closed to make room for a new one.
//! The first byte is read together with the bytes after it, which usually are the first request. Begin at `serve`.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::body::{Body, Bytes, HttpBody};
use http_body::{Frame, SizeHint};
use hyper::Request;
use hyper::body::Incoming;
use hyper::server::conn::http1;
use hyper::service::{Service as _, service_fn};
use hyper_util::rt::TokioIo;
use hyper_util::service::TowerToHyperService;
use std::pin::Pin;
use std::task::{Context, Poll};
use tokio::io::{AsyncRead, AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;
use tokio::task::JoinSet;

use super::connection_slots::{BusyGuard, HttpConnectionState, SlotGuard};
use super::request_client::{PeerAddress, TransportSecurity};
use super::write_timeout::WriteTimeoutStream;
use super::{ListenerState, Problem};
use crate::tls::{self, PrefixedStream, TransportPolicy};

/// The pause after an accept that failed for lack of memory or file descriptors.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);
/// The maximum time of reading from the client after the last response.
const LINGER_TIMEOUT: Duration = Duration::from_secs(1);
/// The number of bytes that are read to detect the protocol.
const DETECTION_BYTES: usize = 4 << 10;
/// The socket send buffer, in bytes: the part of a response that the kernel holds for a slow client.
const SEND_BUFFER: usize = 256 << 10;

/// The state that all connections of a listener share.
#[derive(Clone)]
struct ListenerContext {
    entrance: Arc<TransportPolicy>,
    router: Router,
    traffic: Arc<ListenerState>,
}

/// Serves `router` to the clients that `entrance` accepts, within the limits of `traffic`. When `stop`
/// becomes true, it finishes the requests in progress and returns.
pub async fn serve(
    listener: TcpListener,
    entrance: Arc<TransportPolicy>,
    router: Router,
    traffic: Arc<ListenerState>,
    mut stop: watch::Receiver<bool>,
) {
    let context = ListenerContext { entrance, router, traffic };
    let mut connections = JoinSet::new();
    loop {
        let next = async {
            context.traffic.connections.wait_for_capacity().await;
            listener.accept().await
        };
        tokio::select! {
            accepted = next => match accepted {
                Ok((stream, peer)) => {
                    let guard = context.traffic.connections.assign_slot(peer);
                    connections.spawn(serve_connection(stream, peer, context.clone(), stop.clone(), guard));
                }
                Err(error) => {
                    tracing::warn!(%error, "cannot accept an HTTP connection");
                    tokio::time::sleep(ACCEPT_PAUSE).await;
                }
            },
            Some(_) = connections.join_next() => {}
            () = wait_for_stop_signal(&mut stop) => break,
        }
    }
    drop(listener);
    while connections.join_next().await.is_some() {}
}

async fn wait_for_stop_signal(stop: &mut watch::Receiver<bool>) {
    // A dropped sender means the same as the stop signal.
    let _ = stop.wait_for(|stop| *stop).await;
}

/// The response to plaintext where only TLS is allowed.
const PLAINTEXT_REFUSAL: &[u8] =
    b"HTTP/1.1 400 Bad Request\r\ncontent-type: text/plain\r\nconnection: close\r\n\r\n\
    This port speaks TLS only: use https:// in place of http://.\n";

/// Serves one connection until the client leaves, a timeout expires, the slot is needed, or the server stops.
async fn serve_connection(
    stream: TcpStream,
    peer: SocketAddr,
    context: ListenerContext,
    stop: watch::Receiver<bool>,
    guard: SlotGuard,
) {
    let traffic = Arc::clone(&context.traffic);
    let socket = socket2::SockRef::from(&stream);
    // The connection works without these socket options, only less well.
    let _ = socket.set_tcp_nodelay(true);
    let _ = socket.set_send_buffer_size(SEND_BUFFER);
    #[cfg(target_os = "linux")]
    let _ = socket.set_tcp_user_timeout(Some(traffic.limits.send_timeout));
    tokio::select! {
        () = detect_tls_and_serve(stream, peer, context, stop, &guard) => {}
        why = guard.connection.wait_for_close_reason(&traffic.limits) => {
            tracing::debug!(%peer, why = why.name(), "closed an HTTP connection");
            traffic.connections.record_closed(why);
        }
    }
}

async fn detect_tls_and_serve(
    stream: TcpStream,
    peer: SocketAddr,
    context: ListenerContext,
    mut stop: watch::Receiver<bool>,
    guard: &SlotGuard,
) {
    let stream =
        WriteTimeoutStream::new(stream, Arc::clone(&guard.connection), context.traffic.limits.send_timeout);
    let met = tokio::select! {
        met = detect_tls_and_handshake(stream, peer, &context) => met,
        () = wait_for_stop_signal(&mut stop) => None,
    };
    match met {
        Some(PlaintextOrTlsStream::Plain(stream)) => {
            guard.connection.mark_plaintext();
            serve_http1(stream, (PeerAddress(peer), TransportSecurity::default()), context, stop, guard)
                .await;
        }
        Some(PlaintextOrTlsStream::Tls(stream)) => {
            guard.connection.mark_tls();
            let certificate = stream
                .get_ref()
                .1
                .peer_certificates()
                .and_then(<[_]>::first)
                .and_then(tls::certificate_holder_name);
            let channel = TransportSecurity { secure: true, certificate: certificate.map(Into::into) };
            serve_http1(*stream, (PeerAddress(peer), channel), context, stop, guard).await;
        }
        None => {}
    }
}

type TcpWithWriteTimeout = WriteTimeoutStream<TcpStream>;

/// A connection whose protocol is known.
enum PlaintextOrTlsStream {
    Plain(PrefixedStream<TcpWithWriteTimeout>),
    Tls(Box<tls::TlsStream<TcpWithWriteTimeout>>),
}

/// Detects TLS and completes the handshake, all within `head_timeout`. The bytes read for the detection are
/// usually the first request, and are passed on.
async fn detect_tls_and_handshake(
    mut stream: TcpWithWriteTimeout,
    peer: SocketAddr,
    context: &ListenerContext,
) -> Option<PlaintextOrTlsStream> {
    let entrance = &context.entrance;
    let mut early = Vec::with_capacity(DETECTION_BYTES);
    let within = context.traffic.limits.head_timeout;
    let until = tokio::time::Instant::now() + within;
    let first = tokio::time::timeout_at(until, stream.read_buf(&mut early)).await;
    if !matches!(first, Ok(Ok(1..))) {
        return None;
    }
    if early.first() != Some(&tls::FIRST_BYTE) {
        if entrance.allows_plaintext() {
            return Some(PlaintextOrTlsStream::Plain(PrefixedStream::new(early, stream)));
        }
        entrance.record_plaintext_refused(peer);
        let _ = tokio::time::timeout(ACCEPT_PAUSE, stream.write_all(PLAINTEXT_REFUSAL)).await;
        return None;
    }
    let secured = entrance.accept_tls(PrefixedStream::new(early, stream), peer);
    let Ok(secured) = tokio::time::timeout_at(until, secured).await else {
        entrance.record_handshake_timeout(peer, within);
        return None;
    };
    secured.map(|stream| PlaintextOrTlsStream::Tls(Box::new(stream)))
}

/// Serves HTTP/1.1 until the client leaves or the server stops.
async fn serve_http1<S>(
    stream: S,
    from: (PeerAddress, TransportSecurity),
    context: ListenerContext,
    mut stop: watch::Receiver<bool>,
    guard: &SlotGuard,
) where
    S: AsyncRead + AsyncWrite + Unpin + Send,
{
    let ListenerContext { router, traffic, .. } = context;
    let limits = traffic.limits;
    let router = TowerToHyperService::new(router);
    let service = service_fn(move |mut request: Request<Incoming>| {
        let busy = guard.connection.begin_request();
        request.extensions_mut().insert(from.0);
        request.extensions_mut().insert(from.1.clone());
        let (traffic, began) = (Arc::clone(&traffic), traffic.current_moment());
        let refused = guard.connection.reserved && !is_health_probe(&request);
        let connection = Arc::clone(&guard.connection);
        let answer =
            (!refused).then(|| router.call(request.map(|body| EvictableRequestBody { body, connection })));
        Box::pin(async move {
            let response = match answer {
                Some(answer) => answer.await?,
                None => Problem::too_many_connections().connection_closing_response(),
            };
            traffic.record_response(response.status(), began);
            Ok::<_, std::convert::Infallible>(
                response.map(|body| Body::new(BusyMarkingResponseBody { body, _busy: busy })),
            )
        })
    });
    let mut connection = http1::Builder::new()
        // The deadlines of the slot are stricter.
        .header_read_timeout(None)
        .max_buf_size(limits.head_bytes)
        .serve_connection(TokioIo::new(stream), service);
    let ended = tokio::select! {
        ended = std::future::poll_fn(|cx| connection.poll_without_shutdown(cx)) => ended,
        () = wait_for_stop_signal(&mut stop) => {
            Pin::new(&mut connection).graceful_shutdown();
            std::future::poll_fn(|cx| connection.poll_without_shutdown(cx)).await
        }
    };
    let stream = connection.into_parts().io.into_inner();
    let lingering = tokio::time::timeout(LINGER_TIMEOUT, read_until_client_closes(stream));
    tokio::select! {
        _ = lingering => {}
        () = wait_for_stop_signal(&mut stop) => {}
    }
    if let Err(error) = ended {
        // The client left, was too slow, or did not speak HTTP.
        tracing::debug!(%error, "an HTTP connection ended early");
    }
}

/// Shuts down the sending side and reads until the client closes. If unread bytes of a body remained, the
/// kernel would reset the connection and the client could lose the response.
async fn read_until_client_closes<S: AsyncRead + AsyncWrite + Unpin>(mut stream: S) {
    if stream.shutdown().await.is_err() {
        return;
    }
    let mut rest = [0; 1 << 10];
    while let Ok(1..) = stream.read(&mut rest).await {}
}

/// Returns whether a request is a health probe, which is answered under any load.
fn is_health_probe<B>(request: &Request<B>) -> bool {
    request.uri().path().starts_with("/healthz/")
}

/// The body of a request. While more of it is awaited, its connection may be evicted.
struct EvictableRequestBody {
    body: Incoming,
    connection: Arc<HttpConnectionState>,
}

impl HttpBody for EvictableRequestBody {
    type Data = Bytes;
    type Error = hyper::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, hyper::Error>>> {
        let frame = Pin::new(&mut self.body).poll_frame(cx);
        self.connection.record_body_wait(frame.is_pending());
        frame
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

impl Drop for EvictableRequestBody {
    fn drop(&mut self) {
        // The handler dropped the body, so the rest is not awaited.
        self.connection.record_body_wait(false);
    }
}

/// The body of a response. The connection is busy while it exists.
struct BusyMarkingResponseBody {
    body: Body,
    _busy: BusyGuard,
}

impl HttpBody for BusyMarkingResponseBody {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, axum::Error>>> {
        Pin::new(&mut self.body).poll_frame(cx)
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

#[cfg(test)]
mod tests {
    use std::convert::Infallible;

    use axum::body::Body;
    use axum::routing::{get, post};
    use bytes::Bytes;
    use futures_util::stream;

    use super::*;
    use crate::http::HttpLimits;
    #[cfg(feature = "metrics")]
    use crate::telemetry::metrics::catalogue::CATALOGUE;
    #[cfg(feature = "metrics")]
    use crate::telemetry::metrics::{MetricSource as _, ScrapeOutput};

    async fn start_test_listener(
        limits: HttpLimits,
    ) -> (std::net::SocketAddr, watch::Sender<bool>, tokio::task::JoinHandle<()>) {
        start_test_listener_with_state(ListenerState::new("http", crate::clock::Clock::start(), limits)).await
    }

    async fn start_test_listener_with_state(
        traffic: Arc<ListenerState>,
    ) -> (std::net::SocketAddr, watch::Sender<bool>, tokio::task::JoinHandle<()>) {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let stop = watch::Sender::new(false);
        let endless = || Body::from_stream(stream::pending::<Result<Bytes, Infallible>>());
        let router = Router::new()
            .route("/", get(async || "here"))
            .route("/stream", get(async move || endless()))
            .route("/body", post(async |body: Bytes| format!("{} bytes", body.len())))
            .route("/large", get(async || vec![b'x'; 64 << 20]))
            .route("/healthz/live", get(async || "alive"));
        let failures = Arc::new(tls::HandshakeFailures::new(crate::clock::Clock::start()));
        let entrance = Arc::new(TransportPolicy::plaintext_only("http", failures));
        let served = tokio::spawn(serve(listener, entrance, router, traffic, stop.subscribe()));
        (address, stop, served)
    }

    async fn request_root_path(stream: &mut TcpStream) -> String {
        stream.write_all(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n").await.unwrap();
        let mut answer = vec![0; 4096];
        let read = stream.read(&mut answer).await.unwrap();
        String::from_utf8_lossy(&answer[..read]).into_owned()
    }

    #[tokio::test]
    async fn an_idle_connection_makes_room_for_a_new_one() {
        let (address, _stop, _served) = start_test_listener(HttpLimits::new(1)).await;
        let mut first = TcpStream::connect(address).await.unwrap();
        assert!(request_root_path(&mut first).await.ends_with("here"));
        let mut second = TcpStream::connect(address).await.unwrap();
        assert!(request_root_path(&mut second).await.ends_with("here"));
        assert_eq!(first.read(&mut [0; 16]).await.unwrap_or_default(), 0, "it was closed");
    }

    #[tokio::test]
    async fn a_body_that_dribbles_makes_room_for_a_new_connection() {
        let (address, _stop, _served) = start_test_listener(HttpLimits::new(4)).await;
        let mut slow = Vec::new();
        for _ in 0..4 {
            let mut stream = TcpStream::connect(address).await.unwrap();
            // The server asks for the body when the handler reads it.
            let head =
                b"POST /body HTTP/1.1\r\nhost: x\r\nexpect: 100-continue\r\ncontent-length: 100\r\n\r\n";
            stream.write_all(head).await.unwrap();
            let mut asked = [0; 64];
            let read = stream.read(&mut asked).await.unwrap();
            assert!(asked[..read].starts_with(b"HTTP/1.1 100"), "{asked:?}");
            stream.write_all(b"x").await.unwrap();
            slow.push(stream);
        }
        let mut next = TcpStream::connect(address).await.unwrap();
        assert!(request_root_path(&mut next).await.ends_with("here"));
        assert_eq!(slow[0].read(&mut [0; 16]).await.unwrap_or_default(), 0, "the oldest was closed");
        slow[3].write_all(&[b'x'; 99]).await.unwrap();
        let mut answer = vec![0; 4096];
        let read = slow[3].read(&mut answer).await.unwrap();
        assert!(String::from_utf8_lossy(&answer[..read]).ends_with("100 bytes"), "the others go on");
    }

    #[tokio::test]
    async fn while_every_connection_is_busy_only_health_is_answered() {
        let (address, _stop, _served) = start_test_listener(HttpLimits::new(1)).await;
        let mut stream = TcpStream::connect(address).await.unwrap();
        stream.write_all(b"GET /stream HTTP/1.1\r\nhost: x\r\n\r\n").await.unwrap();
        assert!(stream.read(&mut [0; 4096]).await.unwrap() > 0, "its head is there");
        let mut second = TcpStream::connect(address).await.unwrap();
        let answer = request_root_path(&mut second).await;
        assert!(answer.starts_with("HTTP/1.1 503") && answer.contains("too-many-connections"), "{answer}");
        let mut probe = TcpStream::connect(address).await.unwrap();
        probe.write_all(b"GET /healthz/live HTTP/1.1\r\nhost: x\r\n\r\n").await.unwrap();
        let mut answer = vec![0; 4096];
        let read = probe.read(&mut answer).await.unwrap();
        assert!(String::from_utf8_lossy(&answer[..read]).ends_with("alive"), "{answer:?}");
    }

    #[tokio::test]
    async fn a_client_that_does_not_take_its_answer_is_cut() {
        let limits = HttpLimits { send_timeout: Duration::from_millis(100), ..HttpLimits::new(8) };
        let traffic = ListenerState::new("http", crate::clock::Clock::start(), limits);
        let (address, _stop, _served) = start_test_listener_with_state(Arc::clone(&traffic)).await;
        let mut stuck = TcpStream::connect(address).await.unwrap();
        stuck.write_all(b"GET /large HTTP/1.1\r\nhost: x\r\n\r\n").await.unwrap();
        // The client reads a few bytes now and then, which is below the minimum.
        let mut taken = 0;
        let cut = async {
            while let Ok(1..) = stuck.read(&mut [0; 64]).await {
                taken += 64;
                tokio::time::sleep(Duration::from_millis(20)).await;
                if traffic.connections.open_connection_count() == 0 {
                    break;
                }
            }
        };
        tokio::time::timeout(Duration::from_secs(30), cut).await.expect("it is cut");
        assert_eq!(traffic.connections.open_connection_count(), 0);
        assert!(taken > 0);
    }

    #[tokio::test]
    #[cfg(feature = "metrics")]
    async fn a_stream_without_end_counts_as_a_request_when_it_begins() {
        let traffic = ListenerState::new("http", crate::clock::Clock::start(), HttpLimits::new(8));
        let (address, _stop, _served) = start_test_listener_with_state(Arc::clone(&traffic)).await;
        let shown = || {
            let mut page = ScrapeOutput::default();
            traffic.write_samples(&mut page);
            page.to_text(CATALOGUE)
        };
        let mut first = TcpStream::connect(address).await.unwrap();
        assert!(request_root_path(&mut first).await.ends_with("here"));
        let mut second = TcpStream::connect(address).await.unwrap();
        second.write_all(b"GET /stream HTTP/1.1\r\nhost: x\r\n\r\n").await.unwrap();
        assert!(second.read(&mut [0; 4096]).await.unwrap() > 0, "its head is there");
        first.write_all(b"GET /nothing HTTP/1.1\r\nhost: x\r\n\r\n").await.unwrap();
        assert!(first.read(&mut [0; 4096]).await.unwrap() > 0);
        let text = shown();
        for line in [
            "muster_http_requests_total{listener=\"http\",class=\"2xx\"} 2",
            "muster_http_requests_total{listener=\"http\",class=\"4xx\"} 1",
            "muster_http_request_duration_seconds_count{listener=\"http\"} 3",
            "muster_http_connections{listener=\"http\"} 2",
            "muster_http_connections_limit{listener=\"http\"} 8",
        ] {
            assert!(text.lines().any(|found| found == line), "no {line} in:\n{text}");
        }
        drop((first, second));
        while !shown().contains("muster_http_connections{listener=\"http\"} 0") {
            tokio::task::yield_now().await;
        }
    }

    #[tokio::test]
    async fn a_request_that_never_ends_its_head_is_given_up() {
        let limits = HttpLimits { head_timeout: Duration::from_millis(50), ..HttpLimits::new(1) };
        let (address, _stop, _served) = start_test_listener(limits).await;
        let mut slow = TcpStream::connect(address).await.unwrap();
        slow.write_all(b"GET / HTTP/1.1\r\nho").await.unwrap();
        let mut rest = Vec::new();
        // The connection may end with or without a response; the test is about the free slot.
        let _ = slow.read_to_end(&mut rest).await;
        let mut next = TcpStream::connect(address).await.unwrap();
        assert!(request_root_path(&mut next).await.ends_with("here"));
    }

    #[tokio::test]
    async fn idle_connections_do_not_hold_up_the_stop() {
        let (address, stop, served) = start_test_listener(HttpLimits::new(8)).await;
        let mut idle = TcpStream::connect(address).await.unwrap();
        assert!(request_root_path(&mut idle).await.ends_with("here"));
        stop.send_replace(true);
        served.await.unwrap();
        assert_eq!(idle.read(&mut [0; 1]).await.unwrap(), 0);
    }
}
