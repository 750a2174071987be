//! Tests the report store with invented tasks and reports.
//!
//! `tests/wire/reports.rs` tests the wire format. Begin at `StoreFixture`.

mod present_state;

use std::net::SocketAddr;
use std::sync::{Arc, Mutex};

use prost::Message as _;

use super::*;
use crate::clock::Clock;
use crate::coordination::{
    Actor, ActorOrigin, CallOutcome as Answer, Caller, CommandReason, ConnectionId, EventKind, JobSettings,
    OperatorCommand, Request, RunNumber, TaskId, TaskIncarnation, TaskIncarnations, Timestamp,
};
use crate::engine::{AnswerInbox, PersistentObserver};
use crate::proto::muster::v1 as wire;

struct AnswerDiscardingInbox;

impl AnswerInbox for AnswerDiscardingInbox {
    fn deliver(&self, _slot: u64, _outcome: Answer) {}
}

struct StoreFixture {
    engine: Arc<Engine>,
    board: TransferReportStore,
    job: JobId,
    connection: ConnectionId,
    sequence: Mutex<u64>,
}

impl StoreFixture {
    fn with_registered_tasks(tasks: u32) -> Self {
        let engine = Engine::new(Clock::start());
        let settings = JobSettings { recoverable: true, ..JobSettings::new(tasks) };
        let job = engine.declare_job("train".parse().unwrap(), settings).unwrap();
        let connection = engine.register_connection(SocketAddr::from(([127, 0, 0, 1], 1)));
        let world =
            Self { engine, board: TransferReportStore::default(), job, connection, sequence: Mutex::new(0) };
        (0..tasks).for_each(|task| world.register_task(task, 100 + u64::from(task)));
        world
    }

    fn register_task(&self, task: u32, incarnation: u64) {
        let task = TaskId(i32::try_from(task).unwrap());
        let incarnation = TaskIncarnation(incarnation);
        let request = Request::Register { task, incarnation, recoverable: true };
        let inbox: Arc<dyn AnswerInbox> = Arc::new(AnswerDiscardingInbox);
        let caller = Caller { connection: self.connection, claim: None };
        self.engine.call(self.job, caller, request, &inbox, 0);
    }

    /// Returns a report with the next sequence number, changed by `edit`.
    fn encode_report(
        &self,
        task: u32,
        incarnation: u64,
        edit: impl FnOnce(&mut wire::TransferReport),
    ) -> Vec<u8> {
        let mut sequence = self.sequence.lock().unwrap();
        *sequence += 1;
        let mut report = wire::TransferReport {
            task,
            incarnation,
            sequence: *sequence,
            ..wire::TransferReport::default()
        };
        edit(&mut report);
        report.encode_to_vec()
    }

    fn accept_encoded_report(&self, bytes: &[u8]) -> Result<u32, ReportError> {
        self.board.accept_report(&self.engine, self.job, bytes).map(|accepted| accepted.interval_ms)
    }

    fn task_incarnations(&self) -> TaskIncarnations {
        self.engine.read(|core, _| core.job(self.job).unwrap().task_incarnations())
    }

    fn transfers_summary_now(&self) -> TransfersView {
        self.board.transfers_summary(self.job, &self.task_incarnations(), self.engine.clock().now())
    }

    fn transfer_failure_events(&self) -> Vec<(String, u64)> {
        let told =
            self.engine.subscribe_events(0).0.events.into_iter().filter_map(|numbered| {
                match &numbered.event.what {
                    EventKind::TransferFailed { error, count, .. } => Some((error.to_string(), *count)),
                    _ => None,
                }
            });
        told.collect()
    }
}

fn pair_totals_row(peer: u32, transport: &str, sent: u64, received: u64) -> wire::PairTotals {
    wire::PairTotals {
        peer,
        transport: transport.into(),
        sent_bytes: sent,
        received_bytes: received,
        ..Default::default()
    }
}

fn failure_row(peer: u32, reason: &str, at: u64) -> wire::Failure {
    wire::Failure {
        at,
        peer,
        reason: reason.into(),
        text: "as the\nworker says".into(),
        ..Default::default()
    }
}

#[test]
fn counters_of_earlier_lives_are_kept() {
    let world = StoreFixture::with_registered_tasks(2);
    let say = |incarnation, sent, hits| {
        let report = world.encode_report(0, incarnation, |report| {
            report.pairs = vec![pair_totals_row(1, "shm", sent, 5)];
            report.outcomes = vec![wire::OutcomeTotals { outcome: "completed".into(), launches: sent / 10 }];
            report.cliques = Some(wire::CliqueCache { size: 2, hits, misses: 1, evictions: 0 });
            report.connections =
                vec![wire::Connection { peer: 1, lanes: 3, launches: 2, ..Default::default() }];
        });
        world.accept_encoded_report(&report)
    };
    assert_eq!(say(100, 1000, 4), Ok(1000));
    assert_eq!(say(100, 1500, 6), Ok(1000));
    assert_eq!(world.transfers_summary_now().totals.sent_bytes(), 1500);

    world.register_task(0, 777);
    let view = world.transfers_summary_now();
    assert_eq!(
        (view.reporting, view.stale, view.launches_in_flight()),
        (0, 1, 0),
        "its last life has no connections now"
    );
    assert_eq!(view.totals.sent_bytes(), 1500);
    assert!(matches!(say(100, 9999, 9), Err(ReportError::StaleIncarnation { .. })));
    assert_eq!(say(777, 20, 1), Ok(1000));
    let view = world.transfers_summary_now();
    assert_eq!(
        (view.reporting, view.stale, view.launches_in_flight(), view.connection_count()),
        (1, 0, 2, 1)
    );
    assert_eq!((view.totals.sent_bytes(), view.totals.received_bytes()), (1520, 10));
    assert_eq!(
        (view.totals.cache_hits, view.totals.launches_with_outcome(TransferOutcome::COMPLETED)),
        (7, 152)
    );
    assert_eq!((view.taken, view.refused), (3, 1));
    let of_task = world.board.transfers_of_task(world.job, &world.task_incarnations(), TaskId(0)).unwrap();
    assert_eq!((of_task.lives, of_task.cliques), (2, 2));
    let pairs = world.board.pair_views(world.job, &world.task_incarnations(), None, None);
    let moved: Vec<_> = pairs.iter().map(|pair| (pair.from.0, pair.to.0, pair.sent, pair.received)).collect();
    assert_eq!(moved, [(0, 1, Some(1520), None), (1, 0, None, Some(10))]);
}

#[test]
fn a_report_that_is_not_newer_changes_nothing_and_counters_never_go_back() {
    let world = StoreFixture::with_registered_tasks(1);
    let report = |sequence, sent| {
        world.encode_report(0, 100, |report| {
            report.sequence = sequence;
            report.pairs = vec![pair_totals_row(0, "tcp", sent, 0)];
        })
    };
    for (sequence, sent) in [(5, 100), (5, 900), (4, 900), (6, 50)] {
        world.accept_encoded_report(&report(sequence, sent)).unwrap();
        assert_eq!(world.transfers_summary_now().totals.sent_bytes(), 100, "{sequence}");
    }
    assert_eq!((world.transfers_summary_now().taken, world.transfers_summary_now().repeated), (2, 2));
    world.accept_encoded_report(&report(7, u64::MAX)).unwrap();
    world.register_task(0, 200);
    world
        .accept_encoded_report(
            &world
                .encode_report(0, 200, |report| report.pairs = vec![pair_totals_row(0, "tcp", u64::MAX, 0)]),
        )
        .unwrap();
    assert_eq!(world.transfers_summary_now().totals.sent_bytes(), u64::MAX);
}

#[test]
fn only_the_life_that_counts_may_report() {
    let world = StoreFixture::with_registered_tasks(2);
    let nothing = |_: &mut wire::TransferReport| {};
    let ask =
        |task, incarnation| world.accept_encoded_report(&world.encode_report(task, incarnation, nothing));
    assert!(matches!(ask(7, 100), Err(ReportError::NoSuchTask(7, 2))));
    assert!(matches!(ask(u32::MAX, 100), Err(ReportError::NoSuchTask(..))));
    assert!(matches!(ask(1, 100), Err(ReportError::StaleIncarnation { .. })));
    let peers = world.encode_report(0, 100, |report| report.pairs = vec![pair_totals_row(2, "shm", 1, 1)]);
    assert!(matches!(world.accept_encoded_report(&peers), Err(ReportError::NoSuchPeer(2, 2))));
    assert!(matches!(world.accept_encoded_report(b"\x08"), Err(ReportError::Unreadable(_))));
    let gone = world.board.accept_report(&world.engine, JobId(99), b"");
    assert_eq!(gone, Err(ReportError::NoSuchJob));
    assert!(
        !world.board.has_run_reports(world.job, world.transfers_summary_now().run),
        "nothing of all this was kept"
    );
    let none =
        StoreFixture { board: TransferReportStore::default(), ..StoreFixture::with_registered_tasks(1) };
    none.register_task(0, 5);
    assert_eq!(none.accept_encoded_report(&none.encode_report(0, 5, nothing)), Ok(1000));
}

#[test]
fn unknown_names_become_other() {
    let world = StoreFixture::with_registered_tasks(2);
    let report = world.encode_report(0, 100, |report| {
        report.pairs = vec![
            pair_totals_row(1, "pigeon", 1, 0),
            pair_totals_row(1, "\u{1b}[2J", 2, 0),
            pair_totals_row(1, "", 4, 0),
        ];
        report.outcomes =
            (0..60).map(|n| wire::OutcomeTotals { outcome: format!("because {n}"), launches: 1 }).collect();
    });
    world.accept_encoded_report(&report).unwrap();
    let totals = world.transfers_summary_now().totals;
    assert_eq!(totals.bytes, [TransferBytes { transport: ReportedTransport::Other, sent: 7, received: 0 }]);
    assert_eq!(
        (
            totals.launches.len(),
            totals.launches_with_outcome(TransferOutcome::from_name("other")),
            totals.failed_launches()
        ),
        (1, 60, 60)
    );
    for outcome in TransferOutcome::all() {
        assert_eq!(TransferOutcome::from_name(outcome.name()), outcome);
        assert!(
            outcome.name() == "other"
                || outcome.description() != TransferOutcome::from_name("?").description(),
            "{}",
            outcome.name()
        );
    }
}

#[test]
fn lists_are_counted_before_they_are_read() {
    let world = StoreFixture::with_registered_tasks(2);
    for (most, field) in [(PAIRS_MAX, 4_u8), (CONNECTIONS_MAX, 5), (OUTCOMES_MAX, 6), (FAILURES_MAX, 9)] {
        // Rows without contents are the cheapest way to make the server allocate.
        let rows = [field << 3 | 2, 0].repeat(most + 1);
        let bytes = [world.encode_report(0, 100, |_| {}), rows].concat();
        assert!(
            matches!(world.accept_encoded_report(&bytes), Err(ReportError::TooMany { most: said, .. }) if said == most)
        );
    }
    assert!(matches!(world.accept_encoded_report(&vec![0; BYTES_MAX + 1]), Err(ReportError::TooLong(_))));
    let full = world.encode_report(0, 100, |report| {
        report.pairs =
            (0..PAIRS_MAX as u64).map(|n| pair_totals_row(1, "other", u64::MAX - n, u64::MAX)).collect();
        let end =
            wire::Connection { peer: 1, peer_incarnation: u64::MAX, lanes: u32::MAX, ..Default::default() };
        report.connections =
            vec![wire::Connection { launches: u32::MAX, transport: "unix".into(), ..end }; 4096];
        report.failures = vec![failure_row(1, "stalled", u64::MAX); FAILURES_MAX];
    });
    assert!(full.len() < BYTES_MAX, "{}", full.len());
    assert_eq!(world.accept_encoded_report(&full), Ok(1000));
}

#[test]
fn a_large_job_keeps_so_many_pairs_and_connections_of_each_task_and_the_sums_of_all() {
    let world = StoreFixture::with_registered_tasks(20_000);
    assert_eq!(report_interval_ms(20_000), 20_000);
    let report = world.encode_report(3, 103, |report| {
        report.pairs = (0..10_000).map(|peer| pair_totals_row(peer, "tcp", u64::from(peer), 0)).collect();
        let link = |peer| wire::Connection { peer, launches: peer, ..Default::default() };
        report.connections = (0..1000).map(link).collect();
    });
    assert_eq!(world.accept_encoded_report(&report), Ok(20_000));
    let view = world.transfers_summary_now();
    let pairs = world.board.pair_views(world.job, &world.task_incarnations(), None, None);
    // The pairs with the most bytes.
    assert_eq!(pairs.iter().map(|pair| pair.to.0).collect::<Vec<_>>(), [9996, 9997, 9998, 9999]);
    assert_eq!(view.totals.sent_bytes(), 9999 * 10_000 / 2);
    let kept = world.board.connection_views(world.job, &world.task_incarnations(), None, None);
    assert_eq!((kept.len(), kept[0].launches, view.connection_count()), (4, 999, 1000));
}

#[test]
fn throughput_is_what_came_between_two_reports_and_pairs_beyond_the_bound_are_one() {
    let world = StoreFixture::with_registered_tasks(200);
    let say = |sent: u64| {
        let report = world.encode_report(0, 100, |report| {
            report.pairs = (1..=100).map(|peer| pair_totals_row(peer, "shm", sent, 0)).collect();
        });
        world.accept_encoded_report(&report).unwrap();
    };
    say(1_000_000);
    std::thread::sleep(Duration::from_millis(20));
    say(1_000_500);
    // The time of bytes moved before the first report is unknown. A second is shown once all tasks have
    // reported it.
    std::thread::sleep(Duration::from_millis(2_100));
    say(1_000_500);
    let seen = world.board.throughput(world.job, &world.task_incarnations(), 10);
    let sum = |sent: &[u64]| sent.iter().sum::<u64>();
    assert_eq!(
        seen.transports.iter().map(|it| (it.transport, sum(&it.sent))).collect::<Vec<_>>(),
        [(ReportedTransport::Shm, 50_000)]
    );
    assert_eq!(seen.pairs.len(), SERIES_KEPT);
    assert!(seen.pairs.iter().all(|pair| sum(&pair.sent) == 500), "{:?}", seen.pairs);
    assert_eq!(sum(&seen.others), 500 * (100 - SERIES_KEPT as u64));
}

/// Returns a summary after reports at these times to a job created at second 1,000: seconds, task, its pairs.
fn with_store_after_reports(
    reports: &[(u64, u32, Vec<wire::PairTotals>)],
    look: impl FnOnce(&TransferReportStore, JobId, &TaskIncarnations),
) {
    let world = StoreFixture::with_registered_tasks(3);
    let mut of_job = job_reports::JobReports::new(RunNumber(1));
    for (place, (second, task, pairs)) in reports.iter().enumerate() {
        let report = world.encode_report(*task, 100 + u64::from(*task), |report| {
            report.pairs = pairs.clone();
            report.sequence = place as u64 + 1;
        });
        let report = parse::CheckedReport::parse(&report, 3).unwrap();
        of_job.accept_report(report, Timestamp(1_000_000_000), 3, Timestamp(second * 1_000_000));
    }
    world.board.replace_reports(world.job, of_job);
    look(&world.board, world.job, &world.task_incarnations());
}

#[test]
fn the_rates_of_pairs_and_of_tasks_add_up_to_that_of_all_over_the_same_ten_seconds() {
    let mut reports = Vec::new();
    // Task 0 moves evenly, task 1 in bursts, and they report at different times.
    for second in 0..32 {
        let bytes = second * 1_000;
        reports.push((
            1_000 + second,
            0,
            vec![pair_totals_row(1, "tcp", bytes, 0), pair_totals_row(2, "tcp", 3 * bytes, 0)],
        ));
        let burst = second / 7 * 40_000;
        let to = [
            pair_totals_row(0, "shm", burst, 0),
            pair_totals_row(2, "tcp", burst, 0),
            pair_totals_row(0, "tcp", 0, bytes),
        ];
        reports.push((1_001 + second, 1, to.to_vec()));
    }
    reports.sort_by_key(|(second, ..)| *second);
    with_store_after_reports(&reports, |board, job, roster| {
        let view = board.transfers_summary(job, roster, Timestamp(1_033_000_000));
        assert_eq!(
            view.rate_until,
            Some(Timestamp(1_030_000_000)),
            "the last whole ten seconds that both told of"
        );
        let tasks = board.task_transfers(job, roster);
        let pairs = board.pair_views(job, roster, None, None);
        assert!(tasks.iter().all(|task| Some(task.rate_until) == view.rate_until));
        assert_eq!(tasks.iter().map(|task| task.sent_rate).sum::<u64>(), view.rate);
        assert_eq!(pairs.iter().map(|pair| pair.rate).sum::<u64>(), view.rate, "{pairs:?}");
        // Task 0 sends 4,000 bytes a second, task 1 in those ten seconds one burst of 40,000 to each of two, and a part of another.
        assert_eq!(tasks[0].sent_rate, 4_000);
        assert!(tasks[1].sent_rate >= 8_000, "{tasks:?}");
        // The last complete step of the chart is the same window.
        let seen = board.throughput(job, roster, POINTS);
        let sent = |at: usize| seen.transports.iter().map(|it| it.sent[at]).sum::<u64>();
        let spare = usize::try_from(seen.ends_at.0 / 1_000_000 % 10).unwrap();
        let step: u64 = (seen.seconds - spare - 10..seen.seconds - spare).map(sent).sum();
        assert_eq!(step / 10, view.rate);
    });
}

#[test]
fn throughput_begins_with_the_first_report() {
    let reports: Vec<_> =
        (0..20).map(|second| (1_000 + second, 0, vec![pair_totals_row(1, "tcp", second, 0)])).collect();
    with_store_after_reports(&reports, |board, job, roster| {
        let seen = board.throughput(job, roster, POINTS);
        assert_eq!(seen.ends_at, Timestamp(1_018_000_000));
        assert_eq!((seen.seconds, seen.transports[0].sent.len()), (18, 18), "{seen:?}");
        assert_eq!(board.throughput(job, roster, 5).transports[0].sent.len(), 5);
    });
}

#[test]
fn a_storm_of_failures_is_one_event_and_the_first_cause_comes_first() {
    let world = StoreFixture::with_registered_tasks(2);
    let now = world.engine.clock().now().0;
    let say = |failures: Vec<wire::Failure>| {
        let report = world.encode_report(0, 100, |report| {
            report.outcomes = vec![wire::OutcomeTotals { outcome: "stalled".into(), launches: 3 }];
            report.failures = failures;
        });
        world.accept_encoded_report(&report).unwrap();
    };
    say(vec![
        failure_row(1, "peer_dead", now + 7),
        failure_row(1, "stalled", now + 5),
        failure_row(1, "stalled", u64::MAX),
    ]);
    (0..10).for_each(|_| say(vec![failure_row(1, "stalled", 0); FAILURES_MAX]));
    assert_eq!(world.transfer_failure_events(), [("peer_dead".to_owned(), 1), ("stalled".to_owned(), 1)]);
    let reasons = world.transfers_summary_now().failures;
    let told: Vec<_> = reasons.iter().map(|it| (it.reason.name(), it.launches, it.newest.len())).collect();
    assert_eq!(told, [("stalled", 3, REASON_FAILURES_KEPT), ("peer_dead", 0, 1)]);
    let first = reasons[0].first.clone().unwrap();
    assert_eq!((first.at.0, first.text.as_str()), (now + 5, "as the | worker says"));
    // A wrong clock does not place a failure outside of the run.
    assert!(
        reasons[0].newest.iter().all(|failure| failure.at >= first.at && failure.at.0 < now + 60_000_000)
    );
    let of_task = world.board.transfers_of_task(world.job, &world.task_incarnations(), TaskId(0)).unwrap();
    assert_eq!(of_task.failures.len(), TASK_FAILURES_KEPT);
}

#[test]
fn durations_and_aborts_add_up_over_lives_and_what_is_in_flight_is_of_the_last_report() {
    let world = StoreFixture::with_registered_tasks(2);
    let times = |size_class: &str, counts: Vec<u64>| wire::DurationTimes {
        transport: "tcp".into(),
        size_class: size_class.into(),
        sum_us: 10 * counts.iter().sum::<u64>(),
        counts,
    };
    for task in 0..2 {
        let report = world.encode_report(task, 100 + u64::from(task), |report| {
            report.durations = vec![
                times("64KiB", vec![1, 2]),
                // Counts beyond the bounds belong to the last class; an unknown size class is left out.
                times("more", vec![1; 40]),
                times("1 parsec", vec![7]),
            ];
            report.aborts = vec![
                wire::AbortTotals { reason: "peer_dead".into(), connections: 2 },
                wire::AbortTotals { reason: "the moon".into(), connections: u64::MAX },
            ];
            report.in_flight =
                Some(wire::InFlight { latency_bytes: 1, normal_bytes: u64::MAX, bulk_bytes: 3 });
        });
        world.accept_encoded_report(&report).unwrap();
    }
    let view = world.transfers_summary_now();
    let told: Vec<_> = view
        .totals
        .durations
        .iter()
        .map(|of| (of.size_and_transport_label(), of.launches, of.mean_us(), of.counts.last().copied()))
        .collect();
    assert_eq!(
        told,
        [("up to 64 KiB by tcp".to_owned(), 6, 10, Some(0)), ("of more by tcp".to_owned(), 80, 10, Some(54))]
    );
    let aborts: Vec<_> = view.totals.aborts.iter().map(|of| (of.reason.name(), of.connections)).collect();
    assert_eq!(aborts, [("peer_dead", 4), ("other", u64::MAX)]);
    assert_eq!(view.in_flight_bytes, [2, u64::MAX, 6]);
    let many = world.encode_report(0, 100, |report| report.durations = vec![times("more", vec![]); 65]);
    assert!(matches!(
        world.accept_encoded_report(&many),
        Err(ReportError::TooMany { what: "durations", .. })
    ));
}

#[test]
fn a_time_without_a_launch_that_took_it_is_not_counted() {
    let world = StoreFixture::with_registered_tasks(1);
    let report = world.encode_report(0, 100, |report| {
        let (transport, size_class, counts, sum_us) = ("tcp".into(), "4KiB".into(), vec![0, 0], 5);
        report.stages = vec![wire::StageTimes { stage: "move".into(), counts: counts.clone(), sum_us }];
        report.durations = vec![wire::DurationTimes { transport, size_class, counts, sum_us }];
    });
    assert_eq!(world.accept_encoded_report(&report), Ok(1000));
    let totals = world.transfers_summary_now().totals;
    assert_eq!((totals.stages, totals.durations), (vec![], vec![]));
}

#[test]
fn a_job_that_is_deleted_is_forgotten() {
    let world = StoreFixture::with_registered_tasks(1);
    world.accept_encoded_report(&world.encode_report(0, 100, |_| {})).unwrap();
    assert!(world.board.has_reports(world.job));
    let actor = Actor { who: "ada".into(), address: None, means: ActorOrigin::Api };
    let reason = CommandReason::try_from("done".to_owned()).unwrap();
    world
        .engine
        .perform_command(world.job, actor, reason, OperatorCommand::DeleteJob { force: true })
        .unwrap();
    assert_eq!(
        world.accept_encoded_report(&world.encode_report(0, 100, |_| {})),
        Err(ReportError::NoSuchJob)
    );
    world.board.retain_jobs_and_flush_failures(&world.engine, |_| false);
    assert!(!world.board.has_reports(world.job));
}

/// Returns the views that pages and REST have of a run.
fn views_of_run(board: &TransferReportStore, job: JobId, roster: &TaskIncarnations) -> String {
    let summary = board.transfers_summary(job, roster, Timestamp(u64::MAX));
    let tasks = board.task_transfers(job, roster);
    let view =
        (summary, tasks, board.throughput(job, roster, POINTS), board.pair_views(job, roster, None, None));
    serde_json::to_string(&view).unwrap()
}

#[test]
fn the_reports_of_runs_are_the_same_after_a_restart() {
    let world = StoreFixture::with_registered_tasks(2);
    for (sent, incarnation) in [(1000, 100), (5000, 100), (20, 777)] {
        if incarnation == 777 {
            world.register_task(0, incarnation);
        }
        let report = world.encode_report(0, incarnation, |report| {
            report.pairs = vec![pair_totals_row(1, "shm", sent, 5), pair_totals_row(1, "tcp", 7, sent)];
            report.outcomes = vec![wire::OutcomeTotals { outcome: "stalled".into(), launches: sent }];
            let (transport, size_class, counts) = ("tcp".into(), "4KiB".into(), vec![1, 2]);
            report.durations = vec![wire::DurationTimes { transport, size_class, counts, sum_us: sent }];
            report.failures = vec![failure_row(1, "peer_dead", 0)];
        });
        world.accept_encoded_report(&report).unwrap();
    }
    // The tasks of a run that has ended have no present incarnations.
    let roster = TaskIncarnations { run: world.task_incarnations().run, incarnations: Vec::new() };
    let before = views_of_run(&world.board, world.job, &roster);
    assert!(before.contains("5020") && before.contains("peer_dead"), "{before}");

    let (saved, restored) = (world.board.save(), TransferReportStore::default());
    restored.restore(&saved).unwrap();
    assert_eq!(views_of_run(&restored, world.job, &roster), before);
    assert_eq!(restored.save(), saved);
    for cut in (0..saved.len()).step_by(37) {
        assert!(restored.restore(&saved[..cut]).is_err());
    }
    assert_eq!(restored.save(), saved, "what is damaged changes nothing");
    restored.restore(b"{}").unwrap();
    assert!(!restored.has_reports(world.job));
}

#[test]
fn notes_of_ended_runs_take_their_places_and_no_more_than_the_bound_are_kept() {
    let (store, job) = (TransferReportStore::default(), JobId(3));
    let note = |run: u64, taken: u64| {
        let reports = job_reports::JobReports { taken, ..job_reports::JobReports::new(RunNumber(run)) };
        serde_json::to_vec(&serde_json::json!({"job": 3, "reports": reports})).unwrap()
    };
    let taken = |run: u64| {
        let roster = TaskIncarnations { run: RunNumber(run), incarnations: Vec::new() };
        store.transfers_summary(job, &roster, Timestamp(0)).taken
    };
    // A snapshot may already have a run, or a later one.
    for (run, count) in [(2, 20), (1, 10), (4, 40), (3, 30), (2, 21), (4, 41)] {
        store.restore_note(&note(run, count)).unwrap();
    }
    assert_eq!([1, 2, 3, 4, 5].map(taken), [10, 21, 30, 41, 0]);
    (5..=30).for_each(|run| store.restore_note(&note(run, run)).unwrap());
    assert_eq!([4, 21, 22, 30].map(taken), [0, 0, 22, 30]);
    assert!(store.restore_note(b"{\"job\":3}").is_err());
}
