//! Decodes the methods of the gRPC service `muster.v1.PeerJobs`, by which a task finds the tasks of another job.
//!
//! `coordination/peer_jobs.rs` has the rules. A call is routed to the caller's own job like every other call, and
//! then applied to the job that it names. Begin at [`request_decoder`].

use prost::Message as _;

use super::decoded_call::DecodedCall;
use super::dialect::Dialect;
use super::frame::{RequestMessage, decode_failure};
use crate::coordination::{Code, Failure, JobId, PeerJobQuery, Request, TaskId, TaskIncarnation};
use crate::engine::Engine;
use crate::proto::muster::v1 as pb;

/// A function that decodes the request of one method: the other job, and the question.
pub(super) type PeerQuestionDecoder = fn(&RequestMessage) -> Result<(String, PeerJobQuery), Failure>;

/// Returns the decoder of `method`.
pub(super) fn request_decoder(method: &str) -> Option<PeerQuestionDecoder> {
    Some(match method {
        "WatchPeerTasks" => decode_watch_peer_tasks,
        "GetPeerEngine" => decode_get_peer_engine,
        _ => return None,
    })
}

/// Decodes a call of a task of job `from`; returns the job that it is made to, with the call.
pub(super) fn decode_peer_call(
    engine: &Engine,
    from: JobId,
    decoder: PeerQuestionDecoder,
    message: &RequestMessage,
) -> Result<(JobId, DecodedCall), Failure> {
    let (name, question) = decoder(message)?;
    let job = engine.read_under_lock(|core| core.find_permitted_peer_job(from, &name))?;
    Ok((job, DecodedCall::new(Dialect::Number, None, Request::FromPeerJob { from, question })))
}

fn decode_watch_peer_tasks(message: &RequestMessage) -> Result<(String, PeerJobQuery), Failure> {
    let asked = pb::PeerTasksRequest::decode(&*message.contents()).map_err(|error| decode_failure(&error))?;
    Ok((asked.job, PeerJobQuery::TaskStates { version: asked.version }))
}

fn decode_get_peer_engine(message: &RequestMessage) -> Result<(String, PeerJobQuery), Failure> {
    let asked =
        pb::PeerEngineRequest::decode(&*message.contents()).map_err(|error| decode_failure(&error))?;
    let Ok(task) = i32::try_from(asked.task) else {
        let text = format!("there is no task {}", asked.task);
        return Err(Failure::without_details(Code::InvalidArgument, text));
    };
    let incarnation = TaskIncarnation(asked.incarnation);
    Ok((asked.job, PeerJobQuery::EngineRecord { task: TaskId(task), incarnation }))
}
