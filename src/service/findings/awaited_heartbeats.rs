//! The text about the heartbeats of tasks that others wait for, in findings and on pages. Begin at [`awaited_heartbeats_text`].

use std::time::Duration;

use crate::coordination::{Timestamp, silence_if_heartbeat_overdue};
use crate::text::{format_approximate_duration, format_count_with_noun, format_grouped};

/// The heartbeats of one connected task.
#[derive(Debug, Clone, Copy)]
pub struct AwaitedHeartbeat {
    /// The last heartbeat, or the registration if none has come since.
    pub last: Option<Timestamp>,
    /// The usual interval in microseconds; 0 if it is not known.
    pub interval_us: u64,
}

/// Returns a clause about the heartbeats of connected tasks for which others have waited since `waited_since`, and whether the heartbeats
/// continue. `kind` distinguishes the tasks from others: *awaited*, or *connected* if others wait for tasks too that are not connected.
#[must_use]
pub fn awaited_heartbeats_text(
    tasks: &[AwaitedHeartbeat],
    kind: &str,
    waited_since: Timestamp,
    timeout: Duration,
    now: Timestamp,
) -> (String, bool) {
    let silence =
        |task: &AwaitedHeartbeat| silence_if_heartbeat_overdue(task.last, task.interval_us, timeout, now);
    let silent: Vec<Duration> = tasks.iter().filter_map(silence).collect();
    let counted = format_count_with_noun(tasks.len(), &format!("{kind} task"), &format!("{kind} tasks"));
    let Some(longest) = silent.iter().max() else {
        // A registration counts as the last heartbeat, but no interval is known yet.
        let sent_since = |task: &AwaitedHeartbeat| task.interval_us > 0 && task.last > Some(waited_since);
        let they_continue = tasks.iter().all(sent_since);
        let text = match (they_continue, tasks.len()) {
            (true, 1) => format!("the heartbeats of the {kind} task continue"),
            (true, _) => format!("the heartbeats of the {kind} tasks continue"),
            (false, 1) => format!("the next heartbeat of the {kind} task is not overdue"),
            (false, _) => format!("no heartbeat of the {counted} is overdue"),
        };
        return (text, they_continue);
    };
    let span = format_approximate_duration(*longest);
    let text = match (silent.len(), tasks.len()) {
        (_, 1) => format!("the {kind} task has sent no heartbeat for {span}"),
        (some, all) if some == all => format!("the {counted} have sent no heartbeat for up to {span}"),
        (some, _) => format!("{} of the {counted} sent none for up to {span}", format_grouped(some)),
    };
    (text, false)
}
