//! A server on which every metric changes.

use std::net::SocketAddr;
use std::time::Duration;

use muster::proto::muster::v1::{CollectiveReport, CollectivesReport, CommunicatorReport, FunctionReport};
use tokio::task::JoinHandle;

use crate::support::{Answer, Body, Call, Caller, Client, Generation, MusterServer, Pending, Reporter};

const PATIENCE: Duration = Duration::from_secs(60);

/// The tasks of one job, each on a connection of its own.
pub struct JobTasks {
    service: SocketAddr,
    job: String,
    tasks: Vec<(Client, Caller)>,
}

impl JobTasks {
    async fn register(service: SocketAddr, job: &str, tasks: i32) -> Self {
        let mut gang = Self { service, job: job.to_owned(), tasks: Vec::new() };
        for task in 0..tasks {
            gang.tasks
                .push((gang.client(task), Caller::new(task, 0xA000 + u64::from(task.unsigned_abs()), 0)));
        }
        let calls: Vec<Pending> =
            gang.tasks.iter().map(|(client, caller)| start_registration(client, *caller)).collect();
        for (call, (_, caller)) in calls.iter().zip(&mut gang.tasks) {
            let answer = call.within(PATIENCE).await.expect("the registration is answered");
            let Body::Service(service) = answer.body else { panic!("{answer:?}") };
            caller.service = Some(service);
        }
        gang
    }

    fn client(&self, task: i32) -> Client {
        let generation = if task % 2 == 0 { Generation::C } else { Generation::A };
        Client::to_authority(generation, self.service, Some(&format!("{}.test:8476", self.job)))
    }

    /// Makes a call as a task and waits for its answer.
    pub async fn ask(&self, task: usize, call: &Call) -> Answer {
        let (client, caller) = &self.tasks[task];
        tokio::time::timeout(PATIENCE, client.ask(caller, call)).await.expect("the call is answered")
    }

    /// Makes a call as a task without waiting.
    pub fn start_call(&self, task: usize, call: Call) -> Pending {
        let (client, caller) = &self.tasks[task];
        client.start(*caller, call, |_| {})
    }

    async fn send_heartbeat(&self, task: usize) {
        let call = Call::Heartbeat { incarnation: self.tasks[task].1.incarnation };
        let answer = self.ask(task, &call).await;
        assert!(answer.is_ok(), "{answer:?}");
    }

    /// Returns a reporter of transfers for a task.
    fn reporter(&self, task: u32) -> Reporter {
        let (client, caller) = &self.tasks[task as usize];
        Reporter::new(client, task, caller.incarnation)
    }

    /// Lets all tasks meet at a barrier, the last one late.
    async fn pass_barrier_with_late_task(&self, counter: i64) {
        let barrier = Call::barrier("step", counter);
        let last = self.tasks.len() - 1;
        let early: Vec<Pending> = (0..last).map(|task| self.start_call(task, barrier.clone())).collect();
        tokio::time::sleep(Duration::from_millis(60)).await;
        let answer = self.ask(last, &barrier).await;
        assert!(answer.is_ok(), "{answer:?}");
        for call in early {
            assert!(call.within(PATIENCE).await.is_some_and(|answer| answer.is_ok()));
        }
    }
}

/// Returns the reports of two tasks, one of which has called one collective fewer than the other, 40 s ago.
fn collectives_reports(sequence: u64) -> [CollectivesReport; 2] {
    [0, 1].map(|task: u32| {
        let called = 100 * sequence - u64::from(task);
        let function = FunctionReport {
            function: "AllReduce".into(),
            enqueued: called,
            begun: called,
            ended: called,
            bytes: called << 20,
            timed: called,
            timed_bytes: called << 20,
            gpu_ns: called * 1_000_000,
        };
        let latest = CollectiveReport {
            number: called - 1,
            function: "AllReduce".into(),
            data_type: "float32".into(),
            count: 1 << 18,
            chain: called,
            enqueued_us: 40_000_000,
            ..CollectiveReport::default()
        };
        let communicator = CommunicatorReport {
            hash: 7,
            rank: task,
            ranks: 2,
            nodes: 1,
            changed_us: 40_000_000,
            collectives: called,
            functions: vec![function],
            operations: vec![latest],
            ..CommunicatorReport::default()
        };
        CollectivesReport {
            process: u64::from(task),
            sequence,
            task: Some(task),
            timing: true,
            communicators: vec![communicator],
            ..CollectivesReport::default()
        }
    })
}

fn start_registration(client: &Client, caller: Caller) -> Pending {
    client.start(caller, Call::Register { incarnation: caller.incarnation, recoverable: false }, |_| {})
}

/// The server and its tasks.
pub struct MetricsFixture {
    pub server: MusterServer,
    /// Keeps pending calls pending.
    _waiting: Vec<Pending>,
    _gangs: Vec<JobTasks>,
    working: JoinHandle<()>,
}

impl MetricsFixture {
    /// Starts the server and its tasks, which run until this value is dropped.
    pub async fn start() -> Self {
        let config = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/metrics/jobs.toml");
        // Nothing listens on this port, so traces cannot be exported.
        let nowhere = ["--otlp-endpoint", "http://127.0.0.1:9"];
        let settings = ["--config", config, "--task-metrics-max", "20", "--log", "error"];
        let server = MusterServer::patient(&[&settings[..], &nowhere].concat());
        let service = server.grpc;
        let (train, flex) =
            tokio::join!(JobTasks::register(service, "train", 4), JobTasks::register(service, "flex", 3));
        let doomed = JobTasks::register(service, "doomed", 1).await;
        let full = JobTasks::register(service, "full", 1).await;
        let wide = JobTasks::register(service, "wide", 40).await;

        let failed = doomed.ask(0, &Call::report(13, "it went wrong")).await;
        assert!(failed.is_ok(), "{failed:?}");
        for key in 0..10 {
            assert!(full.ask(0, &Call::insert(&format!("k/{key}"), "value")).await.is_ok());
        }
        assert!(!full.ask(0, &Call::insert("k/more", "value")).await.is_ok(), "there is no room");
        assert!(!flex.ask(0, &Call::try_get("nothing")).await.is_ok());
        let again = flex.client(1);
        let back = Caller::new(1, 0xBBBB, flex.tasks[1].1.service.expect("it is registered"));
        assert!(start_registration(&again, back).within(PATIENCE).await.is_some_and(|answer| answer.is_ok()));

        // A client speaks TLS on a plaintext port, and an operator makes changes.
        let mut stranger = std::net::TcpStream::connect(service).expect("it connects");
        std::io::Write::write_all(&mut stranger, &[0x16, 3, 1, 0, 1, 0]).expect("it is sent");
        let nobody = r#"{"host": "192.0.2.1", "reason": "r"}"#;
        let excluded = crate::prometheus::send(server.http, "POST", "/api/v1/jobs/flex/exclusions", nobody);
        assert!(excluded.as_ref().is_ok_and(|(status, _)| *status == 201), "{excluded:?}");

        let late = JobTasks { service, job: "late".into(), tasks: Vec::new() };
        let waiting = vec![
            start_registration(&late.client(0), Caller::new(0, 0xA000, 0)),
            train.start_call(0, Call::PollForError),
            train.start_call(1, Call::get("a key that nobody writes")),
            train.start_call(2, Call::alive(&[0, 1, 2, 3])),
            wide.start_call(0, Call::barrier("the-id-of-a-barrier", 0)),
        ];
        let mut reporter = train.reporter(0);
        reporter.connect(1, "unix", 4, 2);
        let working = tokio::spawn(async move {
            for counter in 0.. {
                train.pass_barrier_with_late_task(counter).await;
                for task in 0..4 {
                    train.send_heartbeat(task).await;
                }
                let hits = u64::try_from(counter).unwrap_or_default();
                reporter.move_bytes(1, "shm", 1 << 20, 1 << 10);
                reporter.end("completed", 3);
                reporter.fail(1, "stalled", "nothing moved for 5 s", 0);
                reporter.count(hits, hits);
                reporter.take_time("move", hits);
                reporter.lose("peer_dead", hits, 4096);
                reporter.show_clock(90_000_000, 400);
                reporter.say().await.expect("the report is taken");
                for report in collectives_reports(hits + 1) {
                    reporter.report_collectives(report).await.expect("the report is taken");
                }
                train.ask(0, &Call::overwrite("step", counter.to_string())).await;
                train.ask(0, &Call::try_get("nothing")).await;
            }
        });
        Self { server, _waiting: waiting, _gangs: vec![flex, doomed, full, wide, late], working }
    }

    /// Returns a scrape.
    pub fn scrape(&self) -> String {
        let (status, body) = crate::prometheus::get(self.server.http, "/metrics").expect("it answers");
        assert_eq!(status, 200, "{body}");
        body
    }

    /// Returns a scrape after all delayed metrics have changed.
    pub async fn scrape_when_settled(&self) -> String {
        let wanted = [
            "muster_findings{muster_job=\"full\",finding=\"nearly-full-bounds\",severity=\"warning\"} 1",
            "muster_task_straggler_score{muster_job=\"train\",task=\"3\"}",
            "muster_waiting_calls{muster_job=\"train\",waits_for=\"live-set\"} 1",
            "muster_waiting_calls{muster_job=\"wide\",waits_for=\"barrier\"} 1",
            "muster_tasks{muster_job=\"late\",standing=\"registering\"} 1",
            "muster_transfer_reporting_tasks{muster_job=\"train\"} 1",
            "muster_findings{muster_job=\"train\",finding=\"worker-clock-off\",severity=\"warning\"} 1",
            "muster_findings{muster_job=\"train\",finding=\"collective-stuck\",severity=\"warning\"} 1",
            // That finding asks the tasks for their stacks.
            "muster_stack_requests_total{muster_job=\"train\",cause=\"automatic\"} 1",
            "muster_tls_handshakes_failed_total{listener=\"grpc\",reason=\"no-tls-here\"} 1",
            "muster_trace_spans_left_out_total 0",
        ];
        for _ in 0..600 {
            let scrape = self.scrape();
            if wanted.iter().all(|line| scrape.contains(line)) {
                return scrape;
            }
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
        panic!("it never came to this: {wanted:?} in\n{}", self.scrape());
    }

    /// Returns another JSON response of the server.
    pub fn get_json(&self, path: &str) -> serde_json::Value {
        let (_, body) = crate::prometheus::get(self.server.http, path).expect("it answers");
        serde_json::from_str(&body).unwrap_or_else(|error| panic!("{path}: {error}: {body}"))
    }
}

impl Drop for MetricsFixture {
    fn drop(&mut self) {
        self.working.abort();
    }
}
