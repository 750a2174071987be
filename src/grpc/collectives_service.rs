//! Answers the method of the gRPC service `muster.v1.Collectives`, by which NCCL's profiler plug-in reports.
//!
//! `service/collectives/` has the rules. A report is routed to its job like every other call. Begin at [`accept_report`].

use crate::coordination::{Failure, JobId};
use crate::engine::Engine;
use crate::proto::muster::v1 as pb;
use crate::service::collectives::{CollectiveReports, WantedCollectives};

/// The service's name on the wire.
pub(super) const SERVICE: &str = "muster.v1.Collectives";
/// Its only method.
pub(super) const METHOD: &str = "Report";

/// Accepts the report in `message`.
pub(super) fn accept_report(
    engine: &Engine,
    reports: &CollectiveReports,
    job: JobId,
    message: &[u8],
) -> Result<pb::CollectivesAck, Failure> {
    let answer = reports.accept_report(engine, job, message)?;
    let wanted = answer.wanted.into_iter();
    Ok(pb::CollectivesAck {
        interval_ms: answer.interval_ms,
        timing: answer.is_timed,
        wanted: wanted
            .map(|WantedCollectives { hash, rank, first }| pb::WantedCollectives { hash, rank, first })
            .collect(),
        ras: answer.ras,
    })
}
