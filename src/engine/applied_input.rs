//! The result of an input ([`AppliedInput`]), the call that an input is ([`OwnCall`]), and the calls that are quick.

use super::event_history::EventsByNumber;
use super::waiting_calls::{WaitingCall, WaitingTable};
use crate::coordination::{
    CallId, CallOutcome, ClaimAnswer, ClaimRefusal, CommandOutcome, CommandRefusal, DeferredFree, Request,
};

/// The result of an input.
#[derive(Default)]
pub(super) struct AppliedInput {
    /// The answer to the applied call, if it came at once.
    pub own: Option<CallOutcome>,
    /// The outcome of the applied command.
    pub acted: Option<Result<CommandOutcome, CommandRefusal>>,
    /// The answer to the applied claim.
    pub claimed: Option<Result<ClaimAnswer, ClaimRefusal>>,
    /// The answers to waiting calls.
    pub deliveries: Vec<(WaitingCall, CallOutcome)>,
    /// The memory to free.
    pub discarded: Vec<DeferredFree>,
    pub events: Vec<EventsByNumber>,
    pub tables: Vec<WaitingTable>,
}

impl AppliedInput {
    /// Adds the result of a tick.
    pub fn merge_tick_result(&mut self, tick: Self) {
        self.deliveries.extend(tick.deliveries);
        self.discarded.extend(tick.discarded);
        self.events.extend(tick.events);
        self.tables.extend(tick.tables);
    }
}

/// The call that an input is.
#[derive(Debug, Clone, Copy)]
pub(super) struct OwnCall {
    pub call: CallId,
    /// The stream of its connection; 0: none.
    pub stream: u32,
}

/// Returns whether a request is about one task or one key, so that its cost does not depend on the size of
/// the state.
pub(super) fn is_about_one_task_or_key(request: &Request) -> bool {
    matches!(request, Request::Heartbeat { .. } | Request::Get { .. } | Request::TryGet { .. })
}
