//! A minimal HTTP client: one request on each connection.

use std::io::{Read as _, Write as _};
use std::net::{SocketAddr, TcpStream};

use serde::de::DeserializeOwned;
use serde_json::Value;

use super::time::PATIENCE;

/// Requests `path` and returns the answer, which must be JSON.
#[track_caller]
pub fn get<T: DeserializeOwned>(server: SocketAddr, path: &str) -> T {
    let answer =
        exchange(server, "GET", path, "").unwrap_or_else(|error| panic!("http://{server}{path}: {error}"));
    let (head, body) = answer.split_once("\r\n\r\n").unwrap_or_else(|| panic!("{path}: no answer: {answer}"));
    assert!(head.starts_with("HTTP/1.1 200"), "{path}: {answer}");
    serde_json::from_str(body).unwrap_or_else(|error| panic!("{path}: {error}: {body}"))
}

/// Sends a request with a body; returns the status and the answer, which must be JSON.
#[track_caller]
pub fn ask(server: SocketAddr, method: &str, path: &str, body: &Value) -> (u16, Value) {
    let answer = exchange(server, method, path, &body.to_string());
    let answer = answer.unwrap_or_else(|error| panic!("http://{server}{path}: {error}"));
    let (head, body) = answer.split_once("\r\n\r\n").unwrap_or_else(|| panic!("{path}: no answer: {answer}"));
    let status = head.split(' ').nth(1).and_then(|status| status.parse().ok()).expect("a status");
    (status, serde_json::from_str(body).unwrap_or_else(|error| panic!("{path}: {error}: {body}")))
}

fn exchange(server: SocketAddr, method: &str, path: &str, body: &str) -> std::io::Result<String> {
    let mut stream = TcpStream::connect(server)?;
    stream.set_read_timeout(Some(PATIENCE))?;
    write!(
        stream,
        "{method} {path} HTTP/1.1\r\nHost: {server}\r\nConnection: close\r\nContent-Type: application/json\r\n\
         Content-Length: {}\r\n\r\n{body}",
        body.len()
    )?;
    let mut answer = String::new();
    stream.read_to_string(&mut answer)?;
    Ok(answer)
}
