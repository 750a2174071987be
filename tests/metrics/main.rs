//! Metrics as Prometheus and Grafana see them: a real server with tasks, scraped by a real Prometheus, and every
//! expression of `dashboards/` held against it.
//!
//! Prometheus and promtool must be installed (`apt-get install prometheus`; `tests/run` does it).

mod dashboards;
mod fixture;
mod linter;
mod live;
mod prometheus;
mod rules;
mod scale;
#[path = "../support/mod.rs"]
mod support;

use std::path::PathBuf;

/// The folder of the dashboards and rules.
fn folder() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("dashboards")
}

/// The dashboards, by the names of their files.
const DASHBOARDS: [&str; 3] = ["overview.json", "job.json", "internals.json"];
