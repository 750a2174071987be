//! Measures how well a server serves a well-behaved client while hostile clients attack it.
//!
//! For each attack, the benchmark starts a real `muster serve` and two further processes: the well-behaved client
//! and the attacker. The client sends heartbeats at a steady rate and asks for the server's health. All processes
//! use the loopback interface, and every attack is bounded in connections and in time. The measurement begins with
//! the attack and ends ten seconds after it.
//!
//!     cargo bench --bench attacks -- --seconds 60
//!     cargo bench --bench attacks -- --only hpack-names --binary target/debug/muster --into attacks.md

mod attack;
mod client;
mod clock;
mod frames;
#[path = "../../tests/harness/mod.rs"]
mod harness;
mod process;
mod report;
mod server;

use std::io::Write as _;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use clap::Parser;

use attack::{ATTACKS, Attack, Outcome};
use client::AttackFigures;
use harness::MusterServer;
use process::start_part;
use report::Row;
use server::{Memory, Server};

/// Measures what hostile clients achieve.
#[derive(Debug, Parser)]
#[command(name = "attacks")]
struct Arguments {
    /// How long each attack goes on, in seconds.
    #[arg(long, default_value_t = 20)]
    seconds: u64,
    /// Make only these attacks.
    #[arg(long, value_name = "NAME")]
    only: Vec<String>,
    /// The program to attack, instead of this build.
    #[arg(long, value_name = "PATH")]
    binary: Option<PathBuf>,
    /// Write the table to this file as well.
    #[arg(long, value_name = "FILE")]
    into: Option<PathBuf>,
    /// Say what the attacks are, and make none.
    #[arg(long)]
    list: bool,
    /// Cargo says so to every benchmark.
    #[arg(long, hide = true)]
    bench: bool,
    /// Be the client or an attacker.
    #[command(subcommand)]
    part: Option<PartArguments>,
}

/// The roles of this benchmark's processes.
#[derive(Debug, clap::Subcommand)]
enum PartArguments {
    /// The well-behaved client.
    #[command(hide = true)]
    Client(Target),
    /// The attacker.
    #[command(hide = true)]
    Attacker {
        /// The name of the attack.
        name: String,
        #[command(flatten)]
        target: Target,
    },
}

/// The attacked server, and the duration of the attack.
#[derive(Debug, Clone, clap::Args)]
struct Target {
    /// Where it speaks gRPC.
    grpc: SocketAddr,
    /// Where it speaks HTTP.
    http: SocketAddr,
    /// How long the attack goes on, in seconds.
    seconds: u64,
    /// Whether the client also stores large values.
    #[arg(long)]
    stores: bool,
}

/// The time before the first measurement.
const WARM_UP: Duration = Duration::from_secs(2);
/// The time after an attack within which the memory must be free again.
const AFTER: Duration = Duration::from_secs(10);
/// The timeout of an attacker's preparation.
const PREPARE_MAX: Duration = Duration::from_secs(120);
/// The timeout of an attacker's stop.
const STOP_MAX: Duration = Duration::from_secs(20);

fn main() -> Result<ExitCode> {
    let arguments = Arguments::parse();
    match arguments.part {
        Some(PartArguments::Client(target)) => return client::run(&target).map(|()| ExitCode::SUCCESS),
        Some(PartArguments::Attacker { name, target }) => {
            return attack::run(find(&name)?, &target).map(|()| ExitCode::SUCCESS);
        }
        None => {}
    }
    if arguments.list {
        for attack in &ATTACKS {
            println!("{:<20} {}", attack.name, attack.what);
        }
        return Ok(ExitCode::SUCCESS);
    }
    let chosen = if arguments.only.is_empty() {
        ATTACKS.iter().collect()
    } else {
        arguments.only.iter().map(|name| find(name)).collect::<Result<Vec<_>>>()?
    };
    let binary = arguments.binary.clone().unwrap_or_else(|| env!("CARGO_BIN_EXE_muster").into());
    let mut rows = Vec::new();
    for attack in chosen {
        let row = measure(attack, &binary, arguments.seconds).with_context(|| attack.name)?;
        writeln!(std::io::stderr(), "{}", row.short())?;
        rows.push(row);
    }
    let text = report::table(&rows, arguments.seconds);
    println!("{text}");
    if let Some(file) = &arguments.into {
        std::fs::write(file, &text).with_context(|| format!("writing {}", file.display()))?;
    }
    let met = rows.iter().all(|row| row.misses().is_empty());
    Ok(if met { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

fn find(name: &str) -> Result<&'static Attack> {
    ATTACKS.iter().find(|attack| attack.name == name).with_context(|| format!("no attack {name}; see --list"))
}

/// Attacks a fresh server.
fn measure(attack: &'static Attack, binary: &std::path::Path, seconds: u64) -> Result<Row> {
    let attacked = Server::start(binary, attack)?;
    let MusterServer { grpc, http, .. } = attacked.server;
    let target = Target { grpc, http, seconds, stores: attack.stores };
    let mut client = start_part(&["client"], &target)?;
    client.expect("ready", PREPARE_MAX)?;
    let mut attacker = start_part(&["attacker", attack.name], &target)?;
    attacker.expect("ready", PREPARE_MAX)?;
    std::thread::sleep(WARM_UP);

    let before = attacked.memory()?;
    let watch = attacked.watch_memory();
    client.say("begin")?;
    attacker.say("begin")?;
    let length = Duration::from_secs(seconds);
    std::thread::sleep(length);
    let told: Outcome = attacker.answer(STOP_MAX).unwrap_or_else(|error| Outcome::broken(&error));
    drop(attacker);
    let over = clock::now();
    // Work that the attack leaves behind may delay the client after its end, so that counts too.
    std::thread::sleep(AFTER / 5);
    client.say("end")?;
    let figures: AttackFigures = client.answer(STOP_MAX).context("the well-behaved client")?;
    drop(client);
    std::thread::sleep(AFTER.saturating_sub(over.elapsed()));
    let died = attacked.has_ended();
    let after = attacked.memory().unwrap_or_default();
    let memory = Memory { before, peak: watch.peak().max(before), after };
    ensure!(figures.heartbeats > 0 || died.is_some(), "the client has sent nothing");
    Ok(Row { attack, figures, memory, told, died })
}
