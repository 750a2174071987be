//! The figures of single tasks and of pairs of tasks, and rates.

use super::*;

impl Comparison<'_> {
    pub(super) fn compare_tasks(&mut self) {
        let page = html_section(&self.seen.transfers_page, "movers");
        let mut rows: BTreeMap<String, _> =
            table_rows(page).into_iter().map(|row| (row["Task"].clone(), row)).collect();
        self.assert_same(
            "tasks that have reported",
            &[("REST", self.tasks.len().min(LISTED)), ("page", rows.len())],
        );
        let failing = |task: &&TaskTransfers| completed_and_failed_launches(&task.totals)[1] > 0;
        let failing = self.tasks.iter().filter(failing).count();
        let on_page = html_text(page).split_once("Tasks with failures: ").map_or_else(
            || "0".to_owned(),
            |(_, rest)| rest.split('.').next().unwrap_or_default().to_owned(),
        );
        self.assert_same(
            "tasks with failures",
            &[("REST", group_thousands(failing as u64)), ("page", on_page)],
        );
        let filtered = self.seen.filtered[0];
        self.assert_same("tasks with failures", &[("REST", failing), ("REST failed tasks", filtered)]);
        for task in self.tasks {
            let id = task.task.to_string();
            let [completed, failed] = completed_and_failed_launches(&task.totals);
            let metric = self.metric("task_failed_launches_total", &[("task", &id)]);
            self.assert_same("failed launches of a task", &[("REST", failed), ("metrics", metric)]);
            let clock = self.seen.samples(
                "muster_worker_clock_offset_seconds",
                &[("muster_job", &self.program.job), ("task", &id)],
            );
            let in_rest: Vec<f64> = task.clock.iter().map(ClockReading::ahead_seconds).collect();
            self.assert_same("clock of a task", &[("REST", in_rest), ("metrics", clock)]);
            for transport in ReportedTransport::ALL {
                let metric = ["sent", "received"].map(|direction| {
                    let labels =
                        [("task", id.as_str()), ("transport", transport.name()), ("direction", direction)];
                    saturating_sum(
                        self.samples("task_bytes_total", &labels).iter().map(|sample| *sample as u64),
                    )
                });
                let said = [("REST", bytes_moved(&task.totals, transport)), ("metrics", metric)];
                self.assert_same("bytes of a task", &said);
            }
            let Some(row) = rows.remove(&id) else { continue };
            let [sent, received] = bytes_moved_by_all_transports(&task.totals);
            let [connections, _, in_flight] = connection_totals_of_all_transports(&task.links);
            let in_rest = [
                ("Moved", format_bytes(sent.saturating_add(received))),
                ("Sent", format_bytes(sent)),
                ("Received", format_bytes(received)),
                ("Sends", format!("{}/s", format_bytes(task.sent_rate))),
                ("Receives", format!("{}/s", format_bytes(task.received_rate))),
                ("Connections", group_thousands(connections)),
                ("Launches in flight", group_thousands(in_flight)),
                ("Launches completed", group_thousands(completed)),
                ("Launches failed", group_thousands(failed)),
            ];
            let on_page = in_rest.each_ref().map(|(head, _)| (*head, row[*head].clone()));
            self.assert_same("transfers of a task", &[("REST", in_rest), ("page", on_page)]);
            self.assert_same(
                "stale tasks",
                &[("REST", task.stale), ("page", row["Last report"].contains("stale"))],
            );
        }
    }

    pub(super) fn compare_task_pages(&mut self) {
        for (id, page) in &self.seen.task_pages {
            let page = html_section(page, "task-moves");
            let Some(task) = self.tasks.iter().find(|task| task.task == TaskId(*id)) else {
                assert!(page.contains("This task reports no transfers"), "task {id}: {page}");
                continue;
            };
            let says = definition_list(page);
            let [sent, received] = bytes_moved_by_all_transports(&task.totals);
            let [connections, _, in_flight] = connection_totals_of_all_transports(&task.links);
            let [completed, failed] = completed_and_failed_launches(&task.totals);
            let lost = task.totals.lanes_lost;
            let lost = if lost > 0 { group_thousands(lost) } else { String::new() };
            let in_rest = [
                (
                    "Sent",
                    figures_in_texts([format_bytes(sent), format!("{}/s", format_bytes(task.sent_rate))]),
                ),
                (
                    "Received",
                    figures_in_texts([
                        format_bytes(received),
                        format!("{}/s", format_bytes(task.received_rate)),
                    ]),
                ),
                (
                    "Launches",
                    figures_in_texts([
                        group_thousands(completed),
                        group_thousands(failed),
                        group_thousands(in_flight),
                    ]),
                ),
                ("Connections", figures_in_texts([group_thousands(connections), lost])),
            ];
            let on_page = in_rest.each_ref().map(|(term, expected)| {
                let mut found = numbers_with_units(&says[*term]);
                // The times of the measurement follow the rate.
                found.truncate(expected.len());
                (*term, found)
            });
            self.assert_same("page of a task", &[("REST", in_rest), ("page", on_page)]);
            let clock = task.clock.map(|clock| {
                let side = if clock.ahead_us < 0 { "behind" } else { "ahead" };
                let spans = [format_micros(clock.ahead_us.unsigned_abs()), format_micros(clock.within_us)];
                (figures_in_texts(spans), side)
            });
            let on_page = says.get("Clock").map(|says| {
                (numbers_with_units(says), if says.contains(" behind ") { "behind" } else { "ahead" })
            });
            self.assert_same("clock of a task", &[("REST", clock), ("page of the task", on_page)]);
            let failures = task
                .failures
                .iter()
                .map(|one| (one.reason.name().to_owned(), one.peer.to_string(), one.text.clone()));
            let listed = page.split_once("<ul class=\"small\">").map_or("", |(_, list)| list);
            let on_page = texts_between(listed, "<li>", "</li>").map(|one| {
                let one = html_text(one);
                let (reason, rest) = one.split_once(" with task ").expect("a peer");
                let (peer, _) = rest.split_once(',').expect("a time");
                let said = rest.rsplit(": ").next().unwrap_or_default();
                (reason.to_owned(), peer.to_owned(), said.to_owned())
            });
            let said = [("REST", failures.collect::<Vec<_>>()), ("page", on_page.collect())];
            self.assert_same("failures of a task", &said);
        }
    }

    pub(super) fn compare_pairs(&mut self) {
        let pairs = &self.seen.transfers.pairs;
        for task in self.tasks {
            for transport in ReportedTransport::ALL {
                let by_this = pairs.iter().filter(|pair| pair.transport == transport);
                let sent =
                    by_this.clone().filter(|pair| pair.from == task.task).map(|pair| bytes_of_pair(pair)[0]);
                let received = by_this.filter(|pair| pair.to == task.task).map(|pair| bytes_of_pair(pair)[1]);
                let said = [
                    ("REST tasks", bytes_moved(&task.totals, transport)),
                    ("REST pairs", [saturating_sum(sent), saturating_sum(received)]),
                ];
                self.assert_same("bytes of the pairs of a task", &said);
            }
        }
        self.assert_same("pairs", &[("REST", pairs.len()), ("REST kept", self.seen.transfers.pairs_kept)]);
        let html = html_section(&self.seen.transfers_page, "pairs");
        self.compare_listed_pairs(pairs, html);
        let of = |text: &str| text.rsplit(" of ").next()?.split('.').next()?.parse::<usize>().ok();
        let kept = texts_between(html, "pairs with the most bytes", "<a").next().and_then(of);
        let kept = kept.unwrap_or(pairs.len());
        self.assert_same("pairs", &[("REST", pairs.len()), ("page", kept)]);

        let (one, of_one, page) = &self.seen.of_task;
        let with_it = |pair: &&PairView| [pair.from, pair.to].contains(&TaskId(*one));
        let chosen: Vec<PairView> = pairs.iter().filter(with_it).copied().collect();
        self.assert_same("pairs of one task", &[("REST", &chosen), ("REST of the task", &of_one.pairs)]);
        self.compare_listed_pairs(&of_one.pairs, html_section(page, "pairs"));
    }

    /// Compares the table of the picture of pairs, in which each task or each host has a row of its own.
    fn compare_cells_of_map(&mut self, pairs: &[PairView], cells: &[BTreeMap<String, String>]) {
        let mut with_pairs = 0;
        for cell in cells {
            let [from, to] = ["From", "To"].map(|head| tasks_of_row(&cell[head]));
            let of_cell = || pairs.iter().filter(|pair| from.contains(&pair.from) && to.contains(&pair.to));
            // A cell of failures alone has no pair.
            with_pairs += usize::from(of_cell().next().is_some());
            let moved = saturating_sum(of_cell().map(|pair| bytes_of_pair(pair)[2]));
            let rate = saturating_sum(of_cell().map(|pair| pair.rate));
            let in_rest = [format_bytes(moved), format!("{}/s", format_bytes(rate))];
            let on_page = ["Moved", "Rate"].map(|head| cell[head].clone());
            self.assert_same("cell of the picture of pairs", &[("REST", in_rest), ("page", on_page)]);
        }
        let rows: Vec<BTreeSet<TaskId>> = self.rows_of_map();
        let row = |task: TaskId| rows.iter().position(|row| row.contains(&task));
        let drawn: BTreeSet<_> = pairs.iter().map(|pair| (row(pair.from), row(pair.to))).collect();
        if cells.len() < LISTED {
            let shown = if self.view.tasks <= MATRIX { 0 } else { drawn.len() };
            self.assert_same("cells of the picture of pairs", &[("REST", shown), ("page", with_pairs)]);
        }
    }

    /// Returns the tasks of each row of the picture: tasks, or hosts and tasks on no known host.
    fn rows_of_map(&self) -> Vec<BTreeSet<TaskId>> {
        let all = (0..self.program.tasks).map(TaskId);
        if self.view.tasks <= OWN_ROWS {
            return all.map(|task| BTreeSet::from([task])).collect();
        }
        let hosts = self.seen.hosts["hosts"].as_array().expect("a list");
        let task = |id: &Value| TaskId(i32::try_from(id.as_i64().expect("a number")).expect("a task"));
        let tasks = |host: &Value| host["tasks"].as_array().into_iter().flatten().map(task).collect();
        let of_hosts: Vec<BTreeSet<TaskId>> = hosts.iter().map(tasks).collect();
        let alone = all.filter(|task| of_hosts.iter().all(|host| !host.contains(task)));
        let alone: Vec<_> = alone.map(|task| BTreeSet::from([task])).collect();
        [of_hosts, alone].concat()
    }

    fn compare_listed_pairs(&mut self, pairs: &[PairView], html: &str) {
        let (matrix, listed): (Vec<_>, Vec<_>) =
            table_rows(html).into_iter().partition(|row| row.contains_key("from \\ to"));
        let (cells, listed): (Vec<_>, Vec<_>) =
            listed.into_iter().partition(|row| row.contains_key("Failures"));
        self.compare_cells_of_map(pairs, &cells);
        self.assert_same(
            "pairs that are listed",
            &[("REST", pairs.len().min(LISTED)), ("page", listed.len())],
        );
        for row in listed {
            let pair = pairs.iter().find(|pair| {
                [pair.from.to_string(), pair.to.to_string(), pair.transport.to_string()]
                    == ["From", "To", "Transport"].map(|head| row[head].clone())
            });
            let pair = pair.unwrap_or_else(|| panic!("REST has no {row:?}"));
            let side = |said: Option<u64>| said.map_or_else(|| "not reported".into(), format_bytes);
            let in_rest = [
                format_bytes(bytes_of_pair(pair)[2]),
                format!("{}/s", format_bytes(pair.rate)),
                side(pair.sent),
                side(pair.received),
            ];
            let on_page = ["Moved", "Rate", "Sent", "Received"].map(|head| row[head].clone());
            self.assert_same("pair", &[("REST", in_rest), ("page", on_page)]);
        }
        let tasks = if self.view.tasks <= MATRIX && !pairs.is_empty() { self.view.tasks } else { 0 };
        self.assert_same("tasks in the table of all with all", &[("REST", tasks), ("page", matrix.len())]);
        for row in matrix {
            for to in 0..tasks {
                let is = |pair: &&PairView| {
                    row["from \\ to"] == pair.from.to_string() && pair.to.to_string() == to.to_string()
                };
                let all = saturating_sum(pairs.iter().filter(is).map(|pair| bytes_of_pair(pair)[2]));
                let in_rest = if all > 0 { format_bytes(all) } else { "·".into() };
                let on_page = row[&to.to_string()].clone();
                self.assert_same("bytes from one task to another", &[("REST", in_rest), ("page", on_page)]);
            }
        }
    }

    pub(super) fn compare_rates(&mut self) {
        let rate = format!("{}/s", format_bytes(self.view.rate));
        let page = self.sums["Sending rate, all tasks"].clone();
        let among_all = self.line["Sending rate"].clone();
        self.assert_same(
            "rate of all tasks",
            &[("REST", rate), ("page", page), ("page of all jobs", among_all)],
        );
        let until = self.tasks.iter().map(|task| Some(task.rate_until)).collect::<BTreeSet<_>>();
        self.assert_same(
            "end of the rates",
            &[("REST", BTreeSet::from([self.view.rate_until])), ("REST tasks", until)],
        );
        let throughput = &self.seen.transfers.throughput;
        let spare = usize::try_from(throughput.ends_at.0 / 1_000_000 % 10).expect("a digit");
        let steps = |sent: &[u64]| -> Vec<u64> {
            let whole = &sent[..sent.len().saturating_sub(spare)];
            whole.rchunks_exact(10).rev().map(|step| saturating_sum(step.iter().copied()) / 10).collect()
        };
        let in_rest: Vec<Vec<u64>> = throughput.transports.iter().map(|it| steps(&it.sent)).collect();
        let html = html_section(&self.seen.transfers_page, "throughput");
        let table: Vec<Vec<u64>> = texts_between(html, "<th scope=\"row\">", "</tr>")
            .map(|row| {
                texts_between(row, "data-value=\"", "\"").map(|it| it.parse().expect("a number")).collect()
            })
            .collect();
        let count = in_rest.first().map_or(0, Vec::len);
        let by_step = (0..count).map(|step| in_rest.iter().map(|all| all[step]).collect());
        self.assert_same(
            "steps of throughput",
            &[("REST", by_step.collect::<Vec<Vec<u64>>>()), ("page", table)],
        );
        if self.program.absurd {
            return;
        }
        // A rate is a whole number: each part of a sum and each report may lose a fraction.
        let reports = self.view.taken;
        let near = |figure, whole: u64, parts: u64| {
            assert!(
                whole.abs_diff(parts) <= reports,
                "{figure}: {whole} is not {parts}\n{}",
                ComparisonContext(self.program, self.seen)
            );
        };
        near("rates of the tasks", self.view.rate, self.sum_over_tasks(|task| task.sent_rate));
        if let Some(last) = count.checked_sub(1) {
            near("the last step", self.view.rate, saturating_sum(in_rest.iter().map(|all| all[last])));
        }
        for task in self.tasks {
            let pairs =
                self.seen.transfers.pairs.iter().filter(|pair| pair.from == task.task && pair.sent.is_some());
            near("rates of pairs", task.sent_rate, saturating_sum(pairs.map(|pair| pair.rate)));
        }
    }
}

/// Returns the tasks that the description of a row names: `task 3`, or `node-7 (tasks 0–2, 5)`.
fn tasks_of_row(description: &str) -> BTreeSet<TaskId> {
    let (_, numbers) = description.rsplit_once("task").expect("its tasks");
    let numbers = numbers.trim_start_matches('s').trim_end_matches(')');
    let range = |text: &str| {
        let (first, last) = text.split_once('–').unwrap_or((text, text));
        let [first, last] = [first, last].map(|number| number.trim().parse::<i32>().expect("a number"));
        first..=last
    };
    numbers.split(',').flat_map(range).map(TaskId).collect()
}
