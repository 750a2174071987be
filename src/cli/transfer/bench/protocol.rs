//! Defines the orders and replies of the benchmark, one line of JSON each.
//!
//! Begin at `BenchOrder`, `BenchReply`.

use std::fmt;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::BenchShape;
use crate::cli::certificates::TransferCertificateArgs;
use crate::transfer::{Choice, Member, Membership, Peer, TransportKind};

/// How the engines are set up.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct EngineSetup {
    pub transport: Choice,
    pub lanes: Option<usize>,
    pub spin: Option<Duration>,
    pub checksums: bool,
    pub certificates: TransferCertificateArgs,
}

/// Which end of a pair a task is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum PairSide {
    Sender,
    Receiver,
}

impl PairSide {
    /// Of each pair the sender comes first.
    pub const fn of(number: usize) -> Self {
        if number.is_multiple_of(2) { Self::Sender } else { Self::Receiver }
    }
}

/// What a task is told to do.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub enum BenchOrder {
    /// Start an engine. The first order.
    Begin { setup: EngineSetup, here: Member, there: Member, side: PairSide },
    /// This is who lives.
    SetMembership(Membership),
    /// Prepare something small, for the first time and then so many times again.
    Prepare { again: u32 },
    /// Cut buffers and prepare them for launches.
    Allocate(BenchShape),
    /// New contents at the sender; at the receiver, anything but these.
    Fill { measurement: u64 },
    /// Launch so many times, as many at a time as were arranged.
    Move { launches: u64 },
    /// Compare what has arrived.
    Check { measurement: u64 },
    /// To and fro so many times, one at a time.
    PingPong { rounds: u64, measurement: u64 },
    /// Give the buffers back.
    Clear,
}

/// As in "it was asked …".
impl fmt::Display for BenchOrder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Begin { .. } => f.write_str("to start an engine"),
            Self::SetMembership(_) => f.write_str("to take note of the others"),
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

/// What it answers.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub enum BenchReply {
    Here(Peer),
    Done,
    /// In nanoseconds.
    Prepared {
        first: u64,
        again: Vec<u64>,
    },
    /// By the monotonic clock, in nanoseconds.
    Moved {
        began: u64,
        ended: u64,
        by: TransportKind,
    },
    /// What is wrong, if anything is.
    Checked {
        wrong: Option<String>,
    },
    /// When each of its own was launched, and when each of the other's was there, by the monotonic clock; and how long
    /// processors worked for the process meanwhile. In nanoseconds.
    Tossed {
        launched: Vec<u64>,
        arrived: Vec<u64>,
        worked: u64,
        by: TransportKind,
        wrong: Option<String>,
    },
    Failed(String),
}
