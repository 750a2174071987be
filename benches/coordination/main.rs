//! Compares Muster's coordination with jaxlib's own service and with the baseline, in one run.
//!
//!     cargo bench --bench coordination -- --only heartbeat,barrier --tasks 1024 --repeat 5
//!
//! Each repetition starts new server processes, one after the other. So a machine whose speed drifts favours no
//! server. Every answer is checked: a wrong answer ends the benchmark.

mod baseline;
mod client;
mod clock;
mod cluster;
#[path = "../../tests/harness/mod.rs"]
mod harness;
mod meter;
mod process;
mod report;
mod servers;
mod system;
mod targets;
mod wire;
mod workloads;

use std::cell::Cell;
use std::path::PathBuf;

use anyhow::{Context as _, Result, ensure};
use clap::{Parser, ValueEnum as _};

use report::Results;
use servers::{Kind, Launcher};
use workloads::{Session, Target, Work, WorkFilter};

/// Compares Muster's coordination with jaxlib's own service and with the floor.
#[derive(Debug, Parser)]
#[command(name = "coordination")]
struct Arguments {
    /// Only this work.
    #[arg(long, value_delimiter = ',')]
    only: Vec<Work>,
    /// Only these servers.
    #[arg(long, value_delimiter = ',', default_values = ["muster", "cxx", "floor"])]
    servers: Vec<Kind>,
    /// Sizes of the jobs.
    #[arg(long, value_delimiter = ',', default_values_t = [128, 1024, 4096])]
    tasks: Vec<u32>,
    /// On how many connections the tasks speak where they share them.
    #[arg(long, default_value_t = 64)]
    connections: u32,
    /// Size of the job whose memory is measured.
    #[arg(long, default_value_t = 10_000)]
    memory_tasks: u32,
    /// How often each server is given each kind of session.
    #[arg(long, default_value_t = 5)]
    repeat: u32,
    /// A fifth of the operations.
    #[arg(long)]
    quick: bool,
    /// Threads of Muster and of the floor; the default is Muster's own on the smallest machines.
    #[arg(long, default_value_t = 2)]
    threads: usize,
    /// Another build of Muster.
    #[arg(long, default_value = env!("CARGO_BIN_EXE_muster"))]
    muster: PathBuf,
    /// Compare with yet another build of Muster, such as one without the feature `metrics`.
    #[arg(long, value_name = "MUSTER")]
    against: Option<PathBuf>,
    /// The durability of Muster's answers; `none`: it keeps no journal; `kept`: as `process`, and connections go on.
    #[arg(long, value_name = "none|process|kept|host", default_value = "none")]
    durability: String,
    /// The same for the other build. It may be the same program: `--against` names it.
    #[arg(long, value_name = "none|process|kept|host", default_value = "none")]
    against_durability: String,
    /// Keep what the servers say on their standard error in this folder.
    #[arg(long)]
    logs: Option<PathBuf>,
    /// Write all figures here.
    #[arg(long)]
    json: Option<PathBuf>,
    /// Write the tables for BENCHMARKS.md here.
    #[arg(long)]
    markdown: Option<PathBuf>,
    /// Cargo says so to every benchmark.
    #[arg(long, hide = true)]
    bench: bool,
}

fn main() -> Result<()> {
    let mut arguments = std::env::args_os().skip(1);
    if arguments.next().is_some_and(|first| first == baseline::ARGUMENT) {
        return baseline::main(arguments);
    }
    let mut arguments = Arguments::parse();
    if arguments.against.is_some() {
        arguments.servers.push(Kind::Against);
    }
    let files = process::raise_file_limit();
    let wanted = WorkFilter {
        works: if arguments.only.is_empty() {
            Work::value_variants().to_vec()
        } else {
            arguments.only.clone()
        },
        quick: arguments.quick,
    };
    let plan = Session::plan(&wanted, &arguments.tasks, arguments.connections, arguments.memory_tasks);
    let most = plan.iter().map(|session| session.job().tasks).max().unwrap_or(0);
    ensure!(
        u64::from(most) + 100 < files,
        "{most} connections need more than the {files} open files allowed here (ulimit -Hn)"
    );
    if let Some(folder) = &arguments.logs {
        std::fs::create_dir_all(folder)?;
    }
    let mut results = Results::new(&arguments.servers);
    let ran = run(&arguments, &wanted, &plan, &mut results);
    // The results before a failure may explain it, so they are printed too.
    print!("{}", results.text());
    ran?;
    if let Some(path) = &arguments.json {
        std::fs::write(path, results.json()?).with_context(|| path.display().to_string())?;
    }
    if let Some(path) = &arguments.markdown {
        std::fs::write(path, results.markdown()).with_context(|| path.display().to_string())?;
    }
    Ok(())
}

fn run(arguments: &Arguments, wanted: &WorkFilter, plan: &[Session], results: &mut Results) -> Result<()> {
    let launcher = Launcher {
        muster: arguments.muster.clone(),
        against: arguments.against.clone(),
        durability: arguments.durability.clone(),
        against_durability: arguments.against_durability.clone(),
        journals: harness::TempFolder::new("muster-bench-journals"),
        journal: Cell::new(0),
        threads: arguments.threads,
        logs: arguments.logs.clone(),
    };
    let mut prices = system::MemoryCosts::default();
    for &session in plan {
        let repeat = session.repeat(arguments.repeat);
        for repetition in 0..repeat {
            if wanted.works.contains(&Work::Keys) {
                prices.measure()?;
            }
            // The first server finds the machine in the state that the one before left, so the order changes.
            let mut kinds = arguments.servers.clone();
            if repetition % 2 == 1 {
                kinds.reverse();
            }
            for kind in kinds {
                if let Some(why) = session.not_for(kind) {
                    results.note(kind, session, why);
                    continue;
                }
                eprintln!("{session}: {}, {} of {repeat}", kind.name(), repetition + 1);
                let (server, address) = launcher.start(kind, session.job())?;
                // A keeper has started the process that serves.
                let pid = server.first_child().unwrap_or_else(|| server.pid());
                let target = Target { address, pid: pid.unsigned_abs() };
                match session.run(target, wanted) {
                    Ok(figures) => results.add(kind, repetition, figures),
                    // The reference service may fail at a size for which it was not made.
                    Err(error) if kind == Kind::Cxx && matches!(session, Session::Memory { .. }) => {
                        results.note(kind, session, &format!("did not get through: {error:#}"));
                    }
                    Err(error) => {
                        let ended = server.exit_status().map(|how| format!(" (it has ended: {how})"));
                        let who = format!("{session}: {}{}", kind.name(), ended.unwrap_or_default());
                        return Err(error.context(who));
                    }
                }
            }
        }
    }
    results.remark(prices.text());
    Ok(())
}
