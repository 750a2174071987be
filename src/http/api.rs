//! The types of the bodies of REST requests and answers. The handlers and the clients (`cli`) share them.
//!
//! The code that handles a body is in the module of its handler. Some bodies are views of the state machine
//! (`JobView`, `TaskView`, …), which are defined in `coordination`. Begin at [`Problem`] and [`ServerInfo`].

mod history;
mod journal;

use std::collections::BTreeSet;
use std::net::{IpAddr, SocketAddr};

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::coordination::{
    AutoExcludeRule, BarrierView, ClaimantView, CommandReason, Device, ErrorDelivery, EventKind, ExclusionId,
    ExclusionView, HostView, JobName, JobSummary, PreemptionView, RunListItem, RunNumber, RunState, TaskId,
    TaskOwnerView, TaskView, Timestamp,
};
use crate::service::findings::Finding;
use crate::service::reports::{
    ConnectionView, PairView, PeerJobView, TaskTransfers, Throughput, TransfersView,
};

pub use history::{
    BarrierArrivalsPage, BarrierArrivalsView, EndedBarrierView, TaskStatesPage, TaskStatesView,
};
pub use journal::JournalView;

/// The type of the problem that a job does not exist.
pub const NO_SUCH_JOB: &str = "/problems/no-such-job";

/// An error in the form of RFC 9457.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Problem {
    /// The kind of the problem, as a stable relative reference.
    #[serde(rename = "type")]
    pub kind: String,
    /// The title of this kind.
    pub title: String,
    /// The HTTP status.
    pub status: u16,
    /// The cause and the remedy.
    #[schema(value_type = String)]
    pub detail: Box<str>,
    /// The path of the request.
    #[serde(default)]
    #[schema(value_type = String)]
    pub instance: Box<str>,
    /// The existing jobs, if the requested one does not exist.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub jobs: Vec<JobName>,
}

/// A name and a version.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ProductVersion {
    /// Always `muster`, by which a client recognizes the server.
    pub name: String,
    /// The version.
    pub version: String,
}

impl ProductVersion {
    /// The product name in [`ProductVersion`].
    pub const NAME: &str = "muster";

    /// Returns the version of this build.
    #[must_use]
    pub fn current() -> Self {
        Self { name: Self::NAME.into(), version: env!("CARGO_PKG_VERSION").into() }
    }
}

/// A gRPC listener and its jobs.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct GrpcListenerInfo {
    /// Its address.
    pub address: SocketAddr,
    /// The jobs whose tasks connect here.
    pub jobs: Vec<JobName>,
}

/// The version and the addresses of a server.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ServerInfo {
    /// The name and the version.
    #[serde(flatten)]
    pub version: ProductVersion,
    /// The address of the HTTP listener.
    pub http: SocketAddr,
    /// The gRPC listeners; the shared one first.
    pub grpc: Vec<GrpcListenerInfo>,
}

impl ServerInfo {
    /// Returns a copy whose listeners carry the jobs in `present`. A job that was created after the start is
    /// on the shared listener, which is the first one; a deleted job is on none.
    #[must_use]
    pub fn with_jobs<'a>(&self, present: impl IntoIterator<Item = &'a JobName>) -> Self {
        let mut about = self.clone();
        let mut present: Vec<JobName> = present.into_iter().cloned().collect();
        for listener in &mut about.grpc {
            listener.jobs.retain(|job| present.contains(job));
            present.retain(|job| !listener.jobs.contains(job));
        }
        if let Some(shared) = about.grpc.first_mut() {
            shared.jobs.append(&mut present);
        }
        about
    }

    /// Returns the address that a task of `job` dials. `host` is the name by which the client reached this
    /// server and replaces an unspecified bind address; without one, the name of this machine does.
    #[must_use]
    pub fn coordinator_address(&self, job: &JobName, host: Option<&str>) -> Option<String> {
        let listener = self.grpc.iter().find(|listener| listener.jobs.contains(job))?;
        let address = listener.address;
        let mut name = match (address.ip(), host) {
            (ip, Some(host)) if ip.is_unspecified() => host.to_owned(),
            (ip, None) if ip.is_unspecified() => machine_name(),
            (IpAddr::V6(ip), _) => format!("[{ip}]"),
            (IpAddr::V4(ip), _) => ip.to_string(),
        };
        // On the shared listener the host name selects the job. A bare address selects the default job, or
        // the only job of the server.
        let shared = self.grpc.first().is_some_and(|first| first.address == address);
        let only = self.grpc.iter().map(|listener| listener.jobs.len()).sum::<usize>() == 1;
        let meant = !shared || only || job.as_str() == JobName::DEFAULT;
        if !meant {
            if address.ip().is_loopback() {
                name = "localhost".into();
            }
            name = format!("{job}.{name}");
        }
        Some(format!("{name}:{}", address.port()))
    }
}

/// Returns the name of this machine.
#[must_use]
pub fn machine_name() -> String {
    rustix::system::uname().nodename().to_string_lossy().into_owned()
}

/// A page of jobs, by name.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct JobsPage {
    /// The jobs of this page.
    pub jobs: Vec<JobSummary>,
    /// The value of `after` for the next page; none on the last page.
    #[serde(default)]
    pub next: Option<JobName>,
}

/// Settings of a job; a missing one is unchanged, or has its default in a new job. Durations are written as
/// `90s` or `5m`.
#[derive(Debug, Default, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields, default)]
pub struct SettingsBody {
    /// The number of tasks.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tasks: Option<u32>,
    /// Tasks may fail and come back without ending the run.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub recoverable: Option<bool>,
    /// A task that is silent for this long has failed.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub heartbeat_timeout: Option<String>,
    /// The time that tasks wait for one another when they register.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub register_timeout: Option<String>,
    /// The time that tasks wait for one another when they shut down; `0s` for no wait.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub shutdown_timeout: Option<String>,
    /// The time that a task has to reconnect after its connection broke; `off` if only heartbeats count.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub disconnect_grace: Option<String>,
    /// The way in which errors reach tasks: `auto`, `hold` or `cancel`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub error_delivery: Option<ErrorDelivery>,
    /// Findings whose task is excluded automatically: `stalled-task`, `chronic-straggler`, `restart-storm`, `fatal-gpu-error`, `collective-stuck`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub auto_exclude: Option<BTreeSet<AutoExcludeRule>>,
    /// The duration of an automatic exclusion.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub auto_exclude_for: Option<String>,
    /// The jobs whose tasks may exchange transfers with those of this job. Both jobs must list each other.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub transfers_with: Option<BTreeSet<JobName>>,
    /// The bounds of the job, by name (`keys`, `store-bytes`, …).
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<Object>)]
    pub bounds: Option<serde_json::Map<String, serde_json::Value>>,
}

/// A request for a new job.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct NewJob {
    /// The name: letters, digits and hyphens, as in a host name.
    #[schema(value_type = String)]
    pub name: JobName,
    /// The settings; `tasks` is required.
    pub settings: SettingsBody,
    /// The reason: one line of at most 500 bytes.
    #[schema(value_type = String)]
    pub reason: CommandReason,
}

/// A request to change settings.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct JobPatch {
    /// The new values.
    pub settings: SettingsBody,
    /// The reason: one line of at most 500 bytes.
    #[schema(value_type = String)]
    pub reason: CommandReason,
}

/// A page of a job's runs, the newest first.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct RunsPage {
    /// The runs of this page.
    pub runs: Vec<RunListItem>,
    /// The value of `after` for the next page; none if these are the oldest that are kept.
    pub next: Option<RunNumber>,
}

/// A page of a job's tasks, by number.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct TasksPage {
    /// The tasks of this page.
    pub tasks: Vec<TaskView>,
    /// The value of `after` for the next page; none on the last page.
    pub next: Option<TaskId>,
}

/// A page of barriers: those in progress in the order in which they began, or ended ones, the latest first.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct BarriersPage {
    /// Barriers in progress; none if recent ones were requested.
    pub barriers: Vec<BarrierView>,
    /// Ended barriers, if they were requested.
    #[serde(default)]
    pub recent: Vec<EndedBarrierView>,
    /// The value of `after` for the next page; none on the last page.
    pub next: Option<u64>,
}

/// A page of devices, by platform and global id.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct DevicesPage {
    /// The devices of this page.
    pub devices: Vec<Device>,
    /// The value of `after` for the next page; none on the last page.
    pub next: Option<u64>,
}

/// A page of a job's hosts, in the order of their first task.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct HostsPage {
    /// The hosts of this page.
    pub hosts: Vec<HostView>,
    /// The value of `after` for the next page; none on the last page.
    pub next: Option<TaskId>,
}

/// A page of the owners of a job's task ids, by task.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct TaskOwnersPage {
    /// The owners of this page.
    pub owners: Vec<TaskOwnerView>,
    /// The processes that wait for a task id, by identity.
    pub waiting: Vec<ClaimantView>,
    /// The value of `after` for the next page; none on the last page.
    pub next: Option<TaskId>,
}

/// A process asks which task it is.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct NewClaim {
    /// The identity of its host: 1 to 253 visible ASCII characters that stay when the host starts again.
    pub host: String,
    /// The number of the process on its host.
    #[serde(default)]
    pub local: u32,
    /// A random number of 64 bits in hexadecimal: the same in every repetition by one process, another one in each
    /// process.
    pub claimant: String,
}

/// The answer to a process that asks which task it is.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[schema(as = TaskClaimAnswer)]
pub struct TaskClaimView {
    /// The task, once it is granted.
    pub task: Option<TaskId>,
    /// The number of tasks of the job.
    pub tasks: u32,
    /// Why it is not granted yet: `too-few`, `held-by-same` or `none-free`.
    pub pending: Option<String>,
    /// The same in a sentence.
    pub why: Option<String>,
    /// The process should ask again after so many milliseconds.
    pub retry_ms: Option<u32>,
}

/// An event of a job.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct EventLine {
    /// Its number among all events of this server, from 1.
    pub number: u64,
    /// The time, in microseconds since the Unix epoch.
    pub at: Timestamp,
    /// The job.
    pub job: JobName,
    /// The run of the job.
    pub run: RunNumber,
    /// The change.
    #[serde(flatten)]
    pub what: EventKind,
    /// The reason.
    pub reason: String,
}

/// A page of a job's events, oldest first unless the newest were requested.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct EventsPage {
    /// The events.
    pub events: Vec<EventLine>,
    /// The value of `after` for the next page.
    pub next: u64,
    /// Events before the first are no longer kept.
    pub gap: bool,
}

/// A request for an exclusion.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct NewExclusion {
    /// A task, by its number; either this or `host`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub task: Option<i32>,
    /// A host: by its name, or by its IP address for every task that registers from it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub host: Option<String>,
    /// The reason: one line of at most 500 bytes, which the excluded process receives.
    #[schema(value_type = String)]
    pub reason: CommandReason,
    /// The duration in seconds; without it the exclusion holds until it is lifted.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub expires_in_seconds: Option<u64>,
    /// Exclude even if that ends the run.
    #[serde(default)]
    pub end_run: bool,
    /// Return the effects without excluding.
    #[serde(default)]
    pub dry_run: bool,
}

/// A page of a job's exclusions, by number.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct ExclusionsPage {
    /// The exclusions of this page.
    pub exclusions: Vec<ExclusionView>,
    /// The value of `after` for the next page; none on the last page.
    pub next: Option<ExclusionId>,
}

/// A request for a drain.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct NewDrain {
    /// The reason: one line of at most 500 bytes.
    #[schema(value_type = String)]
    pub reason: CommandReason,
    /// The seconds until the machines are gone, as the notice says; 0 for now. JAX saves a quarter of an hour
    /// before that time.
    #[serde(default)]
    pub in_seconds: u64,
}

/// The state of a drain.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct DrainView {
    /// The run that is drained.
    pub run: RunNumber,
    /// The notice, the tasks that have acknowledged it, and the agreed step; `None` without a drain.
    pub preemption: Option<PreemptionView>,
    /// The state of the run: after its end no step will be agreed on.
    #[serde(default = "default_run_state")]
    pub state: RunState,
    /// The tasks that the agreement on a step waits for.
    pub waiting_for: Vec<TaskId>,
}

/// The default of `state` in the answer of a server that does not send it.
fn default_run_state() -> RunState {
    RunState::Running
}

/// A key, without its value.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct KeyInfo {
    /// The key as text; a directory ends with a slash. Bytes that are no text are replaced.
    pub key: String,
    /// The key's bytes in base64, if it is not text.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub key_base64: Option<String>,
    /// The length of the value in bytes; none for a directory.
    pub value_bytes: Option<usize>,
    /// The time of the last write.
    pub written_at: Option<Timestamp>,
    /// The task that wrote the value, if known.
    pub written_by: Option<TaskId>,
    /// The number of keys below a directory.
    pub keys_below: usize,
    /// The total length of their values in bytes.
    pub bytes_below: usize,
}

/// A page of keys, in byte order.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct KeysPage {
    /// The keys of this page.
    pub keys: Vec<KeyInfo>,
    /// The value of `after` for the next page, percent-encoded; none on the last page.
    pub next: Option<String>,
}

/// A value.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct KeyView {
    /// The key as text.
    pub key: String,
    /// The key's bytes in base64, if it is not text.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub key_base64: Option<String>,
    /// The length of the value in bytes.
    pub value_bytes: usize,
    /// The time of the last write.
    pub written_at: Timestamp,
    /// The task that wrote the value, if known.
    pub written_by: Option<TaskId>,
    /// The value, if it is text.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub text: Option<String>,
    /// The value in base64, if it is not text.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub base64: Option<String>,
    /// Only the beginning of the value is returned.
    pub truncated: bool,
    /// The value is hidden by a setting of the server.
    pub redacted: bool,
}

/// A request to store a value.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct NewValue {
    /// The value as text; either this or `base64`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub text: Option<String>,
    /// The value's bytes in base64.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub base64: Option<String>,
    /// Replace an existing value; without it an existing value is an error.
    #[serde(default)]
    pub overwrite: bool,
    /// The reason: one line of at most 500 bytes.
    #[schema(value_type = String)]
    pub reason: CommandReason,
}

/// The findings of one job.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct JobFindings {
    /// The findings that hold now, by severity.
    pub open: Vec<Finding>,
    /// The closed findings, the latest first: 64 at most.
    pub closed: Vec<Finding>,
    /// The time of the last check.
    pub looked_at: Timestamp,
}

/// The open findings of every job.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct FindingsPage {
    /// The findings by job, by severity.
    pub findings: Vec<Finding>,
    /// The time of the last check.
    pub looked_at: Timestamp,
}

/// The transfers of a job's present run.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct TransfersPage {
    /// The totals.
    #[serde(flatten)]
    pub summary: TransfersView,
    /// The bytes over time.
    pub throughput: Throughput,
    /// The pairs of tasks of this page, by number.
    pub pairs: Vec<PairView>,
    /// The number of pairs that are kept one by one.
    pub pairs_kept: usize,
    /// The bytes with tasks of other jobs, by task: at most as many as the page has pairs.
    #[serde(default)]
    pub peer_jobs: Vec<PeerJobView>,
    /// The present connections, those with the most launches of each task first: at most as many as the page
    /// has pairs.
    pub connections: Vec<ConnectionView>,
    /// The value of `after` for the next page of pairs; none on the last page.
    pub next: Option<u64>,
}

/// A page of the transfers of single tasks, by task number.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct TaskTransfersPage {
    /// The tasks of this page; tasks without reports are left out.
    pub tasks: Vec<TaskTransfers>,
    /// The value of `after` for the next page; none on the last page.
    pub next: Option<TaskId>,
}

#[cfg(test)]
mod tests {
    use super::*;

    fn about(listeners: &[(&str, &[&str])]) -> ServerInfo {
        let listener = |(address, jobs): &(&str, &[&str])| GrpcListenerInfo {
            address: address.parse().unwrap(),
            jobs: jobs.iter().map(|job| job.parse().unwrap()).collect(),
        };
        ServerInfo {
            version: ProductVersion::current(),
            http: ([127, 0, 0, 1], 1).into(),
            grpc: listeners.iter().map(listener).collect(),
        }
    }

    fn address(about: &ServerInfo, job: &str, host: Option<&str>) -> Option<String> {
        about.coordinator_address(&job.parse().unwrap(), host)
    }

    #[test]
    fn tasks_are_sent_where_their_job_is_found() {
        let one = about(&[("127.0.0.1:8476", &["a"])]);
        assert_eq!(address(&one, "a", None).unwrap(), "127.0.0.1:8476");
        assert_eq!(address(&one, "b", None), None);
        let two = about(&[("127.0.0.1:8476", &["a", "default"])]);
        assert_eq!(address(&two, "a", None).unwrap(), "a.localhost:8476");
        assert_eq!(address(&two, "default", None).unwrap(), "127.0.0.1:8476");
        let own = about(&[("0.0.0.0:8476", &["a"]), ("[::1]:9000", &["b"])]);
        assert_eq!(address(&own, "a", Some("host")).unwrap(), "a.host:8476");
        assert_eq!(address(&own, "b", Some("host")).unwrap(), "[::1]:9000");
    }
}
