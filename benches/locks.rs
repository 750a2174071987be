//! Measures the longest hold of the engine's lock for every operation that may touch many tasks, calls or
//! keys.
//!
//!     cargo bench --bench locks [-- FILTER]
//!
//! The job has the default bounds: 10,000 tasks, 1,000,000 keys and 262,144 waiting calls. Each line shows the
//! total time, and the longest hold in the best repetition, because other programs on the machine can only lengthen
//! a hold. No network is involved. The target is 1 ms.

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a benchmark that cannot go on has failed")]

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use bytes::Bytes;
use muster::clock::Clock;
use muster::coordination::{
    Actor, ActorOrigin, CallId, CallOutcome, Caller, CommandReason, ConnectionEnd, ConnectionId,
    ExclusionTarget, JobId, JobName, JobSettings, OperatorCommand, Reply, Request, ServiceIncarnation,
    StatedIncarnations, TaskId, TaskIncarnation, TaskSet,
};
use muster::engine::{AnswerInbox, AnsweredOrWaiting, Engine};

#[expect(clippy::disallowed_methods, reason = "a benchmark measures real time")]
fn now() -> Instant {
    Instant::now()
}

const TASKS: u32 = 10_000;
const KEYS: usize = 1_000_000;
const CALLS: usize = 1 << 18;
const ON_ONE: usize = 1 << 14;
const REPEATS: usize = 5;

#[derive(Default)]
struct CountingSink(AtomicU64);

impl AnswerInbox for CountingSink {
    fn deliver(&self, _: u64, _: CallOutcome) {
        self.0.fetch_add(1, Ordering::Relaxed);
    }
}

/// A job whose tasks have a connection each.
struct LockFixture {
    engine: Arc<Engine>,
    job: JobId,
    inbox: Arc<dyn AnswerInbox>,
    connections: Vec<ConnectionId>,
    service: ServiceIncarnation,
    timers: tokio::task::JoinHandle<()>,
}

impl Drop for LockFixture {
    fn drop(&mut self) {
        self.timers.abort();
    }
}

fn task(index: usize) -> TaskId {
    TaskId(i32::try_from(index).unwrap())
}

fn life(index: usize) -> TaskIncarnation {
    TaskIncarnation(index as u64 + 1)
}

impl LockFixture {
    fn unregistered(recoverable: bool) -> Self {
        let engine = Engine::new(Clock::start());
        let mut settings = JobSettings::new(TASKS);
        settings.recoverable = recoverable;
        settings.heartbeat_timeout = Duration::from_secs(3_600);
        let job = engine.declare_job(JobName::default(), settings).unwrap();
        let timers = tokio::spawn(Arc::clone(&engine).run_timers());
        let connections = (0..TASKS)
            .map(|index| {
                // A thousand tasks share a host.
                let host = u8::try_from(index / 1_000).unwrap();
                engine.register_connection(
                    ([10, 0, 0, host], 1024 + u16::try_from(index % 1_000).unwrap()).into(),
                )
            })
            .collect();
        let inbox: Arc<dyn AnswerInbox> = Arc::new(CountingSink::default());
        Self { engine, job, inbox, connections, service: ServiceIncarnation(0), timers }
    }

    fn registered(recoverable: bool) -> Self {
        let mut world = Self::unregistered(recoverable);
        (0..TASKS as usize).for_each(|index| drop(world.register(index)));
        world.learn();
        world
    }

    fn learn(&mut self) {
        let text = self.engine.read(|core, now| core.job_view(self.job, now).unwrap().run.incarnation);
        self.service = ServiceIncarnation(u64::from_str_radix(&text, 16).unwrap());
    }

    fn with_keys(self) -> Self {
        for number in 0..KEYS {
            let key = Bytes::from(format!("dir/{number:07}"));
            self.ask(
                0,
                Request::Insert {
                    key,
                    value: Bytes::from_static(b"a value of some bytes"),
                    overwrite: false,
                },
            );
        }
        self
    }

    fn register(&self, index: usize) -> AnsweredOrWaiting {
        self.ask(index, Request::Register { task: task(index), incarnation: life(index), recoverable: false })
    }

    fn ask_on(&self, connection: ConnectionId, index: usize, request: Request) -> AnsweredOrWaiting {
        let claim = Some(StatedIncarnations { service: self.service, task: life(index) });
        let claim = claim.filter(|_| !matches!(request, Request::Register { .. }) && self.service.0 != 0);
        self.engine.call(self.job, Caller { connection, claim }, request, &self.inbox, 0)
    }

    fn ask(&self, index: usize, request: Request) -> AnsweredOrWaiting {
        self.ask_on(self.connections[index], index, request)
    }

    /// Makes calls that wait for a key, on connections of their own.
    fn gets(&self, calls: usize) -> Vec<(ConnectionId, Vec<CallId>)> {
        let mut all = Vec::new();
        while all.len() * ON_ONE < calls {
            let connection = self.engine.register_connection(([10, 1, 0, 1], 1024).into());
            let waiting = (0..ON_ONE).map(|_| {
                let request = Request::Get { key: Bytes::from_static(b"one key") };
                let AnsweredOrWaiting::Waiting(call) = self.ask_on(connection, 0, request) else {
                    panic!("it is there")
                };
                call
            });
            all.push((connection, waiting.collect()));
        }
        all
    }

    fn barrier(&self, index: usize, counter: i64) -> AnsweredOrWaiting {
        let request = Request::Barrier {
            id: "step".to_owned(),
            counter,
            timeout_ms: 600_000,
            members: None,
            task: task(index),
        };
        self.ask(index, request)
    }

    fn act(&self, act: OperatorCommand) {
        let actor = Actor { who: "bench".into(), address: None, means: ActorOrigin::Cli };
        let reason = CommandReason::try_from("to measure it".to_owned()).unwrap();
        self.engine.perform_command(self.job, actor, reason, act).unwrap();
    }

    /// Waits until no work is pending.
    async fn settled(&self) {
        while self.engine.read_under_lock(|core| core.has_pending_work()) {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    }

    async fn measure(&self, act: impl FnOnce(&Self)) -> (u64, Duration) {
        // The work of the operation before is done, and its memory is freed.
        self.settled().await;
        tokio::time::sleep(Duration::from_millis(50)).await;
        let locks = self.engine.lock_times();
        let all = [&locks.inputs, &locks.bulk, &locks.reads];
        all.iter().for_each(|lock| lock.held.reset_longest());
        let began = now();
        act(self);
        self.settled().await;
        (all.iter().map(|lock| lock.held.longest_ns()).max().unwrap(), began.elapsed())
    }
}

fn report(filter: &str, name: &str, mut measured: Vec<(u64, Duration)>) {
    if measured.is_empty() || !name.contains(filter) {
        return;
    }
    measured.sort();
    let (held, took) = measured[0];
    let mark = if held > 1_000_000 { "  over 1 ms" } else { "" };
    println!(
        "{name:<72} {:>10.3} ms held, {:>9.1} ms in all{mark}",
        held as f64 / 1e6,
        took.as_secs_f64() * 1e3
    );
}

async fn tasks(filter: &str) {
    let everyone = TaskSet::new((0..TASKS as usize).map(task).collect());
    let last = TASKS as usize - 1;
    let mut lines: Vec<(&str, Vec<(u64, Duration)>)> = Vec::new();
    let mut note = |name: &'static str, measured| match lines.iter_mut().find(|(known, _)| *known == name) {
        Some((_, all)) => all.push(measured),
        None => lines.push((name, vec![measured])),
    };
    for repeat in 0..REPEATS {
        let mut world = LockFixture::unregistered(false);
        (0..last).for_each(|index| drop(world.register(index)));
        note(
            "registration: the last of 10,000 tasks comes",
            world.measure(|world| drop(world.register(last))).await,
        );
        world.learn();
        for counter in 0..3 {
            (0..last).for_each(|index| drop(world.barrier(index, counter)));
            let measured = world.measure(|world| drop(world.barrier(last, counter))).await;
            note("barrier: the last of 10,000 tasks comes", measured);
        }
        let ask = |world: &LockFixture, index| {
            drop(world.ask(index, Request::LiveSet { task: task(index), tasks: everyone.clone() }));
        };
        (0..last).for_each(|index| ask(&world, index));
        note("live set: the last of 10,000 tasks asks", world.measure(|world| ask(world, last)).await);
        note(
            "views: the whole job of 10,000 tasks",
            world.measure(|world| drop(world.engine.read(|core, now| core.job_view(world.job, now)))).await,
        );
        note(
            "metrics and findings: an observation of 10,000 tasks",
            world
                .measure(|world| drop(world.engine.read(|core, now| core.observe_job(world.job, now))))
                .await,
        );
        let beats = |world: &LockFixture| {
            world.engine.read(|core, _| {
                for index in 0..TASKS as usize {
                    drop(world.ask(index, Request::Watch { version: -1 }));
                    let (task, incarnation) = (task(index), life(index));
                    drop(world.ask(index, Request::Heartbeat { task, incarnation }));
                }
                core.jobs().count()
            });
        };
        note("10,000 heartbeats and watches while a copy is read", world.measure(beats).await);
        let host = ExclusionTarget::Host([10, 0, 0, 3].into());
        let preview = |world: &LockFixture| {
            let actor = Actor { who: "bench".into(), address: None, means: ActorOrigin::Cli };
            let reason = CommandReason::try_from("to measure it".to_owned()).unwrap();
            drop(
                world.engine.read(|core, now| core.preview_exclusion(now, world.job, &actor, &reason, &host)),
            );
        };
        note("exclusion: the preview of a host with 1,000 tasks", world.measure(preview).await);
        for index in 0..TASKS as usize {
            let version = world.engine.read(|core, _| core.job(world.job).unwrap().live_tasks().version);
            drop(world.ask(index, Request::Watch { version }));
            if index == 0 && repeat > 0 {
                break;
            }
        }
        (0..TASKS as usize)
            .for_each(|index| drop(world.ask(index, Request::PollForError { task: task(index) })));
        note(
            "failure: a task fails, 10,000 polls and watches are answered",
            world
                .measure(|world| {
                    let (task, code, message) = (task(7), 10, "it went wrong".to_owned());
                    drop(world.ask(7, Request::ReportError { task, code, message }));
                })
                .await,
        );
        let next = TaskIncarnation(1 << 40);
        note(
            "next run: 10,000 tasks, the first comes again",
            world
                .measure(|world| {
                    let connection = world.engine.register_connection(([10, 1, 0, 2], 1024).into());
                    let request = Request::Register { task: task(0), incarnation: next, recoverable: false };
                    drop(world.engine.call(
                        world.job,
                        Caller { connection, claim: None },
                        request,
                        &world.inbox,
                        0,
                    ));
                })
                .await,
        );

        let world = LockFixture::registered(false);
        (0..last).for_each(|index| drop(world.ask(index, Request::Shutdown { task: task(index) })));
        let leave = |world: &LockFixture| drop(world.ask(last, Request::Shutdown { task: task(last) }));
        note("shutdown: the last of 10,000 tasks comes", world.measure(leave).await);

        let world = LockFixture::registered(true);
        (0..last).for_each(|index| drop(world.barrier(index, 0)));
        let exclude = |world: &LockFixture| {
            world.act(OperatorCommand::Exclude { target: host, expires_in: None, end_run: false })
        };
        note("exclusion: a host with 1,000 tasks of 10,000", world.measure(exclude).await);
        let lose = |world: &LockFixture| {
            for index in 5_000..6_000 {
                world.engine.report_connection_closed(
                    world.connections[index],
                    ConnectionEnd::Reset,
                    Vec::new(),
                );
            }
        };
        note("1,000 connections are lost, one by one", world.measure(lose).await);
        let events = |world: &LockFixture| drop(world.engine.subscribe_events(0));
        note("events: all that are kept", world.measure(events).await);
    }
    lines.into_iter().for_each(|(name, measured)| report(filter, name, measured));
}

async fn calls(filter: &str) {
    let mut lines: Vec<(&str, Vec<(u64, Duration)>)> = Vec::new();
    let mut note = |name: &'static str, measured| match lines.iter_mut().find(|(known, _)| *known == name) {
        Some((_, all)) => all.push(measured),
        None => lines.push((name, vec![measured])),
    };
    for _ in 0..REPEATS {
        let world = LockFixture::registered(false);
        let mut gets = world.gets(CALLS);
        let (connection, waiting) = gets.pop().unwrap();
        let close = |world: &LockFixture| {
            world.engine.report_connection_closed(connection, ConnectionEnd::Closed, waiting.clone())
        };
        note("calls: a connection with 16,384 gets of one key is closed", world.measure(close).await);
        let write = |world: &LockFixture| {
            let (key, value) = (Bytes::from_static(b"one key"), Bytes::from_static(b"v"));
            drop(world.ask(0, Request::Insert { key, value, overwrite: false }));
        };
        note("calls: 245,760 gets of one key, and it is written", world.measure(write).await);
        world.ask(0, Request::Delete { key: Bytes::from_static(b"one key") });
        let gets = world.gets(CALLS - ON_ONE);
        let close_all = |world: &LockFixture| {
            for (connection, waiting) in &gets {
                world.engine.report_connection_closed(*connection, ConnectionEnd::Closed, waiting.clone());
            }
        };
        note(
            "calls: 245,760 gets of one key, and all their connections are closed",
            world.measure(close_all).await,
        );
        world.gets(CALLS - ON_ONE);
        note("calls: 245,760 wait, and the service stops", world.measure(|world| world.engine.stop()).await);
        let world = LockFixture::registered(false);
        world.gets(CALLS - ON_ONE);
        let delete = |world: &LockFixture| world.act(OperatorCommand::DeleteJob { force: true });
        note("calls: 245,760 wait, and the job is deleted", world.measure(delete).await);
    }
    lines.into_iter().for_each(|(name, measured)| report(filter, name, measured));
}

async fn keys(filter: &str) {
    let mut lines: Vec<(&str, Vec<(u64, Duration)>)> = Vec::new();
    let mut note = |name: &'static str, measured| match lines.iter_mut().find(|(known, _)| *known == name) {
        Some((_, all)) => all.push(measured),
        None => lines.push((name, vec![measured])),
    };
    for _ in 0..REPEATS {
        let world = LockFixture::registered(false).with_keys();
        let list = |world: &LockFixture| {
            let AnsweredOrWaiting::Now(Ok(Reply::Directory(all))) =
                world.ask(0, Request::List { directory: Bytes::from_static(b"dir") })
            else {
                panic!("it is answered at once")
            };
            assert_eq!(all.len(), KEYS);
            for number in 0..1_000 {
                let key = Bytes::from(format!("dir/{:07}", number * 997));
                let value = Bytes::from_static(b"another");
                drop(world.ask(0, Request::Insert { key, value, overwrite: true }));
            }
            assert!(all.iter().all(|(_, value)| *value == "a value of some bytes"), "it is as it was");
        };
        note(
            "keys: a directory of 1,000,000 is listed, 1,000 are written meanwhile",
            world.measure(list).await,
        );
        let page = |world: &LockFixture| {
            drop(world.engine.read(|core, _| core.job(world.job).unwrap().list_keys(b"", b"", false, 100)));
        };
        note("keys: the root with one directory of 1,000,000 is looked at", world.measure(page).await);
        let bounds = |world: &LockFixture| {
            let mut bounds = muster::coordination::JobBounds::default();
            bounds.keys += 1;
            let change = muster::coordination::SettingsChange { bounds: Some(bounds), ..Default::default() };
            world.act(OperatorCommand::Configure(Box::new(change)));
        };
        note("settings: other bounds with 1,000,000 keys", world.measure(bounds).await);
        let report_error =
            Request::ReportError { task: task(7), code: 10, message: "it went wrong".to_owned() };
        drop(world.ask(7, report_error));
        let next = |world: &LockFixture| {
            let connection = world.engine.register_connection(([10, 1, 0, 2], 1024).into());
            let incarnation = TaskIncarnation(1 << 40);
            let request = Request::Register { task: task(0), incarnation, recoverable: false };
            drop(world.engine.call(world.job, Caller { connection, claim: None }, request, &world.inbox, 0));
        };
        note("next run: the last one has 1,000,000 keys", world.measure(next).await);

        let world = LockFixture::registered(false).with_keys();
        let delete =
            |world: &LockFixture| drop(world.ask(0, Request::Delete { key: Bytes::from_static(b"dir") }));
        note("keys: a directory of 1,000,000 is deleted", world.measure(delete).await);

        let world = LockFixture::registered(false).with_keys();
        let delete = |world: &LockFixture| world.act(OperatorCommand::DeleteJob { force: true });
        note("a job with 1,000,000 keys is deleted", world.measure(delete).await);
    }
    lines.into_iter().for_each(|(name, measured)| report(filter, name, measured));
}

#[tokio::main(flavor = "multi_thread", worker_threads = 2)]
async fn main() {
    let filter = std::env::args().skip(1).find(|argument| !argument.starts_with('-')).unwrap_or_default();
    println!("The longest that the engine's lock is held:");
    tasks(&filter).await;
    calls(&filter).await;
    keys(&filter).await;
}
