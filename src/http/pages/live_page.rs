//! The pages that receive live updates. Each has a query that selects its fragments. This module writes and parses
//! the addresses of the streams.
//!
//! `live.rs` sends the updates, and each page renders its own fragments. Begin at [`LivePage`].

use std::sync::Arc;

use serde::{Deserialize, Serialize};

use super::audit::AuditPageQuery;
use super::devices::DevicesPageQuery;
use super::drain::DrainForm;
use super::fragment::Fragment;
use super::frame::PageUser;
use super::keys::KeysPageQuery;
use super::snapshot::JobSnapshot;
use super::task_table::TaskTableQuery;
use super::timeline::TimelinePageQuery;
use super::transfers::PairFilter;
use super::{barriers, devices, drain, exclusions, job, keys, task, timeline, transfers};
use crate::coordination::TaskId;
use crate::http::{AppState, Problem};

/// A page that follows updates. All its values are texts, as in an address; the page parses them.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "page", rename_all = "kebab-case")]
pub(super) enum LivePage {
    Overview,
    Audit(AuditPageQuery),
    Job(TaskTableQuery),
    Timeline(TimelinePageQuery),
    Barriers,
    Task {
        #[serde(default)]
        task: String,
    },
    Devices(DevicesPageQuery),
    Transfers(PairFilter),
    Keys(KeysPageQuery),
    Drain,
    Exclusions,
    /// Any other page of a job: it follows the state of the job in its head.
    #[serde(other)]
    Head,
}

/// The query of a stream's address.
#[derive(Debug, Deserialize)]
pub(super) struct LiveStreamQuery {
    /// The digests of the fragments that the page has: `id:digest,…`.
    #[serde(default)]
    pub have: String,
    /// The page; none if the address names no page.
    #[serde(flatten)]
    pub page: Option<LivePage>,
}

impl LivePage {
    /// Returns the query of the address at which the page follows updates.
    pub fn to_query(&self) -> String {
        // Strings always serialize.
        serde_urlencoded::to_string(self).unwrap_or_default()
    }

    /// Returns the page that a query names.
    #[cfg(test)]
    fn from_query(query: &str) -> Option<Self> {
        serde_urlencoded::from_str::<LiveStreamQuery>(query).ok()?.page
    }

    /// Returns the fragments of a page of a job. Viewers share them, except for fragments that are made for one user.
    pub fn render_fragments(
        &self,
        site: &AppState,
        snapshot: &JobSnapshot,
        user: &PageUser,
    ) -> Result<Arc<Vec<Fragment>>, Problem> {
        let shared = |make: &dyn Fn() -> Result<Vec<Fragment>, Problem>| {
            snapshot.cached_fragments(&self.to_query(), make)
        };
        match self {
            Self::Job(table) => shared(&|| job::render_fragments(snapshot, table)),
            Self::Timeline(which) => shared(&|| timeline::render_fragments(snapshot, which)),
            Self::Barriers => shared(&|| barriers::render_fragments(snapshot)),
            Self::Transfers(filter) => shared(&|| transfers::render_fragments(snapshot, filter)),
            Self::Keys(which) => shared(&|| keys::render_fragments(site, snapshot, which)),
            Self::Devices(which) => {
                let parts = shared(&|| devices::render_fragments(site, snapshot, which))?;
                devices::add_orbax_fragment(site, snapshot, user, parts)
            }
            // Fragments with forms are made for one user.
            Self::Task { task } => {
                let task = task.parse().map_or(TaskId(-1), TaskId);
                Ok(Arc::new(task::render_fragments(site, snapshot, user, task)?.unwrap_or_default()))
            }
            Self::Drain => drain::render_fragments(snapshot, user, DrainForm::default()).map(Arc::new),
            Self::Exclusions => exclusions::render_fragments(site, snapshot, user).map(Arc::new),
            Self::Overview | Self::Audit(_) | Self::Head => {
                shared(&|| Ok(vec![job::render_head_fragment(snapshot)?]))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the page that follows this one in the list of all pages.
    fn next(page: &LivePage) -> Option<LivePage> {
        let odd = || "a&b=c +%2F/ü\"".to_owned();
        Some(match page {
            LivePage::Overview => LivePage::Audit(AuditPageQuery { job: odd(), outcome: "done".into() }),
            LivePage::Audit(_) => LivePage::Job(TaskTableQuery {
                state: "trouble".into(),
                find: odd(),
                sort: "score".into(),
                down: "1".into(),
                page: "3".into(),
            }),
            LivePage::Job(_) => LivePage::Timeline(TimelinePageQuery { task: "7".into() }),
            LivePage::Timeline(_) => LivePage::Barriers,
            LivePage::Barriers => LivePage::Task { task: "7".into() },
            LivePage::Task { .. } => {
                LivePage::Devices(DevicesPageQuery { task: odd(), fate: "moved".into() })
            }
            LivePage::Devices(_) => {
                LivePage::Transfers(PairFilter { task: "7".into(), transport: "tcp".into() })
            }
            LivePage::Transfers(_) => {
                LivePage::Keys(KeysPageQuery { prefix: "a%20b%2F%FF".into(), after: odd() })
            }
            LivePage::Keys(_) => LivePage::Drain,
            LivePage::Drain => LivePage::Exclusions,
            LivePage::Exclusions => LivePage::Head,
            LivePage::Head => return None,
        })
    }

    #[test]
    fn every_page_reads_back_from_the_address_of_its_stream() {
        let pages = std::iter::successors(Some(LivePage::Overview), next);
        for page in pages {
            let query = page.to_query();
            assert_eq!(LivePage::from_query(&query), Some(page.clone()), "{query}");
            // The script adds what the page has.
            let more = format!("{query}&have=head%3A0123%2Ctasks%3A4567");
            let asked: LiveStreamQuery = serde_urlencoded::from_str(&more).unwrap();
            assert_eq!((asked.page, &*asked.have), (Some(page), "head:0123,tasks:4567"), "{more}");
        }
    }

    #[test]
    fn an_address_may_leave_out_what_has_a_default() {
        for (query, page) in [
            ("page=job", Some(LivePage::Job(TaskTableQuery::default()))),
            (
                "page=devices&fate=moved",
                Some(LivePage::Devices(DevicesPageQuery { fate: "moved".into(), ..Default::default() })),
            ),
            ("page=task", Some(LivePage::Task { task: String::new() })),
            ("page=nothing&task=3", Some(LivePage::Head)),
            ("", None),
        ] {
            assert_eq!(LivePage::from_query(query), page, "{query}");
        }
        assert_eq!(
            LivePage::Job(TaskTableQuery { page: "2".into(), ..Default::default() }).to_query(),
            "page=job&rows=2"
        );
    }
}
