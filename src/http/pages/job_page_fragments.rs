//! Selects, for a page of a job that follows updates, the function that renders the page's fragments.
//!
//! The module of each page has this function, and `live.rs` sends the fragments. Begin at
//! `render_job_page_fragments`.

use std::sync::Arc;

use super::drain::DrainForm;
use super::fragment::Fragment;
use super::frame::PageUser;
use super::live_page::LivePage;
use super::snapshot::JobSnapshot;
use super::{
    barriers, collectives, devices, drain, exclusions, host, hosts, job, job_head, keys, stacks, task,
    timeline, transfers,
};
use crate::coordination::TaskId;
use crate::http::{AppState, Problem};

/// Returns the fragments of a page of a job. Viewers share them, except for fragments that are made for one user.
pub(super) fn render_job_page_fragments(
    page: &LivePage,
    site: &AppState,
    snapshot: &JobSnapshot,
    user: &PageUser,
) -> Result<Arc<Vec<Fragment>>, Problem> {
    let shared = |make: &dyn Fn() -> Result<Vec<Fragment>, Problem>| {
        snapshot.cached_or_rendered_fragments(&page.to_query(), make)
    };
    match page {
        LivePage::Job(table) => shared(&|| job::render_fragments(snapshot, table)),
        LivePage::Hosts(which) => shared(&|| hosts::render_fragments(snapshot, which)),
        LivePage::Timeline(which) => shared(&|| timeline::render_fragments(snapshot, which)),
        LivePage::Barriers(which) => shared(&|| barriers::render_fragments(snapshot, which)),
        LivePage::Collectives(which) => shared(&|| collectives::render_fragments(site, snapshot, which)),
        LivePage::Stacks => shared(&|| stacks::render_fragments(snapshot)),
        LivePage::Transfers(filter) => shared(&|| transfers::render_fragments(snapshot, filter)),
        LivePage::Keys(which) => shared(&|| keys::render_fragments(site, snapshot, which)),
        LivePage::Devices(which) => devices::render_fragments_for_user(site, snapshot, user, which),
        // Fragments with forms are made for one user.
        LivePage::Task { task } => {
            let task = task.parse().map_or(TaskId(-1), TaskId);
            Ok(Arc::new(task::render_fragments(site, snapshot, user, task)?.unwrap_or_default()))
        }
        LivePage::Host { host } => {
            Ok(Arc::new(host::render_fragments(snapshot, user, host)?.unwrap_or_default()))
        }
        LivePage::Drain => drain::render_fragments(snapshot, user, DrainForm::default()).map(Arc::new),
        LivePage::Exclusions => exclusions::render_fragments(site, snapshot, user).map(Arc::new),
        LivePage::Overview | LivePage::Audit(_) | LivePage::Head => {
            shared(&|| Ok(vec![job_head::render_head_fragment(snapshot)?]))
        }
    }
}
