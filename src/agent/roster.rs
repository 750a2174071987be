//! Follows the states of all tasks and keeps the roster: the connected tasks and the membership of the transfer
//! engine.
//!
//! The service decides the states of the tasks, and a [`RosterSource`] asks for them. When they change,
//! `live_engines.rs` reads the engine record of each new incarnation. When the roster changes, this module passes the
//! new membership to the engine. `peer_jobs.rs` does the same for other jobs. Begin at `follow_task_states`.

use std::sync::Arc;

use super::engine_host::EngineHost;
use super::engine_record;
use super::error::AgentError;
use super::live_engines::{ClusterRoster, LiveEngines, RosterSource};
use super::task_states::{ReportedTaskState, check_current_incarnation, connected_incarnations};
use crate::transfer::PeerJob;

/// Follows the states of the tasks until this incarnation has ended.
pub(super) async fn follow_task_states<R: RosterSource>(
    host: Arc<EngineHost>,
    job: Arc<R>,
    first: (Vec<ReportedTaskState>, i64),
) {
    let mut engines = LiveEngines::new(Arc::clone(&job), PeerJob::OWN);
    let (states, version) = first;
    if !apply_task_states(&host, &mut engines, &states) {
        return;
    }
    let mut watching = Box::pin(watch_with_retry(Arc::clone(&host), Arc::clone(&job), version));
    loop {
        tokio::select! {
            answer = &mut watching => match answer {
                Ok((states, version)) => {
                    if !apply_task_states(&host, &mut engines, &states) {
                        return;
                    }
                    watching = Box::pin(watch_with_retry(Arc::clone(&host), Arc::clone(&job), version));
                }
                Err(error) => return host.end_incarnation(error),
            },
            Some(()) = engines.store_next_record() => publish_roster(&host, &engines),
        }
    }
}

/// Returns the next states, however long that takes; a lost connection is made again.
async fn watch_with_retry<R: RosterSource>(
    host: Arc<EngineHost>,
    job: Arc<R>,
    version: i64,
) -> Result<(Vec<ReportedTaskState>, i64), AgentError> {
    host.retry_while_service_unreachable(|| job.watch_states(version)).await
}

/// Applies new states; returns whether this incarnation is still live.
fn apply_task_states<R: RosterSource>(
    host: &EngineHost,
    engines: &mut LiveEngines<R>,
    states: &[ReportedTaskState],
) -> bool {
    let here = host.here();
    if let Some(own) = states.iter().find(|state| state.task == here.task.0)
        && let Err(ended) = check_current_incarnation(own, here.incarnation)
        && !host.is_leaving()
    {
        host.end_incarnation(ended);
        return false;
    }
    let mut now = connected_incarnations(states);
    now.remove(&here.task);
    engines.set_live_incarnations(&now);
    engines.fetch_wanted_records(|_| true);
    publish_roster(host, engines);
    true
}

/// Sends the roster to the engine and to all followers.
fn publish_roster<R: RosterSource>(host: &EngineHost, engines: &LiveEngines<R>) {
    let here = host.here();
    let mut roster = ClusterRoster::default();
    roster.lives.insert(here.task, here.incarnation);
    roster.membership.peers.insert(here.task, host.own_member_info());
    engines.add_to_roster(&mut roster);
    // This task's own devices come first, then those of the others in their order.
    let own = roster.membership.peers.remove(&here.task);
    let mut own = own.map(|peer| (here.task.0, peer));
    let others = roster.membership.peers.iter_mut().map(|(task, peer)| (task.0, peer));
    let greedy = engine_record::remove_duplicate_devices(
        own.iter_mut().map(|(task, peer)| (*task, peer)).chain(others),
    );
    if let Some((_, peer)) = own {
        roster.membership.peers.insert(here.task, peer);
    }
    for task in greedy {
        tracing::warn!(task, "it claims devices of other tasks; they stay with those");
    }
    host.set_own_job_members(&roster.membership);
    host.roster.send_if_modified(|old| {
        let differs = *old != roster;
        *old = roster;
        differs
    });
}
