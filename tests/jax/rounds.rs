//! Tests the loop of an elastic program (begin barrier, steps, end barrier, checkpoint) while tasks are killed at
//! every point of the loop.
//!
//! A restarted task must never leave its peers waiting for ever. No task may pass a barrier before another task has
//! arrived.

use std::collections::BTreeMap;
use std::time::Duration;

use muster::coordination::{EventKind, RunState, TaskId};
use rustix::process::Signal;

use super::death::failed_tasks;
use super::fixture::JaxFixture;
use super::line::LogRecord;
use super::process::Process;
use super::server::Server;
use super::{RunSet, Test};

pub const TESTS: &[Test] = &[(
    RunSet::Both,
    "tasks_killed_at_any_point_of_a_round_come_back_without_a_deadlock_or_an_early_pass",
    rounds,
)];

/// The number of rounds. Each kill takes a few; after the last one all tasks finish the rest.
const ROUNDS: u64 = 90;
/// The number of kills in each phase.
const TURNS: usize = 2;

/// The phase in which a task is killed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum DeathPhase {
    /// While it waits at the begin barrier.
    AtBegin,
    /// During its steps, when the others may be anywhere in theirs.
    InSteps,
    /// During its steps, when all others wait at the end barrier already.
    InStepsLast,
    /// While it waits at the end barrier.
    AtEnd,
    /// During its checkpoint.
    InCheckpoint,
    /// During its steps, and again as soon as it has returned.
    Twice,
}

const PHASES: [DeathPhase; 6] = [
    DeathPhase::AtBegin,
    DeathPhase::InSteps,
    DeathPhase::InStepsLast,
    DeathPhase::AtEnd,
    DeathPhase::InCheckpoint,
    DeathPhase::Twice,
];

struct Job<'a> {
    fixture: &'a JaxFixture,
    /// The present processes.
    tasks: Vec<Process>,
    /// The killed processes, whose output is still needed.
    dead: Vec<Process>,
    random: fastrand::Rng,
}

fn rounds(scene: &JaxFixture) {
    // Another seed explores other moments; a failure prints its seed.
    let seed = std::env::var("TEST_SEED").ok().and_then(|seed| seed.parse().ok()).unwrap_or(1);
    println!("     {}: TEST_SEED={seed}", scene.release.name);
    let server = scene.serve(&["--tasks", "3", "--recoverable"]);
    let tasks = (0..3).map(|task| start(scene, task)).collect();
    let mut job = Job { fixture: scene, tasks, dead: Vec::new(), random: fastrand::Rng::with_seed(seed) };

    let mut phases = PHASES.repeat(TURNS);
    job.random.shuffle(&mut phases);
    let mut victims = Vec::new();
    for phase in phases {
        let victim = job.random.usize(0..3);
        victims.push(i32::try_from(victim).unwrap());
        job.kill(phase, victim);
    }
    job.tasks.iter().for_each(Process::succeed);
    server.until_run(1, RunState::Completed);

    assert!(
        failed_tasks(server).iter().all(|task| victims.contains(task)),
        "somebody died that was not killed"
    );
    let lives: Vec<&Process> = job.tasks.iter().chain(&job.dead).collect();
    nothing_failed(&lives);
    nobody_passed_early(&lives);
    only_restarted_tasks_were_left_behind(server);
}

fn start(scene: &JaxFixture, task: usize) -> Process {
    let rounds = ROUNDS.to_string();
    let pace = ["--steps", "2", "--step-ms", "30", "--checkpoint-ms", "40"];
    scene.start(
        task,
        3,
        &[&["worker.py", "rounds", "--recoverable", "--rounds", &rounds][..], &pace].concat(),
    )
}

impl Job<'_> {
    /// Waits for a line that a task prints from now on.
    fn does(&self, task: usize, mark: usize, name: &str, which: impl Fn(&LogRecord) -> bool) {
        self.tasks[task].line_after(mark, name, which);
    }

    fn pause(&mut self, up_to_ms: u64) {
        std::thread::sleep(Duration::from_millis(self.random.u64(0..=up_to_ms)));
    }

    /// Kills a task in a phase, restarts it, and checks that all tasks continue together.
    fn kill(&mut self, phase: DeathPhase, victim: usize) {
        let mark = self.tasks[victim].mark();
        let at = |barrier: &'static str| move |line: &LogRecord| line.text("barrier") == barrier;
        match phase {
            DeathPhase::AtBegin | DeathPhase::AtEnd => {
                // Another task is delayed, so that the victim must wait.
                let slow = (victim + self.random.usize(1..3)) % 3;
                let (before, barrier) =
                    if phase == DeathPhase::AtBegin { ("checkpoint", "begin") } else { ("step", "end") };
                self.does(slow, self.tasks[slow].mark(), before, |_| true);
                self.tasks[slow].signal(Signal::STOP);
                self.does(victim, mark, "enter", at(barrier));
                self.pause(20);
                self.die(victim);
                self.pause(200);
                self.tasks[slow].signal(Signal::CONT);
            }
            DeathPhase::InSteps | DeathPhase::Twice => {
                self.does(victim, mark, "step", |_| true);
                self.pause(30);
                self.die(victim);
            }
            DeathPhase::InStepsLast => {
                let others: Vec<usize> = (0..3).filter(|task| *task != victim).collect();
                let marks: Vec<usize> = others.iter().map(|task| self.tasks[*task].mark()).collect();
                self.does(victim, mark, "step", |_| true);
                self.tasks[victim].signal(Signal::STOP);
                for (other, mark) in others.into_iter().zip(marks) {
                    self.does(other, mark, "enter", at("end"));
                }
                self.die(victim);
            }
            DeathPhase::InCheckpoint => {
                self.does(victim, mark, "pass", at("end"));
                self.pause(30);
                self.die(victim);
            }
        }
        self.pause(300);
        self.come_back(victim);
        if phase == DeathPhase::Twice {
            self.does(victim, 0, "registered", |_| true);
            self.pause(100);
            self.die(victim);
            self.come_back(victim);
        }
        // It has finished a round with the others, which have finished it too.
        let saved = self.tasks[victim].line("checkpoint", |_| true).number::<u64>("round");
        for task in 0..3 {
            self.does(task, 0, "checkpoint", |line| line.number::<u64>("round") >= saved);
        }
        assert!(saved + 10 < ROUNDS, "the test needs more rounds than it has");
    }

    fn die(&mut self, victim: usize) {
        self.tasks[victim].signal(Signal::KILL);
    }

    fn come_back(&mut self, victim: usize) {
        let back = start(self.fixture, victim);
        self.dead.push(std::mem::replace(&mut self.tasks[victim], back));
    }
}

/// Checks that no barrier failed because of another task's death.
fn nothing_failed(lives: &[&Process]) {
    let failed: Vec<LogRecord> = lives.iter().flat_map(|life| life.records("fail")).collect();
    assert_eq!(failed, []);
}

/// Checks that in each instance of each barrier the last task arrived before the first one left.
fn nobody_passed_early(lives: &[&Process]) {
    let mut uses: BTreeMap<(String, u64), Vec<LogRecord>> = BTreeMap::new();
    for line in lives.iter().flat_map(|life| life.records("pass")) {
        uses.entry((line.text("barrier").to_owned(), line.number("round"))).or_default().push(line);
    }
    assert!(uses.len() > usize::try_from(ROUNDS).unwrap(), "most rounds are accounted for");
    for ((barrier, round), passed) in uses {
        let last_entered = passed.iter().map(|line| line.number::<f64>("entered")).fold(f64::MIN, f64::max);
        let first_left = passed.iter().map(|line| line.number::<f64>("left")).fold(f64::MAX, f64::min);
        assert!(last_entered <= first_left, "somebody passed {barrier} of round {round} early: {passed:#?}");
        let mut tasks: Vec<i32> = passed.iter().map(|line| line.number("task")).collect();
        tasks.sort_unstable();
        tasks.dedup();
        assert_eq!(tasks.len(), passed.len(), "a task passed {barrier} of round {round} twice: {passed:#?}");
    }
}

/// Checks the server's events: a barrier passes without a task only if that task has registered again in this
/// run.
fn only_restarted_tasks_were_left_behind(server: &Server) {
    let mut restarted: Vec<TaskId> = Vec::new();
    let mut without_somebody = 0;
    for event in server.events("default") {
        match event.what {
            EventKind::TaskConnected { task, again: true, .. } => restarted.push(task),
            EventKind::BarrierPassed { without, barrier, counter } => {
                without_somebody += usize::from(!without.is_empty());
                assert!(without.len() < 3, "{barrier}::{counter} passed without anybody");
                for task in without {
                    assert!(
                        restarted.contains(&task),
                        "{barrier}::{counter} passed without task {task}: {}",
                        event.reason
                    );
                }
            }
            EventKind::BarrierFailed { barrier, counter, .. } => {
                panic!("{barrier}::{counter} failed: {}", event.reason)
            }
            _ => {}
        }
    }
    assert!(without_somebody > 0, "no kill ever left a barrier behind: the test has lost its point");
}
