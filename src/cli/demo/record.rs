//! Records the steps of the demo's workers and decides whether the demo succeeded.
//!
//! Begin at `DemoRecord`.

use std::collections::BTreeSet;
use std::fmt::Write as _;

use super::super::worker::StepLine;

/// The maximum number of failed steps that the verdict names.
const NAMED: usize = 5;

/// The steps that may fail: from the step in progress when the demo killed a worker or the service, until the step in which
/// all take part again.
#[derive(Debug, Clone, Copy)]
struct AbsenceWindow {
    run: u64,
    from: u64,
    until: Option<u64>,
}

/// The observed steps, losses and failures.
#[derive(Debug, Default)]
pub struct DemoRecord {
    /// The number of runs that were drained and followed by another.
    run: u64,
    /// The last printed step of this run.
    told: u64,
    pub steps: u64,
    pub resharded: u64,
    pub checked: u64,
    pub losses: u64,
    pub service_kills: u64,
    window: Option<AbsenceWindow>,
    /// Failed steps while a worker or the service was away that the demo had killed, by run and number.
    tolerated: BTreeSet<(u64, u64)>,
    /// Other failed steps, by run, number and reporting task.
    broken: BTreeSet<(u64, u64, u32)>,
    /// The number of other cancelled steps.
    called_off: u64,
}

impl DemoRecord {
    /// Records that the demo kills a worker or the service.
    pub const fn record_kill(&mut self) {
        self.window = Some(AbsenceWindow { run: self.run, from: self.told, until: None });
    }

    /// Records that the worker takes part again, in this step.
    pub fn record_worker_return(&mut self, step: u64) {
        self.losses += 1;
        self.end_window(step);
    }

    /// Records that all take part again after the service was killed, in this step.
    pub fn record_service_return(&mut self, step: u64) {
        self.service_kills += 1;
        self.end_window(step);
    }

    fn end_window(&mut self, step: u64) {
        if let Some(window) = &mut self.window {
            window.until = Some(step);
        }
    }

    /// Records that another run begins, whose steps are numbered anew.
    pub const fn record_start_of_next_run(&mut self) {
        self.run += 1;
        self.told = 0;
    }

    /// Records a step as a worker reports it. Returns whether it is the first report of that step.
    pub fn record_step(&mut self, task: u32, seen: &StepLine) -> bool {
        self.checked += seen.checked;
        if !seen.whole {
            if self.tolerates_failure_of_step(seen.number) {
                self.tolerated.insert((self.run, seen.number));
            } else {
                self.broken.insert((self.run, seen.number, task));
            }
        }
        let first = seen.number > self.told;
        if first {
            self.told = seen.number;
            self.steps += 1;
            self.resharded += u64::from(seen.resharded);
        }
        first
    }

    /// Records a cancelled step.
    pub fn record_cancelled_step(&mut self) {
        let away = self.window.is_some_and(|window| window.run == self.run && window.until.is_none());
        self.called_off += u64::from(!away);
    }

    fn tolerates_failure_of_step(&self, step: u64) -> bool {
        self.window.is_some_and(|window| {
            window.run == self.run && window.from <= step && window.until.is_none_or(|until| step < until)
        })
    }

    /// Returns the verdict in words if every content was right and every step complete. `workers` of `all`
    /// take part at the end.
    ///
    /// # Errors
    /// The faults.
    pub fn verdict(&self, workers: usize, all: usize) -> Result<String, String> {
        if workers == 0 {
            return Err(format!(
                "all {all} workers are excluded, so nobody steps and nothing can be said: readmit them (`muster readmit`), or \
                 let the demo be"
            ));
        }
        if self.steps == 0 {
            return Err("no step was made, so nothing can be said".to_owned());
        }
        let mut wrong = Vec::new();
        if !self.broken.is_empty() {
            let steps: BTreeSet<_> = self.broken.iter().map(|(run, number, _)| (run, number)).collect();
            let mut text = format!("{} step(s) failed although the demo had taken nobody away:", steps.len());
            for (at, (_, number, task)) in self.broken.iter().take(NAMED).enumerate() {
                let comma = if at > 0 { "," } else { "" };
                // Writing to a string cannot fail.
                let _ = write!(text, "{comma} step {number} of worker {task}");
            }
            if self.broken.len() > NAMED {
                text.push_str(", …");
            }
            wrong.push(text);
        }
        if self.called_off > 0 {
            wrong.push(format!(
                "steps were called off {} time(s) although the demo had taken nobody away",
                self.called_off
            ));
        }
        if !wrong.is_empty() {
            return Err(
                wrong.join("; ") + ". The lines above say how; if somebody excluded a worker, that is why"
            );
        }
        Ok(match self.tolerated.len() {
            0 => "every content was right, and every step held".to_owned(),
            tolerated => format!(
                "every content was right, and every step held but {tolerated} while a worker{} was away that the demo had killed",
                if self.service_kills > 0 { " or the service" } else { "" }
            ),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn example_step_line(number: u64, whole: bool) -> StepLine {
        StepLine { number, tasks: vec![0, 1], checked: 3, resharded: true, whole }
    }

    fn record_after_steps(steps: &[(u64, bool)]) -> DemoRecord {
        let mut story = DemoRecord::default();
        for (number, whole) in steps {
            story.record_step(1, &example_step_line(*number, *whole));
        }
        story
    }

    #[test]
    fn a_step_that_fails_is_tolerated_only_while_a_worker_is_away_that_the_demo_took() {
        let good = record_after_steps(&[(1, true), (2, true), (2, true)]);
        assert_eq!((good.steps, good.checked), (2, 9));
        assert_eq!(good.verdict(4, 4), Ok("every content was right, and every step held".to_owned()));
        let wrong = record_after_steps(&[(1, true), (2, false)]).verdict(4, 4).unwrap_err();
        assert!(wrong.starts_with("1 step(s) failed") && wrong.contains("step 2 of worker 1"), "{wrong}");

        let mut story = record_after_steps(&[(1, true), (2, true)]);
        story.record_kill();
        // The step in progress, and one without the lost worker.
        story.record_step(0, &example_step_line(2, false));
        story.record_step(0, &example_step_line(3, false));
        story.record_cancelled_step();
        story.record_step(0, &example_step_line(4, true));
        story.record_step(0, &example_step_line(5, true));
        story.record_worker_return(5);
        // A late report, from before the worker returned.
        story.record_step(3, &example_step_line(4, false));
        let said = story.verdict(4, 4).unwrap();
        assert!(said.contains("every step held but 3 while a worker was away"), "{said}");
        let mut before = record_after_steps(&[(1, true), (2, true), (3, true)]);
        before.record_kill();
        before.record_step(0, &example_step_line(2, false));
        assert!(before.verdict(4, 4).is_err(), "it was over before the worker was taken away");
        story.record_step(3, &example_step_line(5, false));
        assert!(story.verdict(4, 4).is_err(), "it takes part again");
    }

    #[test]
    fn a_cancelled_step_without_an_absent_worker_is_a_failure() {
        let mut story = record_after_steps(&[(1, true)]);
        story.record_cancelled_step();
        assert!(story.verdict(4, 4).unwrap_err().contains("called off 1 time"));
    }

    #[test]
    fn a_new_run_is_not_tolerated_by_the_last_one() {
        let mut story = record_after_steps(&[(1, true)]);
        story.record_kill();
        story.record_start_of_next_run();
        story.record_step(0, &example_step_line(1, false));
        assert!(story.verdict(4, 4).is_err());
    }

    #[test]
    fn a_demo_without_steps_is_no_success() {
        assert!(
            record_after_steps(&[(1, true)])
                .verdict(0, 4)
                .unwrap_err()
                .contains("all 4 workers are excluded")
        );
        assert!(DemoRecord::default().verdict(4, 4).unwrap_err().contains("no step"));
    }
}
