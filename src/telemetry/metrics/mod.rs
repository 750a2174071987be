//! Metrics for Prometheus: counts of events, and values that are read when Prometheus scrapes them.
//!
//! [`catalogue`] names and explains every metric. [`EventCounters`] counts events; the driver (`engine`) calls it
//! while the driver holds its lock. All other values are read at a scrape, from [`JobObservation`]s and from the
//! counters of the driver. Higher layers, such as the ports and the findings, write their own samples
//! ([`MetricSource`]). Begin at `Metrics`.

pub mod catalogue;
mod counters;
mod journal;
mod text_format;

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

#[cfg(target_os = "linux")]
use self::catalogue as metric;
pub use self::counters::EventCounters;
pub use self::text_format::ScrapeOutput;
use crate::coordination::{
    BarrierKind, GapHistogram, HostState, JobId, JobObservation, RunState, TaskPhase, TaskState,
};
use crate::engine::Engine;
use crate::meter;
use crate::text::micros_to_seconds;
use crate::tls::HandshakeFailures;

/// The media type of a scrape.
pub const TEXT_FORMAT: &str = "text/plain; version=0.0.4; charset=utf-8";

/// The sampling interval of timer lag.
const LAG_SAMPLED: Duration = Duration::from_millis(500);

const TASK_STATES: [(RunState, &str); 5] = [
    (RunState::Forming, "forming"),
    (RunState::Running, "running"),
    (RunState::Completed, "completed"),
    (RunState::Failed, "failed"),
    (RunState::Abandoned, "abandoned"),
];

/// A part of the server with samples of its own.
pub trait MetricSource: Send + Sync {
    /// Writes its samples.
    fn write_samples(&self, page: &mut ScrapeOutput);

    /// Writes the samples of one job, of which the scrape holds this copy.
    fn write_job_samples(&self, _seen: &JobObservation, _page: &mut ScrapeOutput) {}
}

/// The sources of metrics.
#[derive(Clone)]
pub struct MetricSources {
    /// The engine.
    pub engine: Arc<Engine>,
    /// The counters of events.
    pub tally: Arc<EventCounters>,
    /// The handshakes that failed.
    pub handshakes: Arc<HandshakeFailures>,
    /// Further sources, such as the HTTP port.
    pub others: Vec<Arc<dyn MetricSource>>,
}

/// The metrics of a server.
pub struct Metrics {
    sources: MetricSources,
    /// Jobs with more tasks have no metrics for each task.
    tasks_max: usize,
    scrapes: AtomicU64,
    scrape_us: AtomicU64,
}

impl Metrics {
    /// Returns the metrics of a server. Jobs with more tasks than `tasks_max` have no metrics for each task.
    #[must_use]
    pub fn new(sources: MetricSources, tasks_max: usize) -> Self {
        Self { sources, tasks_max, scrapes: AtomicU64::new(0), scrape_us: AtomicU64::new(0) }
    }

    /// Returns the metrics of an engine alone, without event counters.
    #[must_use]
    pub fn for_engine(engine: &Arc<Engine>, others: Vec<Arc<dyn MetricSource>>) -> Self {
        let sources = MetricSources {
            engine: Arc::clone(engine),
            tally: Arc::new(EventCounters::new([])),
            handshakes: Arc::new(HandshakeFailures::new(*engine.clock())),
            others,
        };
        Self::new(sources, 0)
    }

    /// Samples the lag of timers for as long as it is polled.
    pub async fn sample_timer_lag(engine: Arc<Engine>, tally: Arc<EventCounters>) {
        loop {
            let due = engine.clock().now().after(LAG_SAMPLED);
            tokio::time::sleep(LAG_SAMPLED).await;
            tally.record_timer_lag(engine.clock().now().since(due));
        }
    }

    /// Returns all samples in the text format; `None` in a build without metrics. It reads every task, and
    /// holds the lock of a job only while it does.
    #[must_use]
    pub fn scrape(&self) -> Option<String> {
        if !meter::ENABLED {
            return None;
        }
        let began = self.sources.engine.clock().now();
        let mut page = ScrapeOutput::default();
        self.write_server_samples(&mut page);
        let jobs: Vec<JobId> = self.sources.engine.read(|core, _| core.jobs().map(|(job, _)| job).collect());
        self.sources.tally.retain_jobs(|job| jobs.contains(&job));
        page.add_usize_sample(&metric::JOBS, &[], jobs.len());
        for job in jobs {
            if let Some(seen) = self.sources.engine.read(|core, now| core.observe_job(job, now)) {
                self.write_job_samples(&seen, &mut page);
                self.sources.tally.write_job_counters(job, seen.name.as_str(), &mut page);
            }
        }
        page.add_process_metrics();
        let text = page.to_text(metric::CATALOGUE);
        let took = self.sources.engine.clock().now().since(began);
        self.scrape_us.store(u64::try_from(took.as_micros()).unwrap_or(u64::MAX), Ordering::Relaxed);
        self.scrapes.fetch_add(1, Ordering::Relaxed);
        Some(text)
    }

    fn write_server_samples(&self, page: &mut ScrapeOutput) {
        page.add_integer_sample(&metric::BUILD_INFO, &[env!("CARGO_PKG_VERSION")], 1);
        self.sources.others.iter().for_each(|other| other.write_samples(page));
        let figures = self.sources.engine.counters();
        page.add_integer_sample(&metric::INPUTS, &[], figures.inputs);
        page.add_integer_sample(&metric::LAGS, &[], figures.lags);
        page.add_integer_sample(&metric::EVENTS, &[], figures.events);
        page.add_usize_sample(&metric::EVENTS_KEPT, &[], figures.events_kept);
        page.add_usize_sample(&metric::EVENTS_LIMIT, &[], figures.events_kept_max);
        page.add_integer_sample(&metric::EVENTS_MISSED, &[], figures.events_missed);
        page.add_usize_sample(&metric::FOLLOWERS, &[], figures.followers);
        journal::write_journal_samples(&self.sources.engine, page);
        let locks = self.sources.engine.lock_times();
        for (user, lock) in [("input", &locks.inputs), ("bulk", &locks.bulk), ("look", &locks.reads)] {
            page.add_duration_histogram(&metric::LOCK_WAIT, &[user], &lock.waited.snapshot());
            page.add_duration_histogram(&metric::LOCK_HELD, &[user], &lock.held.snapshot());
            #[expect(clippy::cast_precision_loss, reason = "a time, to the nanosecond for a hundred days")]
            page.add_sample(&metric::LOCK_LONGEST, &[user], lock.held.longest_ns() as f64 / 1e9);
        }
        for (listener, fault, count) in self.sources.handshakes.failure_counts() {
            page.add_integer_sample(&metric::HANDSHAKES_FAILED, &[listener, fault.name()], count);
        }
        self.sources.tally.write_timer_lag(page);
        page.add_integer_sample(&metric::SCRAPES, &[], self.scrapes.load(Ordering::Relaxed));
        page.add_sample(
            &metric::SCRAPE_DURATION,
            &[],
            micros_to_seconds(self.scrape_us.load(Ordering::Relaxed)),
        );
    }

    fn write_job_samples(&self, seen: &JobObservation, page: &mut ScrapeOutput) {
        let job = seen.name.as_str();
        page.add_usize_sample(&metric::JOB_TASKS, &[job], seen.tasks.len());
        page.add_sample(&metric::JOB_HEARTBEAT_TIMEOUT, &[job], seen.heartbeat_timeout.as_secs_f64());
        for (state, name) in TASK_STATES {
            page.add_integer_sample(&metric::RUN_STATE, &[job, name], u64::from(state == seen.state));
        }
        page.add_integer_sample(&metric::RUN_NUMBER, &[job], seen.run.0);
        page.add_timestamp_sample(&metric::RUN_OPENED, &[job], seen.opened_at);
        if let Some(started) = seen.started_at {
            page.add_timestamp_sample(&metric::RUN_STARTED, &[job], started);
        }
        for state in TaskState::ALL {
            page.add_usize_sample(&metric::TASKS, &[job, state.name()], seen.counts.get(state));
        }
        for state in HostState::ALL {
            page.add_usize_sample(&metric::HOSTS, &[job, state.name()], seen.host_counts.get(state));
        }
        page.add_usize_sample(&metric::LIVE_TASKS, &[job], seen.live);
        page.add_usize_sample(&metric::EXCLUSIONS, &[job], seen.exclusions);
        for (name, waiting) in [
            ("barrier", seen.waiting.barrier),
            ("error", seen.waiting.poll),
            ("key", seen.waiting.key),
            ("live-set", seen.waiting.live_set),
            ("change", seen.waiting.watch),
        ] {
            page.add_usize_sample(&metric::WAITING_CALLS, &[job, name], waiting);
        }
        page.add_usize_sample(&metric::STORE_KEYS, &[job], seen.keys);
        page.add_usize_sample(&metric::STORE_BYTES, &[job], seen.store_bytes);
        for bound in &seen.bounds {
            page.add_usize_sample(&metric::BOUND_LIMIT, &[job, bound.name], bound.limit);
            if let Some(used) = bound.used {
                page.add_usize_sample(&metric::BOUND_USED, &[job, bound.name], used);
            }
        }
        write_heartbeat_gaps(job, &seen.gaps, page);
        write_barrier_samples(job, seen, page);
        self.write_task_samples(job, seen, page);
        self.sources.others.iter().for_each(|other| other.write_job_samples(seen, page));
    }

    fn write_task_samples(&self, job: &str, seen: &JobObservation, page: &mut ScrapeOutput) {
        let omitted = seen.tasks.len() > self.tasks_max;
        page.add_integer_sample(&metric::TASK_METRICS_OMITTED, &[job], u64::from(omitted));
        if omitted {
            return;
        }
        for task in &seen.tasks {
            let number = task.task.to_string();
            let labels = [job, number.as_str()];
            let up = matches!(task.standing, TaskPhase::Connected | TaskPhase::Suspect);
            page.add_integer_sample(&metric::TASK_UP, &labels, u64::from(up));
            if let Some(heard) = task.last_heartbeat {
                page.add_timestamp_sample(&metric::TASK_LAST_HEARTBEAT, &labels, heard);
            }
            if let Some(straggling) = &task.straggling {
                page.add_sample(&metric::TASK_STRAGGLER_SCORE, &labels, straggling.score);
                page.add_sample(&metric::TASK_LATENESS, &labels, micros_to_seconds(straggling.lateness_us));
                page.add_sample(&metric::TASK_HELD_UP, &labels, micros_to_seconds(straggling.held_up_us));
            }
        }
    }
}

fn write_heartbeat_gaps(job: &str, gaps: &GapHistogram, page: &mut ScrapeOutput) {
    let bounds =
        (0..gaps.counts.len()).map_while(GapHistogram::upper_bound_us_of_bucket).map(micros_to_seconds);
    let bounded = bounds.zip(&gaps.counts);
    page.add_bucketed_histogram(
        &metric::HEARTBEAT_GAPS,
        &[job],
        bounded,
        &gaps.counts,
        micros_to_seconds(gaps.sum_us),
    );
}

fn write_barrier_samples(job: &str, seen: &JobObservation, page: &mut ScrapeOutput) {
    for kind in BarrierKind::ALL {
        let of_kind = || seen.barriers.iter().filter(move |barrier| barrier.kind == kind);
        let labels = [job, kind.name()];
        page.add_usize_sample(&metric::BARRIERS_IN_PROGRESS, &labels, of_kind().count());
        page.add_usize_sample(
            &metric::BARRIER_MISSING,
            &labels,
            of_kind().map(|barrier| barrier.missing).sum(),
        );
        if let Some(oldest) = of_kind().map(|barrier| barrier.since).min() {
            page.add_timestamp_sample(&metric::BARRIER_OLDEST, &labels, oldest);
        }
    }
}
