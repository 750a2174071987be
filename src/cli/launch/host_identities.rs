//! Publishes the process identity of each process of a launch, because JAX's own client publishes none.
//!
//! `launch.rs` detects the identity of the host. Begin at [`IdentityPublisher`].

use std::collections::BTreeMap;
use std::time::Duration;

use tokio::sync::watch;
use tokio::task::JoinSet;

use crate::agent::{AgentConfig, TaskPresence, UnregisteredJobClient};
use crate::coordination::ProcessIdentity;
use crate::transfer::Incarnation;

/// The pause after which a service that did not answer is called again.
const RETRY_INTERVAL: Duration = Duration::from_secs(1);

/// The identities of the processes that run now, by task.
type RunningIdentities = BTreeMap<u32, ProcessIdentity>;

/// Publishes the identity of each process that runs, once for each incarnation that registers, until it is dropped.
///
/// A process that joins by `muster.jax.initialize()` publishes its identity itself; that is the same one.
pub struct IdentityPublisher {
    host: Option<String>,
    running: watch::Sender<RunningIdentities>,
    publishing: JoinSet<()>,
}

impl IdentityPublisher {
    /// Starts to follow the states of the job at `config.service`. Without a host it publishes nothing.
    pub fn start(config: AgentConfig, host: Option<String>) -> Self {
        let (running, identities) = watch::channel(RunningIdentities::new());
        let mut publishing = JoinSet::new();
        if host.is_some() {
            publishing.spawn(publish_identities(config, identities));
        }
        Self { host, running, publishing }
    }

    /// Takes note that process `local` of this host runs `task`.
    pub fn on_process_started(&self, task: u32, local: usize) {
        let identity = self.host.as_deref().zip(u32::try_from(local).ok());
        if let Some(Ok(identity)) = identity.map(|(host, local)| ProcessIdentity::new(host, local)) {
            self.running.send_modify(|running| _ = running.insert(task, identity));
        }
    }

    /// Takes note that the process of `task` has exited: a process of that number runs elsewhere from now on.
    pub fn on_process_exited(&self, task: u32) {
        self.running.send_modify(|running| _ = running.remove(&task));
    }

    /// Publishes no more.
    pub async fn stop(mut self) {
        self.publishing.shutdown().await;
    }
}

async fn publish_identities(config: AgentConfig, running: watch::Receiver<RunningIdentities>) {
    let mut observer = match UnregisteredJobClient::new(&config) {
        Ok(observer) => observer,
        Err(error) => {
            tracing::warn!(%error, "the identities of the processes are not published");
            return;
        }
    };
    let mut published = BTreeMap::new();
    loop {
        match observer.next_states().await {
            Ok(tasks) => {
                while publish_new_incarnations(&observer, &tasks, &running, &mut published).await.is_err() {
                    tokio::time::sleep(RETRY_INTERVAL).await;
                }
            }
            Err(error) => {
                tracing::debug!(%error, "the states of the tasks are asked for again");
                tokio::time::sleep(RETRY_INTERVAL).await;
            }
        }
    }
}

/// Publishes the identities of incarnations that are new: the store belongs to the run, and each run gets them again.
///
/// # Errors
/// If the service does not answer.
async fn publish_new_incarnations(
    observer: &UnregisteredJobClient,
    tasks: &[TaskPresence],
    running: &watch::Receiver<RunningIdentities>,
    published: &mut BTreeMap<u32, Incarnation>,
) -> Result<(), ()> {
    for task in tasks.iter().filter(|task| task.is_connected) {
        let Some(incarnation) = task.incarnation.filter(|it| published.get(&task.task) != Some(it)) else {
            continue;
        };
        let Some(identity) = running.borrow().get(&task.task).cloned() else { continue };
        let key = ProcessIdentity::store_key(task.task);
        match observer.insert(&key, identity.to_store_value().into(), true).await {
            Ok(_) => {}
            Err(error) if error.is_transient() => return Err(()),
            Err(error) => {
                tracing::warn!(task = task.task, %error, "the identity of a process is not published")
            }
        }
        published.insert(task.task, incarnation);
    }
    Ok(())
}
