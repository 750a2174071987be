//! The journal of a server: chooses its folder, restores the state from it, and tells what was found.
//!
//! `server.rs` assembles the server. Begin at [`ServerJournal::open`].

use std::collections::BTreeSet;
use std::path::PathBuf;
use std::sync::Arc;

use anyhow::{Context as _, Result};
use muster_journal::{JournalError, JournalFolder, JournalOptions};

use super::keeper::{CoreStart, TrialReport};
use crate::clock::Clock;
use crate::config::{Config, JobConfig, ServerConfig};
use crate::engine::{
    DeclaredJob, Durability, Engine, JOURNAL_ENCODING, KeptConnections, PersistentObserver, RestoredState,
};
use crate::grpc::KEPT_CONNECTIONS_VERSION;
use crate::http::api::machine_name;

/// The most further reads of a journal that looks damaged while it is written.
const TRIAL_ATTEMPTS: usize = 5;

/// The journal of a server, opened and read.
pub struct ServerJournal {
    folder: JournalFolder,
    restored: RestoredState,
    durability: Durability,
}

/// Returns the folder of the journal; `None` if the server has none.
pub fn journal_folder(server: &ServerConfig) -> Option<PathBuf> {
    if server.ephemeral || server.durability == Durability::None {
        return None;
    }
    if let Some(folder) = &server.data_dir {
        return Some(folder.clone());
    }
    // A server whose port is chosen at its start has no name by which its journal could be found again.
    let port = Some(server.grpc.port()).filter(|port| *port != 0)?;
    let absolute = |name: &str| std::env::var_os(name).map(PathBuf::from).filter(|path| path.is_absolute());
    // systemd sets the first for a unit with StateDirectory.
    let state = absolute("STATE_DIRECTORY").or_else(|| {
        let of_user = absolute("XDG_STATE_HOME").or_else(|| Some(absolute("HOME")?.join(".local/state")));
        Some(of_user?.join("muster"))
    })?;
    // Several hosts may share the folder of a user.
    Some(state.join(machine_name()).join(format!("grpc-{port}")))
}

/// Returns the folder of the journal, unless it is the default one and cannot be created: then the server has no journal.
pub fn usable_journal_folder(server: &ServerConfig) -> Option<PathBuf> {
    journal_folder(server).filter(|folder| server.data_dir.is_some() || JournalFolder::create(folder).is_ok())
}

impl ServerJournal {
    /// Opens and reads the journal that `config` names. If the default folder cannot be used, the server has no journal.
    /// `start` is what the keeper has told this process, if there is one, and `kept` the connections that go on from the former
    /// process.
    pub fn open(
        config: &Config,
        observers: &[Arc<dyn PersistentObserver>],
        start: Option<&CoreStart>,
        kept: KeptConnections,
    ) -> Result<Option<Self>> {
        let server = &config.server;
        let Some(path) = journal_folder(server) else {
            anyhow::ensure!(
                server.ephemeral || server.durability != Durability::Host,
                "durability is host, and no folder is known for the journal: name one with --data-dir"
            );
            if !server.ephemeral && server.durability != Durability::None && server.grpc.port() != 0 {
                tracing::warn!(
                    "no journal is kept, because HOME is not set: name a folder with --data-dir, or --ephemeral"
                );
            }
            return Ok(None);
        };
        let holder = format!(
            "process {} on {} (muster {}, gRPC {}, HTTP {})",
            start.map_or_else(std::process::id, |start| start.keeper),
            machine_name(),
            env!("CARGO_PKG_VERSION"),
            server.grpc,
            server.http
        );
        let way_out = || format!("cannot use the journal in {} (--data-dir, --ephemeral)", path.display());
        let folder = match JournalFolder::open(&path, &holder) {
            Err(error @ JournalError::Io { .. })
                if server.data_dir.is_none() && server.durability != Durability::Host =>
            {
                tracing::warn!(%error, "no journal is kept: choose another folder with --data-dir, or --ephemeral");
                return Ok(None);
            }
            opened => opened.with_context(way_out)?,
        };
        let (set_aside, sets_last_aside) = match start {
            Some(start) => (start.set_aside.clone(), start.sets_last_input_aside),
            None => (BTreeSet::new(), false),
        };
        let restored =
            RestoredState::read_setting_aside(&folder, observers, set_aside, sets_last_aside, kept)
                .with_context(way_out)?;
        Ok(Some(Self { folder, restored, durability: server.durability }))
    }

    /// Reads the journal that another process writes, to say whether this program could go on from it.
    pub fn try_read(config: &Config) -> Result<TrialReport> {
        let path = journal_folder(&config.server).context("this configuration has no journal")?;
        let read = || {
            let folder = JournalFolder::open_for_reading(&path)?;
            anyhow::Ok(RestoredState::read(&folder, &[])?)
        };
        // Files go, and records are appended, while they are read.
        let mut attempts = (0..TRIAL_ATTEMPTS).map(|_| read());
        let restored = attempts.find(Result::is_ok).unwrap_or_else(read);
        let restored = restored.with_context(|| format!("cannot read the journal in {}", path.display()))?;
        anyhow::ensure!(
            restored.report.set_aside.is_empty(),
            "this program panics at the inputs of the journal with the numbers {:?}",
            restored.report.set_aside
        );
        Ok(TrialReport {
            version: env!("CARGO_PKG_VERSION").to_owned(),
            encoding: JOURNAL_ENCODING,
            kept_connections: KEPT_CONNECTIONS_VERSION,
            inputs: restored.report.inputs,
        })
    }

    /// Returns a clock that shows no time before the last one in the journal.
    pub fn start_clock(journal: Option<&Self>) -> Clock {
        journal
            .map_or_else(Clock::start, |journal| Clock::start_not_before(journal.restored.report.last_input))
    }

    /// Returns the records whose inputs were not applied.
    pub fn set_aside(&self) -> &[u64] {
        &self.restored.report.set_aside
    }

    /// Returns the number of the last restored event.
    pub fn last_event(&self) -> u64 {
        self.restored.last_event()
    }

    /// Gives the restored state to the engine, which records from now on. `after` says how the former process ended, if that
    /// is known.
    pub fn resume(
        self,
        engine: &Engine,
        observers: Vec<Arc<dyn PersistentObserver>>,
        after: Option<String>,
    ) -> Result<()> {
        let Self { folder, restored, durability } = self;
        let report = restored.report.clone();
        let path = folder.path().display().to_string();
        let jobs = restored.coordinator().jobs().count();
        for damaged in &report.damaged_snapshots {
            tracing::error!(
                snapshot = damaged,
                "a snapshot of the journal is damaged; an older one was used"
            );
        }
        if let Some(cut) = &report.cut {
            tracing::warn!(
                file = %cut.path.display(), byte = cut.offset, record = cut.number, lost_records = cut.lost_records,
                why = cut.why, "the end of the journal was cut off"
            );
        }
        for record in &report.set_aside {
            tracing::error!(
                record,
                "this input of the journal was not applied, because it ends the service: report it"
            );
        }
        engine
            .resume_from_journal(restored, folder, JournalOptions::default(), durability, observers, after)
            .with_context(|| format!("cannot write the journal in {path}"))?;
        tracing::info!(
            folder = path, %durability, jobs, inputs = report.inputs, bytes = report.bytes, took = ?report.took,
            "the journal is open"
        );
        Ok(())
    }
}

/// Declares the jobs of the configuration, unless the journal has restored them.
pub fn declare_configured_jobs(engine: &Engine, jobs: &[JobConfig]) -> Result<()> {
    for job in jobs {
        match engine.declare_configured_job(&job.name, &job.settings)? {
            DeclaredJob::New | DeclaredJob::Restored => {}
            DeclaredJob::Changed => {
                tracing::info!(job = %job.name, "the settings of the restored job have changed as the configuration says");
            }
            DeclaredJob::Kept(refusal) => tracing::warn!(
                job = %job.name, why = %refusal,
                "the restored job keeps its settings, which differ from the configuration: change them with `muster job set`, \
                 delete the job, or start with --ephemeral or another --data-dir"
            ),
        }
    }
    Ok(())
}
