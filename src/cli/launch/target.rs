//! Holds the server of a launch, local or remote, and its job.
//!
//! Begin at `LaunchServer::start`.

use std::time::Duration;

use anyhow::{Context as _, Result, bail};

use super::super::client::Client;
use super::super::options::LaunchFlags;
use super::super::server::RunningServer;
use super::Arguments;
use crate::config::Config;
use crate::coordination::{FirstCause, JobName, JobView, RunState, TaskPhase};
use crate::engine::Engine;

/// The time that connections of exited tasks have to finish.
const STOP_TIMEOUT: Duration = Duration::from_secs(1);

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
    pub async fn start(config: &Config) -> Result<Self> {
        let job = config.jobs.first().context("there is no job")?;
        let server = RunningServer::start(config).await?;
        let coordinator = server.about().coordinator_address(&job.name, Some("127.0.0.1"));
        Ok(Self {
            job: job.name.clone(),
            coordinator: coordinator.context("the server does not serve the job")?,
            http: format!("http://{}", server.about().http),
            recoverable: job.settings.recoverable,
            server: ServerHandle::Local(Box::new(server)),
        })
    }

    /// Connects to a running server and checks that the job fits the launch.
    pub async fn find(url: &str, arguments: &Arguments, options: &LaunchFlags) -> Result<Self> {
        if let Some(flag) = options.first_flag_besides(&["log", "log-format", "io-threads", "recoverable"]) {
            bail!(
                "--{flag} is for the server to say, and --server names one that runs already: leave --{flag} out"
            );
        }
        let client = Client::find(url, &arguments.credentials).await?;
        let job = &arguments.job;
        let view = client.job(job).await?;
        let (tasks, asked) = (view.settings.tasks, arguments.processes);
        if tasks != asked {
            bail!(
                "the job {job} at {} has {tasks} task(s), but -n says {asked}: launch with -n {tasks}, or serve a job of \
                 {asked} with `muster serve --job NAME={asked}` and name it with --job",
                client.url()
            );
        }
        let recoverable = view.settings.recoverable;
        if options.flag("recoverable").is_some_and(|text| text != recoverable.to_string()) {
            bail!(
                "the job {job} at {} was declared with recoverable = {recoverable}, which --recoverable contradicts: \
                 leave it out, or declare the job so",
                client.url()
            );
        }
        if matches!(view.run.state, RunState::Forming | RunState::Running) && view.run.live > 0 {
            bail!(
                "the job {job} at {} has a run with {} connected task(s): wait for its end, or stop those processes \
                 first (muster status --server {} --job {job} shows them)",
                client.url(),
                view.run.live,
                client.url()
            );
        }
        let coordinator = client.about().coordinator_address(job, Some(client.host()));
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
            http: client.url().into(),
            recoverable,
            server: ServerHandle::Remote(client),
        })
    }

    /// Returns the address to which tasks connect.
    pub fn coordinator(&self) -> &str {
        &self.coordinator
    }

    /// Returns whether tasks may fail and come back.
    pub fn recoverable(&self) -> bool {
        self.recoverable
    }

    /// Returns the kind and the address of the server in a line.
    pub fn describe(&self) -> String {
        format!("job {} at {}; look with: muster status --server {}", self.job, self.coordinator, self.http)
    }

    /// Waits, for `within` at most, until the server has noticed that every process of the last run is gone.
    /// Otherwise the server would take the next run for a late part of the last one.
    pub async fn wait_until_vacated(&self, within: Duration) {
        // A remote server handles this by itself: a new incarnation ends the old run.
        let ServerHandle::Local(server) = &self.server else { return };
        let settled = async {
            let (_, mut events) = server.engine().follow(u64::MAX);
            while self.is_occupied(server.engine()) && events.recv().await.is_ok() {}
        };
        let _ = tokio::time::timeout(within, settled).await;
    }

    fn local_view(&self, engine: &Engine) -> Option<JobView> {
        engine.read(|core, now| core.job_view(core.job_named(self.job.as_str())?, now))
    }

    fn is_occupied(&self, engine: &Engine) -> bool {
        let Some(view) = self.local_view(engine) else { return false };
        let present =
            |standing| matches!(standing, TaskPhase::Registering | TaskPhase::Connected | TaskPhase::Suspect);
        matches!(view.run.state, RunState::Forming | RunState::Running)
            && view.run.tasks.iter().any(|task| present(task.standing))
    }

    /// Returns the first error of the present run or, without one, of the run before.
    pub async fn first_cause(&self) -> Option<FirstCause> {
        let view = match &self.server {
            ServerHandle::Local(server) => self.local_view(server.engine())?,
            ServerHandle::Remote(client) => client.job(&self.job).await.ok()?,
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
