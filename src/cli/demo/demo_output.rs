//! Prints the lines of the demo: for people, or as JSON. Begin at [`DemoOutput`].

use std::net::SocketAddr;

use anyhow::Result;
use serde::Serialize;

use crate::cli::output::{TerminalText, print, print_json_line};

/// How the demo prints.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DemoOutput {
    /// Lines for people.
    Text,
    /// A JSON object on each line.
    Json,
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

    /// Prints where the service is, in JSON only.
    pub fn tell_addresses(self, [grpc, http]: [SocketAddr; 2]) -> Result<()> {
        match self {
            Self::Text => Ok(()),
            Self::Json => print_json_line(&Addresses { grpc, http }),
        }
    }

    /// Prints the outcome, in JSON only.
    pub fn tell_outcome(self, outcome: &impl Serialize) -> Result<()> {
        match self {
            Self::Text => Ok(()),
            Self::Json => print_json_line(outcome),
        }
    }
}
