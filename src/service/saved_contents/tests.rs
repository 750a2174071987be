//! Random events and ended barriers are fed to all histories, which are then saved, restored, damaged and continued.

use std::sync::Arc;

use fastrand::Rng;

use crate::coordination::{
    Actor, ActorOrigin, BarrierArrival, BarrierKind, BarrierOutcome, BarrierRecord,
    BarrierRecordWithArrivals, EventKind, ExclusionId, ExclusionTarget, FailureClass, JobEvent, JobId,
    REGISTRATION_BARRIER_ID, RunNumber, RunOutcome, TaskId, TaskIncarnation, TaskIncarnations, Timestamp,
};
use crate::engine::PersistentObserver;
use crate::service::reports::TransferReportStore;
use crate::service::{ActivityHistory, BarrierHistory, StateHistory, Timelines};

const JOBS: u32 = 3;

#[derive(Default)]
struct Histories {
    timelines: Timelines,
    barriers: BarrierHistory,
    states: StateHistory,
    activity: ActivityHistory,
}

impl Histories {
    fn all(&self) -> [&dyn PersistentObserver; 4] {
        [&self.timelines, &self.barriers, &self.states, &self.activity]
    }

    fn save(&self) -> [Vec<u8>; 4] {
        self.all().map(PersistentObserver::save)
    }

    fn restored(saved: &[Vec<u8>; 4]) -> Self {
        let histories = Self::default();
        for (history, bytes) in histories.all().into_iter().zip(saved) {
            history.restore(bytes).unwrap_or_else(|why| panic!("{}: {why}", history.name()));
        }
        histories
    }

    fn feed(&self, inputs: &[Observed]) {
        for history in self.all() {
            inputs.iter().for_each(|input| input.feed(history));
        }
    }

    fn assert_same_answers(&self, other: &Self, world: &RandomJobs) {
        let (reports, now) = (TransferReportStore::default(), world.now);
        for (job, newest_run) in (0..JOBS).map(JobId).zip(&world.runs) {
            // The values are not printed, because they may be long.
            assert!(self.timelines.timeline_of(job) == other.timelines.timeline_of(job));
            assert!(self.barriers.latest_first(job) == other.barriers.latest_first(job));
            let roster = TaskIncarnations { run: *newest_run, incarnations: Vec::new() };
            assert_eq!(
                self.activity.recent_activity(job, now, &reports, &roster),
                other.activity.recent_activity(job, now, &reports, &roster)
            );
            for run in (0..=newest_run.0).map(RunNumber) {
                assert!(self.barriers.latest_of_run(job, run) == other.barriers.latest_of_run(job, run));
                assert!(self.states.of_run(job, run) == other.states.of_run(job, run));
            }
        }
    }
}

/// A notification of observers.
enum Observed {
    Event(JobEvent),
    BarrierEnded(Arc<BarrierRecordWithArrivals>),
}

impl Observed {
    fn feed(&self, history: &dyn PersistentObserver) {
        match self {
            Self::Event(event) => history.on_event(event),
            Self::BarrierEnded(ending) => history.on_barrier_ended(ending),
        }
    }
}

/// Jobs to which random things happen.
struct RandomJobs {
    rng: Rng,
    now: Timestamp,
    runs: Vec<RunNumber>,
    /// The greatest number of tasks in one event, and of arrivals at a barrier.
    tasks_max: usize,
}

impl RandomJobs {
    fn new(seed: u64, tasks_max: usize) -> Self {
        let runs = vec![RunNumber(1); JOBS as usize];
        Self { rng: Rng::with_seed(seed), now: Timestamp(1_790_000_000_000_000), runs, tasks_max }
    }

    /// Returns a job and one of its runs: seldom an ended one.
    fn draw_job_and_run(&mut self) -> (JobId, RunNumber) {
        let job = self.rng.u32(0..JOBS);
        let newest = self.runs[job as usize].0;
        let run = if self.rng.u8(..) < 8 { self.rng.u64(1..=newest) } else { newest };
        (JobId(job), RunNumber(run))
    }

    fn draw_tasks(&mut self) -> Vec<TaskId> {
        let many = if self.rng.u8(..) < 8 { self.tasks_max } else { 4 };
        let count = i32::try_from(self.rng.usize(0..=many)).unwrap();
        (0..count).map(TaskId).collect()
    }

    fn draw_barrier_id(&mut self) -> Arc<str> {
        let id = self.rng.choice(["step", "save\n\u{202e}", REGISTRATION_BARRIER_ID]);
        id.expect("there are some").into()
    }

    fn draw_inputs(&mut self, count: usize) -> Vec<Observed> {
        let declared = (0..JOBS).map(|job| {
            let what = EventKind::JobDeclared { actor: None };
            let (job, run) = (JobId(job), RunNumber(1));
            Observed::Event(JobEvent { at: self.now, job, run, what, reason: String::new() })
        });
        let mut inputs: Vec<Observed> = declared.collect();
        for _ in 0..count {
            self.now.0 += self.rng.choice([0, 0, 1_000, 800_000, 11_000_000]).expect("there are some");
            let is_barrier = self.rng.u8(..4) == 0;
            inputs.push(if is_barrier { self.draw_ended_barrier() } else { self.draw_event() });
        }
        inputs
    }

    fn draw_ended_barrier(&mut self) -> Observed {
        let (job, run) = self.draw_job_and_run();
        let arrivals: Vec<BarrierArrival> =
            self.draw_tasks().into_iter().map(|task| BarrierArrival { task, at: self.now }).collect();
        let passed = self.rng.bool();
        let listed = arrivals.len().min(BarrierRecord::LISTED_MAX);
        let record = BarrierRecord {
            id: self.draw_barrier_id(),
            counter: self.rng.i64(0..100),
            kind: self.rng.choice(BarrierKind::ALL).expect("there are some"),
            began: Timestamp(self.now.0 - 1_000),
            ended: self.now,
            members: arrivals.len() + 1,
            arrived: arrivals.len(),
            first: arrivals.first().map(|arrival| arrival.task),
            last: arrivals.last().map(|arrival| arrival.task),
            skew_us: self.rng.u64(0..1_000),
            waited_us: self.rng.u64(..),
            outcome: if passed { BarrierOutcome::Passed } else { BarrierOutcome::Failed },
            without: vec![TaskId(7)],
            latest: arrivals[..listed].to_vec(),
        };
        Observed::BarrierEnded(Arc::new(BarrierRecordWithArrivals { job, run, record, arrivals }))
    }

    fn draw_event(&mut self) -> Observed {
        let (job, run) = self.draw_job_and_run();
        let task = TaskId(self.rng.i32(-1..40));
        let [incarnation, old, new] = [0; 3].map(|_| TaskIncarnation(self.rng.u64(..)));
        let exclusion = ExclusionId(self.rng.u64(0..40));
        let target = ExclusionTarget::Task(task);
        let actor = Actor { who: "ops".into(), address: None, means: ActorOrigin::Cli };
        let (barrier, counter) = (self.draw_barrier_id(), self.rng.i64(0..3));
        let what = match self.rng.u8(..40) {
            0..5 => EventKind::TaskRegistering { task, incarnation, peer: None },
            5 => EventKind::RegistrationWithdrawn { task },
            6..12 => EventKind::TaskConnected { task, incarnation, again: self.rng.bool() },
            12 => EventKind::TaskSuperseded { task, old, old_peer: None, new, new_peer: None },
            13 => EventKind::TaskSuspected { task },
            14 => EventKind::TaskReturned { task },
            15 => EventKind::TaskDisconnected { task },
            16..20 => {
                let class = self.rng.choice(FailureClass::ALL).expect("there are some");
                EventKind::TaskFailed { task, class }
            }
            20 => EventKind::Fenced { task: self.rng.bool().then_some(task) },
            21 => EventKind::BarrierStarted { barrier, counter },
            22..24 => EventKind::BarrierPassed { barrier, counter, without: self.draw_tasks() },
            24..26 => EventKind::BarrierFailed { barrier, counter, without: vec![] },
            26 => EventKind::PreemptionNoticed,
            27..30 => EventKind::Excluded { exclusion, target, tasks: self.draw_tasks(), actor },
            30..32 => EventKind::Readmitted { exclusion, target, actor: None },
            32 => EventKind::FirstCause { task: self.rng.bool().then_some(task) },
            33..35 => EventKind::TaskIdsAssigned { tasks: self.draw_tasks() },
            35 => EventKind::DrainRequested { actor },
            36 => EventKind::JobDeclared { actor: None },
            37 if self.rng.u8(..) < 4 => EventKind::JobDeleted { actor },
            38 => {
                self.runs[job.0 as usize].0 += 1;
                EventKind::RunEnded { outcome: RunOutcome::Failed }
            }
            _ => EventKind::RunOpened,
        };
        let reason = self.rng.choice(["", "the host is gone", "no heartbeat"]).expect("there are some");
        Observed::Event(JobEvent { at: self.now, job, run, what, reason: reason.to_owned() })
    }
}

#[test]
fn a_restored_history_goes_on_as_the_saved_one() {
    for seed in 0..60 {
        let mut world = RandomJobs::new(seed, if seed % 4 == 0 { 50_000 } else { 50 });
        let saved_one = Histories::default();
        let before = world.rng.usize(0..3_000);
        saved_one.feed(&world.draw_inputs(before));
        let saved = saved_one.save();
        assert!(saved == saved_one.save(), "the same contents give the same bytes");
        let restored = Histories::restored(&saved);
        assert!(saved == restored.save());
        saved_one.assert_same_answers(&restored, &world);
        let after = world.rng.usize(0..1_000);
        let later = world.draw_inputs(after);
        saved_one.feed(&later);
        restored.feed(&later);
        saved_one.assert_same_answers(&restored, &world);
        assert!(saved_one.save() == restored.save(), "seed {seed}");
    }
}

#[test]
fn a_copy_does_not_change_with_the_history() {
    let mut world = RandomJobs::new(1, 50);
    let histories = Histories::default();
    histories.feed(&world.draw_inputs(500));
    let saved = histories.save();
    let copies = histories.all().map(PersistentObserver::copy_contents);
    histories.feed(&world.draw_inputs(500));
    assert!(copies.map(|serialise| serialise()) == saved);
    assert!(histories.save() != saved);
}

/// Changes a few bytes, cuts the bytes, adds some, or replaces a few by a length that exceeds any memory.
fn damage(rng: &mut Rng, bytes: &mut Vec<u8>) {
    let at = rng.usize(0..=bytes.len());
    match rng.u8(..6) {
        0 => bytes.truncate(at),
        1 => bytes.insert(at, rng.u8(..)),
        2 => {
            let to = (at + rng.usize(0..10)).min(bytes.len());
            let number = *rng.choice(&[u64::MAX, u64::MAX >> 1, 1 << 40, 1_000_000]).expect("there are some");
            bytes.splice(at..to, postcard::to_stdvec(&number).unwrap());
        }
        3 => bytes.iter_mut().skip(at).take(8).for_each(|byte| *byte = rng.u8(..)),
        _ => bytes.iter_mut().skip(at).take(1).for_each(|byte| *byte ^= 1 << rng.u8(..8)),
    }
}

#[test]
fn damaged_contents_are_refused_or_keep_every_bound() {
    let (mut refused, mut restored) = (0, 0);
    for seed in 0..40 {
        let mut world = RandomJobs::new(seed, 20);
        let histories = Histories::default();
        let before = world.rng.usize(0..120);
        histories.feed(&world.draw_inputs(before));
        let later = world.draw_inputs(60);
        for (place, bytes) in histories.save().into_iter().enumerate() {
            for _ in 0..100 {
                let mut damaged = bytes.clone();
                for _ in 0..world.rng.usize(1..3) {
                    damage(&mut world.rng, &mut damaged);
                }
                let continued = Histories::default();
                let history = continued.all()[place];
                history.restore(&bytes).expect("the bytes are not damaged");
                if history.restore(&damaged).is_err() {
                    assert!(history.save() == bytes, "a refused restore changes nothing");
                    refused += 1;
                    continue;
                }
                restored += 1;
                let saved = history.save();
                history.restore(&saved).expect("it keeps the bounds");
                assert!(history.save() == saved);
                later.iter().for_each(|input| input.feed(history));
                history.restore(&history.save()).expect("it still keeps the bounds");
            }
        }
    }
    assert!(refused > 500 && restored > 500, "{refused} refused, {restored} restored");
}

#[test]
fn arbitrary_bytes_are_no_contents() {
    let mut rng = Rng::with_seed(3);
    for length in 0..2_000 {
        // Small bytes are decoded further than others, because most are a length or a number.
        let greatest = rng.choice([1, 4, 40, u8::MAX]).expect("there are some");
        let bytes: Vec<u8> = (0..length % 200).map(|_| rng.u8(..=greatest)).collect();
        for history in Histories::default().all() {
            if history.restore(&bytes).is_ok() {
                history.restore(&history.save()).expect("it keeps the bounds");
            }
        }
    }
    for history in Histories::default().all() {
        // One job, whose first list claims to have 2^63 records.
        let claimed = postcard::to_stdvec(&(1, 0, u64::MAX >> 1)).unwrap();
        assert!(history.restore(&claimed).is_err(), "{}", history.name());
        assert!(history.restore(&[0, 0]).is_err(), "{}: a byte follows", history.name());
        assert_eq!(history.restore(&[0]), Ok(()), "{}: no jobs", history.name());
    }
}
