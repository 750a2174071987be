//! How far a process has come on an accepted TCP socket, by the counters of the kernel. Begin at [`stream_progress()`].
//!
//! - `read` has handed out `tcpi_bytes_received`, less one if the peer has ended its side, less what waits to be read.
//! - `write` has taken `tcpi_bytes_acked` and what waits to be acknowledged.
//!
//! Both are exact for a socket that was accepted, on which this side has not ended its output, and on which urgent data
//! is read in line. The counters are read until two readings agree, because the peer goes on meanwhile.

#![allow(unsafe_code)]

use std::io::{self, Read as _, Write as _};
use std::net::{TcpListener, TcpStream};
use std::os::fd::{AsFd as _, AsRawFd as _, BorrowedFd};

/// The number of attempts to read the counters while the peer sends without a pause. Ten have always been enough.
const ATTEMPTS_MAX: usize = 10_000;

/// How far a process has come on a socket.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct StreamProgress {
    /// The number of bytes that it has read.
    pub read: u64,
    /// The number of bytes that it has written, whether or not they have arrived.
    pub written: u64,
}

/// The kernel's state of a socket (`struct tcp_info` of Linux 4.6 and later).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct TcpInfo {
    state: u8,
    acknowledged: u64,
    received: u64,
}

mod tcp_state {
    pub const TIME_WAIT: u8 = 6;
    pub const CLOSE: u8 = 7;
    pub const CLOSE_WAIT: u8 = 8;
    pub const LAST_ACK: u8 = 9;
    pub const CLOSING: u8 = 11;
}

impl TcpInfo {
    fn of(socket: BorrowedFd<'_>) -> io::Result<Self> {
        // The fields lie at these offsets in every version of the structure.
        const ACKNOWLEDGED: usize = 120;
        const RECEIVED: usize = 128;
        let mut info = [0_u8; 256];
        let mut length = info.len() as libc::socklen_t;
        // SAFETY: the kernel writes at most `length` bytes to `info`.
        let result = unsafe {
            libc::getsockopt(
                socket.as_raw_fd(),
                libc::IPPROTO_TCP,
                libc::TCP_INFO,
                info.as_mut_ptr().cast(),
                &raw mut length,
            )
        };
        if result != 0 {
            return Err(io::Error::last_os_error());
        }
        if (length as usize) < RECEIVED + 8 {
            return Err(io::Error::new(
                io::ErrorKind::Unsupported,
                "the kernel does not count the bytes of a connection",
            ));
        }
        let number = |at: usize| u64::from_ne_bytes(std::array::from_fn(|n| info[at + n]));
        Ok(Self { state: info[0], acknowledged: number(ACKNOWLEDGED), received: number(RECEIVED) })
    }
}

fn queue_length(socket: BorrowedFd<'_>, request: libc::Ioctl) -> io::Result<u64> {
    let mut bytes: libc::c_int = 0;
    // SAFETY: both requests write one `int`.
    if unsafe { libc::ioctl(socket.as_raw_fd(), request, &raw mut bytes) } != 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(u64::try_from(bytes).unwrap_or_default())
}

/// Returns how far processes have come on a socket that was accepted; `None` if the connection has ended.
///
/// # Errors
/// If the kernel does not say.
pub fn stream_progress(socket: BorrowedFd<'_>) -> io::Result<Option<StreamProgress>> {
    let mut before = TcpInfo::of(socket)?;
    for _ in 0..ATTEMPTS_MAX {
        let unread = queue_length(socket, libc::FIONREAD)?;
        let unacknowledged = queue_length(socket, libc::TIOCOUTQ)?;
        let info = TcpInfo::of(socket)?;
        if info == before {
            use tcp_state::{CLOSE, CLOSE_WAIT, CLOSING, LAST_ACK, TIME_WAIT};
            if info.state == CLOSE {
                return Ok(None);
            }
            let end = u64::from(matches!(info.state, TIME_WAIT | CLOSE_WAIT | LAST_ACK | CLOSING));
            let inexact = || io::Error::other("the counters of the kernel contradict each other");
            let read = info.received.checked_sub(end + unread).ok_or_else(inexact)?;
            return Ok(Some(StreamProgress { read, written: info.acknowledged + unacknowledged }));
        }
        before = info;
    }
    Err(io::Error::new(io::ErrorKind::TimedOut, "the peer sends without a pause"))
}

/// Returns whether the counters of this kernel are exact, by a connection of this process to itself.
///
/// # Errors
/// If the kernel has no such counters, or no loopback interface.
pub fn are_counters_exact() -> io::Result<bool> {
    let listener = TcpListener::bind("127.0.0.1:0")?;
    let mut peer = TcpStream::connect(listener.local_addr()?)?;
    let (mut accepted, _) = listener.accept()?;
    let mut exact = true;
    let mut expected = StreamProgress { read: 0, written: 0 };
    for (sent, read, written) in [(1000, 300, 0), (0, 0, 77), (1, 701, 5000)] {
        peer.write_all(&vec![1; sent])?;
        accepted.read_exact(&mut vec![0; read])?;
        accepted.write_all(&vec![2; written])?;
        expected =
            StreamProgress { read: expected.read + read as u64, written: expected.written + written as u64 };
        exact &= stream_progress(accepted.as_fd())? == Some(expected);
    }
    peer.shutdown(std::net::Shutdown::Write)?;
    exact &= stream_progress(accepted.as_fd())? == Some(expected);
    Ok(exact)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_counters_are_exact_here_and_a_closed_connection_has_none() {
        assert!(are_counters_exact().expect("this kernel counts"));
        let listener = TcpListener::bind("127.0.0.1:0").expect("a free port");
        let peer = TcpStream::connect(listener.local_addr().expect("bound")).expect("it listens");
        let (accepted, _) = listener.accept().expect("a connection");
        (&accepted).write_all(b"it is not read").expect("there is room");
        // The peer closes with unread bytes, which resets the connection.
        std::thread::sleep(std::time::Duration::from_millis(10));
        drop(peer);
        let ended = || stream_progress(accepted.as_fd()).expect("the kernel says").is_none();
        assert!((0..500).any(|_| {
            std::thread::sleep(std::time::Duration::from_millis(10));
            ended()
        }));
    }

    #[test]
    fn the_counters_are_exact_while_the_peer_goes_on() {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a free port");
        let peer = TcpStream::connect(listener.local_addr().expect("bound")).expect("it listens");
        let (accepted, _) = listener.accept().expect("a connection");
        let (mut send, mut receive) = (peer.try_clone().expect("a descriptor"), peer);
        let sender = std::thread::spawn(move || {
            let mut random = fastrand::Rng::with_seed(1);
            while send.write_all(&vec![3; random.usize(1..100_000)]).is_ok() {}
        });
        let receiver = std::thread::spawn(move || while matches!(receive.read(&mut [0; 3000]), Ok(1..)) {});
        accepted.set_nonblocking(true).expect("a socket");
        let mut random = fastrand::Rng::with_seed(2);
        let mut expected = StreamProgress { read: 0, written: 0 };
        for _ in 0..20_000 {
            if let Ok(read) = (&accepted).read(&mut vec![0; random.usize(1..10_000)]) {
                expected.read += read as u64;
            }
            if let Ok(written) = (&accepted).write(&vec![4; random.usize(1..10_000)]) {
                expected.written += written as u64;
            }
            assert_eq!(stream_progress(accepted.as_fd()).expect("the kernel says"), Some(expected));
        }
        drop(accepted);
        sender.join().expect("it ends");
        receiver.join().expect("it ends");
    }
}
