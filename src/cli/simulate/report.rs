//! Prints what a simulation does: lines for people, or one JSON object a line.
//!
//! `simulator` has the words for actions. Begin at [`SimulationReport::print_start`].

use std::collections::BTreeMap;
use std::time::Duration;

use anyhow::Result;
use serde::Serialize;

use super::super::output::{TerminalText, print, print_json_line};
use super::server::SimulationServer;
use crate::coordination::{FirstCause, JobName};
use crate::simulator::{
    ConnectionPlan, Schedule, ScheduledAction, SimulatedTarget, SimulationSummary, Story, describe_action,
    describe_expectation, host_name,
};
use crate::text::{UntrustedText, format_exact_duration};

/// The most events that the first lines announce.
const ANNOUNCED_MAX: usize = 12;

/// A line as JSON.
#[derive(Serialize)]
#[serde(tag = "kind", rename_all = "kebab-case")]
enum ReportLine<'a> {
    Start {
        server: &'a str,
        job: &'a JobName,
        description: &'a str,
        tasks: u32,
        hosts: u32,
        connections: usize,
        seed: u64,
        address_for_each_host: bool,
    },
    Registered {
        after_s: f64,
    },
    Event {
        at_s: f64,
        what: &'static str,
        tasks: &'a [u32],
        hosts: Vec<String>,
        text: String,
        expected: String,
    },
    Summary {
        after_s: f64,
        #[serde(flatten)]
        summary: &'a SimulationSummary,
        first_cause: Option<&'a FirstCause>,
    },
}

/// Prints the lines of a simulation.
pub struct SimulationReport {
    story: Story,
    json: bool,
}

impl SimulationReport {
    pub const fn new(story: Story, json: bool) -> Self {
        Self { story, json }
    }

    /// Prints where the server is, and what will happen.
    pub fn print_start(
        &self,
        server: &SimulationServer,
        target: &SimulatedTarget,
        plan: &ConnectionPlan,
    ) -> Result<()> {
        let Self { story, json } = self;
        let (url, job, connections) = (server.url(), server.job(), plan.connections());
        let address_for_each_host = target.has_address_for_each_host();
        if *json {
            return print_json_line(&ReportLine::Start {
                server: url,
                job,
                description: &story.description,
                tasks: story.tasks,
                hosts: story.hosts,
                connections,
                seed: story.seed,
                address_for_each_host,
            });
        }
        let mut text = TerminalText::from_line(format!(
            "Muster simulation: {} tasks on {} hosts, over {connections} connections. {}",
            story.tasks, story.hosts, story.description
        ));
        text.add_line(format!("  look at  {url}/jobs/{job}"));
        text.add_line(format!("  or with  muster status --server {url} --job {job} --watch"));
        if !address_for_each_host {
            text.add_line("  all hosts have one address: only on Linux, and for a server on 127.0.0.1, each has its own");
        }
        let schedule = Schedule::new(story);
        let is_within = |action: &&ScheduledAction| story.length.is_none_or(|length| action.at < length.0);
        for action in schedule.first_actions().iter().filter(is_within).take(ANNOUNCED_MAX) {
            let every = action.every.map(format_exact_duration);
            let every = every.map_or_else(String::new, |every| format!(", and every {every}"));
            let at = format_exact_duration(action.at);
            text.add_line(format!("  at {at}{every}: {}", describe_action(action)));
        }
        text.add_line(match story.length {
            Some(length) => format!("  ends after {}, or with Ctrl-C", format_exact_duration(length.0)),
            None => "  end with Ctrl-C".to_owned(),
        });
        Ok(print(&text)?)
    }

    /// Prints that all tasks have registered.
    pub fn print_registered(&self, after: Duration) -> Result<()> {
        if self.json {
            return print_json_line(&ReportLine::Registered { after_s: after.as_secs_f64() });
        }
        let (tasks, after) = (self.story.tasks, after.as_secs_f64());
        Ok(print(&TerminalText::from_line(format!(
            "All {tasks} tasks have registered after {after:.1} s. The times of the story count from now"
        )))?)
    }

    /// Prints an action that begins, and what to expect of the service.
    pub fn print_action(&self, action: &ScheduledAction) -> Result<()> {
        let (text, expected) = (describe_action(action), describe_expectation(&self.story, action));
        let at_s = action.at.as_secs_f64();
        if self.json {
            return print_json_line(&ReportLine::Event {
                at_s,
                what: action.what.name(),
                tasks: &action.tasks,
                hosts: action.hosts.iter().map(|host| host_name(*host)).collect(),
                text,
                expected,
            });
        }
        Ok(print(&TerminalText::from_line(format!("{at_s:.1} s: {text}; {expected}")))?)
    }

    /// Prints what happened.
    pub fn print_summary(
        &self,
        after: Duration,
        summary: &SimulationSummary,
        first_cause: Option<&FirstCause>,
        remains: Option<&str>,
    ) -> Result<()> {
        if self.json {
            let after_s = after.as_secs_f64();
            return print_json_line(&ReportLine::Summary { after_s, summary, first_cause });
        }
        let mut text = TerminalText::from_line(format!(
            "{:.1} s: the simulation has ended after {} steps and {} registrations; {} of {} tasks took part at the end",
            after.as_secs_f64(),
            summary.steps,
            summary.registrations,
            summary.present,
            self.story.tasks
        ));
        let errors = |of: fn(&SimulationSummary) -> BTreeMap<&str, u64>| {
            let all = of(summary);
            let words: Vec<String> = all.iter().map(|(kind, count)| format!("{count} of {kind}")).collect();
            if words.is_empty() { "none".to_owned() } else { words.join(", ") }
        };
        text.add_line(format!(
            "  errors that the story provoked: {}",
            errors(SimulationSummary::expected_errors)
        ));
        text.add_line(format!("  other errors: {}", errors(SimulationSummary::unexpected_errors)));
        for error in &summary.unexpected {
            text.add_line(format!("    {error}"));
        }
        if let Some(cause) = first_cause {
            let whose = cause.task.map_or_else(String::new, |task| format!("task {task}: "));
            text.add_line(format!("  first cause: {whose}{}", UntrustedText::from(&*cause.why)));
        }
        if let Some(remains) = remains {
            text.add_line(format!("  {remains}"));
        }
        Ok(print(&text)?)
    }
}
