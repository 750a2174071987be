//! The server of a simulation (its own, or a running one) and the job of the simulation.
//!
//! Begin at `SimulationServer::start_own` and `SimulationServer::connect`.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context as _, Result, bail};
use http::Method;

use super::super::client::{Client, ClientError};
use super::super::credentials::CredentialArgs;
use super::super::local_server::start_local_server;
use super::super::server::RunningServer;
use super::super::server_args::send_json;
use crate::coordination::{CommandReason, FirstCause, JobName, JobSummary, JobView, RunState};
use crate::http::api::{NewJob, RunsPage, SettingsBody};
use crate::simulator::{SimulatedTarget, Story, check_service};
use crate::text::format_exact_duration;
use crate::tls::{self, TlsClientForHost};

/// The time that the own server has to stop.
const STOP_TIMEOUT: Duration = Duration::from_millis(300);
/// The time in which the gRPC port must answer a call.
const CHECK_TIMEOUT: Duration = Duration::from_secs(10);
/// The number of latest runs whose first cause is looked for.
const RUNS_ASKED: usize = 16;

/// The server of a simulation and its job.
pub struct SimulationServer {
    client: Client,
    job: JobName,
    own: Option<Box<RunningServer>>,
    /// Whether the simulation has created the job on a running server.
    is_job_new: bool,
}

impl SimulationServer {
    /// Starts a server in this process, whose only job is that of the story.
    pub async fn start_own(addresses: [Option<SocketAddr>; 2], job: &JobName, story: &Story) -> Result<Self> {
        let flags = BTreeMap::from([
            ("recoverable", story.job.recoverable.to_string()),
            ("heartbeat-timeout", format_exact_duration(story.job.heartbeat_timeout.0)),
        ]);
        let server = start_local_server(addresses, job, story.tasks, &flags).await?;
        let url = format!("http://{}", server.server_info().http);
        let client = Client::connect(&url, &CredentialArgs::default()).await?;
        Ok(Self { client, job: job.clone(), own: Some(Box::new(server)), is_job_new: false })
    }

    /// Connects to a running server, and creates the job if the server has none of this name. If the job exists, the
    /// story gets its heartbeat timeout.
    pub async fn connect(
        url: &str,
        credentials: &CredentialArgs,
        job: &JobName,
        story: &mut Story,
    ) -> Result<Self> {
        let client = Client::connect(url, credentials).await?;
        match client.fetch_job(job).await {
            Ok(view) => {
                check_job_fits(&client, &view, story)?;
                story.job.heartbeat_timeout.0 = view.settings.heartbeat_timeout;
                story.check()?;
                Ok(Self { client, job: job.clone(), own: None, is_job_new: false })
            }
            Err(ClientError::NoSuchJob { .. }) => {
                let _: JobSummary =
                    send_json(&client, Method::POST, "/api/v1/jobs", &new_job(job, story)?).await?;
                // The server now says where the tasks of the new job connect.
                let client = Client::connect(url, credentials).await?;
                Ok(Self { client, job: job.clone(), own: None, is_job_new: true })
            }
            Err(error) => Err(error.into()),
        }
    }

    /// Returns the URL of the server.
    pub fn url(&self) -> &str {
        self.client.server_url()
    }

    /// Returns the job.
    pub const fn job(&self) -> &JobName {
        &self.job
    }

    /// Returns the gRPC port to which the tasks connect, after a call to it.
    pub async fn target(&self) -> Result<SimulatedTarget> {
        let about = self.client.server_info();
        let host = self.client.server_host();
        let authority = about.coordinator_address(&self.job, Some(host));
        let authority = authority.context("the server does not say where the tasks of the job connect")?;
        let listener = about.grpc.iter().find(|listener| listener.jobs.contains(&self.job));
        let mut address = listener.context("the server does not serve the job")?.address;
        if address.ip().is_unspecified() {
            let name = (tls::host_without_brackets(host), address.port());
            let found = tokio::net::lookup_host(name).await.with_context(|| format!("cannot find {host}"))?;
            address = { found }.next().with_context(|| format!("{host} has no address"))?;
        }
        let target = SimulatedTarget { address, tls: tls_of_environment(host)?, authority };
        check_service(&target, CHECK_TIMEOUT).await.map_err(|error| {
            let hint = "if its gRPC port wants TLS, set JAX_MTLS_CA_FILE, and JAX_MTLS_CERT_FILE and JAX_MTLS_KEY_FILE if it \
                        asks for a certificate";
            anyhow::anyhow!("{error}; {hint}")
        })?;
        Ok(target)
    }

    /// Returns the first error of the present run or, without one, of the latest run that has one.
    pub async fn fetch_first_cause(&self) -> Option<FirstCause> {
        let jobs = self.client.fetch_jobs().await.ok()?;
        let present = jobs.into_iter().find(|job| job.name == self.job)?.first_cause;
        if present.is_some() {
            return present;
        }
        let path = format!("/api/v1/jobs/{}/runs?limit={RUNS_ASKED}", self.job);
        let runs: RunsPage = self.client.get(&path).await.ok()?;
        runs.runs.into_iter().find_map(|run| run.first_cause)
    }

    /// Returns a sentence about the job that the simulation leaves behind, if it does.
    pub fn remaining_job_text(&self) -> Option<String> {
        let (job, url) = (&self.job, self.url());
        self.is_job_new.then(|| {
            format!(
                "the job {job} stays; delete it with: muster job delete {job} --reason TEXT --server {url}"
            )
        })
    }

    /// Stops the own server, if there is one.
    pub async fn stop(self) {
        if let Some(server) = self.own {
            server.stop(STOP_TIMEOUT).await;
        }
    }
}

/// Checks that an existing job fits the story, and that it has no live task.
fn check_job_fits(client: &Client, view: &JobView, story: &Story) -> Result<()> {
    let (job, url, tasks) = (&view.name, client.server_url(), view.settings.tasks);
    if tasks != story.tasks {
        bail!(
            "the job {job} at {url} has {tasks} task(s), and the story has {}: give --tasks {tasks}, or name another job \
             with --job, or change this one with `muster job set {job} --tasks {} --reason TEXT --server {url}`",
            story.tasks,
            story.tasks
        );
    }
    if view.settings.recoverable != story.job.recoverable {
        bail!(
            "the job {job} at {url} has recoverable = {}, and the story needs {}: name another job with --job, or change \
             the story or the job",
            view.settings.recoverable,
            story.job.recoverable
        );
    }
    if matches!(view.run.state, RunState::Forming | RunState::Running) && view.run.live > 0 {
        bail!(
            "the job {job} at {url} has a run with {} connected task(s): name another job with --job, or wait for the end \
             of the run",
            view.run.live
        );
    }
    Ok(())
}

fn new_job(job: &JobName, story: &Story) -> Result<NewJob> {
    let settings = SettingsBody {
        tasks: Some(story.tasks),
        recoverable: Some(story.job.recoverable),
        heartbeat_timeout: Some(format_exact_duration(story.job.heartbeat_timeout.0)),
        ..SettingsBody::default()
    };
    let reason = CommandReason::try_from("muster simulate".to_owned())?;
    Ok(NewJob { name: job.clone(), settings, reason })
}

/// Returns the TLS of the tasks, from the variables from which JAX programs have it. The certificate must have `host`.
fn tls_of_environment(host: &str) -> Result<Option<TlsClientForHost>> {
    let variable = |name: &str| std::env::var_os(name).map(PathBuf::from);
    let Some(ca) = variable("JAX_MTLS_CA_FILE") else { return Ok(None) };
    let own = variable("JAX_MTLS_CERT_FILE").zip(variable("JAX_MTLS_KEY_FILE"));
    let own = own.as_ref().map(|(cert, key)| (cert.as_path(), key.as_path()));
    let config = tls::client_config(&ca, own, &[b"h2"])?;
    Ok(Some(TlsClientForHost::new(Arc::new(config), host)?))
}
