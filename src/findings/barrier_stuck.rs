//! A barrier takes far longer than it used to.

use std::time::Duration;

use super::{Detector, Found, Seen, Severity, spoken, usual};
use crate::coordination::{BarrierKind, BarrierObservation};

/// No barrier is stuck before.
const PATIENCE: Duration = Duration::from_secs(60);
/// One that takes so many times as long as the longest of the recent ones is.
const TIMES: u32 = 5;

pub(super) static DETECTOR: Detector = Detector {
    id: "barrier-stuck",
    title: "A barrier is stuck",
    severity: Severity::Critical,
    means: "Tasks wait at a barrier for far longer than at its recent uses. Until the missing ones come, nobody gets on; \
            when its timeout is over it fails for all.",
    advice: "Look at the missing tasks: their logs, their stacks (py-spy), their hosts. If one is gone for good, restart it, \
             or the job.",
    detect,
};

fn detect(Seen { job: seen, .. }: Seen<'_>) -> Option<Found> {
    let old = |barrier: &&BarrierObservation| {
        let limit = PATIENCE.max(usual(seen, &barrier.id) * TIMES);
        barrier.kind != BarrierKind::Registration && seen.seen_at.since(barrier.since) >= limit
    };
    let barrier = seen.barriers.iter().filter(old).min_by_key(|barrier| barrier.since)?;
    let waited = seen.seen_at.since(barrier.since);
    let summary = format!(
        "{} of {} members have waited at {} for {}; missing: {}",
        barrier.arrived,
        barrier.members,
        shown(barrier),
        spoken(waited),
        seen.describe(&barrier.missing_tasks),
    );
    let limit = PATIENCE.max(usual(seen, &barrier.id) * TIMES).as_secs_f64();
    Some(
        Found::new(summary, barrier.since, barrier.missing_tasks.clone())
            .with("waited, in seconds", waited.as_secs_f64(), limit)
            .with("missing members", f64::from(u32::try_from(barrier.missing).unwrap_or(u32::MAX)), 0.0),
    )
}

/// A barrier and which use of it, for people: never more of its id than a line holds.
pub(super) fn shown(barrier: &BarrierObservation) -> String {
    let id = barrier.id.as_ref();
    match barrier.kind {
        BarrierKind::LiveSet => format!("a {id}"),
        _ => format!("{}::{}", id.get(..id.floor_char_boundary(120)).unwrap_or(id), barrier.counter),
    }
}
