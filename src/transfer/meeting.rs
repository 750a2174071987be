//! Where connections come from: listening, dialling, and making lost lanes anew.
//!
//! All of it blocks, on threads of its own with time limits; nothing here touches the path of the bytes.

use std::io;
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::os::fd::OwnedFd;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr as LocalAddr, UnixListener, UnixStream};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use super::cliques::CliqueKey;
use super::connection::{Connection, Making};
use super::engine::{Choice, Config, Core};
use super::error::TransferError;
use super::hello::{self, Hello, HelloError, Verdict};
use super::identity::{Address, Incarnation, Member};
use super::link::Terms;
use super::memory::raw::Piece;
use super::sync::lock;
use super::sys;
use super::transport::TransportKind;
use super::transport::lane::Lane;
use crate::clock;

/// How long a stranger may take to say who it is.
const HELLO_TIMEOUT: Duration = Duration::from_secs(5);
/// The most sockets whose hello is awaited at once; more are closed unheard.
const GREETING_MAX: usize = 256;
/// How long a hello of a life that the membership does not name waits for one that does.
const MEMBERSHIP_WAIT: Duration = Duration::from_secs(3);
/// Room in the socket for so much that is not yet read or sent.
const SOCKET_BUFFER: usize = 2 << 20;
/// A lost lane is dialled at least so often while its connection cannot do without it.
const OFTEN: Duration = Duration::from_millis(250);
/// And so often when it could not be made anew for long, and others carry the chunks.
const RARELY: Duration = Duration::from_secs(1);
/// The number of the lane that begins a connection.
const FIRST_LANE: u16 = 0;

/// What an engine listens on.
pub struct Listening {
    /// What others have to know.
    pub address: Address,
    local: Option<UnixListener>,
    tcp: Option<TcpListener>,
}

/// This host and its boot.
fn host() -> String {
    std::fs::read_to_string("/proc/sys/kernel/random/boot_id")
        .map_or_else(|_| String::new(), |id| id.trim().to_owned())
}

/// Begins to listen.
pub fn listen(config: &Config) -> io::Result<Listening> {
    let local = if config.transport == Choice::Tcp {
        None
    } else {
        let name =
            format!("muster-{}-{}-{:016x}", config.here.task, config.here.incarnation, clock::random_u64());
        Some((UnixListener::bind_addr(&LocalAddr::from_abstract_name(&name)?)?, name))
    };
    let tcp = config.listen.map(TcpListener::bind).transpose()?;
    let bound: Vec<SocketAddr> = tcp.iter().map(TcpListener::local_addr).collect::<io::Result<_>>()?;
    let tcp_addresses = if config.advertise.is_empty() { bound } else { config.advertise.clone() };
    let (local, name) = local.map_or((None, String::new()), |(listener, name)| (Some(listener), name));
    Ok(Listening { address: Address { host: host(), local: name, tcp: tcp_addresses }, local, tcp })
}

/// Accepts until the engine ends.
pub fn accept(core: &Arc<Core>, listening: Listening) -> io::Result<Vec<JoinHandle<()>>> {
    let mut threads = Vec::new();
    let mut start = |name: &str, handle: OwnedFd, mut next: Box<dyn FnMut() -> io::Result<Socket> + Send>| {
        lock(&core.listeners).push(handle);
        let core = Arc::clone(core);
        threads.push(thread::Builder::new().name(name.to_owned()).spawn(move || {
            loop {
                let accepted = next();
                if core.closed.load(Ordering::Acquire) {
                    return;
                }
                match accepted {
                    Ok(socket) => greet(&core, socket),
                    // Out of descriptors, or a connection that was gone again: neither is a reason to stop.
                    Err(_) => thread::sleep(Duration::from_millis(10)),
                }
            }
        })?);
        io::Result::Ok(())
    };
    if let Some(listener) = listening.local {
        let handle = listener.try_clone()?.into();
        start("muster-accept-unix", handle, Box::new(move || Ok(Socket::Local(listener.accept()?.0))))?;
    }
    if let Some(listener) = listening.tcp {
        let handle = listener.try_clone()?.into();
        start("muster-accept-tcp", handle, Box::new(move || Ok(Socket::Tcp(listener.accept()?.0))))?;
    }
    Ok(threads)
}

/// Wakes the listening threads of an engine that ends.
pub fn stop(core: &Core) {
    for listener in lock(&core.listeners).drain(..) {
        let _woken = rustix::net::shutdown(&listener, rustix::net::Shutdown::Both);
    }
}

enum Socket {
    Local(UnixStream),
    Tcp(TcpStream),
}

impl Socket {
    fn limit(&self, time: Option<Duration>) -> io::Result<()> {
        match self {
            Self::Local(socket) => socket.set_read_timeout(time).and(socket.set_write_timeout(time)),
            Self::Tcp(socket) => socket.set_read_timeout(time).and(socket.set_write_timeout(time)),
        }
    }

    const fn kind(&self) -> TransportKind {
        match self {
            Self::Local(_) => TransportKind::Unix,
            Self::Tcp(_) => TransportKind::Tcp,
        }
    }

    /// The process at the other end, as this one numbers it.
    fn pid(&self) -> Option<i32> {
        match self {
            Self::Local(socket) => {
                rustix::net::sockopt::socket_peercred(socket).ok().map(|peer| peer.pid.as_raw_nonzero().get())
            }
            Self::Tcp(_) => None,
        }
    }

    /// Whether the other end may be spoken to at all: on this host, processes of the same user.
    fn is_ours(&self) -> bool {
        match self {
            Self::Local(socket) => rustix::net::sockopt::socket_peercred(socket)
                .is_ok_and(|peer| peer.uid == rustix::process::geteuid()),
            Self::Tcp(_) => true,
        }
    }

    /// As a lane takes it.
    fn into_lane(self) -> io::Result<OwnedFd> {
        match self {
            Self::Local(socket) => {
                socket.set_nonblocking(true)?;
                Ok(socket.into())
            }
            Self::Tcp(socket) => {
                socket.set_nonblocking(true)?;
                socket.set_nodelay(true)?;
                let socket = socket2::Socket::from(socket);
                let _bounded_by_the_system = socket.set_send_buffer_size(SOCKET_BUFFER);
                let _bounded_by_the_system = socket.set_recv_buffer_size(SOCKET_BUFFER);
                Ok(socket.into())
            }
        }
    }
}

impl io::Read for Socket {
    fn read(&mut self, buf: &mut [u8]) -> io::Result<usize> {
        match self {
            Self::Local(socket) => socket.read(buf),
            Self::Tcp(socket) => socket.read(buf),
        }
    }
}

impl io::Write for Socket {
    fn write(&mut self, buf: &[u8]) -> io::Result<usize> {
        match self {
            Self::Local(socket) => socket.write(buf),
            Self::Tcp(socket) => socket.write(buf),
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// A socket while a hello is said on it: all of it together has a time limit, however slowly it comes.
struct Timed<'a>(&'a mut Socket, Instant);

impl Timed<'_> {
    fn limit(&self) -> io::Result<()> {
        let left = self.1.saturating_duration_since(clock::monotonic());
        if left.is_zero() {
            return Err(io::ErrorKind::TimedOut.into());
        }
        self.0.limit(Some(left))
    }
}

impl io::Read for Timed<'_> {
    fn read(&mut self, buf: &mut [u8]) -> io::Result<usize> {
        self.limit()?;
        self.0.read(buf)
    }
}

impl io::Write for Timed<'_> {
    fn write(&mut self, buf: &[u8]) -> io::Result<usize> {
        self.limit()?;
        self.0.write(buf)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Hears a hello on a thread of its own, if not too many are heard already.
fn greet(core: &Arc<Core>, socket: Socket) {
    if core.greeting.fetch_add(1, Ordering::AcqRel) >= GREETING_MAX {
        core.greeting.fetch_sub(1, Ordering::AcqRel);
        return;
    }
    let greeting = Arc::clone(core);
    let spawned = thread::Builder::new().name("muster-hello".to_owned()).spawn(move || {
        if let Err(error) = hear(&greeting, socket) {
            tracing::debug!(%error, "a connection was not taken");
        }
        greeting.greeting.fetch_sub(1, Ordering::AcqRel);
    });
    if spawned.is_err() {
        core.greeting.fetch_sub(1, Ordering::AcqRel);
    }
}

fn hear(core: &Arc<Core>, mut socket: Socket) -> Result<(), HelloError> {
    if !socket.is_ours() {
        return Err(HelloError::Protocol);
    }
    let token = core.config.token.as_deref();
    let mut joined = None;
    let mut expected = None;
    let mut timed = Timed(&mut socket, clock::monotonic() + HELLO_TIMEOUT);
    let hello = hello::answer(&mut timed, token, clock::random_bytes(), |hello| {
        let (verdict, connection) = judge(core, hello, &mut expected);
        let heard = connection.as_ref().map_or(0, |connection| connection.control_heard());
        joined = connection;
        // Before it is told: whoever is turned away may look at the count at once.
        if matches!(verdict, Verdict::NotMe(_) | Verdict::NotYou(_)) {
            core.counts.fenced.fetch_add(1, Ordering::Relaxed);
        }
        (verdict, heard, probe(core))
    })
    .inspect_err(|_| {
        if let Some((peer, making)) = expected {
            dial_instead(core, peer, making);
        }
    })?;
    socket.limit(None)?;
    if let Some(connection) = joined {
        return add(core, &connection, &hello, socket, hello.heard);
    }
    // Only now is it known that whoever dials is of the cluster.
    let key = CliqueKey::new(core.here(), hello.from);
    let old = lock(&core.cliques).get(key).cloned();
    if let Some(old) = old {
        let how = "it began a new connection".to_owned();
        old.end(TransferError::PeerDead { member: hello.from, how });
        let mut cliques = lock(&core.cliques);
        expected = cliques.expect(key).map(|making| (hello.from, making));
    }
    let connection = begin(core, &hello, &socket, hello.from, hello.probe, false);
    add(core, &connection, &hello, socket, hello.heard).inspect_err(|error| {
        connection.end(cannot(&hello.from, error));
        if let Some((peer, making)) = expected {
            dial_instead(core, peer, making);
        }
    })?;
    core.clique_ready(&connection);
    Ok(())
}

/// Gives a connection the lane that a hello was about.
fn add(
    core: &Arc<Core>,
    connection: &Arc<Connection>,
    hello: &Hello,
    socket: Socket,
    heard: u32,
) -> Result<(), HelloError> {
    let kind = socket.kind();
    let lane = Lane::new(connection, hello.lane, hello.control, kind, socket.into_lane()?);
    Ok(connection.add_lane(core, &lane, heard)?)
}

fn cannot(peer: &Member, error: &dyn std::fmt::Display) -> TransferError {
    let why = error.to_string();
    TransferError::Transport { transport: TransportKind::Tcp, member: *peer, why }
}

/// The connection that was expected of a peer does not come: this side makes it, if anybody waits for it.
fn dial_instead(core: &Arc<Core>, peer: Member, making: u64) {
    let key = CliqueKey::new(core.here(), peer);
    if lock(&core.cliques).is_awaited(key, making) {
        make(core, peer, making);
    }
}

/// Where this life's word lies.
fn probe(core: &Core) -> u64 {
    std::ptr::from_ref(&*core.probe) as u64
}

/// Whether a hello is welcome, and which connection a lane joins. The making that is expected of a hello that begins a
/// connection is put where the caller finds it.
fn judge(
    core: &Arc<Core>,
    hello: &Hello,
    expected: &mut Option<(Member, u64)>,
) -> (Verdict, Option<Arc<Connection>>) {
    let here = core.here();
    if hello.to != here {
        let current = (hello.to.task == here.task).then_some(here.incarnation);
        return (Verdict::NotMe(current), None);
    }
    // Incarnations are random: which of two is newer is for the membership to say, once it names the dialler's task.
    let known = core.await_membership(MEMBERSHIP_WAIT, |membership| membership.has(hello.from).then_some(()));
    if known.is_none() {
        let current: Option<Incarnation> =
            core.membership().member(hello.from.task).map(|member| member.incarnation);
        return (Verdict::NotYou(current), None);
    }
    if !hello.begins {
        let wanted = || {
            let connections = lock(&core.connections);
            connections.iter().find(|c| c.peer == hello.from && c.nonce == hello.nonce).map(Arc::clone)
        };
        // The connection may be a moment from being there: its dialler knows of it first.
        for _ in 0..100 {
            if let Some(connection) = wanted() {
                return (Verdict::Welcome, Some(connection));
            }
            thread::sleep(Duration::from_millis(5));
        }
        return (Verdict::NoSuchLink, None);
    }
    let key = CliqueKey::new(here, hello.from);
    let mut cliques = lock(&core.cliques);
    if core.closed.load(Ordering::Acquire) {
        // It has forgotten what it was dialling itself, and so cannot say which of two connections would count.
        return (Verdict::NotMe(None), None);
    }
    let (pending, old) = (cliques.is_pending(key), cliques.get(key).is_some());
    // Both dial, or dialled a moment ago: the connection of the lower task counts. If the peer has lost that one,
    // this side will know in a moment, and the peer asks again.
    if (pending || old) && here.task < hello.from.task {
        return (Verdict::Busy, None);
    }
    if !pending && !old {
        if cliques.len() >= core.config.cliques_max.saturating_mul(2) {
            drop(cliques);
            core.make_room();
            return (Verdict::Full, None);
        }
        // At once, so that this side does not begin to dial as well.
        *expected = cliques.expect(key).map(|making| (hello.from, making));
    }
    (Verdict::Welcome, None)
}

/// Makes the connection of an accepted hello.
fn begin(
    core: &Arc<Core>,
    hello: &Hello,
    socket: &Socket,
    peer: Member,
    probe: u64,
    dialled: bool,
) -> Arc<Connection> {
    let kind = socket.kind();
    let fetch = hello.fetch && kind == TransportKind::Unix;
    let pid = socket.pid().filter(|pid| can_read(*pid, probe, peer));
    let terms = Terms {
        chunk: hello.chunk.clamp(4 << 10, super::frame::CHUNK_MAX as u32),
        fetch,
        lasting: kind == TransportKind::Unix,
    };
    let checks = hello.checks && kind == TransportKind::Tcp;
    let making = Making { me: core.here(), peer, nonce: hello.nonce, dialled, kind, terms, checks, pid };
    let connection = Connection::new(core, making);
    lock(&core.connections).push(Arc::clone(&connection));
    if core.closed.load(Ordering::Acquire) {
        // Whoever shuts down may have looked at the connections already.
        connection.end(TransferError::Closed);
    }
    connection
}

/// Whether this process can read the memory of that one, and it is the peer's.
fn can_read(pid: i32, probe: u64, peer: Member) -> bool {
    let mut word = [0; 8];
    let read = sys::read_process(pid, probe, &Piece::of_mut(&mut word));
    read == Ok(8) && u64::from_ne_bytes(word) == peer.incarnation.get()
}

/// Makes a clique, on a thread of its own.
pub fn make(core: &Arc<Core>, peer: Member, making: u64) {
    let dialling = Arc::clone(core);
    let spawned = thread::Builder::new().name("muster-dial".to_owned()).spawn(move || {
        let key = CliqueKey::new(dialling.here(), peer);
        if let Err(error) = dial_all(&dialling, peer, making) {
            dialling.clique_failed(key, Some(making), &error);
        }
    });
    if let Err(error) = spawned {
        let why = format!("no thread to dial on: {error}");
        let error = TransferError::Transport { transport: TransportKind::Tcp, member: peer, why };
        core.clique_failed(CliqueKey::new(core.here(), peer), Some(making), &error);
    }
}

fn dial_all(core: &Arc<Core>, peer: Member, making: u64) -> Result<(), TransferError> {
    let key = CliqueKey::new(core.here(), peer);
    let until = clock::monotonic() + core.config.dial_timeout;
    let mut why = Vec::new();
    let mut pause = Duration::from_millis(20);
    loop {
        let wanted = || {
            let cliques = lock(&core.cliques);
            cliques.is_making(key, making)
        };
        if core.closed.load(Ordering::Acquire) {
            return Err(TransferError::Closed);
        }
        if !wanted() {
            return Ok(());
        }
        let membership = core.membership();
        let Some(info) = membership.peers.get(&peer.task).filter(|info| info.incarnation == peer.incarnation)
        else {
            let current = membership.member(peer.task).map(|member| member.incarnation);
            return Err(TransferError::StaleIncarnation { member: peer, current });
        };
        why.clear();
        let mut refused = 0;
        let ways = ways(core, &info.address);
        let count = ways.len();
        for way in ways {
            match dial(core, peer, &way, None) {
                Ok(dialled) => return establish(core, peer, making, &info.address, dialled),
                // Theirs counts: it will be here in a moment.
                Err(HelloError::Refused(Verdict::Busy)) => {
                    why = vec![format!("{way}: it is dialling as well, and its connection does not come")];
                    break;
                }
                Err(HelloError::Refused(Verdict::NotMe(current))) => {
                    core.counts.fenced.fetch_add(1, Ordering::Relaxed);
                    return Err(TransferError::StaleIncarnation { member: peer, current });
                }
                Err(error) => {
                    let dead = matches!(&error, HelloError::Io(error) if error.kind() == io::ErrorKind::ConnectionRefused);
                    refused += usize::from(dead);
                    why.push(format!("{way}: {error}"));
                }
            }
        }
        if count > 0 && refused == count {
            return Err(TransferError::PeerDead { member: peer, how: why.join("; ") });
        }
        if count == 0 {
            why.push("it has no address that the chosen transport can use".to_owned());
        }
        if clock::monotonic() + pause >= until || count == 0 {
            let transport = TransportKind::Tcp;
            return Err(TransferError::Transport { transport, member: peer, why: why.join("; ") });
        }
        thread::sleep(pause);
        pause = (pause * 2).min(Duration::from_millis(500));
    }
}

/// A way to reach a peer.
#[derive(Debug, Clone)]
enum Way {
    Local(String),
    Tcp(SocketAddr),
}

impl std::fmt::Display for Way {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Local(name) => write!(f, "unix:@{name}"),
            Self::Tcp(address) => write!(f, "tcp:{address}"),
        }
    }
}

fn ways(core: &Core, address: &Address) -> Vec<Way> {
    let mut ways = Vec::new();
    let choice = core.config.transport;
    let here = !address.local.is_empty() && !address.host.is_empty() && address.host == core.address.host;
    if choice != Choice::Tcp && here {
        ways.push(Way::Local(address.local.clone()));
    }
    if matches!(choice, Choice::Tcp | Choice::Auto) {
        ways.extend(address.tcp.iter().copied().take(8).map(Way::Tcp));
    }
    ways
}

/// A lane of a connection that is there: which, and whether it is the one for control.
struct Joining<'a> {
    connection: &'a Connection,
    lane: u16,
    control: bool,
}

struct Dialled {
    socket: Socket,
    hello: Hello,
    heard: u32,
    probe: u64,
}

fn dial(core: &Core, peer: Member, way: &Way, joining: Option<Joining<'_>>) -> Result<Dialled, HelloError> {
    let mut socket = match way {
        Way::Local(name) => Socket::Local(UnixStream::connect_addr(&LocalAddr::from_abstract_name(name)?)?),
        Way::Tcp(address) => Socket::Tcp(TcpStream::connect_timeout(address, HELLO_TIMEOUT)?),
    };
    if !socket.is_ours() {
        return Err(HelloError::Protocol);
    }
    let hello = Hello {
        from: core.here(),
        to: peer,
        nonce: joining.as_ref().map_or_else(clock::random_u64, |joining| joining.connection.nonce),
        lane: joining.as_ref().map_or(FIRST_LANE, |joining| joining.lane),
        control: joining.as_ref().is_none_or(|joining| joining.control),
        begins: joining.is_none(),
        fetch: core.config.transport != Choice::Unix,
        checks: core.config.checks,
        chunk: core.config.chunk,
        heard: joining.as_ref().map_or(0, |joining| joining.connection.control_heard()),
        token: false,
        probe: probe(core),
        random: clock::random_bytes(),
    };
    let mut timed = Timed(&mut socket, clock::monotonic() + HELLO_TIMEOUT);
    let answer = hello::dial(&mut timed, &hello, core.config.token.as_deref())?;
    socket.limit(None)?;
    Ok(Dialled { socket, hello, heard: answer.heard, probe: answer.probe })
}

/// A connection was made: gives it its lanes, and serves those who wait for it.
fn establish(
    core: &Arc<Core>,
    peer: Member,
    making: u64,
    address: &Address,
    dialled: Dialled,
) -> Result<(), TransferError> {
    let key = CliqueKey::new(core.here(), peer);
    if !lock(&core.cliques).is_making(key, making) {
        return Ok(());
    }
    let Dialled { socket, hello, probe, .. } = dialled;
    let kind = socket.kind();
    let connection = begin(core, &hello, &socket, peer, probe, true);
    if let Err(error) = add(core, &connection, &hello, socket, 0) {
        let error = cannot(&peer, &error);
        connection.end(error.clone());
        return Err(error);
    }
    if kind == TransportKind::Tcp {
        for number in 1..=core.config.lanes as u16 {
            // One of them is enough to go on; the control lane serves where there is none.
            if let Err(error) = join(core, &connection, address, number, false) {
                tracing::debug!(%peer, %error, lane = number, "a lane could not be made");
            }
        }
    }
    core.clique_ready(&connection);
    Ok(())
}

/// Adds a lane to a connection of this side's dialling.
fn join(
    core: &Arc<Core>,
    connection: &Arc<Connection>,
    address: &Address,
    lane: u16,
    control: bool,
) -> Result<(), HelloError> {
    let mut last = HelloError::Protocol;
    for way in ways(core, address).into_iter().filter(|way| matches!(way, Way::Tcp(_))) {
        match dial(core, connection.peer, &way, Some(Joining { connection, lane, control })) {
            Ok(dialled) => {
                let lane =
                    Lane::new(connection, lane, control, TransportKind::Tcp, dialled.socket.into_lane()?);
                connection.add_lane(core, &lane, dialled.heard)?;
                return Ok(());
            }
            Err(error) => last = error,
        }
    }
    Err(last)
}

/// Makes a lost lane anew, on a thread of its own: the side that dialled dials again, the other one finds out whether
/// there is still somebody. A peer that nobody listens for any more is dead.
pub fn mend(core: &Arc<Core>, connection: &Arc<Connection>, control: bool, how: &str) {
    let (mending, broken, how) = (Arc::clone(core), Arc::clone(connection), how.to_owned());
    let spawned = thread::Builder::new().name("muster-mend".to_owned()).spawn(move || {
        mend_now(&mending, &broken, control, &how);
    });
    if spawned.is_err() {
        let how = "no thread to mend its connection on".to_owned();
        connection.end(TransferError::PeerDead { member: connection.peer, how });
    }
}

fn mend_now(core: &Arc<Core>, connection: &Arc<Connection>, control: bool, how: &str) {
    let peer = connection.peer;
    let until = clock::monotonic() + core.config.dial_timeout;
    let mut pause = Duration::from_millis(2);
    let dead = |what: String| connection.end(TransferError::PeerDead { member: peer, how: what });
    loop {
        if connection.over().is_some() || core.closed.load(Ordering::Acquire) {
            return;
        }
        if control && connection.has_control_lane() {
            return;
        }
        let membership = core.membership();
        let Some(info) = membership.peers.get(&peer.task).filter(|info| info.incarnation == peer.incarnation)
        else {
            return;
        };
        if connection.dialled {
            // A lane that is made anew has a number of its own: what the old one carried is told apart by it.
            let number = core.next_lane();
            match join(core, connection, &info.address, number, control) {
                Ok(()) => {
                    core.counts.lanes_made.fetch_add(1, Ordering::Relaxed);
                    return;
                }
                Err(HelloError::Refused(Verdict::NotMe(_) | Verdict::NoSuchLink)) => {
                    return dead(format!("{how}; it does not know the connection any more"));
                }
                Err(HelloError::Io(error)) if error.kind() == io::ErrorKind::ConnectionRefused => {
                    return dead(format!("{how}; nobody listens at its address"));
                }
                // The connection goes on with the lanes that it has: only without control frames it cannot.
                Err(error) if clock::monotonic() >= until && !control => {
                    tracing::debug!(%peer, %error, "a lane cannot be made anew, and is tried again");
                    pause = RARELY;
                }
                Err(error) if clock::monotonic() >= until => {
                    return dead(format!("{how}; dialled in vain: {error}"));
                }
                Err(_) => {}
            }
        } else {
            let refused = |way: &Way| match way {
                Way::Tcp(address) => TcpStream::connect_timeout(address, HELLO_TIMEOUT)
                    .is_err_and(|error| error.kind() == io::ErrorKind::ConnectionRefused),
                Way::Local(_) => false,
            };
            let tcp: Vec<_> =
                ways(core, &info.address).into_iter().filter(|w| matches!(w, Way::Tcp(_))).collect();
            if !tcp.is_empty() && tcp.iter().all(refused) {
                return dead(format!("{how}; nobody listens at its address"));
            }
            if !control {
                return;
            }
            if clock::monotonic() >= until {
                return dead(format!("{how}; it did not come back"));
            }
        }
        thread::sleep(pause);
        pause = (pause * 2).min(if pause < RARELY { OFTEN } else { RARELY });
    }
}
