//! Metrics for Prometheus: projections of the engine's effects, and values that are read at the scrape.
//!
//! [`catalogue`] names and explains every metric. [`EventCounters`] counts events; the engine calls it under
//! its lock. All other values are read at the scrape, from [`JobObservation`]s and the counters of the engine.
//! Higher layers, such as the ports and the findings, write their own samples ([`MetricSource`]). Begin at
//! `Metrics`.

pub mod catalogue;
mod counters;
mod text_format;

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

#[cfg(target_os = "linux")]
use self::catalogue as metric;
pub use self::counters::EventCounters;
use self::counters::seconds;
pub use self::text_format::Scrape;
use crate::coordination::{BarrierKind, GapHistogram, JobId, JobObservation, RunState, TaskPhase, TaskState};
use crate::engine::Engine;
use crate::meter;
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
    fn show(&self, page: &mut Scrape);

    /// Writes the samples of one job, of which the scrape holds this copy.
    fn show_job(&self, _seen: &JobObservation, _page: &mut Scrape) {}
}

/// The sources of metrics.
#[derive(Clone)]
pub struct MetricInputs {
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
    sources: MetricInputs,
    /// Jobs with more tasks have no metrics for each task.
    tasks_max: usize,
    scrapes: AtomicU64,
    scrape_us: AtomicU64,
}

impl Metrics {
    /// Returns the metrics of a server. Jobs with more tasks than `tasks_max` have no metrics for each task.
    #[must_use]
    pub fn new(sources: MetricInputs, tasks_max: usize) -> Self {
        Self { sources, tasks_max, scrapes: AtomicU64::new(0), scrape_us: AtomicU64::new(0) }
    }

    /// Returns the metrics of an engine alone, without event counters.
    #[must_use]
    pub fn for_engine(engine: &Arc<Engine>, others: Vec<Arc<dyn MetricSource>>) -> Self {
        let sources = MetricInputs {
            engine: Arc::clone(engine),
            tally: Arc::new(EventCounters::new([])),
            handshakes: Arc::new(HandshakeFailures::new(*engine.clock())),
            others,
        };
        Self::new(sources, 0)
    }

    /// Samples the lag of timers for as long as it is polled.
    pub async fn sample_lag(engine: Arc<Engine>, tally: Arc<EventCounters>) {
        loop {
            let due = engine.clock().now().after(LAG_SAMPLED);
            tokio::time::sleep(LAG_SAMPLED).await;
            tally.record_lag(engine.clock().now().since(due));
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
        let mut page = Scrape::default();
        self.show_server(&mut page);
        let jobs: Vec<JobId> = self.sources.engine.read(|core, _| core.jobs().map(|(job, _)| job).collect());
        self.sources.tally.keep(|job| jobs.contains(&job));
        page.size(&metric::JOBS, &[], jobs.len());
        for job in jobs {
            if let Some(seen) = self.sources.engine.read(|core, now| core.observe(job, now)) {
                self.show_job(&seen, &mut page);
                self.sources.tally.show(job, seen.name.as_str(), &mut page);
            }
        }
        page.show_process();
        let text = page.write(metric::CATALOGUE);
        let took = self.sources.engine.clock().now().since(began);
        self.scrape_us.store(u64::try_from(took.as_micros()).unwrap_or(u64::MAX), Ordering::Relaxed);
        self.scrapes.fetch_add(1, Ordering::Relaxed);
        Some(text)
    }

    fn show_server(&self, page: &mut Scrape) {
        page.count(&metric::BUILD_INFO, &[env!("CARGO_PKG_VERSION")], 1);
        self.sources.others.iter().for_each(|other| other.show(page));
        let figures = self.sources.engine.counters();
        page.count(&metric::INPUTS, &[], figures.inputs);
        page.count(&metric::LAGS, &[], figures.lags);
        page.count(&metric::EVENTS, &[], figures.events);
        page.size(&metric::EVENTS_KEPT, &[], figures.events_kept);
        page.size(&metric::EVENTS_LIMIT, &[], figures.events_kept_max);
        page.count(&metric::EVENTS_MISSED, &[], figures.events_missed);
        page.size(&metric::FOLLOWERS, &[], figures.followers);
        let locks = self.sources.engine.locks();
        for (user, lock) in [("input", &locks.inputs), ("bulk", &locks.bulk), ("look", &locks.reads)] {
            page.record_duration(&metric::LOCK_WAIT, &[user], &lock.waited.read());
            page.record_duration(&metric::LOCK_HELD, &[user], &lock.held.read());
            #[expect(clippy::cast_precision_loss, reason = "a time, to the nanosecond for a hundred days")]
            page.write_sample(&metric::LOCK_LONGEST, &[user], lock.held.longest_ns() as f64 / 1e9);
        }
        for (listener, fault, count) in self.sources.handshakes.faults() {
            page.count(&metric::HANDSHAKES_FAILED, &[listener, fault.name()], count);
        }
        self.sources.tally.show_lag(page);
        page.count(&metric::SCRAPES, &[], self.scrapes.load(Ordering::Relaxed));
        page.write_sample(&metric::SCRAPE_DURATION, &[], seconds(self.scrape_us.load(Ordering::Relaxed)));
    }

    fn show_job(&self, seen: &JobObservation, page: &mut Scrape) {
        let job = seen.name.as_str();
        page.size(&metric::JOB_TASKS, &[job], seen.tasks.len());
        page.write_sample(&metric::JOB_HEARTBEAT_TIMEOUT, &[job], seen.heartbeat_timeout.as_secs_f64());
        for (state, name) in TASK_STATES {
            page.count(&metric::RUN_STATE, &[job, name], u64::from(state == seen.state));
        }
        page.count(&metric::RUN_NUMBER, &[job], seen.run.0);
        page.write_timestamp(&metric::RUN_OPENED, &[job], seen.opened_at);
        if let Some(started) = seen.started_at {
            page.write_timestamp(&metric::RUN_STARTED, &[job], started);
        }
        for state in TaskState::ALL {
            page.size(&metric::TASKS, &[job, state.name()], seen.counts.get(state));
        }
        page.size(&metric::LIVE_TASKS, &[job], seen.live);
        page.size(&metric::EXCLUSIONS, &[job], seen.exclusions);
        for (name, waiting) in [
            ("barrier", seen.waiting.barrier),
            ("error", seen.waiting.poll),
            ("key", seen.waiting.key),
            ("live-set", seen.waiting.live_set),
            ("change", seen.waiting.watch),
        ] {
            page.size(&metric::WAITING_CALLS, &[job, name], waiting);
        }
        page.size(&metric::STORE_KEYS, &[job], seen.keys);
        page.size(&metric::STORE_BYTES, &[job], seen.store_bytes);
        for bound in &seen.bounds {
            page.size(&metric::BOUND_LIMIT, &[job, bound.name], bound.limit);
            if let Some(used) = bound.used {
                page.size(&metric::BOUND_USED, &[job, bound.name], used);
            }
        }
        show_gaps(job, &seen.gaps, page);
        show_barriers(job, seen, page);
        self.show_tasks(job, seen, page);
        self.sources.others.iter().for_each(|other| other.show_job(seen, page));
    }

    fn show_tasks(&self, job: &str, seen: &JobObservation, page: &mut Scrape) {
        let omitted = seen.tasks.len() > self.tasks_max;
        page.count(&metric::TASK_METRICS_OMITTED, &[job], u64::from(omitted));
        if omitted {
            return;
        }
        for task in &seen.tasks {
            let number = task.task.to_string();
            let labels = [job, number.as_str()];
            let up = matches!(task.standing, TaskPhase::Connected | TaskPhase::Suspect);
            page.count(&metric::TASK_UP, &labels, u64::from(up));
            if let Some(heard) = task.last_heartbeat {
                page.write_timestamp(&metric::TASK_LAST_HEARTBEAT, &labels, heard);
            }
            if let Some(straggling) = &task.straggling {
                page.write_sample(&metric::TASK_STRAGGLER_SCORE, &labels, straggling.score);
                page.write_sample(&metric::TASK_LATENESS, &labels, seconds(straggling.lateness_us));
                page.write_sample(&metric::TASK_HELD_UP, &labels, seconds(straggling.held_up_us));
            }
        }
    }
}

fn show_gaps(job: &str, gaps: &GapHistogram, page: &mut Scrape) {
    let bounds = (0..gaps.counts.len()).map_while(GapHistogram::longest_us).map(seconds);
    let bounded = bounds.zip(&gaps.counts);
    page.buckets(&metric::HEARTBEAT_GAPS, &[job], bounded, &gaps.counts, seconds(gaps.sum_us));
}

fn show_barriers(job: &str, seen: &JobObservation, page: &mut Scrape) {
    for kind in BarrierKind::ALL {
        let of_kind = || seen.barriers.iter().filter(move |barrier| barrier.kind == kind);
        let labels = [job, kind.name()];
        page.size(&metric::BARRIERS_IN_PROGRESS, &labels, of_kind().count());
        page.size(&metric::BARRIER_MISSING, &labels, of_kind().map(|barrier| barrier.missing).sum());
        if let Some(oldest) = of_kind().map(|barrier| barrier.since).min() {
            page.write_timestamp(&metric::BARRIER_OLDEST, &labels, oldest);
        }
    }
}
