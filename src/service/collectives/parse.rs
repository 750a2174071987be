//! Decodes and checks a report: refuses lists that are too long, and maps every name to the known ones.
//!
//! `report_store.rs` keeps reports. Begin at [`ProcessCollectives::parse`].

use std::time::Duration;

use muster_collectives::ras::{NOTABLE_RANKS_MAX, RasCommunicator, RasRank, RasRankState};
use muster_collectives::{Collective, CollectiveFunction, DataType};
use prost::Message as _;

use super::{
    COMMUNICATORS_MAX, FUNCTIONS_MAX, OPERATIONS_MAX, RANKS_MAX, RAS_COMMUNICATORS_MAX, REPORT_BYTES_MAX,
};
use crate::coordination::{Code, Failure, Timestamp};
use crate::proto::MessageFields;
use crate::proto::muster::v1 as pb;
use crate::text::{escape_to_one_line, truncate_text};

/// The characters of a name that are kept.
const NAME_LENGTH_MAX: usize = 64;
/// The characters of an error of RAS that are kept.
const ERROR_LENGTH_MAX: usize = 200;
/// The numbers of the lists in the messages, and of what RAS says.
const COMMUNICATORS_TAG: u32 = 8;
const FUNCTIONS_TAG: u32 = 8;
const OPERATIONS_TAG: u32 = 9;
const RAS_TAG: u32 = 9;
const RAS_COMMUNICATORS_TAG: u32 = 3;
const RAS_NOTABLE_TAG: u32 = 6;

/// The reason why a report is refused. A refused report changes nothing.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum CollectiveReportError {
    /// It exceeds the maximum length.
    #[error("a report of {0} bytes: {REPORT_BYTES_MAX} is the most")]
    TooLong(usize),
    /// It is no valid message.
    #[error("the report cannot be read: {0}")]
    Unreadable(String),
    /// A list in it is too long.
    #[error("the report has more than {most} {what}")]
    TooMany {
        /// The list.
        what: &'static str,
        /// Its maximum length.
        most: usize,
    },
    /// A communicator has an impossible rank.
    #[error(
        "a communicator of {ranks} ranks with rank {rank}: the rank is below the number of ranks, which is at most {RANKS_MAX}"
    )]
    NoSuchRank {
        /// The rank.
        rank: u32,
        /// The number of ranks.
        ranks: u32,
    },
    /// The job does not exist.
    #[error("there is no such job any more")]
    NoSuchJob,
    /// There is no room for another process.
    #[error("there is no room for the report of another process of this job")]
    NoRoom,
}

impl From<CollectiveReportError> for Failure {
    fn from(refusal: CollectiveReportError) -> Self {
        let code = match &refusal {
            CollectiveReportError::TooLong(_)
            | CollectiveReportError::TooMany { .. }
            | CollectiveReportError::NoRoom => Code::ResourceExhausted,
            CollectiveReportError::Unreadable(_) | CollectiveReportError::NoSuchRank { .. } => {
                Code::InvalidArgument
            }
            CollectiveReportError::NoSuchJob => Code::NotFound,
        };
        Self::without_details(code, refusal.to_string())
    }
}

/// A report of one process.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct ProcessCollectives {
    pub process: u64,
    pub sequence: u64,
    pub pid: u32,
    pub host: String,
    pub task: Option<u32>,
    pub is_timed: bool,
    pub communicators_not_recorded: u64,
    pub communicators: Vec<ReportedCommunicator>,
    pub ras: Option<ReportedRas>,
}

/// The answer of RAS, NCCL's own monitoring, to a process.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct ReportedRas {
    pub nccl_version: String,
    /// Why it gave no answer; empty if it did.
    pub error: String,
    pub communicators: Vec<RasCommunicator>,
}

impl ReportedRas {
    /// Returns about its memory.
    pub fn bytes(&self) -> usize {
        let of_rank = |rank: &RasRank| size_of::<RasRank>() + rank.host.len();
        let of_communicator = |it: &RasCommunicator| {
            size_of::<RasCommunicator>() + it.notable.iter().map(of_rank).sum::<usize>()
        };
        let of_communicators = self.communicators.iter().map(of_communicator).sum::<usize>();
        size_of::<Self>() + self.nccl_version.len() + self.error.len() + of_communicators
    }
}

/// One rank's side of a clique.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct ReportedCommunicator {
    pub hash: u64,
    pub rank: u32,
    pub ranks: u32,
    pub nodes: u32,
    pub name: String,
    pub changed_at: Timestamp,
    /// The number of collectives that were enqueued.
    pub collectives: u64,
    pub functions: Vec<ReportedFunction>,
    /// In the order of their numbers.
    pub operations: Vec<ReportedCollective>,
}

/// The totals of a function.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct ReportedFunction {
    pub function: CollectiveFunction,
    pub enqueued: u64,
    pub bytes: u64,
    /// The number of those whose time on the GPU is known.
    pub timed: u64,
    pub timed_bytes: u64,
    pub gpu_ns: u64,
}

/// A collective of which times are known. Times are those of the service, at which the report came.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct ReportedCollective {
    pub number: u64,
    pub operation: Collective,
    pub chain: u64,
    pub is_timed: bool,
    pub enqueued_at: Timestamp,
    pub begun_at: Option<Timestamp>,
    pub ended_at: Option<Timestamp>,
}

impl ProcessCollectives {
    /// Decodes and checks a report that came at `now`.
    ///
    /// # Errors
    /// If it cannot be read, has too much, or a rank that cannot be.
    pub fn parse(message: &[u8], now: Timestamp) -> Result<Self, CollectiveReportError> {
        if message.len() > REPORT_BYTES_MAX {
            return Err(CollectiveReportError::TooLong(message.len()));
        }
        check_list_lengths(message)?;
        let report = pb::CollectivesReport::decode(message)
            .map_err(|error| CollectiveReportError::Unreadable(error.to_string()))?;
        let communicators = report.communicators.into_iter().map(|it| parse_communicator(it, now));
        Ok(Self {
            process: report.process,
            sequence: report.sequence,
            pid: report.pid,
            host: short_name(&report.host),
            task: report.task,
            is_timed: report.timing,
            communicators_not_recorded: report.communicators_not_recorded,
            communicators: communicators.collect::<Result<_, _>>()?,
            ras: report.ras.map(parse_ras),
        })
    }
}

/// Refuses lists that are too long before memory is allocated for them: an empty row takes two bytes of a message.
fn check_list_lengths(message: &[u8]) -> Result<(), CollectiveReportError> {
    let mut communicators = 0;
    for communicator in nested_messages(message, COMMUNICATORS_TAG) {
        let communicator = communicator?;
        communicators += 1;
        for (length, what, most) in [
            (communicators, "communicators", COMMUNICATORS_MAX),
            (count_nested(communicator, FUNCTIONS_TAG)?, "functions of a communicator", FUNCTIONS_MAX),
            (count_nested(communicator, OPERATIONS_TAG)?, "collectives of a communicator", OPERATIONS_MAX),
        ] {
            refuse_above(length, what, most)?;
        }
    }
    let mut ras_communicators = 0;
    for ras in nested_messages(message, RAS_TAG) {
        for communicator in nested_messages(ras?, RAS_COMMUNICATORS_TAG) {
            ras_communicators += 1;
            refuse_above(ras_communicators, "communicators of RAS", RAS_COMMUNICATORS_MAX)?;
            let notable = count_nested(communicator?, RAS_NOTABLE_TAG)?;
            refuse_above(notable, "ranks of a communicator of RAS", NOTABLE_RANKS_MAX)?;
        }
    }
    Ok(())
}

fn refuse_above(length: usize, what: &'static str, most: usize) -> Result<(), CollectiveReportError> {
    if length > most { Err(CollectiveReportError::TooMany { what, most }) } else { Ok(()) }
}

fn count_nested(message: &[u8], tag: u32) -> Result<usize, CollectiveReportError> {
    nested_messages(message, tag).try_fold(0, |count, row| row.map(|_| count + 1))
}

/// Returns the nested messages with this number.
fn nested_messages(
    message: &[u8],
    wanted: u32,
) -> impl Iterator<Item = Result<&[u8], CollectiveReportError>> {
    MessageFields::new(message).filter_map(move |field| match field {
        Ok(field) => field.contents.filter(|_| field.tag == wanted).map(Ok),
        Err(error) => Some(Err(CollectiveReportError::Unreadable(error.to_string()))),
    })
}

fn parse_communicator(
    report: pb::CommunicatorReport,
    now: Timestamp,
) -> Result<ReportedCommunicator, CollectiveReportError> {
    let pb::CommunicatorReport { hash, rank, ranks, nodes, name, changed_us, collectives, .. } = report;
    if rank >= ranks || ranks > RANKS_MAX {
        return Err(CollectiveReportError::NoSuchRank { rank, ranks });
    }
    let functions = report.functions.iter().map(|row| ReportedFunction {
        function: CollectiveFunction::from_name(row.function.as_bytes()),
        enqueued: row.enqueued,
        bytes: row.bytes,
        timed: row.timed,
        timed_bytes: row.timed_bytes,
        gpu_ns: row.gpu_ns,
    });
    let mut operations: Vec<ReportedCollective> =
        report.operations.iter().map(|row| parse_collective(row, now)).collect();
    operations.sort_by_key(|operation| operation.number);
    operations.dedup_by_key(|operation| operation.number);
    Ok(ReportedCommunicator {
        hash,
        rank,
        ranks,
        nodes,
        name: short_name(&name),
        changed_at: before(now, changed_us),
        collectives,
        functions: functions.collect(),
        operations,
    })
}

/// A communicator with impossible numbers is left out: the report of the process is right all the same.
fn parse_ras(ras: pb::RasReport) -> ReportedRas {
    let communicators = ras.communicators.into_iter().filter_map(parse_ras_communicator);
    ReportedRas {
        nccl_version: short_name(&ras.nccl_version),
        error: escape_to_one_line(&truncate_text(&ras.error, ERROR_LENGTH_MAX, "…")).into_owned(),
        communicators: communicators.collect(),
    }
}

fn parse_ras_communicator(report: pb::RasCommunicator) -> Option<RasCommunicator> {
    let pb::RasCommunicator { hash, ranks, answered, front, back, notable, notable_count, total_called } =
        report;
    let parse_rank = |row: pb::RasRank| {
        // A plug-in of another version may know more states.
        let state = RasRankState::from_name(&row.state, row.error).unwrap_or(RasRankState::Answers);
        let (rank, pid, called) = (row.rank, row.pid, row.called);
        RasRank { rank, host: short_name(&row.host), pid, state, called }
    };
    if ranks > RANKS_MAX || answered > ranks || notable.iter().any(|row| row.rank >= ranks) {
        return None;
    }
    let notable = notable.into_iter().map(parse_rank).collect();
    Some(RasCommunicator { hash, ranks, answered, front, back, total_called, notable, notable_count })
}

fn parse_collective(row: &pb::CollectiveReport, now: Timestamp) -> ReportedCollective {
    ReportedCollective {
        number: row.number,
        operation: Collective {
            function: CollectiveFunction::from_name(row.function.as_bytes()),
            data_type: DataType::from_jax_name(&row.data_type),
            count: row.count,
            root: row.root,
            channels: 1,
        },
        chain: row.chain,
        is_timed: row.timed,
        enqueued_at: before(now, row.enqueued_us),
        begun_at: row.begun_us.map(|age| before(now, age)),
        ended_at: row.ended_us.map(|age| before(now, age)),
    }
}

fn before(now: Timestamp, age_us: u64) -> Timestamp {
    let age = Duration::from_micros(age_us).min(Duration::from_micros(now.0));
    Timestamp(now.0 - u64::try_from(age.as_micros()).unwrap_or(now.0))
}

fn short_name(name: &str) -> String {
    escape_to_one_line(&truncate_text(name, NAME_LENGTH_MAX, "…")).into_owned()
}
