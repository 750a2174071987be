//! Writes the metrics of a worker.
//!
//! It serves nothing (`cli::worker`). Begin at `page`.

use std::sync::atomic::Ordering;

use super::{AgentShared, transfer_reports};
use crate::telemetry::metrics::Scrape;
use crate::telemetry::metrics::catalogue::{self as metric, CATALOGUE, WORKER};
use crate::transfer::{Stage, TransportKind, registered_bytes};

/// Writes all metrics of the worker.
pub(super) fn page(inner: &AgentShared) -> String {
    let (engine, mut page) = (&inner.engine, Scrape::default());
    let here = engine.here();
    let (task, incarnation) = (here.task.to_string(), format!("{:016x}", here.incarnation.get()));
    page.count(&metric::ENGINE_INFO, &[env!("CARGO_PKG_VERSION"), &task, &incarnation], 1);
    let clock = transfer_reports::with(&inner.report_state, |tally| tally.clock());
    for pair in transfer_reports::pairs(engine) {
        let peer = pair.peer.to_string();
        for (direction, bytes) in [("sent", pair.sent_bytes), ("received", pair.received_bytes)] {
            page.count(&metric::ENGINE_BYTES, &[&peer, &pair.transport, direction], bytes);
        }
    }
    let meters = engine.meters();
    for (outcome, launches) in meters.ended() {
        page.count(&metric::ENGINE_LAUNCHES, &[outcome], launches);
    }
    for stage in Stage::ALL {
        let times = meters.times(stage);
        page.times(&metric::ENGINE_STAGES, &[stage.name()], &times.counts, times.sum_us);
    }
    for (kind, size, times) in meters.durations() {
        page.times(&metric::ENGINE_DURATIONS, &[kind.name(), size], &times.counts, times.sum_us);
    }
    for (reason, connections) in meters.aborts() {
        page.count(&metric::ENGINE_ABORTS, &[reason], connections);
    }
    for (class, bytes) in engine.in_flight() {
        page.count(&metric::ENGINE_IN_FLIGHT_BYTES, &[class.name()], bytes);
    }
    let links = engine.links();
    page.size(&metric::ENGINE_IN_FLIGHT, &[], links.iter().map(|link| link.launched).sum());
    for kind in TransportKind::ALL {
        let of_kind = || links.iter().filter(|link| link.kind == kind);
        page.size(&metric::ENGINE_CONNECTIONS, &[kind.name()], of_kind().count());
        page.size(&metric::ENGINE_LANES, &[kind.name()], of_kind().map(|link| link.lanes).sum());
    }
    let (size, hits, misses, evictions) = engine.cliques();
    page.size(&metric::ENGINE_CLIQUES, &[], size);
    for (event, count) in [("hit", hits), ("miss", misses), ("eviction", evictions)] {
        page.count(&metric::ENGINE_CACHE, &[event], count);
    }
    let counts = engine.counts();
    let of = |count: &std::sync::atomic::AtomicU64| count.load(Ordering::Relaxed);
    page.count(&metric::ENGINE_FENCED, &[], of(&counts.fenced));
    for (cause, count) in
        [("damaged", &counts.damaged), ("lane", &counts.lanes_made), ("fetch", &counts.fallbacks)]
    {
        page.count(&metric::ENGINE_RETRIES, &[cause], of(count));
    }
    page.count(&metric::ENGINE_LANES_LOST, &[], of(&counts.lanes_lost));
    page.count(&metric::ENGINE_REGISTERED, &[], registered_bytes());
    if let Some(clock) = clock {
        page.write_sample(&metric::ENGINE_CLOCK, &[], clock.ahead_seconds());
    }
    page.show_process();
    let process = CATALOGUE.iter().filter(|metric| metric.name.starts_with("process_"));
    page.write(WORKER.iter().chain(process))
}
