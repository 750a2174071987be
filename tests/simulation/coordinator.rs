//! A coordinator in virtual time that checks every answer against its request and against the rules.

use std::collections::{BTreeMap, BTreeSet};
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use muster::coordination::{
    Actor, ActorOrigin, BarrierOutcome, BarrierRecordWithArrivals, CallId, CallOutcome, Caller, ClaimAnswer,
    ClaimRefusal, CommandOutcome, CommandReason, CommandRefusal, ConnectionEnd, ConnectionId, Coordinator,
    Effect, EventKind, ExclusionId, ExclusionPreview, ExclusionTarget, Input, JobEvent, JobId, JobName,
    JobSettings, JobView, LiveSet, OperatorCommand, ProcessIdentity, Reply, Request, ServiceIncarnation,
    StatedIncarnations, TaskClaim, TaskId, TaskIncarnation, TaskSet, TaskView, Timestamp,
};
use muster::service::RunStates;

use crate::histories::Histories;

/// The only job of the simulation.
pub const JOB: JobId = JobId(0);

/// A waiting call, as its caller knows it.
#[derive(Debug, Clone)]
pub struct PendingCall {
    pub connection: ConnectionId,
    pub request: Request,
}

/// The model of one task's present incarnation.
#[derive(Debug, Default, Clone)]
struct ModeledTask {
    /// The position of its registration in the order of events.
    registered: u64,
    /// Whether it has connected in this run.
    connected: bool,
    again: bool,
    synced: bool,
    /// Whether it was excluded and has not registered since.
    excused: bool,
}

/// The beginning of a replay.
struct Snapshot {
    /// The number of inputs before the snapshot.
    inputs: usize,
    state: Vec<u8>,
    histories: [Vec<u8>; 4],
}

pub struct SimulatedCoordinator {
    pub core: Coordinator,
    pub now: Timestamp,
    pub asked: BTreeMap<CallId, PendingCall>,
    pub answers: BTreeMap<CallId, CallOutcome>,
    pub events: Vec<JobEvent>,
    histories: Histories,
    inputs: Vec<(Timestamp, Input)>,
    snapshot: Option<Snapshot>,
    effects_seen: Vec<String>,
    next_call: u64,
    next_connection: u64,
    incarnations: fastrand::Rng,
    /// The model: the registrations in the present run.
    members: BTreeMap<TaskId, ModeledTask>,
    /// The model: the position of the first arrival at each barrier in the order of events.
    began: BTreeMap<String, u64>,
    /// The barrier instances that each task passed together with the others.
    took_part: BTreeSet<(String, i64, TaskId)>,
    /// The same of the run before.
    took_part_before: BTreeSet<(String, i64, TaskId)>,
    /// The first call that was certainly made in the present run.
    first_call_of_run: CallId,
    /// The live set of the last answer.
    live_set: Option<Arc<LiveSet>>,
    /// The ended barriers by their events, which are not compared with their measurements yet.
    ended: Vec<(String, i64, BarrierOutcome)>,
    /// The ended barriers by their measurements, which are not compared with their events yet.
    measured: Vec<(String, i64, BarrierOutcome)>,
    order: u64,
    tasks: u32,
    /// The model: the tasks excluded by number, with the exclusions.
    excluded: BTreeSet<(ExclusionId, TaskId)>,
    acted: Option<Result<CommandOutcome, CommandRefusal>>,
    claimed: Option<Result<ClaimAnswer, ClaimRefusal>>,
    /// Whether the job has been deleted.
    deleted: bool,
    /// The calls whose callers are gone: while they are withdrawn one after the other, some may still be
    /// answered.
    gone: BTreeMap<CallId, PendingCall>,
    /// Whether all pending work and all due timers are completed before the next input.
    pub finishes: bool,
}

/// Returns an operator.
pub fn test_operator() -> Actor {
    Actor { who: "alice".into(), address: None, means: ActorOrigin::Cli }
}

/// Returns the operator's reason.
pub fn test_reason() -> CommandReason {
    CommandReason::try_from("it was seen to misbehave".to_owned()).expect("a reason")
}

/// Checks a record against its arrivals.
fn check_barrier_record(ending: &BarrierRecordWithArrivals) {
    let (record, arrivals) = (&ending.record, &ending.arrivals);
    if arrivals.is_empty() {
        // The only task that had arrived fails the instance with its next call, which cancels the waiting
        // one.
        assert_eq!(record.outcome, BarrierOutcome::Failed, "{record:?}");
        assert_eq!((record.arrived, record.skew_us, record.waited_us), (0, 0, 0), "{record:?}");
        return;
    }
    let first = arrivals.iter().map(|arrival| arrival.at).min().expect("somebody came");
    let last = arrivals.iter().map(|arrival| arrival.at).max().expect("somebody came");
    assert_eq!((record.arrived, record.skew_us), (arrivals.len(), last.0 - first.0), "{record:?}");
    let waited: u64 = arrivals.iter().map(|arrival| record.ended.0 - arrival.at.0).sum();
    assert_eq!(record.waited_us, waited, "{record:?}");
    assert!(record.began <= first && last <= record.ended, "{record:?}");
    assert!(record.latest.iter().all(|arrival| arrivals.contains(arrival)), "{record:?}");
    assert_eq!(record.latest.first().map(|arrival| arrival.at), Some(last), "{record:?}");
    assert_eq!(record.without.len(), (record.members - record.arrived).min(8), "{record:?}");
}

impl SimulatedCoordinator {
    pub fn new(settings: JobSettings, seed: u64) -> Self {
        let mut world = Self {
            core: Coordinator::default(),
            now: Timestamp(1_000_000),
            asked: BTreeMap::new(),
            answers: BTreeMap::new(),
            events: Vec::new(),
            histories: Histories::default(),
            inputs: Vec::new(),
            snapshot: None,
            effects_seen: Vec::new(),
            next_call: 0,
            next_connection: 0,
            incarnations: fastrand::Rng::with_seed(seed ^ 0x5eed),
            members: BTreeMap::new(),
            began: BTreeMap::new(),
            took_part: BTreeSet::new(),
            took_part_before: BTreeSet::new(),
            first_call_of_run: CallId(0),
            live_set: None,
            ended: Vec::new(),
            measured: Vec::new(),
            order: 0,
            tasks: settings.tasks,
            excluded: BTreeSet::new(),
            acted: None,
            claimed: None,
            deleted: false,
            gone: BTreeMap::new(),
            finishes: false,
        };
        let incarnation = world.draw_service_incarnation();
        world.apply_input(Input::DeclareJob {
            job: JOB,
            name: JobName::default(),
            settings: Box::new(settings),
            incarnation,
            actor: None,
        });
        world
    }

    fn draw_service_incarnation(&mut self) -> ServiceIncarnation {
        ServiceIncarnation(self.incarnations.u64(1..))
    }

    /// Returns a new incarnation of some task.
    pub fn draw_task_incarnation(&mut self) -> TaskIncarnation {
        TaskIncarnation(self.incarnations.u64(1..))
    }

    /// Returns the service incarnation of the present run.
    pub fn current_service_incarnation(&self) -> ServiceIncarnation {
        let text = self.job_view().run.incarnation;
        ServiceIncarnation(u64::from_str_radix(&text, 16).expect("a hexadecimal number"))
    }

    pub fn job_view(&self) -> JobView {
        self.core.job_view(JOB, self.now).expect("the job is declared")
    }

    pub fn connect(&mut self) -> ConnectionId {
        self.connect_from_host(1)
    }

    /// Opens a connection from the host 10.0.0.`host`.
    pub fn connect_from_host(&mut self, host: u8) -> ConnectionId {
        let connection = ConnectionId(self.next_connection);
        self.next_connection += 1;
        let port = u16::try_from(1024 + self.next_connection % 60_000).expect("a port");
        self.apply_input(Input::ConnectionOpened {
            connection,
            peer: SocketAddr::from(([10, 0, 0, host], port)),
        });
        connection
    }

    pub fn close_connection(&mut self, connection: ConnectionId, ending: ConnectionEnd) {
        let (gone, asked) = std::mem::take(&mut self.asked)
            .into_iter()
            .partition(|(_, asked)| asked.connection == connection);
        self.asked = asked;
        let mut gone: BTreeMap<CallId, PendingCall> = gone;
        self.gone.append(&mut gone);
        self.apply_input(Input::ConnectionClosed { connection, ending });
    }

    /// Makes a call of generation A, without a claim.
    pub fn call(&mut self, connection: ConnectionId, request: Request) -> CallId {
        self.call_as(connection, None, request)
    }

    pub fn call_as(
        &mut self,
        connection: ConnectionId,
        claim: Option<StatedIncarnations>,
        request: Request,
    ) -> CallId {
        let call = CallId(self.next_call);
        self.next_call += 1;
        self.asked.insert(call, PendingCall { connection, request: request.clone() });
        let caller = Caller { connection, claim };
        // A comparison of the whole state takes long, so some reads are checked.
        if call.0.is_multiple_of(16)
            && request.is_read()
            && !self.core.has_pending_work()
            && self.core.is_connection_known_to_job(JOB, connection)
        {
            self.check_read_changes_nothing(Input::Call { job: JOB, call, caller, request: request.clone() });
        }
        self.apply_input(Input::Call { job: JOB, call, caller, request });
        call
    }

    /// Checks that a read with no other effect than its answer leaves the state as it was. The journal relies on this: it does
    /// not record such a read.
    fn check_read_changes_nothing(&self, read: Input) {
        let Input::Call { call: own, .. } = &read else { return };
        let (own, mut core, mut effects) = (*own, self.core.clone(), Vec::new());
        core.apply(self.now, read, &mut effects);
        if matches!(&effects[..], [Effect::Reply(call, _)] if *call == own) {
            assert_eq!(core, self.core, "a read changes nothing");
        }
    }

    /// Issues an operator's command; the effects of an exclusion are checked against its preview.
    pub fn perform_operator_command(
        &mut self,
        act: OperatorCommand,
    ) -> Result<CommandOutcome, CommandRefusal> {
        self.complete_pending_work();
        let foreseen = match &act {
            OperatorCommand::Exclude { target, .. } => {
                Some(self.core.preview_exclusion(self.now, JOB, &test_operator(), &test_reason(), target))
            }
            _ => None,
        };
        let before = postcard::to_stdvec(&self.core).expect("the state can be serialised");
        let (asked, events) = (self.asked.len(), self.events.len());
        let delete = matches!(act, OperatorCommand::DeleteJob { .. });
        self.apply_input(Input::Command { job: JOB, actor: test_operator(), reason: test_reason(), act });
        self.complete_pending_work();
        let acted = self.acted.take().expect("an act is answered");
        if acted.is_err() {
            let after = postcard::to_stdvec(&self.core).expect("the state can be serialised");
            assert_eq!(after, before, "a refused act changes nothing");
        }
        match (&acted, foreseen) {
            (Ok(CommandOutcome::Excluded(_)), Some(Ok(preview))) => {
                self.check_preview(&preview, asked, events)
            }
            (Err(CommandRefusal::EndsRun { .. }), Some(Ok(preview))) => assert!(preview.ends_run.is_some()),
            (Err(refusal), Some(Err(foreseen))) => assert_eq!(*refusal, foreseen),
            (_, None) => {}
            (acted, foreseen) => panic!("{acted:?}, which was foreseen as {foreseen:?}"),
        }
        self.deleted |= delete && acted.is_ok();
        acted
    }

    fn check_preview(&self, preview: &ExclusionPreview, asked: usize, events: usize) {
        let run = self.job_view().run;
        let live: Vec<TaskId> =
            run.tasks.iter().filter(|task| self.is_task_connected(task.task)).map(|task| task.task).collect();
        assert_eq!(preview.live, live, "the live set that was foreseen is the one that is left");
        assert_eq!(preview.calls_refused + preview.calls_answered, asked - self.asked.len());
        let ended = self.events[events..].iter().filter(|event| {
            matches!(event.what, EventKind::BarrierPassed { .. } | EventKind::BarrierFailed { .. })
        });
        assert_eq!(preview.barriers.len(), ended.count(), "the barriers that were foreseen to end did");
        let over = self.events[events..].iter().find_map(|event| match event.what {
            EventKind::RunEnded { outcome } => Some(outcome),
            _ => None,
        });
        assert_eq!(preview.ends_run, over);
    }

    fn is_task_connected(&self, task: TaskId) -> bool {
        use muster::coordination::TaskPhase::{Connected, Suspect};
        let index = usize::try_from(task.0).expect("a task of the job");
        matches!(self.job_view().run.tasks[index].standing, Connected | Suspect)
    }

    pub fn hang_up(&mut self, call: CallId) {
        if let Some(asked) = self.asked.remove(&call) {
            self.gone.insert(call, asked);
            self.apply_input(Input::CallCancelled { job: JOB, call });
        }
    }

    /// Claims the task id of an identity, for a process on this connection.
    pub fn claim_task_id(
        &mut self,
        identity: ProcessIdentity,
        claimant: u64,
        connection: ConnectionId,
    ) -> Result<ClaimAnswer, ClaimRefusal> {
        let claim = TaskClaim { identity, claimant, connection: Some(connection) };
        self.apply_input(Input::ClaimTask { job: JOB, claim });
        self.claimed.take().expect("a claim is answered")
    }

    /// Tells the model the number of tasks of the next run.
    pub fn set_modeled_task_count(&mut self, tasks: u32) {
        self.tasks = tasks;
    }

    /// Lets time pass, with a tick at every deadline on the way.
    pub fn advance_time(&mut self, by: Duration) {
        let until = self.now.after(by);
        while let Some(at) = self.core.next_wakeup().filter(|at| *at <= until) {
            self.now = self.now.max(at);
            self.apply_input(Input::Tick);
        }
        self.now = until;
    }

    /// Completes all pending work and all due timers.
    pub fn complete_pending_work(&mut self) {
        while self.core.next_wakeup().is_some_and(|at| at <= self.now) {
            self.apply_input(Input::Tick);
        }
        assert!(!self.core.has_pending_work(), "work is asked for at once");
    }

    pub fn apply_input(&mut self, input: Input) {
        self.inputs.push((self.now, input.clone()));
        let has_ended = self.core.job(JOB).is_some_and(|job| job.run_interval().2.is_some());
        let before = if has_ended { self.core.job_view(JOB, self.now) } else { None };
        let mut effects = Vec::new();
        self.core.apply(self.now, input, &mut effects);
        self.handle_effects(effects);
        self.check_ended_run(before);
        // A check costs as much as the run is long.
        if self.inputs.len().is_multiple_of(256) {
            self.check_state_history();
        }
        if let Err(found) = self.core.check_invariants() {
            panic!("after {:?}: {found}", self.inputs.last());
        }
        let waiting = self.core.waiting_call_count();
        assert_eq!(
            waiting,
            self.asked.len(),
            "who asked and is not answered waits, after {:?}",
            self.inputs.last()
        );
        if self.finishes {
            self.complete_pending_work();
        }
    }

    /// Checks that a run that has ended with this input stays as it was.
    fn check_ended_run(&self, before: Option<JobView>) {
        let Some((before, job)) = before.zip(self.core.job(JOB)) else { return };
        if job.run_interval().0 == before.run.number || job.settings().bounds.runs_kept == 0 {
            return;
        }
        let in_run = job.in_run(before.run.number).expect("the newest ended run is kept");
        let (after, _, _) = in_run.view_with_hosts(self.now);
        let told = |view: &JobView| {
            let task = |task: &TaskView| {
                let it = (task.task, task.host.clone(), task.standing, task.since, task.lives.clone());
                (it, task.last_heartbeat, task.error.clone(), task.excluded.clone())
            };
            let run = &view.run;
            let tasks: Vec<_> = run.tasks.iter().map(task).collect();
            (
                tasks,
                run.incarnation.clone(),
                run.first_cause.clone(),
                run.keys,
                run.store_bytes,
                run.devices.clone(),
            )
        };
        assert_eq!(told(&after), told(&before), "an ended run stays as it was");
    }

    /// Checks that the recorded states of each task end with its present state, and follow one another without gaps.
    fn check_state_history(&self) {
        let Some(job) = self.core.job(JOB).filter(|_| !self.core.has_pending_work()) else { return };
        let (run, opened_at, ended_at) = job.run_interval();
        let tasks = job.tasks();
        let history = self.histories.states.of_run(JOB, run);
        let phases: Vec<_> = tasks.iter().map(|task| (task.standing, task.since)).collect();
        let states = RunStates::new(&history, run, &phases, (opened_at, ended_at), self.now);
        for (task, states) in tasks.iter().zip(&states.tasks) {
            let pairs = states.periods.iter().zip(states.periods.iter().skip(1));
            assert!(pairs.clone().all(|(one, next)| one.until == Some(next.from)), "{states:?}");
            let last = states.periods.last().expect("a task is always in some state");
            assert_eq!(last.until, None, "{states:?}");
            assert_eq!(last.state, task.standing, "{task:?} {states:?}");
        }
    }

    fn handle_effects(&mut self, effects: Vec<Effect>) {
        if self.snapshot.is_some() {
            self.effects_seen.push(format!("{effects:?}"));
        }
        let mut wanted = false;
        for effect in effects {
            self.histories.on_effect(&effect);
            match effect {
                Effect::Reply(call, outcome) => {
                    if self.gone.contains_key(&call) {
                        continue;
                    }
                    let asked = self.asked.remove(&call);
                    let asked =
                        asked.unwrap_or_else(|| panic!("{call:?} is answered but nobody waits for it"));
                    self.check_answer(call, &asked, &outcome);
                    self.answers.insert(call, outcome);
                }
                Effect::Event(event) => {
                    match &event.what {
                        EventKind::BarrierPassed { barrier, counter, without } => {
                            self.check_passed_barrier(barrier, *counter, without);
                            self.ended.push((barrier.to_string(), *counter, BarrierOutcome::Passed));
                        }
                        EventKind::BarrierFailed { barrier, counter, .. } => {
                            self.ended.push((barrier.to_string(), *counter, BarrierOutcome::Failed));
                        }
                        _ => {}
                    }
                    self.update_model_by_event(&event);
                    self.events.push(event);
                }
                Effect::BarrierEnded(ending) => {
                    let record = &ending.record;
                    self.measured.push((record.id.to_string(), record.counter, record.outcome));
                    check_barrier_record(&ending);
                }
                Effect::RequestIncarnation(job) => wanted |= job == JOB,
                Effect::CommandDone(acted) => self.acted = Some(acted),
                Effect::ClaimAnswered(answer) => self.claimed = Some(answer),
                Effect::FreeLater(_) => {}
            }
        }
        if !self.core.has_pending_work() {
            let [ended, measured] = [&mut self.ended, &mut self.measured].map(std::mem::take);
            assert_eq!(ended, measured, "every instance that ends is measured once");
        }
        if wanted {
            let incarnation = self.draw_service_incarnation();
            self.apply_input(Input::NextIncarnation { job: JOB, incarnation });
        }
    }

    /// Records the events on which the rules for barriers depend.
    fn update_model_by_event(&mut self, event: &JobEvent) {
        self.order += 1;
        match &event.what {
            EventKind::Excluded { exclusion, target, tasks, .. } => {
                for task in tasks {
                    self.members.entry(*task).or_default().excused = true;
                }
                self.excluded.extend(tasks_excluded_by_number(target).map(|task| (*exclusion, task)));
            }
            EventKind::Readmitted { exclusion, target, .. } => {
                let started = self.job_view().run.started_at.is_some();
                for task in tasks_excluded_by_number(target) {
                    self.excluded.remove(&(*exclusion, task));
                    // A task that has not registered in a forming run is required again.
                    let is_out = self.is_excluded_by_number(task);
                    let member = self.members.get_mut(&task);
                    if let Some(member) = member.filter(|member| !member.connected && !is_out) {
                        member.excused = started;
                    }
                }
            }
            EventKind::RunOpened => {
                self.members.clear();
                for (_, task) in &self.excluded {
                    self.members.entry(*task).or_default().excused = true;
                }
                self.began.clear();
                self.took_part_before = std::mem::take(&mut self.took_part);
                self.first_call_of_run = CallId(self.next_call);
            }
            EventKind::TaskConnected { task, again, .. } => {
                let member = self.members.entry(*task).or_default();
                assert_eq!(member.connected, *again, "connected again is connected before");
                // A task that was excused at the start of the run connects late, as a restarted one does.
                let again = *again || (member.excused && event.reason.contains("had started without it"));
                let (registered, synced) = (self.order, !again);
                *member = ModeledTask { registered, connected: true, again, synced, excused: false };
            }
            EventKind::BarrierStarted { barrier, .. } => {
                self.began.insert(barrier.to_string(), self.order);
            }
            _ => {}
        }
    }

    fn is_excluded_by_number(&self, task: TaskId) -> bool {
        self.excluded.iter().any(|(_, excluded)| *excluded == task)
    }

    fn check_answer(&mut self, call: CallId, asked: &PendingCall, outcome: &CallOutcome) {
        let Ok(reply) = outcome else { return };
        let excluded = asked.request.task().filter(|task| self.is_excluded_by_number(*task));
        assert!(
            excluded.is_none(),
            "an excluded task is told of a success: {call:?} is answered {reply:?}: {:?}",
            asked.request
        );
        match (&asked.request, reply) {
            (Request::LiveSet { task, tasks }, Reply::LiveSet(live)) => {
                self.check_live_set(*task, tasks, live)
            }
            (Request::Barrier { id, task, .. }, Reply::BarrierPassed(counter)) => {
                // A task that gets the answer of a passed barrier has passed it together with the others, now
                // or before.
                let use_of_it = (id.clone(), *counter, *task);
                let took_part = self.took_part.contains(&use_of_it)
                    || (call < self.first_call_of_run && self.took_part_before.contains(&use_of_it));
                assert!(took_part, "task {task} passes {id}::{counter} alone");
            }
            _ => {}
        }
    }

    /// Checks that all callers for a set get the same answer, and that every live member is among them.
    fn check_live_set(&mut self, task: TaskId, tasks: &TaskSet, live: &Arc<LiveSet>) {
        let known = |task: &TaskId| (0..i64::from(self.tasks)).contains(&i64::from(task.0));
        let set: Vec<TaskId> = tasks.ids().iter().copied().filter(known).collect();
        // The other callers of the same answer still wait for it, or are gone.
        if self.live_set.as_ref().is_some_and(|last| Arc::ptr_eq(last, live)) {
            return;
        }
        self.live_set = Some(Arc::clone(live));
        let asks = |asked: &PendingCall| match &asked.request {
            Request::LiveSet { task, tasks } => {
                let same = tasks.ids().iter().copied().filter(known).eq(set.iter().copied());
                same.then_some(*task)
            }
            _ => None,
        };
        let mut askers: BTreeSet<TaskId> =
            self.asked.values().chain(self.gone.values()).filter_map(asks).collect();
        askers.insert(task);
        assert!(live.is_sorted(), "live sets are ascending");
        for (live, _) in live.iter() {
            assert!(set.contains(live) && askers.contains(live), "live task {live} has not asked");
        }
    }

    /// Checks that the absent members of a passed barrier were not required. Its callers are answered after
    /// this.
    fn check_passed_barrier(&mut self, barrier: &str, counter: i64, without: &[TaskId]) {
        let began = self.began.get(barrier).copied().unwrap_or_default();
        let calls = self.asked.values().chain(self.gone.values()).filter_map(|asked| match &asked.request {
            Request::Barrier { id, task, .. } => Some((id.as_str(), *task)),
            _ => None,
        });
        let calls: BTreeSet<(&str, TaskId)> = calls.collect();
        let came: BTreeSet<TaskId> = calls
            .iter()
            .filter(|(id, task)| *id == barrier && !without.contains(task))
            .map(|(_, task)| *task)
            .collect();
        for task in without {
            let member = self.members.get(task).cloned().unwrap_or_default();
            let missed_it = member.again && member.registered > began;
            let waits_elsewhere = calls.iter().any(|(id, caller)| caller == task && *id != barrier);
            let unsynced = member.again && !member.synced;
            assert!(
                member.excused || missed_it || (unsynced && waits_elsewhere),
                "{barrier} passed without task {task}, which it had to wait for: {member:?}, began {began}"
            );
        }
        let is_excused = |task| self.members.get(task).is_some_and(|member| member.excused);
        let is_complete = without.iter().all(is_excused);
        for task in came {
            self.took_part.insert((barrier.to_owned(), counter, task));
            if is_complete && let Some(member) = self.members.get_mut(&task) {
                member.synced = true;
            }
        }
    }

    /// Takes a snapshot of the state and of the histories, from which [`SimulatedCoordinator::check_replay`] replays.
    pub fn record_start_of_replay(&mut self) {
        let state = postcard::to_stdvec(&self.core).expect("the state can be serialised");
        self.snapshot = Some(Snapshot { inputs: self.inputs.len(), state, histories: self.histories.save() });
        self.effects_seen.clear();
    }

    /// Replays every input since the snapshot, and checks for the same effects, the same bytes and the same histories.
    pub fn check_replay(&self) {
        let Some(Snapshot { inputs: from, state: bytes, histories }) = &self.snapshot else { return };
        let histories = Histories::restored(histories);
        let mut core: Coordinator = postcard::from_bytes(bytes).expect("the state can be restored");
        assert_eq!(&postcard::to_stdvec(&core).expect("serialises"), bytes, "a restored state is the same");
        let mut seen = self.effects_seen.iter();
        for (now, input) in &self.inputs[*from..] {
            // The replayed inputs are those of the journal.
            let journal = postcard::to_stdvec(&(now, input)).expect("an input can be serialised");
            let (now, input): (Timestamp, Input) = postcard::from_bytes(&journal).expect("and restored");
            let mut effects = Vec::new();
            core.apply(now, input, &mut effects);
            assert_eq!(seen.next(), Some(&format!("{effects:?}")), "a replay has the same effects");
            effects.iter().for_each(|effect| histories.on_effect(effect));
        }
        let end = postcard::to_stdvec(&core).expect("serialises");
        assert_eq!(
            end,
            postcard::to_stdvec(&self.core).expect("serialises"),
            "a replay ends in the same state"
        );
        let newest = self.events.iter().map(|event| event.run).max().expect("a job begins with an event");
        self.histories.check_same_answers(&histories, JOB, newest, self.now);
    }

    /// Ends every connection; no call may remain waiting.
    pub fn close_all_and_check(&mut self) {
        if self.deleted {
            assert_eq!(self.core.waiting_call_count(), 0, "nobody waits for a job that is no more");
            assert!(self.core.next_wakeup().is_none() && self.core.jobs().next().is_none());
            return self.check_replay();
        }
        let connections: Vec<ConnectionId> = (0..self.next_connection).map(ConnectionId).collect();
        for connection in connections {
            self.close_connection(connection, ConnectionEnd::Closed);
        }
        self.complete_pending_work();
        assert_eq!(self.core.waiting_call_count(), 0, "whoever is gone waits no more");
        self.advance_time(Duration::from_secs(100_000));
        let view = self.job_view();
        assert!(view.run.barriers.is_empty() && view.run.live_sets.is_empty(), "nothing is in progress");
        assert_eq!(view.run.live, 0, "nobody is live");
        self.check_replay();
    }
}

/// Returns the tasks that an exclusion keeps out wherever they run.
fn tasks_excluded_by_number(target: &ExclusionTarget) -> impl Iterator<Item = TaskId> + use<> {
    let fields = serde_json::to_value(target).expect("a target is JSON");
    let number = |value: &serde_json::Value| value.as_i64().and_then(|number| i32::try_from(number).ok());
    let tasks = fields["host_tasks"].as_array().cloned().unwrap_or_default();
    let numbers: Vec<i32> = tasks.iter().chain([&fields["task"]]).filter_map(number).collect();
    numbers.into_iter().map(TaskId)
}

/// Returns the target of an exclusion of a host by its name, recognised by these addresses and tasks.
pub fn named_host(name: &str, addresses: &[&str], tasks: &[i32]) -> ExclusionTarget {
    let fields = serde_json::json!({ "host": name, "host_addresses": addresses, "host_tasks": tasks });
    serde_json::from_value(fields).expect("a target")
}
