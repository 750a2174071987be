//! The compared servers.

use std::cell::Cell;
use std::ffi::OsString;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result, ensure};
use clap::ValueEnum;

use crate::baseline;
use crate::harness::{Process, TempFolder};
use crate::process::start_server;

/// The jaxlib release with whose service Muster is compared.
pub const JAXLIB: &str = "0.10.2";

/// A server under measurement.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, ValueEnum, serde::Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Kind {
    /// `muster serve`.
    Muster,
    /// jaxlib's own service.
    Cxx,
    /// The baseline: the least that a server on the same libraries does.
    #[value(name = "floor")]
    Baseline,
    /// Another build of Muster, with which this one is compared.
    #[value(skip)]
    Against,
}

impl Kind {
    pub fn name(self) -> &'static str {
        match self {
            Self::Muster => "Muster",
            Self::Cxx => "C++",
            Self::Baseline => "floor",
            Self::Against => "other",
        }
    }
}

/// The job for which a server is started.
#[derive(Debug, Clone, Copy)]
pub struct Job {
    pub tasks: u32,
    /// Whether tasks may fail and return.
    pub recoverable: bool,
}

/// Starts servers.
pub struct Launcher {
    pub muster: PathBuf,
    pub against: Option<PathBuf>,
    pub durability: String,
    pub against_durability: String,
    /// Has a folder for the journal of each server.
    pub journals: TempFolder,
    /// The number of journals so far.
    pub journal: Cell<u32>,
    pub threads: usize,
    pub logs: Option<PathBuf>,
}

/// The heartbeat timeout. It is longer than any benchmark, because only the heartbeat benchmark sends
/// heartbeats.
const HEARTBEAT_TIMEOUT_S: u32 = 3600;

impl Launcher {
    /// Starts a server and returns its address.
    pub fn start(&self, kind: Kind, job: Job) -> Result<(Process, SocketAddr)> {
        let command = match kind {
            Kind::Muster => self.muster_command(&self.muster, job, &self.durability),
            Kind::Against => {
                let other = self.against.as_ref().context("there is no other build: see --against")?;
                self.muster_command(other, job, &self.against_durability)
            }
            Kind::Cxx => cxx_command(job)?,
            Kind::Baseline => self.floor_command(job)?,
        };
        let log = self.logs.as_ref().map(|folder| folder.join(format!("{}.log", kind.name())));
        start_server(&command, log.as_deref(), |line| address(kind, line))
            .with_context(|| format!("starting the {} server", kind.name()))
    }

    fn muster_command(&self, muster: &Path, job: Job, durability: &str) -> Vec<OsString> {
        let mut command = words(&format!(
            "serve --tasks {} --grpc 127.0.0.1:0 --http 127.0.0.1:0 --heartbeat-timeout {HEARTBEAT_TIMEOUT_S}s \
             --io-threads {}",
            job.tasks, self.threads
        ));
        if job.recoverable {
            command.push("--recoverable".into());
        }
        if durability != "none" {
            let number = self.journal.replace(self.journal.get() + 1);
            let folder = self.journals.path(&number.to_string());
            let words_of = match durability {
                // A keeper holds the connections.
                "kept" => "--durability process".to_owned(),
                other => format!("--no-keeper --durability {other}"),
            };
            command.extend(words(&format!("{words_of} --data-dir {folder}")));
        }
        command.insert(0, muster.into());
        command
    }

    fn floor_command(&self, job: Job) -> Result<Vec<OsString>> {
        let mut command = words(&format!("{} {} {}", baseline::ARGUMENT, job.tasks, self.threads));
        if job.recoverable {
            command.push("recoverable".into());
        }
        command.insert(0, std::env::current_exe()?.into());
        Ok(command)
    }
}

fn cxx_command(job: Job) -> Result<Vec<OsString>> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let environments =
        std::env::var_os("MUSTER_JAX_ENVS").map_or_else(|| root.join("target/jax"), PathBuf::from);
    let home = environments.join(JAXLIB);
    ensure!(
        home.join(".complete").exists(),
        "there is no jaxlib {JAXLIB} in {}: run `tests/jax/setup {JAXLIB}`, or choose other --servers",
        environments.display()
    );
    let mut command: Vec<OsString> =
        vec![home.join("bin/python").into(), root.join("tests/jax/cxx_service.py").into()];
    let tasks = job.tasks;
    command.extend(words(&format!("--tasks {tasks} --heartbeat-timeout {HEARTBEAT_TIMEOUT_S}")));
    if job.recoverable {
        command.push("--recoverable".into());
    }
    Ok(command)
}

fn words(line: &str) -> Vec<OsString> {
    line.split_whitespace().map(OsString::from).collect()
}

/// Returns the gRPC address of a server, if this line states it.
fn address(kind: Kind, line: &str) -> Option<SocketAddr> {
    match kind {
        Kind::Cxx | Kind::Baseline => {
            let port = line.trim().strip_prefix("READY port=")?;
            Some(SocketAddr::from(([127, 0, 0, 1], port.parse().ok()?)))
        }
        Kind::Muster | Kind::Against => line.trim().strip_prefix("gRPC")?.trim().parse().ok(),
    }
}
