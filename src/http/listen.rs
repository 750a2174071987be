//! Accepts HTTP connections, within bounds.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use hyper::Request;
use hyper::body::Incoming;
use hyper::server::conn::http1;
use hyper::service::{Service as _, service_fn};
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use tokio::io::{AsyncRead, AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{OwnedSemaphorePermit, Semaphore, watch};
use tokio::task::JoinSet;

use super::Traffic;
use super::actor::{Channel, Peer};
use crate::tls::{self, Entrance, Rewind};

/// The bounds of the web edge.
#[derive(Debug, Clone, Copy)]
pub struct Limits {
    /// How many connections are served at once; more wait in the system's queue.
    pub connections: usize,
    /// How long a client may take to send the head of a request, or to send none on an idle connection.
    pub head_timeout: Duration,
    /// How long sent bytes may stay unacknowledged before the connection is given up.
    pub send_timeout: Duration,
    /// How many bytes the head of a request may have.
    pub head_bytes: usize,
}

impl Limits {
    /// The limits with this many connections.
    #[must_use]
    pub fn new(connections: usize) -> Self {
        Self {
            connections,
            head_timeout: Duration::from_secs(30),
            send_timeout: Duration::from_secs(30),
            head_bytes: 64 << 10,
        }
    }
}

/// How long to wait after accepting failed, which is mostly for want of file descriptors.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);
/// How much is read to find out what a client speaks.
const FIRST_READ: usize = 4 << 10;

/// What every connection gets.
#[derive(Clone)]
struct House {
    entrance: Arc<Entrance>,
    router: Router,
    traffic: Arc<Traffic>,
}

/// Serves `router` to whom `entrance` takes, within the bounds of `traffic`, until `stop` says so, then lets requests in progress
/// finish.
pub async fn serve(
    listener: TcpListener,
    entrance: Arc<Entrance>,
    router: Router,
    traffic: Arc<Traffic>,
    mut stop: watch::Receiver<bool>,
) {
    let limits = traffic.limits;
    let slots = Arc::new(Semaphore::new(limits.connections));
    let house = House { entrance, router, traffic };
    let mut connections = JoinSet::new();
    let mut told_full = false;
    loop {
        if slots.available_permits() == 0 && !told_full {
            told_full = true;
            tracing::warn!(
                connections = limits.connections,
                "every HTTP connection slot is taken; more clients wait: see --http-connections"
            );
        }
        let next = async {
            // The semaphore is never closed.
            let slot = Arc::clone(&slots).acquire_owned().await.ok()?;
            Some((listener.accept().await, slot))
        };
        tokio::select! {
            Some((accepted, slot)) = next => match accepted {
                Ok((stream, peer)) => {
                    connections.spawn(connection(stream, peer, house.clone(), stop.clone(), slot));
                }
                Err(error) => {
                    tracing::warn!(%error, "cannot accept an HTTP connection");
                    tokio::time::sleep(ACCEPT_PAUSE).await;
                }
            },
            Some(_) = connections.join_next() => told_full = told_full && slots.available_permits() == 0,
            () = told(&mut stop) => break,
        }
    }
    drop(listener);
    while connections.join_next().await.is_some() {}
}

async fn told(stop: &mut watch::Receiver<bool>) {
    // Nobody left who could tell is as good as told.
    let _ = stop.wait_for(|stop| *stop).await;
}

/// What is told to a client that speaks plaintext where only TLS is taken.
const SPEAK_TLS: &[u8] = b"HTTP/1.1 400 Bad Request\r\ncontent-type: text/plain\r\nconnection: close\r\n\r\n\
    This port speaks TLS only: use https:// in place of http://.\n";

async fn connection(
    stream: TcpStream,
    peer: SocketAddr,
    house: House,
    mut stop: watch::Receiver<bool>,
    _slot: OwnedSemaphorePermit,
) {
    let _counted = house.traffic.enter();
    let socket = socket2::SockRef::from(&stream);
    // Without these the connection works too, only less well.
    let _ = socket.set_tcp_nodelay(true);
    #[cfg(target_os = "linux")]
    let _ = socket.set_tcp_user_timeout(Some(house.traffic.limits.send_timeout));
    let met = tokio::select! {
        met = meet(stream, peer, &house) => met,
        () = told(&mut stop) => None,
    };
    match met {
        Some(Met::Plain(stream)) => {
            speak(stream, (Peer(peer), Channel::default()), house, stop).await;
        }
        Some(Met::Tls(stream)) => {
            let certificate =
                stream.get_ref().1.peer_certificates().and_then(<[_]>::first).and_then(tls::subject);
            let channel = Channel { secure: true, certificate: certificate.map(Into::into) };
            speak(*stream, (Peer(peer), channel), house, stop).await;
        }
        None => {}
    }
}

/// A connection that is to be served.
enum Met {
    Plain(Rewind<TcpStream>),
    Tls(Box<tls::Stream<TcpStream>>),
}

/// Finds out whether a connection speaks TLS. What is read for it is, as a rule, the first request, which is then not read
/// again.
async fn meet(mut stream: TcpStream, peer: SocketAddr, house: &House) -> Option<Met> {
    let entrance = &house.entrance;
    let mut early = Vec::with_capacity(FIRST_READ);
    let within = house.traffic.limits.head_timeout;
    let first = tokio::time::timeout(within, stream.read_buf(&mut early)).await;
    if !matches!(first, Ok(Ok(1..))) {
        return None;
    }
    if early.first() != Some(&tls::FIRST_BYTE) {
        if entrance.takes_plain() {
            return Some(Met::Plain(Rewind::new(early, stream)));
        }
        entrance.refused_plain(peer);
        let _ = tokio::time::timeout(ACCEPT_PAUSE, stream.write_all(SPEAK_TLS)).await;
        return None;
    }
    let secured = entrance.secure(Rewind::new(early, stream), peer);
    let Ok(secured) = tokio::time::timeout(within, secured).await else {
        entrance.too_slow(peer, within);
        return None;
    };
    secured.map(|stream| Met::Tls(Box::new(stream)))
}

/// Speaks HTTP until the client leaves or `stop` says so.
async fn speak<S>(stream: S, from: (Peer, Channel), house: House, mut stop: watch::Receiver<bool>)
where
    S: AsyncRead + AsyncWrite + Unpin + Send,
{
    let House { router, traffic, .. } = house;
    let limits = traffic.limits;
    let router = TowerToHyperService::new(router);
    let service = service_fn(move |mut request: Request<Incoming>| {
        request.extensions_mut().insert(from.0);
        request.extensions_mut().insert(from.1.clone());
        let (traffic, began) = (Arc::clone(&traffic), traffic.began());
        let answer = router.call(request);
        async move {
            let answer = answer.await;
            if let Ok(response) = &answer {
                traffic.answered(response.status(), began);
            }
            answer
        }
    });
    let connection = http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(limits.head_timeout)
        .max_buf_size(limits.head_bytes)
        .serve_connection(TokioIo::new(stream), service);
    let mut connection = std::pin::pin!(connection);
    let ended = tokio::select! {
        ended = connection.as_mut() => ended,
        () = told(&mut stop) => {
            connection.as_mut().graceful_shutdown();
            connection.await
        }
    };
    if let Err(error) = ended {
        // The client's affair: it left, was too slow, or spoke no HTTP.
        tracing::debug!(%error, "an HTTP connection ended early");
    }
}

#[cfg(test)]
mod tests {
    use std::convert::Infallible;

    use axum::body::Body;
    use axum::routing::get;
    use bytes::Bytes;
    use futures_util::stream;

    use super::*;
    #[cfg(feature = "metrics")]
    use crate::telemetry::metrics::catalogue::CATALOGUE;
    #[cfg(feature = "metrics")]
    use crate::telemetry::metrics::{Page, Shows as _};

    async fn started(
        limits: Limits,
    ) -> (std::net::SocketAddr, watch::Sender<bool>, tokio::task::JoinHandle<()>) {
        serving(Traffic::new("http", crate::clock::Clock::start(), limits)).await
    }

    async fn serving(
        traffic: Arc<Traffic>,
    ) -> (std::net::SocketAddr, watch::Sender<bool>, tokio::task::JoinHandle<()>) {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let stop = watch::Sender::new(false);
        let endless = || Body::from_stream(stream::pending::<Result<Bytes, Infallible>>());
        let router =
            Router::new().route("/", get(async || "here")).route("/stream", get(async move || endless()));
        let failures = Arc::new(tls::Failures::new(crate::clock::Clock::start()));
        let entrance = Arc::new(Entrance::plain("http", failures));
        let served = tokio::spawn(serve(listener, entrance, router, traffic, stop.subscribe()));
        (address, stop, served)
    }

    async fn ask(stream: &mut TcpStream) -> String {
        stream.write_all(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n").await.unwrap();
        let mut answer = vec![0; 4096];
        let read = stream.read(&mut answer).await.unwrap();
        String::from_utf8_lossy(&answer[..read]).into_owned()
    }

    #[tokio::test]
    async fn more_connections_than_allowed_wait_their_turn() {
        let (address, _stop, _served) = started(Limits::new(1)).await;
        let mut first = TcpStream::connect(address).await.unwrap();
        assert!(ask(&mut first).await.ends_with("here"));
        let mut second = TcpStream::connect(address).await.unwrap();
        {
            let mut waiting = std::pin::pin!(ask(&mut second));
            tokio::select! {
                answer = waiting.as_mut() => panic!("there was no room for {answer}"),
                answer = ask(&mut first) => assert!(answer.ends_with("here")),
            }
            drop(first);
            assert!(waiting.await.ends_with("here"));
        }
    }

    #[tokio::test]
    #[cfg(feature = "metrics")]
    async fn a_stream_without_end_counts_as_a_request_when_it_begins() {
        let traffic = Traffic::new("http", crate::clock::Clock::start(), Limits::new(8));
        let (address, _stop, _served) = serving(Arc::clone(&traffic)).await;
        let shown = || {
            let mut page = Page::default();
            traffic.show(&mut page);
            page.write(CATALOGUE)
        };
        let mut first = TcpStream::connect(address).await.unwrap();
        assert!(ask(&mut first).await.ends_with("here"));
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
        let limits = Limits { head_timeout: Duration::from_millis(50), ..Limits::new(1) };
        let (address, _stop, _served) = started(limits).await;
        let mut slow = TcpStream::connect(address).await.unwrap();
        slow.write_all(b"GET / HTTP/1.1\r\nho").await.unwrap();
        let mut rest = Vec::new();
        // It is closed, with or without an answer; what matters is that the slot is free again.
        let _ = slow.read_to_end(&mut rest).await;
        let mut next = TcpStream::connect(address).await.unwrap();
        assert!(ask(&mut next).await.ends_with("here"));
    }

    #[tokio::test]
    async fn idle_connections_do_not_hold_up_the_stop() {
        let (address, stop, served) = started(Limits::new(8)).await;
        let mut idle = TcpStream::connect(address).await.unwrap();
        assert!(ask(&mut idle).await.ends_with("here"));
        stop.send_replace(true);
        served.await.unwrap();
        assert_eq!(idle.read(&mut [0; 1]).await.unwrap(), 0);
    }
}
