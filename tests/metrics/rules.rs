//! Checks the Prometheus rules with promtool.

use std::collections::BTreeSet;
use std::process::Stdio;

use crate::prometheus::{get_as, promtool, promtool_errors, read_dashboards_file};
use crate::support::harness::{MusterServer, PATIENCE, muster};

const FILES: [&str; 2] = ["rules/recording.yml", "rules/alerts.yml"];

/// Returns the values of a key in a file of rules or tests.
fn values_of_key<'a>(text: &'a str, key: &str) -> Vec<&'a str> {
    text.lines()
        .filter_map(|line| line.trim().trim_start_matches("- ").strip_prefix(key)?.strip_prefix(": "))
        .collect()
}

#[test]
fn prometheus_takes_the_rules() {
    let checked = promtool(&[&["check", "rules"][..], &FILES[..]].concat(), "");
    assert_eq!(promtool_errors(&checked), None);
}

#[test]
fn alerts_fire_when_they_should_and_are_silent_when_they_should() {
    let tested = promtool(&["test", "rules", "rules/tests/alerts.yml"], "");
    assert_eq!(promtool_errors(&tested), None);
}

#[test]
fn prometheus_takes_the_configuration() {
    // Its paths are those of a container; the rest must be valid here.
    let own = read_dashboards_file("prometheus.yml").replace("/etc/prometheus/rules", "rules");
    let path = std::path::Path::new(env!("CARGO_TARGET_TMPDIR")).join("prometheus.yml");
    std::fs::write(&path, own).expect("it can be written");
    let checked = promtool(&["check", "config", &path.display().to_string()], "");
    assert_eq!(promtool_errors(&checked), None);
}

#[test]
fn every_alert_has_a_severity_a_runbook_and_a_case_in_which_it_fires_and_one_in_which_it_is_silent() {
    let (rules, tests, book) = (
        read_dashboards_file("rules/alerts.yml"),
        read_dashboards_file("rules/tests/alerts.yml"),
        read_dashboards_file("alerts.md"),
    );
    let alerts = values_of_key(&rules, "alert");
    assert!(alerts.len() > 10, "{alerts:?}");
    let cases: BTreeSet<&str> = values_of_key(&tests, "name").into_iter().collect();
    let links: BTreeSet<&str> = values_of_key(&rules, "runbook_url").into_iter().collect();
    for alert in &alerts {
        for case in ["fires", "is silent"] {
            assert!(cases.contains(format!("{alert} {case}").as_str()), "no case in which {alert} {case}");
        }
        let mut slug = String::new();
        for c in alert.chars() {
            if c.is_ascii_uppercase() && !slug.is_empty() {
                slug.push('-');
            }
            slug.push(c.to_ascii_lowercase());
        }
        // Alertmanager runs elsewhere, so the address must name the server.
        let link = format!("'http://{{{{ $labels.instance }}}}/guide/alerts#{slug}'");
        assert!(links.contains(link.as_str()), "no runbook address of {alert}");
        assert!(book.contains(&format!("\n## {slug}\n")), "no runbook of {alert}");
    }
    let severities = values_of_key(&rules, "severity");
    assert_eq!(severities.len(), alerts.len());
    assert!(severities.iter().all(|severity| ["critical", "warning", "info"].contains(severity)));
    assert_eq!(values_of_key(&rules, "summary").len(), alerts.len());
    assert_eq!(values_of_key(&rules, "description").len(), alerts.len());
}

/// Returns a list in a line of a file: `key: ["one", "two"]`.
fn list_of_key(text: &str, key: &str) -> Vec<String> {
    let found = values_of_key(text, key);
    let [list] = &found[..] else { panic!("{key} stands there once, and not as {found:?}") };
    serde_json::from_str(list).unwrap_or_else(|error| panic!("{key}: {error}: {list}"))
}

#[test]
fn muster_starts_as_the_compose_file_says_and_prometheus_may_scrape_it_by_the_name_of_its_target() {
    let command = list_of_key(&read_dashboards_file("compose.yaml"), "command");
    let [target] = &list_of_key(&read_dashboards_file("prometheus.yml"), "targets")[..] else {
        panic!("one target")
    };
    let (host, port) = target.split_once(':').expect("a name and a port");
    assert!(
        read_dashboards_file("compose.yaml").contains(&format!("\n  {host}:\n    build:")),
        "a service has the name {host}"
    );
    assert!(command.iter().any(|argument| *argument == format!("0.0.0.0:{port}")), "it listens at {port}");

    // The addresses stay the same; only the ports are replaced.
    let free = |argument: &String| match argument.strip_prefix("0.0.0.0:") {
        Some(_) => "0.0.0.0:0".to_owned(),
        None => argument.clone(),
    };
    let mut starting = muster(command.iter().map(free));
    let server =
        MusterServer::spawn(starting.stderr(Stdio::null()), PATIENCE).expect("it starts, and says where");
    let address = ([127, 0, 0, 1], server.http.port()).into();
    let (status, scrape) = get_as(address, target, "/metrics").expect("it answers");
    assert!(status == 200 && scrape.contains("muster_build_info"), "{status}: {scrape}");
    let (status, _) = get_as(address, "elsewhere:8477", "/metrics").expect("it answers");
    assert_eq!(status, 421, "no other name will do");
}

#[test]
fn build_outputs_are_not_in_the_docker_context() {
    let root = std::path::Path::new(env!("CARGO_MANIFEST_DIR"));
    let ignored = std::fs::read_to_string(root.join(".dockerignore")).expect("the file is there");
    for name in [".git", "target", "**/node_modules"] {
        assert!(ignored.lines().any(|line| line == name), "{name}");
    }
}
