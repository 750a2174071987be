//! Preemption notices, and the agreement on the step at which all tasks save. Workers use the same protocol as JAX
//! programs.
//!
//! The program saves; this module only agrees on the step. Begin at `watch_preemption_notice`.
//!
//! A task that learns of a notice writes its step into the store and calls a barrier. After the barrier, the agreed
//! step is the highest written step plus one. Between the notice and the agreement, no task begins another step.
//!
//! If all tasks are live, the barrier has the id that JAX uses. At such a barrier the service waits for a lost task
//! that may come back. So if a task is lost, the live tasks cancel this barrier and call another one, whose id is a
//! hash of their incarnations.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use tokio::sync::watch;
use tokio::time::{Instant, timeout};
use tonic::Code;

use super::error::AgentError;
use super::live_engines::{ClusterRoster, hash_members};
use super::shared::{AgentShared, AgreementPhase, StepAgreement};
use crate::clock::Clock;
use crate::coordination::PREEMPTION_BARRIER;
use crate::transfer::MemberId;

/// The key that holds the notice.
const NOTICE: &str = "RECEIVED_PREEMPTION_NOTICE";
/// The longest notice that is read, in bytes.
const NOTICE_MAX: usize = 4 << 10;
/// The number of characters of a notice that are shown.
const NOTICE_SHOWN: usize = 200;
const STEP_KEY_PREFIX: &str = "PREEMPTION_CURRENT_COUNTER";
/// The timeout of the agreement, as in JAX.
const AGREEMENT_TIMEOUT: Duration = Duration::from_secs(180);
/// The time after which this task has learned what another task already knows: a loss, or that a barrier has
/// passed.
const ROSTER_TIMEOUT: Duration = Duration::from_secs(5);

/// Waits for a notice, then agrees on a step with the other tasks.
pub(super) async fn watch_preemption_notice(inner: Arc<AgentShared>) {
    let notice = loop {
        match inner.service.get_with_max_size(NOTICE, NOTICE_MAX).await {
            Ok(notice) => break String::from_utf8_lossy(&notice).into_owned(),
            // The notice exists, though it is too long to read.
            Err(error) if error.grpc_code() == Some(Code::OutOfRange) => {
                break format!("a text of more than {NOTICE_MAX} bytes");
            }
            Err(error) => {
                tracing::debug!(%error, "the preemption notice is asked for again");
                tokio::time::sleep(Duration::from_secs(1)).await;
            }
        }
    };
    // The notice is a time; other text is shown only in part.
    let notice = crate::text::escape_to_one_line(&notice).chars().take(NOTICE_SHOWN).collect::<String>();
    tracing::info!(notice, "a preemption notice");
    let mut step = 0;
    inner.sync.send_modify(|sync| {
        step = sync.step;
        sync.phase = AgreementPhase::Agreeing;
    });
    inner.notice.send_replace(Some(notice));
    let phase = match agree_on_step(&inner, step).await {
        Ok(step) => AgreementPhase::Agreed(step),
        Err(error) => {
            tracing::warn!(%error, "no step was agreed on");
            AgreementPhase::Failed
        }
    };
    inner.sync.send_modify(|sync| sync.phase = phase);
}

async fn agree_on_step(inner: &AgentShared, step: u64) -> Result<u64, AgentError> {
    let limit = inner.config.call_limit;
    let key = format!("{STEP_KEY_PREFIX}/{}", inner.config.task);
    inner.service.insert(&key, step.to_string(), true, limit).await?;
    let until = Instant::now() + AGREEMENT_TIMEOUT;
    let mut counters = HashMap::new();
    let members = loop {
        if let Some(members) = wait_at_sync_barrier(inner, until, &mut counters).await? {
            break members;
        }
    };
    let steps = inner.service.list(STEP_KEY_PREFIX, limit).await?;
    Ok(highest_step_of_members(&steps, &members, inner.tasks).unwrap_or(step).saturating_add(1))
}

/// Returns the highest step that the members have written. Steps of lost tasks do not count.
fn highest_step_of_members(steps: &[(String, Bytes)], members: &[MemberId], tasks: u32) -> Option<u64> {
    let all = members.len() == tasks as usize;
    let read = |(key, value): &(String, Bytes)| {
        // The service reads the keys in the same way: `…/1`, or `…/task:1` of older JAX.
        let task: Option<u32> = key.rsplit(['/', ':']).next().and_then(|task| task.parse().ok());
        let counts = all || task.is_none_or(|task| members.iter().any(|member| member.task.0 == task));
        let step = std::str::from_utf8(value).ok()?.trim().parse::<u64>().ok()?;
        counts.then_some(step)
    };
    steps.iter().filter_map(read).max()
}

/// Meets all live tasks at a barrier and returns them; `None` if one of them was lost meanwhile.
async fn wait_at_sync_barrier(
    inner: &AgentShared,
    until: Instant,
    counters: &mut HashMap<String, i64>,
) -> Result<Option<Vec<MemberId>>, AgentError> {
    let here = inner.here();
    let mut roster = inner.roster.subscribe();
    let members = {
        let known =
            timeout(ROSTER_TIMEOUT, roster.wait_for(|roster| roster.lives.contains_key(&here.task))).await;
        let lives = |roster: &ClusterRoster| {
            let lives = roster.lives.iter();
            lives.map(|(task, incarnation)| MemberId::of_own_job(*task, *incarnation)).collect()
        };
        known.ok().and_then(Result::ok).map_or_else(|| vec![here], |roster| lives(&roster))
    };
    let (id, tasks) = if members.len() == inner.tasks as usize {
        (PREEMPTION_BARRIER.to_owned(), Vec::new())
    } else {
        let id = format!("{PREEMPTION_BARRIER}/{:016x}", hash_members(&members));
        (id, members.iter().map(|member| member.task.0).collect())
    };
    let counter = counters.entry(id.clone()).or_insert(-1);
    let (used, left) = (*counter + 1, until.saturating_duration_since(Instant::now()));
    let waiting = inner.service.barrier(&id, &tasks, counter, left, left + inner.config.patience);
    tokio::pin!(waiting);
    let mut news = roster.clone();
    let lost = async { news.wait_for(|roster| roster.first_lost_member(&members).is_some()).await.is_ok() };
    let answer = tokio::select! {
        biased;
        answer = &mut waiting => answer,
        true = lost => {
            // The barrier's result tells every waiting task whether the cancellation was in time.
            let _in_time = inner.service.cancel_barrier(&id, used, inner.config.call_limit).await?;
            match timeout(ROSTER_TIMEOUT, waiting).await {
                Ok(answer) => answer,
                // It was a later instance of the barrier, made by tasks that continued; they do not arrive at
                // another one.
                Err(_) => return Ok(None),
            }
        }
    };
    match answer {
        Ok(()) => Ok(Some(members)),
        Err(AgentError::Refused { code: Code::Cancelled, .. }) => {
            // Another task knows which one is lost; this one learns it in a moment.
            let _told = timeout(
                ROSTER_TIMEOUT,
                roster.wait_for(|roster| roster.first_lost_member(&members).is_some()),
            )
            .await;
            Ok(None)
        }
        Err(error) => Err(error),
    }
}

/// Returns whether all tasks stop before `step`. Waits while an agreement is in progress.
pub(super) async fn wait_for_sync_point_decision(sync: &watch::Sender<StepAgreement>, step: u64) -> bool {
    let mut changes = sync.subscribe();
    sync.send_if_modified(|sync| {
        if sync.phase == AgreementPhase::Idle {
            sync.step = step;
        }
        false
    });
    loop {
        match changes.borrow_and_update().phase {
            AgreementPhase::Idle | AgreementPhase::Failed => return false,
            AgreementPhase::Agreed(at) => return step >= at,
            AgreementPhase::Agreeing => {}
        }
        if changes.changed().await.is_err() {
            return false;
        }
    }
}

/// Writes a notice for all tasks; an existing one serves as well.
pub(super) async fn publish_preemption_notice(inner: &AgentShared) -> Result<(), AgentError> {
    // JAX reads the time in this form: RFC 3339 with a numeric offset.
    let now = Clock::start().now().to_string().replace('Z', "+00:00");
    match inner.service.insert(NOTICE, now, false, inner.config.call_limit).await {
        Err(error) if error.grpc_code() == Some(Code::AlreadyExists) => Ok(()),
        done => done,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::transfer::{Incarnation, TaskId};

    #[test]
    fn steps_of_those_who_met_count_and_no_others() {
        let steps =
            [("P/0", "4"), ("P/1", "7"), ("P/job:jax_worker/replica:0/task:2", "9"), ("P/3", "no step")];
        let steps = steps.map(|(key, value)| (key.to_owned(), Bytes::from(value)));
        let members = |tasks: &[u32]| -> Vec<MemberId> {
            let member = |task: &u32| MemberId::of_own_job(TaskId(*task), Incarnation::new(1).unwrap());
            tasks.iter().map(member).collect()
        };
        assert_eq!(highest_step_of_members(&steps, &members(&[0, 1, 2, 3]), 4), Some(9));
        assert_eq!(highest_step_of_members(&steps, &members(&[0, 1, 3]), 4), Some(7));
        assert_eq!(highest_step_of_members(&steps, &members(&[0]), 4), Some(4));
        assert_eq!(highest_step_of_members(&steps, &members(&[3]), 4), None);
    }
}
