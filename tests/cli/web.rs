//! A server under test and its HTTP responses.

use std::io::{Read as _, Write as _};
use std::net::TcpStream;

use serde_json::Value;

use crate::process::{CommandProcess, muster};

/// A `muster serve` on free ports.
pub struct Server {
    pub running: CommandProcess,
    pub grpc: String,
    pub http: String,
}

impl Server {
    /// Starts a server with these further arguments.
    pub fn start(arguments: &[&str]) -> Self {
        let mut command = muster(["serve", "--grpc", "127.0.0.1:0", "--http", "127.0.0.1:0"]);
        let mut running = CommandProcess::start(command.args(arguments));
        let after =
            |line: String, word: &str| line.split_once(word).expect("it names it").1.trim().to_owned();
        let grpc = after(running.out_line("gRPC  "), "gRPC");
        let http = after(running.out_line("HTTP  "), "http://");
        Self { running, grpc, http }
    }

    /// Starts a server with a JSON log, in which it announces its addresses.
    pub fn start_json(arguments: &[&str]) -> Self {
        let mut command = muster(["serve", "--grpc", "127.0.0.1:0", "--http", "127.0.0.1:0"]);
        command.args(["--log-format", "json", "--log", "debug"]).args(arguments);
        let mut running = CommandProcess::start(&mut command);
        let line = running.err_line("\"serving\"");
        let said: Value = serde_json::from_str(&line).expect("JSON");
        let at = |name: &str| said[name].as_str().expect("an address").to_owned();
        Self { grpc: at("grpc"), http: at("http"), running }
    }

    /// Returns the URL for subcommands.
    pub fn url(&self) -> String {
        format!("http://{}", self.http)
    }

    /// Sends a request with a JSON body.
    pub fn send(&self, method: &str, path: &str, body: &str) -> HttpResponse {
        exchange(&self.http, method, path, "content-type: application/json\r\n", body)
            .expect("the server answers")
    }

    /// Sends a GET request with this header.
    pub fn get_with(&self, path: &str, header: &str) -> HttpResponse {
        exchange(&self.http, "GET", path, &format!("{header}\r\n"), "").expect("the server answers")
    }

    /// Sends a GET request.
    pub fn get(&self, path: &str) -> HttpResponse {
        request(&self.http, "GET", path).expect("the server answers")
    }
}

/// An HTTP response.
#[derive(Debug)]
pub struct HttpResponse {
    pub status: u16,
    pub head: String,
    pub body: String,
}

impl HttpResponse {
    /// Returns the body as JSON.
    pub fn json(&self) -> Value {
        serde_json::from_str(&self.body).expect("the body is JSON")
    }
}

/// Sends one request over a connection of its own.
pub fn request(address: &str, method: &str, path: &str) -> std::io::Result<HttpResponse> {
    exchange(address, method, path, "", "")
}

fn exchange(
    address: &str,
    method: &str,
    path: &str,
    headers: &str,
    body: &str,
) -> std::io::Result<HttpResponse> {
    let mut stream = TcpStream::connect(address)?;
    let length = body.len();
    write!(
        stream,
        "{method} {path} HTTP/1.1\r\nhost: {address}\r\nconnection: close\r\n{headers}content-length: {length}\r\n\r\n\
         {body}"
    )?;
    let mut text = String::new();
    stream.read_to_string(&mut text)?;
    let (head, body) = text.split_once("\r\n\r\n").expect("an answer has a head");
    let status = head.split(' ').nth(1).and_then(|code| code.parse().ok()).expect("an answer has a status");
    Ok(HttpResponse { status, head: head.to_lowercase(), body: body.into() })
}
