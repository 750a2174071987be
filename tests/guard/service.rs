//! A server for hostile clients, with a well-behaved task.

use std::io::{Read as _, Write as _};
use std::net::{SocketAddr, TcpStream};
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use crate::harness::server::ANY_PORTS;
use crate::harness::{MusterServer, PATIENCE, http, muster};
use crate::support::{Body, Call, Caller, Client, Generation};

/// Starts a server with these further arguments. Its log is discarded.
pub fn start_service(arguments: &[&str]) -> MusterServer {
    start_service_by_command(muster(["serve"]), arguments, Stdio::null())
}

/// Starts a server under a shell that first runs `before`.
pub fn start_service_after_shell_command(before: &str, arguments: &[&str], log: Stdio) -> MusterServer {
    let mut shell = Command::new("sh");
    let script = format!("{before}; exec \"$@\"");
    shell.args(["-c", &script, "sh", env!("CARGO_BIN_EXE_muster"), "serve"]).stdin(Stdio::null());
    start_service_by_command(shell, arguments, log)
}

fn start_service_by_command(mut command: Command, arguments: &[&str], log: Stdio) -> MusterServer {
    if !arguments.contains(&"--heartbeat-timeout") {
        command.args(["--heartbeat-timeout", "1h"]);
    }
    command.args(ANY_PORTS).args(["--tasks", "1", "--http-changes-per-second", "1000000"]);
    MusterServer::spawn(command.args(arguments).stderr(log), PATIENCE).unwrap()
}

impl MusterServer {
    /// Sends a GET request and returns the response, head and body.
    pub fn get_response_text(&self, path: &str) -> String {
        self.get(path).text()
    }

    /// Returns the value of a metric without labels.
    pub fn metric(&self, name: &str) -> f64 {
        let page = self.get_response_text("/metrics");
        let line =
            page.lines().find(|line| line.strip_prefix(name).is_some_and(|rest| rest.starts_with(' ')));
        let value = line.and_then(|line| line.rsplit_once(' ')).map(|(_, value)| value.parse().unwrap());
        value.unwrap_or_else(|| panic!("no {name} in {page}"))
    }

    /// Changes a key this many times over one connection. Returns the statuses.
    pub fn put_keys_repeatedly(&self, times: usize) -> Vec<u16> {
        let mut stream = connect(self.http);
        let mut closes = false;
        let body = r#"{"text":"v","overwrite":true,"reason":"a reason that takes some room in a line of the audit and of the log"}"#;
        let mut statuses = Vec::new();
        for number in 0..times {
            if std::mem::take(&mut closes) {
                stream = connect(self.http);
            }
            write!(
                stream,
                "PUT /api/v1/jobs/default/keys/k{} HTTP/1.1\r\nhost: {}\r\ncontent-type: application/json\r\n\
                 content-length: {}\r\n\r\n{body}",
                number % 8,
                self.http,
                body.len()
            )
            .unwrap();
            let status = read_response_status(&mut stream);
            // A refusal before the body was read closes the connection.
            closes = status >= 400;
            statuses.push(status);
        }
        statuses
    }
}

/// Returns a connection with a generous read timeout.
pub fn connect(address: SocketAddr) -> TcpStream {
    http::connect(address).unwrap()
}

/// Reads one whole response and returns its status.
pub fn read_response_status(stream: &mut TcpStream) -> u16 {
    let mut text = Vec::new();
    let mut byte = [0; 1];
    while !text.ends_with(b"\r\n\r\n") {
        assert_eq!(stream.read(&mut byte).unwrap(), 1, "{}", String::from_utf8_lossy(&text));
        text.push(byte[0]);
    }
    let head = String::from_utf8(text).unwrap().to_lowercase();
    let length = head.split_once("content-length: ").map(|(_, rest)| rest.split('\r').next().unwrap());
    let mut body = vec![0; length.map_or(0, |length| length.parse().unwrap())];
    stream.read_exact(&mut body).unwrap();
    head.split(' ').nth(1).unwrap().parse().unwrap()
}

/// The only task of the server's job, which sends heartbeats until it is dropped.
pub struct HeartbeatClient {
    beats: Arc<AtomicU64>,
    beating: tokio::task::JoinHandle<()>,
}

impl HeartbeatClient {
    pub async fn start(service: &MusterServer) -> Self {
        let client = Client::new(Generation::C, service.grpc);
        let mut caller = Caller::new(0, 7, 0);
        let registered = client.ask(&caller, &Call::Register { incarnation: 7, recoverable: false }).await;
        let Body::Service(service) = registered.body else { panic!("{registered:?}") };
        caller.service = Some(service);
        let beats = Arc::<AtomicU64>::default();
        let counted = Arc::clone(&beats);
        let beating = tokio::spawn(async move {
            loop {
                let answer = client.ask(&caller, &Call::Heartbeat { incarnation: 7 }).await;
                if !answer.is_ok() {
                    return;
                }
                counted.fetch_add(1, Ordering::Relaxed);
                tokio::time::sleep(Duration::from_millis(10)).await;
            }
        });
        Self { beats, beating }
    }

    /// Waits for the answers to further heartbeats, all of which were sent after this call.
    pub async fn expect_further_heartbeats(&self) {
        let until = self.beats.load(Ordering::Relaxed) + 5;
        let further = async {
            while self.beats.load(Ordering::Relaxed) < until {
                assert!(!self.beating.is_finished(), "a heartbeat was refused");
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        };
        tokio::time::timeout(PATIENCE, further).await.expect("heartbeats are answered");
    }
}

impl Drop for HeartbeatClient {
    fn drop(&mut self) {
        self.beating.abort();
    }
}
