//! Checks the dashboards against the rules that Grafana publishes for dashboards of mixins (packages of dashboards
//! and alerts).

use std::collections::BTreeSet;

use muster::telemetry::metrics::catalogue::{CATALOGUE, MetricKind};
use serde_json::Value;

use crate::dashboards::Dashboard;

/// Collects all errors, so that one run reports them together.
struct LintErrors(Vec<String>);

impl LintErrors {
    fn add_unless(&mut self, holds: bool, what: impl Into<String>) {
        if !holds {
            self.0.push(what.into());
        }
    }
}

impl Drop for LintErrors {
    fn drop(&mut self) {
        assert!(self.0.is_empty() || std::thread::panicking(), "\n{}", self.0.join("\n"));
    }
}

fn lint_each_dashboard(check: impl Fn(&Dashboard, &mut LintErrors)) {
    let mut wrong = LintErrors(Vec::new());
    for dashboard in Dashboard::load_all() {
        check(&dashboard, &mut wrong);
    }
}

#[test]
fn dashboards_have_names_of_their_own_and_are_not_edited_in_place() {
    let mut uids = BTreeSet::new();
    for dashboard in Dashboard::load_all() {
        let json = &dashboard.json;
        let uid = json["uid"].as_str().unwrap_or_default().to_owned();
        assert!(!uid.is_empty() && uid.len() <= 40 && uids.insert(uid), "{}: its uid", dashboard.file);
        assert!(
            json["title"].as_str().is_some_and(|title| title.starts_with("Muster / ")),
            "{}",
            dashboard.file
        );
        assert!(json["description"].as_str().is_some_and(|text| !text.is_empty()), "{}", dashboard.file);
        assert_eq!(json["editable"], false, "{}", dashboard.file);
        assert!(json["schemaVersion"].as_u64() >= Some(39), "{}", dashboard.file);
        assert!(
            json["tags"].as_array().is_some_and(|tags| tags.contains(&"muster".into())),
            "{}",
            dashboard.file
        );
        // A refresh more often than the scrape is useless.
        assert!(matches!(json["refresh"].as_str(), Some("30s" | "1m")), "{}", dashboard.file);
    }
}

#[test]
fn the_data_source_is_a_variable_and_every_panel_and_query_uses_it() {
    lint_each_dashboard(|dashboard, wrong| {
        let file = dashboard.file;
        let variable = dashboard.variables().into_iter().find(|variable| variable["type"] == "datasource");
        let Some(variable) = variable else {
            return wrong.add_unless(false, format!("{file}: no data source"));
        };
        wrong.add_unless(
            variable["name"] == "datasource",
            format!("{file}: the variable is called datasource"),
        );
        wrong.add_unless(variable["label"] == "Data source", format!("{file}: its label is Data source"));
        wrong.add_unless(variable["query"] == "prometheus", format!("{file}: it is a Prometheus"));
        let ours = |of: &Value| {
            of["datasource"]["uid"] == "${datasource}" && of["datasource"]["type"] == "prometheus"
        };
        for panel in dashboard.charts() {
            wrong.add_unless(ours(panel), format!("{file}: {} has a data source of its own", panel["title"]));
            for target in panel["targets"].as_array().into_iter().flatten() {
                wrong.add_unless(ours(target), format!("{file}: a query of {}", panel["title"]));
            }
        }
        for variable in dashboard.variables().into_iter().filter(|variable| variable["type"] == "query") {
            wrong.add_unless(ours(variable), format!("{file}: the variable {}", variable["name"]));
        }
    });
}

#[test]
fn job_and_instance_are_variables_that_may_be_all_and_are_asked_for_again() {
    lint_each_dashboard(|dashboard, wrong| {
        let file = dashboard.file;
        for name in ["job", "instance"] {
            let variable = dashboard.variables().into_iter().find(|variable| variable["name"] == name);
            let Some(variable) = variable else {
                wrong.add_unless(false, format!("{file}: no variable {name}"));
                continue;
            };
            wrong.add_unless(variable["type"] == "query", format!("{file}: {name} is asked for"));
            wrong.add_unless(variable["label"] == name, format!("{file}: the label of {name}"));
            wrong.add_unless(variable["multi"] == true, format!("{file}: {name} may be several"));
            wrong.add_unless(variable["includeAll"] == true, format!("{file}: {name} may be all"));
            wrong.add_unless(variable["allValue"] == ".+", format!("{file}: all of {name} is .+"));
        }
        for variable in dashboard.variables().into_iter().filter(|variable| variable["type"] == "query") {
            wrong.add_unless(
                variable["refresh"] == 2,
                format!("{file}: {} is asked for again", variable["name"]),
            );
        }
        for (panel, expr) in dashboard.expressions() {
            let selectors = expr.matches('{').count();
            for matcher in ["job=~\"$job\"", "instance=~\"$instance\""] {
                // `muster_job=~"$muster_job"` contains `job=~…` but is another matcher.
                let found =
                    expr.match_indices(matcher).filter(|(at, _)| !expr[..*at].ends_with("muster_")).count();
                wrong
                    .add_unless(found == selectors && selectors > 0, format!("{panel}: {matcher} in {expr}"));
            }
        }
    });
}

#[test]
fn every_panel_has_a_title_a_description_a_unit_a_legend_and_a_query() {
    lint_each_dashboard(|dashboard, wrong| {
        let mut titles = BTreeSet::new();
        for panel in dashboard.charts() {
            let place = format!("{}: {}", dashboard.file, panel["title"]);
            let text = |of: &Value| of.as_str().is_some_and(|text| !text.trim().is_empty());
            wrong.add_unless(text(&panel["title"]), format!("{place}: no title"));
            wrong.add_unless(titles.insert(panel["title"].to_string()), format!("{place}: twice"));
            wrong.add_unless(text(&panel["description"]), format!("{place}: no description"));
            wrong.add_unless(text(&panel["fieldConfig"]["defaults"]["unit"]), format!("{place}: no unit"));
            let targets = panel["targets"].as_array().cloned().unwrap_or_default();
            wrong.add_unless(!targets.is_empty(), format!("{place}: no query"));
            for target in targets {
                wrong.add_unless(text(&target["legendFormat"]), format!("{place}: no legend"));
            }
            if panel["type"] == "timeseries" {
                let shown = &panel["options"]["legend"]["showLegend"];
                wrong.add_unless(*shown == true, format!("{place}: the legend is hidden"));
            }
        }
    });
}

#[test]
fn panels_have_their_own_numbers_and_do_not_lie_on_one_another() {
    lint_each_dashboard(|dashboard, wrong| {
        let (mut ids, mut taken) = (BTreeSet::new(), BTreeSet::new());
        for panel in dashboard.panels() {
            let place = format!("{}: {}", dashboard.file, panel["title"]);
            wrong.add_unless(ids.insert(panel["id"].to_string()), format!("{place}: its id"));
            let at = |name: &str| panel["gridPos"][name].as_u64().unwrap_or(99);
            wrong.add_unless(at("x") + at("w") <= 24, format!("{place}: it is beyond the edge"));
            for x in at("x")..at("x") + at("w") {
                for y in at("y")..at("y") + at("h") {
                    wrong.add_unless(taken.insert((x, y)), format!("{place}: something else is at {x}, {y}"));
                }
            }
        }
    });
}

#[test]
fn counters_are_shown_as_rates_over_the_interval_that_grafana_chooses() {
    lint_each_dashboard(|dashboard, wrong| {
        for (panel, expr) in dashboard.expressions() {
            for (at, _) in expr.match_indices('[') {
                let end = expr[at..].find(']').map_or(expr.len(), |end| at + end + 1);
                let range = &expr[at..end];
                wrong.add_unless(
                    matches!(range, "[$__rate_interval]" | "[$__range]"),
                    format!("{panel}: the interval {range}"),
                );
            }
            for metric in CATALOGUE.iter().filter(|metric| metric.kind != MetricKind::Gauge) {
                for (at, _) in expr.match_indices(metric.name) {
                    let rated = expr[..at].ends_with("rate(") || expr[..at].ends_with("increase(");
                    wrong.add_unless(rated, format!("{panel}: {} without a rate", metric.name));
                }
            }
        }
    });
}
