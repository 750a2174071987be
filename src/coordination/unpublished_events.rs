//! The events of a job that are not published yet.
//!
//! One transition may change every task of a job, and each change is a separate event. An input publishes only a
//! bounded number of events. The other events wait here. Begin at [`UnpublishedEvents`].
//!
//! Invariant: events are published in the order in which they happened, so a later event waits behind earlier ones.

use std::collections::VecDeque;

use serde::{Deserialize, Serialize};

use super::event::{EventKind, FailureClass, JobEvent};
use super::ids::{JobId, RunNumber, TaskId, TaskIncarnation, Timestamp};

/// A change that happens to several tasks at the same moment.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum TaskChange {
    Connected,
    Disconnected,
    Failed(FailureClass),
}

impl TaskChange {
    fn event_for_task(self, task: TaskId, incarnation: TaskIncarnation) -> EventKind {
        match self {
            Self::Connected => EventKind::TaskConnected { task, incarnation, again: false },
            Self::Disconnected => EventKind::TaskDisconnected { task },
            Self::Failed(class) => EventKind::TaskFailed { task, class },
        }
    }
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
enum QueuedEvents {
    One(#[serde(with = "event_as_json")] Box<JobEvent>),
    /// One event for each of these tasks.
    OfTasks {
        at: Timestamp,
        run: RunNumber,
        change: TaskChange,
        reason: String,
        tasks: VecDeque<(TaskId, TaskIncarnation)>,
    },
}

/// Serialises events as JSON: they name their kind in a field, which only self-describing formats can
/// restore.
mod event_as_json {
    use serde::de::Error as _;
    use serde::ser::Error as _;
    use serde::{Deserialize, Deserializer, Serializer};

    use super::JobEvent;

    pub fn serialize<S: Serializer>(event: &JobEvent, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(&serde_json::to_string(event).map_err(S::Error::custom)?)
    }

    pub fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Box<JobEvent>, D::Error> {
        serde_json::from_str(&String::deserialize(deserializer)?).map_err(D::Error::custom)
    }
}

/// The unpublished events, the oldest first.
#[derive(Debug, Default, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct UnpublishedEvents(VecDeque<QueuedEvents>);

impl UnpublishedEvents {
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    pub fn push(&mut self, event: JobEvent) {
        self.0.push_back(QueuedEvents::One(Box::new(event)));
    }

    /// Adds an event for each of `tasks`, which are given with their present incarnations.
    pub fn push_for_each_task(
        &mut self,
        at: Timestamp,
        run: RunNumber,
        change: TaskChange,
        reason: &str,
        tasks: VecDeque<(TaskId, TaskIncarnation)>,
    ) {
        self.0.push_back(QueuedEvents::OfTasks { at, run, change, reason: reason.to_owned(), tasks });
    }

    /// Removes and returns the oldest event.
    pub fn pop(&mut self, job: JobId) -> Option<JobEvent> {
        loop {
            match self.0.front_mut()? {
                QueuedEvents::One(_) => {
                    let Some(QueuedEvents::One(event)) = self.0.pop_front() else { return None };
                    return Some(*event);
                }
                QueuedEvents::OfTasks { at, run, change, reason, tasks } => {
                    let Some((task, incarnation)) = tasks.pop_front() else {
                        self.0.pop_front();
                        continue;
                    };
                    let (at, run, what, reason) =
                        (*at, *run, change.event_for_task(task, incarnation), reason.clone());
                    if tasks.is_empty() {
                        self.0.pop_front();
                    }
                    return Some(JobEvent { at, job, run, what, reason });
                }
            }
        }
    }
}
