//! Detects that a job has nearly reached one of its limits.
//!
//! Begin at `detect`.

use super::detector::{Detection, Detector, DetectorInput, Severity};
use crate::coordination::BoundUsage;

/// The share of a bound from which it is nearly reached.
const NEARLY_FULL_SHARE: f64 = 0.9;

pub(super) static DETECTOR: Detector = Detector {
    id: "nearly-full-bounds",
    title: "A limit is nearly reached",
    severity: Severity::Warning,
    means: "The job uses nearly as much as its limit allows. Requests beyond the limit fail with RESOURCE_EXHAUSTED, which most \
            programs do not survive.",
    advice: "Raise the setting that the evidence names, or find what fills it: a program that never deletes its keys, or \
             calls that wait without a deadline.",
    detect,
};

#[expect(clippy::cast_precision_loss, reason = "for people")]
fn used_fraction_if_nearly_reached(bound: &BoundUsage) -> Option<f64> {
    let used = bound.used.filter(|_| !bound.is_rolling && bound.limit > 0)?;
    Some(used as f64 / bound.limit as f64).filter(|part| *part >= NEARLY_FULL_SHARE)
}

#[expect(clippy::cast_precision_loss, reason = "for people")]
fn detect(DetectorInput { job: seen, .. }: DetectorInput<'_>) -> Option<Detection> {
    let mut full: Vec<(f64, &BoundUsage)> = seen
        .bounds
        .iter()
        .filter_map(|bound| Some((used_fraction_if_nearly_reached(bound)?, bound)))
        .collect();
    full.sort_by(|a, b| b.0.total_cmp(&a.0));
    let (_, fullest) = full.first()?;
    let summary = format!(
        "{} of bounds.{} is in use: {} of {}",
        format_percent(full[0].0),
        fullest.name,
        fullest.used.unwrap_or_default(),
        fullest.limit
    );
    let mut found = Detection::new(summary, seen.seen_at, Vec::new());
    for (_, bound) in full {
        let used = bound.used.unwrap_or_default() as f64;
        found = found.with_evidence(
            &format!("bounds.{}", bound.name),
            used,
            NEARLY_FULL_SHARE * bound.limit as f64,
        );
    }
    Some(found)
}

fn format_percent(part: f64) -> String {
    format!("{:.0} %", part * 100.0)
}
