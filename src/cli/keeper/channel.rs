//! The channel between the keeper and a core: a pair of Unix sockets that carries messages and descriptors.
//!
//! The core's end is its standard input. A message is one JSON text. A program of another version ignores fields and messages
//! that it does not know. Begin at [`KeeperMessage`] and [`CoreMessage`].

use std::collections::BTreeSet;
use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicU64, Ordering};

use muster_kept::HeldSlot;
use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, SocketFlags, SocketType, recvmsg, sendmsg, socketpair,
};
use rustix::process::Pid;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use tokio::io::Interest;
use tokio::net::UnixStream;

use super::core_end::CoreEndCounts;
use crate::clock::monotonic_nanoseconds;
use crate::grpc::ConnectionKeeper;

/// The longest message.
const MESSAGE_MAX: usize = 64 << 10;
/// The most descriptors in a message; the kernel takes 253.
pub const DESCRIPTORS_MAX: usize = 200;
/// How long a core waits for a keeper that has left many messages unread.
const SEND_TIMEOUT: Timespec = Timespec { tv_sec: 0, tv_nsec: 200_000_000 };
/// For so long after that, new connections are not kept, unless the keeper reads.
const SEND_PAUSE_NANOSECONDS: u64 = 5_000_000_000;

/// A message of the keeper to a core.
#[derive(Debug, Serialize, Deserialize)]
pub enum KeeperMessage {
    /// A listening socket, which comes with the message, and the name of its address.
    Listener(String),
    /// The memory of the connections of former cores, which comes with the message.
    Memory,
    /// Sockets of connections, which come with the message, each with the number of its slot and its serial number.
    Connections(Vec<(u32, u64)>),
    /// All sockets were sent: the core begins to serve.
    Serve(CoreStart),
    /// The core is to stop, because of this signal to the keeper: in good order, and at the second message at once.
    Stop(i32),
}

/// The facts that a core needs to serve.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct CoreStart {
    /// The process of the keeper, which is the one that people see.
    pub keeper: u32,
    /// Whether an earlier core has served, and has announced the addresses.
    pub is_announced: bool,
    /// The unrequested ends.
    pub ends: CoreEndCounts,
    /// How the core before this one ended, in a clause.
    pub previous_end: Option<String>,
    /// The records of the journal that are not applied, because they ended earlier cores.
    pub set_aside: BTreeSet<u64>,
    /// Whether the last input of the journal is not applied either.
    pub sets_last_input_aside: bool,
    /// Whether the connections of the former core end: cores that continued them have crashed.
    #[serde(default)]
    pub ends_connections: bool,
}

/// A message of a core to its keeper.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum CoreMessage {
    /// The core serves.
    Serving,
    /// The core does not apply these records of the journal.
    SetAside(Vec<u64>),
    /// A thread of the core panicked, with this message. The core may go on.
    Panicked(String),
    /// The keeper is to hold the socket of a connection, which comes with the message: the number of its slot, and its serial
    /// number.
    Hold(u32, u64),
    /// This connection has ended.
    Release(u32, u64),
    /// The core continues no connection of former cores.
    ReleaseAll,
}

/// Returns the two ends of a new channel: the keeper's, and the core's.
pub fn create_channel() -> io::Result<(KeeperChannel, OwnedFd)> {
    let (keeper, core) = socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)?;
    rustix::io::ioctl_fionbio(&keeper, true)?;
    // It waits for any Unix socket; whole messages are exchanged by the functions below.
    Ok((KeeperChannel(UnixStream::from_std(keeper.into())?), core))
}

/// The keeper's end of a channel.
#[derive(Debug)]
pub struct KeeperChannel(UnixStream);

impl KeeperChannel {
    /// Sends a message, and descriptors with it.
    pub async fn send(&self, message: &KeeperMessage, descriptors: &[BorrowedFd<'_>]) -> io::Result<()> {
        self.0.async_io(Interest::WRITABLE, || send_message(self.0.as_fd(), message, descriptors)).await
    }

    /// Sends a message, unless the core has left too many unread.
    pub fn try_send(&self, message: &KeeperMessage) -> io::Result<()> {
        send_message(self.0.as_fd(), message, &[])
    }

    /// Returns the next message that a core has left, with its descriptor; `None`: there is none.
    pub fn try_receive(&self) -> Option<(CoreMessage, Option<OwnedFd>)> {
        loop {
            match receive_message(self.0.as_fd()) {
                Ok(Received::Message(message, mut descriptors)) => return Some((message, descriptors.pop())),
                Ok(Received::Unknown) => {}
                Ok(Received::End) | Err(_) => return None,
            }
        }
    }

    /// Waits for the next message of the core, with its descriptor. Returns `None` when the core has ended.
    pub async fn receive(&self) -> io::Result<Option<(CoreMessage, Option<OwnedFd>)>> {
        loop {
            let received = self.0.async_io(Interest::READABLE, || receive_message(self.0.as_fd())).await?;
            match received {
                Received::Message(message, mut descriptors) => return Ok(Some((message, descriptors.pop()))),
                Received::Unknown => {}
                Received::End => return Ok(None),
            }
        }
    }
}

/// The core's end of a channel.
#[derive(Debug)]
pub struct CoreChannel {
    socket: OwnedFd,
    /// The monotonic time in nanoseconds before which no socket is sent to a keeper that does not read.
    retry_at: AtomicU64,
}

impl CoreChannel {
    fn new(socket: OwnedFd) -> Self {
        Self { socket, retry_at: AtomicU64::new(0) }
    }

    /// Takes the channel from the standard input of this process, which is empty afterwards.
    ///
    /// # Errors
    /// If standard input is no channel.
    pub fn take_standard_input() -> io::Result<Self> {
        let channel = io::stdin().as_fd().try_clone_to_owned()?;
        if rustix::net::sockopt::socket_type(&channel)? != SocketType::SEQPACKET {
            return Err(io::Error::other("it is a socket of another kind"));
        }
        let empty = std::fs::File::open("/dev/null")?;
        rustix::stdio::dup2_stdin(&empty)?;
        Ok(Self::new(channel))
    }

    /// Returns the process that made the channel.
    pub fn keeper(&self) -> io::Result<Option<Pid>> {
        Ok(Some(rustix::net::sockopt::socket_peercred(&self.socket)?.pid))
    }

    /// Waits for the next message of the keeper, with its descriptors. Returns `None` when the keeper has ended.
    pub fn receive(&self) -> io::Result<Option<(KeeperMessage, Vec<OwnedFd>)>> {
        loop {
            match receive_message(self.socket.as_fd()) {
                Ok(Received::Message(message, descriptors)) => return Ok(Some((message, descriptors))),
                Ok(Received::Unknown) => {}
                Ok(Received::End) => return Ok(None),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
    }

    /// Sends a message, unless the keeper has left too many unread.
    pub fn send(&self, message: &CoreMessage) -> io::Result<()> {
        send_message(self.socket.as_fd(), message, &[])
    }
}

impl ConnectionKeeper for CoreChannel {
    fn hold(&self, socket: BorrowedFd<'_>, slot: HeldSlot) -> io::Result<()> {
        let message = CoreMessage::Hold(slot.slot, slot.serial);
        loop {
            match send_message(self.socket.as_fd(), &message, &[socket]) {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                sent => return sent,
            }
            let late = || io::Error::new(io::ErrorKind::TimedOut, "the keeper does not read");
            if monotonic_nanoseconds() < self.retry_at.load(Ordering::Relaxed) {
                return Err(late());
            }
            let mut ready = [PollFd::new(&self.socket, PollFlags::OUT)];
            if rustix::event::poll(&mut ready, Some(&SEND_TIMEOUT))? == 0 {
                self.retry_at.store(monotonic_nanoseconds() + SEND_PAUSE_NANOSECONDS, Ordering::Relaxed);
                return Err(late());
            }
        }
    }

    fn release(&self, slot: HeldSlot) {
        // If the message does not fit, the keeper learns of it by the memory.
        let _ = self.send(&CoreMessage::Release(slot.slot, slot.serial));
    }
}

fn send_message(
    socket: BorrowedFd<'_>,
    message: &impl Serialize,
    descriptors: &[BorrowedFd<'_>],
) -> io::Result<()> {
    let text = serde_json::to_vec(message)?;
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(DESCRIPTORS_MAX))];
    let mut with = SendAncillaryBuffer::new(&mut space);
    if !with.push(SendAncillaryMessage::ScmRights(descriptors)) {
        return Err(io::Error::other("no space for descriptors"));
    }
    sendmsg(socket, &[IoSlice::new(&text)], &mut with, SendFlags::DONTWAIT | SendFlags::NOSIGNAL)?;
    Ok(())
}

/// The result of a receive.
enum Received<M> {
    Message(M, Vec<OwnedFd>),
    /// A message of another version.
    Unknown,
    /// The other process has ended.
    End,
}

fn receive_message<M: DeserializeOwned>(socket: BorrowedFd<'_>) -> io::Result<Received<M>> {
    let mut text = vec![0; MESSAGE_MAX];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(DESCRIPTORS_MAX))];
    let mut with = RecvAncillaryBuffer::new(&mut space);
    let received = recvmsg(socket, &mut [IoSliceMut::new(&mut text)], &mut with, RecvFlags::CMSG_CLOEXEC)?;
    if received.bytes == 0 {
        return Ok(Received::End);
    }
    let mut descriptors = Vec::new();
    for part in with.drain() {
        if let RecvAncillaryMessage::ScmRights(received) = part {
            descriptors.extend(received);
        }
    }
    let message = serde_json::from_slice(text.get(..received.bytes).unwrap_or_default());
    Ok(message.map_or(Received::Unknown, |message| Received::Message(message, descriptors)))
}

#[cfg(test)]
mod tests {
    use std::net::TcpListener;

    use super::*;

    #[tokio::test]
    async fn messages_and_descriptors_come_through_and_the_end_is_noticed() {
        let (keeper, core) = create_channel().expect("a channel");
        let core = CoreChannel::new(core);
        let listener = TcpListener::bind("127.0.0.1:0").expect("a free port");
        for _ in 0..20 {
            let message = KeeperMessage::Listener("--grpc".to_owned());
            keeper.send(&message, &[listener.as_fd()]).await.expect("it is sent");
            let (message, mut descriptors) =
                core.receive().expect("it is received").expect("the keeper lives");
            assert!(matches!(message, KeeperMessage::Listener(name) if name == "--grpc"));
            let same = TcpListener::from(descriptors.pop().expect("a descriptor"));
            assert_eq!(same.local_addr().expect("bound"), listener.local_addr().expect("bound"));
        }
        let task = CoreStart { keeper: 3, ..CoreStart::default() };
        keeper.send(&KeeperMessage::Serve(task.clone()), &[]).await.expect("it is sent");
        let (message, descriptors) = core.receive().expect("it is received").expect("the keeper lives");
        assert!(
            descriptors.is_empty() && matches!(message, KeeperMessage::Serve(received) if received == task)
        );
        for message in [CoreMessage::Panicked("at a line".to_owned()), CoreMessage::Serving] {
            core.send(&message).expect("it is sent");
            let received = keeper.receive().await.expect("it is received").expect("the core lives");
            assert_eq!(received.0, message);
        }
        drop(core);
        assert!(keeper.receive().await.expect("the end").is_none());
    }

    #[tokio::test]
    async fn messages_of_another_version_are_passed_over() {
        let (keeper, core) = create_channel().expect("a channel");
        send_message(core.as_fd(), &"Rejoice", &[]).expect("it is sent");
        send_message(core.as_fd(), &serde_json::json!({"Panicked": "x"}), &[]).expect("it is sent");
        let received = keeper.receive().await.expect("it is received").expect("the core lives");
        assert_eq!(received.0, CoreMessage::Panicked("x".to_owned()));
        send_message(keeper.0.as_fd(), &serde_json::json!({"Rejoice": 1}), &[]).expect("it is sent");
        keeper.try_send(&KeeperMessage::Stop(15)).expect("it is sent");
        let received = CoreChannel::new(core).receive().expect("it is received");
        assert!(matches!(received, Some((KeeperMessage::Stop(15), _))));
    }

    #[tokio::test]
    async fn a_keeper_that_reads_nothing_does_not_block_the_core() {
        let (_keeper, core) = create_channel().expect("a channel");
        let core = CoreChannel::new(core);
        let message = CoreMessage::Panicked("x".repeat(1000));
        let failed = (0..100_000).find_map(|_| core.send(&message).err()).expect("the channel is full");
        assert_eq!(failed.kind(), io::ErrorKind::WouldBlock);
    }
}
