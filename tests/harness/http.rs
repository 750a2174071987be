//! A client for HTTP/1.1: one request on each connection.

use std::fmt::Display;
use std::io::{self, Read as _, Write as _};
use std::net::{TcpStream, ToSocketAddrs};

use serde_json::Value;

use super::time::PATIENCE;

/// The header of a request with a JSON body.
pub const JSON: &str = "content-type: application/json";

/// A response.
#[derive(Debug)]
pub struct HttpResponse {
    pub status: u16,
    /// The status line and the headers.
    pub head: String,
    pub body: String,
}

impl HttpResponse {
    /// Returns the body as JSON.
    #[track_caller]
    pub fn json(&self) -> Value {
        serde_json::from_str(&self.body).unwrap_or_else(|error| panic!("{error}: {self:?}"))
    }

    /// Returns head and body.
    pub fn text(&self) -> String {
        format!("{}\r\n\r\n{}", self.head, self.body)
    }
}

/// Returns a connection whose reads and writes end in time.
pub fn connect(address: impl ToSocketAddrs) -> io::Result<TcpStream> {
    let stream = TcpStream::connect(address)?;
    stream.set_read_timeout(Some(PATIENCE))?;
    stream.set_write_timeout(Some(PATIENCE))?;
    stream.set_nodelay(true)?;
    Ok(stream)
}

/// Sends a GET request.
pub fn get(address: impl ToSocketAddrs + Display, path: &str) -> io::Result<HttpResponse> {
    send(address, "GET", path, &[], "")
}

/// Sends a request. The header `host` is the address unless `headers` has another one.
pub fn send(
    address: impl ToSocketAddrs + Display,
    method: &str,
    path: &str,
    headers: &[&str],
    body: &str,
) -> io::Result<HttpResponse> {
    let mut request =
        format!("{method} {path} HTTP/1.1\r\nconnection: close\r\ncontent-length: {}\r\n", body.len());
    if !headers.iter().any(|header| header.starts_with("host:")) {
        request += &format!("host: {address}\r\n");
    }
    for header in headers {
        request += &format!("{header}\r\n");
    }
    let mut stream = connect(address)?;
    stream.write_all(format!("{request}\r\n{body}").as_bytes())?;
    let mut bytes = Vec::new();
    stream.read_to_end(&mut bytes)?;
    parse(&bytes).ok_or_else(|| {
        let answer = String::from_utf8_lossy(&bytes);
        io::Error::new(io::ErrorKind::InvalidData, format!("{method} {path}: no response: {answer:?}"))
    })
}

fn parse(bytes: &[u8]) -> Option<HttpResponse> {
    let end = bytes.windows(4).position(|four| four == b"\r\n\r\n")?;
    let (head, body) = (std::str::from_utf8(&bytes[..end]).ok()?, &bytes[end + 4..]);
    let status = head.split(' ').nth(1)?.parse().ok()?;
    let is_chunked = head.to_lowercase().contains("\r\ntransfer-encoding: chunked");
    let body = if is_chunked { join_chunks(body)? } else { body.to_vec() };
    Some(HttpResponse { status, head: head.to_owned(), body: String::from_utf8(body).ok()? })
}

/// Returns the contents of a body in chunks (RFC 9112, 7.1).
fn join_chunks(mut rest: &[u8]) -> Option<Vec<u8>> {
    let mut body = Vec::new();
    loop {
        let end = rest.windows(2).position(|two| two == b"\r\n")?;
        let length = usize::from_str_radix(std::str::from_utf8(&rest[..end]).ok()?, 16).ok()?;
        if length == 0 {
            return Some(body);
        }
        body.extend_from_slice(rest.get(end + 2..end + 2 + length)?);
        rest = rest.get(end + 4 + length..)?;
    }
}
