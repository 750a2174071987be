//! The service of the demo: a part of this process, or processes of its own, one of which the demo kills.
//!
//! Begin at [`DemoService::start`].

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::process::Stdio;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use anyhow::{Context as _, Result, bail};
use rustix::process::{Pid, Signal, kill_process};
use tokio::io::{AsyncBufReadExt as _, BufReader};
use tokio::process::Child;
use tokio::task::JoinHandle;

use super::super::client::Client;
use super::super::credentials::CredentialArgs;
use super::super::local_server::{start_at_free_ports, start_local_server};
use super::super::server::RunningServer;
use super::workers::{HEARTBEAT_TIMEOUT, WORKERS, tied_command};
use crate::clock;
use crate::coordination::{JobName, JobView};
use crate::http::api::JournalView;

/// The time that the service has to stop.
const STOP_TIMEOUT: Duration = Duration::from_secs(1);
/// The time that the service has to serve again after it was killed.
const RETURN_TIMEOUT: Duration = Duration::from_secs(30);
/// The interval at which the state of the job is read from a service outside of this process.
const POLL_INTERVAL: Duration = Duration::from_millis(250);

/// The service of the demo.
pub enum DemoService {
    /// In this process.
    Inside(Box<RunningServer>),
    /// In processes of its own: a keeper, and the one that it starts.
    Apart(Box<ServiceProcesses>),
}

/// Returns the latest view of the job.
pub type JobViewLookup = Box<dyn Fn() -> Option<JobView>>;

impl DemoService {
    /// Starts the service at the `given` addresses for gRPC and HTTP, elsewhere at the usual ports or at free ones.
    pub async fn start(given: [Option<SocketAddr>; 2], apart: bool) -> Result<Self> {
        if apart {
            let processes = start_at_free_ports(given, ServiceProcesses::start_at).await?;
            return Ok(Self::Apart(Box::new(processes)));
        }
        let flags = BTreeMap::from([
            ("recoverable", true.to_string()),
            ("heartbeat-timeout", HEARTBEAT_TIMEOUT.to_owned()),
        ]);
        let name: JobName = JobName::DEFAULT.parse().map_err(anyhow::Error::msg)?;
        let server = start_local_server(given, &name, WORKERS, &flags).await?;
        Ok(Self::Inside(Box::new(server)))
    }

    /// Returns the addresses for gRPC and HTTP.
    pub fn addresses(&self) -> Option<[SocketAddr; 2]> {
        match self {
            Self::Inside(server) => {
                let about = server.server_info();
                Some([about.grpc.first()?.address, about.http])
            }
            Self::Apart(processes) => Some(processes.addresses),
        }
    }

    /// Returns a function that returns the view of the job.
    pub fn job_view(&self) -> JobViewLookup {
        match self {
            Self::Inside(server) => {
                let engine = Arc::clone(server.engine());
                Box::new(move || {
                    engine.read(|core, now| core.job_view(core.job_named(JobName::DEFAULT)?, now))
                })
            }
            Self::Apart(processes) => {
                let view = Arc::clone(&processes.view);
                Box::new(move || view.lock().unwrap_or_else(PoisonError::into_inner).clone())
            }
        }
    }

    /// Returns what kills the service, if it has a process of its own.
    pub fn killer(&self) -> Option<ServiceKiller> {
        match self {
            Self::Inside(_) => None,
            Self::Apart(processes) => {
                Some(ServiceKiller { keeper: processes.keeper.id()?, url: processes.url(), restarts: 0 })
            }
        }
    }

    /// Stops the service, and deletes its journal.
    pub async fn stop(self) {
        match self {
            Self::Inside(server) => server.stop(STOP_TIMEOUT).await,
            Self::Apart(mut processes) => {
                processes.poller.abort();
                let pid = processes.keeper.id().and_then(|id| Pid::from_raw(i32::try_from(id).ok()?));
                if let Some(pid) = pid {
                    // It may have ended already.
                    let _ = kill_process(pid, Signal::TERM);
                    let _ = tokio::time::timeout(STOP_TIMEOUT * 5, processes.keeper.wait()).await;
                }
            }
        }
    }
}

/// A folder for a journal, which is deleted when this is dropped.
struct JournalOfDemo(PathBuf);

impl Drop for JournalOfDemo {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// A service in processes of its own.
pub struct ServiceProcesses {
    keeper: Child,
    addresses: [SocketAddr; 2],
    /// Deleted at the end.
    _folder: JournalOfDemo,
    view: Arc<Mutex<Option<JobView>>>,
    poller: JoinHandle<()>,
}

impl ServiceProcesses {
    /// With `is_quiet` the service does not say why it cannot start.
    async fn start_at([grpc, http]: [SocketAddr; 2], is_quiet: bool) -> Result<Self> {
        let folder = JournalOfDemo(std::env::temp_dir().join(format!(
            "muster-demo-{}-{:08x}",
            std::process::id(),
            clock::random_u64() >> 32
        )));
        let mut command = tied_command();
        command.args(["serve", "--recoverable", "--log", "off"]);
        command.args(["--grpc", &grpc.to_string(), "--http", &http.to_string()]);
        command.args(["--tasks", &WORKERS.to_string(), "--heartbeat-timeout", HEARTBEAT_TIMEOUT]);
        command.arg("--data-dir").arg(&folder.0);
        if is_quiet {
            command.stderr(Stdio::null());
        }
        // Ctrl-C is for the demo, which stops the service at its end.
        command.stdin(Stdio::null()).stdout(Stdio::piped()).process_group(0).kill_on_drop(true);
        let mut keeper = command.spawn().context("cannot start the service")?;
        let mut lines = BufReader::new(keeper.stdout.take().context("its output is a pipe")?).lines();
        let mut addresses = Vec::new();
        while addresses.len() < 2 {
            let Some(line) = lines.next_line().await.context("cannot read from the service")? else {
                bail!("the service did not start");
            };
            if let Some((_, address)) = line.split_once("gRPC  ").or_else(|| line.split_once("HTTP  http://"))
            {
                addresses.push(address.trim().parse().context("an address of the service")?);
            }
        }
        let addresses = addresses.try_into().map_err(|_| anyhow::anyhow!("two addresses"))?;
        let view = Arc::default();
        let poller = tokio::spawn(poll_job_view(url_of(addresses), Arc::clone(&view)));
        Ok(Self { keeper, addresses, _folder: folder, view, poller })
    }

    fn url(&self) -> String {
        url_of(self.addresses)
    }
}

fn url_of([_, http]: [SocketAddr; 2]) -> String {
    format!("http://{http}")
}

/// Reads the view of the job again and again; the last one stays while the service is away.
async fn poll_job_view(url: String, view: Arc<Mutex<Option<JobView>>>) {
    loop {
        if let Ok(present) = read_job_view(&url).await {
            *view.lock().unwrap_or_else(PoisonError::into_inner) = Some(present);
        }
        tokio::time::sleep(POLL_INTERVAL).await;
    }
}

async fn read_job_view(url: &str) -> Result<JobView> {
    let name: JobName = JobName::DEFAULT.parse().map_err(anyhow::Error::msg)?;
    Ok(Client::connect(url, &CredentialArgs::default()).await?.fetch_job(&name).await?)
}

/// Kills the process that serves.
pub struct ServiceKiller {
    keeper: u32,
    url: String,
    restarts: u64,
}

/// The outcome of a kill.
pub struct ServiceKilled {
    /// The process that was killed.
    pub process: i32,
    /// The time until another one answered.
    pub away: Duration,
}

impl ServiceKiller {
    /// Kills the process that serves with SIGKILL, and waits until another one does.
    pub async fn kill(&mut self) -> Result<ServiceKilled> {
        let children = format!("/proc/{0}/task/{0}/children", self.keeper);
        let children = std::fs::read_to_string(children).context("the keeper has ended")?;
        let process = children.split_whitespace().next().and_then(|text| text.parse().ok());
        let process: i32 = process.context("no process serves")?;
        let began = clock::monotonic();
        kill_process(Pid::from_raw(process).context("a process id")?, Signal::KILL)
            .context("it cannot be killed")?;
        self.restarts += 1;
        while !self.serves_again().await {
            if began.elapsed() > RETURN_TIMEOUT {
                bail!("the service did not serve again within {RETURN_TIMEOUT:?}");
            }
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
        Ok(ServiceKilled { process, away: began.elapsed() })
    }

    async fn serves_again(&self) -> bool {
        let Ok(client) = Client::connect(&self.url, &CredentialArgs::default()).await else { return false };
        let journal = client.get::<JournalView>("/api/v1/journal").await;
        journal.is_ok_and(|journal| journal.restarts >= self.restarts)
    }
}
