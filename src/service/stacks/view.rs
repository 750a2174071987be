//! The view of a job's latest request for stacks, which pages, REST and the command line share.
//!
//! Begin at [`StackCollector::view`].

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use super::answer::{StackFrame, StackSource};
use super::collector::{StackCollector, StackRequest};
use super::stack_groups::StackGroup;
use super::task_ranges::{TaskRange, TaskRanges};
use crate::coordination::{Actor, CommandReason, JobId, RunNumber, TaskId, TaskIncarnations, Timestamp};

/// The body of a request for stacks.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
#[schema(as = NewStackRequest)]
pub struct NewStackRequestBody {
    /// The tasks, such as `0-7,12`; all tasks if it is left out.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<String>)]
    pub tasks: Option<TaskRanges>,
    /// The reason: one line of at most 500 bytes.
    #[schema(value_type = String)]
    pub reason: CommandReason,
}

/// A request for stacks.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[schema(as = StackRequest)]
pub struct StackRequestView {
    /// Its number among the requests of the job, from 1.
    pub number: u64,
    /// The time of the request.
    pub at: Timestamp,
    /// The run whose tasks it asks.
    pub run: RunNumber,
    /// Tasks can still answer.
    pub open: bool,
    /// The author. For automatic requests it is the finding.
    pub actor: Actor,
    /// The reason.
    pub reason: CommandReason,
    /// The tasks that it asks.
    pub tasks: Vec<TaskRange>,
    /// The number of these tasks.
    pub task_count: usize,
}

/// Equal stacks, with the tasks that have them.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[schema(as = StackGroup)]
pub struct StackGroupView {
    /// Its position in the list of groups, from 1: first those of main threads, and of each kind those of most tasks.
    pub number: u64,
    /// The stacks are those of main threads.
    pub main: bool,
    /// The program that has read the stacks.
    pub source: StackSource,
    /// The frames, the outermost first.
    pub frames: Vec<StackFrame>,
    /// The number of outermost frames that were left out.
    pub frames_left_out: u32,
    /// The tasks.
    pub tasks: Vec<TaskRange>,
    /// The number of tasks.
    pub task_count: usize,
    /// Those of these tasks that have restarted since they answered, or have lost their connection: the stacks are of an
    /// earlier process.
    #[serde(default)]
    pub of_earlier_process: Vec<TaskRange>,
    /// The number of threads of these tasks.
    pub threads: usize,
    /// Names of these threads: the first four.
    pub thread_names: Vec<String>,
    /// The earliest time since which a thread has been in the innermost frame, if that is known.
    pub since: Option<Timestamp>,
}

impl StackGroupView {
    /// Returns where the threads are, in a few words: `load_batch (data.py:41)`.
    #[must_use]
    pub fn place_text(&self) -> String {
        place_text(&self.frames)
    }
}

/// The latest request for stacks of a job, and the answers to it.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[schema(as = Stacks)]
pub struct StacksView {
    /// The latest request; none if there was none.
    pub request: Option<StackRequestView>,
    /// The tasks that have answered.
    pub answered: Vec<TaskRange>,
    /// The tasks that can answer and have not.
    pub awaited: Vec<TaskRange>,
    /// The tasks that were asked and cannot answer: no helper and no worker of their present incarnation is known.
    pub without_helper: Vec<TaskRange>,
    /// The number of answers whose stacks were dropped for lack of memory.
    pub dropped: u64,
    /// The number of threads that tasks left out of their answers.
    pub threads_left_out: u64,
    /// The number of tasks of the present run that can answer.
    pub helpers: usize,
    /// The number of groups.
    pub group_count: usize,
    /// The number of groups of main threads, which come first.
    pub main_group_count: usize,
    /// A page of the groups of equal stacks.
    pub groups: Vec<StackGroupView>,
    /// The value of `after` for the next page; none on the last page.
    #[serde(default)]
    pub next: Option<u64>,
}

impl StackCollector {
    /// Returns the latest request of a job. `roster` has the present incarnations of the tasks. With `task`, only the
    /// groups of that task are returned, and of main threads and of others `most` groups each.
    #[must_use]
    pub fn view(
        &self,
        job: JobId,
        roster: &TaskIncarnations,
        now: Timestamp,
        task: Option<TaskId>,
        most: usize,
    ) -> StacksView {
        let jobs = self.lock_jobs();
        let Some(of_job) = jobs.get(&job) else { return StacksView::default() };
        let present = of_job
            .sources
            .iter()
            .filter(|((task, _), source)| source.is_present(roster.incarnation_of(*task)))
            .map(|((task, _), _)| *task);
        let present: BTreeSet<TaskId> = present.collect();
        let helpers = present.len();
        let Some(request) = &of_job.request else { return StacksView { helpers, ..StacksView::default() } };
        let answered: BTreeSet<TaskId> = request.answered.keys().map(|(task, _)| *task).collect();
        let asked = request_ranges(request);
        // Of an earlier run it is not known any more which tasks had a helper, so those without an answer have not answered.
        let missing = |task: &TaskId| !answered.contains(task);
        let is_open = request.is_open(roster.run, now);
        let in_run = request.run == roster.run;
        let (awaited, without): (Vec<TaskId>, Vec<TaskId>) =
            TaskRange::tasks(&asked).filter(missing).partition(|task| !in_run || present.contains(task));
        let groups = ordered_groups(request, task);
        StacksView {
            request: Some(StackRequestView {
                number: request.number,
                at: request.at,
                run: request.run,
                open: is_open,
                actor: request.by.actor.clone(),
                reason: request.by.reason.clone(),
                task_count: request.task_count(),
                tasks: asked,
            }),
            answered: TaskRange::compress(answered),
            awaited: TaskRange::compress(awaited),
            without_helper: TaskRange::compress(without),
            dropped: request.dropped,
            threads_left_out: request.answered.values().map(|it| u64::from(it.threads_left_out)).sum(),
            helpers,
            group_count: groups.len(),
            main_group_count: groups.iter().filter(|group| group.key.main).count(),
            groups: group_views(request, roster, &groups, most),
            next: None,
        }
    }
}

impl StackCollector {
    /// Returns where the main threads of these tasks were at the latest request. `tasks` has the tasks for which others
    /// wait, each with the time since which they wait: an earlier stack says nothing about that, and neither does the stack
    /// of an earlier process.
    #[must_use]
    pub fn places_of(
        &self,
        job: JobId,
        roster: &TaskIncarnations,
        tasks: &BTreeMap<TaskId, Timestamp>,
    ) -> BTreeMap<TaskId, String> {
        let jobs = self.lock_jobs();
        let request = jobs.get(&job).and_then(|of_job| of_job.request.as_ref());
        let Some(request) = request.filter(|request| request.run == roster.run) else {
            return BTreeMap::new();
        };
        let mut places = BTreeMap::new();
        let waited_for = |task: &TaskId| tasks.get(task).is_some_and(|since| *since <= request.at);
        for group in request.stacks.groups().iter().filter(|group| group.key.main) {
            let is_present = |task: &TaskId| request.is_of_present_process(*task, group.key.source, roster);
            for task in group.tasks.iter().filter(|task| waited_for(task) && is_present(task)) {
                // The stack of a Python program says more than the activity of a worker in it.
                if group.key.source == StackSource::Python || !places.contains_key(task) {
                    places.insert(*task, place_text(&group.key.frames));
                }
            }
        }
        places
    }
}

/// Returns the innermost frame of the program itself, and the innermost frame if that is another one.
fn place(frames: &[StackFrame]) -> (Option<&StackFrame>, Option<&StackFrame>) {
    let innermost = frames.last();
    let own = frames.iter().rev().find(|frame| frame.is_of_program());
    match (own, innermost) {
        (Some(own), Some(innermost)) if own == innermost => (Some(own), None),
        (None, innermost) => (innermost, None),
        other => other,
    }
}

/// Returns where a thread is, in a few words: `load_batch (data.py:41)`.
fn place_text(frames: &[StackFrame]) -> String {
    match place(frames) {
        (Some(own), Some(innermost)) => format!("{own}, in {innermost}"),
        (Some(own), None) => own.to_string(),
        (None, _) => "no frame".to_owned(),
    }
}

/// Returns the tasks that a request asks.
fn request_ranges(request: &StackRequest) -> Vec<TaskRange> {
    match &request.by.tasks {
        Some(tasks) => tasks.ranges().to_vec(),
        None => {
            let last = i32::try_from(request.job_tasks).unwrap_or(i32::MAX) - 1;
            TaskRange::compress((last >= 0).then_some(TaskId(0)))
                .into_iter()
                .map(|range| TaskRange { last: TaskId(last), ..range })
                .collect()
        }
    }
}

/// Returns the groups: first those of main threads, and of each kind those of most tasks.
fn ordered_groups(request: &StackRequest, task: Option<TaskId>) -> Vec<&StackGroup> {
    let has_task = |group: &&StackGroup| task.is_none_or(|task| group.tasks.binary_search(&task).is_ok());
    let mut groups: Vec<&StackGroup> = request.stacks.groups().iter().filter(has_task).collect();
    groups.sort_by_key(|group| {
        (Reverse(group.key.main), group.key.source, Reverse(group.tasks.len()), group.tasks.first().copied())
    });
    groups
}

/// Returns the first `most` groups of main threads, and of other threads.
fn group_views(
    request: &StackRequest,
    roster: &TaskIncarnations,
    groups: &[&StackGroup],
    most: usize,
) -> Vec<StackGroupView> {
    // The request of an earlier run names its run.
    let is_earlier = |group: &StackGroup, task: TaskId| {
        request.run == roster.run && !request.is_of_present_process(task, group.key.source, roster)
    };
    let mut left = [most; 2];
    let mut is_shown = |group: &StackGroup| {
        let left = &mut left[usize::from(group.key.main)];
        let is_shown = *left > 0;
        *left = left.saturating_sub(1);
        is_shown
    };
    let numbered = (1..).zip(groups.iter().copied()).filter(|(_, group)| is_shown(group));
    let view = |(number, group): (u64, &StackGroup)| StackGroupView {
        number,
        main: group.key.main,
        source: group.key.source,
        frames: group.key.frames.clone(),
        frames_left_out: group.frames_left_out,
        tasks: TaskRange::compress(group.tasks.iter().copied()),
        task_count: group.tasks.len(),
        of_earlier_process: TaskRange::compress(
            group.tasks.iter().copied().filter(|task| is_earlier(group, *task)),
        ),
        threads: group.threads,
        thread_names: group.thread_names.clone(),
        since: group.since,
    };
    numbered.map(view).collect()
}
