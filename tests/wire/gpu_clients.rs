//! GPU processes of JAX as the service sees them: the calls of jaxlib's GPU client, without a GPU.
//!
//! Such a process asks for the states of all tasks again and again (`WatchTasks` with the version that it has). If a task was
//! connected and is not any more, or has another incarnation, the process aborts the collectives with that task. A state that
//! is wrong for a moment therefore costs a run, and an answer with fewer tasks hides a loss. Begin at [`GpuProcess`].

use std::sync::{Arc, Mutex};
use std::time::Duration;

use serde_json::Value;
use tokio::task::JoinHandle;
use tokio::time::{sleep, timeout};

use crate::support::harness::TempFolder;
use crate::support::{Body, Call, Caller, Client, Generation, MusterServer};

const TASKS: i32 = 4;
/// `TaskState` of a connected task.
const CONNECTED: i32 = 3;
const PATIENCE: Duration = Duration::from_secs(30);
/// The key and the text by which jaxlib 0.12 tells that a device is lost to its process.
const FATAL_KEY: &str = "cuda:gpu_fatal_error";
const FATAL_TEXT: &str =
    "Fatal GPU device error on node 3 device 1: INTERNAL: CUDA error: an illegal memory access";

/// The observations of a process's thread that watches the others.
#[derive(Default)]
struct WatchLog {
    answers: usize,
    /// The version of the last answer.
    version: i64,
    /// The calls that failed.
    failures: Vec<String>,
    /// By task: the state and the incarnation of the last answer.
    last: Vec<(i32, u64)>,
    /// The tasks whose collectives the process has aborted, in order.
    aborted: Vec<i32>,
}

/// A process of a task.
struct GpuProcess {
    client: Client,
    caller: Caller,
    log: Arc<Mutex<WatchLog>>,
    watcher: JoinHandle<()>,
    heart: JoinHandle<()>,
}

impl Drop for GpuProcess {
    fn drop(&mut self) {
        self.watcher.abort();
        self.heart.abort();
    }
}

/// Returns the body of a call's answer, which must be a success.
async fn expect_body(client: &Client, caller: &Caller, call: &Call) -> Body {
    let answer = timeout(PATIENCE, client.ask(caller, call)).await.expect("an answer");
    assert!(answer.is_ok(), "{call:?}: {answer:?}");
    answer.body
}

impl GpuProcess {
    /// Registers a process, and does what a GPU client does before its program begins.
    async fn start(server: &MusterServer, task: i32, incarnation: u64) -> Self {
        let client = Client::new(Generation::C, server.grpc);
        let mut caller = Caller { service: None, ..Caller::new(task, incarnation, 0) };
        let register = Call::Register { incarnation, recoverable: true };
        let Body::Service(service) = expect_body(&client, &caller, &register).await else {
            panic!("a registration returns the service's incarnation");
        };
        caller.service = Some(service);
        let heart = tokio::spawn(send_heartbeats(client.clone(), caller));
        // A process that has started again finds its topology, and compares it.
        let key = format!("cuda:local_topology/cuda/{task}");
        let topology = format!("the devices of task {task}");
        let told = timeout(PATIENCE, client.ask(&caller, &Call::insert(&key, &topology))).await;
        let code = told.expect("an answer").code;
        assert!(code == 0 || code == 6, "{code}");
        let all = "cuda:global_topology/cuda";
        if task == 0 && code == 0 {
            for peer in 0..TASKS {
                let key = format!("cuda:local_topology/cuda/{peer}");
                expect_body(&client, &caller, &Call::get(&key)).await;
            }
            expect_body(&client, &caller, &Call::insert(all, "the devices of all tasks")).await;
        }
        expect_body(&client, &caller, &Call::get(all)).await;
        let log = Arc::new(Mutex::new(WatchLog { version: -1, ..WatchLog::default() }));
        let watcher = tokio::spawn(watch_tasks(client.clone(), caller, Arc::clone(&log)));
        let process = Self { client, caller, log, watcher, heart };
        process.expect("the first answer", |log| log.answers > 0).await;
        process
    }

    /// Makes a communicator of all tasks: the first one tells NCCL's id.
    async fn make_communicator(&self, round: u64) {
        let key = format!("cuda:nccl/{round}");
        if self.caller.task == 0 {
            expect_body(&self.client, &self.caller, &Call::insert(&key, "an id of NCCL")).await;
        }
        expect_body(&self.client, &self.caller, &Call::get(&key)).await;
    }

    /// Waits until the log is as expected.
    async fn expect(&self, what: &str, is: impl Fn(&WatchLog) -> bool) {
        let seen = async {
            while !is(&self.log.lock().unwrap()) {
                sleep(Duration::from_millis(2)).await;
            }
        };
        let in_time = timeout(PATIENCE, seen).await.is_ok();
        let log = self.log.lock().unwrap();
        assert!(
            in_time,
            "task {} waits for {what}: {:?}, aborted {:?}, failures {:?}",
            self.caller.task, log.last, log.aborted, log.failures
        );
    }

    fn assert_aborted(&self, tasks: &[i32]) {
        let log = self.log.lock().unwrap();
        let aborted: Vec<i32> =
            log.aborted.iter().copied().filter(|task| *task != self.caller.task).collect();
        assert_eq!(aborted, tasks, "task {}", self.caller.task);
        assert_eq!(log.failures, Vec::<String>::new(), "task {}", self.caller.task);
    }
}

async fn send_heartbeats(client: Client, caller: Caller) {
    loop {
        let _answer = client.ask(&caller, &Call::Heartbeat { incarnation: caller.incarnation }).await;
        sleep(Duration::from_millis(100)).await;
    }
}

/// Watches the tasks for ever, as the thread of a GPU client does.
async fn watch_tasks(client: Client, caller: Caller, log: Arc<Mutex<WatchLog>>) {
    loop {
        let version = log.lock().unwrap().version;
        let answer = client.ask(&caller, &Call::watch(version)).await;
        let Body::States { version, tasks } = answer.body else {
            log.lock().unwrap().failures.push(answer.message);
            sleep(Duration::from_millis(100)).await;
            continue;
        };
        let mut log = log.lock().unwrap();
        let now: Vec<(i32, u64)> = tasks.iter().map(|task| (task.state, task.incarnation)).collect();
        let numbers: Vec<i32> = tasks.iter().map(|task| task.task).collect();
        if numbers != (0..TASKS).collect::<Vec<_>>() {
            log.failures.push(format!("the tasks are {numbers:?}"));
        }
        let lost: Vec<i32> = log
            .last
            .iter()
            .zip(&now)
            .zip(&numbers)
            .filter(|((before, now), _)| before.0 == CONNECTED && before != now)
            .map(|(_, task)| *task)
            .collect();
        log.aborted.extend(lost);
        (log.last, log.version) = (now, version);
        log.answers += 1;
    }
}

/// Starts a server, and a process of each task.
async fn start_job(folder: &TempFolder, further: &[&str]) -> (MusterServer, Vec<GpuProcess>) {
    let (journal, tasks) = (folder.path("journal"), TASKS.to_string());
    let own = ["--data-dir", &journal, "--tasks", &tasks, "--recoverable", "--log", "error"];
    let server = MusterServer::patient(&[&own[..], further].concat());
    let starting: Vec<_> =
        (0..TASKS).map(|task| GpuProcess::start(&server, task, 100 + task as u64)).collect();
    let mut processes = Vec::new();
    for starting in futures_util::future::join_all(starting).await {
        processes.push(starting);
    }
    for process in &processes {
        let is_connected = |log: &WatchLog| log.last.iter().all(|(state, _)| *state == CONNECTED);
        process.expect("all are connected", is_connected).await;
    }
    (server, processes)
}

/// Lets the processes work for a while: communicators, barriers, keys.
async fn work(processes: &[GpuProcess], rounds: std::ops::Range<u64>) {
    for round in rounds {
        let step = processes.iter().map(|process| async move {
            process.make_communicator(round).await;
            let barrier = Call::barrier("step", i64::try_from(round).unwrap());
            expect_body(&process.client, &process.caller, &barrier).await;
        });
        futures_util::future::join_all(step).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn no_task_is_lost_to_the_others_while_it_lives() {
    let folder = TempFolder::new("gpu-clients");
    let (server, mut processes) = start_job(&folder, &[]).await;
    work(&processes, 0..50).await;
    processes.iter().for_each(|process| process.assert_aborted(&[]));

    // A worker that starts again is lost once, and no other task with it.
    processes.remove(2);
    let again = GpuProcess::start(&server, 2, 777).await;
    for process in &processes {
        process.expect("the new process", |log| log.last[2] == (CONNECTED, 777)).await;
        process.assert_aborted(&[2]);
        process.log.lock().unwrap().aborted.clear();
    }
    processes.insert(2, again);

    // The service dies again and again: its own silence loses no task.
    for round in 0..5_u64 {
        server.kill_core();
        work(&processes, 50 + round * 10..60 + round * 10).await;
        processes.iter().for_each(|process| process.assert_aborted(&[]));
    }
    let after = server.get("/api/v1/jobs/default").json();
    assert_eq!((&after["run"]["number"], &after["run"]["live"]), (&1.into(), &TASKS.into()), "{after}");
}

/// Waits until the job has an open finding with this id.
async fn expect_finding(server: &MusterServer, id: &str) -> Value {
    let finding = async {
        loop {
            let findings = server.get("/api/v1/jobs/default/findings").json();
            let open = findings["open"].as_array().into_iter().flatten();
            if let Some(found) = open.into_iter().find(|finding| finding["id"] == id) {
                return found.clone();
            }
            sleep(Duration::from_millis(10)).await;
        }
    };
    timeout(PATIENCE, finding).await.expect("it is found")
}

#[tokio::test(flavor = "multi_thread")]
async fn a_gpu_that_died_is_named_and_no_task_is_excluded_without_the_setting() {
    let folder = TempFolder::new("gpu-died");
    let (server, processes) = start_job(&folder, &[]).await;
    work(&processes, 0..3).await;
    let dying = &processes[3];
    expect_body(&dying.client, &dying.caller, &Call::insert(FATAL_KEY, FATAL_TEXT)).await;
    let finding = expect_finding(&server, "fatal-gpu-error").await;
    assert_eq!((&finding["tasks"], &finding["severity"]), (&serde_json::json!([3]), &"critical".into()));
    let summary = finding["summary"].as_str().unwrap();
    assert!(summary.contains("GPU 1 of task 3") && summary.contains("illegal memory access"), "{summary}");
    let job = server.get("/api/v1/jobs/default").json();
    assert_eq!(job["exclusions"], serde_json::json!([]));
    let cause = &job["run"]["first_cause"];
    assert_eq!(cause["task"], 3, "{job}");
    assert!(cause["error"].as_str().is_some_and(|error| error.contains("GPU 1 of task 3")), "{cause}");
    // Others that write the same key change nothing about the first error.
    let insert = Call::insert(FATAL_KEY, "x");
    let other = timeout(PATIENCE, processes[0].client.ask(&processes[0].caller, &insert));
    assert_eq!(other.await.expect("an answer").code, 6, "the key is there");
    let events = server.get("/api/v1/jobs/default/events?newest=true&limit=100").body;
    assert!(events.contains("GPU 1 of task 3"), "{events}");
    // When the process starts again, the finding closes.
    let again = GpuProcess::start(&server, 3, 999).await;
    let closed = async {
        while server.get("/api/v1/jobs/default/findings").json()["open"] != serde_json::json!([]) {
            sleep(Duration::from_millis(10)).await;
        }
    };
    timeout(PATIENCE, closed).await.expect("the finding closes");
    drop(again);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_task_whose_gpu_died_is_excluded_at_once_and_the_others_abort_their_collectives_with_it_alone() {
    let folder = TempFolder::new("gpu-excluded");
    let (server, processes) = start_job(&folder, &["--auto-exclude", "fatal-gpu-error"]).await;
    work(&processes, 0..3).await;
    let dying = &processes[3];
    expect_body(&dying.client, &dying.caller, &Call::insert(FATAL_KEY, FATAL_TEXT)).await;
    for process in &processes[..3] {
        process.expect("task 3 is lost", |log| !log.aborted.is_empty()).await;
        process.assert_aborted(&[3]);
    }
    let job = server.get("/api/v1/jobs/default").json();
    let exclusion = &job["exclusions"][0];
    assert_eq!((&exclusion["task"], &exclusion["actor"]["who"]), (&3.into(), &"fatal-gpu-error".into()));
    assert!(exclusion["reason"].as_str().is_some_and(|reason| reason.contains("GPU 1 of task 3")), "{job}");
}
