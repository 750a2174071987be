//! Implements `muster transfer bench`: measures transfers between processes of this program on this machine.
//!
//! This process only controls the measurement. Each task of the benchmark is a child process, which receives orders
//! on its standard input and replies on its standard output. Begin at [`run`], then `controller.rs` and `peer.rs`.

mod children;
mod controller;
mod peer;
mod protocol;
mod results;

use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Result, ensure};
use clap::{Args, ValueEnum};

use crate::agent::provider_of_fabric;
use crate::cli::certificates::TransferCertificateArgs;
use crate::cli::output::{TerminalText, print, print_json_line};
use crate::host_checks::ProbedGpus;
use crate::text::parse_duration;
use crate::transfer::{CliqueChoice, TransportChoice, TransportKind};
use controller::BenchController;
use protocol::{BenchEngineSetup, BenchMemory, BenchShape};
use results::{Repetition, SizeResult};

pub use peer::{PeerArguments, run_bench_peer};
pub use protocol::PEER;

/// Measure transfers between processes of this machine
///
/// Pairs of processes move buffers from one to the other: as many as fit, prepared once and launched again and again
/// (throughput), and one at a time, to and fro (latency). With `--unprepared` nothing is prepared. Before and after each measurement the contents are made anew,
/// and compared byte for byte when they have arrived; the exit status is 1 if any byte was not what was sent.
///
/// Latency is reported twice: `one way` is from the launch at the sender until the receiver's thread goes on, by the
/// monotonic clock that all processes of a host share; `half round trip` is half of the time from a launch until the
/// answer to it is there.
#[derive(Debug, Args)]
#[command(after_long_help = EXAMPLES)]
pub struct Arguments {
    /// The transport
    #[arg(long, value_enum, default_value_t = TransportArg::Auto)]
    transport: TransportArg,

    /// Read the other process's memory over a fabric: the name of a provider of libfabric, such as verbs;ofi_rxm, or
    /// `auto` for the library's first choice. It is used with TCP
    #[arg(long, value_name = "PROVIDER")]
    fabric: Option<String>,

    /// Move bytes between GPUs through NCCL (with --memory gpu): `off`, `auto` with TCP, or `always`
    #[arg(long, value_name = "WHERE", default_value = "off")]
    cliques: CliqueChoice,

    /// Sizes of the buffers, such as 4KiB,1MiB
    #[arg(long, value_delimiter = ',', value_parser = parse_byte_count, value_name = "SIZE",
        default_values = ["4KiB", "64KiB", "1MiB", "16MiB"])]
    size: Vec<usize>,

    /// Pairs of processes that move buffers at the same time
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=64))]
    pairs: u32,

    /// Buffers moved by one launch: small ones travel together
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=65536))]
    batch: u32,

    /// Launches under way at a time; the default depends on the size
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..=1024))]
    in_flight: Option<u32>,

    /// Only latency, one transfer at a time
    #[arg(long)]
    latency: bool,

    /// Request each transfer anew, and receive it into a buffer that is allocated for it, in place of transfers that are
    /// prepared once
    #[arg(long)]
    unprepared: bool,

    /// The memory of the buffers
    #[arg(long, value_enum, default_value_t = BenchMemory::Host)]
    memory: BenchMemory,

    /// Whether chunks on TCP carry checksums
    #[arg(long, value_enum, default_value_t = OnOffArg::On)]
    checksums: OnOffArg,

    /// TCP connections of a pair that carry contents; the default is that of the engine
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..=64))]
    lanes: Option<u32>,

    /// How long a thread that waits for a small message within a host polls before it sleeps; the default is
    /// that of the engine
    #[arg(long, value_name = "DURATION", value_parser = parse_duration)]
    spin: Option<Duration>,

    #[command(flatten)]
    certificates: TransferCertificateArgs,

    /// The number of measurements of each size
    #[arg(long, default_value_t = 3, value_parser = clap::value_parser!(u32).range(1..=1000))]
    repeat: u32,

    /// The duration of each measurement
    #[arg(long, default_value_t = 0.5)]
    seconds: f64,

    /// Print one line of JSON for each size
    #[arg(long)]
    json: bool,

    /// How long a task may take to answer, beyond the time of the measurement and of its buffers
    #[arg(long, hide = true, value_name = "DURATION", default_value = "30s", value_parser = parse_duration)]
    grace: Duration,
}

const EXAMPLES: &str = "\
Examples:
  muster transfer bench
  muster transfer bench --transport tcp --size 4KiB --batch 256
  muster transfer bench --transport tcp --size 16MiB --checksums off --lanes 2
  muster transfer bench --transport tcp --transfer-cert server.pem --transfer-key server-key.pem --transfer-ca ca.pem
  muster transfer bench --memory gpu --transport tcp --size 16MiB
  muster transfer bench --transport tcp --fabric 'verbs;ofi_rxm' --size 16MiB
  muster transfer bench --size 4KiB --latency --json | jq '{p50_us, p99_us}'";

#[derive(Debug, Clone, Copy, ValueEnum)]
enum TransportArg {
    /// The best that both sides can
    Auto,
    /// Memory that both processes map
    Shm,
    /// Memory of the other process, through the kernel
    Pvm,
    /// A Unix socket
    Unix,
    /// TCP, over the loopback interface
    Tcp,
}

impl From<TransportArg> for TransportChoice {
    fn from(transport: TransportArg) -> Self {
        match transport {
            TransportArg::Auto => Self::Auto,
            TransportArg::Shm => Self::Shm,
            TransportArg::Pvm => Self::Pvm,
            TransportArg::Unix => Self::Unix,
            TransportArg::Tcp => Self::Tcp,
        }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum OnOffArg {
    On,
    Off,
}

/// The default time that a task has to answer, beyond the time of its work.
const REPLY_GRACE: Duration = Duration::from_secs(30);

/// The maximum memory of one task of the benchmark, in bytes.
const MEMORY_MAX: usize = 16 << 30;

/// Parses a number of bytes such as `4096`, `4KiB`, `1MiB`, `1GiB`.
fn parse_byte_count(text: &str) -> Result<usize, String> {
    let units = [("KiB", 10), ("MiB", 20), ("GiB", 30), ("B", 0), ("", 0)];
    let (number, shift) = units
        .iter()
        .find_map(|(unit, shift)| text.strip_suffix(unit).map(|number| (number, *shift)))
        .unwrap_or((text, 0));
    let number: usize =
        number.trim().parse().map_err(|_| "give bytes, or KiB, MiB or GiB, such as 4KiB".to_owned())?;
    let bytes = number.checked_mul(1 << shift).filter(|bytes| (1..=MEMORY_MAX / 4).contains(bytes));
    bytes.ok_or_else(|| format!("between 1 B and {} GiB", (MEMORY_MAX / 4) >> 30))
}

/// Runs the subcommand.
pub fn run(arguments: &Arguments) -> Result<ExitCode> {
    ensure!(
        arguments.seconds > 0.0 && arguments.seconds <= 3600.0,
        "--seconds must be more than 0 and at most 3600"
    );
    ensure!(
        arguments.memory == BenchMemory::Host || !arguments.unprepared,
        "--unprepared receives into memory of the host: leave out --memory gpu"
    );
    let mut verified = true;
    let shapes =
        arguments.size.iter().map(|size| choose_shape(arguments, *size)).collect::<Result<Vec<_>>>()?;
    let setup = BenchEngineSetup {
        transport: arguments.transport.into(),
        fabric: arguments.fabric.as_deref().map(provider_of_fabric),
        cliques: arguments.cliques,
        lanes: arguments.lanes.map(|lanes| lanes as usize),
        spin: arguments.spin,
        checksums: arguments.checksums == OnOffArg::On,
        unprepared: arguments.unprepared,
        memory: arguments.memory,
        certificates: arguments.certificates.clone(),
    };
    let mut tasks = BenchController::start(arguments.pairs, &setup, arguments.grace)?;
    let prepares = tasks.measure_preparations()?;
    if !arguments.json {
        print(&TerminalText::from_escaped_text(&results::heading_text(&prepares)))?;
    }
    for shape in shapes {
        let repetitions = run_repetitions(&mut tasks, arguments, shape)?;
        let figures = SizeResult::new(arguments.pairs, &setup, shape, &prepares, &repetitions);
        verified &= figures.verified;
        if arguments.json {
            print_json_line(&figures)?;
        } else {
            print(&TerminalText::from_escaped_text(&figures.to_string()))?;
        }
    }
    Ok(if verified { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// Returns the transport that two processes of this host use for this choice.
pub fn probe_transport(transport: TransportChoice) -> Result<TransportKind> {
    let mut tasks = start_probe(transport, BenchMemory::Host)?;
    move_trial_bytes(&mut tasks)
}

/// Moves bytes between the memory of GPUs of two processes. Returns the GPUs of one of them.
pub fn probe_gpu_memory() -> Result<ProbedGpus> {
    let mut tasks = start_probe(TransportChoice::Auto, BenchMemory::Gpu)?;
    move_trial_bytes(&mut tasks)?;
    tasks.describe_gpus()
}

fn start_probe(transport: TransportChoice, memory: BenchMemory) -> Result<BenchController> {
    let certificates = TransferCertificateArgs::default();
    let setup = BenchEngineSetup {
        transport,
        fabric: None,
        cliques: CliqueChoice::Off,
        lanes: None,
        spin: None,
        checksums: true,
        unprepared: false,
        memory,
        certificates,
    };
    BenchController::start(1, &setup, REPLY_GRACE)
}

fn move_trial_bytes(tasks: &mut BenchController) -> Result<TransportKind> {
    // Larger than the data that an announcement carries inline.
    let shape = BenchShape { size: 1 << 20, batch: 1, in_flight: 2 };
    tasks.allocate_buffers(shape)?;
    let (by, wrong) = tasks.run_trial_launches()?;
    ensure!(wrong.is_none(), "wrong contents: {}", wrong.unwrap_or_default());
    Ok(by)
}

fn choose_shape(arguments: &Arguments, size: usize) -> Result<BenchShape> {
    // Enough to hide the cost of a launch, and small enough for the caches.
    const BYTES_IN_FLIGHT: usize = 4 << 20;
    let batch = arguments.batch as usize;
    let in_flight = arguments.in_flight.map_or_else(
        || (BYTES_IN_FLIGHT / size.saturating_mul(batch).max(1)).clamp(2, 16),
        |given| given as usize,
    );
    let shape = BenchShape { size, batch, in_flight };
    ensure!(
        shape.memory_bytes() <= MEMORY_MAX,
        "{batch} x {size} bytes, {in_flight} at a time, are more than {} GiB",
        MEMORY_MAX >> 30
    );
    Ok(shape)
}

fn run_repetitions(
    tasks: &mut BenchController,
    arguments: &Arguments,
    shape: BenchShape,
) -> Result<Vec<Repetition>> {
    let time = Duration::from_secs_f64(arguments.seconds);
    tasks.allocate_buffers(shape)?;
    let repetitions = (0..arguments.repeat)
        .map(|_| {
            let moved = if arguments.latency { None } else { Some(tasks.measure_throughput(shape, time)?) };
            Ok(Repetition { moved, delays: tasks.measure_latency(time)? })
        })
        .collect();
    tasks.free_buffers()?;
    repetitions
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_read_with_their_units() {
        assert_eq!(parse_byte_count("4KiB"), Ok(4096));
        assert_eq!(parse_byte_count("1 MiB"), Ok(1 << 20));
        assert_eq!(parse_byte_count("17"), Ok(17));
        assert_eq!(parse_byte_count("17B"), Ok(17));
        for wrong in
            ["", "0", "KiB", "4KB", "-1", "99999999999999999999GiB", "5GiB", "18446744073709551615KiB"]
        {
            assert!(parse_byte_count(wrong).is_err(), "{wrong}");
        }
    }
}
