//! The connection to the RAS thread of a process: lines of text, then one answer, then the end of the connection.
//!
//! All processes of a host listen on one address, and the kernel gives a connection to any of them, also to one that is
//! stopped. So a process that is silent is left, and the next connection may reach another one. Begin at [`ask_ras`].

use std::io::{self, BufRead as _, BufReader, Read, Write as _};
use std::net::{SocketAddr, TcpStream, ToSocketAddrs as _};
use std::time::Duration;

use super::RasReport;
use super::answer::read_report;
use crate::monotonic_nanos;

/// Where NCCL listens unless `NCCL_RAS_ADDR` says otherwise.
pub const RAS_DEFAULT_ADDRESS: &str = "localhost:28028";
/// The limit of a whole question. RAS itself waits 5 s for a process that does not answer, and 10 s altogether.
pub const RAS_TIMEOUT: Duration = Duration::from_secs(20);
/// The limit of the connection to a process and its first line.
const GREETING_TIMEOUT: Duration = Duration::from_secs(1);
/// The number of processes that are tried at an address at which some listen.
const ATTEMPTS: usize = 6;
/// The most bytes of an answer: some 100,000 ranks over all communicators.
const ANSWER_BYTES_MAX: u64 = 64 << 20;
/// The most bytes of a line before the answer.
const LINE_BYTES_MAX: u64 = 1024;
/// The version of the protocol. NCCL writes its own one and ignores ours.
const GREETING: &str = "client protocol 2\n";
const SERVER_GREETING: &str = "SERVER PROTOCOL ";

/// Why RAS gave no answer.
#[derive(Debug, thiserror::Error)]
pub enum RasError {
    /// The address cannot be resolved.
    #[error("{address:?} is no address such as {RAS_DEFAULT_ADDRESS}: {why}")]
    Address {
        /// The address.
        address: String,
        /// The reason.
        why: io::Error,
    },
    /// No process listens or answers.
    #[error(
        "no process of NCCL answers at {address}: {why}. RAS is a part of NCCL 2.24 and newer, off with NCCL_RAS_ENABLE=0, and \
         elsewhere with NCCL_RAS_ADDR"
    )]
    NoAnswer {
        /// The address.
        address: String,
        /// The last reason.
        why: io::Error,
    },
    /// Another program listens there.
    #[error("what listens at {address} is not NCCL's RAS: it wrote {line:?}")]
    NotRas {
        /// The address.
        address: String,
        /// Its first line.
        line: String,
    },
    /// NCCL before 2.28.7 answers in text for people only.
    #[error("NCCL at {address} is older than 2.28.7, and has no answer for programs. For people: echo verbose status | nc {}", .address.replace(':', " "))]
    TooOld {
        /// The address.
        address: String,
    },
    /// The answer exceeds the maximum length.
    #[error("the answer of NCCL at {address} is longer than {} MiB", ANSWER_BYTES_MAX >> 20)]
    TooLong {
        /// The address.
        address: String,
    },
    /// The answer cannot be read.
    #[error("the answer of NCCL at {address} cannot be read: {why}")]
    Unreadable {
        /// The address.
        address: String,
        /// The reason.
        why: serde_json::Error,
    },
}

/// Returns where RAS of this host listens, as `NCCL_RAS_ADDR` says it.
#[must_use]
pub fn ras_address_of_environment() -> String {
    let told = std::env::var("NCCL_RAS_ADDR").ok().filter(|address| !address.is_empty());
    told.unwrap_or_else(|| RAS_DEFAULT_ADDRESS.to_owned())
}

/// Asks RAS at an address, such as [`RAS_DEFAULT_ADDRESS`]. Blocks, for no longer than [`RAS_TIMEOUT`] and the resolution of
/// the name.
///
/// # Errors
/// If no process answers in time, or the answer is not that of NCCL 2.28.7 or newer.
pub fn ask_ras(address: &str) -> Result<RasReport, RasError> {
    let deadline = Deadline::after(RAS_TIMEOUT);
    let named = || address.to_owned();
    let mut addresses: Vec<SocketAddr> =
        address.to_socket_addrs().map_err(|why| RasError::Address { address: named(), why })?.collect();
    let mut last = io::Error::other("the name has no address");
    for attempt in 0..ATTEMPTS {
        // A name may have an address at which no process listens.
        let Some(to) = addresses.get(attempt % addresses.len().max(1)).copied() else { break };
        match greet(to, deadline) {
            Ok((mut process, line)) if line.starts_with(SERVER_GREETING) => {
                return ask_process(address, &mut process, deadline);
            }
            Ok((_, line)) => return Err(RasError::NotRas { address: named(), line }),
            Err(why) => {
                if why.kind() == io::ErrorKind::ConnectionRefused {
                    addresses.retain(|address| *address != to);
                }
                last = why;
            }
        }
        if deadline.left().is_none() {
            break;
        }
    }
    Err(RasError::NoAnswer { address: named(), why: last })
}

/// Connects to a process, and returns its first line.
fn greet(to: SocketAddr, deadline: Deadline) -> io::Result<(RasConnection, String)> {
    let deadline = deadline.min(Deadline::after(GREETING_TIMEOUT));
    let socket = TcpStream::connect_timeout(&to, deadline.left_or_error()?)?;
    let mut process = BufReader::new(TimedStream { socket, deadline });
    let line = ask_line(&mut process, GREETING)?;
    Ok((process, line))
}

fn ask_process(
    address: &str,
    process: &mut RasConnection,
    deadline: Deadline,
) -> Result<RasReport, RasError> {
    process.get_mut().deadline = deadline;
    let no_answer = |why| RasError::NoAnswer { address: address.to_owned(), why };
    let line = ask_line(process, "set format json\n").map_err(no_answer)?;
    if line.starts_with("ERROR") {
        return Err(RasError::TooOld { address: address.to_owned() });
    }
    if line != "OK" {
        return Err(RasError::NotRas { address: address.to_owned(), line });
    }
    process.get_mut().socket.write_all(b"verbose status\n").map_err(no_answer)?;
    let mut answer = process.take(ANSWER_BYTES_MAX);
    read_report(&mut answer).map_err(|why| match answer.limit() {
        0 => RasError::TooLong { address: address.to_owned() },
        _ => RasError::Unreadable { address: address.to_owned(), why },
    })
}

type RasConnection = BufReader<TimedStream>;

/// Writes a line, and returns the next one without its end.
fn ask_line(process: &mut RasConnection, line: &str) -> io::Result<String> {
    let left = process.get_ref().deadline.left_or_error()?;
    process.get_ref().socket.set_write_timeout(Some(left))?;
    process.get_mut().socket.write_all(line.as_bytes())?;
    let mut answer = Vec::new();
    process.by_ref().take(LINE_BYTES_MAX).read_until(b'\n', &mut answer)?;
    if answer.is_empty() {
        return Err(io::ErrorKind::UnexpectedEof.into());
    }
    Ok(String::from_utf8_lossy(&answer).trim_end().to_owned())
}

/// A moment of the host's monotonic clock, in nanoseconds.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct Deadline(u64);

impl Deadline {
    fn after(limit: Duration) -> Self {
        Self(monotonic_nanos().saturating_add(u64::try_from(limit.as_nanos()).unwrap_or(u64::MAX)))
    }

    /// Returns the time that is left, if there is any.
    fn left(self) -> Option<Duration> {
        let left = self.0.saturating_sub(monotonic_nanos());
        (left > 0).then_some(Duration::from_nanos(left))
    }

    fn left_or_error(self) -> io::Result<Duration> {
        self.left().ok_or_else(|| io::ErrorKind::TimedOut.into())
    }
}

/// A socket whose readings all end at one deadline, however slowly the bytes come.
struct TimedStream {
    socket: TcpStream,
    deadline: Deadline,
}

impl Read for TimedStream {
    fn read(&mut self, to: &mut [u8]) -> io::Result<usize> {
        self.socket.set_read_timeout(Some(self.deadline.left_or_error()?))?;
        self.socket.read(to).map_err(|error| match error.kind() {
            // The system's name of a timeout of a socket.
            io::ErrorKind::WouldBlock => io::ErrorKind::TimedOut.into(),
            _ => error,
        })
    }
}

#[cfg(test)]
mod tests {
    use std::net::TcpListener;

    use super::*;

    /// Starts a server that answers each line of a connection with the next of these texts, and then closes it.
    fn serve(connections: Vec<Vec<&'static str>>) -> String {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap().to_string();
        std::thread::spawn(move || {
            for answers in connections {
                let (mut socket, _) = listener.accept().unwrap();
                let mut lines = BufReader::new(socket.try_clone().unwrap());
                for answer in answers {
                    if lines.read_line(&mut String::new()).unwrap_or(0) == 0 {
                        break;
                    }
                    socket.write_all(answer.as_bytes()).unwrap();
                }
            }
        });
        address
    }

    const EMPTY: &str = r#"{"nccl_version": "2.29.1", "communicators": []}"#;

    #[test]
    fn a_process_is_asked_as_the_client_of_nccl_asks_it() {
        let address = serve(vec![vec!["SERVER PROTOCOL 2\n", "OK\n", EMPTY]]);
        assert_eq!(ask_ras(&address).unwrap().nccl_version, "2.29.1");
    }

    #[test]
    fn a_process_that_ends_the_connection_is_left_for_another() {
        let address = serve(vec![vec![], vec![], vec!["SERVER PROTOCOL 2\n", "OK\n", EMPTY]]);
        assert_eq!(ask_ras(&address).unwrap().nccl_version, "2.29.1");
    }

    #[test]
    fn each_failure_has_its_own_error() {
        let old = serve(vec![vec!["SERVER PROTOCOL 2\n", "ERROR: Unknown command set format json\n"]]);
        assert!(matches!(ask_ras(&old), Err(RasError::TooOld { .. })));
        let other = serve(vec![vec!["HTTP/1.1 400 Bad Request\r\n"]]);
        assert!(
            matches!(ask_ras(&other), Err(RasError::NotRas { line, .. }) if line == "HTTP/1.1 400 Bad Request")
        );
        let cut = serve(vec![vec!["SERVER PROTOCOL 2\n", "OK\n", &EMPTY[..20]]]);
        assert!(matches!(ask_ras(&cut), Err(RasError::Unreadable { .. })));
        let nobody = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().to_string();
        assert!(matches!(ask_ras(&nobody), Err(RasError::NoAnswer { .. })));
        assert!(matches!(ask_ras("no address"), Err(RasError::Address { .. })));
    }
}
