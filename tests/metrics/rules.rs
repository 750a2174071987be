//! The rules for Prometheus, by its own tool.

use std::collections::BTreeSet;

use crate::prometheus::{complaints, promtool, read};

const FILES: [&str; 2] = ["rules/recording.yml", "rules/alerts.yml"];

/// The values of a key in a file of rules or tests.
fn values<'a>(text: &'a str, key: &str) -> Vec<&'a str> {
    text.lines()
        .filter_map(|line| line.trim().trim_start_matches("- ").strip_prefix(key)?.strip_prefix(": "))
        .collect()
}

#[test]
fn prometheus_takes_the_rules() {
    let checked = promtool(&[&["check", "rules"][..], &FILES[..]].concat(), "");
    assert_eq!(complaints(&checked), None);
}

#[test]
fn alerts_fire_when_they_should_and_are_silent_when_they_should() {
    let tested = promtool(&["test", "rules", "rules/tests/alerts.yml"], "");
    assert_eq!(complaints(&tested), None);
}

#[test]
fn prometheus_takes_the_configuration() {
    // The paths in it are those of a container; what it says besides must hold.
    let own = read("prometheus.yml").replace("/etc/prometheus/rules", "rules");
    let path = std::path::Path::new(env!("CARGO_TARGET_TMPDIR")).join("prometheus.yml");
    std::fs::write(&path, own).expect("it can be written");
    let checked = promtool(&["check", "config", &path.display().to_string()], "");
    assert_eq!(complaints(&checked), None);
}

#[test]
fn every_alert_has_a_severity_a_runbook_and_a_case_in_which_it_fires_and_one_in_which_it_is_silent() {
    let (rules, tests, book) = (read("rules/alerts.yml"), read("rules/tests/alerts.yml"), read("alerts.md"));
    let alerts = values(&rules, "alert");
    assert!(alerts.len() > 10, "{alerts:?}");
    let cases: BTreeSet<&str> = values(&tests, "name").into_iter().collect();
    let links: BTreeSet<&str> = values(&rules, "runbook_url").into_iter().collect();
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
        assert!(links.contains(format!("/guide/alerts#{slug}").as_str()), "no runbook address of {alert}");
        assert!(book.contains(&format!("\n## {slug}\n")), "no runbook of {alert}");
    }
    let severities = values(&rules, "severity");
    assert_eq!(severities.len(), alerts.len());
    assert!(severities.iter().all(|severity| ["critical", "warning", "info"].contains(severity)));
    assert_eq!(values(&rules, "summary").len(), alerts.len());
    assert_eq!(values(&rules, "description").len(), alerts.len());
}
