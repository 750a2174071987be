//! The least of an HTTP client: one question a connection.

use std::io::{Read as _, Write as _};
use std::net::{SocketAddr, TcpStream};

use serde::de::DeserializeOwned;

use super::time::PATIENCE;

/// Asks for `path` and reads the answer, which must be JSON.
#[track_caller]
pub fn get<T: DeserializeOwned>(server: SocketAddr, path: &str) -> T {
    let answer = exchange(server, path).unwrap_or_else(|error| panic!("http://{server}{path}: {error}"));
    let (head, body) = answer.split_once("\r\n\r\n").unwrap_or_else(|| panic!("{path}: no answer: {answer}"));
    assert!(head.starts_with("HTTP/1.1 200"), "{path}: {answer}");
    serde_json::from_str(body).unwrap_or_else(|error| panic!("{path}: {error}: {body}"))
}

fn exchange(server: SocketAddr, path: &str) -> std::io::Result<String> {
    let mut stream = TcpStream::connect(server)?;
    stream.set_read_timeout(Some(PATIENCE))?;
    write!(stream, "GET {path} HTTP/1.1\r\nHost: {server}\r\nConnection: close\r\n\r\n")?;
    let mut answer = String::new();
    stream.read_to_string(&mut answer)?;
    Ok(answer)
}
