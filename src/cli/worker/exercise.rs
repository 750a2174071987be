//! The exercise: a program of a worker that imitates training but has no model. In each step, all live tasks wait at
//! a barrier. Then each task sends buffers of changing size to the next task in a ring and to one other task, changes
//! the sharding of an array, and checks every byte that it receives.
//!
//! `move_plan.rs` plans the transfers. Begin at `Exercise::run_step`.
//!
//! One step:
//! 1. The task requests the live set. If the set differs from the last one, an *epoch* begins: its members tell one
//!    another the number of their last step.
//! 2. The members wait at a barrier whose id names the epoch. The number of the step is the counter of this barrier
//!    plus a base number that all members know. So a task need not know what happened before it joined.
//! 3. Each task runs its transfers of the step. The transfers with each peer are a separate request, so a failure
//!    with one peer does not affect the transfers with the others. The resharding of the array is one request: on
//!    each task, it succeeds or fails as a whole.
//!
//! If a member is lost while others wait for it, each task that learns of the loss cancels the barrier. The barrier
//! may have passed before the cancellation reached the service. So a task relies on the answer to its barrier call,
//! not on the answer to the cancellation. Either all members of the live set perform the step, or none of them does.

mod move_plan;
mod resharding;
pub(super) mod step;
mod transfers;

use std::time::Duration;

use tokio::sync::watch;
use tonic::Code;

use crate::agent::{Agent, AgentError, hash_members};
use crate::transfer::MemberId;
use resharding::ReshardPlans;
pub use step::{ExerciseError, ExerciseOptions, PeerFailure, StepReport};
use transfers::{EpochTransfers, PreparedMoves, StepTransfers};

/// The outcome of a step.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum StepOutcome {
    /// The step was made.
    Completed(StepReport),
    /// The step was cancelled, for this reason; it may be tried again.
    Cancelled(String),
}

/// The exercise of one incarnation.
#[derive(Debug)]
pub struct Exercise<'a> {
    agent: &'a Agent,
    options: ExerciseOptions,
    transfers: StepTransfers<'a>,
    epoch: Option<Epoch>,
    /// Turns true when waiting shall end.
    cancelled: watch::Receiver<bool>,
    /// The number of the last completed step.
    last: u64,
}

/// The state that lasts as long as the members do not change.
#[derive(Debug)]
struct Epoch {
    /// The id of the epoch, in the name of a barrier and a directory of keys.
    id: String,
    /// The step of the barrier's first use after the one that begins the epoch.
    base: u64,
    transfers: EpochTransfers,
}

enum BarrierResult {
    Passed(i64),
    Cancelled(String),
}

impl<'a> Exercise<'a> {
    /// Allocates the memory for all buffers. When `cut` turns true, steps that wait for others are cancelled.
    ///
    /// # Errors
    /// If the system has no memory.
    pub fn new(
        agent: &'a Agent,
        options: ExerciseOptions,
        cut: watch::Receiver<bool>,
    ) -> Result<Self, ExerciseError> {
        let transfers = StepTransfers::new(agent, options.clone())?;
        Ok(Self { agent, options, transfers, epoch: None, cancelled: cut, last: 0 })
    }

    /// Returns the number of the next step, as far as this task knows.
    #[must_use]
    pub const fn next_step_number(&self) -> u64 {
        self.last + 1
    }

    /// Makes a step with all live tasks.
    ///
    /// # Errors
    /// If the exercise cannot continue; failures with single peers are in the report of the step.
    pub async fn run_step(&mut self) -> Result<StepOutcome, ExerciseError> {
        let members = tokio::select! {
            members = self.agent.live_set(self.live_set_timeout()) => members?,
            () = wait_for_stop(self.cancelled.clone()) => return Ok(StepOutcome::Cancelled(STOP_REASON.to_owned())),
        };
        if self.epoch.as_ref().is_none_or(|epoch| epoch.transfers.members != members) {
            // Prepared transfers with lost members are dropped with the epoch.
            if let Some(old) = self.epoch.take() {
                self.agent.drop_barrier_counter(&old.id);
            }
            match self.begin_epoch(members).await? {
                Ok(epoch) => self.epoch = Some(epoch),
                Err(why) => return Ok(StepOutcome::Cancelled(why)),
            }
        }
        let Some(mut epoch) = self.epoch.take() else {
            return Ok(StepOutcome::Cancelled("there is no epoch".to_owned()));
        };
        let made = match self.wait_at_epoch_barrier(&epoch.id, &epoch.transfers.members).await {
            Ok(BarrierResult::Passed(count)) => {
                let number = epoch.base + u64::try_from(count).unwrap_or(0);
                self.last = number;
                self.transfers
                    .run_step_transfers(&mut epoch.transfers, number)
                    .await
                    .map(StepOutcome::Completed)
            }
            Ok(BarrierResult::Cancelled(why)) => Ok(StepOutcome::Cancelled(why)),
            Err(error) => Err(error),
        };
        self.epoch = Some(epoch);
        made
    }

    /// Returns the timeout of the live set: the service may need a heartbeat timeout to detect a lost task,
    /// and may be away for a time.
    fn live_set_timeout(&self) -> Duration {
        let config = self.agent.config();
        self.options.limit.saturating_add(config.heartbeat_timeout).saturating_add(config.patience)
    }

    /// Begins an epoch; the inner error says why it cannot begin.
    async fn begin_epoch(&mut self, members: Vec<MemberId>) -> Result<Result<Epoch, String>, ExerciseError> {
        let number = hash_members(&members);
        let id = format!("muster/exercise/{number:016x}");
        let devices = match self.agree_on_device_count(&members).await? {
            Ok(devices) => devices,
            Err(why) => return Ok(Err(why)),
        };
        let key = format!("{id}/{}", self.agent.here().task);
        self.agent.insert(&key, self.last.to_string(), true).await?;
        let count = match self.wait_at_epoch_barrier(&id, &members).await? {
            BarrierResult::Passed(count) => count,
            BarrierResult::Cancelled(why) => return Ok(Err(why)),
        };
        let steps = self.agent.list(&id).await?;
        let step = |value: &[u8]| std::str::from_utf8(value).ok()?.parse::<u64>().ok();
        let last = steps.iter().filter_map(|(_, value)| step(value)).max().unwrap_or(self.last);
        // The instance that has just passed was the last completed step.
        let base = last.saturating_sub(u64::try_from(count).unwrap_or(0));
        let (most, limit) = (self.options.bytes_max, self.options.limit);
        let resharding = if members.len() > 1 {
            let roster = self.agent.roster().borrow().clone();
            Some(ReshardPlans::new(&members, devices, &roster, most, limit)?)
        } else {
            None
        };
        let rings = PreparedMoves::default();
        let transfers = EpochTransfers { members, number, devices, rings, resharding };
        Ok(Ok(Epoch { id, base, transfers }))
    }

    /// Returns the number of devices that all members have, or a member that was lost before that was known.
    async fn agree_on_device_count(
        &self,
        members: &[MemberId],
    ) -> Result<Result<u32, String>, ExerciseError> {
        let mut roster = self.agent.roster();
        let until = tokio::time::sleep(self.options.limit.saturating_add(self.agent.config().patience));
        tokio::pin!(until);
        loop {
            let waits = {
                let roster = roster.borrow_and_update();
                let unknown = members.iter().find(|member| !roster.membership.has(**member)).copied();
                let Some(member) = unknown else {
                    let counts =
                        members.iter().filter_map(|member| roster.membership.peers.get(&member.task));
                    let devices = counts.map(|peer| peer.devices.len() as u32).min().unwrap_or(0);
                    return Ok(Ok(devices.min(move_plan::DEVICES_MAX)));
                };
                if let Some(why) = roster.unusable.get(&member.task) {
                    return Err(ExerciseError::NoEngine { task: member.task.0, why: why.clone() });
                }
                member
            };
            tokio::select! {
                changed = roster.changed() => {
                    if changed.is_err() || self.agent.roster().borrow().first_lost_member(&[waits]).is_some() {
                        return Ok(Err(format!("{waits} was lost")));
                    }
                }
                error = self.agent.wait_for_end() => return Err(error.into()),
                () = wait_for_stop(self.cancelled.clone()) => return Ok(Err(STOP_REASON.to_owned())),
                () = &mut until => {
                    let why = "it has published none: is it another program?".to_owned();
                    return Err(ExerciseError::NoEngine { task: waits.task.0, why });
                }
            }
        }
    }

    /// Waits for all members at the barrier of the epoch, unless one of them is lost.
    async fn wait_at_epoch_barrier(
        &self,
        id: &str,
        members: &[MemberId],
    ) -> Result<BarrierResult, ExerciseError> {
        let tasks: Vec<u32> = members.iter().map(|member| member.task.0).collect();
        let waiting = self.agent.barrier(id, &tasks, self.options.limit);
        tokio::pin!(waiting);
        let mut roster = self.agent.roster();
        let gone = async {
            loop {
                let gone = roster.borrow_and_update().first_lost_member(members);
                if let Some(member) = gone {
                    return member;
                }
                if roster.changed().await.is_err() {
                    std::future::pending::<()>().await;
                }
            }
        };
        let (answer, why) = tokio::select! {
            biased;
            answer = &mut waiting => (answer, "another task called the step off".to_owned()),
            member = gone => {
                let _in_time = self.agent.cancel_barrier(id).await?;
                (waiting.await, format!("{member} was lost"))
            }
            () = wait_for_stop(self.cancelled.clone()) => {
                let _in_time = self.agent.cancel_barrier(id).await?;
                (waiting.await, STOP_REASON.to_owned())
            }
        };
        match answer {
            Ok(count) => Ok(BarrierResult::Passed(count)),
            Err(AgentError::Refused { code: Code::Cancelled, .. }) => Ok(BarrierResult::Cancelled(why)),
            // A member did not arrive. The service finds out whether it lives, while the live set is awaited.
            Err(AgentError::Refused { code: Code::DeadlineExceeded, message, .. }) => {
                Ok(BarrierResult::Cancelled(message))
            }
            Err(error) => Err(error.into()),
        }
    }
}

const STOP_REASON: &str = "this worker was told to end";

/// Resolves when waiting shall end.
async fn wait_for_stop(mut told: watch::Receiver<bool>) {
    if told.wait_for(|told| *told).await.is_err() {
        std::future::pending::<()>().await;
    }
}
