//! Heartbeats in a form that takes a few bytes of the journal. Without IO.
//!
//! In most clusters nearly all inputs are heartbeats. A heartbeat changes nothing that its sender could rely on after a
//! restart, but the inputs after it are applied to the state that it leaves. So the recorder collects heartbeats, and puts
//! them into the journal as one record before the next input. If the process dies before that, they are lost without
//! harm. Begin at [`PackedHeartbeats::push`] and [`unpack_heartbeats`].
//!
//! Only a heartbeat that states the incarnations which the state has is packed, so the record needs no incarnations.

use serde::{Deserialize, Serialize};

use crate::coordination::{
    CallId, Caller, ConnectionId, Coordinator, Input, JobId, Request, StatedIncarnations, TaskId, Timestamp,
};

/// The space for heartbeats, in bytes: room for several hundred.
const SPACE: usize = 4 << 10;

/// One heartbeat.
#[derive(Serialize, Deserialize)]
struct PackedHeartbeat {
    /// The time since the heartbeat before it, and for the first one since the epoch.
    after: u64,
    job: JobId,
    connection: ConnectionId,
    task: TaskId,
    /// Whether the call stated the incarnations, as calls of generation C do.
    is_stated: bool,
}

/// Heartbeats that are not in the journal yet.
pub(super) struct PackedHeartbeats {
    space: Box<[u8; SPACE]>,
    used: usize,
    last: Timestamp,
}

impl Default for PackedHeartbeats {
    fn default() -> Self {
        Self { space: Box::new([0; SPACE]), used: 0, last: Timestamp(0) }
    }
}

impl PackedHeartbeats {
    /// Adds an input if it is a heartbeat of the present incarnations and there is room. Returns whether it did.
    #[inline]
    pub fn push(&mut self, now: Timestamp, input: &Input, coordinator: &Coordinator) -> bool {
        let Input::Call { job, caller, request: Request::Heartbeat { task, incarnation }, .. } = input else {
            return false;
        };
        let Some(present) = coordinator.present_incarnations(*job, *task) else { return false };
        let is_known = caller.claim.is_none_or(|stated| stated == present);
        if !is_known || present.task != *incarnation || now < self.last {
            return false;
        }
        let heartbeat = PackedHeartbeat {
            after: now.0 - self.last.0,
            job: *job,
            connection: caller.connection,
            task: *task,
            is_stated: caller.claim.is_some(),
        };
        let Ok(packed) = postcard::to_slice(&heartbeat, &mut self.space[self.used..]) else { return false };
        self.used += packed.len();
        self.last = now;
        true
    }

    /// Returns the heartbeats as the payload of a record; empty if there are none.
    pub fn bytes(&self) -> &[u8] {
        &self.space[..self.used]
    }

    /// Forgets the heartbeats.
    pub fn clear(&mut self) {
        (self.used, self.last) = (0, Timestamp(0));
    }
}

/// Calls `apply` with the time of each heartbeat in the payload of a record, and with a function that makes the input from the
/// state before it.
///
/// # Errors
/// If the payload is no list of heartbeats.
pub(super) fn unpack_heartbeats(
    mut bytes: &[u8],
    mut apply: impl FnMut(Timestamp, &dyn Fn(&Coordinator) -> Option<Input>),
) -> Result<(), postcard::Error> {
    let mut now = 0_u64;
    while !bytes.is_empty() {
        let (heartbeat, rest) = postcard::take_from_bytes::<PackedHeartbeat>(bytes)?;
        bytes = rest;
        now = now.checked_add(heartbeat.after).ok_or(postcard::Error::DeserializeBadVarint)?;
        apply(Timestamp(now), &|coordinator| heartbeat.to_input(coordinator));
    }
    Ok(())
}

impl PackedHeartbeat {
    /// Returns the input; `None` if the state knows no incarnation of the task.
    fn to_input(&self, coordinator: &Coordinator) -> Option<Input> {
        let present: StatedIncarnations = coordinator.present_incarnations(self.job, self.task)?;
        let caller = Caller { connection: self.connection, claim: self.is_stated.then_some(present) };
        let request = Request::Heartbeat { task: self.task, incarnation: present.task };
        // No caller waits for the answer, so the call needs no number of its own.
        Some(Input::Call { job: self.job, call: CallId(0), caller, request })
    }
}
