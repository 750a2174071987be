//! Compares Muster's transfers with the limits of the machine and with other engines, in one run.
//!
//!     benches/transfer/setup        # once: the other engines
//!     cargo bench --bench transfer -- --repeat 5 --into BENCHMARKS.md
//!     cargo bench --bench transfer -- --arrays --repeat 3 --into BENCHMARKS.md
//!     cargo bench --bench transfer -- --against OTHER_MUSTER --repeat 20
//!
//! The second command measures arrays of Python programs instead of the engine, the third compares two builds.
//!
//! Every repetition measures each subject once, one after the other, so a machine whose speed drifts favours no
//! subject. Ratios are computed within a repetition. Each subject moves the same sizes between two processes, with
//! the same number of transfers in flight, and compares the received bytes with the sent ones. An engine that is
//! not installed is reported as absent.

mod builds;
mod clock;
mod engines;
mod limits;
mod report;
mod shape;
mod suite;
mod targets;

use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context as _, Result};
use clap::Parser;

use engines::{BinaryPaths, EngineCase};
use report::Results;
use shape::Shape;
use suite::Suite;

/// Compares Muster's transfers with the limits of the machine and with other engines.
#[derive(Debug, Parser)]
#[command(name = "transfer")]
struct Arguments {
    /// Measure arrays of Python programs, in place of the engine.
    #[arg(long)]
    arrays: bool,
    /// Measure only these subjects, such as muster-tcp,tcp-2,mooncake.
    #[arg(long, value_delimiter = ',')]
    only: Vec<EngineCase>,
    /// The workloads, as SIZE:BATCH:IN_FLIGHT with the size in bytes; by default those of the tables.
    #[arg(long, value_delimiter = ',')]
    shapes: Vec<Shape>,
    /// The number of repetitions.
    #[arg(long, default_value_t = 5)]
    repeat: u32,
    /// The seconds of each measurement.
    #[arg(long, default_value_t = 0.3)]
    seconds: f64,
    /// The muster executable to measure.
    #[arg(long, default_value = env!("CARGO_BIN_EXE_muster"))]
    muster: PathBuf,
    /// Compare with this other muster executable, in place of the limits and the other engines.
    #[arg(long, value_name = "MUSTER", conflicts_with_all = ["arrays", "into"])]
    against: Option<PathBuf>,
    /// The folder in which benches/transfer/setup made the peers' environment.
    #[arg(long, env = "MUSTER_PEERS", default_value = concat!(env!("CARGO_MANIFEST_DIR"), "/target/peers"))]
    peers: PathBuf,
    /// The folder in which tests/jax/setup made the JAX environments.
    #[arg(long, env = "MUSTER_JAX_ENVS", default_value = concat!(env!("CARGO_MANIFEST_DIR"), "/target/jax"))]
    jax: PathBuf,
    /// The file to write all figures to, as JSON.
    #[arg(long)]
    json: Option<PathBuf>,
    /// The file into which the tables are put, between its two marks.
    #[arg(long)]
    into: Option<PathBuf>,
    /// Cargo passes this flag to every benchmark.
    #[arg(long, hide = true)]
    bench: bool,
}

fn main() -> Result<()> {
    let arguments = Arguments::parse();
    let suite = if arguments.arrays { Suite::ARRAYS } else { Suite::ENGINES };
    let shapes = if arguments.shapes.is_empty() { suite.shapes } else { &arguments.shapes };
    let wanted: Vec<EngineCase> = suite
        .subjects
        .iter()
        .copied()
        .filter(|subject| arguments.only.is_empty() || arguments.only.contains(subject))
        .collect();
    let places = BinaryPaths::new(&arguments.muster, &arguments.peers, &arguments.jax);
    let time = Duration::from_secs_f64(arguments.seconds);
    if let Some(other) = &arguments.against {
        let other = BinaryPaths::new(other, &arguments.peers, &arguments.jax);
        let builds = builds::Builds { new: &places, other: &other };
        let comparison = builds.compare(&wanted, shapes, arguments.repeat, time)?;
        print!("{comparison}");
        if let Some(path) = &arguments.json {
            std::fs::write(path, comparison.json()?).with_context(|| path.display().to_string())?;
        }
        return Ok(());
    }
    let mut results = Results::new(&suite, shapes);
    for repetition in 0..arguments.repeat {
        for subject in &wanted {
            eprintln!("{} of {}: {subject}", repetition + 1, arguments.repeat);
            match subject.measure(&places, shapes, time) {
                Ok(figures) => results.add(*subject, repetition, figures),
                // The peer may be missing or may have failed: the others are measured all the same.
                Err(error) => results.absent(*subject, &format!("{error:#}")),
            }
        }
    }
    let text = results.markdown(arguments.repeat, arguments.seconds);
    print!("{text}");
    if let Some(path) = &arguments.json {
        std::fs::write(path, results.json()?).with_context(|| path.display().to_string())?;
    }
    if let Some(path) = &arguments.into {
        report::replace_tables_in_file(path, &text, suite.marks)
            .with_context(|| path.display().to_string())?;
    }
    results.verify()
}
