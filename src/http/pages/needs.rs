//! What needs a person now: what was found in a job, and what its run says by itself.

use askama::Template;

use super::links::{self, Named};
use super::look::{self, Look, barrier_name, grouped};
use super::part::Part;
use super::scene::Scene;
use super::times;
use crate::coordination::{BarrierKind, BarrierView, JobName, RunState, TaskId, Timestamp};
use crate::findings::{Evidence, Finding, Severity};
use crate::http::Problem;

/// How many tasks are named with each need.
const NAMED: usize = 4;

/// Something that needs a person.
pub(super) struct Need {
    pub job: JobName,
    pub tone: &'static str,
    pub title: String,
    pub text: String,
    /// What clients were told, where the text has other words.
    pub told: String,
    pub since: Timestamp,
    pub tasks: Vec<Named>,
    /// How many more tasks it is about.
    pub others: usize,
    pub means: String,
    pub advice: String,
    pub guide: String,
    pub evidence: Vec<Evidence>,
}

impl Need {
    fn found(scene: &Scene, finding: &Finding) -> Self {
        let tone = match finding.severity {
            Severity::Critical => "bad",
            Severity::Warning => "warn",
            Severity::Notice => "info",
        };
        Self {
            job: finding.job.clone(),
            tone,
            title: finding.title.clone(),
            text: finding.summary.clone(),
            told: String::new(),
            since: finding.since,
            tasks: finding.tasks.iter().take(NAMED).map(|task| scene.named(*task)).collect(),
            others: finding.tasks.len().saturating_sub(NAMED),
            means: finding.means.clone(),
            advice: finding.advice.clone(),
            guide: format!("/guide/findings#{}", finding.id),
            evidence: finding.evidence.clone(),
        }
    }

    fn plain(scene: &Scene, tone: &'static str, title: String, text: String, since: Timestamp) -> Self {
        Self {
            job: scene.view.name.clone(),
            tone,
            title,
            text,
            told: String::new(),
            since,
            tasks: Vec::new(),
            others: 0,
            means: String::new(),
            advice: String::new(),
            guide: String::new(),
            evidence: Vec::new(),
        }
    }

    fn about(mut self, scene: &Scene, tasks: &[TaskId]) -> Self {
        self.tasks = tasks.iter().take(NAMED).map(|task| scene.named(*task)).collect();
        self.others = tasks.len().saturating_sub(NAMED);
        self
    }

    fn advised(mut self, advice: &str, guide: &str) -> Self {
        advice.clone_into(&mut self.advice);
        guide.clone_into(&mut self.guide);
        self
    }

    /// The whole of an error, where the text is its gist.
    fn telling(mut self, told: String) -> Self {
        self.told = told;
        self
    }

    /// A number of the evidence, as people write it.
    pub fn number(&self, value: &f64) -> String {
        let text = format!("{value:.2}");
        text.trim_end_matches('0').trim_end_matches('.').to_owned()
    }
}

/// What needs a person in a job, what matters most first.
pub(super) fn of(scene: &Scene) -> Vec<Need> {
    let mut needs: Vec<Need> = failed(scene).into_iter().collect();
    let found = |id: &str| scene.open.iter().find(|finding| finding.id.as_ref() == id);
    // A task that stalls is why its barrier is stuck: that is one need, and not two.
    let stalled = found("stalled-task").map(|finding| &finding.tasks);
    let again =
        |finding: &&Finding| finding.id.as_ref() == "barrier-stuck" && Some(&finding.tasks) == stalled;
    // Those that are lost have an entry of their own.
    let lost: Vec<TaskId> = needs.iter().flat_map(|need| need.tasks.iter().map(|one| one.task)).collect();
    for finding in scene.open.iter().filter(|it| !again(it)) {
        let mut need = Need::found(scene, finding);
        if finding.id.as_ref() == "barrier-stuck" {
            need.tasks.retain(|one| !lost.contains(&one.task));
        }
        needs.push(need);
    }
    if stalled.is_none() && found("barrier-stuck").is_none() {
        needs.extend(awaited(scene));
    }
    let mut suspects = with(scene, Look::Suspect);
    suspects.retain(|task| !scene.follows(*task));
    if let Some(since) = suspects.iter().filter_map(|task| Some(scene.task(*task)?.since)).min() {
        let title = count(suspects.len(), "connection is broken", "connections are broken");
        let text = "If a task is heard again in time, nothing has happened; otherwise it has failed.".into();
        needs.push(Need::plain(scene, "warn", title, text, since).about(scene, &suspects));
    }
    needs.sort_by_key(rank);
    needs
}

/// Whether the first cause is among the needs.
pub(super) fn tell_cause(scene: &Scene) -> bool {
    let run = &scene.view.run;
    matches!(run.state, RunState::Failed | RunState::Abandoned) && run.first_cause.is_some()
}

/// Where a need stands among others.
pub(super) fn rank(need: &Need) -> (usize, Timestamp) {
    let tones = ["bad", "warn", "info"];
    (tones.iter().position(|tone| *tone == need.tone).unwrap_or(tones.len()), need.since)
}

fn with(scene: &Scene, look: Look) -> Vec<TaskId> {
    let tasks = scene.view.run.tasks.iter().zip(&scene.looks);
    tasks.filter(|(_, one)| **one == look).map(|(task, _)| task.task).collect()
}

fn count(number: usize, one: &str, many: &str) -> String {
    format!("{number} {}", if number == 1 { one } else { many })
}

/// The end of a run that did not end well, or the tasks that one has lost.
fn failed(scene: &Scene) -> Option<Need> {
    let run = &scene.view.run;
    let cause = run.first_cause.as_ref();
    if matches!(run.state, RunState::Failed | RunState::Abandoned) {
        let (text, told) = match cause {
            Some(cause) => {
                let whose = cause.task.map_or_else(String::new, |task| format!("task {task}: "));
                let (why, told) = look::told(&cause.error, &cause.why);
                (format!("First cause: {whose}{why}"), told)
            }
            None => {
                let reason = run.end_reason.as_deref().filter(|reason| !reason.is_empty());
                (crate::text::one_line(reason.unwrap_or("No cause is known.")).into_owned(), String::new())
            }
        };
        let title = format!(
            "Run {} {}",
            run.number,
            if run.state == RunState::Failed { "failed" } else { "was abandoned" }
        );
        let since = run.ended_at.unwrap_or(run.opened_at);
        let need = Need::plain(scene, "bad", title, text, since).telling(told).advised(
            "Read the log of the task that is named, at that time: what the others report came of it. The job may \
             form its next run at any time: nothing has to be reset here.",
            "/guide/night#failed",
        );
        return Some(match cause.and_then(|cause| cause.task) {
            Some(task) => need.about(scene, &[task]),
            None => need,
        });
    }
    let lost = with(scene, Look::Failed);
    let first = lost.iter().filter_map(|task| scene.task(*task)).min_by_key(|task| task.since)?;
    let error = first.error.as_deref().unwrap_or_default();
    let (why, told) = look::told(error, first.why.as_deref().unwrap_or_default());
    let text = if lost.len() > 1 { format!("First task {}: {why}", first.task) } else { why };
    let title = count(lost.len(), "task has failed", "tasks have failed");
    let mut order = lost.clone();
    order.sort_by_key(|task| scene.task(*task).map(|task| task.since));
    let need = Need::plain(scene, "bad", title, text, first.since).telling(told);
    let advice = "The run goes on without it until it comes back. See whether its scheduler restarts it; if its host \
                  is bad, exclude it.";
    Some(need.about(scene, &order).advised(advice, "/guide/states#failed"))
}

/// A task that is alive, and that the others wait for.
fn awaited(scene: &Scene) -> Option<Need> {
    let barriers = scene.barriers();
    let waits = |task: &TaskId| scene.look(*task) == Look::Awaited;
    let holds_up = |barrier: &&BarrierView| is_of_steps(barrier.kind) && barrier.missing.iter().any(waits);
    let barrier = barriers.into_iter().find(holds_up)?;
    let name = barrier_name(&barrier.id);
    let who = match &barrier.missing[..] {
        [one] => format!("task {one}"),
        many => format!("{} tasks", many.len()),
    };
    let (arrived, members) = (grouped(&barrier.arrived), grouped(&barrier.members));
    let title = format!("{arrived} of {members} tasks wait at {name} for {who}");
    let text =
        "Heartbeats alone will not end this: a task that is alive and does not come holds up the others.";
    let need = Need::plain(scene, "warn", title, text.into(), barrier.since);
    let advice = "Take a stack of its process (py-spy dump) before anything else; then restart it, or exclude it if the \
                  job can go on without it.";
    // Those that are lost have an entry of their own.
    let alive: Vec<TaskId> = barrier.missing.iter().copied().filter(waits).collect();
    Some(need.about(scene, &alive).advised(advice, "/guide/states#awaited"))
}

/// Whether tasks meet there between the steps of their program.
fn is_of_steps(kind: BarrierKind) -> bool {
    matches!(kind, BarrierKind::Client | BarrierKind::LiveSet)
}

#[derive(Template)]
#[template(path = "parts/needs.html")]
struct Needs<'a> {
    needs: &'a [Need],
    /// The needs of several jobs stand together: each says whose it is.
    whose: bool,
    /// What is said if there are none.
    calm: String,
}

/// What needs a person, as a part of a page.
pub(super) fn part(needs: &[Need], whose: bool, calm: String) -> Result<Part, Problem> {
    Part::new("needs", &Needs { needs, whose, calm })
}
