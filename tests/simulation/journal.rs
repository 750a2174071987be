//! The engine with a journal: what another process restores is what the engine had, after any sequence of calls, and at any
//! moment.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use bytes::Bytes;
use fastrand::Rng;
use muster::clock::Clock;
use muster::coordination::{
    Actor, ActorOrigin, BarrierRecordWithArrivals, CallId, CallOutcome, Caller, CommandReason, ConnectionEnd,
    ConnectionId, Coordinator, EventKind, ExclusionTarget, JobEvent, JobId, JobName, JobSettings,
    OperatorCommand, Request, TaskId, TaskIncarnation, TaskSet,
};
use muster::engine::{
    AnswerInbox, AnsweredOrWaiting, ContentsSerialiser, DigestComparison, Durability, Engine,
    JOURNAL_ENCODING, KeptConnections, Observer, PersistentObserver, RestoredState,
};
use muster_journal::{JournalFolder, JournalOptions, JournalWriter, RecordKind};

const TASKS: u32 = 5;

/// A folder of a test, which is deleted at its end.
pub struct TestFolder(PathBuf);

impl TestFolder {
    pub fn new() -> Self {
        let path =
            std::env::temp_dir().join(format!("muster-simulation-{:016x}", muster::clock::random_u64()));
        fs::create_dir(&path).expect("a folder for a test");
        Self(path)
    }

    pub fn journal(&self) -> PathBuf {
        self.0.join("journal")
    }

    /// Copies the journal as it is now, in place of the former copy.
    fn copy_journal(&self) -> PathBuf {
        let copy = self.0.join("copy");
        let _ = fs::remove_dir_all(&copy);
        fs::create_dir(&copy).unwrap();
        // A snapshot that is being written has another name, and old files may go meanwhile.
        for file in fs::read_dir(self.journal()).unwrap().flatten() {
            let _ = fs::copy(file.path(), copy.join(file.file_name()));
        }
        copy
    }
}

impl Drop for TestFolder {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

/// Counts answers.
#[derive(Default)]
struct CountingInbox(Mutex<Vec<u64>>);

impl AnswerInbox for CountingInbox {
    fn deliver(&self, slot: u64, _: CallOutcome) {
        self.0.lock().unwrap().push(slot);
    }
}

pub fn open(path: &Path) -> JournalFolder {
    JournalFolder::open(path, "a test").expect("a journal")
}

/// Starts an engine on the journal in `path`.
pub fn start(path: &Path, durability: Durability) -> Arc<Engine> {
    let folder = open(path);
    let restored = RestoredState::read(&folder, &[]).unwrap_or_else(|error| panic!("{error}"));
    let engine = Engine::new(Clock::start_not_before(restored.report.last_input));
    let options = JournalOptions { segment_bytes: 1 << 16, snapshot_after_bytes: 1 << 15 };
    engine
        .resume_from_journal(restored, folder, options, durability, Vec::new(), None)
        .expect("it can be written");
    engine
}

/// Returns the state that survives if this process dies now.
fn restored_now(folder: &TestFolder) -> Coordinator {
    let journal = open(&folder.copy_journal());
    let restored = RestoredState::read(&journal, &[]).unwrap_or_else(|error| panic!("{error}"));
    restored.coordinator().snapshot()
}

pub fn random_request(random: &mut Rng, task: TaskId, incarnation: TaskIncarnation) -> Request {
    let key = |random: &mut Rng| Bytes::from(format!("k{}/{}", random.u8(..3), random.u8(..4)));
    match random.u8(..18) {
        0 | 1 => Request::Register { task, incarnation, recoverable: true },
        2..=4 => Request::Heartbeat { task, incarnation },
        5 => Request::Insert {
            key: key(random),
            value: Bytes::from(vec![7; random.usize(..300)]),
            overwrite: random.bool(),
        },
        6 => Request::Get { key: key(random) },
        7 => Request::TryGet { key: key(random) },
        8 => Request::Increment { key: Bytes::from_static(b"count"), by: random.i64(-3..4) },
        9 => Request::List { directory: Bytes::from_static(b"k1") },
        10 => Request::Delete { key: key(random) },
        11 | 12 => Request::Barrier {
            id: format!("b{}", random.u8(..3)),
            counter: -1,
            timeout_ms: 60_000,
            members: None,
            task,
        },
        13 => Request::LiveSet { task, tasks: TaskSet::new((0..TASKS.cast_signed()).map(TaskId).collect()) },
        14 => Request::PollForError { task },
        15 => Request::JobState,
        16 => Request::Watch { version: random.i64(-1..40) },
        _ => Request::ReportError { task, code: 13, message: "it broke".to_owned() },
    }
}

fn operator() -> (Actor, CommandReason) {
    let actor = Actor { who: "ops".into(), address: None, means: ActorOrigin::Cli };
    (actor, CommandReason::try_from("a test".to_owned()).expect("a reason"))
}

/// The incarnation of a task, unless it has restarted.
pub fn first_incarnation(task: TaskId) -> TaskIncarnation {
    TaskIncarnation(1000 + u64::from(task.0.unsigned_abs()))
}

/// Makes random calls, commands and ends of connections.
struct RandomClients {
    random: Rng,
    job: JobId,
    inbox: Arc<CountingInbox>,
    connections: Vec<(ConnectionId, Vec<CallId>)>,
    calls: u64,
    answered: u64,
}

impl RandomClients {
    /// Registers all tasks, so that the run starts; in a later life of the service they are known already.
    fn register_all_tasks(&mut self, engine: &Engine) {
        for task in (0..TASKS.cast_signed()).map(TaskId) {
            let connection = engine.register_connection("10.0.0.7:4000".parse().expect("an address"));
            let (caller, inbox) =
                (Caller { connection, claim: None }, self.inbox.clone() as Arc<dyn AnswerInbox>);
            let request = Request::Register { task, incarnation: first_incarnation(task), recoverable: true };
            self.calls += 1;
            engine.call(self.job, caller, request, &inbox, self.calls);
            self.connections.push((connection, Vec::new()));
        }
    }

    fn step(&mut self, engine: &Engine) {
        let random = &mut self.random;
        if random.u8(..50) == 0 {
            engine.maintain_journal();
        }
        if self.connections.len() < 6 || random.u8(..40) == 0 {
            let connection = engine.register_connection("10.0.0.7:4000".parse().expect("an address"));
            self.connections.push((connection, Vec::new()));
        }
        let at = random.usize(..self.connections.len());
        match random.u8(..60) {
            0 => {
                let (connection, calls) = self.connections.swap_remove(at);
                engine.report_connection_closed(connection, ConnectionEnd::Reset, calls);
            }
            1 => {
                if let Some(call) = self.connections[at].1.pop() {
                    engine.cancel_waiting_call(self.job, call);
                }
            }
            2 => {
                let (actor, reason) = operator();
                let target = ExclusionTarget::Task(TaskId(random.i32(..TASKS.cast_signed())));
                let act = match random.u8(..3) {
                    0 => OperatorCommand::Exclude {
                        target,
                        expires_in: Some(Duration::from_millis(5)),
                        end_run: false,
                    },
                    1 => OperatorCommand::PutKey { key: "k0/0".into(), value: "v".into(), overwrite: true },
                    _ => OperatorCommand::DeleteKey { key: "k1".into() },
                };
                let _ = engine.perform_command(self.job, actor, reason, act);
            }
            _ => {
                let task = TaskId(random.i32(..TASKS.cast_signed()));
                // Some tasks restart.
                let restarts = u64::from(random.u8(..60) == 0) * 100;
                let incarnation = TaskIncarnation(first_incarnation(task).0 + restarts);
                let request = random_request(random, task, incarnation);
                let (connection, calls) = &mut self.connections[at];
                // Calls of generation C state incarnations.
                let present = engine.read_under_lock(|core| core.present_incarnations(self.job, task));
                let claim = present.filter(|_| random.bool());
                let caller = Caller { connection: *connection, claim };
                self.calls += 1;
                let inbox: Arc<dyn AnswerInbox> = self.inbox.clone();
                // Some come in a stream of a connection that may go on.
                let stream =
                    if random.bool() { u32::try_from(2 * self.calls + 1).expect("few calls") } else { 0 };
                match engine.call_in_stream(stream, self.job, caller, request, &inbox, self.calls) {
                    AnsweredOrWaiting::Now(_) => self.answered += 1,
                    AnsweredOrWaiting::Waiting(call) => calls.push(call),
                }
            }
        }
    }
}

fn clients(engine: &Engine, seed: u64) -> RandomClients {
    let name: JobName = "train".parse().expect("a name");
    let job = engine.read_under_lock(|core| core.job_named("train"));
    let job = job.unwrap_or_else(|| {
        let settings = JobSettings { recoverable: true, ..JobSettings::new(TASKS) };
        engine.declare_job(name, settings).expect("a new job")
    });
    let mut clients = RandomClients {
        random: Rng::with_seed(seed),
        job,
        inbox: Arc::default(),
        connections: Vec::new(),
        calls: 0,
        answered: 0,
    };
    clients.register_all_tasks(engine);
    clients
}

fn check_seed(seed: u64) {
    let folder = TestFolder::new();
    for life in 0..4 {
        let engine = start(&folder.journal(), Durability::Process);
        let mut clients = clients(&engine, seed * 10 + life);
        for _ in 0..3 {
            (0..clients.random.usize(1..250)).for_each(|_| clients.step(&engine));
            // Heartbeats are recorded together.
            engine.maintain_journal();
            let (restored, present) = (restored_now(&folder), engine.read(|core, _| core.snapshot()));
            assert_eq!(restored, present, "seed {seed}, life {life}");
            // The digest is one of the encoded state.
            let encode = |state: &Coordinator| postcard::to_allocvec(state).unwrap();
            assert!(encode(&restored) == encode(&present), "seed {seed}, life {life}: encoded, they differ");
        }
        if life == 2 {
            engine.close_journal();
        } else {
            // The next life begins from a copy of the folder, as after a kill.
            restored_now(&folder);
            drop(engine);
            fs::remove_dir_all(folder.journal()).unwrap();
            fs::rename(folder.0.join("copy"), folder.journal()).unwrap();
        }
    }
}

#[test]
fn another_process_restores_the_state_that_the_engine_had() {
    crate::for_every_seed("another_process_restores", 50, check_seed);
}

#[test]
fn answers_that_wait_for_the_disk_all_arrive_once() {
    let folder = TestFolder::new();
    let engine = start(&folder.journal(), Durability::Host);
    let mut clients = clients(&engine, 7);
    (0..600).for_each(|_| clients.step(&engine));
    // Stopping answers every waiting call.
    engine.stop();
    let of_open: usize = clients.connections.iter().map(|(_, calls)| calls.len()).sum();
    for _ in 0..2000 {
        if clients.inbox.0.lock().unwrap().len() >= of_open.min(1) && engine.waiting_call_count() == 0 {
            break;
        }
        std::thread::sleep(Duration::from_millis(5));
    }
    let mut slots = clients.inbox.0.lock().unwrap().clone();
    let arrived = slots.len();
    slots.sort_unstable();
    slots.dedup();
    assert_eq!(slots.len(), arrived, "no answer arrives twice");
    let state = engine.journal_state().expect("a journal");
    assert!(clients.answered > 0, "heartbeats and reads do not wait for the disk");
    assert!(state.files.syncs > 0 && state.files.durable_records > 1, "{state:?}");
    engine.maintain_journal();
    assert_eq!(restored_now(&folder), engine.read(|core, _| core.snapshot()));
}

#[test]
fn heartbeats_take_few_bytes_and_a_killed_process_loses_no_other_input() {
    let folder = TestFolder::new();
    let engine = start(&folder.journal(), Durability::Process);
    let mut clients = clients(&engine, 3);
    let inbox: Arc<dyn AnswerInbox> = clients.inbox.clone();
    let appended = || engine.journal_state().expect("a journal").files.appended_bytes;
    let mut beat = |count: u64| {
        for number in 0..count {
            let task = TaskId(i32::try_from(number % u64::from(TASKS)).expect("a task"));
            let (connection, _) = clients.connections[number as usize % clients.connections.len()];
            let request = Request::Heartbeat { task, incarnation: first_incarnation(task) };
            clients.calls += 1;
            let caller = Caller { connection, claim: None };
            engine.call(clients.job, caller, request, &inbox, clients.calls);
        }
    };
    beat(5);
    let before = appended();
    beat(10_000);
    engine.maintain_journal();
    let of_each = (appended() - before) / 10_000;
    assert!((1..16).contains(&of_each), "a heartbeat takes {of_each} bytes");

    beat(100);
    let (actor, reason) = operator();
    let act = OperatorCommand::PutKey { key: "last".into(), value: "v".into(), overwrite: true };
    engine.perform_command(clients.job, actor, reason, act).expect("it is written");
    let at_command = engine.read(|core, _| core.snapshot());
    beat(100);
    // The last heartbeats are lost with the process; the state before them is there, and nothing else.
    assert_eq!(restored_now(&folder), at_command);
}

/// An observer that panics at one event.
struct PanickingObserver;

impl Observer for PanickingObserver {
    fn on_event(&self, event: &JobEvent) {
        assert!(!matches!(event.what, EventKind::KeyWritten { .. }), "a defect");
    }

    fn on_barrier_ended(&self, _: &Arc<BarrierRecordWithArrivals>) {}
}

impl PersistentObserver for PanickingObserver {
    fn name(&self) -> &'static str {
        "panicking"
    }

    fn copy_contents(&self) -> ContentsSerialiser {
        Box::new(Vec::new)
    }

    fn restore(&self, _: &[u8]) -> Result<(), String> {
        Ok(())
    }
}

#[test]
fn an_input_that_panics_is_set_aside_and_the_others_are_applied() {
    let folder = TestFolder::new();
    let engine = start(&folder.journal(), Durability::Process);
    let clients = clients(&engine, 1);
    let put = |key: &'static str| {
        let (actor, reason) = operator();
        let act = OperatorCommand::PutKey { key: key.into(), value: "v".into(), overwrite: true };
        engine.perform_command(clients.job, actor, reason, act).expect("it is written");
    };
    put("a");
    let (actor, reason) = operator();
    let act = OperatorCommand::DeleteKey { key: "b".into() };
    let _ = engine.perform_command(clients.job, actor, reason, act);
    drop(engine);
    let journal = open(&folder.journal());
    let restored = RestoredState::read(&journal, &[Arc::new(PanickingObserver)]).expect("it can be read");
    assert_eq!(restored.report.set_aside.len(), 1, "{:?}", restored.report);
    let value = |state: &RestoredState| {
        state.coordinator().job(clients.job).and_then(|job| job.stored_value(b"a")).is_some()
    };
    assert!(!value(&restored));
    assert!(value(&RestoredState::read(&journal, &[]).expect("it can be read")));
}

#[test]
fn the_last_input_can_be_set_aside() {
    let folder = TestFolder::new();
    let engine = start(&folder.journal(), Durability::Process);
    let clients = clients(&engine, 1);
    for key in ["a", "b"] {
        let (actor, reason) = operator();
        let act = OperatorCommand::PutKey { key: key.into(), value: "v".into(), overwrite: true };
        engine.perform_command(clients.job, actor, reason, act).expect("it is written");
    }
    drop(engine);
    let journal = open(&folder.journal());
    let restored =
        RestoredState::read_setting_aside(&journal, &[], BTreeSet::new(), true, KeptConnections::default())
            .expect("it can be read");
    let [aside] = restored.report.set_aside[..] else { panic!("{:?}", restored.report) };
    let same = RestoredState::read_setting_aside(
        &journal,
        &[],
        BTreeSet::from([aside]),
        false,
        KeptConnections::default(),
    );
    assert_eq!(same.expect("it can be read").coordinator(), restored.coordinator());
    let has =
        |key: &[u8]| restored.coordinator().job(clients.job).and_then(|job| job.stored_value(key)).is_some();
    assert!(has(b"a") && !has(b"b"));
    // The engine goes on from there, also in the next process.
    let engine = Engine::new(Clock::start_not_before(restored.report.last_input));
    let options = JournalOptions { segment_bytes: 1 << 16, snapshot_after_bytes: 1 << 15 };
    let after = Some("the process before this one crashed".to_owned());
    engine
        .resume_from_journal(restored, journal, options, Durability::Process, Vec::new(), after)
        .expect("it can be written");
    engine.close_journal();
    let again = RestoredState::read(&open(&folder.journal()), &[]).expect("it can be read");
    assert!(again.report.set_aside.is_empty(), "a snapshot without the input follows it: {:?}", again.report);
    let job = again.coordinator().job(clients.job).expect("the job");
    assert!(job.stored_value(b"a").is_some() && job.stored_value(b"b").is_none());
}

/// Returns how the state that the journal in `path` describes compares with its digest.
fn compare_digest(path: &Path) -> DigestComparison {
    RestoredState::read(&open(path), &[]).expect("it can be read").compare_digest()
}

#[test]
fn a_replay_compares_the_whole_state_with_the_last_digest() {
    let folder = TestFolder::new();
    let engine = start(&folder.journal(), Durability::Process);
    let mut clients = clients(&engine, 3);
    (0..100).for_each(|_| clients.step(&engine));
    assert_eq!(compare_digest(&folder.copy_journal()), DigestComparison::None);
    engine.record_state_digest();
    (0..100).for_each(|_| clients.step(&engine));
    // Another thread records the digest.
    let has_digest = || compare_digest(&folder.copy_journal()) == DigestComparison::Equal;
    let found = (0..1_000).any(|_| {
        has_digest() || {
            std::thread::sleep(Duration::from_millis(10));
            false
        }
    });
    assert!(found, "the journal has no digest that its inputs lead to");
    let copy = folder.copy_journal();
    drop(engine);

    // The records of another program say that it had another state.
    let opened = open(&copy);
    let end =
        opened.recover().unwrap().replay(|_| Ok::<(), String>(())).unwrap_or_else(|_| panic!("it is whole"));
    let mut writer = JournalWriter::begin(opened, &end, JournalOptions::default()).unwrap();
    let mut append = |kind, contents: &[u8]| {
        let fill = |space: &mut [u8]| {
            space[..contents.len()].copy_from_slice(contents);
            Some(contents.len())
        };
        writer.append(RecordKind(kind), || contents.len(), fill).expect("there is room");
    };
    let (encoding, mark, digest) = (3, 8, 9);
    append(encoding, &[&[u8::try_from(JOURNAL_ENCODING).unwrap(), 4][..], b"test"].concat());
    append(mark, &[77]);
    append(digest, &[77, 5]);
    drop(writer);
    assert_eq!(compare_digest(&copy), DigestComparison::Different);

    // The service starts all the same, and says so.
    let engine = start(&copy, Durability::Process);
    let compared = || engine.journal_state().expect("a journal").restored.digest;
    let is_told = (0..1_000).any(|_| {
        std::thread::sleep(Duration::from_millis(10));
        compared() == DigestComparison::Different
    });
    assert!(is_told, "{:?}", compared());
}

/// The journals of all encodings so far. Their folders are named by the version of the encoding.
fn kept_journals() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/simulation/journals")
}

/// Returns facts of a restored state that a later program finds in it as well.
fn facts(restored: &RestoredState) -> String {
    let core = restored.coordinator();
    let mut facts = format!("last event {}\n", restored.last_event());
    for (job, name) in core.jobs() {
        let Some(reader) = core.job(job) else { continue };
        facts += &format!("job {name}: run {}, {} tasks\n", reader.run_interval().0, reader.task_count());
        for task in reader.tasks() {
            let lives: Vec<&str> = task.lives.iter().map(|life| life.incarnation.as_str()).collect();
            facts += &format!("  task {}: {lives:?}\n", task.task);
        }
        for key in reader.list_keys(b"", b"", true, 100) {
            facts += &format!("  key {}: {:?} bytes\n", key.key.escape_ascii(), key.value_bytes);
        }
        facts += &format!("  {} exclusions\n", reader.exclusions().len());
    }
    facts
}

#[test]
fn journals_of_all_encodings_can_be_read() {
    let mut read = 0;
    for kept in fs::read_dir(kept_journals()).expect("kept journals").flatten() {
        let folder = TestFolder::new();
        // A journal that is opened is changed.
        fs::create_dir(folder.journal()).unwrap();
        for file in fs::read_dir(kept.path()).unwrap().flatten() {
            fs::copy(file.path(), folder.journal().join(file.file_name())).unwrap();
        }
        let expected = fs::read_to_string(folder.journal().join("facts.txt")).expect("what it contains");
        let restored = RestoredState::read(&open(&folder.journal()), &[])
            .unwrap_or_else(|error| panic!("{}: {error}", kept.path().display()));
        assert!(restored.report.had_snapshot && restored.report.inputs > 100, "{:?}", restored.report);
        assert_eq!(facts(&restored), expected, "{}", kept.path().display());
        read += 1;
    }
    assert!(read > 0);
}

/// Writes a journal of the present encoding: run it when the encoding has a new version, and keep the folder.
#[test]
#[ignore = "writes a journal to be kept: cargo test --test simulation -- --ignored write_a_journal"]
fn write_a_journal_of_this_encoding() {
    let folder = TestFolder::new();
    for life in 0..2 {
        let engine = start(&folder.journal(), Durability::Process);
        let mut clients = clients(&engine, life);
        (0..400).for_each(|_| clients.step(&engine));
    }
    let restored = RestoredState::read(&open(&folder.journal()), &[]).expect("it can be read");
    let target = kept_journals().join(JOURNAL_ENCODING.to_string());
    fs::create_dir_all(&target).unwrap();
    for file in fs::read_dir(folder.journal()).unwrap().flatten() {
        fs::copy(file.path(), target.join(file.file_name())).unwrap();
    }
    let _ = fs::remove_file(target.join("lock"));
    fs::write(target.join("facts.txt"), facts(&restored)).unwrap();
}
