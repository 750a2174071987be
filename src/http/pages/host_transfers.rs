//! Renders the transfers of a host's tasks: their totals, the hosts with which they moved most, and the last failures.
//!
//! `transfers.rs` renders those of the whole job. Begin at `render_host_transfers_fragment`.

use std::cmp::Reverse;
use std::collections::BTreeMap;

use askama::Template;

use super::fragment::Fragment;
use super::links::JobPages;
use super::snapshot::JobSnapshot;
use super::{amount, links, status, times};
use crate::coordination::{HostId, HostView, TaskId, Timestamp};
use crate::http::Problem;
use crate::service::reports::{FailureView, TaskTransfers, TransferOutcome, rate_window};

/// The maximum number of other hosts on the page.
const PEERS_SHOWN: usize = 12;
/// The maximum number of failures on the page.
const FAILURES_SHOWN: usize = 6;

/// The sums over the tasks of the host that have reported in this run.
#[derive(Default)]
struct HostTotals {
    reporting: usize,
    sent: u64,
    received: u64,
    sent_rate: u64,
    received_rate: u64,
    completed: u64,
    failed: u64,
    in_flight: u64,
    connections: u64,
    /// The end of the time over which the rates are measured.
    rate_until: Timestamp,
}

impl HostTotals {
    fn of_tasks(tasks: &[TaskTransfers]) -> Self {
        let sum = |value: fn(&TaskTransfers) -> u64| tasks.iter().map(value).fold(0, u64::saturating_add);
        Self {
            reporting: tasks.len(),
            sent: sum(|task| task.totals.sent_bytes()),
            received: sum(|task| task.totals.received_bytes()),
            sent_rate: sum(|task| task.sent_rate),
            received_rate: sum(|task| task.received_rate),
            completed: sum(|task| task.totals.launches_with_outcome(TransferOutcome::COMPLETED)),
            failed: sum(|task| task.totals.failed_launches()),
            in_flight: sum(TaskTransfers::launches_in_flight),
            connections: sum(TaskTransfers::connection_count),
            rate_until: tasks.iter().map(|task| task.rate_until).max().unwrap_or_default(),
        }
    }
}

/// The bytes between the host and another one, or among the tasks of the host.
#[derive(Default)]
struct PeerBytes {
    sent: u64,
    received: u64,
}

/// The other end of transfers: a host, or a task of which no host is known.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord)]
enum PeerPlace {
    Host(HostId),
    Task(TaskId),
}

#[derive(Template)]
#[template(path = "parts/host-transfers.html")]
struct HostTransfersFragment<'a> {
    job: &'a JobPages,
    host: &'a HostView,
    totals: HostTotals,
    /// The times between which the rates are measured.
    window: (Timestamp, Timestamp),
    peers: Vec<(PeerPlace, PeerBytes)>,
    all_peers: usize,
    failures: Vec<FailureView>,
}

impl HostTransfersFragment<'_> {
    /// Returns the address of the same tasks in the API of the job.
    fn tasks_path(&self) -> String {
        format!("transfers/tasks?host={}", crate::text::encode_query_value(self.host.host.as_str()))
    }
}

/// Returns the transfers of the tasks of a host.
pub(super) fn render_host_transfers_fragment(
    snapshot: &JobSnapshot,
    host: &HostView,
) -> Result<Fragment, Problem> {
    let reports = &snapshot.records.reports;
    let is_here = |task: &TaskId| host.tasks.binary_search(task).is_ok();
    let tasks = reports.transfers_of_tasks(snapshot.id, &snapshot.roster, |task| is_here(&task));
    if tasks.is_empty() {
        return Ok(Fragment::empty("host-transfers"));
    }
    let place = |task: TaskId| match snapshot.host_assignment.host_of(task) {
        Some(host) => PeerPlace::Host(host.name.clone()),
        None => PeerPlace::Task(task),
    };
    let mut peers: BTreeMap<PeerPlace, PeerBytes> = BTreeMap::new();
    for pair in reports.pair_views(snapshot.id, &snapshot.roster, None, None) {
        if is_here(&pair.from) {
            let sent = &mut peers.entry(place(pair.to)).or_default().sent;
            *sent = sent.saturating_add(pair.bytes());
        }
        if is_here(&pair.to) {
            let received = &mut peers.entry(place(pair.from)).or_default().received;
            *received = received.saturating_add(pair.bytes());
        }
    }
    let mut peers: Vec<_> = peers.into_iter().collect();
    peers.sort_by_key(|(_, bytes)| Reverse(bytes.sent.saturating_add(bytes.received)));
    let all_peers = peers.len();
    peers.truncate(PEERS_SHOWN);
    let mut failures: Vec<FailureView> = tasks.iter().flat_map(|task| task.failures.clone()).collect();
    failures.sort_by_key(|failure| (Reverse(failure.at), failure.task));
    failures.truncate(FAILURES_SHOWN);
    let totals = HostTotals::of_tasks(&tasks);
    let window = rate_window(totals.rate_until);
    Fragment::new(
        "host-transfers",
        &HostTransfersFragment { job: &snapshot.pages, host, totals, window, peers, all_peers, failures },
    )
}
