//! Tests the collector with a real engine: who is asked, who may answer, and what is kept.
//!
//! Begin at `CollectorFixture`.

use std::net::SocketAddr;
use std::sync::Arc;

use super::*;
use crate::clock::Clock;
use crate::coordination::{
    Actor, ActorOrigin, CallOutcome, Caller, CommandReason, ConnectionId, JobId, JobSettings,
    OperatorCommand, Request, TaskId, TaskIncarnation, Timestamp,
};
use crate::engine::{AnswerInbox, Engine};

struct IgnoredAnswers;

impl AnswerInbox for IgnoredAnswers {
    fn deliver(&self, _slot: u64, _outcome: CallOutcome) {}
}

struct CollectorFixture {
    engine: Arc<Engine>,
    stacks: StackCollector,
    job: JobId,
    connection: ConnectionId,
}

fn reason() -> CommandReason {
    CommandReason::try_from("it hangs".to_owned()).unwrap()
}

fn operator() -> Actor {
    Actor { who: "alice".into(), address: None, means: ActorOrigin::Api }
}

fn thread(function: &str) -> ThreadStack {
    let frame = StackFrame { function: function.into(), file: "/u/train.py".into(), line: 1 };
    ThreadStack {
        name: "MainThread".into(),
        main: true,
        frames: vec![frame],
        frames_left_out: 0,
        for_ms: None,
    }
}

impl CollectorFixture {
    fn with_tasks(tasks: u32) -> Self {
        let engine = Engine::new(Clock::start());
        let settings = JobSettings { recoverable: true, ..JobSettings::new(tasks) };
        let job = engine.declare_job("train".parse().unwrap(), settings).unwrap();
        let connection = engine.register_connection(SocketAddr::from(([127, 0, 0, 1], 1)));
        let fixture = Self { engine, stacks: StackCollector::default(), job, connection };
        (0..tasks).for_each(|task| fixture.register(task, 100 + u64::from(task)));
        fixture
    }

    fn register(&self, task: u32, incarnation: u64) {
        let task = TaskId(i32::try_from(task).unwrap());
        let request =
            Request::Register { task, incarnation: TaskIncarnation(incarnation), recoverable: true };
        let inbox: Arc<dyn AnswerInbox> = Arc::new(IgnoredAnswers);
        self.engine.call(self.job, Caller { connection: self.connection, claim: None }, request, &inbox, 0);
    }

    fn ask(&self, actor: Actor, tasks: Option<&str>) -> Result<u64, StackRequestRefusal> {
        let tasks = tasks.map(|tasks| tasks.parse().unwrap());
        self.stacks.ask(&self.engine, self.job, NewStackRequest { actor, reason: reason(), tasks }, 1)
    }

    fn poll(&self, task: i32, after: u64) -> StackWaitView {
        self.stacks.poll(&self.engine, self.job, HelperPoll { task: TaskId(task), after }).unwrap()
    }

    fn answer(&self, handed: &HandedRequest, task: i32, function: &str) -> Result<(), StackAnswerRefusal> {
        let (request, ticket, threads) = (handed.number, handed.ticket.clone(), vec![thread(function)]);
        let answer = NewStackAnswer { request, task: TaskId(task), ticket, threads, threads_left_out: 0 };
        self.stacks.accept_helper_answer(&self.engine, self.job, answer)
    }

    fn view(&self) -> StacksView {
        let roster = self.engine.read(|core, _| core.job(self.job).unwrap().task_incarnations());
        self.stacks.view(self.job, &roster, self.engine.clock().now(), None, usize::MAX)
    }
}

fn numbers(ranges: &[TaskRange]) -> Vec<i32> {
    TaskRange::tasks(ranges).map(|task| task.0).collect()
}

#[test]
fn those_who_were_asked_answer_once_and_the_others_are_named() {
    let fixture = CollectorFixture::with_tasks(5);
    for task in 0..4 {
        assert_eq!(fixture.poll(task, 0).request, None, "nobody has asked");
    }
    assert_eq!(fixture.ask(operator(), None), Ok(1));
    let view = fixture.view();
    assert_eq!((numbers(&view.awaited), numbers(&view.without_helper)), (vec![0, 1, 2, 3], vec![4]));
    for task in [0, 1, 3] {
        let handed = fixture.poll(task, 0).request.expect("it is asked");
        assert_eq!((handed.number, handed.spread_ms), (1, 0));
        fixture.answer(&handed, task, if task == 1 { "load_batch" } else { "all_reduce" }).unwrap();
        let again = fixture.answer(&handed, task, "twice");
        assert_eq!(again, Err(StackAnswerRefusal::AlreadyAnswered { request: 1, task: TaskId(task) }));
        assert_eq!(fixture.poll(task, 1).request, None);
        assert_eq!(fixture.poll(task, 0).request, None, "it has answered, whatever it says");
    }
    let view = fixture.view();
    assert_eq!((numbers(&view.answered), numbers(&view.awaited)), (vec![0, 1, 3], vec![2]));
    let groups: Vec<(String, Vec<i32>)> =
        view.groups.iter().map(|group| (group.place_text(), numbers(&group.tasks))).collect();
    let place = |function: &str| format!("{function} (train.py:1)");
    assert_eq!(groups, [(place("all_reduce"), vec![0, 3]), (place("load_batch"), vec![1])]);
    let roster = fixture.engine.read(|core, _| core.job(fixture.job).unwrap().task_incarnations());
    let now = fixture.engine.clock().now();
    let first = fixture.stacks.view(fixture.job, &roster, now, None, 1);
    assert_eq!((first.groups.len(), first.main_group_count, first.group_count), (1, 2, 2));
    let of_task = fixture.stacks.view(fixture.job, &roster, now, Some(TaskId(1)), usize::MAX);
    assert_eq!(
        of_task.groups.iter().map(StackGroupView::place_text).collect::<Vec<_>>(),
        [place("load_batch")]
    );
    let waited_since = |since: Timestamp| {
        let awaited = [(TaskId(1), since), (TaskId(2), since)].into();
        fixture.stacks.places_of(fixture.job, &roster, &awaited)
    };
    assert_eq!(waited_since(Timestamp(0)), [(TaskId(1), place("load_batch"))].into());
    assert!(waited_since(now.after(Duration::from_secs(1))).is_empty(), "an earlier stack says nothing");
}

#[test]
fn an_answer_needs_the_ticket_of_the_latest_poll_and_of_the_latest_request() {
    let fixture = CollectorFixture::with_tasks(3);
    let unasked = HandedRequest { number: 1, ticket: "0".into(), spread_ms: 0 };
    assert_eq!(fixture.answer(&unasked, 0, "f"), Err(StackAnswerRefusal::NoSuchRequest(1)));
    fixture.ask(operator(), Some("0-1")).unwrap();
    assert_eq!(
        fixture.answer(&unasked, 2, "f"),
        Err(StackAnswerRefusal::NotAsked { request: 1, task: TaskId(2) })
    );
    assert_eq!(fixture.poll(2, 0).request, None);
    let wrong = |task| Err(StackAnswerRefusal::WrongTicket { request: 1, task: TaskId(task) });
    assert_eq!(fixture.answer(&unasked, 0, "f"), wrong(0), "it has not polled");
    let (old, other) = (fixture.poll(0, 0).request.unwrap(), fixture.poll(1, 0).request.unwrap());
    assert_eq!(fixture.answer(&other, 0, "f"), wrong(0), "the ticket of another task");
    let new = fixture.poll(0, 0).request.unwrap();
    assert_eq!(fixture.answer(&old, 0, "f"), wrong(0), "a newer process of the task has asked");
    let bad = HandedRequest { ticket: "\u{0}x".into(), ..new.clone() };
    assert_eq!(fixture.answer(&bad, 0, "f"), wrong(0));
    fixture.answer(&new, 0, "f").unwrap();
    for (task, refusal) in
        [(9, StackAnswerRefusal::NoSuchTask(TaskId(9))), (-1, StackAnswerRefusal::NoSuchTask(TaskId(-1)))]
    {
        assert_eq!(fixture.answer(&new, task, "f"), Err(refusal));
        let poll = HelperPoll { task: TaskId(task), after: 0 };
        assert!(fixture.stacks.poll(&fixture.engine, fixture.job, poll).is_err());
    }
}

#[test]
fn another_incarnation_cannot_give_the_answer_of_the_former_one() {
    let fixture = CollectorFixture::with_tasks(2);
    fixture.ask(operator(), None).unwrap();
    let handed = fixture.poll(0, 0).request.unwrap();
    assert_eq!(fixture.view().helpers, 1);
    fixture.register(0, 900);
    assert_eq!(fixture.answer(&handed, 0, "f"), Err(StackAnswerRefusal::StaleIncarnation(TaskId(0))));
    assert_eq!((fixture.view().helpers, numbers(&fixture.view().without_helper)), (0, vec![0, 1]));
    let handed = fixture.poll(0, 0).request.expect("the new process is asked");
    fixture.answer(&handed, 0, "f").unwrap();
    let stale = (1, TaskId(1), TaskIncarnation(7));
    let answered =
        fixture.stacks.accept_worker_answer(&fixture.engine, fixture.job, stale, vec![thread("f")]);
    assert_eq!(answered, Err(StackAnswerRefusal::StaleIncarnation(TaskId(1))));
    assert_eq!(
        fixture.stacks.request_for_worker(&fixture.engine, fixture.job, TaskId(1), TaskIncarnation(7)),
        0
    );
    let present = TaskIncarnation(101);
    assert_eq!(fixture.stacks.request_for_worker(&fixture.engine, fixture.job, TaskId(1), present), 1);
    let answer = || {
        let asked = (1, TaskId(1), present);
        fixture.stacks.accept_worker_answer(&fixture.engine, fixture.job, asked, vec![thread("waits")])
    };
    assert_eq!(answer(), Ok(()));
    assert!(matches!(answer(), Err(StackAnswerRefusal::AlreadyAnswered { .. })));
    assert_eq!(fixture.stacks.request_for_worker(&fixture.engine, fixture.job, TaskId(1), present), 0);
}

#[test]
fn the_stack_of_a_process_that_has_ended_is_not_that_of_the_next_one() {
    let fixture = CollectorFixture::with_tasks(3);
    fixture.ask(operator(), None).unwrap();
    for task in 0..3 {
        let handed = fixture.poll(task, 0).request.unwrap();
        fixture.answer(&handed, task, "load_batch").unwrap();
    }
    let seen = || {
        let roster = fixture.engine.read(|core, _| core.job(fixture.job).unwrap().task_incarnations());
        let awaited = (0..3).map(|task| (TaskId(task), Timestamp(0))).collect();
        let places = fixture.stacks.places_of(fixture.job, &roster, &awaited);
        let [group] = &fixture.view().groups[..] else { panic!("{:?}", fixture.view()) };
        let places: Vec<i32> = places.keys().map(|task| task.0).collect();
        (places, numbers(&group.tasks), numbers(&group.of_earlier_process))
    };
    assert_eq!(seen(), (vec![0, 1, 2], vec![0, 1, 2], vec![]));
    fixture.register(1, 900);
    assert_eq!(seen(), (vec![0, 2], vec![0, 1, 2], vec![1]));
}

#[test]
fn requests_have_a_minimum_interval_and_tasks_that_exist() {
    let fixture = CollectorFixture::with_tasks(2);
    let rule = || Actor { who: "barrier-stuck".into(), address: None, means: ActorOrigin::Rule };
    let missing = fixture.ask(operator(), Some("0-2"));
    assert_eq!(missing, Err(StackRequestRefusal::NoSuchTask { task: TaskId(2), tasks: 2 }));
    assert_eq!(fixture.ask(rule(), None), Ok(1));
    assert_eq!(fixture.ask(rule(), None), Err(StackRequestRefusal::TooSoon(AUTOMATIC_INTERVAL)));
    assert_eq!(fixture.ask(operator(), None), Ok(2), "an operator need not wait for a rule");
    assert_eq!(fixture.ask(operator(), None), Err(StackRequestRefusal::TooSoon(REQUEST_INTERVAL)));
    let fresh = CollectorFixture::with_tasks(2);
    assert_eq!(fresh.ask(operator(), None), Ok(1));
    let dropping = Err(StackRequestRefusal::TooSoon(AUTOMATIC_AFTER_OPERATOR));
    assert_eq!(fresh.ask(rule(), None), dropping, "the answers to an operator are kept");
    let none = fixture.stacks.ask(
        &fixture.engine,
        JobId(99),
        NewStackRequest { actor: operator(), reason: reason(), tasks: None },
        1,
    );
    assert_eq!(none, Err(StackRequestRefusal::NoSuchJob));
}

#[tokio::test]
async fn a_deleted_job_leaves_nothing_behind() {
    let fixture = CollectorFixture::with_tasks(2);
    let mut latest = fixture.stacks.subscribe(&fixture.engine, fixture.job).unwrap();
    fixture.ask(operator(), None).unwrap();
    latest.changed().await.unwrap();
    let handed = fixture.poll(0, 0).request.unwrap();
    let delete = OperatorCommand::DeleteJob { force: true };
    fixture.engine.perform_command(fixture.job, operator(), reason(), delete).unwrap();
    assert_eq!(fixture.answer(&handed, 0, "f"), Err(StackAnswerRefusal::NoSuchJob));
    assert!(matches!(
        fixture.stacks.subscribe(&fixture.engine, fixture.job),
        Err(StackAnswerRefusal::NoSuchJob)
    ));
    fixture.stacks.retain_jobs(|_| false);
    assert!(latest.changed().await.is_err(), "helpers that wait learn that the job is gone");
    assert_eq!((fixture.stacks.bytes(), fixture.stacks.lock_jobs().len()), (0, 0));
}

#[test]
fn answers_of_many_tasks_are_spread_and_polls_take_turns() {
    let fixture = CollectorFixture::with_tasks(2_000);
    assert_eq!(fixture.stacks.poll_pause(), Duration::from_secs(2));
    for task in 0..2_000 {
        fixture.poll(task, 0);
    }
    assert_eq!(fixture.stacks.poll_pause(), Duration::from_secs(8));
    fixture.ask(operator(), None).unwrap();
    assert_eq!(fixture.poll(7, 0).request.unwrap().spread_ms, 10_000);
    // After a restart of the server, the numbers begin anew.
    let polled = fixture.poll(8, 4_711);
    assert_eq!((polled.request.map(|request| request.number), polled.latest), (Some(1), 1));
}

#[test]
fn the_memory_of_all_jobs_is_bounded() {
    let fixture = CollectorFixture::with_tasks(1);
    let jobs = ALL_BYTES_MAX / JOB_BYTES_MAX + 4;
    let mut all = vec![fixture.job];
    for number in 1..jobs {
        let name = format!("job-{number}").parse().unwrap();
        let settings = JobSettings { recoverable: true, ..JobSettings::new(1) };
        all.push(fixture.engine.declare_job(name, settings).unwrap());
    }
    // Each answer is nearly as large as a job may have.
    let frames = |job: usize| -> Vec<ThreadStack> {
        let deep = |at: usize| ThreadStack {
            frames: (0..FRAMES_MAX)
                .map(|line| StackFrame {
                    function: format!("{job}-{at}-{}", "x".repeat(NAME_BYTES_MAX - 20)),
                    file: "y".repeat(FILE_BYTES_MAX),
                    line: u32::try_from(line).unwrap(),
                })
                .collect(),
            ..thread("")
        };
        (0..100).map(deep).collect()
    };
    for (number, job) in all.iter().enumerate() {
        let request = NewStackRequest { actor: operator(), reason: reason(), tasks: None };
        fixture.stacks.ask(&fixture.engine, *job, request, 1).unwrap();
        let poll = HelperPoll { task: TaskId(0), after: 0 };
        let handed = fixture.stacks.poll(&fixture.engine, *job, poll).unwrap().request.unwrap();
        let answer = NewStackAnswer {
            request: 1,
            task: TaskId(0),
            ticket: handed.ticket,
            threads: frames(number),
            threads_left_out: 0,
        };
        fixture.stacks.accept_helper_answer(&fixture.engine, *job, answer).unwrap();
    }
    assert!(fixture.stacks.bytes() <= ALL_BYTES_MAX, "{}", fixture.stacks.bytes());
    let view = fixture.view();
    assert_eq!((view.dropped, view.groups.len()), (1, 0), "the oldest request has lost its stacks");
}
