//! Renders the head of every page of a job: the line with the job's state, below the job's name.
//!
//! Begin at `render_head_fragment`.

use askama::Template;

use super::fragment::Fragment;
use super::snapshot::JobSnapshot;
use super::{amount, status, times};
use crate::coordination::{JobView, RunNumber};
use crate::http::Problem;

/// The state of a job, in the line below its name on every page of the job.
#[derive(Template)]
#[template(path = "parts/head.html")]
struct JobHeadFragment<'a> {
    view: &'a JobView,
    total: usize,
    out: usize,
    excluded: usize,
    is_unregistered: bool,
    previous_run: Option<RunNumber>,
}

impl JobHeadFragment<'_> {
    /// Returns the share of live tasks, in percent.
    fn live_percent(&self) -> usize {
        self.view.run.live * 100 / self.total.max(1)
    }
}

/// Returns the head as a fragment of a page.
pub(super) fn render_head_fragment(snapshot: &JobSnapshot) -> Result<Fragment, Problem> {
    let run = &snapshot.view.run;
    let excluded = run.counts.excluded;
    let nobody = run.tasks.iter().all(|task| task.lives.is_empty());
    let (view, total) = (&snapshot.view, snapshot.task_count());
    let out = total.saturating_sub(run.live);
    let previous_run = snapshot.previous_run().map(|previous| previous.number);
    Fragment::new(
        "head",
        &JobHeadFragment { view, total, out, excluded, is_unregistered: nobody, previous_run },
    )
}
