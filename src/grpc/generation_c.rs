//! Decodes the request messages of wire generation C, `xla.coordination.CoordinationService` (jaxlib 0.10.0 to
//! 0.12.0), to requests of the state machine.
//!
//! This module contains no rule of coordination. Begin at `request_decoder`, the table of methods.

use bytes::Bytes;
use prost::Message as _;

use super::cached_task_set::TaskSetEncoding;
use super::decoded_call::{DecodedCall, ReplyKind, RequestDecoder};
use super::dialect::Dialect;
use super::frame::{RequestMessage, decode_failure};
use super::task_set_cache::TaskSetCache;
use crate::coordination::{
    Failure, Request, ServiceIncarnation, StatedIncarnations, TaskId, TaskIncarnation,
};
use crate::proto::xla::coordination as wire;

type DecodeResult = Result<DecodedCall, Failure>;

/// Returns the decoder of `method`.
pub(super) fn request_decoder(method: &str) -> Option<RequestDecoder> {
    Some(match method {
        "RegisterTask" => decode_register_task,
        "Heartbeat" => decode_heartbeat,
        "PollForError" => decode_poll_for_error,
        "ShutdownTask" => decode_shutdown_task,
        "ReportErrorToService" => decode_report_error_to_service,
        "WatchTasks" => decode_watch_tasks,
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

/// Returns a call of a caller with these incarnations. Absent ones count as incarnation 0, which never
/// matches.
fn decoded_call_with_incarnations(claimed: Option<wire::Incarnations>, request: Request) -> DecodedCall {
    let claimed = claimed.unwrap_or_default();
    let service = ServiceIncarnation(claimed.service_incarnation);
    let claim = StatedIncarnations { service, task: TaskIncarnation(claimed.task_incarnation) };
    DecodedCall::new(Dialect::Number, Some(claim), request)
}

fn decode_register_task(message: &RequestMessage, _: &TaskSetCache) -> DecodeResult {
    let asked: wire::RegisterTaskRequest = decode_message(message)?;
    let (task, incarnation) = (TaskId(asked.source_task_id), TaskIncarnation(asked.incarnation));
    Ok(DecodedCall::new(Dialect::Number, None, Request::Register { task, incarnation, recoverable: false }))
}

fn decode_heartbeat(message: &RequestMessage, _: &TaskSetCache) -> DecodeResult {
    let asked: wire::HeartbeatRequest = decode_message(message)?;
    let (task, incarnation) = (TaskId(asked.source_task_id), TaskIncarnation(asked.incarnation));
    Ok(decoded_call_with_incarnations(asked.incarnations, Request::Heartbeat { task, incarnation }))
}

fn decode_poll_for_error(message: &RequestMessage, _: &TaskSetCache) -> DecodeResult {
    let asked: wire::PollForErrorRequest = decode_message(message)?;
    let task = TaskId(asked.source_task_id);
    Ok(decoded_call_with_incarnations(asked.incarnations, Request::PollForError { task })
        .with_reply_kind(ReplyKind::Poll))
}

fn decode_shutdown_task(message: &RequestMessage, _: &TaskSetCache) -> DecodeResult {
    let asked: wire::ShutdownTaskRequest = decode_message(message)?;
    Ok(decoded_call_with_incarnations(
        asked.incarnations,
        Request::Shutdown { task: TaskId(asked.source_task_id) },
    ))
}

fn decode_report_error_to_service(message: &RequestMessage, _: &TaskSetCache) -> DecodeResult {
    let asked: wire::ReportErrorToServiceRequest = decode_message(message)?;
    let (task, code, message) = (TaskId(asked.source_task_id), asked.error_code, asked.error_message);
    Ok(decoded_call_with_incarnations(asked.incarnations, Request::ReportError { task, code, message }))
}

fn decode_watch_tasks(message: &RequestMessage, _: &TaskSetCache) -> DecodeResult {
    let asked: wire::WatchTasksRequest = decode_message(message)?;
    Ok(decoded_call_with_incarnations(asked.incarnations, Request::Watch { version: asked.version_number }))
}

fn decode_insert_key_value(message: &RequestMessage, _: &TaskSetCache) -> DecodeResult {
    let asked: wire::InsertKeyValueRequest = decode_message_sharing_memory(message)?;
    let entry = asked.kv.unwrap_or_default();
    let (key, value) = (entry.key.into(), message.detach_part(entry.value));
    Ok(decoded_call_with_incarnations(
        asked.incarnations,
        Request::Insert { key, value, overwrite: asked.allow_overwrite },
    ))
}

fn decode_get_key_value(message: &RequestMessage, _: &TaskSetCache) -> DecodeResult {
    let asked: wire::GetKeyValueRequest = decode_message(message)?;
    let key = Bytes::from(asked.key);
    Ok(decoded_call_with_incarnations(asked.incarnations, Request::Get { key: key.clone() })
        .with_echoed_key(key))
}

fn decode_try_get_key_value(message: &RequestMessage, _: &TaskSetCache) -> DecodeResult {
    let asked: wire::TryGetKeyValueRequest = decode_message(message)?;
    let key = Bytes::from(asked.key);
    Ok(decoded_call_with_incarnations(asked.incarnations, Request::TryGet { key: key.clone() })
        .with_echoed_key(key))
}

fn decode_increment_key_value(message: &RequestMessage, _: &TaskSetCache) -> DecodeResult {
    let asked: wire::IncrementKeyValueRequest = decode_message(message)?;
    let key = Bytes::from(asked.key);
    let request = Request::Increment { key: key.clone(), by: asked.increment };
    Ok(decoded_call_with_incarnations(asked.incarnations, request).with_echoed_key(key))
}

fn decode_get_key_value_dir(message: &RequestMessage, _: &TaskSetCache) -> DecodeResult {
    let asked: wire::GetKeyValueDirRequest = decode_message(message)?;
    Ok(decoded_call_with_incarnations(
        asked.incarnations,
        Request::List { directory: asked.directory_key.into() },
    ))
}

fn decode_delete_key_value(message: &RequestMessage, _: &TaskSetCache) -> DecodeResult {
    let asked: wire::DeleteKeyValueRequest = decode_message(message)?;
    Ok(decoded_call_with_incarnations(asked.incarnations, Request::Delete { key: asked.key.into() }))
}

fn decode_barrier(message: &RequestMessage, sets: &TaskSetCache) -> DecodeResult {
    let (rest, members) = sets.extract_task_set(message, 4, TaskSetEncoding::Numbers)?;
    let asked = wire::BarrierRequest::decode(&*rest).map_err(|error| decode_failure(&error))?;
    let (id, counter, timeout_ms) = (asked.barrier_id, asked.counter, asked.barrier_timeout_in_ms);
    let task = TaskId(asked.source_task_id);
    Ok(decoded_call_with_incarnations(
        asked.incarnations,
        Request::Barrier { id, counter, timeout_ms, members, task },
    ))
}

fn decode_cancel_barrier(message: &RequestMessage, _: &TaskSetCache) -> DecodeResult {
    let asked: wire::CancelBarrierRequest = decode_message(message)?;
    let (id, counter, task) = (asked.barrier_id, asked.counter, TaskId(asked.source_task_id));
    Ok(decoded_call_with_incarnations(asked.incarnations, Request::CancelBarrier { id, counter, task }))
}

fn decode_get_alive_tasks(message: &RequestMessage, sets: &TaskSetCache) -> DecodeResult {
    let (rest, tasks) = sets.extract_task_set(message, 3, TaskSetEncoding::Numbers)?;
    let asked = wire::GetAliveTasksRequest::decode(&*rest).map_err(|error| decode_failure(&error))?;
    let task = TaskId(asked.requesting_task_id);
    let tasks = tasks.unwrap_or_else(TaskSetCache::empty_set);
    Ok(decoded_call_with_incarnations(asked.incarnations, Request::LiveSet { task, tasks }))
}
