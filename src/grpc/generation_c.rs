//! The methods of wire generation C, `xla.coordination.CoordinationService` (jaxlib 0.10.0 to 0.12.0), each decoded
//! to a request.
//!
//! It contains no rule. Begin at `request_decoder`, the table of methods.

use bytes::Bytes;
use prost::Message as _;

use super::decoded_call::{DecodedCall, Dialect, ReplyKind, RequestDecoder, decode_failure};
use super::frame::Message;
use super::task_set_cache::{SetEncoding, TaskSetCache};
use crate::coordination::{
    ClaimedIncarnations, Failure, Request, ServiceIncarnation, TaskId, TaskIncarnation,
};
use crate::proto::xla::coordination as wire;

/// The service's name on the wire.
pub(super) const SERVICE: &str = "xla.coordination.CoordinationService";

type DecodeResult = Result<DecodedCall, Failure>;

/// Returns the decoder of `method`.
pub(super) fn request_decoder(method: &str) -> Option<RequestDecoder> {
    Some(match method {
        "RegisterTask" => register,
        "Heartbeat" => heartbeat,
        "PollForError" => poll_for_error,
        "ShutdownTask" => shutdown,
        "ReportErrorToService" => report_to_service,
        "WatchTasks" => watch,
        "InsertKeyValue" => insert,
        "GetKeyValue" => get,
        "TryGetKeyValue" => try_get,
        "IncrementKeyValue" => increment,
        "GetKeyValueDir" => list,
        "DeleteKeyValue" => delete,
        "Barrier" => barrier,
        "CancelBarrier" => cancel_barrier,
        "GetAliveTasks" => alive_tasks,
        _ => return None,
    })
}

fn decode<M: prost::Message + Default>(message: &Message) -> Result<M, Failure> {
    M::decode(message.bytes()).map_err(|error| decode_failure(&error))
}

/// Returns a call of a caller with these incarnations. Absent ones count as incarnation 0, which never
/// matches.
fn call(claimed: Option<wire::Incarnations>, request: Request) -> DecodedCall {
    let claimed = claimed.unwrap_or_default();
    let service = ServiceIncarnation(claimed.service_incarnation);
    let claim = ClaimedIncarnations { service, task: TaskIncarnation(claimed.task_incarnation) };
    DecodedCall::new(Dialect::Number, Some(claim), request)
}

fn register(message: &Message, _: &TaskSetCache) -> DecodeResult {
    let asked: wire::RegisterTaskRequest = decode(message)?;
    let (task, incarnation) = (TaskId(asked.source_task_id), TaskIncarnation(asked.incarnation));
    Ok(DecodedCall::new(Dialect::Number, None, Request::Register { task, incarnation, recoverable: false }))
}

fn heartbeat(message: &Message, _: &TaskSetCache) -> DecodeResult {
    let asked: wire::HeartbeatRequest = decode(message)?;
    let (task, incarnation) = (TaskId(asked.source_task_id), TaskIncarnation(asked.incarnation));
    Ok(call(asked.incarnations, Request::Heartbeat { task, incarnation }))
}

fn poll_for_error(message: &Message, _: &TaskSetCache) -> DecodeResult {
    let asked: wire::PollForErrorRequest = decode(message)?;
    let task = TaskId(asked.source_task_id);
    Ok(call(asked.incarnations, Request::PollForError { task }).with_kind(ReplyKind::Poll))
}

fn shutdown(message: &Message, _: &TaskSetCache) -> DecodeResult {
    let asked: wire::ShutdownTaskRequest = decode(message)?;
    Ok(call(asked.incarnations, Request::Shutdown { task: TaskId(asked.source_task_id) }))
}

fn report_to_service(message: &Message, _: &TaskSetCache) -> DecodeResult {
    let asked: wire::ReportErrorToServiceRequest = decode(message)?;
    let (task, code, message) = (TaskId(asked.source_task_id), asked.error_code, asked.error_message);
    Ok(call(asked.incarnations, Request::ReportError { task, code, message }))
}

fn watch(message: &Message, _: &TaskSetCache) -> DecodeResult {
    let asked: wire::WatchTasksRequest = decode(message)?;
    Ok(call(asked.incarnations, Request::Watch { version: asked.version_number }))
}

fn insert(message: &Message, _: &TaskSetCache) -> DecodeResult {
    let asked: wire::InsertKeyValueRequest = decode(message)?;
    let entry = asked.kv.unwrap_or_default();
    let (key, value) = (entry.key.into(), message.detach(entry.value));
    Ok(call(asked.incarnations, Request::Insert { key, value, overwrite: asked.allow_overwrite }))
}

fn get(message: &Message, _: &TaskSetCache) -> DecodeResult {
    let asked: wire::GetKeyValueRequest = decode(message)?;
    let key = Bytes::from(asked.key);
    Ok(call(asked.incarnations, Request::Get { key: key.clone() }).with_echoed_key(key))
}

fn try_get(message: &Message, _: &TaskSetCache) -> DecodeResult {
    let asked: wire::TryGetKeyValueRequest = decode(message)?;
    let key = Bytes::from(asked.key);
    Ok(call(asked.incarnations, Request::TryGet { key: key.clone() }).with_echoed_key(key))
}

fn increment(message: &Message, _: &TaskSetCache) -> DecodeResult {
    let asked: wire::IncrementKeyValueRequest = decode(message)?;
    let key = Bytes::from(asked.key);
    let request = Request::Increment { key: key.clone(), by: asked.increment };
    Ok(call(asked.incarnations, request).with_echoed_key(key))
}

fn list(message: &Message, _: &TaskSetCache) -> DecodeResult {
    let asked: wire::GetKeyValueDirRequest = decode(message)?;
    Ok(call(asked.incarnations, Request::List { directory: asked.directory_key.into() }))
}

fn delete(message: &Message, _: &TaskSetCache) -> DecodeResult {
    let asked: wire::DeleteKeyValueRequest = decode(message)?;
    Ok(call(asked.incarnations, Request::Delete { key: asked.key.into() }))
}

fn barrier(message: &Message, sets: &TaskSetCache) -> DecodeResult {
    let (rest, members) = sets.extract(message, 4, SetEncoding::Numbers)?;
    let asked = wire::BarrierRequest::decode(rest).map_err(|error| decode_failure(&error))?;
    let (id, counter, timeout_ms) = (asked.barrier_id, asked.counter, asked.barrier_timeout_in_ms);
    let task = TaskId(asked.source_task_id);
    Ok(call(asked.incarnations, Request::Barrier { id, counter, timeout_ms, members, task }))
}

fn cancel_barrier(message: &Message, _: &TaskSetCache) -> DecodeResult {
    let asked: wire::CancelBarrierRequest = decode(message)?;
    let (id, counter, task) = (asked.barrier_id, asked.counter, TaskId(asked.source_task_id));
    Ok(call(asked.incarnations, Request::CancelBarrier { id, counter, task }))
}

fn alive_tasks(message: &Message, sets: &TaskSetCache) -> DecodeResult {
    let (rest, tasks) = sets.extract(message, 3, SetEncoding::Numbers)?;
    let asked = wire::GetAliveTasksRequest::decode(rest).map_err(|error| decode_failure(&error))?;
    let task = TaskId(asked.requesting_task_id);
    let tasks = tasks.unwrap_or_else(TaskSetCache::empty);
    Ok(call(asked.incarnations, Request::LiveSet { task, tasks }))
}
