//! Unique ids, and how the ranks of one find each other: each rank listens on an abstract socket of its own name, and dials
//! all others.

use std::ffi::c_int;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixListener, UnixStream};
use std::time::Duration;

use super::link::{Link, LinkFailure};
use super::{INVALID_USAGE, NcclAnswer, SYSTEM_ERROR, code_of, write_out};

/// How often a rank looks for those that are missing.
const RETRY: Duration = Duration::from_millis(1);
const ID_LEN: usize = 128;
const MAGIC: &[u8] = b"simulated";

/// `ncclUniqueId`. C passes it by value, as a struct.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct UniqueId([u8; ID_LEN]);

/// The sockets of a communicator.
#[derive(Debug)]
pub struct RankLinks {
    /// By which this rank sends to each other one.
    pub outgoing: Vec<Option<Link>>,
    /// By which this rank receives from each other one.
    pub incoming: Vec<Option<Link>>,
}

impl RankLinks {
    /// Ends all links, so that the peers notice.
    pub fn shut_down(&self) {
        self.outgoing.iter().chain(&self.incoming).flatten().for_each(Link::shut_down);
    }
}

impl UniqueId {
    /// Returns whether the library made the id.
    pub fn is_valid(&self) -> bool {
        self.0.starts_with(MAGIC)
    }

    /// Returns the bytes that a program gives to all ranks.
    pub fn bytes(&self) -> &[u8; ID_LEN] {
        &self.0
    }

    /// Returns the address at which a rank listens for this purpose.
    pub fn address(&self, purpose: &str, rank: usize) -> std::io::Result<SocketAddr> {
        let random: String = self.0[MAGIC.len()..][..16].iter().map(|byte| format!("{byte:02x}")).collect();
        SocketAddr::from_abstract_name(format!("simulated-nccl-{purpose}-{random}-{rank}"))
    }
}

/// The first message of a rank that dials.
struct RankGreeting {
    rank: usize,
    ranks: usize,
}

impl RankGreeting {
    fn to_bytes(&self) -> [u8; 16] {
        let mut bytes = [0; 16];
        bytes[..8].copy_from_slice(&(self.rank as u64).to_le_bytes());
        bytes[8..].copy_from_slice(&(self.ranks as u64).to_le_bytes());
        bytes
    }

    fn of_bytes(bytes: [u8; 16]) -> Self {
        let number = |part: &[u8]| part.iter().rev().fold(0, |number, byte| number << 8 | usize::from(*byte));
        Self { rank: number(&bytes[..8]), ranks: number(&bytes[8..]) }
    }
}

/// Meets the other ranks. Returns `None` if it was stopped before all were there. A rank that does not come is awaited without
/// a limit. Two processes of one rank, or ranks that disagree on their number, are error 5.
pub fn connect_to_all_ranks(
    id: &UniqueId,
    rank: usize,
    ranks: usize,
    is_stopped: &dyn Fn() -> bool,
) -> NcclAnswer<Option<RankLinks>> {
    let address = id.address("ranks", rank).map_err(|_| SYSTEM_ERROR)?;
    let listener = UnixListener::bind_addr(&address).map_err(|_| INVALID_USAGE)?;
    listener.set_nonblocking(true).map_err(|_| SYSTEM_ERROR)?;
    let none = || (0..ranks).map(|_| None).collect();
    let mut links = RankLinks { outgoing: none(), incoming: none() };
    let is_complete = |side: &[Option<Link>]| side.iter().filter(|link| link.is_some()).count() + 1 == ranks;
    while !is_complete(&links.outgoing) || !is_complete(&links.incoming) {
        if is_stopped() {
            return Ok(None);
        }
        for peer in (0..ranks).filter(|peer| *peer != rank) {
            if links.outgoing[peer].is_none() {
                links.outgoing[peer] = dial(id, peer, &RankGreeting { rank, ranks }, is_stopped)?;
            }
        }
        while let Ok((socket, _)) = listener.accept() {
            if let Some((peer, link)) = read_rank_greeting(socket, ranks, is_stopped)? {
                let place = links.incoming.get_mut(peer).filter(|_| peer != rank).ok_or(INVALID_USAGE)?;
                *place = Some(link);
            }
        }
        std::thread::sleep(RETRY);
    }
    Ok(Some(links))
}

/// Dials a rank; `None` if it is not there.
fn dial(
    id: &UniqueId,
    peer: usize,
    hello: &RankGreeting,
    is_stopped: &dyn Fn() -> bool,
) -> NcclAnswer<Option<Link>> {
    let address = id.address("ranks", peer).map_err(|_| SYSTEM_ERROR)?;
    let Ok(socket) = UnixStream::connect_addr(&address) else { return Ok(None) };
    let link = Link::new(socket).map_err(|_| SYSTEM_ERROR)?;
    Ok(link.write(&hello.to_bytes(), is_stopped).is_ok().then_some(link))
}

/// Reads the greeting of a rank that dialled; `None` if it ended meanwhile.
fn read_rank_greeting(
    socket: UnixStream,
    ranks: usize,
    is_stopped: &dyn Fn() -> bool,
) -> NcclAnswer<Option<(usize, Link)>> {
    let link = Link::new(socket).map_err(|_| SYSTEM_ERROR)?;
    let mut bytes = [0; 16];
    match link.read(&mut bytes, is_stopped) {
        Ok(()) => {}
        Err(LinkFailure::Stopped | LinkFailure::PeerGone) => return Ok(None),
    }
    let hello = RankGreeting::of_bytes(bytes);
    if hello.ranks != ranks {
        return Err(INVALID_USAGE);
    }
    Ok(Some((hello.rank, link)))
}

/// Returns a new id, which one rank makes and gives to all others.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclGetUniqueId(to: *mut UniqueId) -> c_int {
    let mut bytes = [0; ID_LEN];
    bytes[..MAGIC.len()].copy_from_slice(MAGIC);
    let random = &mut bytes[MAGIC.len()..][..16];
    // SAFETY: the kernel fills the slice.
    let filled = unsafe { libc::getrandom(random.as_mut_ptr().cast(), random.len(), 0) };
    let is_filled = usize::try_from(filled) == Ok(random.len());
    let made = is_filled.then_some(UniqueId(bytes)).ok_or(SYSTEM_ERROR);
    // SAFETY: the caller passes a place for an id.
    code_of(made.and_then(|id| unsafe { write_out(to, id) }))
}
