//! Defines the flags that client subcommands share: the server, the credentials, the job, and the output as JSON.
//!
//! `client.rs` sends requests. Begin at `ServerArgs::connect`.

use std::future::Future;

use anyhow::{Context as _, Result};
use clap::Args;
use http::Method;
use serde::Serialize;
use serde::de::DeserializeOwned;

use super::client::{Client, DEFAULT_SERVER};
use super::credentials::CredentialArgs;
use super::output::{TerminalText, print, print_json};
use crate::coordination::{JobName, Timestamp};

/// The flags for the server and the format of its answer.
#[derive(Debug, Args)]
pub struct ServerArgs {
    /// The HTTP address of the server
    #[arg(long, value_name = "URL", env = "MUSTER_SERVER", default_value = DEFAULT_SERVER, hide_env_values = true)]
    pub server: String,

    #[command(flatten)]
    credentials: CredentialArgs,

    /// Print the answer as JSON, as the REST API gives it
    #[arg(long)]
    pub json: bool,
}

impl ServerArgs {
    /// Finds the server.
    pub async fn connect(&self) -> Result<Client> {
        Ok(Client::connect(&self.server, &self.credentials).await?)
    }

    /// Prints an answer as JSON if requested, otherwise as text.
    pub fn print_answer<T: Serialize>(
        &self,
        answer: &T,
        words: impl FnOnce(&T) -> TerminalText,
    ) -> Result<()> {
        if self.json { print_json(answer) } else { Ok(print(&words(answer))?) }
    }
}

/// The flag for the job.
#[derive(Debug, Args)]
pub struct JobArg {
    /// The job; may be left out if there is only one, or one named `default`
    #[arg(long, value_name = "NAME", env = "MUSTER_JOB", hide_env_values = true)]
    pub job: Option<JobName>,
}

impl JobArg {
    /// Returns the path of the job in the REST API.
    pub async fn resolve_job_path(&self, client: &Client) -> Result<String> {
        Ok(format!("/api/v1/jobs/{}", client.resolve_job(self.job.as_ref()).await?))
    }
}

/// Runs the requests of a subcommand to their end.
pub fn block_on_requests<T>(conversation: impl Future<Output = Result<T>>) -> Result<T> {
    tokio::runtime::Builder::new_current_thread().enable_all().build()?.block_on(conversation)
}

/// Sends `body` as JSON.
pub async fn send_json<T: DeserializeOwned>(
    client: &Client,
    method: Method,
    path: &str,
    body: &impl Serialize,
) -> Result<T> {
    let body = serde_json::to_vec(body).context("cannot write the request as JSON")?;
    Ok(client.send_request(method, path, Some(body)).await?)
}

/// Formats a time, to the second.
pub fn format_time(at: Timestamp) -> String {
    at.to_string()
}

/// Formats a time to the millisecond: `2026-03-01T03:12:07.250Z`.
pub fn format_time_millis(at: Timestamp) -> String {
    at.to_text_with_milliseconds()
}
