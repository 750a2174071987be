//! Encodes calls as messages of generation A.

use std::collections::BTreeMap;

use muster::proto::CoordinatedTask;
use muster::proto::tensorflow::coordination_service_client::CoordinationServiceClient;
use muster::proto::tensorflow::{self as pb};
use prost::bytes::Bytes;
use tonic::Status;
use tonic::transport::Channel;

use super::answer::{Body, TaskState};
use super::call::{Call, Caller};

pub async fn ask(channel: Channel, caller: &Caller, call: &Call) -> Result<Body, Status> {
    let mut client = CoordinationServiceClient::new(channel)
        .max_decoding_message_size(usize::MAX)
        .max_encoding_message_size(usize::MAX);
    let me = task(caller, caller.task);
    match call {
        Call::Register { incarnation, recoverable } => {
            let me = me.map(|me| CoordinatedTask { recoverable: *recoverable, ..me });
            let request = pb::RegisterTaskRequest { incarnation: *incarnation, source_task: me };
            let answer = client.register_task(request).await?.into_inner();
            Ok(Body::Service(answer.leader_incarnation))
        }
        Call::Heartbeat { incarnation } => {
            let request = pb::HeartbeatRequest { incarnation: *incarnation, source_task: me };
            Ok(Body::Service(client.heartbeat(request).await?.into_inner().leader_incarnation))
        }
        Call::PollForError => {
            client.poll_for_error(pb::PollForErrorRequest { source_task: me }).await.map(|_| Body::Nothing)
        }
        Call::Shutdown => {
            client.shutdown_task(pb::ShutdownTaskRequest { source_task: me }).await.map(|_| Body::Nothing)
        }
        Call::Reset => {
            client.reset_task(pb::ResetTaskRequest { source_task: me }).await.map(|_| Body::Nothing)
        }
        Call::ReportError { code, message } => {
            let request = pb::ReportErrorToServiceRequest {
                error_code: *code,
                error_message: message.clone(),
                error_origin: me,
            };
            client.report_error_to_service(request).await.map(|_| Body::Nothing)
        }
        Call::ReportErrorToTask => {
            let request = pb::ReportErrorToTaskRequest::default();
            client.report_error_to_task(request).await.map(|_| Body::Nothing)
        }
        Call::WaitForAllTasks { devices } => wait_for_all_tasks(&mut client, me, devices).await,
        Call::TaskStates { .. } | Call::JobState | Call::Watch { .. } => {
            states(&mut client, caller, call).await
        }
        Call::Barrier { id, counter, timeout_ms, members } => {
            let request = pb::BarrierRequest {
                barrier_id: id.clone(),
                barrier_timeout_in_ms: *timeout_ms,
                tasks: members.iter().filter_map(|id| task(caller, *id)).collect(),
                source_task: me,
                counter: *counter,
            };
            Ok(Body::Barrier(client.barrier(request).await?.into_inner().counter))
        }
        Call::CancelBarrier { id, counter } => {
            let request =
                pb::CancelBarrierRequest { barrier_id: id.clone(), source_task: me, counter: *counter };
            client.cancel_barrier(request).await.map(|_| Body::Nothing)
        }
        Call::Alive { tasks } => {
            let request = pb::GetAliveTasksRequest {
                requesting_task: me,
                tasks: tasks.iter().filter_map(|id| task(caller, *id)).collect(),
            };
            let answer = client.get_alive_tasks(request).await?.into_inner();
            let incarnations = answer.incarnations.into_iter().map(Some).chain(std::iter::repeat(None));
            let mut alive: Vec<_> =
                answer.alive_tasks.iter().map(|task| task.task_id).zip(incarnations).collect();
            alive.sort_unstable();
            Ok(Body::Alive(alive))
        }
        Call::Insert { .. }
        | Call::Get { .. }
        | Call::TryGet { .. }
        | Call::Increment { .. }
        | Call::List { .. }
        | Call::Delete { .. } => key_value(&mut client, call).await,
    }
}

type Grpc = CoordinationServiceClient<Channel>;

async fn key_value(client: &mut Grpc, call: &Call) -> Result<Body, Status> {
    match call.clone() {
        Call::Insert { key, value, overwrite } => {
            let kv = Some(pb::KeyValueEntry { key, value: Bytes::from(value) });
            let request = pb::InsertKeyValueRequest { kv, allow_overwrite: overwrite };
            client.insert_key_value(request).await.map(|_| Body::Nothing)
        }
        Call::Get { key } => {
            let answer = client.get_key_value(pb::GetKeyValueRequest { key }).await?.into_inner();
            Ok(value(answer.kv))
        }
        Call::TryGet { key } => {
            let answer = client.try_get_key_value(pb::TryGetKeyValueRequest { key }).await?.into_inner();
            Ok(value(answer.kv))
        }
        Call::Increment { key, by } => {
            let request = pb::IncrementKeyValueRequest { key, increment: by };
            Ok(value(client.increment_key_value(request).await?.into_inner().kv))
        }
        Call::List { directory } => {
            let request = pb::GetKeyValueDirRequest { directory_key: directory };
            let answer = client.get_key_value_dir(request).await?.into_inner();
            let entries = answer.kv.into_iter().map(|kv| (kv.key, kv.value.to_vec())).collect();
            Ok(Body::Directory { name: answer.directory_key, entries })
        }
        Call::Delete { key, directory } => {
            let request = pb::DeleteKeyValueRequest { key, is_directory: directory };
            client.delete_key_value(request).await.map(|_| Body::Nothing)
        }
        other => Err(Status::invalid_argument(format!("{other:?} is no key-value call"))),
    }
}

async fn states(client: &mut Grpc, caller: &Caller, call: &Call) -> Result<Body, Status> {
    let job_name = if caller.named { "jax_worker".to_owned() } else { String::new() };
    match call {
        Call::TaskStates { tasks } => {
            let source_task = tasks.iter().filter_map(|id| task(caller, *id)).collect();
            let answer = client.get_task_state(pb::GetTaskStateRequest { source_task }).await?.into_inner();
            Ok(Body::States { version: 0, tasks: answer.task_state.into_iter().map(task_state).collect() })
        }
        Call::JobState => {
            let answer = client.get_job_state(pb::GetJobStateRequest { job_name }).await?.into_inner();
            Ok(Body::States { version: 0, tasks: sorted(answer.task_state) })
        }
        Call::Watch { version } => {
            let request = pb::WatchJobStateRequest { job_name, version_number: *version };
            let answer = client.watch_job_state(request).await?.into_inner();
            Ok(Body::States { version: answer.version_number, tasks: sorted(answer.task_state) })
        }
        other => Err(Status::invalid_argument(format!("{other:?} does not ask for states"))),
    }
}

async fn wait_for_all_tasks(
    client: &mut Grpc,
    me: Option<CoordinatedTask>,
    devices: &[Vec<u8>],
) -> Result<Body, Status> {
    let any = |value: &Vec<u8>| prost_types::Any { type_url: "test".into(), value: value.clone() };
    let request = pb::WaitForAllTasksRequest {
        source_task: me,
        device_info: Some(pb::DeviceInfo { device: devices.iter().map(any).collect() }),
    };
    let answer = client.wait_for_all_tasks(request).await?.into_inner();
    let devices = answer.device_info.unwrap_or_default().device;
    let devices = devices.into_iter().map(|any| any.value).collect();
    Ok(Body::Devices { service: answer.leader_incarnation, devices })
}

/// Returns a task as the caller's release encodes tasks in generation A messages.
fn task(caller: &Caller, task_id: i32) -> Option<CoordinatedTask> {
    Some(CoordinatedTask { named: caller.named, task_id, recoverable: false })
}

fn value(kv: Option<pb::KeyValueEntry>) -> Body {
    let kv = kv.unwrap_or_default();
    Body::Value { key: kv.key, value: kv.value.to_vec() }
}

fn sorted(states: Vec<pb::CoordinatedTaskStateInfo>) -> Vec<TaskState> {
    let by_task: BTreeMap<_, _> =
        states.into_iter().map(task_state).map(|state| (state.task, state)).collect();
    by_task.into_values().collect()
}

fn task_state(info: pb::CoordinatedTaskStateInfo) -> TaskState {
    TaskState {
        task: info.task.unwrap_or_default().task_id,
        state: info.state,
        incarnation: info.incarnation,
        error_code: info.error_code,
        error_message: info.error_message,
        error: info.error_payload.map(Into::into),
    }
}
