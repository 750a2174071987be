//! The metrics of a keeper, as its core has learnt of them at its start.

use super::channel::CoreStart;
use crate::telemetry::metrics::{MetricSource, ScrapeOutput, catalogue as metric};

/// Writes the metrics of a keeper; those of a process without a keeper are zero.
#[derive(Debug)]
pub struct KeeperMetrics(pub Option<CoreStart>);

impl MetricSource for KeeperMetrics {
    fn write_samples(&self, page: &mut ScrapeOutput) {
        page.add_integer_sample(&metric::KEEPER_ENABLED, &[], u64::from(self.0.is_some()));
        let ends = self.0.as_ref().map(|start| start.ends).unwrap_or_default();
        for (cause, count) in [("exited", ends.exited), ("killed", ends.killed), ("crashed", ends.crashed)] {
            page.add_integer_sample(&metric::KEEPER_ENDS, &[cause], count);
        }
    }
}
