//! Defines the orders that the benchmark sends to its processes, and the replies of the processes. Each order and
//! each reply is one line of JSON.
//!
//! Begin at `BenchOrder` and `BenchReply`.

use std::fmt;
use std::time::Duration;

use clap::ValueEnum;
use serde::{Deserialize, Serialize};

use crate::cli::certificates::TransferCertificateArgs;
use crate::host_checks::ProbedGpus;
use crate::transfer::{CliqueChoice, MemberId, MemberInfo, Membership, TransportChoice, TransportKind};

/// The hidden subcommand that runs a task of the benchmark.
pub const PEER: &str = "bench-peer";

/// The buffers of each launch, and the number of launches in progress.
#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
pub struct BenchShape {
    pub size: usize,
    pub batch: usize,
    pub in_flight: usize,
}

impl BenchShape {
    /// Returns the minimum distance between the buffers of a batch, which keeps them from being merged into
    /// one large buffer.
    pub fn buffer_stride(self) -> usize {
        const GAP: usize = 64;
        if self.batch > 1 { self.size + GAP } else { self.size }
    }

    /// Returns the memory of a task in bytes: the launches in progress, and two more for each direction of
    /// the latency measurement.
    pub fn memory_bytes(self) -> usize {
        const PAGE: usize = 4096;
        let one = self.buffer_stride().next_multiple_of(PAGE).saturating_mul(self.batch);
        one.saturating_mul(self.in_flight + 4).saturating_add(1 << 20)
    }
}

/// The configuration of the engines.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct BenchEngineSetup {
    pub transport: TransportChoice,
    /// The provider of the fabric, if one is to be used.
    pub fabric: Option<String>,
    /// Where bytes between GPUs move through a clique.
    pub cliques: CliqueChoice,
    pub lanes: Option<usize>,
    pub spin: Option<Duration>,
    pub checksums: bool,
    /// Each transfer is requested anew, and received into a buffer that is allocated for it.
    pub unprepared: bool,
    pub memory: BenchMemory,
    pub certificates: TransferCertificateArgs,
}

/// The memory of the buffers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ValueEnum)]
#[serde(rename_all = "lowercase")]
pub enum BenchMemory {
    /// Memory of the host
    Host,
    /// Memory of a GPU: the tasks use the GPUs of this host in turn
    Gpu,
}

/// The end of a pair that a task is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum PairSide {
    Sender,
    Receiver,
}

impl PairSide {
    /// Returns the side of a task: in each pair the sender comes first.
    pub const fn of_task(number: usize) -> Self {
        if number.is_multiple_of(2) { Self::Sender } else { Self::Receiver }
    }
}

/// An order to a task.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub enum BenchOrder {
    /// Starts an engine. The first order.
    Begin { setup: BenchEngineSetup, here: MemberId, there: MemberId, side: PairSide },
    /// Sets the membership.
    SetMembership(Membership),
    /// Describes the GPUs of this host.
    DescribeGpus,
    /// Prepares a small transfer once, and then this many times again.
    Prepare { again: u32 },
    /// Allocates buffers and prepares their launches.
    Allocate(BenchShape),
    /// Writes new contents at the sender, and other bytes at the receiver.
    Fill { measurement: u64 },
    /// Launches this many times, with as many in progress as the shape says.
    Move { launches: u64 },
    /// Compares the contents that have arrived.
    Check { measurement: u64 },
    /// Runs this many round trips, one at a time.
    PingPong { rounds: u64, measurement: u64 },
    /// Frees the buffers.
    Clear,
}

/// Completes a sentence such as "it was asked …".
impl fmt::Display for BenchOrder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Begin { .. } => f.write_str("to start an engine"),
            Self::SetMembership(_) => f.write_str("to take note of the others"),
            Self::DescribeGpus => f.write_str("to describe the GPUs"),
            Self::Prepare { again } => write!(f, "to prepare a transfer {} times", u64::from(*again) + 1),
            Self::Allocate(shape) => {
                write!(f, "to cut and prepare buffers of {} x {} bytes", shape.batch, shape.size)
            }
            Self::Fill { .. } => f.write_str("to fill its buffers"),
            Self::Move { launches } => write!(f, "to launch {launches} times"),
            Self::Check { .. } => f.write_str("to compare what has arrived"),
            Self::PingPong { rounds, .. } => write!(f, "to move a buffer to and fro {rounds} times"),
            Self::Clear => f.write_str("to give its buffers back"),
        }
    }
}

/// A reply of a task.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub enum BenchReply {
    Here(MemberInfo),
    Done,
    Gpus(ProbedGpus),
    /// Durations in nanoseconds.
    Prepared {
        first: u64,
        again: Vec<u64>,
    },
    /// Times of the monotonic clock, in nanoseconds.
    Moved {
        began: u64,
        ended: u64,
        by: TransportKind,
    },
    /// The first error in the contents, if any.
    Checked {
        wrong: Option<String>,
    },
    /// The times of its own launches and of the other's arrivals, by the monotonic clock, the time that each
    /// call of `launch` took, and the CPU time of the process meanwhile, all in nanoseconds.
    Tossed {
        launched: Vec<u64>,
        arrived: Vec<u64>,
        calls: Vec<u64>,
        worked: u64,
        by: TransportKind,
        wrong: Option<String>,
    },
    Failed(String),
}
