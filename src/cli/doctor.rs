//! Implements `muster doctor`: probes the host and prints the checks.
//!
//! The checks are in `host_checks`. Begin at `run`.

use std::process::ExitCode;

use anyhow::Result;
use clap::Args;
use muster_gpu::health_of_all_gpus;
use rustix::fs::{MemfdFlags, SealFlags};

use super::output::{TerminalText, print, print_json};
use super::transfer;
use crate::host_checks::{CheckState, HostCheck, HostRoot, ProbeResults, check_host};
use crate::proto::muster::v1 as wire;
use crate::text::escape_to_one_line;
use crate::transfer::{TransportChoice, TransportKind};

/// Show what this host offers for fast transfers, what it lacks, and how to improve it
///
/// It reads the settings of the kernel, and tests what they do not tell: two processes of this program move
/// bytes by shared memory, by reading each other's memory, and between GPUs. Nothing is changed, and the exit
/// status is 0 whatever it finds.
#[derive(Debug, Args)]
#[command(after_long_help = EXAMPLES)]
pub struct Arguments {
    /// Print JSON
    #[arg(long)]
    json: bool,

    /// Leave out good results
    #[arg(long)]
    brief: bool,
}

const EXAMPLES: &str = "\
Examples:
  muster doctor
  muster doctor --json | jq -r '.[] | select(.state != \"good\") | .fix // empty'";

/// Runs the subcommand.
pub fn run(arguments: &Arguments) -> Result<ExitCode> {
    let checks = check_host(&HostRoot::default(), &run_probes());
    let shown: Vec<_> =
        checks.iter().filter(|check| !arguments.brief || check.state != CheckState::Good).collect();
    if arguments.json {
        print_json(&shown)?;
    } else {
        let mut text = checks_text(&shown);
        text.add_line(summary_text(&checks));
        print(&text)?;
    }
    Ok(ExitCode::SUCCESS)
}

/// Checks this host for the reports of a worker.
pub(super) fn host_checks_to_report() -> wire::HostChecks {
    let checks = check_host(&HostRoot::default(), &run_probes());
    let (good, found): (Vec<HostCheck>, Vec<HostCheck>) =
        checks.into_iter().partition(|check| check.state == CheckState::Good);
    let row = |check: HostCheck| wire::HostCheck {
        id: check.id.to_owned(),
        title: check.title.to_owned(),
        state: if check.state == CheckState::Missing { "missing" } else { "could_be_better" }.to_owned(),
        found: check.found,
        fix: check.fix.unwrap_or_default(),
    };
    let good = u32::try_from(good.len()).unwrap_or(u32::MAX);
    wire::HostChecks { good, found: found.into_iter().map(row).collect() }
}

/// Runs the probes that need processes.
fn run_probes() -> ProbeResults {
    let moved = |choice, wanted: TransportKind| match transfer::probe_transport(choice) {
        Ok(by) if by == wanted => Ok(()),
        Ok(by) => Err(format!("the bytes went by {by}")),
        Err(error) => Err(escape_to_one_line(&format!("{error:#}")).into_owned()),
    };
    ProbeResults {
        dev_shm: rustix::fs::statvfs("/dev/shm").ok().map(|fs| fs.f_blocks.saturating_mul(fs.f_frsize)),
        memory_file: probe_sealed_memfd().map_err(|error| error.to_string()),
        shared_memory: moved(TransportChoice::Shm, TransportKind::Shm),
        process_memory: moved(TransportChoice::Pvm, TransportKind::Pvm),
        gpu_memory: transfer::probe_gpu_memory()
            .map_err(|error| escape_to_one_line(&format!("{:#}", error.root_cause())).into_owned()),
        fabric: probe_fabric(),
        gpu_health: health_of_all_gpus().map_err(|error| escape_to_one_line(&error).into_owned()),
        library_path: std::env::var("LD_LIBRARY_PATH").unwrap_or_default(),
    }
}

/// Returns the providers of libfabric, if the host has RDMA devices: the library of a provider may install signal handlers, so
/// it is not loaded in vain.
fn probe_fabric() -> Result<Vec<String>, String> {
    if std::fs::read_dir("/sys/class/infiniband").is_ok_and(|devices| devices.count() > 0) {
        let found = muster_fabric::providers()
            .map_err(|error| escape_to_one_line(&error.to_string()).into_owned())?;
        return Ok(found.into_iter().map(|provider| provider.provider).collect());
    }
    Ok(Vec::new())
}

fn probe_sealed_memfd() -> rustix::io::Result<()> {
    let file = rustix::fs::memfd_create("muster-doctor", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?;
    // Only the size is set: no page is allocated.
    rustix::fs::ftruncate(&file, 1 << 30)?;
    rustix::fs::fcntl_add_seals(&file, SealFlags::SHRINK | SealFlags::GROW | SealFlags::FUTURE_WRITE)
}

fn checks_text(checks: &[&HostCheck]) -> TerminalText {
    let mut out = TerminalText::default();
    for check in checks {
        let state = match check.state {
            CheckState::Good => "good",
            CheckState::CouldBeBetter => "could be better",
            CheckState::Missing => "missing",
        };
        out.add_line(format!("{state:<16} {}: {}", check.title, check.found));
        if check.state != CheckState::Good {
            out.add_line(format!("{:<16}   why: {}", "", check.why));
            if let Some(fix) = &check.fix {
                out.add_line(format!("{:<16}   fix: {fix}", ""));
            }
            if let Some(because) = check.nothing_to_do {
                out.add_line(format!("{:<16}   nothing to do, because {because}", ""));
            }
        }
    }
    out
}

fn summary_text(checks: &[HostCheck]) -> String {
    let count = |state| checks.iter().filter(|check| check.state == state).count();
    let (good, better, missing) =
        (count(CheckState::Good), count(CheckState::CouldBeBetter), count(CheckState::Missing));
    format!("{good} good, {better} could be better, {missing} missing")
}
