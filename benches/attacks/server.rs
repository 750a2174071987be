//! The server under attack.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use anyhow::{Context as _, Result};
use rustix::fs::{CWD, FileType, Mode, mknodat};

use crate::attack::Attack;
use crate::harness::MusterServer;

/// The timeout of the server's start.
const START_MAX: Duration = Duration::from_secs(30);
/// The interval at which its memory is sampled.
const LOOK: Duration = Duration::from_millis(50);

/// The resident memory around an attack, in bytes.
#[derive(Debug, Clone, Copy)]
pub struct Memory {
    pub before: u64,
    pub peak: u64,
    pub after: u64,
}

/// The server under attack, which is killed when this is dropped.
pub struct Server {
    pub server: MusterServer,
    /// The pipe of its audit, which no process reads.
    audit: Option<(PathBuf, File)>,
}

impl Server {
    pub fn start(binary: &Path, attack: &Attack) -> Result<Self> {
        let audit = attack.blocks_audit.then(unread_pipe).transpose()?;
        let mut command = Command::new(binary);
        command.args(["serve", "--tasks", "1", "--grpc", "127.0.0.1:0", "--http", "127.0.0.1:0"]);
        // A starved client must be measured, not failed.
        command.args(["--heartbeat-timeout", "1h", "--log", "error"]);
        if let Some((path, _)) = &audit {
            command.arg("--audit-file").arg(path);
        }
        command.stdin(Stdio::null()).stderr(Stdio::null());
        Ok(Self { server: MusterServer::spawn(&mut command, START_MAX)?, audit })
    }

    /// Returns its resident memory, in bytes.
    pub fn memory(&self) -> Result<u64> {
        resident(self.server.pid()).context("the server is gone")
    }

    /// Samples the greatest resident memory from now on.
    pub fn watch_memory(&self) -> MemorySampler {
        let (peak, over) = (Arc::new(AtomicU64::new(0)), Arc::new(AtomicBool::new(false)));
        let watch = MemorySampler { peak: Arc::clone(&peak), over: Arc::clone(&over) };
        let pid = self.server.pid();
        std::thread::spawn(move || {
            while !over.load(Ordering::Relaxed) {
                peak.fetch_max(resident(pid).unwrap_or_default(), Ordering::Relaxed);
                std::thread::sleep(LOOK);
            }
        });
        watch
    }

    /// Returns its exit status, if it has ended.
    pub fn has_ended(&self) -> Option<String> {
        self.server.exit_status().map(|status| status.to_string())
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        if let Some((path, _)) = &self.audit {
            drop(std::fs::remove_file(path));
        }
    }
}

/// The greatest resident memory of the server since its start.
pub struct MemorySampler {
    peak: Arc<AtomicU64>,
    over: Arc<AtomicBool>,
}

impl MemorySampler {
    pub fn peak(&self) -> u64 {
        self.peak.load(Ordering::Relaxed)
    }
}

impl Drop for MemorySampler {
    fn drop(&mut self) {
        self.over.store(true, Ordering::Relaxed);
    }
}

/// Creates a named pipe that is open for writing and that no process reads.
fn unread_pipe() -> Result<(PathBuf, File)> {
    let path = std::env::temp_dir().join(format!("muster-attacks-{}.audit", std::process::id()));
    drop(std::fs::remove_file(&path));
    mknodat(CWD, &path, FileType::Fifo, Mode::from_raw_mode(0o600), 0).context("making a named pipe")?;
    let file = File::options().read(true).write(true).open(&path)?;
    Ok((path, file))
}

/// Returns the resident memory of a process, in bytes.
fn resident(pid: i32) -> Option<u64> {
    let text = std::fs::read_to_string(format!("/proc/{pid}/statm")).ok()?;
    let pages: u64 = text.split_whitespace().nth(1)?.parse().ok()?;
    Some(pages * rustix::param::page_size() as u64)
}
