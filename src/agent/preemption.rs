//! Preemption notices, and the step that all tasks agree to save at: what JAX programs do, for workers.
//!
//! Whoever learns of a notice writes down the step that it is at and meets the others at a barrier; the step after the
//! highest one written is the one. Between the notice and the agreement nobody begins another step.

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::watch;

use super::Inner;
use super::error::AgentError;
use crate::clock::Clock;

/// The key that holds the notice.
const NOTICE: &str = "RECEIVED_PREEMPTION_NOTICE";
const STEPS: &str = "PREEMPTION_CURRENT_COUNTER";
const BARRIER: &str = "PREEMPTION_SYNC_BARRIER";
/// How long the tasks wait for one another, as in JAX.
const AGREEMENT: Duration = Duration::from_secs(180);

/// How far the agreement has come.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(super) struct Sync {
    step: u64,
    phase: Phase,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
enum Phase {
    #[default]
    Going,
    Agreeing,
    Agreed(u64),
    Failed,
}

/// Waits for a notice, then agrees on a step.
pub(super) async fn watch(inner: Arc<Inner>) {
    let notice = loop {
        match inner.service.get(NOTICE, None).await {
            Ok(notice) => break String::from_utf8_lossy(&notice).into_owned(),
            Err(error) => {
                tracing::debug!(%error, "the preemption notice is asked for again");
                tokio::time::sleep(Duration::from_secs(1)).await;
            }
        }
    };
    let notice = crate::text::one_line(&notice).into_owned();
    tracing::info!(notice, "a preemption notice");
    let mut step = 0;
    inner.sync.send_modify(|sync| {
        step = sync.step;
        sync.phase = Phase::Agreeing;
    });
    inner.notice.send_replace(Some(notice));
    let phase = match agree(&inner, step).await {
        Ok(step) => Phase::Agreed(step),
        Err(error) => {
            tracing::warn!(%error, "no step was agreed on");
            Phase::Failed
        }
    };
    inner.sync.send_modify(|sync| sync.phase = phase);
}

async fn agree(inner: &Inner, step: u64) -> Result<u64, AgentError> {
    let limit = inner.config.call_limit;
    let key = format!("{STEPS}/{}", inner.config.task);
    inner.service.insert(&key, step.to_string(), true, limit).await?;
    inner.service.barrier(BARRIER, &[], &mut -1, AGREEMENT, AGREEMENT + inner.config.patience).await?;
    let steps = inner.service.list(STEPS, limit).await?;
    let read = |value: &[u8]| std::str::from_utf8(value).ok()?.trim().parse::<u64>().ok();
    let highest = steps.iter().filter_map(|(_, value)| read(value)).max().unwrap_or(step);
    Ok(highest.saturating_add(1))
}

/// Whether everybody stops before `step`. Waits while an agreement is being made.
pub(super) async fn reached(sync: &watch::Sender<Sync>, step: u64) -> bool {
    let mut changes = sync.subscribe();
    sync.send_if_modified(|sync| {
        if sync.phase == Phase::Going {
            sync.step = step;
        }
        false
    });
    loop {
        match changes.borrow_and_update().phase {
            Phase::Going | Phase::Failed => return false,
            Phase::Agreed(at) => return step >= at,
            Phase::Agreeing => {}
        }
        if changes.changed().await.is_err() {
            return false;
        }
    }
}

/// Leaves a notice for all tasks; one that is there already is as good.
pub(super) async fn raise(inner: &Inner) -> Result<(), AgentError> {
    // The form in which JAX reads a time: RFC 3339 with an offset in figures.
    let now = Clock::start().now().to_string().replace('Z', "+00:00");
    match inner.service.insert(NOTICE, now, false, inner.config.call_limit).await {
        Err(error) if error.code() == Some(tonic::Code::AlreadyExists) => Ok(()),
        done => done,
    }
}
