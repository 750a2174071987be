//! Reads the dashboards as data.

use std::collections::BTreeSet;

use muster::telemetry::metrics::catalogue::{CATALOGUE, MetricKind};
use serde_json::Value;

use crate::DASHBOARDS;
use crate::prometheus::read_dashboards_file;

/// One dashboard.
pub struct Dashboard {
    pub file: &'static str,
    pub json: Value,
}

impl Dashboard {
    pub fn load_all() -> Vec<Self> {
        let load = |file: &'static str| {
            let json = serde_json::from_str(&read_dashboards_file(file))
                .unwrap_or_else(|error| panic!("{file}: {error}"));
            Self { file, json }
        };
        DASHBOARDS.into_iter().map(load).collect()
    }

    /// Returns every panel, including those in collapsed rows.
    pub fn panels(&self) -> Vec<&Value> {
        let list = |value: &'static str, of: &Value| -> usize { of[value].as_array().map_or(0, Vec::len) };
        let mut panels = Vec::new();
        for panel in self.json["panels"].as_array().into_iter().flatten() {
            if list("panels", panel) > 0 {
                panels.extend(panel["panels"].as_array().into_iter().flatten());
            }
            panels.push(panel);
        }
        panels
    }

    /// Returns every panel with an expression.
    pub fn charts(&self) -> Vec<&Value> {
        self.panels().into_iter().filter(|panel| panel["type"] != "row").collect()
    }

    /// Returns every expression with the title of its panel.
    pub fn expressions(&self) -> Vec<(String, String)> {
        let of = |panel: &Value| -> Vec<(String, String)> {
            let title = panel["title"].as_str().unwrap_or_default();
            let targets = panel["targets"].as_array().into_iter().flatten();
            let expr = |target: &Value| target["expr"].as_str().unwrap_or_default().to_owned();
            targets.map(|target| (format!("{}: {title}", self.file), expr(target))).collect()
        };
        self.charts().into_iter().flat_map(of).collect()
    }

    /// Returns the variables.
    pub fn variables(&self) -> Vec<&Value> {
        self.json["templating"]["list"].as_array().into_iter().flatten().collect()
    }
}

/// Returns an expression with the variables replaced as Grafana does.
pub fn fill_in_variables(expr: &str) -> String {
    let all = [("$__rate_interval", "15s"), ("$__range", "1m")];
    let some = [("$muster_job", ".+"), ("$job", ".+"), ("$instance", ".+")];
    all.iter().chain(&some).fold(expr.to_owned(), |expr, (name, value)| expr.replace(name, value))
}

/// Returns Muster's metrics in an expression, by their names in the catalogue.
pub fn metric_names_in(expr: &str) -> BTreeSet<String> {
    let word = |c: char| c.is_ascii_alphanumeric() || c == '_' || c == ':';
    let mut names = BTreeSet::new();
    for name in expr.split(|c| !word(c)) {
        // A label, or the name of a recording rule.
        if name == "muster_job" || name.contains(':') {
            continue;
        }
        if name.starts_with("muster_") || name.starts_with("process_") {
            let histogram = |base: &&str| {
                CATALOGUE.iter().any(|metric| metric.name == *base && metric.kind == MetricKind::Histogram)
            };
            let base = ["_bucket", "_sum", "_count"].iter().find_map(|end| name.strip_suffix(end));
            names.insert(base.filter(histogram).unwrap_or(name).to_owned());
        }
    }
    names
}
