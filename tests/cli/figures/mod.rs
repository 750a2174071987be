//! Tests that pages, REST, the command line and metrics show the same figures.
//!
//! Random tasks act on a job of a real server. When nothing changes any more, the test reads all four places and
//! compares them figure by figure. It also recomputes the totals of what REST lists for each task. `FIGURES_SEEDS`
//! sets the number of random programs, and `FIGURES_SEED` selects one.
//!
//! | file | contents |
//! | --- | --- |
//! | `programs.rs`, `reports.rs` | the random programs, and their transfer reports |
//! | `displayed_figures.rs` | reads all four places |
//! | `jobs.rs`, `transfers.rs` | compares the figures of a job, and of its transfers |
//! | `pictures.rs` | compares the pictures, the ended runs and the comparison of two runs |
//! | `other_pages.rs` | compares heartbeats, hosts, search, drains and stacks |

mod displayed_figures;
mod jobs;
mod other_pages;
mod pictures;
mod programs;
mod reports;
mod transfers;

use std::collections::BTreeMap;
use std::time::Duration;

use tokio::runtime::Runtime;

use self::displayed_figures::DisplayedFigures;
use self::programs::RandomProgram;
use crate::harness::{MusterServer, wait_until};

/// The number of programs of a normal run.
const SEEDS: u64 = 32;
const STATES: [&str; 7] =
    ["missing", "registering", "connected", "suspect", "disconnected", "failed", "excluded"];

/// Compares the values of one figure in four places.
#[derive(Default)]
struct ComparedFigures {
    compared: BTreeMap<&'static str, usize>,
}

impl ComparedFigures {
    #[track_caller]
    fn assert_same<T: PartialEq + std::fmt::Debug>(
        &mut self,
        figure: &'static str,
        said: &[(&str, T)],
        why: &impl std::fmt::Display,
    ) {
        assert!(said.len() > 1, "{figure} is said once");
        let differ = said.windows(2).any(|two| two[0].1 != two[1].1);
        assert!(!differ, "{figure}: {said:?}\n{why}");
        *self.compared.entry(figure).or_default() += 1;
    }
}

/// The context that is printed if a figure differs.
struct ComparisonContext<'a>(&'a RandomProgram<'a>, &'a DisplayedFigures);

impl std::fmt::Display for ComparisonContext<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self(program, seen) = self;
        write!(
            f,
            "{}: {}\n{}\n{:#}\n{:#?}",
            program.job,
            program.done.join("; "),
            seen.status,
            seen.rest["run"],
            seen.transfers
        )
    }
}

#[test]
fn pages_rest_the_command_line_and_metrics_say_the_same() {
    let number = |name: &str| std::env::var(name).ok().and_then(|text| text.parse::<u64>().ok());
    let seeds = match number("FIGURES_SEED") {
        Some(seed) => seed..seed + 1,
        None => 0..number("FIGURES_SEEDS").unwrap_or(SEEDS),
    };
    let many = seeds.end - seeds.start >= SEEDS;
    let server = MusterServer::start(&["--tasks", "1", "--log", "error"]);
    let runtime = Runtime::new().expect("a runtime");
    let mut ledger = ComparedFigures::default();
    let mut seen_states = BTreeMap::<&str, usize>::new();
    let mut seen_reports = BTreeMap::<&str, u64>::new();
    for seed in seeds {
        let mut program = RandomProgram::new(&server, &runtime, seed);
        program.run_to_end();
        let seen = DisplayedFigures::read_all(&program);
        if std::env::var_os("FIGURES_SHOW").is_some() {
            println!("{}\n{}", program.done.join("; "), seen.status);
        }
        jobs::compare_job_figures(&program, &seen, &mut ledger);
        transfers::compare_transfer_figures(&program, &seen, &mut ledger);
        pictures::compare_pictures(&program, &seen, &mut ledger);
        let (transfers, tasks) = (&seen.transfers.summary, &seen.task_transfers.tasks);
        for (kind, count) in [
            ("tasks that report", transfers.reporting as u64),
            ("stale tasks", transfers.stale as u64),
            ("repeated reports", transfers.repeated),
            ("refused reports", transfers.refused),
            ("tasks of several lives", tasks.iter().filter(|task| task.lives > 1).count() as u64),
            ("absurd amounts", tasks.iter().filter(|task| task.registered_bytes == u64::MAX).count() as u64),
            ("failures", transfers.failures.len() as u64),
            ("events of failures", seen.transfer_events.len() as u64),
            ("clocks", transfers.clock.iter().count() as u64),
        ]
        .into_iter()
        .chain(seen.pictures.counts())
        {
            *seen_reports.entry(kind).or_default() += count;
        }
        for state in STATES {
            *seen_states.entry(state).or_default() +=
                seen.rest["run"]["counts"][state].as_u64().unwrap_or(0) as usize;
        }
        program.delete_job();
    }
    if many {
        // The comparison must not pass for lack of data: every state occurred, and every figure was compared.
        assert!(seen_states.values().all(|count| *count > 0), "{seen_states:?}");
        // Devices change only if a task publishes them in two runs, of which few programs have as many.
        let is_seen = |(kind, count): (&&str, &u64)| *count > 0 || *kind == "changed devices";
        assert!(seen_reports.iter().all(is_seen), "{seen_reports:?}");
        assert!(ledger.compared.len() >= 95, "{}: {:?}", ledger.compared.len(), ledger.compared);
        assert!(ledger.compared.contains_key("length of an ended run"), "{:?}", ledger.compared);
    }
}

#[test]
fn rates_of_transfers_are_the_same_wherever_they_are_shown() {
    let server = MusterServer::start(&["--tasks", "1", "--log", "error"]);
    let runtime = Runtime::new().expect("a runtime");
    let mut ledger = ComparedFigures::default();
    let mut program = RandomProgram::new(&server, &runtime, 1);
    program.absurd = false;
    let tasks = program.tasks;
    (0..tasks).for_each(|task| program.register(task));
    wait_until("the run has begun", || program.get_job_json("")["run"]["state"] == "running");
    // A rate is known when ten seconds have been reported.
    wait_until("a rate is known, and a clock is off", || {
        (0..tasks).for_each(|task| program.send_next_report(task));
        program.wait_for_answers();
        std::thread::sleep(Duration::from_millis(400));
        let clock_off = program.get_job_json("/findings")["open"].to_string().contains("worker-clock-off");
        clock_off && program.get_job_json("/transfers")["rate"].as_u64() > Some(0)
    });
    let seen = DisplayedFigures::read_all(&program);
    transfers::compare_transfer_figures(&program, &seen, &mut ledger);
    for figure in ["rate of all tasks", "steps of throughput", "furthest clock of a finding"] {
        assert!(ledger.compared.contains_key(figure), "{figure} is not compared: {:?}", ledger.compared);
    }
}

#[test]
fn pages_that_no_random_program_fills_show_what_rest_says() {
    let server = MusterServer::start(&["--tasks", "1", "--log", "error"]);
    let runtime = Runtime::new().expect("a runtime");
    let mut ledger = ComparedFigures::default();
    for seed in 0..3 {
        let mut program = RandomProgram::new(&server, &runtime, seed);
        program.absurd = seed == 1;
        other_pages::compare_other_pages(&mut program, &mut ledger);
        program.delete_job();
    }
    assert_eq!(ledger.compared.len(), 12, "{:?}", ledger.compared);
}
