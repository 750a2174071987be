//! Launches, as their handles keep them: the transfers, and the wait for peers whose engines are not there yet.
//!
//! `transfer.rs` has the functions of C. Begin at [`LaunchObject::start`].

use std::num::NonZeroUsize;
use std::sync::{Arc, Weak};
use std::time::Duration;

use muster::agent::{Agent, EngineHost, WaitStatus};
use muster::transfer::{LaunchOptions, PeerTask, TransferError, TransferHandle, TransferSpec};

use super::status::{CallError, MusterStatus};
use super::wait;

/// The object of a [`MusterTransfer`](super::transfer::MusterTransfer).
pub struct LaunchObject {
    transfer: TransferHandle,
    /// The wait for its peers; none if it was launched at once.
    wait: Option<PeerWait>,
}

struct PeerWait {
    host: Weak<EngineHost>,
    status: WaitStatus,
    deadline: Option<Duration>,
}

impl LaunchObject {
    /// Returns the object of a launch that waits for no peer.
    pub fn without_wait(transfer: TransferHandle) -> Self {
        Self { transfer, wait: None }
    }

    /// Launches transfers with these peers, which send and receive so many bytes: at once if the engines of all peers are
    /// there, else as soon as they are. It returns at once.
    pub fn start(
        agent: &Agent,
        specs: Vec<TransferSpec>,
        peers: Vec<PeerTask>,
        bytes: (u64, u64),
        options: LaunchOptions,
    ) -> Result<Self, CallError> {
        let host = agent.host();
        // A request that is wrong on this side fails at once, and takes no place.
        let may_wait =
            |_: &NonZeroUsize| !host.can_launch_with(&peers) && agent.engine().check_own_side(&specs).is_ok();
        let absent = NonZeroUsize::new(specs.len()).filter(may_wait);
        let Some(count) = absent else {
            let transfer = wait::with_signals_blocked(|| agent.engine().transfer(&[], specs, options));
            return Ok(Self::without_wait(transfer));
        };
        let channel = options.channel;
        let pending = wait::with_signals_blocked(|| {
            host.reserve_launch(peers, count, bytes, options, move |_| channel)
        })?;
        let transfer = pending.transfer().clone();
        let (status, deadline) = (pending.wait_status(), options.deadline);
        let wait = PeerWait { host: Arc::downgrade(host), status, deadline };
        wait::with_signals_blocked(|| pending.launch(agent.engine(), |_| Ok(specs)));
        Ok(Self { transfer, wait: Some(wait) })
    }

    /// Returns the transfers.
    pub fn transfer(&self) -> &TransferHandle {
        &self.transfer
    }

    /// Returns the error of a launch that failed with `error`.
    pub fn failure(&self, error: TransferError) -> CallError {
        let explain = |wait: &PeerWait| {
            let limit = wait.deadline.unwrap_or_default();
            wait.status.explain(&error, wait.host.upgrade().as_ref(), limit)
        };
        let Some(reason) = self.wait.as_ref().and_then(explain) else { return error.into() };
        match error {
            // The code of a missing engine is that of a wait, which says that the launch goes on.
            TransferError::Deadline { .. } => CallError::new(MusterStatus::Deadline, reason.to_string()),
            _ => reason.into(),
        }
    }

    /// Returns the error of a wait that ended after `time`, before the launch did.
    pub fn pending_error(&self, time: Duration) -> CallError {
        let missing = self.wait.as_ref().map(|wait| wait.status.missing_peers()).unwrap_or_default();
        let ms = time.as_millis();
        let next = "wait again, or cancel it";
        let text = if missing.is_empty() {
            format!("the transfer is not over after {ms} ms, and goes on: {next}")
        } else {
            let tasks: Vec<_> = missing.iter().map(|peer| peer.task.to_string()).collect();
            let tasks = tasks.join(", ");
            format!("the transfer waits for the transfer engines of the tasks {tasks} after {ms} ms: {next}")
        };
        CallError::new(MusterStatus::TimedOut, text)
    }
}
