//! The well-behaved client: heartbeats and health checks at a steady rate.

use std::io::{ErrorKind, Read as _, Write as _};
use std::net::{SocketAddr, TcpStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail, ensure};
use muster::proto::CoordinatedTask;

use muster::proto::tensorflow as pb;
use serde::{Deserialize, Serialize};

use crate::frames::{self, FIRST_WINDOW, FRAME, HEAD};
use crate::process::{end_with_parent, tell, tell_json, wait_for};
use crate::{Target, clock};

/// The interval of heartbeats.
const HEARTBEAT: Duration = Duration::from_millis(10);
/// The interval of health checks.
const HEALTH: Duration = Duration::from_millis(250);
/// The timeout of a health check. Orchestrators are less patient.
const HEALTH_MAX: Duration = Duration::from_secs(5);
/// The timeout of a heartbeat.
const HEARTBEAT_MAX: Duration = Duration::from_secs(60);
/// The interval at which a large value is stored, where that is measured.
const STORE: Duration = Duration::from_secs(1);
/// The timeout of storing it.
const STORE_MAX: Duration = Duration::from_secs(5);
const STORED: usize = 20_000_000;

/// The client's incarnation in its job.
const INCARNATION: u64 = 0xA11CE;

/// The client's results.
#[derive(Debug, Serialize, Deserialize)]
pub struct AttackFigures {
    pub heartbeats: usize,
    pub failed_heartbeats: usize,
    pub p50_ms: f64,
    pub p99_ms: f64,
    pub max_ms: f64,
    pub http: Probes,
    pub grpc: Probes,
    pub stores: Probes,
}

/// The results of requests of one kind.
#[derive(Debug, Default, Clone, Serialize, Deserialize)]
pub struct Probes {
    pub answered: usize,
    pub failed: usize,
    pub slowest_ms: f64,
}

impl AttackFigures {
    /// Returns all requests besides heartbeats, by name.
    pub fn probes(&self) -> [(&'static str, &Probes); 3] {
        [("health over HTTP", &self.http), ("health over gRPC", &self.grpc), ("20 MB stored", &self.stores)]
    }
}

/// The requests of one thread of the client.
#[derive(Default)]
struct ProbeSeries {
    taken: Vec<Duration>,
    failed: usize,
    /// The time at which the request in progress was due.
    waits_since: Option<Instant>,
    /// The interval of the requests.
    every: Duration,
}

type Shared = Arc<Mutex<ProbeSeries>>;

fn with<T>(series: &Shared, change: impl FnOnce(&mut ProbeSeries) -> T) -> T {
    change(&mut series.lock().unwrap_or_else(PoisonError::into_inner))
}

/// The beginning of the attack: earlier answers do not count, and requests in progress count from here.
static BEGAN: OnceLock<Instant> = OnceLock::new();
/// Whether the attack is over: later requests do not count.
static OVER: AtomicBool = AtomicBool::new(false);

/// Runs the client until the benchmark has its results.
pub fn run(target: &Target) -> Result<()> {
    end_with_parent()?;
    let mut line = GrpcConnection::connect(target.grpc, HEARTBEAT_MAX)?;
    let task = Some(CoordinatedTask { named: true, task_id: 0, recoverable: false });
    let register = pb::RegisterTaskRequest { incarnation: INCARNATION, source_task: task };
    ensure!(line.call(&frames::path("RegisterTask"), &frames::message(&register))? == 0, "not registered");

    let grpc = target.grpc;
    let beat = frames::message(&pb::HeartbeatRequest { incarnation: INCARNATION, source_task: task });
    let mut line = Some(line);
    let heartbeats = ask(HEARTBEAT, move || {
        if line.is_none() {
            line = Some(GrpcConnection::connect(grpc, HEARTBEAT_MAX)?);
        }
        let Some(open) = &mut line else { return Ok(()) };
        let status = open.call(&frames::path("Heartbeat"), &beat).inspect_err(|_| line = None)?;
        ensure!(status == 0, "status {status}");
        Ok(())
    });
    let http = target.http;
    let http = ask(HEALTH, move || http_health(http));
    let health = ask(HEALTH, move || {
        // The empty message asks for the health of the whole server.
        let status =
            GrpcConnection::connect(grpc, HEALTH_MAX)?.call("/grpc.health.v1.Health/Check", &[0; 5])?;
        ensure!(status == 0, "status {status}");
        Ok(())
    });
    let stores = target.stores.then(|| {
        ask(STORE, move || {
            let kv = Some(pb::KeyValueEntry { key: "honest".into(), value: vec![7; STORED].into() });
            let insert = pb::InsertKeyValueRequest { kv, allow_overwrite: true };
            let body = frames::message(&insert);
            let status =
                GrpcConnection::connect(grpc, STORE_MAX)?.call(&frames::path("InsertKeyValue"), &body)?;
            ensure!(status == 0, "status {status}");
            Ok(())
        })
    });
    tell("ready")?;
    wait_for("begin")?;
    BEGAN.get_or_init(clock::now);
    wait_for("end")?;
    OVER.store(true, Ordering::SeqCst);

    let heartbeats = finish(&heartbeats);
    let mut times = heartbeats.0;
    times.sort_unstable();
    let at = |share: f64| {
        let place = (times.len() as f64 * share) as usize;
        times.get(place.min(times.len().saturating_sub(1))).map_or(0.0, |time| time.as_secs_f64() * 1e3)
    };
    let figures = AttackFigures {
        heartbeats: times.len(),
        failed_heartbeats: heartbeats.1,
        p50_ms: at(0.5),
        p99_ms: at(0.99),
        max_ms: at(1.0),
        http: probes(&http, HEALTH_MAX),
        grpc: probes(&health, HEALTH_MAX),
        stores: stores.map_or_else(Probes::default, |stores| probes(&stores, STORE_MAX)),
    };
    tell_json(&figures)
}

/// Makes requests at this interval, on a thread of its own. A request that comes due while an answer is
/// awaited is made late, and is timed from when it was due.
fn ask(every: Duration, mut question: impl FnMut() -> Result<()> + Send + 'static) -> Shared {
    let series = Arc::new(Mutex::new(ProbeSeries { every, ..ProbeSeries::default() }));
    let shared = Arc::clone(&series);
    std::thread::spawn(move || {
        let mut due = clock::now();
        while !OVER.load(Ordering::SeqCst) {
            std::thread::sleep(due.saturating_duration_since(clock::now()));
            with(&shared, |series| series.waits_since = Some(due));
            let result = question();
            with(&shared, |series| {
                series.waits_since = None;
                match (BEGAN.get(), result) {
                    (None, _) => {}
                    (Some(began), Ok(())) => series.taken.push(due.max(*began).elapsed()),
                    (Some(_), Err(_)) => series.failed += 1,
                }
            });
            due += every;
            // A slow health check does not delay the next ones.
            if every >= HEALTH {
                due = due.max(clock::now());
            }
        }
    });
    series
}

/// Returns the times of a series and its failures. Heartbeats without an answer have taken until now; other
/// requests are waited for.
fn finish(series: &Shared) -> (Vec<Duration>, usize) {
    while with(series, |series| series.every >= HEALTH && series.waits_since.is_some()) {
        std::thread::sleep(HEARTBEAT);
    }
    with(series, |series| {
        let mut times = std::mem::take(&mut series.taken);
        let mut since = series.waits_since.map(|due| BEGAN.get().map_or(due, |began| due.max(*began)));
        while let Some(due) = since.filter(|due| *due <= clock::now()) {
            times.push(due.elapsed());
            since = Some(due + series.every);
        }
        (times, series.failed)
    })
}

fn probes(series: &Shared, most: Duration) -> Probes {
    let (times, failed) = finish(series);
    let (answered, late): (Vec<Duration>, Vec<Duration>) = times.into_iter().partition(|time| *time < most);
    let slowest = answered.iter().chain(&late).max().copied().unwrap_or_default();
    Probes { answered: answered.len(), failed: failed + late.len(), slowest_ms: slowest.as_secs_f64() * 1e3 }
}

fn http_health(server: SocketAddr) -> Result<()> {
    let until = clock::now() + HEALTH_MAX;
    let mut socket = TcpStream::connect_timeout(&server, HEALTH_MAX)?;
    let host = format!("localhost:{}", server.port());
    write!(socket, "GET /healthz/ready HTTP/1.1\r\nhost: {host}\r\nconnection: close\r\n\r\n")?;
    let mut answer = Vec::new();
    let mut piece = [0; 512];
    // The detail of the answer follows in the body.
    const READY: &[u8] = b"\r\n\r\nready\n";
    while !answer.windows(READY.len()).any(|part| part == READY) {
        let left = until.saturating_duration_since(clock::now());
        ensure!(!left.is_zero(), "no answer");
        socket.set_read_timeout(Some(left))?;
        match socket.read(&mut piece)? {
            0 => bail!("closed"),
            read => answer.extend_from_slice(piece.get(..read).unwrap_or_default()),
        }
    }
    ensure!(answer.starts_with(b"HTTP/1.1 200"), "not ready");
    Ok(())
}

/// A minimal gRPC connection that makes one call at a time.
pub struct GrpcConnection {
    socket: TcpStream,
    next: u32,
    /// The send window of the connection, and the initial one of each stream.
    window: i64,
    first_window: i64,
    most: Duration,
}

impl GrpcConnection {
    pub fn connect(server: SocketAddr, most: Duration) -> Result<Self> {
        let mut socket = TcpStream::connect_timeout(&server, most)?;
        socket.set_nodelay(true)?;
        let mut hello = frames::PREFACE.to_vec();
        frames::settings(&mut hello, &[(frames::INITIAL_WINDOW_SIZE, frames::LARGEST_WINDOW)]);
        frames::number(&mut hello, frames::WINDOW_UPDATE, 0, frames::LARGEST_WINDOW - FIRST_WINDOW);
        socket.set_write_timeout(Some(most))?;
        socket.write_all(&hello)?;
        let window = i64::from(FIRST_WINDOW);
        Ok(Self { socket, next: 1, window, first_window: window, most })
    }

    /// Makes a call and returns its status.
    pub fn call(&mut self, path: &str, body: &[u8]) -> Result<u32> {
        let until = clock::now() + self.most;
        let stream = self.next;
        self.next += 2;
        let mut out = Vec::with_capacity(FRAME + 256);
        frames::frame(&mut out, frames::HEADERS, frames::END_HEADERS, stream, &frames::call_block(path));
        let (mut sent, mut window) = (0, self.first_window);
        loop {
            while sent < body.len() {
                let room = window.min(self.window).max(0) as usize;
                let piece = room.min(FRAME).min(body.len() - sent);
                if piece == 0 {
                    break;
                }
                let ends = if sent + piece == body.len() { frames::END_STREAM } else { 0 };
                let payload = body.get(sent..sent + piece).unwrap_or_default();
                frames::frame(&mut out, frames::DATA, ends, stream, payload);
                sent += piece;
                window -= piece as i64;
                self.window -= piece as i64;
                if out.len() >= 4 * FRAME {
                    self.socket.write_all(&out)?;
                    out.clear();
                }
            }
            self.socket.write_all(&out)?;
            out.clear();
            if let Some(status) = self.hear(stream, &mut window, &mut out, until)? {
                return Ok(status);
            }
        }
    }

    /// Reads one frame; returns the status if it ends the call.
    fn hear(
        &mut self,
        stream: u32,
        window: &mut i64,
        out: &mut Vec<u8>,
        until: Instant,
    ) -> Result<Option<u32>> {
        let mut head = [0; HEAD];
        self.read(&mut head, until)?;
        let [a, b, c, kind, flags, s0, s1, s2, s3] = head;
        let of = u32::from_be_bytes([s0, s1, s2, s3]);
        let mut payload = vec![0; u32::from_be_bytes([0, a, b, c]) as usize];
        self.read(&mut payload, until)?;
        let value = payload.first_chunk().map_or(0, |bytes| u32::from_be_bytes(*bytes));
        match kind {
            frames::SETTINGS if flags & frames::ACK == 0 => {
                for [i0, i1, v0, v1, v2, v3] in payload.as_chunks::<6>().0 {
                    if u16::from_be_bytes([*i0, *i1]) == frames::INITIAL_WINDOW_SIZE {
                        let first = i64::from(u32::from_be_bytes([*v0, *v1, *v2, *v3]));
                        *window += first - self.first_window;
                        self.first_window = first;
                    }
                }
                frames::frame(out, frames::SETTINGS, frames::ACK, 0, &[]);
            }
            frames::PING if flags & frames::ACK == 0 => {
                frames::frame(out, frames::PING, frames::ACK, 0, &payload);
            }
            frames::WINDOW_UPDATE if of == 0 => self.window += i64::from(value),
            frames::WINDOW_UPDATE if of == stream => *window += i64::from(value),
            frames::GOAWAY => bail!("the server says goodbye"),
            frames::RST_STREAM if of == stream => bail!("reset with code {value}"),
            frames::HEADERS if of == stream && flags & frames::END_STREAM != 0 => {
                return frames::grpc_status(&payload).context("no status").map(Some);
            }
            _ => {}
        }
        Ok(None)
    }

    fn read(&mut self, mut to: &mut [u8], until: Instant) -> Result<()> {
        while !to.is_empty() {
            let left = until.saturating_duration_since(clock::now());
            ensure!(!left.is_zero(), "no answer");
            self.socket.set_read_timeout(Some(left))?;
            match self.socket.read(to) {
                Ok(0) => bail!("closed"),
                Ok(read) => to = to.get_mut(read..).unwrap_or_default(),
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => return Err(error.into()),
            }
        }
        Ok(())
    }
}
