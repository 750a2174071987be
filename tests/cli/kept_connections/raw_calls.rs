//! Encodes the calls of raw sessions, and checks their responses. Begin at [`encode_operation`].

use muster::proto::{CoordinatedTask, tensorflow, xla::coordination as wire};
use prost::Message as _;
use tonic::Code;

use super::linearizability::KeyOperation;
use super::raw_connection::StreamResponse;
use super::shared_keys::encode_number;

/// The incarnations of a caller of generation C. A caller without them is one of generation A.
pub type RawIncarnations = Option<wire::Incarnations>;

/// A method, an encoded request, and a check of the response.
pub type CheckedCall = (&'static str, Vec<u8>, ResponseCheck);

/// Checks a response.
pub type ResponseCheck = Box<dyn FnOnce(&StreamResponse) + Send>;

/// Encodes a request for the generation of a caller. Both generations have these fields.
macro_rules! encode {
    ($incarnations:expr, $request:ident { $($fields:tt)* }) => {
        match $incarnations {
            None => tensorflow::$request { $($fields)* }.encode_to_vec(),
            Some(incarnations) => {
                wire::$request { incarnations: Some(incarnations), $($fields)* }.encode_to_vec()
            }
        }
    };
}

pub fn coordinated_task(task_id: i32) -> CoordinatedTask {
    CoordinatedTask { named: false, task_id, recoverable: false }
}

fn incarnation_of(task: i32) -> u64 {
    2000 + u64::from(task.unsigned_abs())
}

/// Encodes the registration of a task.
pub fn encode_registration(task: i32) -> Vec<u8> {
    let source_task = Some(coordinated_task(task));
    tensorflow::RegisterTaskRequest { incarnation: incarnation_of(task), source_task }.encode_to_vec()
}

/// Encodes an operation on a key; returns its method too.
pub fn encode_operation(
    incarnations: RawIncarnations,
    key: &str,
    operation: KeyOperation,
) -> (&'static str, Vec<u8>) {
    let key = key.to_owned();
    match operation {
        KeyOperation::Insert { number, overwrites } => {
            let (value, allow_overwrite) = (encode_number(number), overwrites);
            let message = match incarnations {
                None => {
                    let kv = Some(tensorflow::KeyValueEntry { key, value });
                    tensorflow::InsertKeyValueRequest { kv, allow_overwrite }.encode_to_vec()
                }
                Some(_) => {
                    let kv = Some(wire::KeyValueEntry { key, value });
                    wire::InsertKeyValueRequest { incarnations, kv, allow_overwrite }.encode_to_vec()
                }
            };
            ("InsertKeyValue", message)
        }
        KeyOperation::Get => ("GetKeyValue", encode!(incarnations, GetKeyValueRequest { key })),
        KeyOperation::TryGet => ("TryGetKeyValue", encode!(incarnations, TryGetKeyValueRequest { key })),
        KeyOperation::Increment => {
            ("IncrementKeyValue", encode!(incarnations, IncrementKeyValueRequest { key, increment: 1 }))
        }
        KeyOperation::Delete => {
            ("DeleteKeyValue", encode!(incarnations, DeleteKeyValueRequest { key, is_directory: true }))
        }
    }
}

/// Encodes a random call of a task of generation A that is not about one key. `leader` is the incarnation of the run.
pub fn encode_random_call_of_task(task: i32, leader: u64, rng: &mut fastrand::Rng) -> CheckedCall {
    let me = Some(coordinated_task(task));
    let with_status = |method: &'static str, expected: Code| -> ResponseCheck {
        Box::new(move |response| {
            assert_eq!(response.status(), Some(expected as i32), "task {task}: {method}: {response:?}");
        })
    };
    match rng.u8(0..9) {
        0 => {
            let request = tensorflow::HeartbeatRequest { incarnation: incarnation_of(task), source_task: me };
            let check: ResponseCheck = Box::new(move |response| {
                let answer = tensorflow::HeartbeatResponse::decode(response.message());
                let incarnation = answer.map(|answer| answer.leader_incarnation);
                assert_eq!(incarnation, Ok(leader), "Heartbeat: {response:?}");
            });
            ("Heartbeat", request.encode_to_vec(), check)
        }
        1 => {
            let check: ResponseCheck = Box::new(move |response| {
                let answer = tensorflow::RegisterTaskResponse::decode(response.message());
                let incarnation = answer.map(|answer| answer.leader_incarnation);
                assert_eq!(incarnation, Ok(leader), "RegisterTask: {response:?}");
            });
            ("RegisterTask", encode_registration(task), check)
        }
        2 => {
            let request = tensorflow::GetTaskStateRequest { source_task: me.into_iter().collect() };
            ("GetTaskState", request.encode_to_vec(), check_states(task))
        }
        3 => {
            let request = tensorflow::GetJobStateRequest { job_name: String::new() };
            ("GetJobState", request.encode_to_vec(), check_states(task))
        }
        4 => {
            let request = tensorflow::WatchJobStateRequest { job_name: String::new(), version_number: -1 };
            ("WatchJobState", request.encode_to_vec(), check_states(task))
        }
        5 => {
            let request = tensorflow::ReportErrorToTaskRequest::default();
            let check = with_status("ReportErrorToTask", Code::Unimplemented);
            ("ReportErrorToTask", request.encode_to_vec(), check)
        }
        6 => {
            let request =
                tensorflow::GetAliveTasksRequest { requesting_task: me, tasks: me.into_iter().collect() };
            let check: ResponseCheck = Box::new(move |response| {
                let answer = tensorflow::GetAliveTasksResponse::decode(response.message());
                let alive = answer.map(|answer| answer.incarnations);
                assert_eq!(alive, Ok(vec![incarnation_of(task)]), "GetAliveTasks: {response:?}");
            });
            ("GetAliveTasks", request.encode_to_vec(), check)
        }
        7 => {
            let barrier_id = "never-begun".to_owned();
            let request = tensorflow::CancelBarrierRequest { barrier_id, source_task: me, counter: 0 };
            let check = with_status("CancelBarrier", Code::FailedPrecondition);
            ("CancelBarrier", request.encode_to_vec(), check)
        }
        _ => {
            let request = tensorflow::GetKeyValueDirRequest { directory_key: "shared".into() };
            ("GetKeyValueDir", request.encode_to_vec(), with_status("GetKeyValueDir", Code::Ok))
        }
    }
}

/// Encodes the request of a task that exchanges one device.
pub fn encode_exchange(task: i32) -> Vec<u8> {
    let device = prost_types::Any { type_url: "test".into(), value: task.to_be_bytes().to_vec() };
    let device_info = Some(tensorflow::DeviceInfo { device: vec![device] });
    tensorflow::WaitForAllTasksRequest { source_task: Some(coordinated_task(task)), device_info }
        .encode_to_vec()
}

/// Returns a check of states of tasks: this task is connected. All methods have the states in the same field.
fn check_states(task: i32) -> ResponseCheck {
    Box::new(move |response| {
        let answer = tensorflow::GetJobStateResponse::decode(response.message()).expect("a message");
        let mut states = answer.task_state.iter();
        let state = states.find(|info| info.task.is_some_and(|found| found.task_id == task));
        let state = state.map(|info| info.state);
        assert_eq!(state, Some(tensorflow::CoordinatedTaskState::TaskstateConnected as i32), "{response:?}");
    })
}
