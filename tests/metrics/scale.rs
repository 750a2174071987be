//! The cost of a scrape with ten thousand tasks.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use muster::clock::Clock;
use muster::coordination::{CallOutcome, Caller, JobName, JobSettings, Request, TaskId, TaskIncarnation};
use muster::engine::{AnswerInbox, AnsweredOrWaiting, Engine, Observer};
use muster::grpc;
use muster::service::findings::{self, FindingMetrics, FindingStore};
use muster::service::reports::TransferReportMetrics;
use muster::telemetry::metrics::{EventCounters, MetricSource, MetricSources, Metrics};
use muster::tls::HandshakeFailures;

const TASKS: u32 = 10_000;
/// The time limit of a scrape; longer in an unoptimized build.
const LIMIT: Duration = Duration::from_millis(if cfg!(debug_assertions) { 500 } else { 50 });

struct DiscardingInbox;

impl AnswerInbox for DiscardingInbox {
    fn deliver(&self, _slot: u64, _outcome: CallOutcome) {}
}

/// Lets the engine finish its deferred work.
async fn finish_deferred_work(engine: &Arc<Engine>) {
    let timers = tokio::spawn(Arc::clone(engine).run_timers());
    while engine.read_under_lock(|core| core.has_pending_work()) {
        tokio::task::yield_now().await;
    }
    timers.abort();
}

/// Returns an engine with a job whose tasks all poll for errors and have passed a barrier.
async fn engine_with_polling_tasks(tally: &Arc<EventCounters>) -> Arc<Engine> {
    let engine = Engine::new(Clock::start());
    engine.set_observers(vec![Arc::clone(tally) as Arc<dyn Observer>]);
    let job = engine.declare_job(JobName::default(), JobSettings::new(TASKS)).expect("the first job");
    let inbox: Arc<dyn AnswerInbox> = Arc::new(DiscardingInbox);
    let id = |task: u32| TaskId(i32::try_from(task).expect("a task id"));
    let life = |task: u32| TaskIncarnation(u64::from(task) + 1);
    let connections: Vec<_> =
        (0..TASKS).map(|_| engine.register_connection(SocketAddr::from(([10, 0, 0, 1], 1)))).collect();
    let ask = |task: u32, request: Request| {
        let caller = Caller { connection: connections[task as usize], claim: None };
        engine.call(job, caller, request, &inbox, 0)
    };
    for task in 0..TASKS {
        ask(task, Request::Register { task: id(task), incarnation: life(task), recoverable: false });
    }
    finish_deferred_work(&engine).await;
    for counter in 0..2 {
        for task in 0..TASKS {
            let id_ = "step".to_owned();
            let met = ask(
                task,
                Request::Barrier { id: id_, counter, timeout_ms: 60_000, members: None, task: id(task) },
            );
            assert!(
                matches!(met, AnsweredOrWaiting::Waiting(_)),
                "answers of so many are given one after the other"
            );
        }
        finish_deferred_work(&engine).await;
        assert_eq!(engine.waiting_call_count(), 0, "the last one passes it");
    }
    for task in 0..TASKS {
        for _ in 0..2 {
            ask(task, Request::Heartbeat { task: id(task), incarnation: life(task) });
        }
        ask(task, Request::PollForError { task: id(task) });
    }
    engine
}

#[tokio::test]
async fn a_scrape_and_a_look_for_findings_of_ten_thousand_tasks_are_quick() {
    let tally = Arc::new(EventCounters::new(findings::finding_ids()));
    let engine = engine_with_polling_tasks(&tally).await;
    let board = Arc::<FindingStore>::default();
    let edge = grpc::GrpcServer::new(Arc::clone(&engine), grpc::GrpcLimits::default());
    let reports = findings::WorkerReports {
        transfers: Arc::clone(edge.report_store()),
        collectives: Arc::clone(edge.collective_reports()),
    };
    let metrics = |tasks_max: usize| {
        let others: Vec<Arc<dyn MetricSource>> = vec![
            edge.clone(),
            Arc::new(FindingMetrics {
                engine: Arc::clone(&engine),
                reports: reports.clone(),
                findings: Arc::clone(&board),
            }),
            Arc::new(TransferReportMetrics {
                engine: Arc::clone(&engine),
                reports: Arc::clone(edge.report_store()),
                tasks_max,
            }),
        ];
        let sources = MetricSources {
            engine: Arc::clone(&engine),
            tally: Arc::clone(&tally),
            handshakes: Arc::new(HandshakeFailures::new(*engine.clock())),
            others,
        };
        Metrics::new(sources, tasks_max)
    };
    let (usual, every_task) = (metrics(1024), metrics(TASKS as usize));
    let job = engine.read(|core, _| core.default_job()).expect("the only job");
    let seen = engine.read(|core, now| core.observe_job(job, now)).expect("the only job");
    assert_eq!(seen.counts.connected, TASKS as usize);

    let timed = |what: &str, act: &dyn Fn()| {
        let best = (0..5).map(|_| {
            let began = engine.clock().now();
            act();
            engine.clock().now().since(began)
        });
        let best = best.min().unwrap_or_default();
        println!("{what}: {best:?}");
        assert!(best < LIMIT, "{what} takes {best:?}");
    };
    timed("a scrape at 10,000 tasks", &|| {
        assert!(
            usual
                .scrape()
                .expect("it is measured")
                .contains("muster_live_tasks{muster_job=\"default\"} 10000\n")
        );
    });
    timed("the same with metrics of each task", &|| {
        assert!(
            every_task
                .scrape()
                .expect("it is measured")
                .contains("muster_task_up{muster_job=\"default\",task=\"9999\"} 1\n")
        );
    });
    timed("the part of it under the lock", &|| {
        let _ = engine.read(|core, now| core.observe_job(job, now));
    });
    timed("a look for findings", &|| drop(findings::run_detectors_on_all_jobs(&engine, &reports, &board)));
}
