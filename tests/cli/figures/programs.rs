//! Random programs: sequences of actions of random tasks on a job.

use std::collections::BTreeMap;
use std::time::Duration;

use muster::proto::muster::v1::TransferReport;
use muster::proto::muster::v1::transfers_client::TransfersClient;
use muster::proto::xla::coordination as wire;
use muster::proto::xla::{DeviceProto, LocalTopologyProto};
use prost::Message as _;
use serde_json::{Value, json};
use tokio::runtime::Runtime;
use tokio::task::JoinHandle;
use tonic::transport::{Channel, Endpoint};
use wire::coordination_service_client::CoordinationServiceClient;

use super::reports::advance_report;
use crate::harness::{MusterServer, wait_until};

const TASKS_OF_HOST: i32 = 3;

/// The process of one task.
struct TaskProcess {
    channel: Channel,
    incarnation: u64,
    service: std::sync::Arc<std::sync::atomic::AtomicU64>,
    /// Its last transfer report.
    report: TransferReport,
    /// Its calls, which end with it.
    calls: Vec<tokio::task::AbortHandle>,
}

impl Drop for TaskProcess {
    fn drop(&mut self) {
        self.calls.iter().for_each(tokio::task::AbortHandle::abort);
    }
}

/// A job, and the processes of its tasks.
pub struct RandomProgram<'a> {
    pub server: &'a MusterServer,
    runtime: &'a Runtime,
    pub job: String,
    settings: Value,
    pub tasks: i32,
    random: fastrand::Rng,
    processes: BTreeMap<i32, TaskProcess>,
    lives: u64,
    /// The tasks report transfers.
    reports: bool,
    /// Some reports contain absurd numbers.
    pub absurd: bool,
    /// The reports without an answer yet, then the answered ones and whether the server accepted them.
    under_way: Vec<JoinHandle<(TransferReport, bool)>>,
    pub answered: Vec<(TransferReport, bool)>,
    /// The number of answered reports for an earlier job of this name.
    pub of_deleted: usize,
    pub done: Vec<String>,
}

impl<'a> RandomProgram<'a> {
    pub fn new(server: &'a MusterServer, runtime: &'a Runtime, seed: u64) -> Self {
        let mut random = fastrand::Rng::with_seed(seed);
        let job = format!("job{seed}");
        // Some jobs are large, because large jobs are shown differently.
        let tasks = match random.u8(..10) {
            0 => 140,
            1 | 2 => 40,
            _ => random.i32(2..6),
        };
        let grace = ["0s", "10m"][random.usize(..2)];
        let settings = json!({
            "tasks": tasks,
            "recoverable": random.bool(),
            "disconnect_grace": grace,
            "bounds": {"keys": 8},
        });
        let reports = random.u8(..6) > 0;
        let done = vec![settings.to_string()];
        let program = Self {
            server,
            runtime,
            job,
            settings,
            tasks,
            random,
            processes: BTreeMap::new(),
            lives: 0,
            reports,
            absurd: true,
            under_way: Vec::new(),
            answered: Vec::new(),
            of_deleted: 0,
            done,
        };
        program.create_job();
        program
    }

    fn create_job(&self) {
        let body = json!({"name": self.job, "settings": self.settings, "reason": "r"}).to_string();
        assert_eq!(self.server.send("POST", "/api/v1/jobs", &body).status, 201);
    }

    /// Deletes the job.
    pub fn delete_job(&self) {
        assert_eq!(self.server.send("DELETE", &self.job_path("?force=true&reason=r"), "").status, 204);
        assert_eq!(self.server.get(&self.job_path("/transfers")).status, 404);
        for (place, text) in ["/metrics", "/transfers"].map(|place| (place, self.server.get(place).body)) {
            assert!(
                !text.contains(&self.job_label()),
                "{place} shows a deleted job\n{}",
                self.done.join("; ")
            );
            assert!(!text.contains(&format!("/jobs/{}/", self.job)), "{place} leads to a deleted job");
        }
    }

    /// Returns the job's name as a label of metrics.
    pub fn job_label(&self) -> String {
        format!("muster_job=\"{}\"", self.job)
    }

    pub fn job_path(&self, rest: &str) -> String {
        format!("/api/v1/jobs/{}{rest}", self.job)
    }

    pub fn get_job_json(&self, rest: &str) -> Value {
        let answer = self.server.get(&self.job_path(rest));
        assert_eq!(answer.status, 200, "{rest}: {answer:?}");
        answer.json()
    }

    /// Registers a new process of a task.
    pub fn register(&mut self, task: i32) {
        self.lives += 1;
        let origin = format!("http://{}.test", self.job).parse().expect("an authority");
        let endpoint = Endpoint::from_shared(format!("http://{}", self.server.grpc)).expect("an address");
        let entered = self.runtime.enter();
        // Three tasks are on each host.
        let host = u8::try_from(task / TASKS_OF_HOST + 1).expect("there are few hosts");
        let channel = endpoint.origin(origin).local_address(Some([127, 0, 9, host].into())).connect_lazy();
        drop(entered);
        let process = TaskProcess {
            channel,
            incarnation: 1000 + self.lives,
            service: Default::default(),
            report: TransferReport {
                task: task.unsigned_abs(),
                incarnation: 1000 + self.lives,
                ..TransferReport::default()
            },
            calls: Vec::new(),
        };
        let (incarnation, service) = (process.incarnation, std::sync::Arc::clone(&process.service));
        self.processes.insert(task, process);
        self.start_call(task, move |mut client, _| async move {
            let request = wire::RegisterTaskRequest { incarnation, source_task_id: task };
            if let Ok(answer) = client.register_task(request).await {
                let incarnation = answer.into_inner().service_incarnation;
                service.store(incarnation, std::sync::atomic::Ordering::SeqCst);
            }
        });
    }

    /// Returns whether the process of a task has received the answer to its registration.
    pub fn is_registered(&self, task: i32) -> bool {
        let service = |process: &TaskProcess| process.service.load(std::sync::atomic::Ordering::SeqCst);
        self.processes.get(&task).is_some_and(|process| service(process) != 0)
    }

    /// Starts a call of a task's process and ignores the result.
    fn start_call<F: Future<Output = ()> + Send + 'static>(
        &mut self,
        task: i32,
        ask: impl FnOnce(CoordinationServiceClient<Channel>, Option<wire::Incarnations>) -> F,
    ) {
        let Some(process) = self.processes.get_mut(&task) else { return };
        let claim = wire::Incarnations {
            task_id: 0,
            task_incarnation: process.incarnation,
            service_incarnation: process.service.load(std::sync::atomic::Ordering::SeqCst),
        };
        let call = ask(CoordinationServiceClient::new(process.channel.clone()), Some(claim));
        process.calls.push(self.runtime.spawn(call).abort_handle());
    }

    fn arrive_at_barrier(&mut self, task: i32, id: &'static str, members: Vec<i32>) {
        self.start_call(task, move |mut client, incarnations| async move {
            let request = wire::BarrierRequest {
                incarnations,
                barrier_id: id.into(),
                barrier_timeout_in_ms: 3_600_000,
                task_ids: members,
                source_task_id: task,
                counter: 0,
            };
            let _ = client.barrier(request).await;
        });
    }

    /// Inserts a key with a value of this size.
    pub fn insert_key(&mut self, task: i32, key: &str, bytes: usize) {
        let (key, value) = (key.to_owned(), vec![b'v'; bytes]);
        self.start_call(task, |mut client, incarnations| async move {
            let kv = Some(wire::KeyValueEntry { key, value: value.into() });
            let request = wire::InsertKeyValueRequest { incarnations, kv, allow_overwrite: true };
            let _ = client.insert_key_value(request).await;
        });
    }

    pub fn send_heartbeat(&mut self, task: i32) {
        self.start_call(task, move |mut client, incarnations| async move {
            let incarnation = incarnations.as_ref().map_or(0, |claim| claim.task_incarnation);
            let request = wire::HeartbeatRequest { incarnations, source_task_id: task, incarnation };
            let _ = client.heartbeat(request).await;
        });
    }

    /// Takes one random action.
    fn take_random_action(&mut self) {
        let task = self.random.i32(0..self.tasks);
        let choice = self.random.u8(..100);
        let what = match choice {
            0..20 => {
                self.register(task);
                "registers"
            }
            20..40 => {
                let id = ["step", "save", "odd/\u{202e}name"][self.random.usize(..3)];
                self.arrive_at_barrier(task, id, Vec::new());
                "comes to a barrier"
            }
            40..52 => {
                let set: Vec<i32> = (0..self.tasks).filter(|_| self.random.u8(..4) > 0).collect();
                self.start_call(task, |mut client, incarnations| async move {
                    let request =
                        wire::GetAliveTasksRequest { incarnations, requesting_task_id: task, task_ids: set };
                    let _ = client.get_alive_tasks(request).await;
                });
                "asks who lives"
            }
            52..57 => {
                let (key, value) = published_devices(task);
                self.start_call(task, |mut client, incarnations| async move {
                    let kv = Some(wire::KeyValueEntry { key, value: value.into() });
                    let request = wire::InsertKeyValueRequest { incarnations, kv, allow_overwrite: true };
                    let _ = client.insert_key_value(request).await;
                });
                "publishes its devices"
            }
            57..66 => {
                let key = format!("dir{}/key{}", self.random.u8(..3), self.random.u8(..4));
                let bytes = self.random.usize(..3000);
                self.insert_key(task, &key, bytes);
                "writes a key"
            }
            66..72 => {
                self.start_call(task, |mut client, incarnations| async move {
                    let request = wire::GetKeyValueRequest { incarnations, key: "nobody/writes".into() };
                    let _ = client.get_key_value(request).await;
                });
                "waits for a key"
            }
            72..80 => {
                self.processes.remove(&task);
                "is gone"
            }
            80..88 => {
                let body = json!({"task": task, "reason": "r", "end_run": true}).to_string();
                self.server.send("POST", &self.job_path("/exclusions"), &body);
                "is excluded"
            }
            88..92 => {
                let first = self.get_job_json("/exclusions")["exclusions"][0]["id"].as_u64();
                if let Some(id) = first {
                    self.server.send("DELETE", &self.job_path(&format!("/exclusions/{id}?reason=r")), "");
                }
                "is readmitted, or another"
            }
            92..96 => {
                self.start_call(task, |mut client, incarnations| async move {
                    let request = wire::ReportErrorToServiceRequest {
                        incarnations,
                        source_task_id: task,
                        error_code: 13,
                        error_message: "out of memory".into(),
                    };
                    let _ = client.report_error_to_service(request).await;
                });
                "reports an error"
            }
            _ => {
                self.start_call(task, |mut client, incarnations| async move {
                    let request = wire::ShutdownTaskRequest { incarnations, source_task_id: task };
                    let _ = client.shutdown_task(request).await;
                });
                "shuts down"
            }
        };
        self.done.push(format!("task {task} {what}"));
        // Usually waits for the effects of the action, so that some actions overlap and most do not.
        if choice < 20 || self.random.bool() {
            std::thread::sleep(Duration::from_millis(self.random.u64(1..6)));
        }
    }

    pub fn run_to_end(&mut self) {
        // All tasks register, or all but one: a job without registered tasks shows little.
        let late = self.random.i32(0..self.tasks * 2);
        for task in (0..self.tasks).filter(|task| *task != late) {
            self.register(task);
        }
        if late >= self.tasks {
            wait_until("the run has begun", || self.get_job_json("")["run"]["state"] == "running");
            let reporting = if self.reports { self.tasks } else { 0 };
            for task in 0..reporting {
                self.send_next_report(task);
            }
        }
        for _ in 0..self.random.usize(6..30) {
            match self.random.u8(..100) {
                0..45 if self.reports => self.send_or_repeat_report(),
                97.. => self.delete_and_create(),
                _ => self.take_random_action(),
            }
        }
        self.wait_for_answers();
    }

    /// Deletes the job and creates another one with its name, which the processes of its tasks do not notice.
    fn delete_and_create(&mut self) {
        self.wait_for_answers();
        self.of_deleted = self.answered.len();
        self.done.push("the job is deleted, and created again".into());
        self.delete_job();
        self.create_job();
    }

    /// Sends the next report of a task, or repeats an earlier report of any task.
    fn send_or_repeat_report(&mut self) {
        let task = self.random.i32(0..self.tasks);
        if self.random.u8(..4) > 0 || self.answered.is_empty() {
            return self.send_next_report(task);
        }
        let (old, _) = &self.answered[self.random.usize(..self.answered.len())];
        let old = old.clone();
        self.done.push(format!("task {task} sends report {} of task {} again", old.sequence, old.task));
        self.send_report(task, old);
    }

    /// Sends the next report of a task.
    pub fn send_next_report(&mut self, task: i32) {
        let Some(process) = self.processes.get_mut(&task) else { return };
        let absurd = self.absurd && self.random.u8(..12) == 0;
        advance_report(&mut process.report, self.tasks.unsigned_abs(), &mut self.random, absurd);
        let report = process.report.clone();
        self.done.push(format!("task {task} sends its report {}", report.sequence));
        self.send_report(task, report);
    }

    /// Sends a report over the connection of a task, sometimes after later ones.
    fn send_report(&mut self, task: i32, report: TransferReport) {
        let Some(process) = self.processes.get(&task) else { return };
        let mut client = TransfersClient::new(process.channel.clone());
        let wait = self.random.bool();
        let late = Duration::from_millis(if wait { 0 } else { self.random.u64(..6) });
        let call = self.runtime.spawn(async move {
            tokio::time::sleep(late).await;
            let accepted = client.report(report.clone()).await.is_ok();
            (report, accepted)
        });
        self.under_way.push(call);
        if wait {
            self.wait_for_answers();
        }
    }

    /// Waits until every report is answered.
    pub fn wait_for_answers(&mut self) {
        for call in self.under_way.drain(..) {
            self.answered.push(self.runtime.block_on(call).expect("it ends"));
        }
    }
}

/// Returns the key and the value by which JAX publishes the two devices of a task.
fn published_devices(task: i32) -> (String, Vec<u8>) {
    let device = |local: i32| DeviceProto {
        local_device_ordinal: local,
        global_device_id: task * 2 + local,
        name: format!("device {local}"),
        ..DeviceProto::default()
    };
    let topology = LocalTopologyProto {
        process_id: task,
        boot_id: format!("boot-{}", task / TASKS_OF_HOST),
        devices: vec![device(0), device(1)],
        ..LocalTopologyProto::default()
    };
    (format!("cuda:local_topology/cuda/{task}"), topology.encode_to_vec())
}
