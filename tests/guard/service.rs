//! A server in a process of its own, with a well-behaved task and helpers for hostile clients.

use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::net::{SocketAddr, TcpStream};
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use crate::process::signal;
use crate::support::{Body, Call, Caller, Client, Generation};

/// The deadline of every wait: the machine may be busy.
pub const PATIENCE: Duration = Duration::from_secs(60);

/// A running server. Dropping it kills the process.
pub struct Service {
    pub child: Child,
    pub grpc: SocketAddr,
    pub http: SocketAddr,
}

impl Service {
    /// Starts a server with these further arguments. Its log is discarded.
    pub fn start(arguments: &[&str]) -> Self {
        Self::start_by(&mut crate::process::muster(Vec::<&str>::new()), arguments, Stdio::null())
    }

    /// Starts a server under a shell that first runs `before`.
    pub fn start_after(before: &str, arguments: &[&str], log: Stdio) -> Self {
        let mut shell = Command::new("sh");
        shell.args(["-c", &format!("{before}; exec \"$@\""), "sh", env!("CARGO_BIN_EXE_muster")]);
        Self::start_by(&mut shell, arguments, log)
    }

    fn start_by(command: &mut Command, arguments: &[&str], log: Stdio) -> Self {
        let own = ["serve", "--grpc", "127.0.0.1:0", "--http", "127.0.0.1:0"];
        if !arguments.contains(&"--heartbeat-timeout") {
            command.env("MUSTER_HEARTBEAT_TIMEOUT", "1h");
        }
        let command = command.args(own).args(["--tasks", "1", "--http-changes-per-second", "1000000"]);
        let command = command.args(arguments).stdin(Stdio::null()).stdout(Stdio::piped()).stderr(log);
        let mut child = command.spawn().expect("the program starts");
        let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
        let (mut found, mut said) = ([None, None], String::new());
        while found.contains(&None) {
            let line = lines.next().unwrap_or_else(|| panic!("it did not come up:\n{said}")).unwrap();
            for (name, address) in ["gRPC  ", "HTTP  "].iter().zip(&mut found) {
                if let Some((_, text)) = line.split_once(name) {
                    let text = text.rsplit_once("//").map_or(text, |(_, address)| address);
                    *address = Some(text.trim().parse().unwrap());
                }
            }
            said.push_str(&line);
        }
        // The remaining lines are read, so that stdout never blocks.
        std::thread::spawn(move || lines.map_while(Result::ok).for_each(drop));
        let [grpc, http] = found.map(Option::unwrap);
        Self { child, grpc, http }
    }

    pub fn pid(&self) -> i32 {
        self.child.id().try_into().unwrap()
    }

    pub fn signal(&self, name: &str) {
        signal(self.pid(), name);
    }

    /// Returns the exit code after the server has exited.
    pub fn end(&mut self) -> Option<i32> {
        let looks = PATIENCE.as_millis() / 20;
        for _ in 0..looks {
            if let Some(status) = self.child.try_wait().unwrap() {
                return status.code();
            }
            std::thread::sleep(Duration::from_millis(20));
        }
        panic!("it does not end");
    }

    /// Sends a GET request and returns the response.
    pub fn get(&self, path: &str) -> String {
        get(self.http, path)
    }

    /// Returns the value of a metric without labels.
    pub fn metric(&self, name: &str) -> f64 {
        let page = self.get("/metrics");
        let line =
            page.lines().find(|line| line.strip_prefix(name).is_some_and(|rest| rest.starts_with(' ')));
        let value = line.and_then(|line| line.rsplit_once(' ')).map(|(_, value)| value.parse().unwrap());
        value.unwrap_or_else(|| panic!("no {name} in {page}"))
    }

    /// Changes a key this many times over one connection. Returns the statuses.
    pub fn put_keys(&self, times: usize) -> Vec<u16> {
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
            let status = answer(&mut stream);
            // A refusal before the body was read closes the connection.
            closes = status >= 400;
            statuses.push(status);
        }
        statuses
    }

    /// Returns the peak resident memory, in bytes.
    pub fn peak_resident_bytes(&self) -> u64 {
        let status = std::fs::read_to_string(format!("/proc/{}/status", self.pid())).unwrap();
        let line = status.lines().find(|line| line.starts_with("VmHWM:")).unwrap();
        line.split_whitespace().nth(1).unwrap().parse::<u64>().unwrap() << 10
    }
}

impl Drop for Service {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Returns a connection with a generous read timeout.
pub fn connect(address: SocketAddr) -> TcpStream {
    let stream = TcpStream::connect(address).unwrap();
    stream.set_read_timeout(Some(PATIENCE)).unwrap();
    stream.set_write_timeout(Some(PATIENCE)).unwrap();
    stream.set_nodelay(true).unwrap();
    stream
}

/// Sends a GET request to a listener and returns the response, head and body.
pub fn get(address: SocketAddr, path: &str) -> String {
    let mut stream = connect(address);
    write!(stream, "GET {path} HTTP/1.1\r\nhost: {address}\r\nconnection: close\r\n\r\n").unwrap();
    let mut text = Vec::new();
    stream.read_to_end(&mut text).unwrap();
    String::from_utf8(text).unwrap()
}

/// Reads one whole response and returns its status.
pub fn answer(stream: &mut TcpStream) -> u16 {
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

/// A folder that is removed on drop.
pub struct TempFolder(pub PathBuf);

impl TempFolder {
    pub fn new(name: &str) -> Self {
        let folder = std::env::temp_dir().join(format!("muster-guard-{}-{name}", std::process::id()));
        let _ = std::fs::remove_dir_all(&folder);
        std::fs::create_dir(&folder).unwrap();
        Self(folder)
    }

    pub fn path(&self, name: &str) -> String {
        self.0.join(name).display().to_string()
    }
}

impl Drop for TempFolder {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// The only task of the server's job, which sends heartbeats until it is dropped.
pub struct HeartbeatClient {
    beats: Arc<AtomicU64>,
    beating: tokio::task::JoinHandle<()>,
}

impl HeartbeatClient {
    pub async fn start(service: &Service) -> Self {
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
    pub async fn beats_on(&self) {
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
