//! Requests to a server, whose answers must be JSON.

use std::net::SocketAddr;

use serde::de::DeserializeOwned;
use serde_json::Value;

use super::harness::http::{self, JSON};

/// Requests `path` and returns the answer.
#[track_caller]
pub fn get<T: DeserializeOwned>(server: SocketAddr, path: &str) -> T {
    let answer = http::get(server, path).unwrap_or_else(|error| panic!("http://{server}{path}: {error}"));
    assert_eq!(answer.status, 200, "{path}: {answer:?}");
    serde_json::from_str(&answer.body).unwrap_or_else(|error| panic!("{path}: {error}: {answer:?}"))
}

/// Sends a request with a body; returns the status and the answer.
#[track_caller]
pub fn ask(server: SocketAddr, method: &str, path: &str, body: &Value) -> (u16, Value) {
    let answer = http::send(server, method, path, &[JSON], &body.to_string());
    let answer = answer.unwrap_or_else(|error| panic!("http://{server}{path}: {error}"));
    (answer.status, answer.json())
}
