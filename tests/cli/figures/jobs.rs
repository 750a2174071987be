//! The figures of a job: its tasks, barriers, keys, exclusions, runs and findings.

use std::time::Duration;

use serde_json::Value;

use super::displayed_figures::{DisplayedFigures, html_section, number_after, texts_between};
use super::programs::RandomProgram;
use super::{ComparedFigures, ComparisonContext, STATES};

pub fn compare_job_figures(
    program: &RandomProgram<'_>,
    seen: &DisplayedFigures,
    ledger: &mut ComparedFigures,
) {
    let why = &ComparisonContext(program, seen);
    let job = ("muster_job", program.job.as_str());
    let (run, name) = (&seen.rest["run"], program.job.as_str());
    let count = |value: &Value| value.as_u64().unwrap_or_else(|| panic!("{value} is no number\n{why}"));
    let tasks = run["tasks"].as_array().expect("a list");
    let metric = |name: &str, labels: &[(&str, &str)]| {
        let mut all = vec![job];
        all.extend(labels);
        seen.metric(name, &all) as u64
    };

    // The tasks.
    let headline =
        seen.status.lines().find(|line| line.contains(&format!("JOB {name} "))).expect("a headline");
    let (live_of, _) = headline.split_once(" task(s) connected").expect("a count");
    let (rest, total) = live_of.rsplit_once(" of ").expect("a count");
    let live = rest.rsplit(' ').next().expect("a number");
    let row = seen.list.lines().find(|line| line.starts_with(&format!("{name} "))).expect("a row");
    let row: Vec<&str> = row.split_whitespace().collect();
    let head = texts_between(&seen.job_page, "data-say=\"Run ", "\"").next().expect("a head");
    let head_live = head.rsplit(", ").next().expect("a count").trim_end_matches(" live").to_owned();
    let (_, lines_of_jobs) = seen.overview.split_once("<table class=\"jobs\">").expect("a table");
    let mark = format!("<a href=\"/jobs/{name}\">");
    let line = texts_between(lines_of_jobs, &mark, "</tr>").next().expect("a line");
    let text = |value: u64| value.to_string();
    ledger.assert_same(
        "live tasks",
        &[
            ("REST job", text(count(&run["live"]))),
            ("REST summary", text(count(&seen.summary["live"]))),
            ("REST live", text(seen.live["tasks"].as_array().map_or(0, Vec::len) as u64)),
            ("metrics", text(metric("muster_live_tasks", &[]))),
            ("status", live.to_owned()),
            ("job list", row[3].to_owned()),
            ("job page", head_live.split(' ').next().unwrap_or_default().to_owned()),
            ("overview", text(number_after(line, "<td class=\"num\"><b>").expect("a number"))),
        ],
        why,
    );
    ledger.assert_same(
        "tasks",
        &[
            ("REST job", tasks.len() as u64),
            ("REST summary", count(&seen.summary["tasks"])),
            ("metrics", metric("muster_job_tasks", &[])),
            ("status", total.parse().expect("a number")),
            ("job list", row[5].parse().expect("a number")),
            (
                "job page",
                head_live.rsplit(' ').next().and_then(|total| total.parse().ok()).expect("a number"),
            ),
            ("grid", number_after(&seen.job_page, "<h2 id=\"grid-title\">").expect("a number")),
            ("overview", number_after(line, "</b><span class=\"dim\"> / ").expect("a number")),
        ],
        why,
    );
    let legend = texts_between(&seen.job_page, "<ul class=\"legend\">", "</ul>").next().expect("a legend");
    for state in STATES {
        let is = |task: &&Value| match task["excluded"].is_null() {
            true => task["standing"] == state,
            false => state == "excluded",
        };
        let counted = tasks.iter().filter(is).count() as u64;
        let shown = |word: &str| {
            let entry = texts_between(legend, &format!("state={word}#tasks"), "</a>").next()?.to_owned();
            number_after(&entry, "<b>")
        };
        // Awaited tasks are connected, too.
        let awaited = if state == "connected" { shown("awaited").unwrap_or(0) } else { 0 };
        let mut said = vec![
            ("REST tasks", counted),
            ("REST counts", count(&run["counts"][state])),
            ("metrics", metric("muster_tasks", &[("standing", state)])),
            ("job page", shown(state).unwrap_or(0) + awaited),
        ];
        if let Some(line) = seen.status.lines().find_map(|line| line.strip_prefix("  TASKS  ")) {
            let part = line.split(", ").find_map(|part| part.strip_suffix(&format!(" {state}")));
            said.push(("status", part.map_or(0, |part| part.parse().expect("a number"))));
        } else if let Some((_, table)) = seen.status.split_once("  TASK  STATE") {
            let rows = table.lines().skip(1).take(tasks.len());
            said.push((
                "status",
                rows.filter(|row| row.split_whitespace().nth(1) == Some(state)).count() as u64,
            ));
        }
        ledger.assert_same(state, &said, why);
    }

    // The hosts.
    let hosts = |page: &Value, state: &str| -> Vec<Value> {
        let all = page["hosts"].as_array().into_iter().flatten();
        all.filter(|host| host["state"] == state).map(|host| host["tasks"].clone()).collect()
    };
    let legend = texts_between(&seen.hosts_page, "<ul class=\"legend\">", "</ul>").next().unwrap_or_default();
    for state in ["down", "degraded", "excluded", "healthy"] {
        let listed = hosts(&seen.hosts, state);
        let entry = texts_between(legend, &format!("?state={state}\""), "</a>").next().map(str::to_owned);
        let rows =
            html_section(&seen.hosts_page, "host-table").matches(&format!("</svg>{state}</span>")).count();
        ledger.assert_same(
            "hosts",
            &[
                ("REST", listed.len() as u64),
                ("hosts", hosts(&seen.hosts_listed, state).len() as u64),
                ("metrics", metric("muster_hosts", &[("state", state)])),
                ("hosts page", entry.and_then(|entry| number_after(&entry, "<b>")).unwrap_or(0)),
                ("rows of the hosts page", rows as u64),
            ],
            why,
        );
        let tasks_of = |host: &Value| host.as_array().map_or(0, Vec::len) as u64;
        let housed: u64 = listed.iter().map(tasks_of).sum();
        let on_state = |task: &&Value| {
            let name = task["host"].as_str();
            let all = seen.hosts["hosts"].as_array().into_iter().flatten();
            all.into_iter().any(|host| host["state"] == state && host["host"].as_str() == name)
        };
        ledger.assert_same(
            "tasks of hosts",
            &[("REST hosts", housed), ("REST tasks", tasks.iter().filter(on_state).count() as u64)],
            why,
        );
    }

    // The barriers and their missing tasks.
    let mut waits = Vec::new();
    for barrier in run["barriers"]
        .as_array()
        .into_iter()
        .flatten()
        .chain(run["live_sets"].as_array().into_iter().flatten())
    {
        let missing = barrier["missing"].as_array().map_or(0, Vec::len) as u64;
        let kind = barrier["kind"].as_str().unwrap_or("live-set").to_owned();
        waits.push((kind, count(&barrier["arrived"]), count(&barrier["members"]), missing));
    }
    let pairs = |text: &str, mark: &str, end: &str| {
        let mut found: Vec<String> =
            text.lines().filter_map(|line| line.strip_prefix(mark)).map(str::to_owned).collect();
        found
            .iter_mut()
            .for_each(|line| *line = line.split_once(end).map_or("", |(start, _)| start).to_owned());
        found.into_iter().filter(|line| !line.is_empty()).collect::<Vec<_>>()
    };
    let of = |text: &str| {
        let words: Vec<&str> = text.split_whitespace().collect();
        let at = words.iter().rposition(|word| *word == "of").expect("a pair");
        let of = |at: usize| words[at].trim_end_matches(',').parse::<u64>().expect("a number");
        (of(at - 1), of(at + 1))
    };
    let sorted = |mut all: Vec<(u64, u64)>| {
        all.sort_unstable();
        all
    };
    let barrier_lines = pairs(&seen.status, "  BARRIER  ", " arrived, waiting for ");
    let live_lines = pairs(&seen.status, "  LIVE SET  ", " asked, waiting for ");
    let on_page = |page: &str| {
        let meters = texts_between(page, "aria-label=\"", "\"");
        sorted(
            meters
                .filter(|label| label.ends_with(" have arrived") || label.ends_with(" have registered"))
                .map(of)
                .collect(),
        )
    };
    ledger.assert_same(
        "members of barriers, arrived and all",
        &[
            ("REST", sorted(waits.iter().map(|(_, arrived, members, _)| (*arrived, *members)).collect())),
            ("status", sorted(barrier_lines.iter().chain(&live_lines).map(|line| of(line)).collect())),
            ("job page", on_page(&seen.job_page)),
            ("barriers page", on_page(&seen.barriers_page)),
        ],
        why,
    );
    for kind in ["registration", "shutdown", "client", "live-set"] {
        let of_kind = waits.iter().filter(|(of, ..)| of == kind);
        ledger.assert_same(
            "barriers in progress",
            &[
                ("REST", of_kind.clone().count() as u64),
                ("metrics", metric("muster_barriers_in_progress", &[("kind", kind)])),
            ],
            why,
        );
        ledger.assert_same(
            "tasks that barriers wait for",
            &[
                ("REST", of_kind.map(|(.., missing)| missing).sum::<u64>()),
                ("metrics", metric("muster_barrier_missing_members", &[("kind", kind)])),
            ],
            why,
        );
    }

    // The keys.
    let keys = seen.keys["keys"].as_array().expect("a list");
    let held = texts_between(&seen.keys_page, "<p class=\"dim\">", "</p>")
        .find(|text| text.contains(" keys, "))
        .expect("a line");
    ledger.assert_same(
        "keys",
        &[
            ("REST job", count(&run["keys"])),
            ("REST keys", keys.len() as u64),
            ("metrics", metric("muster_store_keys", &[])),
            ("metrics of bounds", metric("muster_bound_used", &[("bound", "keys")])),
            ("keys page", number_after(&format!("!{held}"), "!").expect("a number")),
        ],
        why,
    );
    ledger.assert_same(
        "bytes of the store",
        &[
            ("REST job", count(&run["store_bytes"])),
            ("metrics", metric("muster_store_bytes", &[])),
            ("metrics of bounds", metric("muster_bound_used", &[("bound", "store-bytes")])),
        ],
        why,
    );
    let shown = muster::text::format_bytes(count(&run["store_bytes"]));
    assert!(held.contains(&format!(" keys, {shown}")), "{held} does not say {shown}\n{why}");

    // Exclusions, runs, findings and events.
    let in_force = seen.exclusions_page.split("id=\"over-title\"").next().unwrap_or_default();
    let listed = seen.status.lines().filter(|line| line.starts_with("  EXCLUDED  ")).count() as u64;
    let all = pairs(&seen.status, "  EXCLUDED  … ", " in all");
    ledger.assert_same(
        "exclusions in force",
        &[
            ("REST job", seen.rest["exclusions"].as_array().map_or(0, Vec::len) as u64),
            ("REST summary", count(&seen.summary["exclusions"])),
            ("REST exclusions", seen.exclusions["exclusions"].as_array().map_or(0, Vec::len) as u64),
            ("metrics", metric("muster_exclusions", &[])),
            ("status", all.first().map_or(listed, |all| all.parse().expect("a number"))),
            ("job list", row[6].parse().expect("a number")),
            ("exclusions page", in_force.matches("<article class=\"wait\" data-key=").count() as u64),
        ],
        why,
    );
    let lines = seen.runs["runs"].as_array().expect("a list");
    ledger.assert_same(
        "number of the run",
        &[
            ("REST job", count(&run["number"])),
            ("REST runs", count(&lines[0]["number"])),
            ("metrics", metric("muster_run_number", &[])),
            ("job list", row[1].parse().expect("a number")),
            ("job page", head.split(' ').next().and_then(|number| number.parse().ok()).expect("a number")),
        ],
        why,
    );
    ledger.assert_same(
        "state of the run",
        &[
            ("REST job", run["state"].as_str().unwrap_or_default().to_owned()),
            ("REST runs", lines[0]["state"].as_str().unwrap_or_default().to_owned()),
            ("job list", row[2].to_owned()),
            ("status", headline.split_whitespace().nth(4).unwrap_or_default().to_lowercase()),
            ("job page", head.split([' ', ',']).nth(1).unwrap_or_default().to_owned()),
        ],
        why,
    );
    let state = run["state"].as_str().unwrap_or_default();
    assert_eq!(metric("muster_run_state", &[("state", state)]), 1, "{why}");
    let history =
        texts_between(&seen.job_page, "id=\"runs-title\"", "</section>").next().expect("the runs before");
    for past in seen.rest["history"].as_array().into_iter().flatten() {
        let number = count(&past["number"]);
        let began = past["started_at"].as_u64().unwrap_or_else(|| count(&past["opened_at"]));
        let line = lines.iter().find(|line| line["number"] == number).expect("a line");
        let length = count(&past["ended_at"]) - began;
        ledger.assert_same(
            "length of an ended run, in microseconds",
            &[
                ("REST times", length),
                ("REST job", count(&past["length_us"])),
                ("REST runs", count(&line["length_us"])),
            ],
            why,
        );
        let shown = muster::text::format_approximate_duration(Duration::from_micros(length));
        let row = texts_between(history, &format!("/runs/{number}\">{number}</a></td>"), "</tr>")
            .next()
            .expect("a row");
        let cell = texts_between(row, "<td>", "</td>").nth(2).unwrap_or_default();
        let mut said = vec![("REST", shown), ("job page", cell.to_owned())];
        let listed = seen.runs_listed.lines().find(|line| line.starts_with(&format!("{number} ")));
        let column = seen.runs_listed.find("LENGTH").expect("a heading");
        let cell = listed.and_then(|line| line.get(column..)).expect("muster runs lists the run");
        said.push(("muster runs", cell.chars().take(10).collect::<String>().trim().to_owned()));
        let earlier = seen.status.lines().find(|line| line.starts_with(&format!("  EARLIER  run {number} ")));
        if let Some((_, after)) = earlier.and_then(|line| line.split_once(" ago after ")) {
            said.push(("status", after.split(';').next().unwrap_or_default().to_owned()));
        }
        ledger.assert_same("length of an ended run", &said, why);
    }
    let ended = |outcome: &str| lines.iter().filter(|line| line["state"] == outcome).count() as u64;
    for outcome in ["completed", "failed", "abandoned"] {
        let said =
            [("REST", ended(outcome)), ("metrics", metric("muster_runs_total", &[("outcome", outcome)]))];
        ledger.assert_same("runs that have ended", &said, why);
    }
    let open = seen.findings["open"].as_array().expect("a list");
    let ids: std::collections::BTreeSet<&str> = open.iter().filter_map(|one| one["id"].as_str()).collect();
    let issues = seen.status.lines().filter(|line| line.starts_with("  ISSUE  ")).count();
    ledger.assert_same("findings that are open", &[("REST", open.len()), ("status", issues)], why);
    let raised = seen.metrics.lines().filter(|line| {
        line.starts_with("muster_finding")
            && line.contains(&format!("\"{name}\""))
            && line.ends_with("} 1")
            && !line.contains("_total")
    });
    ledger.assert_same(
        "kinds of findings that are open",
        &[("REST", ids.len()), ("metrics", raised.count())],
        why,
    );
    ledger.assert_same(
        "events",
        &[("REST", seen.newest_event), ("metrics", seen.metric("muster_events_total", &[]) as u64)],
        why,
    );
}
