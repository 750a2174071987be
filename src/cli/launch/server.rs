//! The server that a launch uses (a local server that the launch starts, or a remote one), and the job of the
//! launch.
//!
//! Begin at `LaunchServer::start_local`.

use std::time::Duration;

use anyhow::{Context as _, Result, bail};

use super::super::client::Client;
use super::super::credentials::CredentialArgs;
use super::super::server::RunningServer;
use super::super::setting_flags::LaunchFlags;
use crate::config::Config;
use crate::coordination::{FirstCause, JobName, JobView, RunState, TaskPhase};
use crate::engine::Engine;

/// The time that connections of exited tasks have to finish.
const STOP_TIMEOUT: Duration = Duration::from_secs(1);

/// The job and the processes of a launch.
pub struct RequestedJob<'a> {
    pub name: &'a JobName,
    pub processes: u32,
    /// The server gives the processes their task ids.
    pub claims_ids: bool,
}

/// The server of a launch and its job.
pub struct LaunchServer {
    job: JobName,
    coordinator: String,
    http: String,
    recoverable: bool,
    server: ServerHandle,
}

enum ServerHandle {
    Local(Box<RunningServer>),
    Remote(Client),
}

impl LaunchServer {
    /// Starts a server in this process.
    pub async fn start_local(config: &Config) -> Result<Self> {
        let job = config.jobs.first().context("there is no job")?;
        let server = RunningServer::start(config).await?;
        let coordinator = server.server_info().coordinator_address(&job.name, Some("127.0.0.1"));
        Ok(Self {
            job: job.name.clone(),
            coordinator: coordinator.context("the server does not serve the job")?,
            http: format!("http://{}", server.server_info().http),
            recoverable: job.settings.recoverable,
            server: ServerHandle::Local(Box::new(server)),
        })
    }

    /// Connects to a running server and checks that the job fits the launch.
    pub async fn connect_remote(
        url: &str,
        credentials: &CredentialArgs,
        requested: &RequestedJob<'_>,
        options: &LaunchFlags,
    ) -> Result<Self> {
        if let Some(flag) = options.first_flag_not_in(&["log", "log-format", "io-threads", "recoverable"]) {
            bail!(
                "--{flag} is for the server to say, and --server names one that runs already: leave --{flag} out"
            );
        }
        let client = Client::connect(url, credentials).await?;
        let RequestedJob { name: job, processes: asked, claims_ids } = *requested;
        let view = client.fetch_job(job).await?;
        let tasks = view.settings.tasks;
        if claims_ids && asked > tasks {
            bail!(
                "the job {job} at {} has {tasks} task(s), but -n says {asked}: launch at most {tasks}",
                client.server_url()
            );
        }
        if !claims_ids && tasks != asked {
            bail!(
                "the job {job} at {} has {tasks} task(s), but -n says {asked}: launch with -n {tasks}, or serve a job of \
                 {asked} with `muster serve --job NAME={asked}` and name it with --job",
                client.server_url()
            );
        }
        let recoverable = view.settings.recoverable;
        if options.flag_value("recoverable").is_some_and(|text| text != recoverable.to_string()) {
            bail!(
                "the job {job} at {} was declared with recoverable = {recoverable}, which --recoverable contradicts: \
                 leave it out, or declare the job so",
                client.server_url()
            );
        }
        let is_occupied =
            matches!(view.run.state, RunState::Forming | RunState::Running) && view.run.live > 0;
        // Other hosts may have launched theirs already, and the server gives no id of a connected task.
        if is_occupied && !claims_ids {
            bail!(
                "the job {job} at {} has a run with {} connected task(s): wait for its end, or stop those processes \
                 first (muster status --server {} --job {job} shows them)",
                client.server_url(),
                view.run.live,
                client.server_url()
            );
        }
        let coordinator = client.server_info().coordinator_address(job, Some(client.server_host()));
        let coordinator = coordinator.context("the server does not say where the job's tasks connect")?;
        if let Err(error) = tokio::net::lookup_host(&coordinator).await {
            bail!(
                "the name in {coordinator}, which leads to the job {job}, is not known here ({error}): make it known, or \
                 serve the job at an address of its own (muster serve --job {job}={tasks}@IP:PORT)"
            );
        }
        Ok(Self {
            job: job.clone(),
            coordinator,
            http: client.server_url().into(),
            recoverable,
            server: ServerHandle::Remote(client),
        })
    }

    /// Returns the address to which tasks connect.
    pub fn coordinator_address(&self) -> &str {
        &self.coordinator
    }

    /// Returns the HTTP address of the server.
    pub fn http_url(&self) -> &str {
        &self.http
    }

    /// Returns the job of the launch.
    pub const fn job_name(&self) -> &JobName {
        &self.job
    }

    /// Returns whether tasks may fail and come back.
    pub fn is_recoverable(&self) -> bool {
        self.recoverable
    }

    /// Returns the kind and the address of the server in a line.
    pub fn summary_line(&self) -> String {
        format!("job {} at {}; look with: muster status --server {}", self.job, self.coordinator, self.http)
    }

    /// Waits, for `within` at most, until the server has noticed that every process of the last run is gone.
    /// Otherwise the server would take the next run for a late part of the last one.
    pub async fn wait_until_tasks_are_gone(&self, within: Duration) {
        // A remote server handles this by itself: a new incarnation ends the old run.
        let ServerHandle::Local(server) = &self.server else { return };
        let settled = async {
            let (_, mut events) = server.engine().subscribe_events(u64::MAX);
            while self.has_present_task(server.engine()) && events.recv().await.is_ok() {}
        };
        let _ = tokio::time::timeout(within, settled).await;
    }

    fn local_job_view(&self, engine: &Engine) -> Option<JobView> {
        engine.read(|core, now| core.job_view(core.job_named(self.job.as_str())?, now))
    }

    fn has_present_task(&self, engine: &Engine) -> bool {
        let Some(view) = self.local_job_view(engine) else { return false };
        let present =
            |standing| matches!(standing, TaskPhase::Registering | TaskPhase::Connected | TaskPhase::Suspect);
        matches!(view.run.state, RunState::Forming | RunState::Running)
            && view.run.tasks.iter().any(|task| present(task.standing))
    }

    /// Returns the first error of the present run or, without one, of the run before.
    pub async fn fetch_first_cause(&self) -> Option<FirstCause> {
        let view = match &self.server {
            ServerHandle::Local(server) => self.local_job_view(server.engine())?,
            ServerHandle::Remote(client) => client.fetch_job(&self.job).await.ok()?,
        };
        view.run.first_cause.or_else(|| view.history.into_iter().next()?.first_cause)
    }

    /// Stops the server, if the launch started it.
    pub async fn stop(self) {
        if let ServerHandle::Local(server) = self.server {
            server.stop(STOP_TIMEOUT).await;
        }
    }
}
