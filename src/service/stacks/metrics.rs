//! Writes requests for stacks, their answers and the tasks that can answer as metrics.
//!
//! `collector.rs` counts. Begin at [`StackMetrics`].

use std::sync::Arc;

use super::{ALL_BYTES_MAX, StackCollector};
use crate::coordination::JobObservation;
use crate::telemetry::metrics::{MetricSource, ScrapeOutput, catalogue as metric};

/// The metrics of the stacks of every job.
pub struct StackMetrics(pub Arc<StackCollector>);

impl MetricSource for StackMetrics {
    fn write_samples(&self, page: &mut ScrapeOutput) {
        page.add_usize_sample(&metric::STACK_BYTES, &[], self.0.bytes());
        page.add_usize_sample(&metric::STACK_BYTES_LIMIT, &[], ALL_BYTES_MAX);
    }

    fn write_job_samples(&self, seen: &JobObservation, page: &mut ScrapeOutput) {
        let job = seen.name.as_str();
        let (counts, helpers) = self.0.counts_and_source_count(seen.job);
        for (cause, count) in ["operator", "automatic"].into_iter().zip(counts.requests) {
            page.add_integer_sample(&metric::STACK_REQUESTS, &[job, cause], count);
        }
        for (result, count) in [("accepted", counts.accepted), ("refused", counts.refused)] {
            page.add_integer_sample(&metric::STACK_ANSWERS, &[job, result], count);
        }
        page.add_usize_sample(&metric::STACK_HELPERS, &[job], helpers);
    }
}
