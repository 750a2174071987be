//! Measures the cost of pages and the delay of updates, for `BENCHMARKS.md`. These are not tests.
//!
//!     cargo test --release --test browser -- --ignored --nocapture --test-threads 1 measured

use std::io::{Read as _, Write as _};
use std::net::{SocketAddr, TcpStream};
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use muster::clock::Clock;

use crate::cluster::{BEAT, TaskCluster};
use crate::script::Script;
use crate::support::harness::{Process, Signal, test_arguments};
use crate::support::{Body, Call, Caller, Client, Generation, MusterServer};

/// The duration of a measurement, and the number of repetitions.
const WINDOW: Duration = Duration::from_secs(10);
const REPEAT: usize = 3;

/// A viewer of a job's page: it reads the live stream and counts.
struct PageViewer {
    bytes: Arc<AtomicU64>,
    gone: Arc<AtomicBool>,
}

impl PageViewer {
    fn open_live_stream(http: SocketAddr, page: &str) -> Self {
        let mut stream = TcpStream::connect(http).expect("it listens");
        stream.set_read_timeout(Some(Duration::from_millis(500))).expect("a socket has timeouts");
        let request = format!(
            "GET /jobs/train/live?page={page} HTTP/1.1\r\nhost: {http}\r\naccept: text/event-stream\r\n\r\n"
        );
        stream.write_all(request.as_bytes()).expect("it reads");
        let viewer = Self { bytes: Arc::default(), gone: Arc::default() };
        let (bytes, gone) = (Arc::clone(&viewer.bytes), Arc::clone(&viewer.gone));
        std::thread::spawn(move || {
            let mut room = vec![0; 1 << 16];
            while !gone.load(Ordering::Relaxed) {
                // A read timeout is not the end of the stream.
                let read = stream.read(&mut room).unwrap_or_default();
                bytes.fetch_add(read as u64, Ordering::Relaxed);
            }
        });
        viewer
    }

    fn received_bytes(&self) -> u64 {
        self.bytes.load(Ordering::Relaxed)
    }
}

impl Drop for PageViewer {
    fn drop(&mut self) {
        self.gone.store(true, Ordering::Relaxed);
    }
}

/// Returns the median and the range of some figures.
fn median_and_range_text(mut figures: Vec<f64>) -> String {
    figures.sort_by(f64::total_cmp);
    let (low, high) = (figures[0], figures[figures.len() - 1]);
    format!("{:.2} ({low:.2} to {high:.2})", figures[figures.len() / 2])
}

/// Measures the cost of viewers of a page, compared with none, in alternating windows.
async fn measure_viewer_cost(muster: &MusterServer, what: &str, page: &str, viewers: usize) {
    let (mut more, mut rates) = (Vec::new(), Vec::new());
    for _ in 0..REPEAT {
        let window = async || {
            let before = muster.cpu();
            tokio::time::sleep(WINDOW).await;
            (muster.cpu() - before).as_secs_f64() / WINDOW.as_secs_f64() * 100.0
        };
        let alone = window().await;
        let looking: Vec<PageViewer> =
            (0..viewers).map(|_| PageViewer::open_live_stream(muster.http, page)).collect();
        // The first parts of the stream are not part of the cost of updates.
        tokio::time::sleep(Duration::from_secs(1)).await;
        let before: u64 = looking.iter().map(PageViewer::received_bytes).sum();
        let watched = window().await;
        let after: u64 = looking.iter().map(PageViewer::received_bytes).sum();
        more.push(watched - alone);
        rates.push((after - before) as f64 / viewers as f64 / WINDOW.as_secs_f64() / 1024.0);
    }
    println!(
        "| {what}, {viewers} on {page} | {} % of a core | {} KiB/s each |",
        median_and_range_text(more),
        median_and_range_text(rates)
    );
}

/// Runs rounds of a barrier until told to stop.
async fn run_barrier_rounds(party: &TaskCluster, pause: Duration, stop: &AtomicBool) {
    let mut next = tokio::time::interval(pause);
    for counter in 0.. {
        next.tick().await;
        if stop.load(Ordering::Relaxed) {
            return;
        }
        party.pass_barrier_with_late_task("train/round", counter, -1, Duration::ZERO).await;
    }
}

async fn measure_viewer_costs(tasks: i32, shared: usize, beat: Duration, round: Duration) {
    let jobs = format!("train={tasks}");
    let muster = MusterServer::patient(&["--job", &jobs, "--recoverable"]);
    let party = TaskCluster::register_tasks(muster.grpc, "train", 0..tasks, shared).await;
    party.start_heartbeats(beat);
    for page in ["job", "barriers", "task&task=3"] {
        measure_viewer_cost(&muster, &format!("{tasks} tasks at rest"), page, 1).await;
    }
    measure_viewer_cost(&muster, &format!("{tasks} tasks at rest"), "job", 10).await;
    let stop = AtomicBool::new(false);
    let measured = async {
        for page in ["job", "barriers"] {
            measure_viewer_cost(&muster, &format!("{tasks} tasks, a round every {round:?}"), page, 1).await;
        }
        measure_viewer_cost(&muster, &format!("{tasks} tasks, a round every {round:?}"), "job", 10).await;
        stop.store(true, Ordering::Relaxed);
    };
    tokio::join!(measured, run_barrier_rounds(&party, round, &stop));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "measures for some minutes"]
async fn measured_costs_of_a_viewer_of_8_tasks() {
    measure_viewer_costs(8, 1, BEAT, Duration::from_millis(50)).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "measures for some minutes"]
async fn measured_costs_of_a_viewer_of_10_000_tasks() {
    measure_viewer_costs(10_000, 100, Duration::from_secs(10), Duration::from_secs(1)).await;
}

/// Starts a task in a process of its own, which the test can kill.
fn start_task_process(grpc: SocketAddr, task: i32) -> Process {
    let mut command = Command::new(std::env::current_exe().expect("it runs"));
    command.args(test_arguments("measures::a_task_in_a_process_of_its_own"));
    command.env("MUSTER_TASK", format!("{grpc} {task}")).stdout(Stdio::null());
    Process::spawn(&mut command).expect("it can be run again")
}

#[tokio::test]
#[ignore = "a process of another test"]
async fn a_task_in_a_process_of_its_own() {
    let Ok(told) = std::env::var("MUSTER_TASK") else { return };
    let (grpc, task) = told.split_once(' ').expect("an address and a number");
    let (grpc, task): (SocketAddr, i32) =
        (grpc.parse().expect("an address"), task.parse().expect("a number"));
    let client = Client::to_authority(Generation::C, grpc, Some(&format!("train.localhost:{}", grpc.port())));
    let incarnation = u64::from(std::process::id()) << 20 | 0xdead;
    let caller = Caller { service: None, ..Caller::new(task, incarnation, 0) };
    let answer = client.ask(&caller, &Call::Register { incarnation, recoverable: true }).await;
    let Body::Service(service) = answer.body else { panic!("{answer:?}") };
    let caller = Caller::new(task, incarnation, service);
    loop {
        let _ = client.ask(&caller, &Call::Heartbeat { incarnation }).await;
        tokio::time::sleep(Duration::from_millis(500)).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "measures for some minutes"]
async fn measured_time_until_changes_are_seen() {
    let muster = MusterServer::patient(&["--job", "train=8", "--recoverable", "--heartbeat-timeout", "10s"]);
    let mut killed = start_task_process(muster.grpc, 7);
    let mut party = TaskCluster::register_tasks(muster.grpc, "train", 0..7, 1).await;
    party.start_heartbeats(BEAT);
    let mut script = Script::start("latency.mjs", muster.http);
    // The wall clock, which the browser reports too.
    let clock = Clock::start();
    let mut counter = 0;
    while let Some(wanted) = script.next_requested_action().await {
        let mut at = clock.now();
        match wanted.as_str() {
            "kill" => _ = killed.signal(Signal::KILL),
            "restart" => party.register_lost_task_again(6).await,
            "start" => killed = start_task_process(muster.grpc, 7),
            "meet" => {
                let first: Vec<_> = party
                    .remaining_tasks()
                    .skip(1)
                    .map(|member| member.start_barrier_call("train/step", counter))
                    .collect();
                // The other tasks wait for a random time before each round.
                tokio::time::sleep(Duration::from_millis(fastrand::u64(20..400))).await;
                at = clock.now();
                let last = party.member(0).start_barrier_call("train/step", counter);
                for answer in first.iter().chain([&last]) {
                    answer.within(Duration::from_secs(20)).await.expect("all are there");
                }
                counter += 1;
            }
            other => panic!("the script wants {other:?}"),
        }
        script.report_action_done_at(at.0 / 1000).await;
    }
}
