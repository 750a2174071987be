//! Draws what a job did over the last ten minutes as two small pictures: its live tasks, and below them the rate of its
//! transfers or else the skew of its barriers.
//!
//! The numbers are those of the REST resource `activity`. Begin at [`Sparkline::of_activity`].

use super::{amount, times};
use crate::service::{ACTIVITY_STEPS, ActivityStep, JobActivity};

/// The height of a picture. A step is one unit wide.
const HEIGHT: u64 = 16;

/// The pictures of one job. A path is empty if there is nothing to draw.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Sparkline {
    pub live: String,
    pub second: String,
    /// The highest value of the second picture, with what it is.
    pub peak: String,
    /// Both pictures in words.
    pub description: String,
}

impl Sparkline {
    pub fn of_activity(activity: &JobActivity) -> Self {
        let steps = &activity.steps;
        let live = |step: &ActivityStep| Some((step.live?, step.tasks));
        let Some((low, high)) = steps.iter().filter_map(live).fold(None, |range, (live, _)| {
            let (low, high) = range.unwrap_or((live, live));
            Some((low.min(live), high.max(live)))
        }) else {
            return Self::default();
        };
        let tasks = steps.iter().filter_map(live).map(|(_, tasks)| tasks).max().unwrap_or_default();
        let range = if low == high { low.to_string() } else { format!("{low} to {high}") };
        let rates: Vec<Option<u64>> = steps.iter().map(|step| step.sent_rate).collect();
        let skews: Vec<Option<u64>> = steps.iter().map(|step| step.skew_us).collect();
        let most = |values: &[Option<u64>]| values.iter().flatten().copied().max();
        let (second, peak) = match (most(&rates), most(&skews)) {
            (Some(rate @ 1..), _) => (area_path(&rates, rate), format!("≤ {}", amount::rate_text(rate))),
            (_, Some(skew)) => {
                (area_path(&skews, skew), format!("skew ≤ {}", times::microseconds_text(&skew)))
            }
            _ => (String::new(), String::new()),
        };
        let lives: Vec<Option<u64>> = steps.iter().map(|step| Some(step.live? as u64)).collect();
        let also = if peak.is_empty() { String::new() } else { format!("; {peak}") };
        let description = format!("Last ten minutes: {range} of {tasks} tasks live{also}");
        Self { live: area_path(&lives, tasks as u64), second, peak, description }
    }
}

/// Returns the area below the values as steps; the newest value is at the right edge. Values that are not known are
/// left out.
fn area_path(values: &[Option<u64>], most: u64) -> String {
    let mut path = String::new();
    let first = ACTIVITY_STEPS.saturating_sub(values.len());
    let mut last: Option<u64> = None;
    for (x, value) in (first..).zip(values) {
        let up = value.map(|value| {
            let share = u128::from(value) * u128::from(10 * HEIGHT) / u128::from(most.max(1));
            u64::try_from(share).unwrap_or(u64::MAX).min(10 * HEIGHT)
        });
        let y = |up: u64| format!("{}.{}", (10 * HEIGHT - up) / 10, (10 * HEIGHT - up) % 10);
        // Only changes are written, so the path of a steady job is short.
        let change = match (last, up) {
            (None, Some(up)) => format!("M{x} {HEIGHT}V{}", y(up)),
            (Some(before), Some(up)) if before != up => format!("H{x}V{}", y(up)),
            (Some(_), None) => format!("H{x}V{HEIGHT}z"),
            _ => String::new(),
        };
        path.push_str(&change);
        last = up;
    }
    if last.is_some() {
        path.push_str(&format!("H{}V{HEIGHT}z", first + values.len()));
    }
    path
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::coordination::Timestamp;

    /// Live tasks, skew and rate of a step.
    type Measured = (Option<usize>, Option<u64>, Option<u64>);

    fn activity(steps: &[Measured]) -> JobActivity {
        let step = |(number, (live, skew_us, sent_rate)): (u64, &Measured)| ActivityStep {
            at: Timestamp(number * 10_000_000),
            live: *live,
            tasks: 8,
            barriers: u64::from(skew_us.is_some()),
            skew_us: *skew_us,
            sent_rate: *sent_rate,
        };
        JobActivity { step_seconds: 10, steps: (0..).zip(steps).map(step).collect() }
    }

    #[test]
    fn the_newest_step_is_at_the_right_and_only_changes_are_written() {
        let drawn = Sparkline::of_activity(&activity(&[
            (Some(8), Some(500), None),
            (Some(8), None, None),
            (Some(4), Some(2000), None),
            (None, None, None),
            (Some(8), None, None),
        ]));
        assert_eq!(drawn.live, "M55 16V0.0H57V8.0H58V16zM59 16V0.0H60V16z");
        assert_eq!(drawn.second, "M55 16V12.0H56V16zM57 16V0.0H58V16z");
        assert_eq!(drawn.description, "Last ten minutes: 4 to 8 of 8 tasks live; skew ≤ 2.0 ms");
        let many = vec![(Some(8), Some(1), Some(2048)); 60];
        let steady = Sparkline::of_activity(&activity(&many));
        assert_eq!((steady.live.as_str(), steady.peak.as_str()), ("M0 16V0.0H60V16z", "≤ 2.0 KiB/s"));
    }

    #[test]
    fn a_job_without_measurements_has_no_picture() {
        assert_eq!(Sparkline::of_activity(&JobActivity::default()), Sparkline::default());
        assert_eq!(Sparkline::of_activity(&activity(&[(None, None, None); 3])), Sparkline::default());
    }
}
