//! The figures of all tasks together.

use muster::text::micros_to_seconds;

use super::*;

impl Comparison<'_> {
    pub(super) fn compare_totals(&mut self) {
        let totals = &self.view.totals;
        let mut sent = vec![format_bytes(bytes_moved_by_all_transports(totals)[0])];
        for transport in ReportedTransport::ALL {
            for (way, direction) in [(0, "sent"), (1, "received")] {
                let labels = [("transport", transport.name()), ("direction", direction)];
                let of_tasks = self.samples("task_bytes_total", &labels);
                let said = [
                    ("REST", bytes_moved(totals, transport)[way]),
                    ("REST tasks", self.sum_over_tasks(|task| bytes_moved(&task.totals, transport)[way])),
                    ("metrics", self.metric("bytes_total", &labels)),
                    ("metrics of tasks", saturating_sum(of_tasks.iter().map(|sample| *sample as u64))),
                ];
                self.assert_same("bytes of transfers", &said);
            }
            let [by_this, _] = bytes_moved(totals, transport);
            sent.extend((by_this > 0).then(|| format_bytes(by_this)));
        }
        let sent: Vec<String> = sent.iter().flat_map(|amount| numbers_with_units(amount)).collect();
        let page = self.page("Sent in this run");
        let among_all = numbers_with_units(&self.line["Sent in this run"]);
        self.assert_same("bytes sent", &[("page of all jobs", among_all), ("page", page[..1].to_vec())]);
        self.assert_same("bytes sent", &[("REST", sent), ("page", page)]);
        let received = figures_in_texts([format_bytes(bytes_moved_by_all_transports(totals)[1])]);
        self.assert_same(
            "bytes received",
            &[("REST", received), ("page", self.page("Received in this run"))],
        );

        for outcome in TransferOutcome::all() {
            let said = [
                ("REST", launches_with_outcome(totals, outcome)),
                ("REST tasks", self.sum_over_tasks(|task| launches_with_outcome(&task.totals, outcome))),
                ("metrics", self.metric("launches_total", &[("outcome", outcome.name())])),
            ];
            self.assert_same("launches that ended", &said);
            let of = |totals: &TotalsView| {
                saturating_sum(
                    totals.aborts.iter().filter(|of| of.reason == outcome).map(|of| of.connections),
                )
            };
            let mut said =
                vec![("REST", of(totals)), ("REST tasks", self.sum_over_tasks(|task| of(&task.totals)))];
            if outcome != TransferOutcome::COMPLETED {
                said.push(("metrics", self.metric("clique_aborts_total", &[("reason", outcome.name())])));
            }
            self.assert_same("connections that ended", &said);
        }
        let [completed, failed] = completed_and_failed_launches(totals).map(group_thousands);
        let mut shown = vec![completed.clone()];
        shown.extend((failed != "0").then(|| failed.clone()));
        self.assert_same(
            "launches that ended",
            &[("REST", shown), ("page", self.page("Launches completed"))],
        );
        let among_all = ["Launches completed", "Launches failed"].map(|head| self.line[head].clone());
        self.assert_same(
            "launches that ended",
            &[("REST", [completed, failed]), ("page of all jobs", among_all)],
        );

        /// A counter in REST; its metric with labels; the term on the page, and the place of its number there.
        type Counter = (
            fn(&TotalsView) -> u64,
            &'static str,
            &'static [(&'static str, &'static str)],
            &'static str,
            usize,
        );
        let cache = "clique_cache_total";
        let counters: [Counter; 8] = [
            (|it| it.cache_hits, cache, &[("event", "hit")], "Cliques", 1),
            (|it| it.cache_misses, cache, &[("event", "miss")], "Cliques", 2),
            (|it| it.cache_evictions, cache, &[("event", "eviction")], "Cliques", 3),
            (|it| it.lanes_lost, "lanes_lost_total", &[], "Lanes of connections", 0),
            (|it| it.lanes_made, "lanes_made_total", &[], "Lanes of connections", 1),
            (|it| it.damaged_chunks, "damaged_chunks_total", &[], "Damaged chunks", 0),
            (|it| it.fenced_frames, "fenced_frames_total", &[], "Fenced frames", 0),
            (|it| it.fetch_fallbacks, "fetch_fallbacks_total", &[], "Registered memory", 1),
        ];
        for (of, metric, labels, term, place) in counters {
            let count = of(totals);
            let said = [
                ("REST", count),
                ("REST tasks", self.sum_over_tasks(|task| of(&task.totals))),
                ("metrics", self.metric(metric, labels)),
            ];
            self.assert_same("counters of engines", &said);
            let page = self.page(term).get(place).cloned().unwrap_or_else(|| "0".into());
            self.assert_same("counters of engines", &[("REST", group_thousands(count)), ("page", page)]);
        }
    }

    pub(super) fn compare_gauges(&mut self) {
        let view = self.view;
        let mut shown = Vec::new();
        for transport in ReportedTransport::ALL {
            let one_by_one = self.seen.transfers.connections.iter().filter(|of| of.transport == transport);
            let by_one = one_by_one.fold([0; 3], |[connections, lanes, launches], of| {
                [connections + 1, lanes + u64::from(of.lanes), launches + u64::from(of.launches)]
            });
            let of_tasks = [0, 1, 2]
                .map(|which: usize| self.sum_over_tasks(|of| connection_totals(&of.links, transport)[which]));
            let in_rest = connection_totals(&view.links, transport);
            self.assert_same(
                "connections, lanes and launches in flight",
                &[("REST", in_rest), ("REST tasks", of_tasks), ("REST connections", by_one)],
            );
            let metric = self.metric("connections", &[("transport", transport.name())]);
            self.assert_same("connections", &[("REST", in_rest[0]), ("metrics", metric)]);
            if in_rest[0] > 0 {
                shown.extend([group_thousands(in_rest[0]), group_thousands(in_rest[1])]);
            }
        }
        shown.extend(view.totals.aborts.iter().map(|of| group_thousands(of.connections)));
        self.assert_same("connections", &[("REST", shown), ("page", self.page("Connections"))]);

        let [.., in_flight] = connection_totals_of_all_transports(&view.links);
        let metric = self.metric("launches_in_flight", &[]);
        self.assert_same("launches in flight", &[("REST", in_flight), ("metrics", metric)]);
        let still = saturating_sum(view.in_flight_bytes);
        let still = if still > 0 { format_bytes(still) } else { String::new() };
        let shown = figures_in_texts([group_thousands(in_flight), still]);
        self.assert_same("launches in flight", &[("REST", shown), ("page", self.page("Launches in flight"))]);
        let among_all = self.line["Launches in flight"].clone();
        self.assert_same(
            "launches in flight",
            &[("REST", group_thousands(in_flight)), ("page of all jobs", among_all)],
        );
        for (place, class) in ["latency", "normal", "bulk"].into_iter().enumerate() {
            let said = [
                ("REST", view.in_flight_bytes[place]),
                ("REST tasks", self.sum_over_tasks(|task| task.in_flight_bytes[place])),
                ("metrics", self.metric("in_flight_bytes", &[("class", class)])),
            ];
            self.assert_same("bytes in flight", &said);
        }
        for (figure, count, of_tasks, metric, shown, term) in [
            (
                "cliques",
                view.cliques,
                self.sum_over_tasks(|task| task.cliques),
                "cliques",
                group_thousands(view.cliques),
                "Cliques",
            ),
            (
                "registered memory",
                view.registered_bytes,
                self.sum_over_tasks(|task| task.registered_bytes),
                "registered_bytes",
                format_bytes(view.registered_bytes),
                "Registered memory",
            ),
            (
                "registered memory of GPUs",
                view.registered_device_bytes,
                self.sum_over_tasks(|task| task.registered_device_bytes),
                "registered_device_bytes",
                format_bytes(view.registered_device_bytes),
                "Registered GPU memory",
            ),
        ] {
            let metric = self.metric(metric, &[]);
            self.assert_same(figure, &[("REST", count), ("REST tasks", of_tasks), ("metrics", metric)]);
            let page = self.page(term)[..1].to_vec();
            self.assert_same(figure, &[("REST", figures_in_texts([shown])), ("page", page)]);
        }
    }

    pub(super) fn compare_times(&mut self) {
        let view = self.view;
        let stages = view.totals.stages.iter().map(|of| {
            let of_tasks = self.tasks.iter().flat_map(|task| &task.totals.stages);
            let of_tasks = of_tasks.filter(|one| one.stage == of.stage).map(|one| (&one.counts, one.sum_us));
            let labels = vec![("stage", of.stage.as_str())];
            ("stage_seconds", labels, (of.launches, &of.counts, of.sum_us), of_tasks.collect::<Vec<_>>())
        });
        let durations = view.totals.durations.iter().map(|of| {
            let of_tasks = self.tasks.iter().flat_map(|task| &task.totals.durations);
            let alike =
                of_tasks.filter(|it| (it.transport, &it.size_class) == (of.transport, &of.size_class));
            let labels = vec![("transport", of.transport.name()), ("size_class", of.size_class.as_str())];
            let of_tasks = alike.map(|one| (&one.counts, one.sum_us));
            ("duration_seconds", labels, (of.launches, &of.counts, of.sum_us), of_tasks.collect())
        });
        let all: Vec<_> = stages.chain(durations).collect();
        for (name, count) in
            [("stage_seconds", view.totals.stages.len()), ("duration_seconds", view.totals.durations.len())]
        {
            let metrics = self.samples(&format!("{name}_count"), &[]).len();
            self.assert_same("kinds of times", &[("REST", count), ("metrics", metrics)]);
        }
        for (name, labels, (launches, counts, sum_us), of_tasks) in all {
            let counted = saturating_sum(of_tasks.iter().flat_map(|(counts, _)| counts.iter().copied()));
            let said = [
                ("REST", launches),
                ("REST counts", saturating_sum(counts.iter().copied())),
                ("REST tasks", counted),
                ("metrics", self.metric(&format!("{name}_count"), &labels)),
            ];
            self.assert_same("launches that were timed", &said);
            let classes = (0..counts.len()).map(|at| saturating_sum(counts[..=at].iter().copied()));
            let buckets = self.samples(&format!("{name}_bucket"), &labels);
            let buckets = buckets.into_iter().map(|sample| sample as u64).collect();
            self.assert_same(
                "classes of times",
                &[("REST", classes.collect::<Vec<_>>()), ("metrics", buckets)],
            );
            let said = [
                ("REST", micros_to_seconds(sum_us)),
                ("REST tasks", micros_to_seconds(saturating_sum(of_tasks.iter().map(|(_, sum_us)| *sum_us)))),
                ("metrics", self.samples(&format!("{name}_sum"), &labels)[0]),
            ];
            self.assert_same("times of launches", &said);
        }
        let mean = |sum_us: u64, launches| format_micros(sum_us / launches);
        let stages =
            view.totals.stages.iter().flat_map(|of| numbers_with_units(&mean(of.sum_us, of.launches)));
        let durations = view.totals.durations.iter();
        let durations = durations
            .flat_map(|of| figures_in_texts([mean(of.sum_us, of.launches), of.size_and_transport_label()]));
        for (term, shown) in [
            ("Mean time of a launch", stages.collect::<Vec<_>>()),
            ("Mean duration by size", durations.collect()),
        ] {
            let page = if shown.is_empty() { Vec::new() } else { self.page(term) };
            assert_eq!(self.sums.contains_key(term), !shown.is_empty(), "{term}");
            self.assert_same("mean times", &[("REST", shown), ("page", page)]);
        }
    }
}
