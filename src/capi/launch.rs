//! Launches, as their handles keep them: the transfers, and the wait for peers whose engines are not there yet.
//!
//! `transfer.rs` has the functions of C. Begin at [`LaunchObject::start`].

use std::num::NonZeroUsize;
use std::time::Duration;

use muster::agent::{Agent, PeerWait};
use muster::transfer::{LaunchOptions, PeerTask, TransferError, TransferHandle, TransferSpec};

use super::status::{CallError, MusterStatus};
use super::wait;

/// The object of a [`MusterTransfer`](super::transfer::MusterTransfer).
pub struct LaunchObject {
    transfer: TransferHandle,
    /// The wait for its peers; none if it was launched at once.
    wait: Option<PeerWait>,
}

impl LaunchObject {
    /// Returns the object of a launch that waits for no peer.
    pub fn without_wait(transfer: TransferHandle) -> Self {
        Self { transfer, wait: None }
    }

    /// Launches transfers with these peers: at once if the engines of all peers are there, else as soon as they are. It returns
    /// at once.
    pub fn start(
        agent: &Agent,
        specs: Vec<TransferSpec>,
        peers: Vec<PeerTask>,
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
        let (channel, bytes) = (options.channel, TransferSpec::sent_and_received(&specs));
        wait::with_signals_blocked(|| {
            let pending = host.reserve_launch(peers, count, bytes, options, move |_| channel)?;
            let transfer = pending.transfer().clone();
            let wait = Some(host.peer_wait(&pending, options.deadline));
            pending.launch(agent.engine(), |_| Ok(specs));
            Ok(Self { transfer, wait })
        })
    }

    /// Returns the transfers.
    pub fn transfer(&self) -> &TransferHandle {
        &self.transfer
    }

    /// Returns the error of a launch that failed with `error`.
    pub fn failure(&self, error: TransferError) -> CallError {
        let Some(reason) = self.wait.as_ref().and_then(|wait| wait.reason(&error)) else {
            return error.into();
        };
        match error {
            // The code of a missing engine is that of a wait, which says that the launch goes on.
            TransferError::Deadline { .. } => CallError::new(MusterStatus::Deadline, reason.to_string()),
            _ => reason.into(),
        }
    }

    /// Returns the error of a wait that ended after `time`, before the launch did.
    pub fn pending_error(&self, time: Duration) -> CallError {
        let missing = self.wait.as_ref().map(PeerWait::missing_peers).unwrap_or_default();
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
