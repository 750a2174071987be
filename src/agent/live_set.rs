//! Requests the live set together with all other tasks. If the service does not answer for long, this module names
//! the tasks that have not called yet. Begin at `agree_on_live_set`.
//!
//! The service decides which tasks are live. It answers when all live tasks have called, and does not say which tasks
//! are missing. So a task that has waited for half a second writes a key into the store, as a mark that it has
//! called. When the answer arrives, the task deletes its key. A task that has waited for 3 s, or until its timeout,
//! reads the keys of all tasks, and names the live tasks that have none.

use std::collections::BTreeSet;
use std::time::Duration;

use super::error::AgentError;
use super::shared::AgentShared;
use crate::transfer::{Incarnation, TaskId};

/// The directory of the marks: by task, with the incarnation in hexadecimal digits.
const MARK_PREFIX: &str = "muster/live-set";
/// The time after which a mark is written.
const MARK_DELAY: Duration = Duration::from_millis(500);
/// The time after which the missing tasks are logged.
const LOG_DELAY: Duration = Duration::from_secs(3);
/// The timeout of the read of the marks.
const POLL_INTERVAL: Duration = Duration::from_secs(1);

/// Returns the incarnations of the tasks below `tasks`, once all live ones have called.
///
/// # Errors
/// If they have not within `limit`, with the tasks that have not called.
pub(super) async fn agree_on_live_set(
    inner: &AgentShared,
    limit: Duration,
) -> Result<Vec<(u32, u64)>, AgentError> {
    let all: Vec<u32> = (0..inner.tasks).collect();
    let mut marked = false;
    let answer = {
        let asking = inner.retry_while_service_unreachable(|| inner.service.request_live_set(&all, None));
        let waiting = async {
            tokio::time::sleep(MARK_DELAY).await;
            marked = true;
            write_arrival_key(inner).await;
            tokio::time::sleep(LOG_DELAY.saturating_sub(MARK_DELAY)).await;
            if let Some(who) = describe_missing_tasks(inner).await {
                tracing::warn!(
                    "waits for {who}; the others go on as soon as all have asked who lives, or the service finds that \
                     whoever is missing is lost"
                );
            }
            std::future::pending::<()>().await;
        };
        tokio::select! {
            biased;
            answer = asking => Some(answer),
            () = waiting => None,
            () = tokio::time::sleep(limit) => None,
        }
    };
    let Some(answer) = answer else {
        let who =
            describe_missing_tasks(inner).await.unwrap_or_else(|| "somebody who came just now".to_owned());
        return Err(AgentError::IncompleteLiveSet { limit, who });
    };
    if marked {
        // If the deletion fails, the next log line omits this task; that is the only effect.
        let key = arrival_key(inner.here().task);
        let _gone = tokio::time::timeout(POLL_INTERVAL, inner.service.delete(&key, POLL_INTERVAL)).await;
    }
    answer
}

fn arrival_key(task: TaskId) -> String {
    format!("{MARK_PREFIX}/{task}")
}

async fn write_arrival_key(inner: &AgentShared) {
    let here = inner.here();
    let value = format!("{:x}", here.incarnation.get());
    if let Err(error) = inner.service.insert(&arrival_key(here.task), value, true, POLL_INTERVAL).await {
        tracing::debug!(%error, "nobody can see that this task has come");
    }
}

/// Returns the live tasks without a mark, in words, or that the service does not say.
async fn describe_missing_tasks(inner: &AgentShared) -> Option<String> {
    let marks = match inner.service.list(MARK_PREFIX, POLL_INTERVAL).await {
        Ok(marks) => marks,
        Err(error) => return Some(format!("the service, which does not answer ({error})")),
    };
    let read = |(key, value): &(String, bytes::Bytes)| {
        let task = key.strip_prefix(MARK_PREFIX)?.strip_prefix('/')?.parse().ok()?;
        let life = u64::from_str_radix(std::str::from_utf8(value).ok()?, 16).ok()?;
        Some((TaskId(task), Incarnation::new(life)?))
    };
    let marks: BTreeSet<_> = marks.iter().filter_map(read).collect();
    let lives = inner.roster.borrow().lives.clone();
    let here = inner.here().task;
    let missing = lives.into_iter().filter(|life| life.0 != here && !marks.contains(life));
    let missing: Vec<String> = missing.map(|(task, _)| task.to_string()).collect();
    (!missing.is_empty()).then(|| format!("task {}", missing.join(", task ")))
}
