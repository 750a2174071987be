//! Encodes calls as messages of generation C.

use std::collections::BTreeMap;

use muster::proto::xla::coordination::coordination_service_client::CoordinationServiceClient;
use muster::proto::xla::coordination::{self as pb};
use prost::bytes::Bytes;
use tonic::Status;
use tonic::transport::Channel;

use super::answer::{Body, TaskState};
use super::call::{Call, Caller};

pub async fn ask(channel: Channel, caller: &Caller, call: &Call) -> Result<Body, Status> {
    let mut client = CoordinationServiceClient::new(channel)
        .max_decoding_message_size(usize::MAX)
        .max_encoding_message_size(usize::MAX);
    let incarnations = claim(caller);
    let task = caller.task;
    match call {
        Call::Register { incarnation, .. } => {
            let request = pb::RegisterTaskRequest { incarnation: *incarnation, source_task_id: task };
            Ok(Body::Service(client.register_task(request).await?.into_inner().service_incarnation))
        }
        Call::Heartbeat { incarnation } => {
            let request =
                pb::HeartbeatRequest { incarnations, incarnation: *incarnation, source_task_id: task };
            Ok(Body::Service(client.heartbeat(request).await?.into_inner().service_incarnation))
        }
        Call::PollForError => {
            let request = pb::PollForErrorRequest { incarnations, source_task_id: task };
            client.poll_for_error(request).await.map(|_| Body::Nothing)
        }
        Call::Shutdown => {
            let request = pb::ShutdownTaskRequest { incarnations, source_task_id: task };
            client.shutdown_task(request).await.map(|_| Body::Nothing)
        }
        Call::ReportError { code, message } => {
            let request = pb::ReportErrorToServiceRequest {
                incarnations,
                source_task_id: task,
                error_code: *code,
                error_message: message.clone(),
            };
            client.report_error_to_service(request).await.map(|_| Body::Nothing)
        }
        Call::Watch { version } => {
            let request = pb::WatchTasksRequest { incarnations, version_number: *version };
            let answer = client.watch_tasks(request).await?.into_inner();
            Ok(Body::States { version: answer.version_number, tasks: sorted(answer.task_state) })
        }
        Call::Barrier { id, counter, timeout_ms, members } => {
            let request = pb::BarrierRequest {
                incarnations,
                barrier_id: id.clone(),
                barrier_timeout_in_ms: *timeout_ms,
                task_ids: members.clone(),
                source_task_id: task,
                counter: *counter,
            };
            Ok(Body::Barrier(client.barrier(request).await?.into_inner().counter))
        }
        Call::CancelBarrier { id, counter } => {
            let request = pb::CancelBarrierRequest {
                incarnations,
                barrier_id: id.clone(),
                counter: *counter,
                source_task_id: task,
            };
            client.cancel_barrier(request).await.map(|_| Body::Nothing)
        }
        Call::Alive { tasks } => {
            let request =
                pb::GetAliveTasksRequest { incarnations, requesting_task_id: task, task_ids: tasks.clone() };
            let answer = client.get_alive_tasks(request).await?.into_inner();
            let incarnations = answer.incarnations.into_iter().map(Some).chain(std::iter::repeat(None));
            let mut alive: Vec<_> = answer.alive_task_ids.into_iter().zip(incarnations).collect();
            alive.sort_unstable();
            Ok(Body::Alive(alive))
        }
        Call::Insert { .. }
        | Call::Get { .. }
        | Call::TryGet { .. }
        | Call::Increment { .. }
        | Call::List { .. }
        | Call::Delete { .. } => key_value(&mut client, incarnations, call).await,
        Call::Reset
        | Call::ReportErrorToTask
        | Call::WaitForAllTasks { .. }
        | Call::TaskStates { .. }
        | Call::JobState => Err(Status::unimplemented("generation C has no such call")),
    }
}

type Grpc = CoordinationServiceClient<Channel>;

async fn key_value(
    client: &mut Grpc,
    incarnations: Option<pb::Incarnations>,
    call: &Call,
) -> Result<Body, Status> {
    match call.clone() {
        Call::Insert { key, value, overwrite } => {
            let kv = Some(pb::KeyValueEntry { key, value: Bytes::from(value) });
            let request = pb::InsertKeyValueRequest { incarnations, kv, allow_overwrite: overwrite };
            client.insert_key_value(request).await.map(|_| Body::Nothing)
        }
        Call::Get { key } => {
            let request = pb::GetKeyValueRequest { incarnations, key };
            Ok(value(client.get_key_value(request).await?.into_inner().kv))
        }
        Call::TryGet { key } => {
            let request = pb::TryGetKeyValueRequest { incarnations, key };
            Ok(value(client.try_get_key_value(request).await?.into_inner().kv))
        }
        Call::Increment { key, by } => {
            let request = pb::IncrementKeyValueRequest { incarnations, key, increment: by };
            Ok(value(client.increment_key_value(request).await?.into_inner().kv))
        }
        Call::List { directory } => {
            let request = pb::GetKeyValueDirRequest { incarnations, directory_key: directory };
            let answer = client.get_key_value_dir(request).await?.into_inner();
            let entries = answer.kv.into_iter().map(|kv| (kv.key, kv.value.to_vec())).collect();
            Ok(Body::Directory { name: answer.directory_key, entries })
        }
        Call::Delete { key, directory } => {
            let request = pb::DeleteKeyValueRequest { incarnations, key, is_directory: directory };
            client.delete_key_value(request).await.map(|_| Body::Nothing)
        }
        other => Err(Status::invalid_argument(format!("{other:?} is no key-value call"))),
    }
}

/// Released clients leave out the task id.
fn claim(caller: &Caller) -> Option<pb::Incarnations> {
    caller.service.map(|service_incarnation| pb::Incarnations {
        task_id: 0,
        task_incarnation: caller.incarnation,
        service_incarnation,
    })
}

fn value(kv: Option<pb::KeyValueEntry>) -> Body {
    let kv = kv.unwrap_or_default();
    Body::Value { key: kv.key, value: kv.value.to_vec() }
}

fn sorted(states: Vec<pb::TaskInfo>) -> Vec<TaskState> {
    let state = |info: pb::TaskInfo| TaskState {
        task: info.task_id,
        state: info.state,
        incarnation: info.incarnation,
        error_code: info.error_code,
        error_message: info.error_message,
        error: info.error_payload.map(Into::into),
    };
    let by_task: BTreeMap<_, _> = states.into_iter().map(state).map(|state| (state.task, state)).collect();
    by_task.into_values().collect()
}
