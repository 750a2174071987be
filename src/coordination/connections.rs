//! The connections of a job: records which incarnations made calls on each connection, and cleans up after a
//! connection closes.
//!
//! The cleanup first withdraws the waiting calls of the closed connection, a bounded number at a time. It then
//! reports each connected task whose latest call came on this connection, or whose error poll was held on it.
//! `failure_detection.rs` receives the report and decides whether the task fails. Begin at
//! `Job::bind_connection_to_incarnation` and `Job::withdraw_calls_of_closed_connections`.

use std::collections::{BTreeMap, BTreeSet};
use std::net::SocketAddr;
use std::ops::Bound;

use super::ids::{ConnectionId, TaskId, TaskIncarnation, Timestamp};
use super::input::{ConnectionEnd, Effect};
use super::job::{ClosingConnection, ConnectionRecord, Job, with_run};
use super::waiters::WaitTarget;

impl Job {
    pub(super) fn has_connection(&self, connection: ConnectionId) -> bool {
        self.connections.contains_key(&connection)
    }

    pub(super) fn add_connection(&mut self, connection: ConnectionId, peer: SocketAddr) {
        self.connections.insert(
            connection,
            ConnectionRecord { peer, known_incarnations: BTreeMap::new(), is_fence_reported: false },
        );
    }

    /// Records that the incarnation made a call in the present run on this connection.
    pub(super) fn bind_connection_to_incarnation(
        &mut self,
        connection: ConnectionId,
        task: TaskId,
        incarnation: TaskIncarnation,
    ) {
        let life = (self.run.number, incarnation);
        let spoke = self
            .connections
            .get(&connection)
            .is_none_or(|known| known.known_incarnations.get(&task) == Some(&life));
        if !spoke
            && self.run.task(task).is_some()
            && let Some(presence) = self.connections.get_mut(&connection)
        {
            presence.known_incarnations.insert(task, life);
            self.task_connections.insert((task, connection), ());
        }
    }

    /// Returns the connections on which only the present incarnation of this task made calls.
    pub(super) fn exclusive_connections_of(&self, id: TaskId) -> Vec<ConnectionId> {
        let life = self.run.task(id).and_then(|task| Some((self.run.number, task.incarnation?)));
        let spoken = self.task_connections.range_from(Bound::Included(&(id, ConnectionId(0))));
        let of_task = spoken.map(|(place, ())| *place).take_while(|(task, _)| *task == id);
        let is_own = |connection: &ConnectionId| {
            let lives = self.connections.get(connection).map(|presence| &presence.known_incarnations);
            lives.is_some_and(|lives| lives.len() == 1 && lives.get(&id).copied() == life)
        };
        of_task.map(|(_, connection)| connection).filter(is_own).collect()
    }

    /// Returns every open connection with each task that made calls on it.
    pub(super) fn task_connections(&self) -> impl Iterator<Item = (ConnectionId, TaskId)> + '_ {
        let tasks = |(connection, presence): (&ConnectionId, &'_ ConnectionRecord)| {
            let connection = *connection;
            presence.known_incarnations.keys().map(move |task| (connection, *task)).collect::<Vec<_>>()
        };
        self.connections.iter().flat_map(tasks)
    }

    pub(super) fn has_task_connection(&self, task: TaskId, connection: ConnectionId) -> bool {
        self.task_connections.contains_key(&(task, connection))
    }

    /// Returns how many entries the table of connections by task has, and how many it must have.
    pub(super) fn actual_and_expected_task_connection_counts(&self) -> (usize, usize) {
        let closing: usize =
            self.closing.iter().map(|closing| closing.presence.known_incarnations.len()).sum();
        let present: usize =
            self.connections.values().map(|presence| presence.known_incarnations.len()).sum();
        (self.task_connections.len(), present + closing)
    }

    /// Returns whether the connection has ended and some of its calls are not withdrawn yet.
    pub(super) fn is_connection_closing(&self, connection: ConnectionId) -> bool {
        self.closing.iter().any(|closing| closing.connection == connection)
    }

    /// Records the end of a connection. If `blame` is `None`, no task that used the connection fails for it.
    pub(super) fn record_connection_closed(
        &mut self,
        connection: ConnectionId,
        blame: Option<&ConnectionEnd>,
    ) {
        let Some(presence) = self.connections.remove(&connection) else { return };
        let blame = blame.cloned();
        self.closing.push_back(ClosingConnection {
            connection,
            presence,
            end_evidence: blame,
            polling: BTreeSet::new(),
        });
    }

    /// Withdraws calls of the oldest closed connection; after the last of them, judges the tasks that used
    /// it.
    pub(super) fn withdraw_calls_of_closed_connections(
        &mut self,
        now: Timestamp,
        effects: &mut Vec<Effect>,
        budget: &mut usize,
    ) {
        let Some(mut closing) = self.closing.pop_front() else { return };
        let connection = closing.connection;
        for stale in &mut self.ended_run_calls {
            for call in stale.waiters.calls_on_connection(connection, *budget) {
                *budget -= 1;
                stale.waiters.remove(call);
            }
        }
        self.ended_run_calls.retain(|stale| stale.waiters.len() > 0);
        let polling = &mut closing.polling;
        with_run!(self, now, effects, |run, cx| {
            for call in run.waiters.calls_on_connection(connection, *budget) {
                *budget -= 1;
                if let Some(WaitTarget::Poll(task)) = run.waiters.wait_target(call)
                    && run.expect_task(*task).poll == Some(call)
                {
                    polling.insert(*task);
                }
                run.withdraw_call(cx, call);
            }
        });
        let left =
            self.ended_run_calls.iter().any(|stale| stale.waiters.count_calls_on_connection(connection) > 0);
        if left || self.run.waiters.count_calls_on_connection(connection) > 0 {
            return self.closing.push_front(closing);
        }
        // The cost of judging a task, in answers.
        const COST: usize = 8;
        let ClosingConnection { presence, end_evidence: blame, polling, .. } = &mut closing;
        while *budget > 0
            && let Some((task, (number, incarnation))) = presence.known_incarnations.pop_first()
        {
            *budget = budget.saturating_sub(COST);
            self.task_connections.remove(&(task, connection));
            let (Some(ending), Some(known)) = (&*blame, self.run.task(task)) else { continue };
            let concerns = number == self.run.number
                && known.incarnation == Some(incarnation)
                && known.is_connected()
                && (known.connection == Some(connection) || polling.contains(&task));
            if concerns {
                let polled = polling.contains(&task);
                with_run!(self, now, effects, |run, cx| run.on_connection_lost(cx, task, polled, ending));
            }
        }
        if !closing.presence.known_incarnations.is_empty() {
            self.closing.push_front(closing);
        }
    }
}
