//! RAS, NCCL's own monitoring: the lines and the JSON of NCCL 2.29. Each process listens at `NCCL_RAS_ADDR`, and the kernel gives
//! a connection to any of them.
//!
//! - *Stricter*: without `NCCL_RAS_ADDR` there is no RAS, so that the tests of one host do not meet at one port.
//! - *Simpler*: the answer has the communicators of the process that answers, and not those of its peers. A rank whose
//!   communicator has ended in a process that lives counts as a process that does not answer.
//!
//! Begin at [`join_ras`].

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::net::{SocketAddr, SocketAddrV4, TcpListener, TcpStream, ToSocketAddrs as _};
use std::os::fd::{AsRawFd as _, FromRawFd as _, OwnedFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::{Arc, Mutex, OnceLock, Weak};
use std::time::{Duration, Instant};

use super::collective::Function;
use super::communicator::Communicator;
use super::profiler::communicator_hash;
use crate::settings::Setting;
use crate::wait::lock;

/// The time that a process has for its answer to a peer.
const PEER_TIMEOUT: Duration = Duration::from_millis(300);
/// How often a process looks for peers that have not come yet.
const RETRY: Duration = Duration::from_millis(10);
/// NCCL's functions in the order of its answer.
const FUNCTIONS: [Function; Function::COUNT] = [
    Function::Broadcast,
    Function::Reduce,
    Function::AllGather,
    Function::ReduceScatter,
    Function::AllReduce,
];

/// A communicator of this process, and what is known of its ranks.
struct Member {
    communicator: Weak<Communicator>,
    /// The process of each rank, and since when it has not answered.
    peers: Mutex<BTreeMap<usize, Peer>>,
}

#[derive(Debug, Clone, Copy, Default)]
struct Peer {
    pid: i64,
    silent_since: Option<Instant>,
}

static MEMBERS: Mutex<Vec<Arc<Member>>> = Mutex::new(Vec::new());

/// Lets RAS answer for a communicator that starts, if there is an address for it.
pub fn join_ras(communicator: &Arc<Communicator>) {
    static LISTENS: OnceLock<bool> = OnceLock::new();
    if !*LISTENS.get_or_init(|| listen().is_some()) {
        return;
    }
    let Ok(address) = communicator.ras_address(communicator.rank) else { return };
    let Ok(listener) = UnixListener::bind_addr(&address) else { return };
    let (own, ranks) = (Arc::downgrade(communicator), communicator.ranks);
    std::thread::spawn(move || {
        for socket in listener.incoming().flatten() {
            let Some(communicator) = own.upgrade() else { break };
            // A peer that has gone does not read.
            let _ = (&socket).write_all(describe_rank(&communicator).as_bytes());
        }
    });
    let peers = Mutex::new(BTreeMap::new());
    let member = Arc::new(Member { communicator: Arc::downgrade(communicator), peers });
    lock(&MEMBERS).push(member.clone());
    // The processes are known from the start, also those that end later.
    std::thread::spawn(move || {
        let is_known =
            |rank: &usize| member.communicator.upgrade().is_none_or(|it| member.ask(&it, *rank).is_some());
        for rank in 0..ranks {
            while !is_known(&rank) {
                std::thread::sleep(RETRY);
            }
        }
    });
}

/// Starts the thread that answers clients, if there is an address for it.
fn listen() -> Option<()> {
    let text = std::env::var("NCCL_RAS_ADDR").ok()?;
    let addresses = text.to_socket_addrs().ok()?;
    let v4 = addresses.filter_map(|it| if let SocketAddr::V4(it) = it { Some(it) } else { None }).next()?;
    let listener = listen_beside_others(v4)?;
    std::thread::spawn(move || {
        for socket in listener.incoming().flatten() {
            std::thread::spawn(move || answer_client(socket));
        }
    });
    Some(())
}

/// Listens at an address at which other processes may listen too.
fn listen_beside_others(address: SocketAddrV4) -> Option<TcpListener> {
    // SAFETY: a plain system call.
    let socket = unsafe { libc::socket(libc::AF_INET, libc::SOCK_STREAM | libc::SOCK_CLOEXEC, 0) };
    if socket < 0 {
        return None;
    }
    // SAFETY: the descriptor is new and has no other owner.
    let socket = unsafe { OwnedFd::from_raw_fd(socket) };
    let on: libc::c_int = 1;
    let place = libc::sockaddr_in {
        sin_family: libc::AF_INET as libc::sa_family_t,
        sin_port: address.port().to_be(),
        sin_addr: libc::in_addr { s_addr: u32::from_ne_bytes(address.ip().octets()) },
        sin_zero: [0; 8],
    };
    // SAFETY: the pointers are to values of these types and sizes, which the calls read.
    let is_listening = unsafe {
        let fd = socket.as_raw_fd();
        let size_of_on = size_of_val(&on) as libc::socklen_t;
        libc::setsockopt(fd, libc::SOL_SOCKET, libc::SO_REUSEPORT, (&raw const on).cast(), size_of_on) == 0
            && libc::bind(fd, (&raw const place).cast(), size_of_val(&place) as libc::socklen_t) == 0
            && libc::listen(fd, 64) == 0
    };
    is_listening.then(|| TcpListener::from(socket))
}

/// Answers the lines of a client until it asks for the status.
fn answer_client(socket: TcpStream) {
    let Ok(mut to) = socket.try_clone() else { return };
    let mut is_json = false;
    for line in BufReader::new(socket).lines().map_while(Result::ok) {
        let line = line.trim_end().to_ascii_lowercase();
        let answer = match line.as_str() {
            "status" | "verbose status" if is_json => {
                let _ = to.write_all(describe_job().as_bytes());
                return;
            }
            "status" | "verbose status" => return,
            "set format json" => {
                is_json = true;
                "OK\n".to_owned()
            }
            _ if line.starts_with("client protocol ") => "SERVER PROTOCOL 2\n".to_owned(),
            _ if line.starts_with("timeout ") => "OK\n".to_owned(),
            _ => format!("ERROR: Unknown command {line}\n"),
        };
        if to.write_all(answer.as_bytes()).is_err() {
            return;
        }
    }
}

/// Returns the rank's part of the answer.
fn describe_rank(own: &Communicator) -> String {
    let counts = FUNCTIONS.map(|function| {
        format!("\"{}\": {}", function.name().to_string_lossy(), own.sequence_number(function))
    });
    format!(
        "        {{ \"rank\": {}, \"host\": \"127.0.0.1\", \"pid\": {}, \"cuda_dev\": {}, \"nvml_dev\": {},\n          \
         \"status\": {{ \"init_state\": 0, \"async_error\": {}, \"finalize_called\": false, \"destroy_flag\": false, \
         \"abort_flag\": {} }},\n          \"collective_counts\": {{ {} }} }}",
        own.rank,
        std::process::id(),
        own.device.index(),
        own.device.index(),
        own.asynchronous_error(),
        own.is_stopped(),
        counts.join(", ")
    )
}

impl Member {
    /// Asks the process of a rank for its part of the answer.
    fn ask(&self, communicator: &Communicator, rank: usize) -> Option<String> {
        let asked = || {
            let mut socket = UnixStream::connect_addr(&communicator.ras_address(rank).ok()?).ok()?;
            socket.set_read_timeout(Some(PEER_TIMEOUT)).ok()?;
            let mut text = String::new();
            socket.read_to_string(&mut text).ok()?;
            (!text.is_empty()).then_some(text)
        };
        let text = asked();
        let mut peers = lock(&self.peers);
        let peer = peers.entry(rank).or_default();
        if let Some(text) = &text {
            let digits = text.split_once("\"pid\": ").and_then(|(_, rest)| rest.split(',').next());
            peer.pid = digits.and_then(|digits| digits.parse().ok()).unwrap_or(-1);
            peer.silent_since = None;
        } else {
            peer.silent_since.get_or_insert_with(Instant::now);
        }
        text
    }

    /// Returns what is said of a rank that does not answer.
    fn describe_missing(&self, rank: usize) -> String {
        let peer = lock(&self.peers).get(&rank).copied().unwrap_or_default();
        let dead_after = Duration::from_millis(Setting::NcclRasDeadAfter.amount());
        let is_dead = peer.silent_since.is_some_and(|since| since.elapsed() >= dead_after);
        format!(
            "        {{ \"rank\": {rank}, \"host\": \"127.0.0.1\", \"pid\": {}, \"cuda_dev\": 0, \"nvml_dev\": 0,\n          \
             \"status\": {{ \"unresponsive\": true, \"considered_dead\": {is_dead} }} }}",
            peer.pid
        )
    }
}

fn describe_job() -> String {
    let members = lock(&MEMBERS).clone();
    let mut communicators = Vec::new();
    for member in members {
        let Some(communicator) = member.communicator.upgrade() else { continue };
        let (mut ranks, mut missing) = (Vec::new(), Vec::new());
        for rank in 0..communicator.ranks {
            match member.ask(&communicator, rank) {
                Some(text) => ranks.push(text),
                None => missing.push(member.describe_missing(rank)),
            }
        }
        let hash = communicator_hash(communicator.unique_id_bytes());
        communicators.push(format!(
            "    {{\n      \"hash\": \"{hash:#x}\",\n      \"secondary_hash\": \"0x1:0x2\",\n      \"size\": {},\n      \
             \"ranks_count\": {},\n      \"missing_ranks_count\": {},\n      \"ranks\": [\n{}\n      ],\n      \
             \"missing_ranks\": [\n{}\n      ]\n    }}",
            communicator.ranks,
            ranks.len(),
            missing.len(),
            ranks.join(",\n"),
            missing.join(",\n")
        ));
    }
    let mut text = String::new();
    // Writing to a string cannot fail.
    let _ = write!(
        text,
        "{{\n  \"nccl_version\": \"2.29.1\",\n  \"cuda_runtime_version\": 13000,\n  \"cuda_driver_version\": 13000,\n  \
         \"timestamp\": \"2026-01-01 00:00:00\",\n  \"communicators_count\": {},\n  \"communicators\": [\n{}\n  ],\n  \
         \"ras\": {{ \"collection_time_sec\": 0.000, \"timeouts_count\": 0 }}\n}}\n",
        communicators.len(),
        communicators.join(",\n")
    );
    text
}
