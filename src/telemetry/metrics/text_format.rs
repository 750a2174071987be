//! Writes samples in the text format of Prometheus.
//!
//! `catalogue.rs` declares the metrics. Begin at `ScrapeOutput`.

use std::collections::HashMap;

#[cfg(target_os = "linux")]
use prometheus::core::Collector as _;
#[cfg(target_os = "linux")]
use prometheus::process_collector::ProcessCollector;
use prometheus::proto::{self, MetricFamily, MetricType};
use prometheus::{Encoder as _, TextEncoder};

use super::catalogue::{CATALOGUE, Metric, MetricKind};
use crate::coordination::Timestamp;
use crate::meter::HistogramSnapshot;
use crate::text::micros_to_seconds;
use crate::transfer::TIMES_US;

/// A histogram: observations counted by size.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct ExportedHistogram {
    bounds: &'static [f64],
    /// One count for each bound, and one for larger values.
    counts: Vec<u64>,
    sum: f64,
}

impl ExportedHistogram {
    pub fn new(bounds: &'static [f64]) -> Self {
        Self { bounds, counts: vec![0; bounds.len() + 1], sum: 0.0 }
    }

    pub fn observe(&mut self, value: f64) {
        let place = self.bounds.partition_point(|bound| *bound < value);
        self.counts[place] += 1;
        self.sum += value;
    }
}

/// The samples of one scrape.
#[derive(Default)]
pub struct ScrapeOutput(HashMap<&'static str, Vec<proto::Metric>>);

impl ScrapeOutput {
    /// Adds a sample of a counter or a gauge.
    pub fn add_sample(&mut self, metric: &'static Metric, labels: &[&str], value: f64) {
        let mut sample = labelled_sample(metric, labels);
        match metric.kind {
            MetricKind::Counter => {
                let mut counter = proto::Counter::default();
                counter.set_value(value);
                sample.set_counter(counter);
            }
            _ => {
                let mut gauge = proto::Gauge::default();
                gauge.set_value(value);
                sample.set_gauge(gauge);
            }
        }
        self.0.entry(metric.name).or_default().push(sample);
    }

    /// Adds a sample with an integer value.
    #[expect(clippy::cast_precision_loss, reason = "the format has no other numbers")]
    pub fn add_integer_sample(&mut self, metric: &'static Metric, labels: &[&str], value: u64) {
        self.add_sample(metric, labels, value as f64);
    }

    /// Adds a sample of a moment, in seconds since the Unix epoch.
    pub fn add_timestamp_sample(&mut self, metric: &'static Metric, labels: &[&str], moment: Timestamp) {
        self.add_sample(metric, labels, micros_to_seconds(moment.0));
    }

    /// Adds a sample of how much there is of something.
    pub fn add_usize_sample(&mut self, metric: &'static Metric, labels: &[&str], value: usize) {
        self.add_integer_sample(metric, labels, value as u64);
    }

    /// Adds a sample of a histogram.
    pub(super) fn add_histogram(
        &mut self,
        metric: &'static Metric,
        labels: &[&str],
        histogram: &ExportedHistogram,
    ) {
        let bounds = histogram.bounds.iter().copied();
        self.add_bucketed_histogram(
            metric,
            labels,
            bounds.zip(&histogram.counts),
            &histogram.counts,
            histogram.sum,
        );
    }

    /// Adds a sample of a histogram: counts by upper bound, and the number of all.
    pub fn add_bucketed_histogram<'a>(
        &mut self,
        metric: &'static Metric,
        labels: &[&str],
        bounded: impl Iterator<Item = (f64, &'a u64)>,
        all: &[u64],
        sum: f64,
    ) {
        let mut so_far: u64 = 0;
        let buckets = bounded.map(|(bound, count)| {
            so_far = count.saturating_add(so_far);
            let mut bucket = proto::Bucket::default();
            bucket.set_upper_bound(bound);
            bucket.set_cumulative_count(so_far);
            bucket
        });
        let mut histogram = proto::Histogram::default();
        histogram.set_bucket(buckets.collect());
        histogram.set_sample_count(all.iter().copied().fold(0, u64::saturating_add));
        histogram.set_sample_sum(sum);
        let mut sample = labelled_sample(metric, labels);
        sample.set_histogram(histogram);
        self.0.entry(metric.name).or_default().push(sample);
    }

    /// Adds a sample of a duration histogram of the transfer engine.
    pub fn add_transfer_engine_histogram(
        &mut self,
        metric: &'static Metric,
        labels: &[&str],
        counts: &[u64],
        sum_us: u64,
    ) {
        let bounded = TIMES_US.iter().map(|bound| micros_to_seconds(*bound)).zip(counts);
        self.add_bucketed_histogram(metric, labels, bounded, counts, micros_to_seconds(sum_us));
    }

    /// Adds a sample of a duration histogram that was recorded on a hot path.
    #[expect(clippy::cast_precision_loss, reason = "the format has no other numbers")]
    pub fn add_duration_histogram(
        &mut self,
        metric: &'static Metric,
        labels: &[&str],
        timed: &HistogramSnapshot,
    ) {
        let in_seconds = |nanos: u64| nanos as f64 / 1e9;
        let bounded = HistogramSnapshot::bounds_ns().map(in_seconds).zip(&timed.counts);
        self.add_bucketed_histogram(metric, labels, bounded, &timed.counts, in_seconds(timed.sum_ns));
    }

    /// Adds the process metrics that are in the catalogue.
    pub fn add_process_metrics(&mut self) {
        #[cfg(target_os = "linux")]
        for mut family in ProcessCollector::for_self().collect() {
            if let Some(metric) = CATALOGUE.iter().find(|metric| metric.name == family.name()) {
                self.0.entry(metric.name).or_default().extend(family.take_metric());
            }
        }
    }

    /// Returns the samples in the text format, in the order of a catalogue.
    pub fn to_text(mut self, catalogue: impl IntoIterator<Item = &'static &'static Metric>) -> String {
        let families: Vec<MetricFamily> = catalogue
            .into_iter()
            .filter_map(|metric| {
                let mut family = MetricFamily::default();
                family.set_name(metric.name.to_owned());
                family.set_help(metric.help.to_owned());
                family.set_field_type(match metric.kind {
                    MetricKind::Counter => MetricType::COUNTER,
                    MetricKind::Gauge => MetricType::GAUGE,
                    MetricKind::Histogram => MetricType::HISTOGRAM,
                });
                family.set_metric(self.0.remove(metric.name)?);
                Some(family)
            })
            .collect();
        let mut text = Vec::new();
        // Encoding fails for families without samples, which do not occur here.
        if let Err(error) = TextEncoder::new().encode(&families, &mut text) {
            tracing::error!(%error, "the metrics cannot be written");
        }
        String::from_utf8_lossy(&text).into_owned()
    }
}

fn labelled_sample(metric: &'static Metric, values: &[&str]) -> proto::Metric {
    debug_assert_eq!(metric.labels.len(), values.len(), "{} has other labels", metric.name);
    let pairs = metric.labels.iter().zip(values).map(|(name, value)| {
        let mut pair = proto::LabelPair::default();
        pair.set_name((*name).to_owned());
        pair.set_value((*value).to_owned());
        pair
    });
    proto::Metric::from_label(pairs.collect())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::telemetry::metrics::catalogue::{BARRIER_SKEW, RUNS, TRANSFER_STAGES};

    #[test]
    fn counts_that_workers_report_are_added_up_as_far_as_a_number_goes() {
        let mut page = ScrapeOutput::default();
        page.add_transfer_engine_histogram(&TRANSFER_STAGES, &["a", "move"], &[1, u64::MAX, 1], u64::MAX);
        // The text format writes floating-point numbers, which hold these values exactly.
        let text = page.to_text(CATALOGUE);
        for line in [
            "muster_transfer_stage_seconds_bucket{muster_job=\"a\",stage=\"move\",le=\"0.0001\"} 18446744073709552000",
            "muster_transfer_stage_seconds_count{muster_job=\"a\",stage=\"move\"} 18446744073709552000",
        ] {
            assert!(text.contains(line), "no {line} in:\n{text}");
        }
    }

    #[test]
    fn samples_are_written_in_the_text_format() {
        let mut page = ScrapeOutput::default();
        page.add_integer_sample(&RUNS, &["a", "failed"], 2);
        let mut skew = ExportedHistogram::new(&[0.1, 1.0]);
        for value in [0.1, 0.2, 5.0] {
            skew.observe(value);
        }
        page.add_histogram(&BARRIER_SKEW, &["a", "client"], &skew);
        let text = page.to_text(CATALOGUE);
        for line in [
            "# TYPE muster_runs_total counter",
            "muster_runs_total{muster_job=\"a\",outcome=\"failed\"} 2",
            "muster_barrier_skew_seconds_bucket{muster_job=\"a\",kind=\"client\",le=\"0.1\"} 1",
            "muster_barrier_skew_seconds_bucket{muster_job=\"a\",kind=\"client\",le=\"1\"} 2",
            "muster_barrier_skew_seconds_bucket{muster_job=\"a\",kind=\"client\",le=\"+Inf\"} 3",
            "muster_barrier_skew_seconds_count{muster_job=\"a\",kind=\"client\"} 3",
        ] {
            assert!(text.contains(line), "no {line} in:\n{text}");
        }
    }
}
