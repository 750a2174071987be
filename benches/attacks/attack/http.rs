//! Attacks over the HTTP port.

use std::io::{ErrorKind, Read as _, Write as _};
use std::net::{SocketAddr, TcpStream};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result};

use super::Attacker;
use crate::clock;

const CONNECT_MAX: Duration = Duration::from_millis(500);
/// The timeout of the answer to a complete request.
const ANSWER_MAX: Duration = Duration::from_secs(10);
/// The interval at which the attacker reads its connections.
const LOOK: Duration = Duration::from_millis(50);

/// A connection on which a request arrives slowly.
struct SlowRequest {
    socket: TcpStream,
    due: Instant,
}

/// Returns the head of a request whose body is sent byte by byte.
fn head(server: SocketAddr, path: &str, kind: &str) -> Vec<u8> {
    let host = format!("localhost:{}", server.port());
    format!("POST {path} HTTP/1.1\r\nhost: {host}\r\ncontent-type: {kind}\r\ncontent-length: 262000\r\n\r\n")
        .into()
}

fn bodies(server: SocketAddr) -> [Vec<u8>; 2] {
    [
        head(server, "/login", "application/x-www-form-urlencoded"),
        head(server, "/api/v1/jobs", "application/json"),
    ]
}

pub fn slow_bodies(attacker: &mut Attacker) -> Result<()> {
    const CONNECTIONS: u32 = 50;
    const PACKETS_PER_SECOND: u32 = 32_000;
    let heads = bodies(attacker.http);
    trickle(attacker, CONNECTIONS, &heads, Some(Duration::from_secs(1) * CONNECTIONS / PACKETS_PER_SECOND))
}

pub fn dribbled(attacker: &mut Attacker) -> Result<()> {
    let heads = bodies(attacker.http);
    trickle(attacker, 1_024, &heads, Some(Duration::from_secs(2)))
}

pub fn silent(attacker: &mut Attacker) -> Result<()> {
    let heads = [Vec::new(), b"GET / HTTP/1.1\r\nhost: localhost\r\n".to_vec()];
    trickle(attacker, 1_024, &heads, None)
}

/// Keeps `count` connections open, starts each with one of the heads, and then sends a byte on each at the
/// given interval. Connections that end are opened again.
fn trickle(attacker: &mut Attacker, count: u32, heads: &[Vec<u8>], every: Option<Duration>) -> Result<()> {
    let mut open: Vec<Option<SlowRequest>> = (0..count).map(|_| None).collect();
    let mut looked = clock::now();
    while attacker.goes_on() {
        let now = clock::now();
        let looks = now - looked >= LOOK;
        if looks {
            looked = now;
        }
        let mut next = now + LOOK;
        for (n, slot) in open.iter_mut().enumerate() {
            if slot.is_none() && attacker.may_connect() {
                let opening = heads.get(n % heads.len()).context("no head")?;
                match begin(attacker.http, opening) {
                    Ok(socket) => *slot = Some(SlowRequest { socket, due: now }),
                    Err(_) => attacker.told("no connection"),
                }
                attacker.sent(opening.len());
            }
            let Some(trickle) = slot else { continue };
            if let Some(every) = every {
                if trickle.due <= now {
                    if (&trickle.socket).write(b"x").is_ok() {
                        attacker.sent(1);
                    }
                    // The rate is not higher after a pause than before it.
                    trickle.due = (trickle.due + every).max(now - every * 4);
                }
                next = next.min(trickle.due);
            }
            if looks && let Some(how) = ended(&trickle.socket) {
                attacker.told(how);
                *slot = None;
            }
        }
        std::thread::sleep(next.saturating_duration_since(clock::now()).min(LOOK));
    }
    Ok(())
}

fn begin(server: SocketAddr, opening: &[u8]) -> Result<TcpStream> {
    let mut socket = TcpStream::connect_timeout(&server, CONNECT_MAX)?;
    socket.set_nodelay(true)?;
    socket.set_nonblocking(true)?;
    socket.write_all(opening)?;
    Ok(socket)
}

/// Returns the server's answer, or how it ended the connection.
fn ended(mut socket: &TcpStream) -> Option<String> {
    let mut answer = [0; 1024];
    match socket.read(&mut answer) {
        Ok(0) => Some("closed".to_owned()),
        Ok(read) => Some(status(answer.get(..read).unwrap_or_default())),
        Err(error) if error.kind() == ErrorKind::WouldBlock => None,
        Err(error) => Some(error.kind().to_string()),
    }
}

/// Returns the status of an answer.
fn status(answer: &[u8]) -> String {
    let text = String::from_utf8_lossy(answer);
    let status = text.strip_prefix("HTTP/1.1 ").and_then(|rest| rest.get(..3)).unwrap_or("?");
    format!("HTTP {status}")
}

/// Makes requests one after the other, on this number of threads.
fn request(attacker: &mut Attacker, threads: usize, text: &str) {
    let (server, until) = (attacker.http, attacker.until);
    let told = std::thread::scope(|scope| {
        let threads: Vec<_> = (0..threads)
            .map(|_| {
                scope.spawn(move || {
                    let mut told = Vec::new();
                    while clock::now() < until {
                        told.push(one(server, text, until).unwrap_or_else(|error| format!("{error:#}")));
                    }
                    told
                })
            })
            .collect();
        threads.into_iter().flat_map(|thread| thread.join().unwrap_or_default()).collect::<Vec<_>>()
    });
    for what in told {
        attacker.told(what);
        attacker.sent(text.len());
    }
}

fn one(server: SocketAddr, text: &str, until: Instant) -> Result<String> {
    let mut socket = TcpStream::connect_timeout(&server, CONNECT_MAX).context("no connection")?;
    let most = until.saturating_duration_since(clock::now()).clamp(LOOK, ANSWER_MAX);
    socket.set_read_timeout(Some(most))?;
    socket.write_all(text.as_bytes())?;
    let mut answer = Vec::new();
    socket.read_to_end(&mut answer).map_err(|_| anyhow::anyhow!("no answer"))?;
    Ok(status(&answer))
}

pub fn changes(attacker: &mut Attacker) -> Result<()> {
    let reason = "r".repeat(400);
    let body = format!("{{\"text\":\"x\",\"overwrite\":true,\"reason\":\"{reason}\"}}");
    let host = format!("localhost:{}", attacker.http.port());
    let text = format!(
        "PUT /api/v1/jobs/default/keys/x HTTP/1.1\r\nhost: {host}\r\nconnection: close\r\ncontent-type: application/json\r\n\
         content-length: {}\r\n\r\n{body}",
        body.len()
    );
    request(attacker, 4, &text);
    Ok(())
}

pub fn listed_keys(attacker: &mut Attacker) -> Result<()> {
    let host = format!("localhost:{}", attacker.http.port());
    let text = format!("GET /api/v1/jobs/default/keys HTTP/1.1\r\nhost: {host}\r\nconnection: close\r\n\r\n");
    request(attacker, 4, &text);
    Ok(())
}
