//! The methods of wire generation A, `tensorflow.CoordinationService` (jaxlib 0.4.30 to 0.9.2), each decoded to a
//! request.
//!
//! It contains no rule. Begin at `request_decoder`, the table of methods.

use bytes::Bytes;
use prost::Message as _;

use super::decoded_call::{DecodedCall, Dialect, ReplyKind, RequestDecoder, decode_failure};
use super::frame::Message;
use super::task_set_cache::{SetEncoding, TaskSetCache};
use crate::coordination::{Code, Failure, Request, TaskId, TaskIncarnation};
use crate::proto::CoordinatedTask;
use crate::proto::tensorflow as wire;

/// The service's name on the wire.
pub(super) const SERVICE: &str = "tensorflow.CoordinationService";

type DecodeResult = Result<DecodedCall, Failure>;

/// Returns the decoder of `method`.
pub(super) fn request_decoder(method: &str) -> Option<RequestDecoder> {
    Some(match method {
        "RegisterTask" => register,
        "Heartbeat" => heartbeat,
        "PollForError" => poll_for_error,
        "WaitForAllTasks" => wait_for_all_tasks,
        "ShutdownTask" => shutdown,
        "ResetTask" => reset,
        "ReportErrorToTask" => report_to_task,
        "ReportErrorToService" => report_to_service,
        "GetTaskState" => task_state,
        "GetJobState" => job_state,
        "WatchJobState" => watch,
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

/// Returns a call by `task`.
fn by(task: Option<CoordinatedTask>, request: impl FnOnce(TaskId) -> Request) -> DecodedCall {
    let task = task.unwrap_or_default();
    DecodedCall::new(Dialect::named(task.named), None, request(TaskId(task.task_id)))
}

/// Returns a call that names no calling task.
fn anonymous(request: Request) -> DecodedCall {
    DecodedCall::new(Dialect::Unnamed, None, request)
}

fn register(message: &Message, _: &TaskSetCache) -> DecodeResult {
    let asked: wire::RegisterTaskRequest = decode(message)?;
    let recoverable = asked.source_task.is_some_and(|task| task.recoverable);
    let incarnation = TaskIncarnation(asked.incarnation);
    Ok(by(asked.source_task, |task| Request::Register { task, incarnation, recoverable }))
}

fn heartbeat(message: &Message, _: &TaskSetCache) -> DecodeResult {
    let asked: wire::HeartbeatRequest = decode(message)?;
    let incarnation = TaskIncarnation(asked.incarnation);
    Ok(by(asked.source_task, |task| Request::Heartbeat { task, incarnation }))
}

fn poll_for_error(message: &Message, _: &TaskSetCache) -> DecodeResult {
    let asked: wire::PollForErrorRequest = decode(message)?;
    Ok(by(asked.source_task, |task| Request::PollForError { task }).with_kind(ReplyKind::Poll))
}

fn wait_for_all_tasks(message: &Message, _: &TaskSetCache) -> DecodeResult {
    let asked: wire::WaitForAllTasksRequest = decode(message)?;
    let devices = asked.device_info.unwrap_or_default().device;
    let devices = devices.iter().map(|device| Bytes::from(device.encode_to_vec())).collect();
    Ok(by(asked.source_task, |task| Request::WaitForAllTasks { task, devices }))
}

fn shutdown(message: &Message, _: &TaskSetCache) -> DecodeResult {
    let asked: wire::ShutdownTaskRequest = decode(message)?;
    Ok(by(asked.source_task, |task| Request::Shutdown { task }))
}

fn reset(message: &Message, _: &TaskSetCache) -> DecodeResult {
    let asked: wire::ResetTaskRequest = decode(message)?;
    Ok(by(asked.source_task, |task| Request::Reset { task }))
}

fn report_to_task(_: &Message, _: &TaskSetCache) -> DecodeResult {
    let text = "ReportErrorToTask is a call to tasks, and this is the service: use ReportErrorToService";
    Err(Failure::without_details(Code::Unimplemented, text))
}

fn report_to_service(message: &Message, _: &TaskSetCache) -> DecodeResult {
    let asked: wire::ReportErrorToServiceRequest = decode(message)?;
    let (code, message) = (asked.error_code, asked.error_message);
    Ok(by(asked.error_origin, |task| Request::ReportError { task, code, message }))
}

fn task_state(message: &Message, _: &TaskSetCache) -> DecodeResult {
    let asked: wire::GetTaskStateRequest = decode(message)?;
    let named = asked.source_task.first().is_some_and(|task| task.named);
    let tasks = asked.source_task.iter().map(|task| TaskId(task.task_id)).collect();
    Ok(DecodedCall::new(Dialect::named(named), None, Request::TaskStates { tasks })
        .with_kind(ReplyKind::Unversioned))
}

fn job_state(message: &Message, _: &TaskSetCache) -> DecodeResult {
    let asked: wire::GetJobStateRequest = decode(message)?;
    let dialect = Dialect::named(!asked.job_name.is_empty());
    Ok(DecodedCall::new(dialect, None, Request::JobState).with_kind(ReplyKind::Unversioned))
}

fn watch(message: &Message, _: &TaskSetCache) -> DecodeResult {
    let asked: wire::WatchJobStateRequest = decode(message)?;
    let dialect = Dialect::named(!asked.job_name.is_empty());
    Ok(DecodedCall::new(dialect, None, Request::Watch { version: asked.version_number }))
}

fn insert(message: &Message, _: &TaskSetCache) -> DecodeResult {
    let asked: wire::InsertKeyValueRequest = decode(message)?;
    let entry = asked.kv.unwrap_or_default();
    let (key, value) = (entry.key.into(), message.detach(entry.value));
    Ok(anonymous(Request::Insert { key, value, overwrite: asked.allow_overwrite }))
}

fn get(message: &Message, _: &TaskSetCache) -> DecodeResult {
    let asked: wire::GetKeyValueRequest = decode(message)?;
    let key = Bytes::from(asked.key);
    Ok(anonymous(Request::Get { key: key.clone() }).with_echoed_key(key))
}

fn try_get(message: &Message, _: &TaskSetCache) -> DecodeResult {
    let asked: wire::TryGetKeyValueRequest = decode(message)?;
    let key = Bytes::from(asked.key);
    Ok(anonymous(Request::TryGet { key: key.clone() }).with_echoed_key(key))
}

fn increment(message: &Message, _: &TaskSetCache) -> DecodeResult {
    let asked: wire::IncrementKeyValueRequest = decode(message)?;
    let key = Bytes::from(asked.key);
    Ok(anonymous(Request::Increment { key: key.clone(), by: asked.increment }).with_echoed_key(key))
}

fn list(message: &Message, _: &TaskSetCache) -> DecodeResult {
    let asked: wire::GetKeyValueDirRequest = decode(message)?;
    Ok(anonymous(Request::List { directory: asked.directory_key.into() }))
}

fn delete(message: &Message, _: &TaskSetCache) -> DecodeResult {
    let asked: wire::DeleteKeyValueRequest = decode(message)?;
    Ok(anonymous(Request::Delete { key: asked.key.into() }))
}

fn barrier(message: &Message, sets: &TaskSetCache) -> DecodeResult {
    let (rest, members) = sets.extract(message, 3, SetEncoding::Messages)?;
    let asked = wire::BarrierRequest::decode(rest).map_err(|error| decode_failure(&error))?;
    let (id, counter, timeout_ms) = (asked.barrier_id, asked.counter, asked.barrier_timeout_in_ms);
    Ok(by(asked.source_task, |task| Request::Barrier { id, counter, timeout_ms, members, task }))
}

fn cancel_barrier(message: &Message, _: &TaskSetCache) -> DecodeResult {
    let asked: wire::CancelBarrierRequest = decode(message)?;
    let (id, counter) = (asked.barrier_id, asked.counter);
    Ok(by(asked.source_task, |task| Request::CancelBarrier { id, counter, task }))
}

fn alive_tasks(message: &Message, sets: &TaskSetCache) -> DecodeResult {
    let (rest, tasks) = sets.extract(message, 2, SetEncoding::Messages)?;
    let asked = wire::GetAliveTasksRequest::decode(rest).map_err(|error| decode_failure(&error))?;
    let tasks = tasks.unwrap_or_else(TaskSetCache::empty);
    Ok(by(asked.requesting_task, |task| Request::LiveSet { task, tasks }))
}
