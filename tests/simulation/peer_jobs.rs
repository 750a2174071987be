//! Tests of jobs that exchange transfers: a task learns of another job only while each of the two jobs lists the
//! other, whatever the settings are and whenever they change.

use std::collections::{BTreeMap, BTreeSet};
use std::net::SocketAddr;

use muster::coordination::{
    Actor, ActorOrigin, CallId, Caller, Code, CommandReason, ConnectionId, Coordinator, Effect, Input, JobId,
    JobName, JobSettings, OperatorCommand, PeerJobQuery, Reply, Request, ServiceIncarnation, SettingsChange,
    TaskId, TaskIncarnation, Timestamp,
};

use crate::for_every_seed;

const JOBS: [&str; 4] = ["train", "serve", "eval", "spare"];

/// Four jobs of two tasks that ask about one another, and what they should hear.
struct PeerJobSimulation {
    rng: fastrand::Rng,
    coordinator: Coordinator,
    now: u64,
    next_call: u64,
    jobs: BTreeMap<&'static str, JobId>,
    lists: BTreeMap<JobId, BTreeSet<&'static str>>,
    /// The calls that wait, with the job that asks, the job that is asked, and the key that ends the wait, if one does.
    waiting: BTreeMap<CallId, (JobId, JobId, Option<String>)>,
}

impl PeerJobSimulation {
    fn new(seed: u64) -> Self {
        let mut all = Self {
            rng: fastrand::Rng::with_seed(seed),
            coordinator: Coordinator::default(),
            now: 1,
            next_call: 1,
            jobs: BTreeMap::new(),
            lists: BTreeMap::new(),
            waiting: BTreeMap::new(),
        };
        for name in JOBS {
            all.declare_job(name);
        }
        let peer: SocketAddr = ([127, 0, 0, 1], 9).into();
        all.apply(Input::ConnectionOpened { connection: ConnectionId(1), peer });
        all
    }

    fn declare_job(&mut self, name: &'static str) {
        let job = self.coordinator.next_job_id();
        let settings = Box::new(JobSettings { recoverable: true, ..JobSettings::new(2) });
        let (incarnation, actor) = (ServiceIncarnation(u64::from(job.0) + 1), None);
        self.apply(Input::DeclareJob {
            job,
            name: name.parse().expect("a name"),
            settings,
            incarnation,
            actor,
        });
        self.jobs.insert(name, job);
        self.lists.insert(job, BTreeSet::new());
    }

    /// Applies an input and all work that follows; checks every reply to a call about another job.
    fn apply(&mut self, input: Input) -> Vec<Effect> {
        let (mut effects, mut next) = (Vec::new(), Some(input));
        while let Some(input) = next.take() {
            self.now += 1;
            self.coordinator.apply(Timestamp(self.now), input, &mut effects);
            self.coordinator.check_invariants().expect("an invariant");
            next = self.coordinator.has_pending_work().then_some(Input::Tick);
        }
        effects
    }

    fn may_exchange(&self, from: JobId, to: JobId) -> bool {
        let lists = |one: JobId, other: JobId| {
            let name = self.jobs.iter().find(|(_, job)| **job == other).map(|(name, _)| *name);
            name.is_some_and(|name| self.lists.get(&one).is_some_and(|lists| lists.contains(name)))
        };
        from != to && lists(from, to) && lists(to, from)
    }

    fn random_job(&mut self) -> (&'static str, JobId) {
        let name = JOBS[self.rng.usize(0..JOBS.len())];
        (name, self.jobs[name])
    }

    /// Asks about a job; the answer must fit the settings.
    fn ask_about_random_job(&mut self) {
        let ((_, from), (name, to)) = (self.random_job(), self.random_job());
        let allowed = self.may_exchange(from, to);
        assert_eq!(self.coordinator.find_permitted_peer_job(from, name).is_ok(), allowed);
        let task = self.rng.i32(0..2);
        let (question, key) = if self.rng.bool() {
            (PeerJobQuery::TaskStates { version: 0 }, None)
        } else {
            let incarnation = TaskIncarnation(self.rng.u64(1..4));
            let key = PeerJobQuery::engine_record_key(TaskId(task), incarnation);
            (PeerJobQuery::EngineRecord { task: TaskId(task), incarnation }, Some(key))
        };
        let call = CallId(self.next_call);
        self.next_call += 1;
        let caller = Caller { connection: ConnectionId(1), claim: None };
        let request = Request::FromPeerJob { from, question };
        let effects = self.apply(Input::Call { job: to, call, caller, request });
        let reply = effects.into_iter().find_map(|effect| match effect {
            Effect::Reply(of, outcome) if of == call => Some(outcome),
            _ => None,
        });
        match reply {
            Some(Err(failure)) => {
                assert!(!allowed, "{failure}");
                assert!(matches!(failure.code, Code::PermissionDenied | Code::InvalidArgument), "{failure}");
            }
            // The key was written before, or the states are newer.
            Some(Ok(reply)) => {
                assert!(allowed && matches!(reply, Reply::Value(_) | Reply::States(_)), "{reply:?}");
            }
            None => {
                assert!(allowed);
                self.waiting.insert(call, (from, to, key));
            }
        }
    }

    /// Changes the list of a job; every call that is not allowed any more must fail in that input.
    fn change_list_of_random_job(&mut self) {
        let (_, job) = self.random_job();
        let lists: BTreeSet<&'static str> = JOBS.into_iter().filter(|_| self.rng.u8(0..3) > 0).collect();
        self.lists.insert(job, lists.clone());
        let names: BTreeSet<JobName> = lists.iter().map(|name| name.parse().expect("a name")).collect();
        let change = SettingsChange { transfers_with: Some(names), ..SettingsChange::default() };
        let effects = self.perform_command(job, OperatorCommand::Configure(Box::new(change)));
        self.check_refused_calls(&effects);
    }

    fn perform_command(&mut self, job: JobId, act: OperatorCommand) -> Vec<Effect> {
        let actor = Actor { who: "alice".into(), address: None, means: ActorOrigin::Api };
        let reason = CommandReason::try_from("a test".to_owned()).expect("a reason");
        self.apply(Input::Command { job, actor, reason, act })
    }

    /// Checks that exactly the calls between jobs that may not exchange transfers any more have failed.
    fn check_refused_calls(&mut self, effects: &[Effect]) {
        let mut refused = BTreeSet::new();
        for effect in effects {
            if let Effect::Reply(call, outcome) = effect {
                assert!(outcome.is_err(), "{call:?}: {outcome:?}");
                assert!(refused.insert(*call), "answered twice: {call:?}");
            }
        }
        let over = self.waiting.iter().filter(|(_, (from, to, _))| !self.may_exchange(*from, *to));
        let over: BTreeSet<CallId> = over.map(|(call, _)| *call).collect();
        assert_eq!(refused, over);
        self.waiting.retain(|call, _| !over.contains(call));
    }

    /// Deletes a job and declares it anew: the new one lists no job, though others list its name.
    fn replace_random_job(&mut self) {
        let (name, job) = self.random_job();
        self.lists.remove(&job);
        let effects = self.perform_command(job, OperatorCommand::DeleteJob { force: true });
        self.jobs.remove(name);
        self.check_refused_calls(&effects);
        self.declare_job(name);
    }

    /// Publishes an engine record; the calls that wait for it get it, and no others.
    fn publish_random_engine_record(&mut self) {
        let (_, job) = self.random_job();
        let key =
            PeerJobQuery::engine_record_key(TaskId(self.rng.i32(0..2)), TaskIncarnation(self.rng.u64(1..4)));
        let act =
            OperatorCommand::PutKey { key: key.clone().into(), value: "record".into(), overwrite: true };
        let effects = self.perform_command(job, act);
        let mut told = BTreeSet::new();
        for effect in &effects {
            if let Effect::Reply(call, outcome) = effect {
                assert!(matches!(outcome, Ok(Reply::Value(value)) if &value[..] == b"record"), "{outcome:?}");
                told.insert(*call);
            }
        }
        let waits =
            |(_, to, waits): &(JobId, JobId, Option<String>)| *to == job && waits.as_ref() == Some(&key);
        let over: BTreeSet<CallId> =
            self.waiting.iter().filter(|(_, call)| waits(call)).map(|(call, _)| *call).collect();
        assert_eq!(told, over);
        self.waiting.retain(|call, _| !over.contains(call));
    }

    fn cancel_first_waiting_call(&mut self) {
        if let Some((call, (_, job, _))) = self.waiting.pop_first() {
            let effects = self.apply(Input::CallCancelled { job, call });
            assert!(!effects.iter().any(|effect| matches!(effect, Effect::Reply(..))), "{effects:?}");
        }
    }
}

#[test]
fn a_task_learns_of_another_job_only_while_both_list_each_other() {
    for_every_seed("a_task_learns_of_another_job_only_while_both_list_each_other", 20, |seed| {
        let mut jobs = PeerJobSimulation::new(seed);
        for _ in 0..200 {
            match jobs.rng.u8(0..10) {
                0 | 1 => jobs.change_list_of_random_job(),
                2 => jobs.publish_random_engine_record(),
                3 => jobs.cancel_first_waiting_call(),
                4 if jobs.rng.u8(0..4) == 0 => jobs.replace_random_job(),
                _ => jobs.ask_about_random_job(),
            }
        }
        assert!(jobs.next_call > 50);
    });
}
