//! Processes of tests: one for each test, and peers for tests of several processes.

use std::io::{Read, Write};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::os::unix::process::ExitStatusExt;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

#[path = "../../support/isolated_test.rs"]
mod isolated_test;

/// No wait of a test takes longer.
pub const LIMIT: Duration = Duration::from_secs(60);
/// Names the role of a peer.
const ROLE: &str = "SIMULATED_GPU_ROLE";

/// Runs the body of a test in a process of its own, which has these settings from its start.
pub fn run_isolated<F: FnOnce()>(settings: &str, body: F) {
    isolated_test::run_isolated(&[("SIMULATED_GPU", settings)], body);
}

fn this_program(arguments: &[&str]) -> Command {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(arguments);
    command
}

/// Waits until a condition holds.
pub fn wait_until(what: &str, mut condition: impl FnMut() -> bool) {
    let limit = Instant::now() + LIMIT / 2;
    while !condition() {
        assert!(Instant::now() < limit, "in vain: {what}");
        std::thread::sleep(Duration::from_micros(200));
    }
}

/// Another process, and a socket to it.
pub struct PeerProcess {
    child: Child,
    pub socket: UnixStream,
}

impl PeerProcess {
    /// Starts a peer in a role of `peers.rs`, with settings.
    pub fn start(role: &str, settings: &str) -> Self {
        Self::start_with(role, |command| command.env("SIMULATED_GPU", settings))
    }

    /// Starts a peer with a changed command.
    pub fn start_with(role: &str, change: impl FnOnce(&mut Command) -> &mut Command) -> Self {
        let (socket, other) = UnixStream::pair().unwrap();
        socket.set_read_timeout(Some(LIMIT / 2)).unwrap();
        let mut command =
            this_program(&["--exact", "isolation::peer", "--ignored", "--nocapture", "--test-threads=1"]);
        command.env(ROLE, role).stdin(OwnedFd::from(other)).stdout(Stdio::null());
        change(&mut command);
        let child = command.spawn().unwrap();
        Self { child, socket }
    }

    pub fn send(&mut self, bytes: &[u8]) {
        self.socket.write_all(bytes).unwrap();
    }

    pub fn receive<const LEN: usize>(&mut self) -> [u8; LEN] {
        let mut bytes = [0; LEN];
        self.socket.read_exact(&mut bytes).unwrap();
        bytes
    }

    /// Waits until the process ends.
    pub fn wait(mut self) -> ExitStatus {
        let mut status = None;
        wait_until("the end of a peer", || {
            status = self.child.try_wait().unwrap();
            status.is_some()
        });
        status.unwrap()
    }

    /// Kills the process, and waits until it is gone.
    pub fn kill(mut self) {
        self.child.kill().unwrap();
        assert_eq!(self.child.wait().unwrap().signal(), Some(libc::SIGKILL));
    }

    /// Kills the process, and does not reap it.
    pub fn kill_unseen(&mut self) {
        self.child.kill().unwrap();
    }
}

impl Drop for PeerProcess {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Reads so many bytes from the other process of a peer.
pub fn read<const LEN: usize>(socket: &mut UnixStream) -> [u8; LEN] {
    let mut bytes = [0; LEN];
    socket.read_exact(&mut bytes).unwrap();
    bytes
}

/// The process of a peer. Its standard input is the socket.
#[test]
#[ignore = "a process of another test"]
fn peer() {
    use std::os::fd::FromRawFd;
    // SAFETY: nothing else owns the descriptor.
    let socket = unsafe { UnixStream::from_raw_fd(0) };
    let name = std::env::var(ROLE).expect("a test starts this");
    let (_, role) = crate::peers::ROLES.iter().find(|(role, _)| *role == name).expect("a role");
    role(socket);
}
