//! The pages that receive live updates. The query of a page selects its fragments. This module writes and parses
//! the addresses of the streams.
//!
//! `live.rs` sends the updates, and `job_page_fragments.rs` renders the fragments. Begin at [`LivePage`].

use std::collections::BTreeMap;

use serde::de::value::MapDeserializer;
use serde::{Deserialize, Deserializer, Serialize};

/// A page that follows updates. All its values are texts, as in an address; the page parses them.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "page", rename_all = "kebab-case")]
pub(super) enum LivePage {
    Overview,
    Audit(AuditPageQuery),
    Job(TaskTableQuery),
    Hosts(HostsPageQuery),
    Host {
        #[serde(default)]
        host: String,
    },
    Timeline(TimelinePageQuery),
    Barriers(BarriersPageQuery),
    Collectives(CollectivesPageQuery),
    Stacks,
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
    Head,
}

/// The query parameters of the page of the audit.
#[derive(Debug, Default, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub(super) struct AuditPageQuery {
    pub job: String,
    pub outcome: String,
}

/// The query parameters of the table of tasks: filter, order and page.
#[derive(Debug, Default, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub(super) struct TaskTableQuery {
    /// The status to show; `trouble` for all but connected tasks.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub state: String,
    /// The text that number, address, incarnation or barrier must contain.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub find: String,
    /// The column by which rows are sorted.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub sort: String,
    /// Set for descending order.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub down: String,
    /// The page, counted from 1; `rows` in the address of a stream, where `page` names the page itself.
    #[serde(rename = "rows", alias = "page", skip_serializing_if = "String::is_empty")]
    pub page: String,
    /// The number of a task: the picture shows only the tasks near to it.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub around: String,
}

/// The query parameters of the page of hosts.
#[derive(Debug, Default, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub(super) struct HostsPageQuery {
    /// The state of the hosts in the table.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub state: String,
    /// The text that name or address must contain, or the number of a task.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub find: String,
    /// The meaning of the picture's colours: `lateness`, or else the state.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub by: String,
}

/// The query parameters of the page of barriers.
#[derive(Debug, Default, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub(super) struct BarriersPageQuery {
    /// The id of the barrier to which the picture is limited.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub barrier: String,
    /// The use that is opened: run, counter and id of the barrier, with slashes between.
    #[serde(rename = "open", skip_serializing_if = "String::is_empty")]
    pub opened: String,
    /// The rows of the opened use: `task`, or else hosts.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub by: String,
    /// The scale of the picture: `own`, or else one for all rows.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub scale: String,
}

/// The query parameters of the page of collectives.
#[derive(Debug, Default, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub(super) struct CollectivesPageQuery {
    /// The clique whose ranks are shown; by default the one that waits longest.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub clique: String,
}

/// The query parameters of the page of the timeline.
#[derive(Debug, Default, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub(super) struct TimelinePageQuery {
    /// The task to which the page is limited.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub task: String,
    /// The kind of event to which the list is limited.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub kind: String,
    /// The rows of the picture: `task`, or else hosts.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub by: String,
    /// The beginning and the end of the shown time, in microseconds since the Unix epoch; without them the whole run.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub from: String,
    #[serde(skip_serializing_if = "String::is_empty")]
    pub until: String,
    /// The page of rows, counted from 1.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub rows: String,
}

impl TimelinePageQuery {
    /// Returns the query of the page's address.
    pub fn to_query(&self) -> String {
        // Strings always serialize.
        serde_urlencoded::to_string(self).unwrap_or_default()
    }
}

/// The query parameters of the page of devices.
#[derive(Debug, Default, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub(super) struct DevicesPageQuery {
    pub task: String,
    pub fate: String,
}

/// The query parameters that filter pairs.
#[derive(Debug, Default, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub(super) struct PairFilter {
    #[serde(skip_serializing_if = "String::is_empty")]
    pub task: String,
    #[serde(skip_serializing_if = "String::is_empty")]
    pub transport: String,
    /// The meaning of the picture's colours: `rate`, or else the bytes.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub by: String,
}

/// The query parameters of the page of keys.
#[derive(Debug, Default, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub(super) struct KeysPageQuery {
    /// The directory, percent-encoded twice, because keys need not be text.
    pub prefix: String,
    pub after: String,
}

/// The query of a stream's address. An unknown page is refused.
#[derive(Debug)]
pub(super) struct LiveStreamQuery {
    /// The digests of the fragments that the page has: `id:digest,…`.
    pub have: String,
    /// The page; none if the address names no page.
    pub page: Option<LivePage>,
}

impl<'de> Deserialize<'de> for LiveStreamQuery {
    fn deserialize<D: Deserializer<'de>>(query: D) -> Result<Self, D::Error> {
        let mut values = BTreeMap::<String, String>::deserialize(query)?;
        let have = values.remove("have").unwrap_or_default();
        // A flattened `Option<LivePage>` would take an unknown page for none.
        let is_named = values.contains_key("page");
        let page = is_named.then(|| LivePage::deserialize(MapDeserializer::new(values.into_iter())));
        Ok(Self { have, page: page.transpose()? })
    }
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
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the page that follows this one in the list of all pages.
    fn next_page_kind(page: &LivePage) -> Option<LivePage> {
        let odd = || "a&b=c +%2F/ü\"".to_owned();
        Some(match page {
            LivePage::Overview => LivePage::Audit(AuditPageQuery { job: odd(), outcome: "done".into() }),
            LivePage::Audit(_) => LivePage::Job(TaskTableQuery {
                state: "trouble".into(),
                find: odd(),
                sort: "score".into(),
                down: "1".into(),
                page: "3".into(),
                around: "7".into(),
            }),
            LivePage::Job(_) => {
                LivePage::Hosts(HostsPageQuery { state: "down".into(), find: odd(), by: "lateness".into() })
            }
            LivePage::Hosts(_) => LivePage::Host { host: odd() },
            LivePage::Host { .. } => LivePage::Timeline(TimelinePageQuery {
                kind: "task-failed".into(),
                task: "7".into(),
                by: "task".into(),
                from: "1".into(),
                until: "2".into(),
                rows: "3".into(),
            }),
            LivePage::Timeline(_) => LivePage::Barriers(BarriersPageQuery {
                barrier: odd(),
                opened: "1/2/step".into(),
                by: "task".into(),
                scale: "own".into(),
            }),
            LivePage::Barriers(_) => LivePage::Collectives(CollectivesPageQuery { clique: odd() }),
            LivePage::Collectives(_) => LivePage::Stacks,
            LivePage::Stacks => LivePage::Task { task: "7".into() },
            LivePage::Task { .. } => {
                LivePage::Devices(DevicesPageQuery { task: odd(), fate: "moved".into() })
            }
            LivePage::Devices(_) => LivePage::Transfers(PairFilter {
                task: "7".into(),
                transport: "tcp".into(),
                by: "rate".into(),
            }),
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
        let pages = std::iter::successors(Some(LivePage::Overview), next_page_kind);
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
            ("", None),
        ] {
            assert_eq!(LivePage::from_query(query), page, "{query}");
        }
        let unknown = serde_urlencoded::from_str::<LiveStreamQuery>("page=nothing&task=3");
        assert!(
            unknown
                .unwrap_err()
                .to_string()
                .contains("unknown variant `nothing`, expected one of `overview`")
        );
        assert_eq!(
            LivePage::Job(TaskTableQuery { page: "2".into(), ..Default::default() }).to_query(),
            "page=job&rows=2"
        );
    }
}
