//! The load generator's side of a connection: gRPC on `h2`, without what a generated client adds.
//!
//! Connections present themselves as jaxlib's do: the same settings, the same headers.

use std::future::poll_fn;
use std::net::SocketAddr;

use anyhow::{Context as _, Result, ensure};
use bytes::{Bytes, BytesMut};
use h2::RecvStream;
use h2::client::{ResponseFuture, SendRequest};
use http::{HeaderMap, HeaderValue, Request, Uri, header};
use tokio::net::TcpStream;
use tokio::task::JoinHandle;

use crate::wire::{self, Method};

/// What jaxlib's connections announce.
const WINDOW: u32 = 4 << 20;
const FRAME_MAX: u32 = 4 << 20;
const HEADERS_MAX: u32 = 16384;

/// What all connections to one server send again and again, made once.
pub struct Dialect {
    uris: Vec<Uri>,
    headers: HeaderMap,
}

impl Dialect {
    pub fn new(address: SocketAddr) -> Result<Self> {
        let uris = Method::ALL.map(|method| {
            let path = method.path();
            Uri::builder().scheme("http").authority(address.to_string()).path_and_query(path).build()
        });
        let mut headers = HeaderMap::new();
        let mut put = |name, value| headers.insert(name, HeaderValue::from_static(value));
        put(header::TE, "trailers");
        put(header::CONTENT_TYPE, "application/grpc");
        put(header::USER_AGENT, "grpc-c++/1.78.0 grpc-c/52.0.0 (linux; chttp2)");
        headers.insert("grpc-encoding", HeaderValue::from_static("gzip"));
        headers.insert("grpc-accept-encoding", HeaderValue::from_static("identity, deflate, gzip"));
        Ok(Self { uris: uris.into_iter().collect::<Result<_, _>>()?, headers })
    }

    fn request(&self, method: Method) -> Request<()> {
        let mut request = Request::new(());
        *request.method_mut() = http::Method::POST;
        *request.version_mut() = http::Version::HTTP_2;
        *request.uri_mut() = self.uris[method as usize].clone();
        *request.headers_mut() = self.headers.clone();
        request
    }
}

/// A connection, which carries the calls of one task or of many.
pub struct Connection {
    sender: SendRequest<Bytes>,
    driver: JoinHandle<()>,
}

impl Connection {
    /// Opens a connection; it is open once the server has answered on it, not once the kernel has accepted it.
    pub async fn open(address: SocketAddr) -> Result<Self> {
        let stream = TcpStream::connect(address).await.context("connecting")?;
        stream.set_nodelay(true)?;
        let (sender, mut connection) = h2::client::Builder::new()
            .enable_push(false)
            .initial_window_size(WINDOW)
            .initial_connection_window_size(WINDOW)
            .max_frame_size(FRAME_MAX)
            .max_header_list_size(HEADERS_MAX)
            .handshake(stream)
            .await
            .context("opening HTTP/2")?;
        let mut pings = connection.ping_pong().context("a new connection has no ping handle")?;
        let driver = tokio::spawn(async move {
            // What ends a connection shows in the calls that were on it.
            drop(connection.await);
        });
        pings.ping(h2::Ping::opaque()).await.context("waiting for the first answer")?;
        Ok(Self { sender, driver })
    }

    /// Puts a call on its way.
    pub fn call(&self, dialect: &Dialect, method: Method, body: Bytes) -> Result<Call> {
        // A clone is cheap, and each must wait for its own turn only where the server limits streams.
        let (response, mut stream) = self.sender.clone().send_request(dialect.request(method), false)?;
        stream.send_data(body, true)?;
        Ok(Call { method, response })
    }

    /// Cuts the connection as the death of a process does: no farewell, the kernel closes the socket.
    pub fn cut(self) {
        self.driver.abort();
    }
}

/// A call under way. The answer is taken in by the connection whether or not anybody waits here.
pub struct Call {
    method: Method,
    response: ResponseFuture,
}

/// What a server has answered.
#[derive(Debug)]
pub struct Reply {
    method: Method,
    pub status: u32,
    pub error: String,
    message: Bytes,
}

impl Call {
    pub async fn reply(self) -> Result<Reply> {
        let method = self.method;
        receive(method, self.response).await.with_context(|| format!("{method:?}"))
    }

    /// The message of an answer that must be a success.
    pub async fn ok(self) -> Result<Bytes> {
        let reply = self.reply().await?;
        ensure!(reply.status == 0, "{:?} failed with status {}: {}", reply.method, reply.status, reply.error);
        Ok(reply.message)
    }
}

async fn receive(method: Method, response: ResponseFuture) -> Result<Reply> {
    let (head, mut stream) = response.await?.into_parts();
    ensure!(head.status == http::StatusCode::OK, "HTTP status {}", head.status);
    if head.headers.contains_key("grpc-status") {
        return reply(method, &head.headers, Bytes::new());
    }
    let body = read(&mut stream).await?;
    let trailers = stream.trailers().await?.context("no trailers")?;
    reply(method, &trailers, wire::unframe(body)?)
}

fn reply(method: Method, trailers: &HeaderMap, message: Bytes) -> Result<Reply> {
    let status = trailers.get("grpc-status").context("no grpc-status")?.to_str()?.parse()?;
    let error = match trailers.get("grpc-message") {
        Some(text) => percent_encoding::percent_decode(text.as_bytes()).decode_utf8_lossy().into_owned(),
        None => String::new(),
    };
    Ok(Reply { method, status, error, message })
}

/// The whole body; without a copy where it comes in one piece, as nearly all do.
async fn read(stream: &mut RecvStream) -> Result<Bytes> {
    let Some(first) = next(stream).await? else { return Ok(Bytes::new()) };
    let whole = match first.get(1..wire::PREFIX) {
        Some(length) => wire::PREFIX + u32::from_be_bytes(length.try_into()?) as usize,
        None => 0,
    };
    if first.len() == whole {
        return Ok(first);
    }
    let mut body = BytesMut::with_capacity(whole);
    body.extend_from_slice(&first);
    while let Some(more) = next(stream).await? {
        body.extend_from_slice(&more);
        if body.len() == whole {
            break;
        }
    }
    Ok(body.freeze())
}

async fn next(stream: &mut RecvStream) -> Result<Option<Bytes>> {
    let Some(data) = poll_fn(|context| stream.poll_data(context)).await.transpose()? else { return Ok(None) };
    stream.flow_control().release_capacity(data.len())?;
    Ok(Some(data))
}
