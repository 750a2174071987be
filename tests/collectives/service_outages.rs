//! The service is killed and starts again, or is never there.

use std::net::SocketAddr;

use serde_json::json;

use crate::gpu_job::{GpuJob, JobSetup, STUCK_AFTER, start_server};
use crate::harness::process::OutputStream;
use crate::harness::{MusterServer, PATIENCE, Process, Signal, TempFolder, TestInstant, muster, wait_for};

const EVERYONE: [usize; 4] = [0, 1, 2, 3];
/// The tiny collectives of which the time is compared.
const TINY: u64 = 20_000;

#[test]
fn reports_resume_after_the_service_was_killed() {
    let journal = TempFolder::new("collectives-journal");
    let setup =
        JobSetup { server: vec!["--data-dir".into(), journal.path("journal")], ..JobSetup::default() };
    let mut job = GpuJob::start_joined("outage", &setup);
    job.wait_for_count(3);
    let pids = job.ranks.iter().map(Process::pid).collect::<Vec<_>>();
    job.server.signal(Signal::KILL);
    job.server.end();
    // The processes go on without it.
    job.run(&EVERYONE, "call 0 AllReduce 100 50");
    job.run(&EVERYONE, "sync 0");
    let (grpc, http) = (job.server.grpc.to_string(), job.server.http.to_string());
    let stuck_after = format!("{}s", STUCK_AFTER.as_secs());
    let arguments = ["serve", "--grpc", &grpc, "--http", &http, "--tasks", "4", "--recoverable"];
    let more = ["--heartbeat-timeout", "1h", "--collective-stuck-after", &stuck_after];
    let journal = [setup.server[0].as_str(), setup.server[1].as_str()];
    job.server = MusterServer::run(&mut muster(arguments.iter().chain(&more).chain(&journal)));
    let view = job.wait_for_count(53);
    let members = job.clique(&view["cliques"][0]["clique"])["members"].take();
    let told: Vec<_> = members.as_array().expect("ranks").iter().map(|it| it["pid"].as_i64()).collect();
    assert_eq!(told, pids.iter().map(|pid| Some(i64::from(*pid))).collect::<Vec<_>>(), "{members}");
    // The tasks are known again, from the keys in the journal.
    let began = TestInstant::now();
    job.run(&[0, 1, 2], "call 0 AllReduce 100 1");
    let finding = job.wait_for_stuck(began);
    assert_eq!(finding["tasks"], json!([3]), "{finding}");
    let wait = &job.collectives()["cliques"][0]["wait"];
    assert_eq!((&wait["kind"], &wait["number"]), (&json!("not-called"), &json!(53)));
}

/// Runs tiny collectives of two tasks, and returns the microseconds that each task took.
fn time_collectives(name: &str, setup: JobSetup) -> (GpuJob, Vec<u64>) {
    let mut job = GpuJob::start_joined(name, &JobSetup { tasks: 2, ..setup });
    job.tell(&[0, 1], &format!("time 0 {TINY}"));
    let took = job.ranks.iter_mut().map(|rank| {
        let number = |line: &str| line.strip_prefix("took ").and_then(|number| number.parse().ok());
        rank.next(OutputStream::Stdout, 5 * PATIENCE, number).expect("the process says how long it took")
    });
    let took = took.collect();
    job.wait_done(&[0, 1], &format!("time 0 {TINY}"));
    (job, took)
}

#[test]
fn a_service_that_never_answers_costs_the_program_nothing() {
    // Nothing listens there any more.
    let gone: SocketAddr = {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").expect("there are free ports");
        listener.local_addr().expect("it is bound")
    };
    let without = JobSetup { plugin: Some("none".to_owned()), ..JobSetup::default() };
    let unheard = JobSetup { reports_to: Some(gone), ..JobSetup::default() };
    let (job, took_without) = time_collectives("no-plugin", without);
    assert_eq!(job.collectives()["processes"], 0, "no plug-in, no reports");
    drop(job);
    let (job, took_unheard) = time_collectives("no-service", unheard);
    assert_eq!(job.collectives()["processes"], 0, "nobody hears the reports");
    drop(job);
    let (job, took_heard) = time_collectives("service", JobSetup::default());
    job.wait_for_count(TINY + 3);
    let calls = job.metric("muster_collective_operations_total", "function=\"AllReduce\"");
    assert_eq!(calls, 2.0 * (TINY + 3) as f64);
    let per_call = |took: &[u64]| took.iter().sum::<u64>() as f64 / took.len() as f64 / TINY as f64;
    let [without, unheard, heard] = [&took_without, &took_unheard, &took_heard].map(|took| per_call(took));
    eprintln!(
        "a collective took {without:.2} µs without the plug-in, {unheard:.2} µs with one that no service hears ({:.3} times), \
         {heard:.2} µs with one that a service hears ({:.3} times)",
        unheard / without,
        heard / without
    );
}

#[test]
fn a_plug_in_whose_job_the_service_does_not_have_harms_nothing() {
    // The plug-in reports to another server than the job's, which has one task and is no job of these processes.
    let other = start_server(&JobSetup { tasks: 1, ..JobSetup::default() });
    let setup = JobSetup { reports_to: Some(other.grpc), ..JobSetup::default() };
    let mut job = GpuJob::start_joined("other-service", &setup);
    job.run(&EVERYONE, "call 0 AllReduce 100 10");
    job.run(&EVERYONE, "sync 0");
    let heard = || other.get("/api/v1/jobs/default/collectives").json()["cliques"][0].take();
    let clique = wait_for("the other server hears every rank", || {
        Some(heard()).filter(|clique| clique["reported"] == 4 && clique["back"] == 13)
    });
    // It has no key of this clique: processes tell their tasks by themselves.
    assert_eq!((&clique["ranks"], &clique["tasks"]), (&json!(4), &json!([{"first": 0, "last": 3}])));
    assert_eq!(job.collectives()["processes"], 0);
}
