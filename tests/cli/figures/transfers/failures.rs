//! Compares the figures of failed transfers, their events, and the clocks of tasks.

use super::*;

impl Comparison<'_> {
    pub(super) fn compare_clocks(&mut self) {
        let readings = self.tasks.iter().filter_map(|task| task.clock);
        let furthest = readings.reduce(|furthest, one| {
            if one.min_clock_distance_us() > furthest.min_clock_distance_us() { one } else { furthest }
        });
        self.assert_same("furthest clock", &[("REST", self.view.clock), ("REST tasks", furthest)]);
        let job = ("muster_job", self.program.job.as_str());
        let metric = self.seen.samples("muster_worker_clock_worst_offset_seconds", &[job]);
        let in_rest: Vec<f64> = self.view.clock.iter().map(ClockReading::ahead_seconds).collect();
        self.assert_same("furthest clock", &[("REST", in_rest.clone()), ("metrics", metric)]);
        let open = self.seen.findings["open"].as_array().into_iter().flatten();
        for finding in open.filter(|one| one["id"] == "worker-clock-off") {
            let evidence = &finding["evidence"][0]["is"];
            self.assert_same(
                "furthest clock of a finding",
                &[("REST", in_rest.clone()), ("REST findings", evidence.as_f64().into_iter().collect())],
            );
        }
    }

    pub(super) fn compare_failures(&mut self) {
        let page = html_section(&self.seen.transfers_page, "reasons");
        let reasons: Vec<&str> = texts_between(page, "<li class=\"reason\">", "</ul>").collect();
        // A reason with one failure has no list, so its section ends at the next heading.
        let heads: Vec<String> = texts_between(page, "<h3>", "</h3>").map(html_text).collect();
        let told = heads.iter().map(|head| {
            let head = head.trim_start_matches("first cause ");
            let (reason, launches) = (head.split(' ').next(), head.rsplit("; ").next());
            let launches = launches.unwrap_or_default().trim_end_matches(" launches");
            (reason.unwrap_or_default().to_owned(), launches.to_owned())
        });
        let in_rest =
            self.view.failures.iter().map(|of| (of.reason.name().to_owned(), group_thousands(of.launches)));
        self.assert_same(
            "failures by reason",
            &[("REST", in_rest.collect::<Vec<_>>()), ("page", told.collect())],
        );
        for (reason, html) in self.view.failures.iter().zip(reasons) {
            let outcome = reason.reason;
            let totals = launches_with_outcome(&self.view.totals, outcome);
            self.assert_same(
                "failures by reason",
                &[("REST failures", reason.launches), ("REST launches", totals)],
            );
            let told = texts_between(html, "<p>First: ", "</p>").next().map(|first| {
                let first = html_text(first);
                let (tasks, said) = first.rsplit_once(": ").unwrap_or_default();
                (numbers_with_units(tasks)[..2].to_vec(), said.to_owned())
            });
            let first = reason
                .first
                .as_ref()
                .map(|first| (vec![first.task.to_string(), first.peer.to_string()], first.text.clone()));
            self.assert_same("first failure for a reason", &[("REST", first), ("page", told)]);
            let newest = reason.newest.iter().take(NEWEST).map(|one| one.text.clone()).collect::<Vec<_>>();
            let listed = html.split_once("<ul class=\"small\">").map_or("", |(_, list)| list);
            let mut listed: Vec<String> = texts_between(listed, "<li>", "</li>")
                .map(|one| html_text(one).rsplit(": ").next().unwrap_or_default().to_owned())
                .collect();
            if listed.is_empty() {
                listed = newest.iter().take(1).cloned().collect();
            }
            self.assert_same("newest failures for a reason", &[("REST", newest), ("page", listed)]);
        }
    }

    pub(super) fn compare_events(&mut self) {
        let events = &self.seen.transfer_events;
        let listed = self.seen.transfer_events_listed.lines();
        let listed = listed.map(|line| serde_json::from_str::<Value>(line).expect("JSON")).collect();
        self.assert_same("events of failures", &[("REST", events.clone()), ("command line", listed)]);
        if !self.seen.timeline_page.contains("Earlier events are not kept") {
            let on_page = self.seen.timeline_page.matches("<span class=\"what\">transfer failed").count();
            self.assert_same("events of failures", &[("REST", events.len()), ("timeline", on_page)]);
        }
        // A run may have ended as failed while its last failures were reported.
        if self.view.run.0 == 1 {
            let told: BTreeSet<&str> = events.iter().filter_map(|event| event["error"].as_str()).collect();
            let known = self.view.failures.iter().filter(|of| of.first.is_some()).map(|of| of.reason.name());
            self.assert_same(
                "reasons of failures",
                &[("REST events", told), ("REST", known.collect::<BTreeSet<_>>())],
            );
        }
    }
}
