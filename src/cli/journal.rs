//! Implements `muster journal`: checks, repairs, copies and reads the journal of a server that does not run.
//!
//! Begin at `run`.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::{Context as _, Result};
use clap::{Args, Subcommand};
use muster_journal::JournalFolder;
use serde::Serialize;

use super::output::{TerminalText, print, print_json};
use super::server_args::format_time;
use crate::coordination::{Input, JobName, JobView, Timestamp};
use crate::engine::{DigestComparison, RestoredState, Visited};
use crate::text::{format_bytes, format_grouped};

/// Check, repair, copy or read the journal of a server
///
/// A server keeps a journal of every change, by which its jobs and runs survive its process (`muster serve --data-dir`). These
/// commands work on the folder of a server that is stopped.
#[derive(Debug, Args)]
#[command(after_long_help = EXAMPLES)]
pub struct Arguments {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    #[command(visible_alias = "stats")]
    Check(FolderArguments),
    Show(ShowArguments),
    Export(ExportArguments),
    Repair(RepairArguments),
}

/// Read the whole journal as a start of the server would, and tell what it contains and what is wrong with it
///
/// Changes nothing. Fails if the server would not start.
#[derive(Debug, Args)]
struct FolderArguments {
    /// The folder of the journal, as given to `muster serve --data-dir`
    #[arg(value_name = "FOLDER")]
    folder: PathBuf,

    /// Print JSON
    #[arg(long)]
    json: bool,
}

/// Print the state of the jobs as it was at a time
#[derive(Debug, Args)]
struct ShowArguments {
    /// The folder of the journal
    #[arg(value_name = "FOLDER")]
    folder: PathBuf,

    /// The time, such as 2026-03-01T03:12:07Z; without it, the last time in the journal
    #[arg(long, value_name = "TIME")]
    at: Option<String>,

    /// Only this job
    #[arg(long, value_name = "NAME")]
    job: Option<JobName>,
}

/// Begin another journal with the last state of this one, from which another server can start
#[derive(Debug, Args)]
struct ExportArguments {
    /// The folder of the journal
    #[arg(value_name = "FOLDER")]
    folder: PathBuf,

    /// The new folder; it must be empty or absent
    #[arg(value_name = "TARGET")]
    target: PathBuf,
}

/// End the journal before its first damaged record, or before another one, and keep what was removed
///
/// The server starts from the state before the damaged record: what was changed later is lost. Look first what
/// `muster journal check` says.
#[derive(Debug, Args)]
struct RepairArguments {
    /// The folder of the journal
    #[arg(value_name = "FOLDER")]
    folder: PathBuf,

    /// End the journal before this record, though nothing is damaged
    #[arg(long, value_name = "RECORD", value_parser = clap::value_parser!(u64).range(1..))]
    before: Option<u64>,
}

const EXAMPLES: &str = "\
Examples:
  muster journal check ~/.local/state/muster/$(hostname)/grpc-8476
  muster journal show ~/.local/state/muster/$(hostname)/grpc-8476 --at 2026-03-01T03:12:07Z --job train
  muster journal export ~/.local/state/muster/$(hostname)/grpc-8476 backup
  muster journal repair ~/.local/state/muster/$(hostname)/grpc-8476";

/// Runs the subcommand.
pub fn run(arguments: &Arguments) -> Result<ExitCode> {
    match &arguments.command {
        Command::Check(arguments) => check(arguments),
        Command::Show(arguments) => show(arguments),
        Command::Export(arguments) => export(arguments),
        Command::Repair(arguments) => repair(arguments),
    }
}

fn open(folder: &Path) -> Result<JournalFolder> {
    anyhow::ensure!(folder.join("identity").exists(), "there is no journal in {}", folder.display());
    open_or_create(folder)
}

fn open_or_create(folder: &Path) -> Result<JournalFolder> {
    let holder = format!("process {} (muster journal)", std::process::id());
    Ok(JournalFolder::open(folder, &holder)?)
}

/// The contents of a journal.
#[derive(Debug, Default, Serialize)]
struct JournalContents {
    /// The number of jobs.
    jobs: usize,
    /// The time of the last input.
    last_input: Timestamp,
    /// The inputs after the snapshot.
    inputs: u64,
    /// Whether there is a snapshot.
    has_snapshot: bool,
    /// The records after the snapshot, by kind.
    records: BTreeMap<&'static str, RecordTotals>,
    /// How the state compares with the last digest in the journal.
    digest: DigestComparison,
    /// Damaged snapshots that are passed over.
    damaged_snapshots: Vec<String>,
    /// Records whose inputs make this program panic, so that a start does not apply them.
    set_aside: Vec<u64>,
    /// The records that a start cuts off, in a sentence.
    cut: Option<String>,
    /// The number of files that recoveries and repairs have removed from the journal, and that are kept in `removed/`.
    removed_files: u64,
    /// The space that they take.
    removed_bytes: u64,
}

impl JournalContents {
    fn status(&self) -> ExitCode {
        if self.digest == DigestComparison::Different { ExitCode::FAILURE } else { ExitCode::SUCCESS }
    }

    fn digest_text(&self) -> Option<&'static str> {
        match self.digest {
            DigestComparison::Equal => Some("The inputs lead to the state whose digest the journal has."),
            DigestComparison::Different => Some(
                "THE INPUTS LEAD TO ANOTHER STATE than the one whose digest the journal has. Report it, with a copy of the folder.",
            ),
            DigestComparison::None | DigestComparison::UnderWay => None,
        }
    }
}

/// The number of records of one kind, and their bytes.
#[derive(Debug, Default, Serialize)]
struct RecordTotals {
    count: u64,
    bytes: u64,
}

fn check(arguments: &FolderArguments) -> Result<ExitCode> {
    let folder = open(&arguments.folder)?;
    let mut records = BTreeMap::<&'static str, RecordTotals>::new();
    let mut restored = RestoredState::read_until(&folder, &[], Timestamp(u64::MAX), |record, bytes| {
        let totals = records.entry(record_kind(record)).or_default();
        totals.count += 1;
        totals.bytes += bytes as u64;
    })?;
    restored.compare_digest();
    let report = &restored.report;
    let removed = folder.removed_files();
    let contents = JournalContents {
        jobs: restored.coordinator().jobs().count(),
        last_input: report.last_input,
        inputs: report.inputs,
        has_snapshot: report.had_snapshot,
        records,
        digest: report.digest,
        damaged_snapshots: report.damaged_snapshots.clone(),
        set_aside: report.set_aside.clone(),
        removed_files: removed.count,
        removed_bytes: removed.bytes,
        cut: report.cut.as_ref().map(|cut| {
            format!(
                "{} ends at byte {}, before record {}: {}. {} intact record(s) behind it are lost",
                cut.path.display(),
                cut.offset,
                cut.number,
                cut.why,
                cut.lost_records
            )
        }),
    };
    if arguments.json {
        print_json(&contents)?;
        return Ok(contents.status());
    }
    let mut text = TerminalText::default();
    let from = if contents.has_snapshot { "a snapshot and " } else { "" };
    text.add_line(format_args!(
        "{} job(s), from {from}{} inputs",
        contents.jobs,
        format_grouped(contents.inputs)
    ));
    if contents.last_input > Timestamp::default() {
        text.add_line(format_args!("last input: {}", format_time(contents.last_input)));
    }
    for (kind, totals) in &contents.records {
        text.add_line(format_args!(
            "  {kind:<24} {:>12}  {:>12}",
            format_grouped(totals.count),
            format_bytes(totals.bytes)
        ));
    }
    if let Some(line) = contents.digest_text() {
        text.add_line(line);
    }
    for damaged in &contents.damaged_snapshots {
        text.add_line(format_args!("damaged snapshot, passed over: {damaged}"));
    }
    for record in &contents.set_aside {
        text.add_line(format_args!("record {record} is set aside: its input makes this program panic"));
    }
    if contents.removed_files > 0 {
        text.add_line(format_args!(
            "removed by recoveries and repairs: {} file(s), {}, in {}",
            contents.removed_files,
            format_bytes(contents.removed_bytes),
            folder.path().join("removed").display()
        ));
    }
    let end = contents.cut.as_ref().map_or_else(
        || "The journal is whole.".to_owned(),
        |cut| format!("A start of the server cuts off the end: {cut}."),
    );
    text.add_line(end);
    print(&text)?;
    Ok(contents.status())
}

fn record_kind(record: Visited<'_>) -> &'static str {
    match record {
        Visited::Input(Input::Call { request, .. }) => request.kind(),
        Visited::Input(Input::DeclareJob { .. }) => "declare-job",
        Visited::Input(Input::NextIncarnation { .. }) => "next-incarnation",
        Visited::Input(Input::ConnectionOpened { .. }) => "connection-opened",
        Visited::Input(Input::ConnectionClosed { .. }) => "connection-closed",
        Visited::Input(Input::CallCancelled { .. }) => "call-cancelled",
        Visited::Input(Input::FindingChanged { .. }) => "finding-changed",
        Visited::Input(Input::TransferFailed { .. }) => "transfer-failed",
        Visited::Input(Input::ClaimTask { .. }) => "claim-task",
        Visited::Input(Input::Command { .. }) => "command",
        Visited::Input(Input::Tick) => "tick",
        Visited::Input(Input::DriverLagged) => "driver-lagged",
        Visited::Input(Input::Stop) => "stop",
        Visited::Input(Input::Resumed { .. }) => "resumed",
        Visited::Heartbeats => "heartbeats",
        Visited::Other(_) => "checks and versions",
    }
}

fn show(arguments: &ShowArguments) -> Result<ExitCode> {
    let until = match &arguments.at {
        None => Timestamp(u64::MAX),
        Some(text) => parse_time(text)?,
    };
    let folder = open(&arguments.folder)?;
    let restored = RestoredState::read_until(&folder, &[], until, |_, _| {})?;
    let at = if arguments.at.is_some() { until } else { restored.report.last_input };
    let coordinator = restored.coordinator();
    let views: Vec<JobView> = coordinator
        .jobs()
        .filter(|(_, name)| arguments.job.as_ref().is_none_or(|wanted| wanted == *name))
        .filter_map(|(job, _)| coordinator.job_view(job, at))
        .collect();
    if let (Some(job), true) = (&arguments.job, views.is_empty()) {
        anyhow::bail!("there was no job {job} at that time");
    }
    print_json(&views)?;
    Ok(ExitCode::SUCCESS)
}

fn parse_time(text: &str) -> Result<Timestamp> {
    let parsed = humantime::parse_rfc3339_weak(text)
        .with_context(|| format!("{text} is no time: write it as 2026-03-01T03:12:07Z"))?;
    let since = parsed.duration_since(std::time::UNIX_EPOCH).unwrap_or_default();
    Ok(Timestamp(u64::try_from(since.as_micros()).unwrap_or(u64::MAX)))
}

fn export(arguments: &ExportArguments) -> Result<ExitCode> {
    let folder = open(&arguments.folder)?;
    let restored = RestoredState::read(&folder, &[])?;
    let target = open_or_create(&arguments.target)?;
    let bytes = restored.export(&target)?;
    print(&TerminalText::from_line(format!(
        "{} begins with the state of {} job(s), {}. Start a server with --data-dir {}",
        arguments.target.display(),
        restored.coordinator().jobs().count(),
        format_bytes(bytes),
        arguments.target.display()
    )))?;
    Ok(ExitCode::SUCCESS)
}

fn repair(arguments: &RepairArguments) -> Result<ExitCode> {
    let folder = open(&arguments.folder)?;
    let text = match folder.repair(arguments.before)? {
        None => "Nothing is damaged.".to_owned(),
        Some(repair) => format!(
            "The journal now ends before record {}, in {} ({}). {} file(s) are kept in {}.",
            repair.number,
            repair.path.display(),
            repair.why,
            repair.removed.len(),
            folder.path().join("removed").display()
        ),
    };
    print(&TerminalText::from_line(text))?;
    Ok(ExitCode::SUCCESS)
}
