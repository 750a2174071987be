//! Speaks HTTP/2 without a gRPC client: sends and receives arbitrary bytes.

use std::io::Write as _;
use std::net::SocketAddr;
use std::pin::pin;
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use base64::Engine as _;
use base64::alphabet;
use base64::engine::{DecodePaddingMode, GeneralPurpose, GeneralPurposeConfig};
use flate2::Compression;
use flate2::write::GzEncoder;
use h2::client::{ResponseFuture, SendRequest};
use http::{HeaderMap, Method, Request};
use prost::Message;
use prost::bytes::Bytes;
use tokio::net::TcpStream;
use tokio::task::JoinHandle;

/// The timeout of an answer that must come, on a slow machine.
pub const PATIENCE: Duration = Duration::from_secs(60);

/// The paths of the two generations.
pub const GENERATION_A: &str = "/tensorflow.CoordinationService";
pub const GENERATION_C: &str = "/xla.coordination.CoordinationService";

/// One HTTP/2 connection.
pub struct RawClient {
    send: SendRequest<Bytes>,
    connection: JoinHandle<()>,
    authority: String,
}

/// The response to a call.
#[derive(Debug, Clone)]
pub struct RawResponse {
    pub http: u16,
    /// `grpc-status`, if there is one.
    pub code: Option<i32>,
    pub message: String,
    /// The decoded bytes of `grpc-status-details-bin`.
    pub details: Option<Vec<u8>>,
    pub body: Vec<u8>,
}

impl RawClient {
    /// Connects as a client of this job.
    pub async fn connect(server: SocketAddr, job: &str) -> Self {
        let socket = TcpStream::connect(server).await.expect("the server listens");
        let mut builder = h2::client::Builder::new();
        builder.initial_window_size(1 << 20).initial_connection_window_size(1 << 20);
        // Thousands of cancelled calls, and late answers to them, are no violation.
        builder.max_concurrent_reset_streams(1 << 20).max_local_error_reset_streams(None);
        let (send, connection) = builder.handshake(socket).await.expect("the server speaks HTTP/2");
        // The calls show how the connection ends.
        let connection = tokio::spawn(async move { drop(connection.await) });
        Self { send, connection, authority: format!("{job}.test:8476") }
    }

    /// Returns a request with the header of gRPC clients.
    pub fn request(&self, path: &str) -> http::request::Builder {
        Request::builder()
            .method(Method::POST)
            .uri(format!("http://{}{path}", self.authority))
            .header("content-type", "application/grpc")
            .header("te", "trailers")
    }

    /// Makes a gRPC call with this message.
    pub async fn call(&mut self, path: &str, message: &impl Message) -> RawResponse {
        self.send_body(self.request(path), grpc_framed(&message.encode_to_vec()))
            .await
            .expect("the server answers")
    }

    /// Sends a request with this body, valid or not.
    pub async fn send_body(
        &mut self,
        request: http::request::Builder,
        body: Vec<u8>,
    ) -> Result<RawResponse, h2::Error> {
        let request = request.body(()).expect("a request");
        self.send.clone().ready().await.map(|send| self.send = send)?;
        let (response, mut stream) = self.send.send_request(request, false)?;
        // The server may refuse the request before it has received all of it.
        let _ = stream.send_data(Bytes::from(body), true);
        receive_response(response).await
    }

    /// Starts a request and leaves its body open.
    pub async fn begin_request(
        &mut self,
        request: http::request::Builder,
    ) -> Result<(ResponseFuture, h2::SendStream<Bytes>), h2::Error> {
        let request = request.body(()).expect("a request");
        self.send.clone().ready().await.map(|send| self.send = send)?;
        self.send.send_request(request, false)
    }

    /// Drops the connection with all calls in progress.
    pub fn hang_up(self) {
        self.connection.abort();
    }
}

impl Drop for RawClient {
    fn drop(&mut self) {
        self.connection.abort();
    }
}

/// Waits for the complete response.
pub async fn receive_response(response: ResponseFuture) -> Result<RawResponse, h2::Error> {
    let answer = async {
        let (head, mut stream) = response.await?.into_parts();
        let mut body = Vec::new();
        while let Some(piece) = stream.data().await {
            let piece = piece?;
            body.extend_from_slice(&piece);
            stream.flow_control().release_capacity(piece.len())?;
        }
        let trailers = stream.trailers().await?.unwrap_or_default();
        let text = |name: &str| header_text(&trailers, name).or_else(|| header_text(&head.headers, name));
        Ok(RawResponse {
            http: head.status.as_u16(),
            code: text("grpc-status").map(|code| code.parse().expect("a number")),
            message: text("grpc-message").unwrap_or_default(),
            details: text("grpc-status-details-bin").map(|details| decode_base64(&details)),
            body,
        })
    };
    tokio::time::timeout(PATIENCE, answer).await.expect("the server answers in time")
}

/// Returns the output of a future, if it is ready.
pub fn output_if_ready<T>(future: impl Future<Output = T>) -> Option<T> {
    let mut cx = Context::from_waker(Waker::noop());
    match pin!(future).poll(&mut cx) {
        Poll::Ready(value) => Some(value),
        Poll::Pending => None,
    }
}

fn header_text(headers: &HeaderMap, name: &str) -> Option<String> {
    headers.get(name).map(|value| value.to_str().expect("headers are ASCII").to_owned())
}

/// Decodes a binary header; gRPC sends them with or without padding.
fn decode_base64(text: &str) -> Vec<u8> {
    let config = GeneralPurposeConfig::new().with_decode_padding_mode(DecodePaddingMode::Indifferent);
    GeneralPurpose::new(&alphabet::STANDARD, config).decode(text).expect("binary headers are base64")
}

/// Returns a message with gRPC's prefix.
pub fn grpc_framed(message: &[u8]) -> Vec<u8> {
    message_with_prefix(0, u32::try_from(message.len()).expect("a short message"), message)
}

/// Returns a file of gzip with these bytes.
pub fn gzip(bytes: &[u8]) -> Vec<u8> {
    let mut encoder = GzEncoder::new(Vec::new(), Compression::best());
    encoder.write_all(bytes).expect("memory takes it");
    encoder.finish().expect("memory takes it")
}

/// Returns a message with an arbitrary prefix.
pub fn message_with_prefix(flags: u8, length: u32, message: &[u8]) -> Vec<u8> {
    let mut framed = vec![flags];
    framed.extend(length.to_be_bytes());
    framed.extend_from_slice(message);
    framed
}

impl RawResponse {
    /// Decodes the message of a successful response.
    pub fn decode<M: Message + Default>(&self) -> M {
        assert_eq!(self.code, Some(0), "{self:?}");
        M::decode(self.body.get(5..).expect("a prefix")).expect("the announced message")
    }
}
