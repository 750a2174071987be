//! Calls of connections that go on while their process dies: a replay of the journal finds those that the logs of the
//! connections do not have.

use std::collections::{BTreeSet, HashMap};
use std::sync::{Arc, Mutex};

use fastrand::Rng;
use muster::clock::Clock;
use muster::coordination::{
    CallId, CallOutcome, Caller, ConnectionEnd, ConnectionId, JobId, JobSettings, Request, TaskId,
};
use muster::engine::{AnswerInbox, AnsweredOrWaiting, Durability, Engine, KeptConnections, RestoredState};
use muster_journal::JournalOptions;

use crate::journal::{TestFolder, first_incarnation, open, random_request, start};

/// Keeps the answers to calls that waited, by their slots.
#[derive(Default)]
struct Inbox(Mutex<HashMap<u64, CallOutcome>>);

impl AnswerInbox for Inbox {
    fn deliver(&self, slot: u64, outcome: CallOutcome) {
        let before = self.0.lock().expect("no holder panics").insert(slot, outcome);
        assert!(before.is_none(), "slot {slot} is answered twice");
    }
}

/// A call on a stream, and what became of it.
struct MadeCall {
    stream: u32,
    request: Request,
    now: Option<CallOutcome>,
    waiting: Option<CallId>,
    slot: u64,
}

const TASKS: u32 = 4;

struct Life {
    engine: Arc<Engine>,
    job: JobId,
    inbox: Arc<Inbox>,
    connections: Vec<(ConnectionId, Vec<MadeCall>)>,
}

impl Life {
    fn call(&mut self, at: usize, request: Request) {
        let (connection, calls) = &mut self.connections[at];
        let stream = 2 * u32::try_from(calls.len()).expect("few calls") + 1;
        let slot = connection.0 << 32 | u64::from(stream);
        let inbox: Arc<dyn AnswerInbox> = self.inbox.clone();
        let caller = Caller { connection: *connection, claim: None };
        let made = self.engine.call_in_stream(stream, self.job, caller, request.clone(), &inbox, slot);
        let (now, waiting) = match made {
            AnsweredOrWaiting::Now(outcome) => (Some(outcome), None),
            AnsweredOrWaiting::Waiting(call) => (None, Some(call)),
        };
        calls.push(MadeCall { stream, request, now, waiting, slot });
    }

    fn outcome(&self, call: &MadeCall) -> Option<CallOutcome> {
        call.now.clone().or_else(|| self.inbox.0.lock().expect("no holder panics").get(&call.slot).cloned())
    }
}

/// Returns a life in which random calls were made on a few connections.
fn live(folder: &TestFolder, random: &mut Rng) -> Life {
    let engine = start(&folder.journal(), Durability::Process);
    let settings = JobSettings { recoverable: true, ..JobSettings::new(TASKS) };
    let job = engine.declare_job("train".parse().expect("a name"), settings).expect("a new job");
    let mut life = Life { engine, job, inbox: Arc::default(), connections: Vec::new() };
    for task in (0..TASKS.cast_signed()).map(TaskId) {
        let connection = life.engine.register_connection("10.0.0.7:4000".parse().expect("an address"));
        life.connections.push((connection, Vec::new()));
        let request = Request::Register { task, incarnation: first_incarnation(task), recoverable: true };
        life.call(life.connections.len() - 1, request);
    }
    for _ in 0..random.usize(1..300) {
        let at = random.usize(..life.connections.len());
        let task = TaskId(random.i32(..TASKS.cast_signed()));
        let request = random_request(random, task, first_incarnation(task));
        life.call(at, request);
        if random.u8(..20) == 0
            && let Some(call) = random.choice(&life.connections[at].1).and_then(|made| made.waiting)
        {
            life.engine.cancel_waiting_call(life.job, call);
        }
    }
    life
}

fn check_seed(seed: u64) {
    let mut random = Rng::with_seed(seed);
    let folder = TestFolder::new();
    let mut life = live(&folder, &mut random);
    // The end of one connection is in the journal, though its log says that it goes on.
    let (ended, _) = life.connections[random.usize(..life.connections.len())];
    life.engine.report_connection_closed(ended, ConnectionEnd::Reset, Vec::new());
    // The log of each connection has some of its calls.
    let mut kept = KeptConnections::default();
    let mut logged = HashMap::new();
    for (connection, calls) in &life.connections {
        let count = random.usize(..=calls.len());
        let last = calls[..count].last().map_or(0, |made| made.stream);
        // A request that is incomplete in the log may be a call in the journal.
        let incomplete: Vec<u32> =
            calls[..count].iter().filter(|_| random.u8(..10) == 0).map(|made| made.stream).collect();
        let waits = |made: &&MadeCall| !incomplete.contains(&made.stream);
        let waiting: Vec<CallId> =
            calls[..count].iter().filter(waits).filter_map(|made| made.waiting).collect();
        kept.add(*connection, last, incomplete.clone(), waiting);
        logged.insert(*connection, (count, incomplete));
    }
    let connections = std::mem::take(&mut life.connections);
    let (job, before) = (life.job, life);
    let journal_folder = folder.journal();
    let outcomes: HashMap<u64, Option<CallOutcome>> = connections
        .iter()
        .flat_map(|(_, calls)| calls)
        .map(|made| (made.slot, before.outcome(made)))
        .collect();
    drop(before);

    let journal = open(&journal_folder);
    let restored = RestoredState::read_setting_aside(&journal, &[], BTreeSet::new(), false, kept)
        .unwrap_or_else(|error| panic!("seed {seed}: {error}"));
    let engine = Engine::new(Clock::start_not_before(restored.report.last_input));
    engine
        .resume_from_journal(
            restored,
            journal,
            JournalOptions::default(),
            Durability::Process,
            Vec::new(),
            None,
        )
        .expect("it can be written");
    let inbox: Arc<dyn AnswerInbox> = Arc::new(Inbox::default());
    for (connection, calls) in &connections {
        let goes_on = engine.read_under_lock(|core| core.has_connection(*connection));
        assert_eq!(goes_on, *connection != ended, "seed {seed}: {connection:?}");
        if !goes_on {
            continue;
        }
        let (count, incomplete) = &logged[connection];
        let (in_log, others) = calls.split_at(*count);
        let (repeated, known): (Vec<_>, Vec<_>) =
            in_log.iter().partition(|made| incomplete.contains(&made.stream));
        for made in known {
            let Some(call) = made.waiting else { continue };
            let found = engine.continue_waiting_call(job, *connection, call, &inbox, made.slot);
            check_outcome(seed, made, outcomes[&made.slot].as_ref(), found.as_ref());
        }
        for made in repeated.into_iter().chain(others) {
            let caller = Caller { connection: *connection, claim: None };
            let again =
                engine.call_in_stream(made.stream, job, caller, made.request.clone(), &inbox, made.slot);
            let found = match again {
                AnsweredOrWaiting::Now(outcome) => Some(outcome),
                AnsweredOrWaiting::Waiting(_) => None,
            };
            // An unrecorded call is done again: it changes nothing.
            let is_recorded = made.waiting.is_some()
                || !made.request.is_read() && !matches!(made.request, Request::Heartbeat { .. });
            if is_recorded {
                check_outcome(seed, made, outcomes[&made.slot].as_ref(), found.as_ref());
            }
        }
        assert!(!engine.has_calls_to_repeat(*connection), "seed {seed}: {connection:?}");
    }
}

/// Checks the outcome of a call in the next life: the one that it had, or none. A call that was cancelled has had none, and is
/// answered.
fn check_outcome(seed: u64, made: &MadeCall, before: Option<&CallOutcome>, now: Option<&CallOutcome>) {
    let what = || format!("seed {seed}: {:?} in stream {}", made.request, made.stream);
    match (before, now) {
        (Some(before), now) => assert_eq!(now, Some(before), "{}", what()),
        (None, Some(Ok(now))) => panic!("{}: nobody gave the answer {now:?}", what()),
        (None, _) => {}
    }
}

#[test]
fn a_replay_finds_the_calls_and_the_answers_that_logs_do_not_have() {
    crate::for_every_seed("a_replay_finds_the_calls", 20, check_seed);
}
