//! Reports the collectives of this process to the service, for the profiler plug-in of NCCL.
//!
//! The process need not have registered: an unmodified program registers through JAX, and knows nothing of the plug-in. So a
//! report says by itself which process it is of. `muster_collectives` has the record that is reported, and the question to RAS
//! that the service may ask for. Begin at [`CollectiveReporter`].

use std::time::Duration;

use muster_collectives::ras::{RasCommunicator, RasRank, RasRankState, ask_ras, ras_address_of_environment};
use muster_collectives::{CommunicatorSnapshot, OperationSnapshot, Record, monotonic_nanos};
use tokio::task::JoinHandle;
use tokio::time::Instant;
use tonic::Code;
use tonic::transport::Channel;

use super::channel;
use super::cluster_env::{ClusterEnv, ClusterFlags, environment_variables};
use super::config::AgentTlsFiles;
use super::error::AgentError;
use super::transfer_reports::{CALL_TIMEOUT, UNSUPPORTED_PAUSE, asked_report_interval};
use crate::clock;
use crate::proto::muster::v1 as pb;
use crate::proto::muster::v1::collectives_client::CollectivesClient;

/// The pause after a report that was not taken: at first, and at most.
const RETRY_PAUSE: (Duration, Duration) = (Duration::from_secs(1), Duration::from_secs(10));
/// The time after the last answer for which NCCL is still asked for times on the GPU.
const TIMING_KEPT: Duration = Duration::from_secs(60);
/// The number of collectives that the service gets of those that it asked for.
const WANTED_COLLECTIVES: usize = 16;

/// The most characters of an error of RAS in a report.
const RAS_ERROR_LENGTH_MAX: usize = 200;

/// Reports the record of this process.
#[derive(Debug)]
pub struct CollectiveReporter {
    channel: Channel,
    service: String,
    job: Option<String>,
    task: Option<u32>,
    host: String,
    process: u64,
    sequence: u64,
    wanted: Vec<pb::WantedCollectives>,
    ras: RasQuery,
}

/// A query to RAS, NCCL's own monitoring. It takes seconds, so it runs on a thread of its own.
#[derive(Debug, Default)]
struct RasQuery {
    running: Option<JoinHandle<pb::RasReport>>,
    /// For the next report.
    answer: Option<pb::RasReport>,
}

impl RasQuery {
    /// Starts a query about these communicators, unless one runs.
    fn start(&mut self, hashes: Vec<u64>) {
        if !hashes.is_empty() && self.running.is_none() {
            self.running = Some(tokio::task::spawn_blocking(move || ask_ras_about(&hashes)));
        }
    }

    /// Keeps the answer of a query that has ended.
    async fn poll_answer(&mut self) {
        if let Some(ended) = self.running.take_if(|running| running.is_finished()) {
            self.answer = ended.await.ok();
        }
    }
}

/// Returns what RAS of this host says of communicators. Blocks for seconds.
fn ask_ras_about(hashes: &[u64]) -> pb::RasReport {
    match ask_ras(&ras_address_of_environment()) {
        Ok(report) => {
            let wanted = report.communicators.iter().filter(|it| hashes.contains(&it.hash));
            let communicators: Vec<_> = wanted.map(describe_ras_communicator).collect();
            let error = match communicators.is_empty() {
                true => "it knows none of these communicators: another job may listen at the same address"
                    .to_owned(),
                false => String::new(),
            };
            pb::RasReport { nccl_version: report.nccl_version, error, communicators }
        }
        // The service keeps the first characters.
        Err(error) => pb::RasReport {
            error: error.to_string().chars().take(RAS_ERROR_LENGTH_MAX).collect(),
            ..pb::RasReport::default()
        },
    }
}

fn describe_ras_communicator(found: &RasCommunicator) -> pb::RasCommunicator {
    let describe = |rank: &RasRank| pb::RasRank {
        rank: rank.rank,
        host: rank.host.clone(),
        pid: rank.pid,
        state: rank.state.name().to_owned(),
        error: if let RasRankState::Failed(code) = rank.state { code } else { 0 },
        called: rank.called,
    };
    pb::RasCommunicator {
        hash: found.hash,
        ranks: found.ranks,
        answered: found.answered,
        front: found.front,
        back: found.back,
        notable: found.notable.iter().map(describe).collect(),
        notable_count: found.notable_count,
        total_called: found.total_called,
    }
}

impl CollectiveReporter {
    /// Returns the reporter to the service that the environment names.
    ///
    /// It must be called in the context of a runtime.
    ///
    /// # Errors
    /// If the environment names no service, or certificates that cannot be used.
    pub fn from_environment() -> Result<Self, AgentError> {
        let variables = environment_variables();
        let flags = ClusterFlags::default();
        let found = match ClusterEnv::detect(&flags, &variables) {
            Ok(found) => Ok((found.service.value, Some(found.task.value))),
            // A program may tell its number to JAX by itself.
            Err(_) => ClusterEnv::detect_without_task(&flags, &variables)
                .map(|found| (found.service.value, None))
                .map_err(|error| AgentError::Settings(error.to_string())),
        };
        let (service, task) = found?;
        let variable = |name: &str| variables.get(name).cloned().filter(|value| !value.is_empty());
        let tls = variable("MUSTER_CA").map(|ca| AgentTlsFiles {
            ca: ca.into(),
            own: variable("MUSTER_CERT")
                .zip(variable("MUSTER_KEY"))
                .map(|(cert, key)| (cert.into(), key.into())),
        });
        let job = variable("MUSTER_JOB");
        let authority = job.as_ref().map(|job| format!("{job}.job"));
        let (channel, _) = channel::open_channel(&service, authority.as_deref(), tls.as_ref())?;
        let host = rustix::system::uname().nodename().to_string_lossy().into_owned();
        let process = clock::random_u64();
        Ok(Self {
            channel,
            service,
            job,
            task,
            host,
            process,
            sequence: 0,
            wanted: Vec::new(),
            ras: RasQuery::default(),
        })
    }

    /// Returns the address of the service.
    #[must_use]
    pub fn service(&self) -> &str {
        &self.service
    }

    /// Returns the job, if the environment names one.
    #[must_use]
    pub fn job(&self) -> Option<&str> {
        self.job.as_deref()
    }

    /// Returns the number of the task, if the environment tells it.
    #[must_use]
    pub fn task(&self) -> Option<u32> {
        self.task
    }

    /// Reports for as long as it is polled. `set_timing` gets what the service says about the times on the GPU.
    pub async fn report_periodically(mut self, record: &Record, set_timing: impl Fn(bool)) {
        let mut retry = RETRY_PAUSE.0;
        let mut answered_at = Instant::now();
        loop {
            self.ras.poll_answer().await;
            let result = self.report(record).await;
            record.touch();
            // An answer of RAS is for one report. The requested details may be why the report was refused.
            self.ras.answer = None;
            if result.is_err() {
                self.wanted.clear();
                if answered_at.elapsed() >= TIMING_KEPT {
                    set_timing(false);
                }
            }
            let pause = match result {
                Ok(answer) => {
                    answered_at = Instant::now();
                    set_timing(answer.timing);
                    self.wanted = answer.wanted;
                    self.ras.start(answer.ras);
                    retry = RETRY_PAUSE.0;
                    asked_report_interval(answer.interval_ms)
                }
                Err(Code::Unimplemented) => UNSUPPORTED_PAUSE,
                Err(_) => {
                    let pause = retry;
                    retry = (retry * 2).min(RETRY_PAUSE.1);
                    pause
                }
            };
            tokio::time::sleep(pause).await;
        }
    }

    async fn report(&mut self, record: &Record) -> Result<pb::CollectivesAck, Code> {
        self.sequence += 1;
        let report = self.describe(record);
        let mut client = CollectivesClient::new(self.channel.clone());
        match tokio::time::timeout(CALL_TIMEOUT, client.report(report)).await {
            Ok(Ok(answer)) => Ok(answer.into_inner()),
            Ok(Err(status)) => {
                tracing::debug!(%status, "a report of collectives was not taken");
                Err(status.code())
            }
            Err(_) => Err(Code::DeadlineExceeded),
        }
    }

    fn describe(&self, record: &Record) -> pb::CollectivesReport {
        let now = monotonic_nanos();
        let snapshot = record.snapshot(now);
        let communicators = snapshot.communicators.iter().map(|communicator| {
            let mut operations: Vec<OperationSnapshot> =
                communicator.latest.into_iter().chain(communicator.latest_ended).collect();
            operations.extend(&communicator.unfinished);
            let is_meant = |wanted: &&pb::WantedCollectives| {
                (wanted.hash, wanted.rank) == (communicator.hash, communicator.rank)
            };
            if let Some(wanted) = self.wanted.iter().find(is_meant) {
                let (hash, rank) = (communicator.hash, communicator.rank);
                operations.extend(record.collectives_from(hash, rank, wanted.first, WANTED_COLLECTIVES, now));
            }
            operations.sort_by_key(|operation| operation.number);
            operations.dedup_by_key(|operation| operation.number);
            describe_communicator(communicator, &operations)
        });
        pb::CollectivesReport {
            process: self.process,
            sequence: self.sequence,
            pid: snapshot.pid,
            host: self.host.clone(),
            task: self.task,
            timing: snapshot.is_timed,
            communicators_not_recorded: snapshot.communicators_not_recorded,
            communicators: communicators.collect(),
            ras: self.ras.answer.clone(),
        }
    }
}

fn describe_communicator(
    communicator: &CommunicatorSnapshot,
    operations: &[OperationSnapshot],
) -> pb::CommunicatorReport {
    let functions = communicator.functions.iter().map(|totals| pb::FunctionReport {
        function: totals.function.name().to_owned(),
        enqueued: totals.enqueued,
        begun: totals.begun,
        ended: totals.ended,
        bytes: totals.bytes,
        timed: totals.timed,
        timed_bytes: totals.timed_bytes,
        gpu_ns: totals.gpu_ns,
    });
    let operations = operations.iter().map(|found| pb::CollectiveReport {
        number: found.number,
        function: found.operation.function.name().to_owned(),
        data_type: found.operation.data_type.name().to_owned(),
        count: found.operation.count,
        root: found.operation.root,
        chain: found.chain,
        timed: found.is_timed,
        enqueued_us: microseconds(found.enqueued_ago),
        begun_us: found.begun_ago.map(microseconds),
        ended_us: found.ended_ago.map(microseconds),
    });
    pb::CommunicatorReport {
        hash: communicator.hash,
        rank: communicator.rank,
        ranks: communicator.ranks,
        nodes: communicator.nodes,
        name: communicator.name.clone(),
        changed_us: microseconds(communicator.changed_ago),
        collectives: communicator.collectives,
        functions: functions.collect(),
        operations: operations.collect(),
    }
}

fn microseconds(age: Duration) -> u64 {
    u64::try_from(age.as_micros()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use std::cell::RefCell;

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn times_are_no_longer_asked_for_if_no_service_answers() {
        let (channel, _) = channel::open_channel("127.0.0.1:1", None, None).unwrap();
        let reporter = CollectiveReporter {
            channel,
            service: String::new(),
            job: None,
            task: None,
            host: String::new(),
            process: 1,
            sequence: 0,
            wanted: Vec::new(),
            ras: RasQuery::default(),
        };
        let record = Record::in_memory(None, None).unwrap();
        let (began, told) = (Instant::now(), RefCell::new(Vec::new()));
        let note = |is_timed| told.borrow_mut().push((is_timed, began.elapsed()));
        let run = reporter.report_periodically(&record, note);
        assert!(tokio::time::timeout(TIMING_KEPT * 2, run).await.is_err(), "it goes on");
        let told = told.into_inner();
        assert!(
            !told.is_empty() && told.iter().all(|(is_timed, at)| !is_timed && *at >= TIMING_KEPT),
            "{told:?}"
        );
    }
}
