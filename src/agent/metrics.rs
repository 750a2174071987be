//! Writes the metrics of a worker as text for Prometheus.
//!
//! `cli::worker` serves the text. Begin at `render_metrics`.

use std::sync::atomic::Ordering;

use super::report_state;
use super::shared::AgentShared;
use crate::telemetry::metrics::ScrapeOutput;
use crate::telemetry::metrics::catalogue::{self as metric, CATALOGUE, WORKER};
use crate::transfer::{LaunchStage, TransportKind, registered_bytes, registered_device_bytes};

/// Writes all metrics of the worker.
pub(super) fn render_metrics(inner: &AgentShared) -> String {
    let (engine, mut page) = (&inner.engine, ScrapeOutput::default());
    let here = engine.here();
    let (task, incarnation) = (here.task.to_string(), format!("{:016x}", here.incarnation.get()));
    page.add_integer_sample(&metric::ENGINE_INFO, &[env!("CARGO_PKG_VERSION"), &task, &incarnation], 1);
    let clock = report_state::with_locked_report_state(&inner.report_state, |tally| tally.clock_offset());
    for pair in report_state::bytes_by_peer_and_transport(engine) {
        let peer = match pair.peer_job.as_str() {
            "" => pair.peer.to_string(),
            job => format!("{job}/{}", pair.peer),
        };
        for (direction, bytes) in [("sent", pair.sent_bytes), ("received", pair.received_bytes)] {
            page.add_integer_sample(&metric::ENGINE_BYTES, &[&peer, &pair.transport, direction], bytes);
        }
    }
    let launch_metrics = engine.launch_metrics();
    for (outcome, launches) in launch_metrics.outcome_counts() {
        page.add_integer_sample(&metric::ENGINE_LAUNCHES, &[outcome], launches);
    }
    for stage in LaunchStage::ALL {
        let times = launch_metrics.stage_times(stage);
        page.add_transfer_engine_histogram(
            &metric::ENGINE_STAGES,
            &[stage.name()],
            &times.counts,
            times.sum_us,
        );
    }
    for (kind, size, times) in launch_metrics.durations() {
        page.add_transfer_engine_histogram(
            &metric::ENGINE_DURATIONS,
            &[kind.name(), size],
            &times.counts,
            times.sum_us,
        );
    }
    for (reason, connections) in launch_metrics.connection_aborts() {
        page.add_integer_sample(&metric::ENGINE_ABORTS, &[reason], connections);
    }
    for (class, bytes) in engine.bytes_in_flight() {
        page.add_integer_sample(&metric::ENGINE_IN_FLIGHT_BYTES, &[class.name()], bytes);
    }
    let links = engine.links();
    let with_peers: usize = links.iter().map(|link| link.launched).sum();
    page.add_usize_sample(&metric::ENGINE_IN_FLIGHT, &[], with_peers + engine.local_launches_in_flight());
    for kind in TransportKind::ALL {
        let of_kind = || links.iter().filter(|link| link.kind == kind);
        page.add_usize_sample(&metric::ENGINE_CONNECTIONS, &[kind.name()], of_kind().count());
        page.add_usize_sample(&metric::ENGINE_LANES, &[kind.name()], of_kind().map(|link| link.lanes).sum());
    }
    let (size, hits, misses, evictions) = engine.clique_cache_stats();
    page.add_usize_sample(&metric::ENGINE_CLIQUES, &[], size);
    for (event, count) in [("hit", hits), ("miss", misses), ("eviction", evictions)] {
        page.add_integer_sample(&metric::ENGINE_CACHE, &[event], count);
    }
    let counts = engine.counts();
    let of = |count: &std::sync::atomic::AtomicU64| count.load(Ordering::Relaxed);
    page.add_integer_sample(&metric::ENGINE_FENCED, &[], of(&counts.fenced));
    for (cause, count) in
        [("damaged", &counts.damaged), ("lane", &counts.lanes_made), ("fetch", &counts.fallbacks)]
    {
        page.add_integer_sample(&metric::ENGINE_RETRIES, &[cause], of(count));
    }
    page.add_integer_sample(&metric::ENGINE_LANES_LOST, &[], of(&counts.lanes_lost));
    page.add_integer_sample(&metric::ENGINE_REGISTERED, &[], registered_bytes());
    page.add_integer_sample(&metric::ENGINE_REGISTERED_DEVICE, &[], registered_device_bytes());
    if let Some(clock) = clock {
        page.add_sample(&metric::ENGINE_CLOCK, &[], clock.ahead_seconds());
    }
    page.add_process_metrics();
    let process = CATALOGUE.iter().filter(|metric| metric.name.starts_with("process_"));
    page.to_text(WORKER.iter().chain(process))
}
