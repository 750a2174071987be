//! Tests the store with an engine and encoded reports. Begin at `StoreFixture`.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use prost::Message as _;

use super::super::parse::ProcessCollectives;
use super::super::*;
use crate::clock::Clock;
use crate::coordination::{CallOutcome, Caller, JobId, JobSettings, Request, TaskId, TaskIncarnation};
use crate::engine::{AnswerInbox, Engine};
use crate::proto::muster::v1 as pb;

struct UnreadAnswers;

impl AnswerInbox for UnreadAnswers {
    fn deliver(&self, _slot: u64, _outcome: CallOutcome) {}
}

struct StoreFixture {
    engine: Arc<Engine>,
    reports: CollectiveReports,
    job: JobId,
}

impl StoreFixture {
    fn with_tasks(tasks: u32) -> Self {
        let engine = Engine::new(Clock::start());
        let job = engine.declare_job("train".parse().unwrap(), JobSettings::new(tasks)).unwrap();
        let connection = engine.register_connection(SocketAddr::from(([127, 0, 0, 1], 1)));
        let inbox: Arc<dyn AnswerInbox> = Arc::new(UnreadAnswers);
        for task in 0..i32::try_from(tasks).unwrap() {
            let incarnation = TaskIncarnation(7);
            let request = Request::Register { task: TaskId(task), incarnation, recoverable: false };
            engine.call(job, Caller { connection, claim: None }, request, &inbox, 0);
        }
        Self { engine, reports: CollectiveReports::default(), job }
    }

    fn send(&self, report: &pb::CollectivesReport) -> Result<CollectiveAnswer, CollectiveReportError> {
        self.reports.accept_report(&self.engine, self.job, &report.encode_to_vec())
    }
}

/// Returns the report of a process that is a task and has one communicator of two ranks.
pub(super) fn report(task: u32, collectives: u64) -> pb::CollectivesReport {
    let reduced = pb::FunctionReport {
        function: "AllReduce".into(),
        enqueued: collectives,
        bytes: collectives * 400,
        timed: collectives,
        timed_bytes: collectives * 400,
        gpu_ns: collectives * 1_000,
        ..Default::default()
    };
    let latest = pb::CollectiveReport {
        number: collectives - 1,
        function: "AllReduce".into(),
        data_type: "float32".into(),
        count: 100,
        chain: collectives,
        enqueued_us: 3_000_000,
        ..Default::default()
    };
    pb::CollectivesReport {
        process: u64::from(task) + 100,
        sequence: collectives,
        pid: 4711,
        host: "node\n7".into(),
        task: Some(task),
        communicators: vec![pb::CommunicatorReport {
            hash: 0xABCD,
            rank: task,
            ranks: 2,
            nodes: 1,
            changed_us: 3_000_000,
            collectives,
            functions: vec![reduced],
            operations: vec![latest],
            ..Default::default()
        }],
        ..Default::default()
    }
}

#[test]
fn the_view_names_the_task_that_has_not_called() {
    let fixture = StoreFixture::with_tasks(2);
    assert_eq!(fixture.reports.view(&fixture.engine, fixture.job, 2).clique_count, 0);
    fixture.send(&report(0, 12)).unwrap();
    let answer = fixture.send(&report(1, 11)).unwrap();
    assert_eq!(answer.interval_ms, 1_000);
    let view = fixture.reports.view(&fixture.engine, fixture.job, 2);
    assert_eq!((view.processes, view.clique_count, view.waiting_count), (2, 1, 1));
    let [clique] = &view.cliques[..] else { panic!("{view:?}") };
    assert_eq!((&*clique.clique, clique.front, clique.back), ("000000000000abcd", 12, 11));
    let wait = clique.wait.as_ref().unwrap();
    assert_eq!(
        (wait.kind, wait.role, &wait.waited_for[..]),
        (WaitKind::NotCalled, WaitRole::Cause, &[1][..])
    );
    assert!(
        wait.summary.starts_with("task 1 has not called collective 11 (AllReduce of 400 B float32)"),
        "{wait:?}"
    );
    assert!(!wait.certain && wait.waited_s >= 2.9, "{wait:?}");
    let clique = fixture.reports.clique(&fixture.engine, fixture.job, 2, 0xABCD).unwrap();
    let ranks: Vec<_> =
        clique.members.iter().map(|it| (it.rank, it.task, it.behind, it.waited_for)).collect();
    assert_eq!(ranks, [(0, Some(TaskId(0)), 0, false), (1, Some(TaskId(1)), 1, true)]);
    assert_eq!(clique.members[0].host, "node | 7");
    assert_eq!(fixture.reports.clique(&fixture.engine, fixture.job, 2, 0xABCE), None);
    assert!(
        fixture.reports.find_troubles(&fixture.engine, fixture.job, 2).stuck.is_empty(),
        "30 s have not passed"
    );
    fixture.reports.set_stuck_after(Duration::from_secs(2));
    let stuck = fixture.reports.find_troubles(&fixture.engine, fixture.job, 2).stuck;
    assert_eq!(stuck.iter().map(|it| &it.tasks[..]).collect::<Vec<_>>(), [[TaskId(1)]]);
    // The wait is old enough now that ranks are asked for more, and NCCL for times.
    std::thread::sleep(Duration::from_millis(600));
    let answer = fixture.send(&pb::CollectivesReport { sequence: 100, ..report(0, 12) }).unwrap();
    assert!(answer.is_timed);
    assert_eq!(answer.wanted, [WantedCollectives { hash: 0xABCD, rank: 0, first: 3 }]);
}

#[test]
fn totals_rise_by_what_is_new_and_a_repeated_report_changes_nothing() {
    let fixture = StoreFixture::with_tasks(2);
    let totals = || fixture.reports.counts(fixture.job).0[0].1;
    fixture.send(&report(0, 12)).unwrap();
    fixture.send(&report(0, 12)).unwrap();
    assert_eq!((totals().operations, totals().bytes), (12, 4_800));
    fixture.send(&report(0, 20)).unwrap();
    fixture.send(&report(0, 15)).unwrap();
    assert_eq!((totals().operations, totals().gpu_ns), (20, 20_000));
    // Another process of the same task begins again.
    fixture.send(&pb::CollectivesReport { process: 9, ..report(0, 5) }).unwrap();
    assert_eq!(totals().operations, 25);
    assert_eq!(fixture.reports.counts(fixture.job).1, [5, 0]);
}

#[test]
fn reports_that_are_no_reports_are_refused_and_counted() {
    let fixture = StoreFixture::with_tasks(1);
    let refuse =
        |bytes: Vec<u8>| fixture.reports.accept_report(&fixture.engine, fixture.job, &bytes).unwrap_err();
    let with_ranks = |rank, ranks| {
        let mut report = report(0, 5);
        report.communicators[0].rank = rank;
        report.communicators[0].ranks = ranks;
        report.encode_to_vec()
    };
    assert_eq!(refuse(vec![0; REPORT_BYTES_MAX + 1]), CollectiveReportError::TooLong(REPORT_BYTES_MAX + 1));
    assert_eq!(refuse(with_ranks(2, 2)), CollectiveReportError::NoSuchRank { rank: 2, ranks: 2 });
    assert_eq!(
        refuse(with_ranks(0, u32::MAX)),
        CollectiveReportError::NoSuchRank { rank: 0, ranks: u32::MAX }
    );
    assert!(matches!(refuse(vec![0xFF; 100]), CollectiveReportError::Unreadable(_)));
    // Empty rows take two bytes each.
    let many = |tag: u8, count: usize| [tag << 3 | 2, 0].repeat(count);
    assert!(matches!(refuse(many(8, 100_000)), CollectiveReportError::TooMany { what: "communicators", .. }));
    let nested = |tag, count| {
        let inner = many(tag, count);
        let mut message = vec![8 << 3 | 2];
        prost::encoding::encode_varint(inner.len() as u64, &mut message);
        [message, inner].concat()
    };
    for (tag, list) in [(8, "functions of a communicator"), (9, "collectives of a communicator")] {
        let CollectiveReportError::TooMany { what, .. } = refuse(nested(tag, 50_000)) else {
            panic!("{list}")
        };
        assert_eq!(what, list);
    }
    let of_ras =
        |ras: pb::RasReport| pb::CollectivesReport { ras: Some(ras), ..report(0, 5) }.encode_to_vec();
    let named = |count| {
        let notable = vec![pb::RasRank::default(); count];
        pb::RasCommunicator { hash: 0xABCD, ranks: 2, notable, ..Default::default() }
    };
    let many_communicators = pb::RasReport { communicators: vec![named(0); 17], ..Default::default() };
    let many_ranks = pb::RasReport { communicators: vec![named(65)], ..Default::default() };
    for (ras, list) in
        [(many_communicators, "communicators of RAS"), (many_ranks, "ranks of a communicator of RAS")]
    {
        assert!(matches!(refuse(of_ras(ras)), CollectiveReportError::TooMany { what, .. } if what == list));
    }
    assert_eq!(fixture.reports.counts(fixture.job).1[1], 9);
    // A job has a bounded number of processes.
    for process in 0..PROCESSES_PER_TASK as u64 {
        fixture.send(&pb::CollectivesReport { process, ..report(0, 5) }).unwrap();
    }
    let one_more = pb::CollectivesReport { process: 99, ..report(0, 5) };
    assert_eq!(fixture.send(&one_more), Err(CollectiveReportError::NoRoom));
    let bytes = fixture.reports.bytes();
    assert!(bytes > 0);
    fixture.send(&pb::CollectivesReport { process: 0, sequence: 100, ..report(0, 5) }).unwrap();
    assert_eq!(fixture.reports.bytes(), bytes, "a report replaces the one before");
    let now = fixture.engine.clock().now();
    fixture.reports.retain_jobs(now, |_| true);
    assert_eq!(fixture.reports.bytes(), bytes);
    fixture.reports.retain_jobs(now.after(DROPPED_AFTER * 2), |_| true);
    assert_eq!(fixture.reports.bytes(), 0, "all processes are silent");
    assert_eq!(fixture.reports.counts(fixture.job).1[1], 10, "the totals of the job stay");
    fixture.reports.retain_jobs(now, |_| false);
    assert_eq!(fixture.reports.bytes(), 0);
    assert!(ProcessCollectives::parse(&[], now).unwrap().communicators.is_empty());
}

#[test]
fn the_largest_numbers_are_counted_and_shown() {
    let fixture = StoreFixture::with_tasks(2);
    let mut most = report(0, 12);
    let communicator = &mut most.communicators[0];
    communicator.collectives = u64::MAX;
    communicator.operations[0].number = u64::MAX;
    let row = &mut communicator.functions[0];
    (row.enqueued, row.bytes, row.timed, row.gpu_ns) = (u64::MAX, u64::MAX, u64::MAX, u64::MAX);
    most.communicators_not_recorded = u64::MAX;
    for process in 0..2 {
        fixture.send(&pb::CollectivesReport { process, ..most.clone() }).unwrap();
        check_collectives_report(&pb::CollectivesReport { process, ..most.clone() }.encode_to_vec());
    }
    let (view, clique) = fixture.reports.view_with_clique(&fixture.engine, fixture.job, 2, |_| Some(0xABCD));
    assert_eq!(view.communicators_not_recorded, u64::MAX);
    assert_eq!(clique.unwrap().members[0].latest, None);
    assert_eq!(fixture.reports.counts(fixture.job).0[0].1.operations, u64::MAX);
}

#[test]
fn what_ras_says_is_shown_for_a_while_and_is_part_of_the_memory() {
    let fixture = StoreFixture::with_tasks(2);
    fixture.send(&report(0, 5)).unwrap();
    let before = fixture.reports.bytes();
    let dead = pb::RasRank {
        rank: 1,
        host: "10.0.0.1\u{202e}\n".into(),
        pid: 9,
        state: "dead".into(),
        ..Default::default()
    };
    let newer =
        pb::RasRank { rank: 0, state: "of a later version".into(), called: Some(5), ..Default::default() };
    let communicator = pb::RasCommunicator {
        hash: 0xABCD,
        ranks: 2,
        answered: 1,
        front: 5,
        back: 5,
        total_called: 5,
        notable: vec![dead, newer],
        notable_count: 2,
    };
    let ras = pb::RasReport {
        nccl_version: "2.29.1".into(),
        communicators: vec![communicator],
        ..Default::default()
    };
    fixture.send(&pb::CollectivesReport { sequence: 50, ras: Some(ras), ..report(0, 5) }).unwrap();
    assert!(fixture.reports.bytes() > before);
    let view = || fixture.reports.view(&fixture.engine, fixture.job, 2);
    let told = view().cliques[0].ras.clone().expect("RAS knows the clique");
    let states: Vec<_> = told.notable.iter().map(|it| (it.rank, &*it.state, it.pid)).collect();
    assert_eq!(states, [(1, "dead", Some(9)), (0, "answers", None)]);
    assert!(!told.notable[0].host.contains(['\n', '\u{202e}']), "{told:?}");
    assert_eq!(fixture.reports.ras_counts(fixture.job), [1, 0]);
    // A report without an answer leaves it, as does a failed question.
    fixture.send(&pb::CollectivesReport { sequence: 51, ..report(0, 5) }).unwrap();
    let failed = pb::RasReport { error: "nobody listens".into(), ..Default::default() };
    fixture.send(&pb::CollectivesReport { sequence: 52, ras: Some(failed), ..report(0, 5) }).unwrap();
    assert!(view().cliques[0].ras.is_some());
    assert_eq!(fixture.reports.ras_counts(fixture.job), [1, 1]);
    // A communicator with impossible numbers is left out.
    let impossible = pb::RasCommunicator { hash: 0xABCD, ranks: 2, answered: 3, ..Default::default() };
    let ras = pb::RasReport {
        nccl_version: "2.29.1".into(),
        communicators: vec![impossible],
        ..Default::default()
    };
    fixture.send(&pb::CollectivesReport { sequence: 53, ras: Some(ras), ..report(0, 5) }).unwrap();
    assert_eq!((&view().cliques[0].ras, view().ras.expect("it was asked").cliques), (&None, 0));
    fixture.reports.retain_jobs(fixture.engine.clock().now().after(DROPPED_AFTER * 2), |_| true);
    assert_eq!(fixture.reports.bytes(), 0);
}
