//! Runs a worker from registration to exit. The worker is idle, or runs the exercise (`exercise.rs`).
//!
//! Begin at `run_worker`.

use std::collections::BTreeSet;
use std::fmt::Write as _;
use std::net::SocketAddr;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Context as _, Result};
use clap::ValueEnum;
use tokio::sync::watch;

use super::exercise::{Exercise, ExerciseOptions, PeerFailure, StepOutcome, StepReport};
use super::metrics_listener::MetricsListener;
use crate::agent::cluster_env::ClusterEnv;
use crate::agent::{Agent, AgentConfig, AgentError, ClusterRoster};
use crate::cli::output::{TerminalText, print};
use crate::cli::stop_signals::StopSignals;
use crate::text::format_bytes;
use crate::transfer::MemberId;

/// The time that the service has to let a task leave alone. In a job whose tasks share their fate it never
/// does.
const LEAVE_TIMEOUT: Duration = Duration::from_secs(2);
/// The time for which a step may continue after the worker was told to end.
const LAST_STEP: Duration = Duration::from_secs(2);
/// The time that the service has to notice that the other side of a failed transfer is gone.
const LOSS_NOTICE_TIMEOUT: Duration = Duration::from_secs(5);
/// The time that tasks have to agree on the step at which they end.
const AGREEMENT_TIMEOUT: Duration = Duration::from_secs(200);

/// The first word of lines about steps.
const STEP: &str = "step";
/// The first words of lines about cancelled steps.
pub const CANCELLED_TEXT: &str = "called off: ";

/// The program of a worker.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum WorkerProgram {
    /// Stay, and follow who lives
    Idle,
    /// Step with all others: a barrier, then buffers round the ring and to partners, every byte checked
    Exercise,
}

/// The options of a worker that has its configuration.
#[derive(Debug)]
pub struct WorkerOptions {
    pub program: WorkerProgram,
    pub exercise: ExerciseOptions,
    /// The number of steps of the exercise; `None` for no limit.
    pub steps: Option<u64>,
    /// The pause between two steps.
    pub pause: Duration,
    /// The address of its metrics.
    pub metrics: Option<SocketAddr>,
}

/// Registers, runs the program, and leaves.
pub async fn run_worker(
    options: &WorkerOptions,
    place: &ClusterEnv,
    config: AgentConfig,
) -> Result<ExitCode> {
    let mut stops = StopSignals::listen()?;
    let version = env!("CARGO_PKG_VERSION");
    print_lines(&format!("Muster {version} worker\n{}", place.describe().trim_end()))?;
    let scraped = match options.metrics {
        Some(address) => Some(MetricsListener::bind(address).await?),
        None => None,
    };
    let agent = tokio::select! {
        agent = Agent::join(config) => agent?,
        stop = stops.next() => {
            print_line(&format!("{} before it was registered", stop.name))?;
            return Ok(stop.exit_code());
        }
    };
    print_lines(registration_text(&agent).trim_end())?;
    // Its tasks end with this function.
    let mut shown = tokio::task::JoinSet::new();
    if let Some(scraped) = scraped {
        print_line(&format!("  metrics  {}", scraped.url()))?;
        shown.spawn(scraped.serve(agent.metrics_renderer()));
    }
    let (told, told_to_end) = watch::channel(false);
    let done = {
        let running = async {
            match options.program {
                WorkerProgram::Idle => run_idle(&agent, told_to_end).await,
                WorkerProgram::Exercise => run_exercise(&agent, options, told_to_end).await,
            }
        };
        tokio::pin!(running);
        loop {
            tokio::select! {
                done = &mut running => break done,
                stop = stops.next() => {
                    if told.send_replace(true) {
                        print_line(&format!("{} again: ended at once", stop.name))?;
                        return Ok(stop.exit_code());
                    }
                    print_line(&format!("{}: ends in good order", stop.name))?;
                }
            }
        }
    };
    let (end, faults) = match done {
        Ok(done) => done,
        Err(error) => {
            agent.stop_without_leaving().await;
            return Err(error);
        }
    };
    match end {
        ProgramEnd::Gone => agent.stop_without_leaving().await,
        ProgramEnd::Together => agent.leave().await?,
    }
    print_line("left in good order")?;
    Ok(if faults == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// Returns the announcement of a registered worker.
fn registration_text(agent: &Agent) -> String {
    let here = agent.here();
    let address = agent.engine().address();
    let mut ways: BTreeSet<String> = address.tcp.iter().map(SocketAddr::to_string).collect();
    if !address.local.is_empty() {
        ways.insert(format!("this host's @{}", address.local));
    }
    let ways: Vec<_> = ways.into_iter().collect();
    let mut text = String::new();
    // Writing to a string cannot fail.
    let _ =
        writeln!(text, "Registered: {here} of {}, run {:016x}", agent.tasks(), agent.service_incarnation());
    let _ = writeln!(text, "  engine   {}", ways.join(", "));
    text
}

/// Prints a line of the worker. A closed pipe is no error.
fn print_line(line: &str) -> Result<()> {
    Ok(print(&TerminalText::from_line(line))?)
}

/// Prints several lines of the worker.
fn print_lines(lines: &str) -> Result<()> {
    Ok(print(&TerminalText::from_escaped_text(lines))?)
}

/// The way in which a program ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum ProgramEnd {
    /// The service has let this task leave.
    Gone,
    /// All tasks end together.
    Together,
}

/// Stays registered, and prints changes of the roster.
async fn run_idle(agent: &Agent, mut told: watch::Receiver<bool>) -> Result<(ProgramEnd, u64)> {
    let mut roster = agent.roster();
    let mut faces = RosterPrinter::default();
    let mut asked = false;
    agent.host().set_activity("idle: follows who lives".to_owned());
    loop {
        faces.print_changes(&roster.borrow_and_update().clone())?;
        tokio::select! {
            error = agent.wait_for_end() => return Err(error.into()),
            notice = agent.wait_for_preemption_notice() => {
                print_line(&format!("preemption notice: {notice}"))?;
                // It has no steps, so any step of the others is right.
                agent.reached_sync_point(1).await?;
                return Ok((ProgramEnd::Together, 0));
            }
            changed = roster.changed() => changed.context("the agent has stopped")?,
            ended = told.changed(), if !asked => {
                ended.context("nobody can end this any more")?;
                asked = true;
                if leave_or_raise_preemption_notice(agent).await? {
                    return Ok((ProgramEnd::Gone, 0));
                }
            }
        }
    }
}

/// Tries to leave alone; otherwise asks all tasks to end. Returns whether it has left.
async fn leave_or_raise_preemption_notice(agent: &Agent) -> Result<bool> {
    match agent.try_leave(LEAVE_TIMEOUT).await {
        Ok(()) => Ok(true),
        Err(AgentError::TimedOut { .. }) => {
            print_line("the tasks of this job end together: a preemption notice tells the others")?;
            agent.raise_preemption_notice().await?;
            tokio::time::timeout(AGREEMENT_TIMEOUT, agent.wait_for_preemption_notice())
                .await
                .context("the notice does not come back")?;
            Ok(false)
        }
        Err(error) => Err(error.into()),
    }
}

#[derive(Default)]
struct ExerciseTotals {
    steps: u64,
    checked: u64,
    received: u64,
    faults: u64,
}

impl ExerciseTotals {
    /// Prints a completed step and adds it. `open` are the failures of the step before; those of this step replace them.
    fn record_step(&mut self, step: StepReport, open: &mut Vec<PeerFailure>) -> Result<()> {
        print_line(&step_line_text(&step))?;
        self.steps += 1;
        self.checked += step.checked as u64;
        self.received += step.received;
        for PeerFailure { with, error } in &step.failures {
            let names: Vec<String> = with.iter().map(MemberId::to_string).collect();
            print_line(&format!("  failed with {}: {}: {error}", names.join(" or "), error.reason_label()))?;
        }
        // A task that takes part in another step with the same life was not lost, so the earlier failure was a fault.
        for failed in open.drain(..).filter(|failed| all_possibly_failed_members_continue(failed, &step)) {
            self.faults += 1;
            print_fault(&failed)?;
        }
        *open = step.failures;
        Ok(())
    }
}

/// Runs the steps with all other tasks.
async fn run_exercise(
    agent: &Agent,
    options: &WorkerOptions,
    mut told: watch::Receiver<bool>,
) -> Result<(ProgramEnd, u64)> {
    let cut = watch::Sender::new(false);
    let mut exercise = Exercise::new(agent, options.exercise.clone(), cut.subscribe())?;
    let roster = agent.roster();
    let mut faces = RosterPrinter::default();
    let mut totals = ExerciseTotals::default();
    let mut asked = false;
    // The failures of the last step.
    let mut open: Vec<PeerFailure> = Vec::new();
    let end = loop {
        faces.print_changes(&roster.borrow().clone())?;
        if options.steps.is_some_and(|steps| totals.steps >= steps) {
            break ProgramEnd::Together;
        }
        if agent.reached_sync_point(exercise.next_step_number()).await? {
            print_line(&format!(
                "all tasks end before step {}, as they agreed",
                exercise.next_step_number()
            ))?;
            break ProgramEnd::Together;
        }
        if *told.borrow() && !std::mem::replace(&mut asked, true) {
            totals.faults += count_failures_with_live_peers(agent, std::mem::take(&mut open)).await?;
            if leave_or_raise_preemption_notice(agent).await? {
                break ProgramEnd::Gone;
            }
            // All tasks end together, so this one must wait for the others.
            cut.send_replace(false);
            continue;
        }
        agent.host().set_activity(format!("exercise, step {}", exercise.next_step_number()));
        let stepping = exercise.run_step();
        tokio::pin!(stepping);
        let outcome = tokio::select! {
            outcome = &mut stepping => outcome?,
            // The step may be waiting for a task that does not come.
            () = wait_until_last_step_is_over(&mut told), if !asked => {
                cut.send_replace(true);
                stepping.await?
            }
        };
        match outcome {
            StepOutcome::Cancelled(why) => print_line(&format!("{CANCELLED_TEXT}{why}"))?,
            StepOutcome::Completed(step) => {
                totals.record_step(step, &mut open)?;
                tokio::select! {
                    () = tokio::time::sleep(options.pause) => {}
                    _ = told.changed(), if !asked => {}
                }
            }
        }
    };
    totals.faults += count_failures_with_live_peers(agent, open).await?;
    let ExerciseTotals { steps, checked, received, faults } = totals;
    print_line(&format!(
        "{steps} steps: {checked} buffers checked, {} received, {faults} fault(s)",
        format_bytes(received)
    ))?;
    Ok((end, faults))
}

/// Resolves [`LAST_STEP`] after the worker was told to end.
async fn wait_until_last_step_is_over(told: &mut watch::Receiver<bool>) {
    if told.wait_for(|told| *told).await.is_err() {
        std::future::pending::<()>().await;
    }
    tokio::time::sleep(LAST_STEP).await;
}

/// Returns whether all tasks that could have caused the failure take part in a later step.
fn all_possibly_failed_members_continue(failed: &PeerFailure, later: &StepReport) -> bool {
    failed.with.iter().all(|member| later.members.contains(member))
}

fn print_fault(PeerFailure { error, .. }: &PeerFailure) -> Result<()> {
    print_line(&format!("FAULT: nobody was lost, and yet this failed: {error}"))
}

/// Returns how many of the failures of the last step are faults: those whose peers the service does not
/// report as lost.
async fn count_failures_with_live_peers(agent: &Agent, open: Vec<PeerFailure>) -> Result<u64> {
    let mut faults = 0;
    for failed in open {
        let mut roster = agent.roster();
        let gone = roster.wait_for(|roster| roster.first_lost_member(&failed.with).is_some());
        let gone = tokio::select! {
            gone = tokio::time::timeout(LOSS_NOTICE_TIMEOUT, gone) => matches!(gone, Ok(Ok(_))),
            error = agent.wait_for_end() => return Err(error.into()),
        };
        if !gone {
            faults += 1;
            print_fault(&failed)?;
        }
    }
    Ok(faults)
}

/// Prints changes of the roster.
#[derive(Default)]
struct RosterPrinter {
    known: ClusterRoster,
    begun: bool,
}

impl RosterPrinter {
    fn print_changes(&mut self, roster: &ClusterRoster) -> Result<()> {
        let old = std::mem::replace(&mut self.known, roster.clone());
        let begun = std::mem::replace(&mut self.begun, true);
        for (task, incarnation) in &old.lives {
            if !roster.lives.contains_key(task) {
                print_line(&format!("task {task} (incarnation {incarnation}) is gone"))?;
            }
        }
        for (task, incarnation) in &roster.lives {
            match old.lives.get(task) {
                Some(before) if before == incarnation => {}
                Some(_) => print_line(&format!("task {task} was restarted (incarnation {incarnation})"))?,
                None if begun => print_line(&format!("task {task} is there (incarnation {incarnation})"))?,
                None => {}
            }
        }
        for (task, why) in &roster.unusable {
            if !old.unusable.contains_key(task) {
                print_line(&format!("the engine of task {task} cannot be used: {why}"))?;
            }
        }
        Ok(())
    }
}

/// Returns the line about a step.
fn step_line_text(step: &StepReport) -> String {
    let tasks: Vec<String> = step.members.iter().map(|member| member.task.to_string()).collect();
    let resharded = step.resharded.as_ref();
    let resharded = resharded.map_or_else(String::new, |array| format!("; array from {}", array.what));
    let failed =
        if step.failures.is_empty() { String::new() } else { format!("; {} failed", step.failures.len()) };
    format!(
        "{STEP} {}: tasks {}; {} buffers checked; {} sent, {} received in {:.1} ms{resharded}{failed}",
        step.number,
        tasks.join(" "),
        step.checked,
        format_bytes(step.sent),
        format_bytes(step.received),
        step.elapsed.as_secs_f64() * 1e3
    )
}

/// The content of a line about a step.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StepLine {
    /// The number of the step.
    pub number: u64,
    /// The members.
    pub tasks: Vec<u32>,
    /// The number of checked buffers and shards.
    pub checked: u64,
    /// An array changed its sharding.
    pub resharded: bool,
    /// Nothing failed.
    pub whole: bool,
}

/// Parses a line about a step.
pub fn parse_step_line(line: &str) -> Option<StepLine> {
    let (number, rest) = line.strip_prefix(STEP)?.strip_prefix(' ')?.split_once(": tasks ")?;
    let mut parts = rest.split("; ");
    let tasks = parts.next()?.split(' ').map(|task| task.parse().ok()).collect::<Option<_>>()?;
    let checked = parts.next()?.strip_suffix(" buffers checked")?.parse().ok()?;
    let resharded = parts.any(|part| part.starts_with("array from "));
    Some(StepLine {
        number: number.parse().ok()?,
        tasks,
        checked,
        resharded,
        whole: !rest.ends_with(" failed"),
    })
}

#[cfg(test)]
mod tests {
    use super::super::exercise::step::ReshardResult;
    use super::*;
    use crate::transfer::{Incarnation, ReshardStats, TaskId, TransferError};

    #[test]
    fn a_failure_with_a_live_peer_is_a_fault() {
        let member = |task, life| MemberId::of_own_job(TaskId(task), Incarnation::new(life).unwrap());
        let failed = PeerFailure { with: vec![member(1, 7), member(2, 8)], error: TransferError::Closed };
        let step = |members| StepReport::new(2, members);
        assert!(all_possibly_failed_members_continue(
            &failed,
            &step(vec![member(0, 1), member(1, 7), member(2, 8)])
        ));
        assert!(
            !all_possibly_failed_members_continue(&failed, &step(vec![member(0, 1), member(1, 7)])),
            "task 2 is lost"
        );
        assert!(
            !all_possibly_failed_members_continue(&failed, &step(vec![member(1, 7), member(2, 9)])),
            "task 2 was restarted"
        );
    }

    #[test]
    fn lines_of_steps_are_read_as_they_are_written() {
        let member = |task| MemberId::of_own_job(TaskId(task), Incarnation::new(9).unwrap());
        let mut step = StepReport {
            checked: 3,
            sent: 1536,
            received: 7,
            elapsed: Duration::from_micros(1500),
            ..StepReport::new(12, vec![member(0), member(2)])
        };
        let written = step_line_text(&step);
        assert_eq!(written, "step 12: tasks 0 2; 3 buffers checked; 1.5 KiB sent, 7 B received in 1.5 ms");
        let seen = StepLine { number: 12, tasks: vec![0, 2], checked: 3, resharded: false, whole: true };
        assert_eq!(parse_step_line(&written), Some(seen.clone()));
        let (what, moved) = ("P(d) to P(None, d)".to_owned(), ReshardStats::default());
        step.resharded = Some(ReshardResult { what, checked: 2, moved });
        assert_eq!(step_line_text(&step), format!("{written}; array from P(d) to P(None, d)"));
        let seen = StepLine { resharded: true, ..seen };
        assert_eq!(parse_step_line(&step_line_text(&step)), Some(seen.clone()));
        step.failures.push(PeerFailure { with: vec![member(2)], error: TransferError::Closed });
        assert_eq!(parse_step_line(&step_line_text(&step)), Some(StepLine { whole: false, ..seen }));
        for other in ["", "step", "step x: tasks 1; 2 buffers checked", "called off: step 1: tasks"] {
            assert_eq!(parse_step_line(other), None, "{other}");
        }
    }
}
