//! Scripts: calls to a service and the expected answers, as data.
//!
//! A script runs against jaxlib's own service and against Muster. Both must meet its expectations, and must also
//! agree in everything else that clients can distinguish. If they differ on purpose, the script names the
//! difference and states both behaviours.

use std::collections::HashMap;
use std::time::Duration;

use crate::differences::Difference;
use crate::expect::{Expected, ExpectedOutcome};
use crate::support::{Call, Generation, JobOptions};

/// A jaxlib release whose service is the reference.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Release {
    /// Generation A, with calls that its last release no longer answers.
    V0_6_2,
    /// The last release of generation A.
    V0_9_2,
    /// Generation C.
    V0_10_2,
    /// Generation C with ReportErrorToService.
    V0_12_0,
}

impl Release {
    pub const ALL: [Self; 4] = [Self::V0_6_2, Self::V0_9_2, Self::V0_10_2, Self::V0_12_0];

    pub fn name(self) -> &'static str {
        match self {
            Self::V0_6_2 => "0.6.2",
            Self::V0_9_2 => "0.9.2",
            Self::V0_10_2 => "0.10.2",
            Self::V0_12_0 => "0.12.0",
        }
    }

    pub fn generation(self) -> Generation {
        if matches!(self, Self::V0_6_2 | Self::V0_9_2) { Generation::A } else { Generation::C }
    }

    /// Returns whether callers state a service incarnation.
    pub fn states_incarnations(self) -> bool {
        self.generation() == Generation::C
    }

    /// Returns whether a task can report an error.
    pub fn reports_errors(self) -> bool {
        matches!(self, Self::V0_6_2 | Self::V0_12_0)
    }

    /// Returns whether states can be watched; earlier releases can only read them.
    pub fn can_watch_states(self) -> bool {
        self != Self::V0_6_2
    }

    /// Returns whether the release can run a script.
    pub fn can_run(self, script: &Script) -> bool {
        self != Self::V0_6_2
            || !(script.job.recoverable || script.steps.iter().any(ScriptStep::is_newer_than_0_6_2))
    }

    /// Returns whether the service pairs each live task with its own incarnation. 0.6.2 confuses them.
    pub fn pairs_incarnations(self) -> bool {
        self != Self::V0_6_2
    }

    /// Returns whether clients name their job, and the service expects it.
    pub fn names_jobs(self) -> bool {
        self == Self::V0_6_2
    }
}

/// A script with the name under which it is reported.
#[derive(Debug, Clone)]
pub struct Script {
    pub name: &'static str,
    pub job: JobOptions,
    pub steps: Vec<ScriptStep>,
    /// Whether the states of the tasks and the store are compared at the end. They are not if a difference
    /// has led to different situations.
    pub compare_end: bool,
    /// Whether Muster draws conclusions from the end of a connection.
    pub heeds_connections: bool,
    lives: HashMap<i32, usize>,
    anonymous: usize,
}

/// One step of a script.
#[derive(Debug, Clone)]
pub enum ScriptStep {
    /// Start a call, and continue once the service has received it.
    Start { handle: String, who: CallerSpec, ask: ScriptCall },
    /// Check that a call ends in this way, or waits.
    Expect { handle: String, expected: Expected },
    /// Cancel a call.
    HangUp { handle: String },
    /// Close the connection of one life of a task.
    Disconnect { who: CallerSpec },
    /// Let time pass for timeouts that no answer reports.
    Sleep(Duration),
    /// Steps for one service only, where a difference has led to different situations.
    Only { side: ServiceKind, difference: Difference, steps: Vec<ScriptStep> },
}

impl ScriptStep {
    fn is_newer_than_0_6_2(&self) -> bool {
        match self {
            Self::Start { ask: ScriptCall::Call(call), .. } => matches!(call, Call::Increment { .. }),
            // That release reads the present states in another way, but supports it.
            Self::Start { ask: ScriptCall::Watch(version), .. } => *version != TaskStatesVersion::None,
            Self::Only { steps, .. } => steps.iter().any(Self::is_newer_than_0_6_2),
            _ => false,
        }
    }
}

/// The two services.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum ServiceKind {
    Cxx,
    Muster,
}

/// A call, with values that are known only when the script runs.
#[derive(Debug, Clone, PartialEq)]
pub enum ScriptCall {
    Call(Call),
    /// The states of the tasks, relative to the last seen version.
    Watch(TaskStatesVersion),
}

/// The version of the states that a caller states.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TaskStatesVersion {
    None,
    LastSeen,
    OneOlder,
    Future,
}

impl From<Call> for ScriptCall {
    fn from(call: Call) -> Self {
        Self::Call(call)
    }
}

/// The caller: one life of a task. Every life has its own connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CallerSpec {
    pub task: i32,
    /// `None` until the script is built: the task's latest life.
    pub life: Option<usize>,
    pub claim: StatedServiceIncarnation,
    /// Whether it names its job, as clients up to 0.8.3 do.
    pub named: bool,
}

/// The service incarnation that a caller states, if its generation states one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum StatedServiceIncarnation {
    /// The one with which it registered; if it never did, the newest that any caller has.
    Registered,
    /// One that never existed.
    Wrong,
    /// None.
    Absent,
}

/// Returns the task with this number, in its latest life.
pub fn t(task: i32) -> CallerSpec {
    CallerSpec { task, life: None, claim: StatedServiceIncarnation::Registered, named: false }
}

/// Returns a caller that is no task.
pub fn observer() -> CallerSpec {
    t(-1)
}

impl CallerSpec {
    /// Returns the task's life with this number, from 0.
    pub fn life(self, life: usize) -> Self {
        Self { life: Some(life), ..self }
    }

    pub fn stating(self, claim: StatedServiceIncarnation) -> Self {
        Self { claim, ..self }
    }

    pub fn naming_its_job(self) -> Self {
        Self { named: true, ..self }
    }
}

/// Returns the incarnation of a task's life: the same for both services, so that it needs no translation.
pub fn incarnation(task: i32, life: usize) -> u64 {
    let task = u64::from(task.unsigned_abs());
    0xA000_0000_0000_0000 + task * 0x1_0000 + life as u64 + 1
}

/// Returns a script for a job of `tasks` tasks.
pub fn script(name: &'static str, tasks: u32) -> Script {
    Script {
        name,
        job: JobOptions::new(tasks),
        steps: Vec::new(),
        compare_end: true,
        heeds_connections: false,
        lives: HashMap::new(),
        anonymous: 0,
    }
}

impl Script {
    // --- The job ---

    pub fn recoverable(mut self) -> Self {
        self.job.recoverable = true;
        self
    }

    pub fn heartbeat_timeout_s(mut self, seconds: u32) -> Self {
        self.job.heartbeat_timeout_s = seconds;
        self
    }

    pub fn shutdown_timeout_s(mut self, seconds: u32) -> Self {
        self.job.shutdown_timeout_s = seconds;
        self
    }

    pub fn register_timeout_s(mut self, seconds: u32) -> Self {
        self.job.register_timeout_s = seconds;
        self
    }

    pub fn detecting_lost_connections(mut self) -> Self {
        self.heeds_connections = true;
        self
    }

    // --- The steps ---

    /// Starts a call under a handle.
    pub fn start(mut self, handle: &str, who: CallerSpec, ask: impl Into<ScriptCall>) -> Self {
        let who = self.with_latest_life(who);
        self.steps.push(ScriptStep::Start { handle: handle.into(), who, ask: ask.into() });
        self
    }

    /// Starts a registration of the task's present life.
    pub fn start_register(self, handle: &str, who: CallerSpec) -> Self {
        let who = self.with_latest_life(who);
        let incarnation = incarnation(who.task, who.life.unwrap_or_default());
        self.start(handle, who, Call::Register { incarnation, recoverable: false })
    }

    /// Sends a heartbeat of this life.
    pub fn heartbeat(self, who: CallerSpec, outcome: ExpectedOutcome) -> Self {
        let settled = self.with_latest_life(who);
        let incarnation = incarnation(settled.task, settled.life.unwrap_or_default());
        self.call(who, Call::Heartbeat { incarnation }, outcome)
    }

    /// Expects that the call `handle` ends like this, or waits.
    pub fn expect_outcome(self, handle: &str, outcome: ExpectedOutcome) -> Self {
        self.push_expectation(handle, Expected::Same(outcome))
    }

    /// Expects that each of these calls ends like this.
    pub fn expect_all(mut self, handles: &[&str], outcome: &ExpectedOutcome) -> Self {
        for handle in handles {
            self = self.expect_outcome(handle, outcome.clone());
        }
        self
    }

    /// Makes a call and expects this outcome.
    pub fn call(mut self, who: CallerSpec, ask: impl Into<ScriptCall>, outcome: ExpectedOutcome) -> Self {
        let handle = self.next_anonymous_handle();
        self.start(&handle, who, ask).expect_outcome(&handle, outcome)
    }

    /// Expects that the call `handle` ends differently, on purpose.
    pub fn expect_difference(
        self,
        handle: &str,
        difference: Difference,
        cxx: ExpectedOutcome,
        muster: ExpectedOutcome,
    ) -> Self {
        self.push_expectation(handle, Expected::Differs { difference, cxx, muster })
    }

    /// Makes a call that ends differently, on purpose.
    pub fn call_differs(
        mut self,
        who: CallerSpec,
        ask: impl Into<ScriptCall>,
        difference: Difference,
        cxx: ExpectedOutcome,
        muster: ExpectedOutcome,
    ) -> Self {
        let handle = self.next_anonymous_handle();
        self.start(&handle, who, ask).expect_difference(&handle, difference, cxx, muster)
    }

    /// Adds steps for one service only.
    pub fn only_for_service(
        mut self,
        side: ServiceKind,
        difference: Difference,
        steps: impl FnOnce(Self) -> Self,
    ) -> Self {
        let before = std::mem::take(&mut self.steps);
        let mut inner = steps(self);
        let steps = std::mem::replace(&mut inner.steps, before);
        inner.steps.push(ScriptStep::Only { side, difference, steps });
        inner
    }

    pub fn hang_up(mut self, handle: &str) -> Self {
        self.steps.push(ScriptStep::HangUp { handle: handle.into() });
        self
    }

    pub fn disconnect(mut self, who: CallerSpec) -> Self {
        let who = self.with_latest_life(who);
        self.steps.push(ScriptStep::Disconnect { who });
        self
    }

    /// Replaces the task's process by another one from here on.
    pub fn restart(mut self, task: i32) -> Self {
        *self.lives.entry(task).or_default() += 1;
        self
    }

    pub fn sleep_ms(mut self, ms: u64) -> Self {
        self.steps.push(ScriptStep::Sleep(Duration::from_millis(ms)));
        self
    }

    /// Registers and connects all tasks of the job.
    pub fn register_all_tasks(mut self) -> Self {
        let ids = 0..i32::try_from(self.job.tasks).expect("few tasks");
        let handles: Vec<String> = ids.clone().map(|id| format!("registration of {id}")).collect();
        for (id, handle) in ids.zip(&handles) {
            self = self.start_register(handle, t(id));
        }
        for handle in &handles {
            self = self.expect_outcome(handle, crate::expect::ok());
        }
        self
    }

    /// Registers a task that is answered at once.
    pub fn register_and_expect(mut self, who: CallerSpec, outcome: ExpectedOutcome) -> Self {
        let handle = self.next_anonymous_handle();
        self.start_register(&handle, who).expect_outcome(&handle, outcome)
    }

    /// Omits the comparison at the end, because the services are in different situations.
    pub fn without_comparison_at_end(mut self) -> Self {
        self.compare_end = false;
        self
    }

    /// Returns every difference that the script names.
    pub fn differences(&self) -> Vec<Difference> {
        fn collect_differences(steps: &[ScriptStep], found: &mut Vec<Difference>) {
            for step in steps {
                match step {
                    ScriptStep::Expect { expected: Expected::Differs { difference, .. }, .. } => {
                        found.push(*difference);
                    }
                    ScriptStep::Only { difference, steps, .. } => {
                        found.push(*difference);
                        collect_differences(steps, found);
                    }
                    _ => {}
                }
            }
        }
        let mut found = Vec::new();
        collect_differences(&self.steps, &mut found);
        found
    }

    fn push_expectation(mut self, handle: &str, expected: Expected) -> Self {
        self.steps.push(ScriptStep::Expect { handle: handle.into(), expected });
        self
    }

    fn with_latest_life(&self, who: CallerSpec) -> CallerSpec {
        let latest = self.lives.get(&who.task).copied().unwrap_or_default();
        CallerSpec { life: Some(who.life.unwrap_or(latest)), ..who }
    }

    fn next_anonymous_handle(&mut self) -> String {
        self.anonymous += 1;
        format!("call {}", self.anonymous)
    }
}
