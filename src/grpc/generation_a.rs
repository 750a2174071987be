//! Decodes the request messages of wire generation A, `tensorflow.CoordinationService` (jaxlib 0.4.30 to 0.9.2), to
//! requests of the state machine.
//!
//! This module contains no rule of coordination. Begin at `request_decoder`, the table of methods.

use bytes::Bytes;
use prost::Message as _;

use super::cached_task_set::TaskSetEncoding;
use super::decoded_call::{DecodedCall, ReplyKind, RequestDecoder};
use super::dialect::Dialect;
use super::frame::{RequestMessage, decode_failure};
use super::task_set_cache::TaskSetCache;
use crate::coordination::{Code, Failure, Request, TaskId, TaskIncarnation};
use crate::proto::CoordinatedTask;
use crate::proto::tensorflow as wire;

type DecodeResult = Result<DecodedCall, Failure>;

/// Returns the decoder of `method`.
pub(super) fn request_decoder(method: &str) -> Option<RequestDecoder> {
    Some(match method {
        "RegisterTask" => decode_register_task,
        "Heartbeat" => decode_heartbeat,
        "PollForError" => decode_poll_for_error,
        "WaitForAllTasks" => decode_wait_for_all_tasks,
        "ShutdownTask" => decode_shutdown_task,
        "ResetTask" => decode_reset_task,
        "ReportErrorToTask" => refuse_report_error_to_task,
        "ReportErrorToService" => decode_report_error_to_service,
        "GetTaskState" => decode_get_task_state,
        "GetJobState" => decode_get_job_state,
        "WatchJobState" => decode_watch_job_state,
        "InsertKeyValue" => decode_insert_key_value,
        "GetKeyValue" => decode_get_key_value,
        "TryGetKeyValue" => decode_try_get_key_value,
        "IncrementKeyValue" => decode_increment_key_value,
        "GetKeyValueDir" => decode_get_key_value_dir,
        "DeleteKeyValue" => decode_delete_key_value,
        "Barrier" => decode_barrier,
        "CancelBarrier" => decode_cancel_barrier,
        "GetAliveTasks" => decode_get_alive_tasks,
        _ => return None,
    })
}

/// Decodes a message of which no part is kept.
fn decode_message<M: prost::Message + Default>(message: &RequestMessage) -> Result<M, Failure> {
    M::decode(&*message.contents()).map_err(|error| decode_failure(&error))
}

/// Decodes a message whose values are kept: they share its memory.
fn decode_message_sharing_memory<M: prost::Message + Default>(
    message: &RequestMessage,
) -> Result<M, Failure> {
    M::decode(message.bytes()).map_err(|error| decode_failure(&error))
}

/// Returns a call by `task`.
fn decoded_call_from_task(
    task: Option<CoordinatedTask>,
    request: impl FnOnce(TaskId) -> Request,
) -> DecodedCall {
    let task = task.unwrap_or_default();
    DecodedCall::new(Dialect::of_generation_a(task.named), None, request(TaskId(task.task_id)))
}

/// Returns a call that names no calling task.
fn decoded_call_without_task(request: Request) -> DecodedCall {
    DecodedCall::new(Dialect::Unnamed, None, request)
}

fn decode_register_task(message: &RequestMessage, _: &TaskSetCache) -> DecodeResult {
    let asked: wire::RegisterTaskRequest = decode_message(message)?;
    let recoverable = asked.source_task.is_some_and(|task| task.recoverable);
    let incarnation = TaskIncarnation(asked.incarnation);
    Ok(decoded_call_from_task(asked.source_task, |task| Request::Register { task, incarnation, recoverable }))
}

fn decode_heartbeat(message: &RequestMessage, _: &TaskSetCache) -> DecodeResult {
    let asked: wire::HeartbeatRequest = decode_message(message)?;
    let incarnation = TaskIncarnation(asked.incarnation);
    Ok(decoded_call_from_task(asked.source_task, |task| Request::Heartbeat { task, incarnation }))
}

fn decode_poll_for_error(message: &RequestMessage, _: &TaskSetCache) -> DecodeResult {
    let asked: wire::PollForErrorRequest = decode_message(message)?;
    Ok(decoded_call_from_task(asked.source_task, |task| Request::PollForError { task })
        .with_reply_kind(ReplyKind::Poll))
}

fn decode_wait_for_all_tasks(message: &RequestMessage, _: &TaskSetCache) -> DecodeResult {
    let asked: wire::WaitForAllTasksRequest = decode_message(message)?;
    let devices = asked.device_info.unwrap_or_default().device;
    let devices = devices.iter().map(|device| Bytes::from(device.encode_to_vec())).collect();
    Ok(decoded_call_from_task(asked.source_task, |task| Request::WaitForAllTasks { task, devices }))
}

fn decode_shutdown_task(message: &RequestMessage, _: &TaskSetCache) -> DecodeResult {
    let asked: wire::ShutdownTaskRequest = decode_message(message)?;
    Ok(decoded_call_from_task(asked.source_task, |task| Request::Shutdown { task }))
}

fn decode_reset_task(message: &RequestMessage, _: &TaskSetCache) -> DecodeResult {
    let asked: wire::ResetTaskRequest = decode_message(message)?;
    Ok(decoded_call_from_task(asked.source_task, |task| Request::Reset { task }))
}

fn refuse_report_error_to_task(_: &RequestMessage, _: &TaskSetCache) -> DecodeResult {
    let text = "ReportErrorToTask is a call to tasks, and this is the service: use ReportErrorToService";
    Err(Failure::without_details(Code::Unimplemented, text))
}

fn decode_report_error_to_service(message: &RequestMessage, _: &TaskSetCache) -> DecodeResult {
    let asked: wire::ReportErrorToServiceRequest = decode_message(message)?;
    let (code, message) = (asked.error_code, asked.error_message);
    Ok(decoded_call_from_task(asked.error_origin, |task| Request::ReportError { task, code, message }))
}

fn decode_get_task_state(message: &RequestMessage, _: &TaskSetCache) -> DecodeResult {
    let asked: wire::GetTaskStateRequest = decode_message(message)?;
    let named = asked.source_task.first().is_some_and(|task| task.named);
    let tasks = asked.source_task.iter().map(|task| TaskId(task.task_id)).collect();
    Ok(DecodedCall::new(Dialect::of_generation_a(named), None, Request::TaskStates { tasks })
        .with_reply_kind(ReplyKind::Unversioned))
}

fn decode_get_job_state(message: &RequestMessage, _: &TaskSetCache) -> DecodeResult {
    let asked: wire::GetJobStateRequest = decode_message(message)?;
    let dialect = Dialect::of_generation_a(!asked.job_name.is_empty());
    Ok(DecodedCall::new(dialect, None, Request::JobState).with_reply_kind(ReplyKind::Unversioned))
}

fn decode_watch_job_state(message: &RequestMessage, _: &TaskSetCache) -> DecodeResult {
    let asked: wire::WatchJobStateRequest = decode_message(message)?;
    let dialect = Dialect::of_generation_a(!asked.job_name.is_empty());
    Ok(DecodedCall::new(dialect, None, Request::Watch { version: asked.version_number }))
}

fn decode_insert_key_value(message: &RequestMessage, _: &TaskSetCache) -> DecodeResult {
    let asked: wire::InsertKeyValueRequest = decode_message_sharing_memory(message)?;
    let entry = asked.kv.unwrap_or_default();
    let (key, value) = (entry.key.into(), message.detach_part(entry.value));
    Ok(decoded_call_without_task(Request::Insert { key, value, overwrite: asked.allow_overwrite }))
}

fn decode_get_key_value(message: &RequestMessage, _: &TaskSetCache) -> DecodeResult {
    let asked: wire::GetKeyValueRequest = decode_message(message)?;
    let key = Bytes::from(asked.key);
    Ok(decoded_call_without_task(Request::Get { key: key.clone() }).with_echoed_key(key))
}

fn decode_try_get_key_value(message: &RequestMessage, _: &TaskSetCache) -> DecodeResult {
    let asked: wire::TryGetKeyValueRequest = decode_message(message)?;
    let key = Bytes::from(asked.key);
    Ok(decoded_call_without_task(Request::TryGet { key: key.clone() }).with_echoed_key(key))
}

fn decode_increment_key_value(message: &RequestMessage, _: &TaskSetCache) -> DecodeResult {
    let asked: wire::IncrementKeyValueRequest = decode_message(message)?;
    let key = Bytes::from(asked.key);
    Ok(decoded_call_without_task(Request::Increment { key: key.clone(), by: asked.increment })
        .with_echoed_key(key))
}

fn decode_get_key_value_dir(message: &RequestMessage, _: &TaskSetCache) -> DecodeResult {
    let asked: wire::GetKeyValueDirRequest = decode_message(message)?;
    Ok(decoded_call_without_task(Request::List { directory: asked.directory_key.into() }))
}

fn decode_delete_key_value(message: &RequestMessage, _: &TaskSetCache) -> DecodeResult {
    let asked: wire::DeleteKeyValueRequest = decode_message(message)?;
    Ok(decoded_call_without_task(Request::Delete { key: asked.key.into() }))
}

fn decode_barrier(message: &RequestMessage, sets: &TaskSetCache) -> DecodeResult {
    let (rest, members) = sets.extract_task_set(message, 3, TaskSetEncoding::Messages)?;
    let asked = wire::BarrierRequest::decode(&*rest).map_err(|error| decode_failure(&error))?;
    let (id, counter, timeout_ms) = (asked.barrier_id, asked.counter, asked.barrier_timeout_in_ms);
    Ok(decoded_call_from_task(asked.source_task, |task| Request::Barrier {
        id,
        counter,
        timeout_ms,
        members,
        task,
    }))
}

fn decode_cancel_barrier(message: &RequestMessage, _: &TaskSetCache) -> DecodeResult {
    let asked: wire::CancelBarrierRequest = decode_message(message)?;
    let (id, counter) = (asked.barrier_id, asked.counter);
    Ok(decoded_call_from_task(asked.source_task, |task| Request::CancelBarrier { id, counter, task }))
}

fn decode_get_alive_tasks(message: &RequestMessage, sets: &TaskSetCache) -> DecodeResult {
    let (rest, tasks) = sets.extract_task_set(message, 2, TaskSetEncoding::Messages)?;
    let asked = wire::GetAliveTasksRequest::decode(&*rest).map_err(|error| decode_failure(&error))?;
    let tasks = tasks.unwrap_or_else(TaskSetCache::empty_set);
    Ok(decoded_call_from_task(asked.requesting_task, |task| Request::LiveSet { task, tasks }))
}
