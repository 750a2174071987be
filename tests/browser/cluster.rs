//! The tasks of a job, simulated by clients: they register, send heartbeats, arrive at barriers and fail.

use std::net::SocketAddr;
use std::sync::Mutex;
use std::time::Duration;

use muster::proto::xla::{DeviceProto, LocalTopologyProto};
use prost::Message as _;
use tokio::task::JoinHandle;

use crate::support::{Body, Call, Caller, Client, Generation, Pending, Reporter};

/// The timeout of a simulated call; it is long because the machine may be compiling.
const LIMIT: Duration = Duration::from_secs(120);
/// The usual interval between heartbeats.
pub const BEAT: Duration = Duration::from_secs(1);

/// A simulated task.
pub struct ClusterTask {
    client: Client,
    task: i32,
    incarnation: u64,
    service: u64,
    /// The number of its host.
    host: i32,
    beats: Mutex<Option<JoinHandle<()>>>,
    reports: Mutex<Option<JoinHandle<()>>>,
}

impl ClusterTask {
    fn caller(&self) -> Caller {
        Caller::new(self.task, self.incarnation, self.service)
    }

    /// Returns the task number.
    pub fn number(&self) -> i32 {
        self.task
    }

    /// Makes a call and waits for its answer, which must be a success.
    pub async fn call_and_expect_success(&self, call: Call) {
        let answer = tokio::time::timeout(LIMIT, self.client.ask(&self.caller(), &call)).await;
        let answer = answer.unwrap_or_else(|_| panic!("task {} is not answered: {call:?}", self.task));
        assert!(answer.is_ok(), "task {} is refused {call:?}: {answer:?}", self.task);
    }

    /// Arrives at a barrier without waiting for it.
    pub fn start_barrier_call(&self, barrier: &str, counter: i64) -> Pending {
        let call = Call::barrier(barrier, counter).within_ms(3_600_000);
        self.client.start(self.caller(), call, |_| {})
    }

    /// Reports transfers like a worker that sends to the next task and receives from the former one; no bytes
    /// move.
    fn start_transfer_reports(&self, tasks: u32) {
        let task = u32::try_from(self.task).expect("tasks are not negative");
        let (right, left) = ((task + 1) % tasks, (task + tasks - 1) % tasks);
        let mut reporter = Reporter::new(&self.client, task, self.incarnation);
        reporter.connect(right, "unix", 4, 2);
        reporter.connect(left, "tcp", 8, 1);
        let reports = tokio::spawn(async move {
            for round in 0.. {
                // The rate varies, so that the chart is not flat.
                let by = |task: u32| 1_u64 << (20 + (round + u64::from(task)) % 5);
                reporter.move_bytes(right, "shm", 3 * by(task), 0);
                reporter.move_bytes(left, "shm", 0, 3 * by(left));
                reporter.move_bytes(left, "tcp", by(task), 0);
                reporter.move_bytes(right, "tcp", 0, by(right));
                reporter.end("completed", 4);
                reporter.count(round, 0);
                if task == 3 && round % 4 == 1 {
                    reporter.fail(left, "peer_dead", "its connection was reset", 0);
                    reporter.fail(
                        right,
                        "stalled",
                        "nothing moved for 5 s after 1048576 of 3145728 bytes",
                        0,
                    );
                }
                // The tests look at the pages, not at the result of the call.
                let _ = reporter.say().await;
                tokio::time::sleep(BEAT).await;
            }
        });
        self.reports.lock().expect("no holder panics").replace(reports);
    }

    fn start_heartbeats(&self, every: Duration) {
        let (client, caller) = (self.client.clone(), self.caller());
        let incarnation = self.incarnation;
        let beats = tokio::spawn(async move {
            loop {
                // The tests look at the pages, not at the result of the call.
                let _ = client.ask(&caller, &Call::Heartbeat { incarnation }).await;
                tokio::time::sleep(every).await;
            }
        });
        *self.beats.lock().expect("no holder panics") = Some(beats);
    }

    /// Returns the call that publishes the devices of this process, as JAX does.
    fn topology_insert_call(&self) -> Call {
        let device = |local: i32| DeviceProto {
            local_device_ordinal: local,
            global_device_id: self.task * 4 + local,
            device_kind: "H200".into(),
            name: "cuda".into(),
            ..DeviceProto::default()
        };
        let topology = LocalTopologyProto {
            process_id: self.task,
            boot_id: format!("boot-{:04x}", 0x7a10 + self.host),
            devices: (0..4).map(device).collect(),
            ..LocalTopologyProto::default()
        };
        Call::insert(&format!("cuda:local_topology/cuda/{}", self.task), topology.encode_to_vec())
    }

    /// Publishes the devices, and the keys that programs publish.
    async fn publish_devices_and_keys(&self) {
        self.call_and_expect_success(self.topology_insert_call()).await;
        let first = self.task * 4;
        let ids = format!("[{}, {}, {}, {}]", first, first + 1, first + 2, first + 3);
        self.call_and_expect_success(Call::insert(
            &format!("orbax/distributed_to_device_ids/{}", self.task),
            ids,
        ))
        .await;
        self.call_and_expect_success(Call::insert(
            &format!("app/hosts/{}", self.task),
            format!("host-{}", self.task),
        ))
        .await;
    }
}

impl Drop for ClusterTask {
    fn drop(&mut self) {
        // The connection ends when its last user is dropped.
        for going in [&self.beats, &self.reports] {
            if let Some(going) = going.lock().expect("no holder panics").take() {
                going.abort();
            }
        }
    }
}

/// The simulated tasks of one job.
pub struct TaskCluster {
    pub members: Vec<Option<ClusterTask>>,
    grpc: SocketAddr,
    job: String,
}

impl TaskCluster {
    /// Registers the tasks `which` of a job. If these are all of its tasks, they form its run.
    pub async fn register_tasks(
        grpc: SocketAddr,
        job: &str,
        which: impl Iterator<Item = i32>,
        shared: usize,
    ) -> Self {
        Self::register_tasks_of_run(grpc, job, which, shared, 0).await
    }

    /// Registers the tasks `which` of a job for a run of this number, from 0: new processes, two on each host, and with
    /// each run on the next host.
    pub async fn register_tasks_of_run(
        grpc: SocketAddr,
        job: &str,
        which: impl Iterator<Item = i32>,
        shared: usize,
        run: i32,
    ) -> Self {
        let authority = format!("{job}.localhost:{}", grpc.port());
        let mut clients: Vec<Client> = Vec::new();
        let mut coming = Vec::new();
        for (place, task) in which.enumerate() {
            if place % shared == 0 {
                clients.push(Client::to_authority(Generation::C, grpc, Some(&authority)));
            }
            let client = clients.last().expect("one is made first").clone();
            let number = |value: i32| u64::try_from(value).expect("it is not negative");
            let incarnation = 0x5eed_0000_0000_0000 + (number(run) << 32) + number(task);
            let call = Call::Register { incarnation, recoverable: true };
            let caller = Caller { service: None, ..Caller::new(task, incarnation, 0) };
            let answer = client.start(caller, call, |_| {});
            coming.push((client, task, incarnation, answer));
        }
        let hosts = i32::try_from(coming.len().div_ceil(2)).expect("there are few");
        let mut party = Self { members: Vec::new(), grpc, job: job.to_owned() };
        for (client, task, incarnation, answer) in coming {
            let answer = answer.within(LIMIT).await.unwrap_or_else(|| panic!("task {task} does not get in"));
            let Body::Service(service) = answer.body else { panic!("task {task}: {answer:?}") };
            let member = ClusterTask {
                client,
                task,
                incarnation,
                service,
                host: (task / 2 + run) % hosts,
                beats: Mutex::default(),
                reports: Mutex::default(),
            };
            party.members.push(Some(member));
        }
        party
    }

    /// Starts the registration of some tasks of a job that waits for more; the calls stay pending.
    pub fn start_pending_registrations(
        grpc: SocketAddr,
        job: &str,
        which: impl Iterator<Item = i32>,
    ) -> Vec<Pending> {
        let authority = format!("{job}.localhost:{}", grpc.port());
        which
            .map(|task| {
                let client = Client::to_authority(Generation::C, grpc, Some(&authority));
                let incarnation = 77 + u64::try_from(task).expect("tasks are not negative");
                let caller = Caller { service: None, ..Caller::new(task, incarnation, 0) };
                client.start(caller, Call::Register { incarnation, recoverable: true }, |_| {})
            })
            .collect()
    }

    pub fn remaining_tasks(&self) -> impl Iterator<Item = &ClusterTask> {
        self.members.iter().flatten()
    }

    pub fn member(&self, task: usize) -> &ClusterTask {
        self.members[task].as_ref().expect("it has not gone")
    }

    /// Starts to send the heartbeats of all tasks.
    pub fn start_heartbeats(&self, every: Duration) {
        self.remaining_tasks().for_each(|member| member.start_heartbeats(every));
    }

    /// Starts to send transfer reports of all tasks.
    pub fn start_transfer_reports(&self) {
        let tasks = u32::try_from(self.members.len()).expect("there are few");
        self.remaining_tasks().for_each(|member| member.start_transfer_reports(tasks));
    }

    /// Sends one report of each task about transfers to this many peers.
    pub async fn send_one_report_per_task(&self, peers: u32) {
        let tasks = u32::try_from(self.members.len()).expect("tasks have 32 bits");
        for member in self.remaining_tasks() {
            let task = u32::try_from(member.task).expect("tasks are not negative");
            let mut reporter = Reporter::new(&member.client, task, member.incarnation);
            for step in 1..=peers {
                reporter.move_bytes((task + step) % tasks, "tcp", u64::from(task * step), 0);
            }
            reporter.say().await.expect("the report is taken");
        }
    }

    /// Publishes the devices of all tasks at once.
    pub async fn publish_devices(&self) {
        let told = self
            .remaining_tasks()
            .map(|member| member.client.start(member.caller(), member.topology_insert_call(), |_| {}));
        for answer in told.collect::<Vec<Pending>>() {
            let answer = answer.within(LIMIT).await.expect("it is answered");
            assert!(answer.is_ok(), "{answer:?}");
        }
    }

    /// Publishes the devices, and passes some barriers at which `late` arrives last.
    pub async fn publish_and_pass_step_barriers(&self, steps: i64, late: i32) {
        for member in self.remaining_tasks() {
            member.publish_devices_and_keys().await;
        }
        for step in 0..steps {
            self.pass_barrier_with_late_task("train/step", step, late, Duration::from_millis(60)).await;
        }
    }

    /// Lets all tasks arrive at a barrier, `late` after the others.
    pub async fn pass_barrier_with_late_task(&self, barrier: &str, counter: i64, late: i32, by: Duration) {
        self.pass_barrier_with_late_tasks(barrier, counter, &[late], by).await;
    }

    /// Lets all tasks arrive at a barrier, those of `late` after the others.
    pub async fn pass_barrier_with_late_tasks(
        &self,
        barrier: &str,
        counter: i64,
        late: &[i32],
        by: Duration,
    ) {
        let (last, others): (Vec<_>, Vec<_>) =
            self.remaining_tasks().partition(|member| late.contains(&member.task));
        let mut waiting: Vec<Pending> =
            others.iter().map(|member| member.start_barrier_call(barrier, counter)).collect();
        tokio::time::sleep(by).await;
        waiting.extend(last.iter().map(|member| member.start_barrier_call(barrier, counter)));
        for answer in waiting {
            let answer = answer.within(LIMIT).await.expect("all are there");
            assert!(answer.is_ok(), "{answer:?}");
        }
    }

    /// Closes the connection of a task.
    pub fn close_connection_of_task(&mut self, task: usize) {
        self.members[task] = None;
    }

    /// Registers a lost task again.
    pub async fn register_lost_task_again(&mut self, task: usize) {
        let number = i32::try_from(task).expect("there are few");
        let authority = format!("{}.localhost:{}", self.job, self.grpc.port());
        let client = Client::to_authority(Generation::C, self.grpc, Some(&authority));
        let incarnation = 0xab1e_0000_0000_0000 + task as u64;
        let caller = Caller { service: None, ..Caller::new(number, incarnation, 0) };
        let answer = client.ask(&caller, &Call::Register { incarnation, recoverable: true }).await;
        let Body::Service(service) = answer.body else { panic!("{answer:?}") };
        let member = ClusterTask {
            client,
            task: number,
            incarnation,
            service,
            host: number / 2,
            beats: Mutex::default(),
            reports: Mutex::default(),
        };
        member.start_heartbeats(BEAT);
        self.members[task] = Some(member);
    }
}
