//! Decodes and answers the method of the gRPC service `muster.v1.TaskClaims`, by which a process claims its task id.
//!
//! `coordination/task_id_claims.rs` has the rules. A claim is routed to its job like every other call, and is
//! answered at once. Begin at [`answer_task_claim`].

use prost::Message as _;

use crate::coordination::{
    ClaimAnswer, ClaimRefusal, Code, ConnectionId, Failure, JobId, ProcessIdentity, TaskClaim,
};
use crate::engine::Engine;
use crate::proto::muster::v1 as pb;

/// The service's name on the wire.
pub(super) const SERVICE: &str = "muster.v1.TaskClaims";
/// Its only method.
pub(super) const METHOD: &str = "Claim";

/// The longest claim in bytes.
const CLAIM_BYTES_MAX: usize = 1 << 10;

/// Answers the claim in `message`, which came on `connection`.
pub(super) fn answer_task_claim(
    engine: &Engine,
    job: JobId,
    connection: ConnectionId,
    message: &[u8],
) -> Result<pb::TaskClaimAnswer, Failure> {
    let refuse = |code, text: String| Err(Failure::without_details(code, text));
    if message.len() > CLAIM_BYTES_MAX {
        return refuse(Code::InvalidArgument, format!("a claim has at most {CLAIM_BYTES_MAX} bytes"));
    }
    let asked = match pb::TaskClaim::decode(message) {
        Ok(asked) => asked,
        Err(error) => return refuse(Code::InvalidArgument, format!("the claim cannot be read: {error}")),
    };
    let identity = match ProcessIdentity::new(&asked.host, asked.local) {
        Ok(identity) => identity,
        Err(rule) => return refuse(Code::InvalidArgument, rule.to_owned()),
    };
    let claim = TaskClaim { identity, claimant: asked.claimant, connection: Some(connection) };
    match engine.claim_task_id(job, claim) {
        Ok(ClaimAnswer::Granted { task, tasks }) => Ok(pb::TaskClaimAnswer {
            task: u32::try_from(task.0).ok(),
            tasks,
            ..pb::TaskClaimAnswer::default()
        }),
        Ok(ClaimAnswer::Pending { why, tasks, retry_after }) => Ok(pb::TaskClaimAnswer {
            task: None,
            tasks,
            pending: why.kind().to_owned(),
            why: why.to_string(),
            retry_ms: u32::try_from(retry_after.as_millis()).unwrap_or(u32::MAX),
        }),
        Err(refusal @ ClaimRefusal::NoSuchJob) => refuse(Code::NotFound, refusal.to_string()),
        Err(refusal @ ClaimRefusal::TooManyClaims { .. }) => {
            refuse(Code::ResourceExhausted, refusal.to_string())
        }
        Err(refusal @ ClaimRefusal::NotRecordable(_)) => refuse(Code::Unavailable, refusal.to_string()),
    }
}
