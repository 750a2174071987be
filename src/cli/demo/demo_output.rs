//! Prints the lines of the demo: for people, or as JSON. Begin at [`DemoOutput`].

use std::net::SocketAddr;

use anyhow::Result;
use serde::Serialize;

use super::workers::WORKERS;
use crate::cli::output::{TerminalText, print, print_json_line};

/// How the demo prints.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DemoOutput {
    /// Lines for people.
    Text,
    /// A JSON object on each line.
    Json,
}

/// The outcome of the demo.
#[derive(Serialize)]
pub struct DemoOutcome {
    pub steps: u64,
    pub resharded: u64,
    pub checked: u64,
    pub losses: u64,
    pub service_kills: u64,
    /// The verdict, if it is a good one; none if the demo was stopped before its end.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub verdict: Option<String>,
    /// The failure, if any.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub failure: Option<String>,
}

/// A line of JSON about what happens.
#[derive(Serialize)]
struct ProgressLine<'a> {
    text: &'a str,
}

/// The first line of JSON: where the service is.
#[derive(Serialize)]
struct Addresses {
    grpc: SocketAddr,
    http: SocketAddr,
}

impl DemoOutput {
    /// Prints what has happened.
    pub fn say(self, line: &str) -> Result<()> {
        match self {
            Self::Text => Ok(print(&TerminalText::from_line(line))?),
            Self::Json => print_json_line(&ProgressLine { text: line }),
        }
    }

    /// Prints what the demo is, and where its service is.
    pub fn introduce(self, [grpc, http]: [SocketAddr; 2]) -> Result<()> {
        if self == Self::Json {
            return print_json_line(&Addresses { grpc, http });
        }
        self.say(&format!("Muster demo: a service, and {WORKERS} workers that move buffers to one another"))?;
        self.say(&format!("  look at  http://{http}/"))?;
        self.say(&format!("  or with  muster status --server http://{http} --watch"))?;
        self.say("  end with Ctrl-C")
    }

    /// Prints the outcome. In text without the failure, which is the error of the command.
    pub fn conclude(self, outcome: &DemoOutcome) -> Result<()> {
        if self == Self::Json {
            return print_json_line(outcome);
        }
        let DemoOutcome { steps, resharded, checked, losses, service_kills, verdict, .. } = outcome;
        let killed = if *service_kills > 0 {
            format!(", the service killed {service_kills} time(s)")
        } else {
            String::new()
        };
        self.say(&format!(
            "{steps} steps, {resharded} of them with an array resharded, {checked} buffers checked byte for byte, {losses} \
             worker(s) lost and taken back{killed}"
        ))?;
        verdict.as_ref().map_or(Ok(()), |verdict| self.say(verdict))
    }
}
