//! Shows the records that processes of this host keep of their collectives. Begin at [`run`].

use std::fmt::Write as _;
use std::process::ExitCode;

use anyhow::Result;
use muster_collectives::{
    CommunicatorSnapshot, OperationSnapshot, RecordFolder, RecordSnapshot, StoredRecord, clique_name,
};
use serde::Serialize;

use crate::cli::output::{TerminalText, print_error};
use crate::cli::server_args::{ServerArgs, format_time};
use crate::coordination::Timestamp;
use crate::text::{format_approximate_seconds, format_bytes};

/// The record of a process.
#[derive(Debug, Serialize)]
struct RecordOfProcess {
    file: String,
    pid: u32,
    /// Whether the process still runs.
    running: bool,
    started_at: Timestamp,
    job: Option<String>,
    task: Option<u32>,
    /// Whether NCCL is asked for times on the GPU.
    timed: bool,
    communicators_not_recorded: u64,
    communicators: Vec<RecordOfCommunicator>,
}

#[derive(Debug, Serialize)]
struct RecordOfCommunicator {
    clique: String,
    name: String,
    rank: u32,
    ranks: u32,
    ended: bool,
    opened_s_ago: f64,
    changed_s_ago: f64,
    collectives: u64,
    functions: Vec<RecordOfFunction>,
    latest: Option<RecordOfCollective>,
    /// The first ones that have not ended on the GPU, as far as times were asked for.
    unfinished: Vec<RecordOfCollective>,
}

#[derive(Debug, Serialize)]
struct RecordOfFunction {
    function: &'static str,
    enqueued: u64,
    begun: u64,
    ended: u64,
    bytes: u64,
    gpu_s: f64,
}

#[derive(Debug, Serialize)]
struct RecordOfCollective {
    number: u64,
    function: &'static str,
    data_type: &'static str,
    count: u64,
    bytes: u64,
    root: i32,
    enqueued_s_ago: f64,
    begun_s_ago: Option<f64>,
    ended_s_ago: Option<f64>,
}

impl RecordOfProcess {
    fn new(stored: &StoredRecord) -> Self {
        let RecordSnapshot { pid, started_unix_us, job, task, communicators_not_recorded, .. } =
            &stored.snapshot;
        Self {
            file: stored.file.display().to_string(),
            pid: *pid,
            running: stored.is_alive,
            started_at: Timestamp(*started_unix_us),
            job: job.clone(),
            task: *task,
            timed: stored.snapshot.is_timed,
            communicators_not_recorded: *communicators_not_recorded,
            communicators: stored.snapshot.communicators.iter().map(RecordOfCommunicator::new).collect(),
        }
    }
}

impl RecordOfCommunicator {
    #[expect(clippy::cast_precision_loss, reason = "a figure for people")]
    fn new(communicator: &CommunicatorSnapshot) -> Self {
        let functions = communicator.functions.iter().map(|totals| RecordOfFunction {
            function: totals.function.name(),
            enqueued: totals.enqueued,
            begun: totals.begun,
            ended: totals.ended,
            bytes: totals.bytes,
            gpu_s: totals.gpu_ns as f64 / 1e9,
        });
        Self {
            clique: clique_name(communicator.hash),
            name: communicator.name.clone(),
            rank: communicator.rank,
            ranks: communicator.ranks,
            ended: communicator.is_ended,
            opened_s_ago: communicator.opened_ago.as_secs_f64(),
            changed_s_ago: communicator.changed_ago.as_secs_f64(),
            collectives: communicator.collectives,
            functions: functions.collect(),
            latest: communicator.latest.as_ref().map(RecordOfCollective::new),
            unfinished: communicator.unfinished.iter().map(RecordOfCollective::new).collect(),
        }
    }
}

impl RecordOfCollective {
    fn new(found: &OperationSnapshot) -> Self {
        Self {
            number: found.number,
            function: found.operation.function.name(),
            data_type: found.operation.data_type.name(),
            count: found.operation.count,
            bytes: found.operation.bytes(),
            root: found.operation.root,
            enqueued_s_ago: found.enqueued_ago.as_secs_f64(),
            begun_s_ago: found.begun_ago.map(|age| age.as_secs_f64()),
            ended_s_ago: found.ended_ago.map(|age| age.as_secs_f64()),
        }
    }

    fn text(&self) -> String {
        let ago = format_approximate_seconds;
        let state = match (self.begun_s_ago, self.ended_s_ago) {
            (_, Some(ended)) => format!("ended {} ago", ago(ended)),
            (Some(begun), None) => format!("begun {} ago", ago(begun)),
            (None, None) => format!("called {} ago", ago(self.enqueued_s_ago)),
        };
        format!(
            "{} ({} of {} {}) {state}",
            self.number,
            self.function,
            format_bytes(self.bytes),
            self.data_type
        )
    }
}

/// Shows the record of a process, or of all processes of this host.
pub(super) fn run(pid: Option<u32>, server_args: &ServerArgs) -> Result<ExitCode> {
    let folder = RecordFolder::of_this_user();
    let (records, errors) = folder.read_all()?;
    for error in errors {
        print_error(format_args!("{error}"));
    }
    let is_meant = |stored: &&StoredRecord| pid.is_none_or(|pid| stored.snapshot.pid == pid);
    let found: Vec<RecordOfProcess> = records.iter().filter(is_meant).map(RecordOfProcess::new).collect();
    if found.is_empty() {
        let whose = pid.map_or_else(|| "of any process".to_owned(), |pid| format!("of process {pid}"));
        anyhow::bail!("{} has no record {whose}: did it load the plug-in?", folder.path().display());
    }
    server_args.print_answer(&found, |found| TerminalText::from_escaped_text(&records_text(found)))?;
    Ok(ExitCode::SUCCESS)
}

fn records_text(records: &[RecordOfProcess]) -> String {
    let mut text = String::new();
    for record in records {
        let whose = match (&record.job, record.task) {
            (Some(job), Some(task)) => format!(", task {task} of job {job}"),
            (None, Some(task)) => format!(", task {task}"),
            (Some(job), None) => format!(", job {job}"),
            (None, None) => String::new(),
        };
        let state = if record.running { "runs" } else { "has ended" };
        // Writing to a string cannot fail.
        let _ = writeln!(
            text,
            "process {}{whose}: {state}; started {}",
            record.pid,
            format_time(record.started_at)
        );
        for communicator in &record.communicators {
            let ended = if communicator.ended { ", ended" } else { "" };
            let _ = writeln!(
                text,
                "  clique {} rank {} of {}{ended}: {} collectives called",
                communicator.clique, communicator.rank, communicator.ranks, communicator.collectives
            );
            if let Some(latest) = &communicator.latest {
                let _ = writeln!(text, "    latest: {}", latest.text());
            }
            for unfinished in &communicator.unfinished {
                let _ = writeln!(text, "    not ended: {}", unfinished.text());
            }
        }
    }
    text.pop();
    text
}
