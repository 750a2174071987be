//! The present connections between the tasks of a job: their number for each transport, and a list of single
//! connections.
//!
//! Begin at [`LinksView`].

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::coordination::{JobId, TaskId, TaskIncarnations};
use crate::service::reports::job_reports::{JobReports, TaskGauges};
use crate::service::reports::parse::{ReportedConnection, TransportConnectionCounts};
use crate::service::reports::report_store::TransferReportStore;
use crate::service::reports::vocabulary::ReportedTransport;

/// The present connections of one kind.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct LinksView {
    /// The transport of their lanes.
    pub transport: ReportedTransport,
    /// The number of connection ends: a connection that both its tasks report counts twice.
    pub connections: u64,
    /// The number of live lanes, counted likewise.
    pub lanes: u64,
    /// Launches in progress, as the tasks count them.
    pub launches: u64,
}

/// Returns the connections of each transport that has some.
pub(super) fn connections_by_transport(
    links: &[TransportConnectionCounts; ReportedTransport::ALL.len()],
) -> Vec<LinksView> {
    let view = |(transport, links): (ReportedTransport, &TransportConnectionCounts)| LinksView {
        transport,
        connections: links.connections,
        lanes: links.lanes,
        launches: links.launches,
    };
    ReportedTransport::ALL.into_iter().zip(links).map(view).filter(|links| links.connections > 0).collect()
}

/// One connection, as one of its tasks reports it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct ConnectionView {
    /// The task that reports it.
    pub task: TaskId,
    /// The task at its other end.
    pub peer: TaskId,
    /// The incarnation of the peer, in hexadecimal.
    pub peer_incarnation: String,
    /// The transport of its lanes.
    pub transport: ReportedTransport,
    /// The number of live lanes.
    pub lanes: u32,
    /// Launches in progress.
    pub launches: u32,
}

/// Returns the present state of the present lives, by task.
pub(super) fn gauges_of_present_incarnations<'a>(
    of_job: &'a JobReports,
    roster: &'a TaskIncarnations,
) -> impl Iterator<Item = (TaskId, &'a TaskGauges)> {
    let tasks = of_job.tasks.iter();
    tasks.filter_map(|(task, of_task)| {
        Some((*task, of_task.gauges_if_incarnation_is_present(roster.incarnation_of(*task))?))
    })
}

impl TransferReportStore {
    /// Returns the stored single connections of tasks whose life is present.
    #[must_use]
    pub fn connection_views(
        &self,
        job: JobId,
        roster: &TaskIncarnations,
        task: Option<TaskId>,
        transport: Option<ReportedTransport>,
    ) -> Vec<ConnectionView> {
        let view = |of_job: &JobReports| {
            let all = gauges_of_present_incarnations(of_job, roster)
                .flat_map(|(one, gauges)| gauges.connections.iter().map(move |link| (one, link)));
            let wanted = all.filter(|(one, link)| {
                task.is_none_or(|task| task == *one)
                    && transport.is_none_or(|transport| transport == link.transport)
            });
            let view = |(task, link): (TaskId, &ReportedConnection)| ConnectionView {
                task,
                peer: link.peer,
                peer_incarnation: link.peer_incarnation.to_string(),
                transport: link.transport,
                lanes: link.lanes,
                launches: link.launches,
            };
            wanted.map(view).collect()
        };
        self.with_run_reports(job, roster.run, view).unwrap_or_default()
    }
}
