//! A real Prometheus scrapes a real server on which every metric changes.

use std::collections::BTreeSet;

use muster::service::findings;
use muster::telemetry::metrics::catalogue::CATALOGUE;

use crate::dashboards::{Dashboard, fill_in_variables, metric_names_in};
use crate::fixture::MetricsFixture;
use crate::prometheus::{Prometheus, promtool, promtool_errors};

/// Removes the threshold of an alert, so that the expression has a value whether the alert fires or not.
fn without_threshold(expr: &str) -> String {
    let number = |word: &str| word.parse::<f64>().is_ok();
    let mut words: Vec<&str> = Vec::new();
    let mut coming = expr.split(' ').peekable();
    while let Some(word) = coming.next() {
        if matches!(word, ">" | "<" | "==") && coming.peek().is_some_and(|next| number(next)) {
            coming.next();
            continue;
        }
        // A comparison of two metrics becomes `bool`, so that only their existence counts.
        words.push(if word == "<" { "<= bool" } else { word });
    }
    words.join(" ")
}

/// Returns the names of the samples, as in the catalogue.
fn exported_metric_names(scrape: &str) -> BTreeSet<String> {
    let samples = scrape.lines().filter(|line| !line.starts_with('#'));
    samples.flat_map(|line| metric_names_in(line.split(['{', ' ']).next().unwrap_or_default())).collect()
}

fn catalogue_metric_names() -> BTreeSet<String> {
    CATALOGUE.iter().map(|metric| metric.name.to_owned()).collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn every_panel_and_every_rule_has_an_answer_on_a_server_where_everything_happens() {
    let world = MetricsFixture::start().await;
    let prometheus = Prometheus::start_scraping(world.server.http);
    prometheus.wait_until_result("muster_job:muster_barrier_skew_seconds:p99_rate5m > 0").await;
    prometheus
        .wait_until_result(
            "min_over_time(muster_scrapes_total[20s]) > 0 and changes(muster_scrapes_total[20s]) > 5",
        )
        .await;

    let mut empty = Vec::new();
    let mut ask = |place: &str, expr: &str| match prometheus.query(expr) {
        Ok(values) if values.iter().any(|value| !value.is_nan()) => {}
        Ok(_) => empty.push(format!("{place} has no answer: {expr}")),
        Err(error) => empty.push(format!("{place}: {error}: {expr}")),
    };
    for dashboard in Dashboard::load_all() {
        for (panel, expr) in dashboard.expressions() {
            ask(&panel, &fill_in_variables(&expr));
        }
    }
    let rules = prometheus.rules();
    assert!(rules.len() > 20, "Prometheus has loaded the rules");
    for rule in &rules {
        let (name, query) =
            (rule["name"].as_str().unwrap_or_default(), rule["query"].as_str().unwrap_or_default());
        ask(name, &without_threshold(query));
        assert_eq!(rule["health"], "ok", "{name}: {}", rule["lastError"]);
        // The runbook address of an alert contains this label.
        let at = prometheus.labels(&without_threshold(query), "instance");
        assert!(at.iter().all(|instance| !instance.is_empty()), "{name} does not keep where it was seen");
    }
    assert!(empty.is_empty(), "\n{}", empty.join("\n"));

    let mut used: BTreeSet<String> = BTreeSet::new();
    for (_, expr) in Dashboard::load_all().iter().flat_map(Dashboard::expressions) {
        used.extend(metric_names_in(&expr));
    }
    for rule in &rules {
        used.extend(metric_names_in(rule["query"].as_str().unwrap_or_default()));
    }
    assert_eq!(used, catalogue_metric_names(), "what is used is exported, and what is exported is used");

    let moved = "rate(muster_transfer_bytes_total{muster_job=\"train\", transport=\"shm\", direction=\"sent\"}[20s]) > 0";
    assert!(!prometheus.query(moved).expect("it answers").is_empty(), "bytes move");
    let failing = "ALERTS{alertname=\"MusterTransfersFailing\", outcome=\"stalled\", alertstate=\"pending\"}";
    assert!(
        !prometheus.query(failing).expect("it answers").is_empty(),
        "an alert sees transfers that keep failing"
    );
    let firing = "ALERTS{alertname=\"MusterBoundNearlyFull\", muster_job=\"full\", alertstate=\"pending\"}";
    assert!(!prometheus.query(firing).expect("it answers").is_empty(), "an alert sees its cause");
}

#[tokio::test(flavor = "multi_thread")]
async fn exported_metrics_and_the_catalogue_agree() {
    let world = MetricsFixture::start().await;
    let scrape = world.scrape_when_settled().await;
    assert_eq!(exported_metric_names(&scrape), catalogue_metric_names());
    let checked = promtool(&["check", "metrics"], &scrape);
    assert_eq!(promtool_errors(&checked), None, "{}", String::from_utf8_lossy(&checked.stderr));
    for metric in CATALOGUE {
        let (name, kind) = (metric.name, metric.kind.name());
        assert!(scrape.contains(&format!("# TYPE {name} {kind}\n")), "the type of {name}");
        assert!(scrape.contains(&format!("# HELP {name} {}\n", metric.help)), "the help of {name}");
    }

    for line in [
        "muster_run_state{muster_job=\"train\",state=\"running\"} 1",
        "muster_run_state{muster_job=\"doomed\",state=\"failed\"} 1",
        "muster_runs_total{muster_job=\"doomed\",outcome=\"failed\"} 1",
        "muster_task_failures_total{muster_job=\"doomed\",class=\"reported\"} 1",
        "muster_tasks{muster_job=\"late\",standing=\"registering\"} 1",
        "muster_tasks{muster_job=\"late\",standing=\"missing\"} 1",
        "muster_hosts{muster_job=\"late\",state=\"healthy\"} 1",
        "muster_hosts{muster_job=\"late\",state=\"down\"} 0",
        "muster_registrations_total{muster_job=\"flex\",kind=\"again\"} 1",
        "muster_waiting_calls{muster_job=\"train\",waits_for=\"error\"} 1",
        "muster_waiting_calls{muster_job=\"train\",waits_for=\"key\"} 1",
        "muster_waiting_calls{muster_job=\"train\",waits_for=\"live-set\"} 1",
        "muster_waiting_calls{muster_job=\"wide\",waits_for=\"barrier\"} 1",
        "muster_barrier_missing_members{muster_job=\"wide\",kind=\"client\"} 39",
        "muster_bound_used{muster_job=\"full\",bound=\"keys\"} 10",
        "muster_bound_limit{muster_job=\"full\",bound=\"keys\"} 10",
        "muster_task_metrics_omitted{muster_job=\"wide\"} 1",
        "muster_findings{muster_job=\"full\",finding=\"nearly-full-bounds\",severity=\"warning\"} 1",
        "muster_findings{muster_job=\"train\",finding=\"nearly-full-bounds\",severity=\"warning\"} 0",
        "muster_transfer_connections{muster_job=\"train\",transport=\"unix\"} 1",
        "muster_transfer_launches_in_flight{muster_job=\"train\"} 2",
        "muster_transfer_launches_total{muster_job=\"train\",outcome=\"peer_dead\"} 0",
        "muster_transfer_bytes_total{muster_job=\"train\",transport=\"tcp\",direction=\"sent\"} 0",
        "muster_transfer_damaged_chunks_total{muster_job=\"train\"} 1",
        "muster_collective_processes{muster_job=\"train\"} 2",
        "muster_collective_cliques_waiting{muster_job=\"train\",kind=\"not-called\"} 1",
        "muster_transfer_clique_aborts_total{muster_job=\"train\",reason=\"transport\"} 0",
        "muster_transfer_in_flight_bytes{muster_job=\"train\",class=\"normal\"} 4096",
        "muster_transfer_in_flight_bytes{muster_job=\"train\",class=\"bulk\"} 0",
        "muster_worker_clock_worst_offset_seconds{muster_job=\"train\"} 90",
        "muster_worker_clock_offset_seconds{muster_job=\"train\",task=\"0\"} 90",
        "muster_tls_handshakes_failed_total{listener=\"grpc\",reason=\"no-tls-here\"} 1",
        "muster_tls_handshakes_failed_total{listener=\"http\",reason=\"plaintext\"} 0",
        "muster_audit_lines_total{outcome=\"done\"} 2",
        "muster_http_requests_total{listener=\"http\",class=\"5xx\"} 0",
        "muster_http_connections_limit{listener=\"http\"} 1024",
        "muster_rpc_duration_seconds_count{method=\"ReportErrorToService\",generation=\"c\"} 1",
    ] {
        assert!(scrape.lines().any(|found| found == line), "no {line} in:\n{scrape}");
    }
    assert!(!scrape.contains("muster_task_up{muster_job=\"wide\""), "too many tasks to show each");
    assert!(!scrape.contains("muster_transfer_reports_total{muster_job=\"flex\""), "nobody reports there");
    // Barriers wait for the last task, which arrives 60 ms late; heartbeats do not wait.
    let mean = |method: &str| {
        let sample = |what: &str| {
            let name = format!("muster_rpc_duration_seconds_{what}{{method=\"{method}\",generation=\"c\"}} ");
            let line = scrape.lines().find_map(|line| line.strip_prefix(&name));
            line.and_then(|value| value.parse::<f64>().ok())
                .unwrap_or_else(|| panic!("no {name}in:\n{scrape}"))
        };
        sample("sum") / sample("count")
    };
    assert!(mean("Barrier") > 0.05 && mean("Heartbeat") < 0.01, "{} {}", mean("Barrier"), mean("Heartbeat"));
    for (what, user) in [("wait", "input"), ("wait", "look"), ("held", "input"), ("held", "look")] {
        let none = format!("muster_engine_lock_{what}_seconds_count{{use=\"{user}\"}} 0");
        assert!(
            scrape.contains(none.trim_end_matches(" 0")) && !scrape.contains(&format!("{none}\n")),
            "{none}"
        );
    }
    assert!(
        !scrape.contains("the-id-of") && !scrape.contains("nobody writes"),
        "no ids of barriers, no keys"
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn findings_are_exported_logged_and_explained() {
    let world = MetricsFixture::start().await;
    world.scrape_when_settled().await;
    let page = world.get_json("/api/v1/jobs/full/findings");
    let finding = &page["open"][0];
    assert_eq!(finding["id"], "nearly-full-bounds", "{page}");
    assert_eq!((&finding["job"], &finding["severity"]), (&"full".into(), &"warning".into()));
    assert_eq!(finding["evidence"][0]["what"], "bounds.keys");
    assert!(finding["advice"].as_str().is_some_and(|advice| !advice.is_empty()), "{finding}");
    let all = world.get_json("/api/v1/findings");
    assert_eq!(all["findings"][0]["job"], "full", "{all}");
    assert_eq!(world.get_json("/api/v1/jobs/none/findings")["status"], 404);
    let events = world.get_json("/api/v1/jobs/full/events");
    let told = |event: &serde_json::Value| {
        event["kind"] == "finding-opened" && event["finding"] == "nearly-full-bounds"
    };
    assert!(events["events"].as_array().is_some_and(|events| events.iter().any(told)), "{events}");
    assert!(findings::CATALOGUE.iter().any(|detector| detector.id == "nearly-full-bounds"));
}
