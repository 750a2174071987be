//! The views of collectives that pages, REST, findings and the command line share.
//!
//! Each of them reads the reports of a job once. Begin at [`CollectiveReports::view`] and
//! [`CollectiveReports::find_troubles`].

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use muster_collectives::{Collective, CollectiveFunction, clique_name};
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use super::analysis::{CliqueWait, RankReport, WaitKind, find_slow_rank};
use super::judged_cliques::{JudgedClique, TaskNames, judge};
use super::ras_view::{CliqueRasView, RasView};
use super::report_store::{CollectiveReports, ReportedClique, silent_after};
use super::wait_graph::WaitRole;
use super::wait_text::{collective_text, describe_ras, describe_wait};
use crate::coordination::{JobId, TaskId, Timestamp};
use crate::engine::Engine;
use crate::service::stacks::TaskRange;

/// A collective.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[schema(as = Collective)]
pub struct CollectiveView {
    /// NCCL's name of the function, such as `AllReduce`.
    pub function: String,
    /// The type of the elements, such as `float32`.
    pub data_type: String,
    /// The number of elements.
    pub count: u64,
    /// The count times the size of an element.
    pub bytes: u64,
    /// The root of functions that have one.
    pub root: i32,
}

impl CollectiveView {
    fn new(operation: &Collective) -> Self {
        Self {
            function: operation.function.name().to_owned(),
            data_type: operation.data_type.name().to_owned(),
            count: operation.count,
            bytes: operation.bytes(),
            root: operation.root,
        }
    }

    /// Returns it in a few words: `AllReduce of 4 MiB float32`.
    #[must_use]
    pub fn text(&self) -> String {
        collective_text(&self.function, self.bytes, &self.data_type)
    }
}

/// The totals of a function on a clique.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
#[schema(as = CliqueFunction)]
pub struct CliqueFunctionView {
    /// NCCL's name of the function.
    pub function: String,
    /// The most that a rank has enqueued.
    pub operations: u64,
    /// The bytes that this rank has enqueued.
    pub bytes: u64,
    /// The time of the GPUs in them, in seconds, of all ranks together; only of those that were timed.
    pub gpu_s: f64,
    /// The bus bandwidth, in bytes a second; none if none were timed.
    pub bus_bytes_per_s: Option<f64>,
}

/// One rank of a clique.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
#[schema(as = CliqueMember)]
pub struct CliqueMemberView {
    /// The rank.
    pub rank: u32,
    /// Its task, if that is known.
    #[schema(value_type = Option<i32>)]
    pub task: Option<TaskId>,
    /// The device by its number in the whole job, if that is known.
    pub device: Option<i32>,
    /// The host of its process, by its own name.
    pub host: String,
    /// Its process.
    pub pid: u32,
    /// The number of collectives that its program has called.
    pub collectives: u64,
    /// How many fewer that are than those of the rank that has called most.
    pub behind: u64,
    /// When it called, began or ended one last.
    pub changed_at: Timestamp,
    /// When its process was heard last.
    pub heard_at: Timestamp,
    /// The process reports nothing any more.
    pub silent: bool,
    /// The other ranks wait for this one.
    pub waited_for: bool,
    /// The last collective that its program has called.
    pub latest: Option<CollectiveView>,
}

/// A clique: the communicators of all its ranks.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
#[schema(as = Clique)]
pub struct CliqueView {
    /// Its position in the list, from 1: those that wait first.
    pub number: u64,
    /// NCCL's hash of the unique id, as 16 digits.
    pub clique: String,
    /// The name that the program gave it; often empty.
    pub name: String,
    /// The number of ranks.
    pub ranks: u32,
    /// The number of ranks that have reported. The others were never heard.
    pub reported: usize,
    /// The number of hosts.
    pub hosts: u32,
    /// Its tasks, as far as they are known.
    pub tasks: Vec<TaskRange>,
    /// The most and the fewest collectives that a rank has called.
    pub front: u64,
    /// See `front`.
    pub back: u64,
    /// When a rank called, began or ended a collective last.
    pub changed_at: Timestamp,
    /// How its ranks wait; none while they advance.
    pub wait: Option<CliqueWaitView>,
    /// A rank for which the others wait in most collectives.
    pub slow: Option<SlowRankView>,
    /// The functions that were used.
    pub functions: Vec<CliqueFunctionView>,
    /// The report of RAS, NCCL's own monitoring; requested while the clique looks stuck or lacks reports.
    pub ras: Option<CliqueRasView>,
    /// The ranks, in a view of one clique.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub members: Vec<CliqueMemberView>,
}

impl CliqueView {
    /// Returns whether its ranks send and receive, which is counted and not judged.
    #[must_use]
    pub fn has_sends(&self) -> bool {
        let is_send = |row: &CliqueFunctionView| {
            CollectiveFunction::from_name(row.function.as_bytes()).is_point_to_point()
        };
        self.functions.iter().any(is_send)
    }
}

/// How the ranks of a clique wait.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
#[schema(as = CliqueWait)]
pub struct CliqueWaitView {
    /// How the ranks that are waited for differ from the others.
    pub kind: WaitKind,
    /// Its place among all cliques that wait.
    pub role: WaitRole,
    /// Since when nothing has happened that could end the wait.
    pub since: Timestamp,
    /// For how long the wait is known to last, in seconds: until the last report of the ranks that are waited for, if they are heard.
    pub waited_s: f64,
    /// The number of the collective, from 0.
    pub number: u64,
    /// The collective, if it is known.
    pub collective: Option<CollectiveView>,
    /// The collective that the awaited ranks have enqueued instead.
    pub instead: Option<CollectiveView>,
    /// The ranks that are waited for; empty if none differs from the others.
    pub waited_for: Vec<u32>,
    /// Their tasks, as far as they are known.
    pub tasks: Vec<TaskRange>,
    /// Begin and end on the GPUs are known, so that these ranks are the certain cause.
    pub certain: bool,
    /// A sentence about it.
    pub summary: String,
}

/// A rank that is late at most collectives.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
#[schema(as = SlowRank)]
pub struct SlowRankView {
    /// The rank.
    pub rank: u32,
    /// Its task, if that is known.
    #[schema(value_type = Option<i32>)]
    pub task: Option<TaskId>,
    /// How long the others wait for it in a collective, in seconds.
    pub lateness_s: f64,
}

/// The collectives of a job.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize, ToSchema)]
#[schema(as = Collectives)]
pub struct CollectivesView {
    /// The number of processes that report.
    pub processes: usize,
    /// The number of processes that ask NCCL for times on the GPU.
    pub timed_processes: usize,
    /// The number of communicators that had no room in the records of their processes.
    pub communicators_not_recorded: u64,
    /// The wait from which there is a finding, in seconds.
    pub stuck_after_s: f64,
    /// The last answer of RAS, NCCL's own monitoring, if it was asked in the last two minutes.
    pub ras: Option<RasView>,
    /// The number of cliques, and of those of them that wait.
    pub clique_count: usize,
    /// See `clique_count`.
    pub waiting_count: usize,
    /// A page of the cliques.
    pub cliques: Vec<CliqueView>,
    /// The value of `after` for the next page; none on the last page.
    #[serde(default)]
    pub next: Option<u64>,
}

/// A clique that waits too long.
#[derive(Debug, Clone, PartialEq)]
pub struct StuckCliqueView {
    /// NCCL's hash of the unique id, as 16 digits.
    pub clique: String,
    /// How it waits.
    pub wait: CliqueWaitView,
    /// The sentence about it without the tasks that hold it up.
    pub summary_without_tasks: String,
    /// The tasks that hold it up.
    pub tasks: Vec<TaskId>,
    /// The number of other cliques that wait, whatever for.
    pub others: usize,
    /// The evidence suffices to exclude the task: the times on the GPU are known, exactly one task holds up the clique and waits in
    /// no other one, and the clique has a key of XLA in the job's key-value store. A peer that only sends reports cannot invent that key.
    pub may_exclude: bool,
}

/// The troubles of a job's collectives, all at one moment.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct CollectiveTroubles {
    /// The cliques that wait too long and do not follow from others, the oldest wait first.
    pub stuck: Vec<StuckCliqueView>,
    /// The ranks for which the others wait in most collectives, with their cliques.
    pub slow: Vec<(String, SlowRankView)>,
}

fn task_ranges(tasks: impl Iterator<Item = Option<TaskId>>) -> Vec<TaskRange> {
    TaskRange::compress(tasks.flatten().collect::<BTreeSet<TaskId>>())
}

fn wait_view(
    names: &TaskNames<'_>,
    clique: &ReportedClique<'_>,
    (wait, role): &(CliqueWait, WaitRole),
    now: Timestamp,
) -> CliqueWaitView {
    CliqueWaitView {
        kind: wait.kind,
        role: *role,
        since: wait.since,
        waited_s: wait.lasted(now).as_secs_f64(),
        number: wait.number,
        collective: wait.operation.as_ref().map(CollectiveView::new),
        instead: wait.instead.as_ref().map(CollectiveView::new),
        tasks: task_ranges(wait.ranks.iter().map(|rank| names.task(clique, *rank))),
        waited_for: wait.ranks.clone(),
        certain: wait.is_timed,
        summary: describe_wait(names, clique, wait, true) + &describe_ras(wait, names.ras(clique, now)),
    }
}

#[expect(clippy::cast_precision_loss, reason = "a figure for people")]
fn function_views(clique: &ReportedClique<'_>) -> Vec<CliqueFunctionView> {
    #[derive(Default)]
    struct Sums {
        operations: u64,
        bytes: u64,
        gpu_s: f64,
        bus_bytes: f64,
    }
    let mut all = BTreeMap::<CollectiveFunction, Sums>::new();
    for row in clique.members.values().flat_map(|report| &report.communicator.functions) {
        let sums = all.entry(row.function).or_default();
        if row.enqueued >= sums.operations {
            (sums.operations, sums.bytes) = (row.enqueued, row.bytes);
        }
        sums.gpu_s += row.gpu_ns as f64 / 1e9;
        sums.bus_bytes += row.function.bus_bytes(row.timed_bytes, clique.ranks);
    }
    let view = |(function, sums): (CollectiveFunction, Sums)| CliqueFunctionView {
        function: function.name().to_owned(),
        operations: sums.operations,
        bytes: sums.bytes,
        gpu_s: sums.gpu_s,
        bus_bytes_per_s: (sums.gpu_s > 0.0).then(|| sums.bus_bytes / sums.gpu_s),
    };
    all.into_iter().map(view).collect()
}

fn member_views(
    names: &TaskNames<'_>,
    clique: &ReportedClique<'_>,
    front: u64,
    waited_for: &[u32],
) -> Vec<CliqueMemberView> {
    let key = names.key(clique);
    let view = |(rank, report): (&u32, &RankReport<'_>)| {
        let process = names.of_job.processes.get(&report.process)?;
        let communicator = report.communicator;
        let latest = communicator.operations.last();
        let latest = latest.filter(|latest| latest.number.checked_add(1) == Some(communicator.collectives));
        Some(CliqueMemberView {
            rank: *rank,
            task: names.task(clique, *rank),
            device: key.and_then(|key| key.devices.get(*rank as usize).copied()),
            host: process.report.host.clone(),
            pid: process.report.pid,
            collectives: communicator.collectives,
            behind: front.saturating_sub(communicator.collectives),
            changed_at: communicator.changed_at,
            heard_at: report.heard_at,
            silent: report.is_silent,
            waited_for: waited_for.binary_search(rank).is_ok(),
            latest: latest.map(|latest| CollectiveView::new(&latest.operation)),
        })
    };
    clique.members.iter().filter_map(view).collect()
}

fn slow_rank_view(names: &TaskNames<'_>, clique: &ReportedClique<'_>) -> Option<SlowRankView> {
    let slow = find_slow_rank(&names.of_job.windows_of(clique))?;
    Some(SlowRankView { rank: slow.rank, task: names.task(clique, slow.rank), lateness_s: slow.lateness_s })
}

fn clique_view(
    names: &TaskNames<'_>,
    judged: &JudgedClique<'_>,
    (number, with_members): (u64, bool),
    now: Timestamp,
) -> CliqueView {
    let clique = &judged.clique;
    let communicators = || clique.members.values().map(|report| report.communicator);
    let wait = judged.wait.as_ref().map(|wait| wait_view(names, clique, wait, now));
    let front = communicators().map(|it| it.collectives).max().unwrap_or_default();
    let waited_for = wait.as_ref().map_or(&[][..], |wait| &wait.waited_for);
    let members = if with_members { member_views(names, clique, front, waited_for) } else { Vec::new() };
    CliqueView {
        number,
        clique: clique_name(clique.hash),
        name: communicators().find(|it| !it.name.is_empty()).map(|it| it.name.clone()).unwrap_or_default(),
        ranks: clique.ranks,
        reported: clique.members.len(),
        hosts: communicators().map(|it| it.nodes).max().unwrap_or_default(),
        tasks: match names.key(clique) {
            Some(key) => task_ranges(key.tasks.iter().copied()),
            None => task_ranges(clique.members.keys().map(|rank| names.task(clique, *rank))),
        },
        front,
        back: communicators().map(|it| it.collectives).min().unwrap_or_default(),
        changed_at: communicators().map(|it| it.changed_at).max().unwrap_or_default(),
        slow: slow_rank_view(names, clique),
        functions: function_views(clique),
        ras: CliqueRasView::new(names, clique, now),
        members,
        wait,
    }
}

/// The reports of a job at a moment, with what follows from them.
struct JudgedJob<'a> {
    names: TaskNames<'a>,
    /// Those that wait first.
    cliques: Vec<JudgedClique<'a>>,
    silent_after: Duration,
    now: Timestamp,
}

impl JudgedJob<'_> {
    fn clique_views(&self) -> Vec<CliqueView> {
        (1..)
            .zip(&self.cliques)
            .map(|(number, judged)| clique_view(&self.names, judged, (number, false), self.now))
            .collect()
    }

    /// Returns a clique with its ranks; `None` if no process reports it any more.
    fn clique_view_with_members(&self, hash: u64) -> Option<CliqueView> {
        let (number, judged) = (1..).zip(&self.cliques).find(|(_, judged)| judged.clique.hash == hash)?;
        Some(clique_view(&self.names, judged, (number, true), self.now))
    }

    fn waiting_count(&self) -> usize {
        self.cliques.iter().filter(|judged| judged.wait.is_some()).count()
    }

    fn view(&self, stuck_after: Duration) -> CollectivesView {
        let processes = self.names.of_job.processes.values();
        let heard = || processes.clone().filter(|it| self.now.since(it.heard_at) <= self.silent_after);
        CollectivesView {
            processes: heard().count(),
            timed_processes: heard().filter(|it| it.report.is_timed).count(),
            communicators_not_recorded: heard()
                .map(|it| it.report.communicators_not_recorded)
                .fold(0, u64::saturating_add),
            stuck_after_s: stuck_after.as_secs_f64(),
            ras: self.names.of_job.ras.answer_or_failure(self.now).map(RasView::new),
            clique_count: self.cliques.len(),
            waiting_count: self.waiting_count(),
            cliques: self.clique_views(),
            next: None,
        }
    }

    fn troubles(&self, stuck_after: Duration) -> CollectiveTroubles {
        let stuck = self.cliques.iter().filter_map(|judged| {
            let found = judged.wait.as_ref().filter(|(wait, role)| {
                *role != WaitRole::Consequence && wait.lasted(self.now) >= stuck_after
            })?;
            let wait = wait_view(&self.names, &judged.clique, found, self.now);
            let tasks: Vec<TaskId> = TaskRange::tasks(&wait.tasks).collect();
            Some(StuckCliqueView {
                clique: clique_name(judged.clique.hash),
                summary_without_tasks: describe_wait(&self.names, &judged.clique, &found.0, false)
                    + &describe_ras(&found.0, self.names.ras(&judged.clique, self.now)),
                may_exclude: wait.certain
                    && wait.role == WaitRole::Cause
                    && tasks.len() == 1
                    && self.names.key(&judged.clique).is_some(),
                tasks,
                wait,
                others: self.waiting_count() - 1,
            })
        });
        let slow = self.cliques.iter().filter_map(|judged| {
            Some((clique_name(judged.clique.hash), slow_rank_view(&self.names, &judged.clique)?))
        });
        CollectiveTroubles { stuck: stuck.collect(), slow: slow.collect() }
    }
}

impl CollectiveReports {
    /// Calls `look` with the reports of a job, judged once; `None` if no process of it has reported.
    fn look_at_judged_job<T>(
        &self,
        engine: &Engine,
        job: JobId,
        tasks: usize,
        look: impl FnOnce(&JudgedJob<'_>) -> T,
    ) -> Option<T> {
        self.look(engine, job, |of_job, now| {
            let (names, silent_after) = (TaskNames::new(of_job), silent_after(tasks));
            let cliques = judge(of_job, &names, silent_after, now);
            look(&JudgedJob { names, cliques, silent_after, now })
        })
    }

    /// Returns the collectives of a job, with all its cliques: those that wait first.
    #[must_use]
    pub fn view(&self, engine: &Engine, job: JobId, tasks: usize) -> CollectivesView {
        let stuck_after = self.stuck_after();
        let view = self.look_at_judged_job(engine, job, tasks, |judged| judged.view(stuck_after));
        view.unwrap_or_else(|| empty_view(stuck_after))
    }

    /// Returns the same, and the clique that `choose` names with its ranks; both at one moment.
    #[must_use]
    pub fn view_with_clique(
        &self,
        engine: &Engine,
        job: JobId,
        tasks: usize,
        choose: impl FnOnce(&CollectivesView) -> Option<u64>,
    ) -> (CollectivesView, Option<CliqueView>) {
        let stuck_after = self.stuck_after();
        let found = self.look_at_judged_job(engine, job, tasks, |judged| {
            let view = judged.view(stuck_after);
            let clique = choose(&view).and_then(|hash| judged.clique_view_with_members(hash));
            (view, clique)
        });
        found.unwrap_or_else(|| (empty_view(stuck_after), None))
    }

    /// Returns one clique with its ranks; `None` if no process reports it any more.
    #[must_use]
    pub fn clique(&self, engine: &Engine, job: JobId, tasks: usize, hash: u64) -> Option<CliqueView> {
        self.look_at_judged_job(engine, job, tasks, |judged| judged.clique_view_with_members(hash)).flatten()
    }

    /// Returns what should be told of the collectives of a job.
    #[must_use]
    pub fn find_troubles(&self, engine: &Engine, job: JobId, tasks: usize) -> CollectiveTroubles {
        let stuck_after = self.stuck_after();
        let found = self.look_at_judged_job(engine, job, tasks, |judged| judged.troubles(stuck_after));
        found.unwrap_or_default()
    }
}

fn empty_view(stuck_after: Duration) -> CollectivesView {
    CollectivesView { stuck_after_s: stuck_after.as_secs_f64(), ..CollectivesView::default() }
}
