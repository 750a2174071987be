//! Ends the pending collectives of this process that run over gloo, JAX's collectives on CPU.
//!
//! `epoch.rs` decides when to end them. This module needs no GIL, because the thread that waits in a collective may
//! hold the GIL. Begin at [`end_pending_gloo_collectives`].
//!
//! A collective waits in one of three places, for up to half an hour. The module ends each of these waits in its own
//! way:
//!
//! - *The collective waits for data of a peer.* The module shuts down the connections of this process to its peers
//!   for reading, and gloo then closes them. The module recognizes a connection of gloo by its addresses: one end of
//!   the connection has an address that gloo has published below `cpu:gloo/`. The connections stay open for writing
//!   until gloo closes them. If a send failed before gloo has read the end of the connection, gloo would never end
//!   its wait for that send. The module does not shut down listening sockets, because gloo aborts the process when
//!   one fails.
//! - *The collective waits for the address of a peer* that has published none, because the peer died, failed or is no
//!   member of the epoch. The module publishes an address of another address family in place of the missing one. Gloo
//!   gives up as soon as it reads this address.
//! - *The collective waits for a connection from a peer* that published its address and died. The module connects to
//!   this process's own listener in the name of that peer, and closes the connection.
//!
//! Before the next epoch begins, one member deletes all addresses of gloo (`_live.py`), also those that this
//! module has published.

use std::collections::{BTreeMap, BTreeSet};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::ops::Range;
use std::os::fd::{BorrowedFd, OwnedFd, RawFd};
use std::time::Duration;

use muster::agent::UnregisteredJobClient;
use rustix::net::{AddressFamily, Shutdown, getpeername, getsockname, shutdown};
use tokio::io::AsyncWriteExt;

/// The directory of the addresses that gloo publishes: `cpu:gloo/<device ids>/<rank>`.
const GLOO_KEYS: &str = "cpu:gloo";
/// The size of the length of a field.
const LENGTH: usize = size_of::<u64>();
/// The size of the number by which a peer says which connection it makes.
const IDENTIFIER: usize = size_of::<u64>();
/// The most peers that this process connects to itself for at a time.
const PEERS_MAX: usize = 1024;
/// The time limit of a connection of this process to itself.
const OWN_CONNECT_LIMIT: Duration = Duration::from_millis(500);

/// The record that gloo publishes for one member of a clique.
struct RankRecord {
    value: Vec<u8>,
    address: SocketAddr,
    /// The bytes of the address's family.
    family: Range<usize>,
    /// The numbers by which the other members identify their connections to this one, by rank.
    identifiers: Vec<[u8; IDENTIFIER]>,
}

impl RankRecord {
    /// Reads a value: the host's name and the address, each after its length, then the numbers.
    fn parse(value: &[u8]) -> Option<Self> {
        let length = |at: usize| -> Option<usize> {
            let bytes = value.get(at..at.checked_add(LENGTH)?)?;
            usize::try_from(u64::from_ne_bytes(bytes.try_into().ok()?)).ok()
        };
        let address_length = LENGTH.checked_add(length(0)?)?;
        let begin = address_length.checked_add(LENGTH)?;
        let end = begin.checked_add(length(address_length)?)?;
        let address = parse_socket_address(value.get(begin..end)?)?;
        let identifiers = value.get(end..)?.chunks_exact(IDENTIFIER);
        Some(Self {
            value: value.to_vec(),
            address,
            family: begin..begin + size_of::<u16>(),
            identifiers: identifiers.filter_map(|bytes| bytes.try_into().ok()).collect(),
        })
    }

    /// Returns the same record with an address of another family, which gloo refuses to connect to.
    fn with_unusable_address(&self) -> Vec<u8> {
        let [inet, inet6] =
            [AddressFamily::INET, AddressFamily::INET6].map(|family| family.as_raw().to_ne_bytes());
        let mut value = self.value.clone();
        if let Some(family) = value.get_mut(self.family.clone()) {
            let other = if *family == inet { inet6 } else { inet };
            family.copy_from_slice(&other);
        }
        value
    }
}

/// Reads an address as the system keeps it.
fn parse_socket_address(bytes: &[u8]) -> Option<SocketAddr> {
    const INET: u16 = AddressFamily::INET.as_raw();
    const INET6: u16 = AddressFamily::INET6.as_raw();
    let family = u16::from_ne_bytes(bytes.get(0..2)?.try_into().ok()?);
    let port = u16::from_be_bytes(bytes.get(2..4)?.try_into().ok()?);
    let ip: IpAddr = match family {
        INET => Ipv4Addr::from(<[u8; 4]>::try_from(bytes.get(4..8)?).ok()?).into(),
        INET6 => Ipv6Addr::from(<[u8; 16]>::try_from(bytes.get(8..24)?).ok()?).to_canonical(),
        _ => return None,
    };
    Some(SocketAddr::new(ip, port))
}

/// A clique: the devices whose processes share connections.
struct GlooClique {
    /// The directory of its addresses.
    key: String,
    devices: Vec<u64>,
    /// The records that its members have published, by rank.
    ranks: BTreeMap<usize, RankRecord>,
}

impl GlooClique {
    /// Returns the record of the member whose address is one of `own`.
    fn record_of_own_rank(&self, own: &BTreeSet<SocketAddr>) -> Option<(usize, &RankRecord)> {
        self.ranks
            .iter()
            .find(|(_, record)| own.contains(&record.address))
            .map(|(rank, record)| (*rank, record))
    }

    /// Publishes an address that cannot be used for every member that has published none. If its own address has come
    /// meanwhile, that stays.
    async fn publish_unusable_addresses(&self, observer: &UnregisteredJobClient, record: &RankRecord) {
        for missing in (0..self.devices.len()).filter(|rank| !self.ranks.contains_key(rank)) {
            let key = format!("{}/{missing}", self.key);
            let _written = observer.insert(&key, record.with_unusable_address().into(), false).await;
        }
    }
}

/// Returns the cliques that have published addresses.
async fn read_cliques(observer: &UnregisteredJobClient) -> Vec<GlooClique> {
    let Ok(entries) = observer.list(GLOO_KEYS).await else { return Vec::new() };
    let mut cliques: BTreeMap<&str, GlooClique> = BTreeMap::new();
    for (key, value) in &entries {
        let Some((directory, rank)) = key.rsplit_once('/') else { continue };
        let Some((_, devices)) = directory.rsplit_once('/') else { continue };
        let devices = devices.split(',').map(str::parse).collect::<Result<Vec<u64>, _>>();
        if let (Ok(devices), Ok(rank), Some(record)) = (devices, rank.parse(), RankRecord::parse(value)) {
            let new = || GlooClique { key: directory.to_owned(), devices, ranks: BTreeMap::new() };
            cliques.entry(directory).or_insert_with(new).ranks.insert(rank, record);
        }
    }
    cliques.into_values().collect()
}

/// Ends the pending collectives of this process with devices of which `is_member` says no: their addresses never come.
pub async fn end_nonmember_collectives(observer: &UnregisteredJobClient, is_member: impl Fn(u64) -> bool) {
    for clique in read_cliques(observer).await {
        let is_whole = clique.ranks.len() >= clique.devices.len();
        if is_whole || clique.devices.iter().all(|device| is_member(*device)) {
            continue;
        }
        let own = own_file_descriptors().filter_map(|socket| listening_address(&socket)).collect();
        if let Some((_, record)) = clique.record_of_own_rank(&own) {
            clique.publish_unusable_addresses(observer, record).await;
        }
    }
}

/// The listeners and identifiers in whose name this process has connected to itself. Gloo keeps such a connection until it is
/// wanted, so one is enough.
pub type SelfConnections = BTreeSet<(SocketAddr, [u8; IDENTIFIER])>;

/// Ends the pending collectives of this process; returns the number of connections that were shut down.
pub async fn end_pending_gloo_collectives(
    observer: &UnregisteredJobClient,
    made: &mut SelfConnections,
) -> usize {
    let cliques = read_cliques(observer).await;
    let records = cliques.iter().flat_map(|clique| clique.ranks.values());
    let listeners: BTreeSet<SocketAddr> = records.map(|record| record.address).collect();
    let (shut, own) = shut_gloo_connections(&listeners);
    for clique in &cliques {
        let Some((rank, record)) = clique.record_of_own_rank(&own) else { continue };
        clique.publish_unusable_addresses(observer, record).await;
        for (peer, identifier) in record.identifiers.iter().enumerate().take(PEERS_MAX) {
            if peer != rank && made.insert((record.address, *identifier)) {
                let connecting = connect_as_peer(record.address, *identifier);
                let _connected = tokio::time::timeout(OWN_CONNECT_LIMIT, connecting).await;
            }
        }
    }
    shut
}

/// Connects to a listener of this process in the name of a peer, and closes the connection.
async fn connect_as_peer(own: SocketAddr, identifier: [u8; IDENTIFIER]) -> std::io::Result<()> {
    let mut stream = tokio::net::TcpStream::connect(own).await?;
    stream.write_all(&identifier).await?;
    stream.shutdown().await
}

/// Shuts down the connections of this process of which one end is a listener of gloo. Returns how many there were, and the
/// listeners that belong to this process.
fn shut_gloo_connections(listeners: &BTreeSet<SocketAddr>) -> (usize, BTreeSet<SocketAddr>) {
    let (mut shut, mut own) = (0, BTreeSet::new());
    for socket in own_file_descriptors() {
        own.extend(listening_address(&socket).filter(|here| listeners.contains(here)));
        let peer = getpeername(&socket).ok().flatten().and_then(canonical_address);
        let Some((here, peer)) = getsockname(&socket).ok().and_then(canonical_address).zip(peer) else {
            continue;
        };
        let is_gloo = listeners.contains(&peer) || listeners.contains(&here);
        shut += usize::from(is_gloo && shutdown(&socket, Shutdown::Read).is_ok());
    }
    (shut, own)
}

/// Returns the open files of this process, sockets among them.
fn own_file_descriptors() -> impl Iterator<Item = OwnedFd> {
    let files = std::fs::read_dir("/proc/self/fd").into_iter().flatten();
    files.filter_map(|file| duplicate_descriptor(file.ok()?.file_name().to_str()?.parse().ok()?))
}

/// Returns the address of a socket that listens.
fn listening_address(socket: &OwnedFd) -> Option<SocketAddr> {
    let is_listening = rustix::net::sockopt::socket_acceptconn(socket).is_ok_and(|is_listening| is_listening);
    getsockname(socket).ok().filter(|_| is_listening).and_then(canonical_address)
}

/// Returns an address in the form in which addresses are compared.
fn canonical_address(any: rustix::net::SocketAddrAny) -> Option<SocketAddr> {
    let address = SocketAddr::try_from(any).ok()?;
    Some(SocketAddr::new(address.ip().to_canonical(), address.port()))
}

/// Returns a descriptor of its own for a file of this process, if there is one of this number.
#[expect(unsafe_code, reason = "the descriptors are those of another library of this process")]
fn duplicate_descriptor(number: RawFd) -> Option<OwnedFd> {
    if number < 0 {
        return None;
    }
    // SAFETY: the borrow lasts for one call of dup. If another thread has closed the descriptor, dup fails; if the number
    // names another file by then, the caller looks at that one's addresses.
    let borrowed = unsafe { BorrowedFd::borrow_raw(number) };
    rustix::io::fcntl_dupfd_cloexec(borrowed, 0).ok()
}
