//! Reads a stream of server-sent events, starting after a given event.
//!
//! If the stream breaks, the caller reconnects. Begin at `EventStream::next_event`.

use std::time::Duration;

use http::Method;
use http::header::{ACCEPT, HeaderName, HeaderValue};
use http_body_util::{BodyExt as _, Limited};
use hyper::body::Incoming;
use hyper::client::conn::http1;
use hyper_util::rt::TokioIo;
use tokio::task::JoinHandle;

use super::{
    Client, ClientError, RESPONSE_BYTES_MAX, RESPONSE_TIMEOUT, error_of_response, open_connection,
    send_on_connection,
};

const LAST_EVENT_ID: HeaderName = HeaderName::from_static("last-event-id");

/// The read timeout. A server sends something at least every 15 s.
const READ_TIMEOUT: Duration = Duration::from_secs(45);
/// The maximum length of an event, in bytes: a barrier can name a million tasks.
const EVENT_BYTES_MAX: usize = 64 << 20;

/// An event from a server.
#[derive(Debug, Default, Clone, PartialEq, Eq)]
pub struct SseEvent {
    /// The number of the event; `None` for events about the stream itself.
    pub id: Option<u64>,
    /// The kind.
    pub kind: String,
    /// The payload, as JSON.
    pub data: String,
}

/// An open stream of events.
pub struct EventStream {
    url: String,
    body: Incoming,
    read: SseParser,
    _connection: ConnectionTaskGuard,
}

/// The task that drives the connection; it ends when this is dropped.
struct ConnectionTaskGuard(JoinHandle<()>);

impl Drop for ConnectionTaskGuard {
    fn drop(&mut self) {
        self.0.abort();
    }
}

impl Client {
    /// Opens the stream at `path`, from the event after number `last` on.
    pub async fn open_event_stream(&self, path: &str, last: u64) -> Result<EventStream, ClientError> {
        let unreachable =
            |error: String| ClientError::Unreachable { url: self.endpoint.url.clone(), error: error.into() };
        let stream = open_connection(&self.endpoint).await?;
        let opened = async {
            let (mut sender, connection) = http1::handshake(TokioIo::new(stream)).await?;
            let connection = ConnectionTaskGuard(tokio::spawn(async move {
                // The reader of the stream sees the same error.
                let _ = connection.await;
            }));
            let accept = HeaderValue::from_static("text/event-stream");
            let headers = [(ACCEPT, accept), (LAST_EVENT_ID, last.into())];
            let answer =
                send_on_connection(&self.endpoint, &mut sender, Method::GET, path, None, headers).await?;
            let (head, body) = answer.into_parts();
            if head.status.is_success() {
                let (url, read) = (self.endpoint.url.clone(), SseParser::default());
                return Ok(Ok(EventStream { url, body, read, _connection: connection }));
            }
            let body =
                Limited::new(body, RESPONSE_BYTES_MAX).collect().await.map_err(anyhow::Error::from_boxed)?;
            anyhow::Ok(Err(error_of_response(&self.endpoint.url, path, head.status, &body.to_bytes())))
        };
        let opened = tokio::time::timeout(RESPONSE_TIMEOUT, opened).await;
        let opened =
            opened.map_err(|_| unreachable(format!("no answer within {} s", RESPONSE_TIMEOUT.as_secs())))?;
        opened.map_err(|error| unreachable(format!("{error:#}")))?
    }
}

impl EventStream {
    /// Returns the next event; `None` after the server has ended the stream.
    pub async fn next_event(&mut self) -> Result<Option<SseEvent>, ClientError> {
        let lost = |error: String| ClientError::Unreachable { url: self.url.clone(), error: error.into() };
        loop {
            if let Some(sent) = self.read.next_event() {
                return Ok(Some(sent));
            }
            if self.read.rest.len() > EVENT_BYTES_MAX {
                return Err(lost("an event without an end".into()));
            }
            let frame = tokio::time::timeout(READ_TIMEOUT, self.body.frame()).await;
            match frame.map_err(|_| lost(format!("nothing for {} s", READ_TIMEOUT.as_secs())))? {
                None => return Ok(None),
                Some(Err(error)) => return Err(lost(error.to_string())),
                Some(Ok(frame)) => {
                    if let Ok(data) = frame.into_data() {
                        self.read.rest.extend_from_slice(&data);
                    }
                }
            }
        }
    }
}

/// Parses events from bytes as they arrive.
#[derive(Debug, Default)]
struct SseParser {
    /// The bytes that are not parsed yet.
    rest: Vec<u8>,
    /// The number of those bytes without a line end.
    seen: usize,
    event: SseEvent,
}

impl SseParser {
    fn next_event(&mut self) -> Option<SseEvent> {
        loop {
            let end = self.rest.iter().skip(self.seen).position(|byte| *byte == b'\n');
            let Some(end) = end.map(|end| end + self.seen) else {
                self.seen = self.rest.len();
                return None;
            };
            let line: Vec<u8> = self.rest.drain(..=end).collect();
            self.seen = 0;
            let line = String::from_utf8_lossy(&line);
            let line = line.trim_end_matches(['\r', '\n']);
            if line.is_empty() {
                let event = std::mem::take(&mut self.event);
                // An event without data is not delivered.
                if event.data.is_empty() {
                    continue;
                }
                return Some(event);
            }
            let (field, value) = line.split_once(':').unwrap_or((line, ""));
            let value = value.strip_prefix(' ').unwrap_or(value);
            match field {
                "id" => self.event.id = value.parse().ok(),
                "event" => self.event.kind = value.to_owned(),
                "data" => {
                    if !self.event.data.is_empty() {
                        self.event.data.push('\n');
                    }
                    self.event.data.push_str(value);
                }
                // A comment or an unknown field.
                _ => {}
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn events_are_read_wherever_the_bytes_are_cut() {
        let text = ": alive\n\nevent: gap\ndata: {}\n\nid: 7\r\nevent: a\r\ndata: {\"ü\":1}\r\n\r\nretry: 5\nid: 8\ndata: x\ndata: y\n\nid: 9\n\n";
        let sent =
            |id: Option<u64>, kind: &str, data: &str| SseEvent { id, kind: kind.into(), data: data.into() };
        let expected = [sent(None, "gap", "{}"), sent(Some(7), "a", "{\"ü\":1}"), sent(Some(8), "", "x\ny")];
        for size in 1..text.len() {
            let (mut reader, mut found) = (SseParser::default(), Vec::new());
            for piece in text.as_bytes().chunks(size) {
                reader.rest.extend_from_slice(piece);
                found.extend(std::iter::from_fn(|| reader.next_event()));
            }
            assert_eq!(found, expected, "in pieces of {size}");
        }
    }
}
