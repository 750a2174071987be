//! Tests of metrics as Prometheus and Grafana see them: a real Prometheus scrapes a real server with tasks, and
//! evaluates every expression of `dashboards/`.
//!
//! Prometheus and promtool must be installed (`apt-get install prometheus`). `tests/run` installs them.

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

/// Returns the folder of the dashboards and rules.
fn dashboards_folder() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("dashboards")
}

/// The file names of the dashboards.
const DASHBOARDS: [&str; 3] = ["overview.json", "job.json", "internals.json"];
