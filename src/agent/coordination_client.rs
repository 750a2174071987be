//! Makes the calls of the coordination protocol: those of generation C, those of generation A that need no
//! registration, and those about tasks of other jobs.
//!
//! The agent retries failed calls; this module does not. Begin at [`CoordinationClient::register`].

use std::future::Future;
use std::time::Duration;

use bytes::Bytes;
use prost::Message as _;
use tonic::transport::Channel;
use tonic::{Code, Response, Status};

use super::channel::DetectedPortProtocol;
use super::engine_record;
use super::error::AgentError;
use super::live_engines::RosterSource;
use super::task_states::ReportedTaskState;
use crate::proto::CoordinatedTask;
use crate::proto::muster::v1::peer_jobs_client::PeerJobsClient;
use crate::proto::muster::v1::{PeerEngineRequest, PeerTasksRequest};
use crate::proto::tensorflow::coordination_service_client::CoordinationServiceClient as FormerClient;
use crate::proto::tensorflow::distributed_runtime::GrpcPayloadContainer;
use crate::proto::tensorflow::{
    CancelBarrierRequest, CoordinatedTaskState, CoordinatedTaskStateInfo, DeleteKeyValueRequest,
    GetJobStateRequest, GetKeyValueDirRequest, GetKeyValueRequest, InsertKeyValueRequest, KeyValueEntry,
    TryGetKeyValueRequest, WatchJobStateRequest,
};
use crate::proto::xla::coordination::coordination_service_client::CoordinationServiceClient;
use crate::proto::xla::coordination::{self as pb};
use crate::transfer::MemberId;

/// The largest accepted response: the states of a million tasks.
const RESPONSE_BYTES_MAX: usize = 256 << 20;
/// The size of a response beside a key and its value.
const ANSWER_OVERHEAD: usize = 64;

/// A client of the coordination service for one incarnation of a task.
#[derive(Debug, Clone)]
pub struct CoordinationClient {
    client: CoordinationServiceClient<Channel>,
    former: FormerClient<Channel>,
    peers: PeerJobsClient<Channel>,
    address: String,
    port: DetectedPortProtocol,
    task: i32,
    incarnation: u64,
    /// The service incarnation with which this incarnation registered.
    run: u64,
}

/// The failure of a call, with the barrier's counter if it has one.
struct CallFailure {
    error: AgentError,
    counter: Option<i64>,
    own: bool,
}

impl From<CallFailure> for AgentError {
    fn from(failure: CallFailure) -> Self {
        failure.error
    }
}

const SERVICE_ERROR: &str = "type.googleapis.com/tensorflow.CoordinationServiceError";
const BARRIER_ERROR: &str = "type.googleapis.com/tensorflow.BarrierError";
const MISMATCH_ERROR: &str = "type.googleapis.com/tensorflow.ServiceMismatchError";

impl CoordinationClient {
    /// Returns a client over `channel`, which is not registered yet.
    pub fn new(
        (channel, port): (Channel, DetectedPortProtocol),
        address: String,
        task: u32,
        incarnation: u64,
    ) -> Self {
        let former = FormerClient::new(channel.clone()).max_decoding_message_size(RESPONSE_BYTES_MAX);
        let peers = PeerJobsClient::new(channel.clone()).max_decoding_message_size(RESPONSE_BYTES_MAX);
        let client = CoordinationServiceClient::new(channel)
            .max_decoding_message_size(RESPONSE_BYTES_MAX)
            .max_encoding_message_size(RESPONSE_BYTES_MAX);
        Self { client, former, peers, address, port, task: task as i32, incarnation, run: 0 }
    }

    /// Returns the service incarnation of the run.
    pub const fn service_incarnation(&self) -> u64 {
        self.run
    }

    const fn own_incarnations(&self) -> Option<pb::Incarnations> {
        // Released clients omit the task id too.
        Some(pb::Incarnations {
            task_id: 0,
            task_incarnation: self.incarnation,
            service_incarnation: self.run,
        })
    }

    async fn call_with_limit<T>(
        &self,
        call: &'static str,
        limit: Option<Duration>,
        asking: impl Future<Output = Result<Response<T>, Status>>,
    ) -> Result<T, CallFailure> {
        let answered = match limit {
            None => asking.await,
            Some(limit) => tokio::time::timeout(limit, asking).await.map_err(|_| CallFailure {
                error: AgentError::TimedOut { call, limit },
                counter: None,
                own: false,
            })?,
        };
        answered.map(Response::into_inner).map_err(|status| self.failure_from_status(call, &status))
    }

    fn failure_from_status(&self, call: &'static str, status: &Status) -> CallFailure {
        let payloads = GrpcPayloadContainer::decode(status.details()).unwrap_or_default().payloads;
        let own = payloads.contains_key(SERVICE_ERROR);
        let mismatch = payloads
            .get(MISMATCH_ERROR)
            .and_then(|value| pb::ServiceMismatchError::decode(value.clone()).ok());
        let barrier =
            payloads.get(BARRIER_ERROR).and_then(|value| pb::BarrierError::decode(value.clone()).ok());
        let message = crate::text::escape_to_one_line(status.message()).into_owned();
        // A status of the service has no cause; only a local error has one, such as a lost connection.
        let cause = std::error::Error::source(status);
        let error = if let Some(mismatch) = mismatch {
            AgentError::RunChanged { call, was: self.run, now: mismatch.service_incarnation }
        } else if !own && (cause.is_some() || matches!(status.code(), Code::Unavailable | Code::Unknown)) {
            let why = self.port.mismatch_hint().map(str::to_owned);
            let why = why.unwrap_or_else(|| cause.map_or(message, root_cause));
            AgentError::Unreachable { service: self.address.clone(), call, why }
        } else {
            AgentError::Refused { call, code: status.code(), message }
        };
        CallFailure { error, counter: barrier.map(|barrier| barrier.counter), own }
    }

    /// Registers this incarnation. `Ok(Err(…))`: not registered yet, and the call may be repeated.
    ///
    /// Clients repeat it after every error that is not the service's own statement, and after ABORTED and
    /// INTERNAL.
    pub async fn register(&mut self, limit: Duration) -> Result<Result<(), AgentError>, AgentError> {
        let request = pb::RegisterTaskRequest { incarnation: self.incarnation, source_task_id: self.task };
        let mut client = self.client.clone();
        match self.call_with_limit("registration", Some(limit), client.register_task(request)).await {
            Ok(answer) => {
                self.run = answer.service_incarnation;
                Ok(Ok(()))
            }
            Err(CallFailure { error, own, .. }) => {
                let again = !own || matches!(error.grpc_code(), Some(Code::Aborted | Code::Internal));
                if again { Ok(Err(error)) } else { Err(error) }
            }
        }
    }

    /// Sends a heartbeat.
    pub async fn heartbeat(&self, limit: Duration) -> Result<(), AgentError> {
        let request = pb::HeartbeatRequest {
            incarnations: self.own_incarnations(),
            incarnation: self.incarnation,
            source_task_id: self.task,
        };
        let answer =
            self.call_with_limit("heartbeat", Some(limit), self.client.clone().heartbeat(request)).await?;
        let now = answer.service_incarnation;
        if now == self.run {
            return Ok(());
        }
        Err(AgentError::RunChanged { call: "heartbeat", was: self.run, now })
    }

    /// Waits for an error of the run. `Ok`: errors will not arrive this way.
    pub async fn poll_for_error(&self) -> Result<(), AgentError> {
        let request =
            pb::PollForErrorRequest { incarnations: self.own_incarnations(), source_task_id: self.task };
        match self.call_with_limit("error poll", None, self.client.clone().poll_for_error(request)).await {
            Ok(_) => Err(AgentError::Protocol {
                call: "error poll",
                what: "it was answered without an error".to_owned(),
            }),
            Err(failure) => match failure.error {
                AgentError::Refused { code: Code::Cancelled, .. } => Ok(()),
                AgentError::Refused { code, message, .. } => Err(AgentError::Ended { code, message }),
                error => Err(error),
            },
        }
    }

    /// Ends this incarnation in good order; in a fate-sharing job it waits for the others.
    pub async fn shutdown(&self, limit: Duration) -> Result<(), AgentError> {
        let request =
            pb::ShutdownTaskRequest { incarnations: self.own_incarnations(), source_task_id: self.task };
        self.call_with_limit("shutdown", Some(limit), self.client.clone().shutdown_task(request)).await?;
        Ok(())
    }

    /// Reports an error of this task, by which the service fails it.
    pub async fn report_error(&self, code: Code, message: &str, limit: Duration) -> Result<(), AgentError> {
        let request = pb::ReportErrorToServiceRequest {
            incarnations: self.own_incarnations(),
            source_task_id: self.task,
            error_code: code as i32,
            error_message: message.to_owned(),
        };
        let asking = async { self.client.clone().report_error_to_service(request).await };
        self.call_with_limit("error report", Some(limit), asking).await.map(|_| ()).map_err(AgentError::from)
    }

    /// Returns the states of all tasks and their version, once they are newer than `version`.
    pub async fn watch_task_states(
        &self,
        version: i64,
        limit: Option<Duration>,
    ) -> Result<(Vec<ReportedTaskState>, i64), AgentError> {
        let request =
            pb::WatchTasksRequest { incarnations: self.own_incarnations(), version_number: version };
        let answer =
            self.call_with_limit("watch of tasks", limit, self.client.clone().watch_tasks(request)).await?;
        Ok((decode_xla_task_states(answer.task_state), answer.version_number))
    }

    /// Returns the states of all tasks of another job and their version, once they are newer than `version`. The caller
    /// need not have registered.
    pub async fn watch_peer_tasks(
        &self,
        job: &str,
        version: i64,
    ) -> Result<(Vec<ReportedTaskState>, i64), AgentError> {
        let request = PeerTasksRequest { job: job.to_owned(), version };
        let answer = self
            .call_with_limit("watch of peer tasks", None, self.peers.clone().watch_peer_tasks(request))
            .await?;
        Ok((decode_xla_task_states(answer.task_state), answer.version_number))
    }

    /// Returns the engine record of a member of another job, once it is published. The caller need not have registered.
    pub async fn wait_for_peer_engine_record(
        &self,
        job: &str,
        member: MemberId,
    ) -> Result<Bytes, AgentError> {
        let (task, incarnation) = (member.task.0, member.incarnation.get());
        let request = PeerEngineRequest { job: job.to_owned(), task, incarnation };
        let most = engine_record::BYTES_MAX + ANSWER_OVERHEAD;
        let mut client = self.peers.clone().max_decoding_message_size(most);
        let answer = self.call_with_limit("engine record", None, client.get_peer_engine(request)).await?;
        Ok(answer.kv.unwrap_or_default().value)
    }

    /// Returns the states of all tasks. The caller need not have registered.
    pub async fn get_task_states_without_registration(
        &self,
        limit: Duration,
    ) -> Result<Vec<ReportedTaskState>, AgentError> {
        let mut client = self.former.clone();
        let asking = client.get_job_state(GetJobStateRequest::default());
        Ok(decode_tensorflow_task_states(
            self.call_with_limit("task states", Some(limit), asking).await?.task_state,
        ))
    }

    /// Returns the states of all tasks and their version, once they are newer than `version`. The caller need not have
    /// registered.
    pub async fn watch_task_states_without_registration(
        &self,
        version: i64,
    ) -> Result<(Vec<ReportedTaskState>, i64), AgentError> {
        let request = WatchJobStateRequest { version_number: version, ..WatchJobStateRequest::default() };
        let mut client = self.former.clone();
        let answer = self.call_with_limit("watch of tasks", None, client.watch_job_state(request)).await?;
        Ok((decode_tensorflow_task_states(answer.task_state), answer.version_number))
    }

    /// Returns the entries of a directory, by key. The caller need not have registered.
    pub async fn list_without_registration(
        &self,
        directory: &str,
        limit: Duration,
    ) -> Result<Vec<(String, Bytes)>, AgentError> {
        let request = GetKeyValueDirRequest { directory_key: directory.to_owned() };
        let mut client = self.former.clone();
        let entries = self.call_with_limit("list", Some(limit), client.get_key_value_dir(request)).await?.kv;
        Ok(entries.into_iter().map(|kv| (kv.key, kv.value)).collect())
    }

    /// Writes a key; returns whether it was written, which it is not if it exists and `overwrite` is false. The caller
    /// need not have registered.
    pub async fn insert_without_registration(
        &self,
        key: &str,
        value: impl Into<Bytes>,
        overwrite: bool,
        limit: Duration,
    ) -> Result<bool, AgentError> {
        let kv = Some(KeyValueEntry { key: key.to_owned(), value: value.into() });
        let request = InsertKeyValueRequest { kv, allow_overwrite: overwrite };
        let mut client = self.former.clone();
        match self.call_with_limit("insert", Some(limit), client.insert_key_value(request)).await {
            Ok(_) => Ok(true),
            Err(CallFailure { error: AgentError::Refused { code: Code::AlreadyExists, .. }, .. }) => {
                Ok(false)
            }
            Err(failure) => Err(failure.error),
        }
    }

    /// Returns the value of a key, once it has one, if it is not longer than `most`. The caller need not have registered.
    ///
    /// # Errors
    /// `OutOfRange`, if it is longer.
    pub async fn get_without_registration(&self, key: &str, most: usize) -> Result<Bytes, AgentError> {
        let request = GetKeyValueRequest { key: key.to_owned() };
        let mut client = self.former.clone().max_decoding_message_size(most + key.len() + ANSWER_OVERHEAD);
        let answer = self.call_with_limit("get", None, client.get_key_value(request)).await;
        Ok(answer.map_err(|failure| failure.error)?.kv.unwrap_or_default().value)
    }

    /// Returns the value of a key, if it has one now. The caller need not have registered.
    pub async fn try_get_without_registration(
        &self,
        key: &str,
        limit: Duration,
    ) -> Result<Option<Bytes>, AgentError> {
        let request = TryGetKeyValueRequest { key: key.to_owned() };
        let mut client = self.former.clone();
        match self.call_with_limit("get", Some(limit), client.try_get_key_value(request)).await {
            Ok(answer) => Ok(Some(answer.kv.unwrap_or_default().value)),
            Err(CallFailure { error: AgentError::Refused { code: Code::NotFound, .. }, .. }) => Ok(None),
            Err(failure) => Err(failure.error),
        }
    }

    /// Deletes a key and everything below it. The caller need not have registered.
    pub async fn delete_without_registration(&self, key: &str, limit: Duration) -> Result<(), AgentError> {
        let request = DeleteKeyValueRequest { key: key.to_owned(), is_directory: true };
        let mut client = self.former.clone();
        let asking = self.call_with_limit("delete", Some(limit), client.delete_key_value(request)).await;
        asking.map(|_| ()).map_err(|failure| failure.error)
    }

    /// Returns why the service refuses every call of this task, if it does: an exclusion. The caller need not have
    /// registered.
    pub async fn query_exclusion_reason(&self, limit: Duration) -> Result<Option<String>, AgentError> {
        let mut client = self.former.clone();
        // A call of the task that changes nothing: no task begins this barrier.
        let request = CancelBarrierRequest {
            barrier_id: "muster/admission".to_owned(),
            source_task: Some(CoordinatedTask { task_id: self.task, ..CoordinatedTask::default() }),
            ..CancelBarrierRequest::default()
        };
        let asked = self.call_with_limit("admission", Some(limit), client.cancel_barrier(request)).await;
        match asked.map_err(AgentError::from) {
            Err(AgentError::Refused { code: Code::PermissionDenied, message, .. }) => Ok(Some(message)),
            Ok(_) | Err(AgentError::Refused { .. }) => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Waits at a barrier of all tasks, or of `members`. `counter` is that of this incarnation's last
    /// instance, or -1, and is advanced. The service applies `limit`; `own` is for a service that does not
    /// answer.
    pub async fn barrier(
        &self,
        id: &str,
        members: &[u32],
        counter: &mut i64,
        limit: Duration,
        own: Duration,
    ) -> Result<(), AgentError> {
        let request = pb::BarrierRequest {
            incarnations: self.own_incarnations(),
            barrier_id: id.to_owned(),
            barrier_timeout_in_ms: i64::try_from(limit.as_millis()).unwrap_or(i64::MAX),
            task_ids: members.iter().map(|task| *task as i32).collect(),
            source_task_id: self.task,
            counter: *counter + 1,
        };
        match self.call_with_limit("barrier", Some(own), self.client.clone().barrier(request)).await {
            Ok(answer) => {
                *counter = answer.counter;
                Ok(())
            }
            Err(failure) => {
                *counter = failure.counter.unwrap_or(*counter);
                Err(failure.error)
            }
        }
    }

    /// Cancels instance `counter` of a barrier; returns whether it was in time.
    pub async fn cancel_barrier(&self, id: &str, counter: i64, limit: Duration) -> Result<bool, AgentError> {
        let request = pb::CancelBarrierRequest {
            incarnations: self.own_incarnations(),
            barrier_id: id.to_owned(),
            counter,
            source_task_id: self.task,
        };
        let asking = self
            .call_with_limit("end of a barrier", Some(limit), self.client.clone().cancel_barrier(request))
            .await;
        match asking {
            Ok(_) => Ok(true),
            Err(CallFailure {
                error: AgentError::Refused { code: Code::FailedPrecondition, .. }, ..
            }) => Ok(false),
            Err(failure) => Err(failure.error),
        }
    }

    /// Returns the incarnations of the live ones of `tasks`, once all of them have called.
    pub async fn request_live_set(
        &self,
        tasks: &[u32],
        limit: Option<Duration>,
    ) -> Result<Vec<(u32, u64)>, AgentError> {
        let request = pb::GetAliveTasksRequest {
            incarnations: self.own_incarnations(),
            requesting_task_id: self.task,
            task_ids: tasks.iter().map(|task| *task as i32).collect(),
        };
        let answer =
            self.call_with_limit("live set", limit, self.client.clone().get_alive_tasks(request)).await?;
        if answer.alive_task_ids.len() != answer.incarnations.len() {
            let what = "not every live task has an incarnation".to_owned();
            return Err(AgentError::Protocol { call: "live set", what });
        }
        let ids = answer.alive_task_ids.into_iter().map(|task| task as u32);
        let mut alive: Vec<_> = ids.zip(answer.incarnations).collect();
        alive.sort_unstable();
        Ok(alive)
    }

    /// Writes a key, which must not exist unless `overwrite`.
    pub async fn insert(
        &self,
        key: &str,
        value: impl Into<Bytes>,
        overwrite: bool,
        limit: Duration,
    ) -> Result<(), AgentError> {
        let kv = Some(pb::KeyValueEntry { key: key.to_owned(), value: value.into() });
        let request = pb::InsertKeyValueRequest {
            incarnations: self.own_incarnations(),
            kv,
            allow_overwrite: overwrite,
        };
        self.call_with_limit("insert", Some(limit), self.client.clone().insert_key_value(request)).await?;
        Ok(())
    }

    /// Returns the value of a key, once it has one.
    pub async fn get(&self, key: &str, limit: Option<Duration>) -> Result<Bytes, AgentError> {
        let request = pb::GetKeyValueRequest { incarnations: self.own_incarnations(), key: key.to_owned() };
        let answer = self.call_with_limit("get", limit, self.client.clone().get_key_value(request)).await?;
        Ok(answer.kv.unwrap_or_default().value)
    }

    /// Returns the value of a key that other processes write, if it is not longer than `most`.
    ///
    /// # Errors
    /// `OutOfRange`, if it is longer.
    pub async fn get_with_max_size(&self, key: &str, most: usize) -> Result<Bytes, AgentError> {
        let request = pb::GetKeyValueRequest { incarnations: self.own_incarnations(), key: key.to_owned() };
        // The response contains the key beside its value.
        let mut client = self.client.clone().max_decoding_message_size(most + key.len() + ANSWER_OVERHEAD);
        let answer = self.call_with_limit("get", None, client.get_key_value(request)).await?;
        Ok(answer.kv.unwrap_or_default().value)
    }

    /// Returns the value of a key, if it has one now.
    pub async fn try_get(&self, key: &str, limit: Duration) -> Result<Option<Bytes>, AgentError> {
        let request =
            pb::TryGetKeyValueRequest { incarnations: self.own_incarnations(), key: key.to_owned() };
        match self.call_with_limit("get", Some(limit), self.client.clone().try_get_key_value(request)).await {
            Ok(answer) => Ok(Some(answer.kv.unwrap_or_default().value)),
            Err(CallFailure { error: AgentError::Refused { code: Code::NotFound, .. }, .. }) => Ok(None),
            Err(failure) => Err(failure.error),
        }
    }

    /// Returns the entries of a directory, by key.
    pub async fn list(&self, directory: &str, limit: Duration) -> Result<Vec<(String, Bytes)>, AgentError> {
        let request = pb::GetKeyValueDirRequest {
            incarnations: self.own_incarnations(),
            directory_key: directory.to_owned(),
        };
        let answer =
            self.call_with_limit("list", Some(limit), self.client.clone().get_key_value_dir(request)).await?;
        Ok(answer.kv.into_iter().map(|kv| (kv.key, kv.value)).collect())
    }

    /// Deletes a key and everything below it.
    pub async fn delete(&self, key: &str, limit: Duration) -> Result<(), AgentError> {
        let request = pb::DeleteKeyValueRequest {
            incarnations: self.own_incarnations(),
            key: key.to_owned(),
            is_directory: true,
        };
        self.call_with_limit("delete", Some(limit), self.client.clone().delete_key_value(request)).await?;
        Ok(())
    }
}

impl RosterSource for CoordinationClient {
    async fn watch_states(&self, version: i64) -> Result<(Vec<ReportedTaskState>, i64), AgentError> {
        self.watch_task_states(version, None).await
    }

    async fn wait_for_engine_record(&self, member: MemberId) -> Result<Bytes, AgentError> {
        self.get_with_max_size(&engine_record::store_key(member), engine_record::BYTES_MAX).await
    }
}

/// Returns task states from an answer of generation C.
fn decode_xla_task_states(states: Vec<pb::TaskInfo>) -> Vec<ReportedTaskState> {
    let known = |info: pb::TaskInfo| {
        Some(ReportedTaskState {
            task: u32::try_from(info.task_id).ok()?,
            connected: info.state == pb::TaskState::Connected as i32,
            incarnation: info.incarnation,
            error: crate::text::escape_to_one_line(&info.error_message).into_owned(),
        })
    };
    states.into_iter().filter_map(known).collect()
}

/// Returns task states from an answer of generation A.
fn decode_tensorflow_task_states(states: Vec<CoordinatedTaskStateInfo>) -> Vec<ReportedTaskState> {
    let known = |info: CoordinatedTaskStateInfo| {
        Some(ReportedTaskState {
            task: u32::try_from(info.task?.task_id).ok()?,
            connected: info.state == CoordinatedTaskState::TaskstateConnected as i32,
            incarnation: info.incarnation,
            error: crate::text::escape_to_one_line(&info.error_message).into_owned(),
        })
    };
    states.into_iter().filter_map(known).collect()
}

/// Returns the last cause of an error: the system's message.
fn root_cause(error: &(dyn std::error::Error + 'static)) -> String {
    let mut error = error;
    while let Some(source) = error.source() {
        error = source;
    }
    crate::text::escape_to_one_line(&error.to_string()).into_owned()
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use tonic::transport::Endpoint;

    fn encode_error_payloads(entries: &[(&str, Vec<u8>)]) -> Bytes {
        let payloads = entries.iter().map(|(key, value)| ((*key).to_owned(), value.clone().into())).collect();
        GrpcPayloadContainer { payloads }.encode_to_vec().into()
    }

    #[tokio::test]
    async fn transport_errors_differ_from_service_errors() {
        let channel = Endpoint::from_static("http://127.0.0.1:9").connect_lazy();
        let service = CoordinationClient {
            run: 5,
            ..CoordinationClient::new((channel, DetectedPortProtocol::default()), "m:1".to_owned(), 1, 2)
        };
        let failure = service.failure_from_status("x", &Status::unavailable("Socket closed"));
        assert!(failure.error.is_transient() && !failure.own);
        // A lost connection is reported like this too.
        let ended = Status::from_error(Box::new(std::io::Error::other("closed")));
        assert!(service.failure_from_status("x", &ended).error.is_transient(), "{ended:?}");
        let mut cancelled = Status::cancelled("operation was canceled");
        assert!(!service.failure_from_status("x", &cancelled).error.is_transient());
        cancelled.set_source(Arc::new(std::io::Error::other("closed")));
        assert!(service.failure_from_status("x", &cancelled).error.is_transient());
        let own = encode_error_payloads(&[(SERVICE_ERROR, Vec::new())]);
        let failure = service.failure_from_status("x", &Status::with_details(Code::Unavailable, "gone", own));
        assert!(!failure.error.is_transient() && failure.own);
        let mismatch = pb::ServiceMismatchError { service_incarnation: 9 }.encode_to_vec();
        let details = encode_error_payloads(&[(SERVICE_ERROR, Vec::new()), (MISMATCH_ERROR, mismatch)]);
        let failure =
            service.failure_from_status("x", &Status::with_details(Code::Internal, "wrong", details));
        assert_eq!(failure.error, AgentError::RunChanged { call: "x", was: 5, now: 9 });
        let barrier = pb::BarrierError { barrier_id: "b".to_owned(), counter: 7 }.encode_to_vec();
        let details = encode_error_payloads(&[(SERVICE_ERROR, Vec::new()), (BARRIER_ERROR, barrier)]);
        let failure =
            service.failure_from_status("x", &Status::with_details(Code::Cancelled, "stale\nline", details));
        assert_eq!(failure.counter, Some(7));
        assert!(failure.error.to_string().contains("stale | line"), "{}", failure.error);
        // Malformed details are not a failure of their own.
        let failure = service.failure_from_status(
            "x",
            &Status::with_details(Code::Internal, "m", Bytes::from_static(b"\xff\xff")),
        );
        assert_eq!(failure.error.grpc_code(), Some(Code::Internal));
    }
}
