//! Calls that wait since a former process. Begin at [`Engine::continue_waiting_call`].

use std::sync::Arc;

use super::Engine;
use super::waiting_calls::{AnswerInbox, WaitingCall};
use crate::coordination::{CallId, CallOutcome};

impl Engine {
    /// Takes over a call that waits since a former process. Returns its answer, if there is one already; otherwise the answer
    /// will be delivered to `inbox` under `slot`.
    pub fn continue_waiting_call(
        &self,
        call: CallId,
        inbox: &Arc<dyn AnswerInbox>,
        slot: u64,
    ) -> Option<CallOutcome> {
        let mut state = self.lock();
        let outcome = state.replayed_calls.take_outcome(call);
        if outcome.is_none() {
            state.waiting.insert(call, WaitingCall { inbox: Arc::clone(inbox), slot });
        }
        outcome
    }
}
