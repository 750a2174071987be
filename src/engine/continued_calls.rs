//! Calls that wait since a former process. Begin at [`Engine::continue_waiting_call`].

use std::sync::Arc;

use super::Engine;
use super::waiting_calls::{AnswerInbox, WaitingCall};
use crate::coordination::{CallId, CallOutcome, Code, ConnectionId, Failure, JobId};

impl Engine {
    /// Returns whether a connection will make calls again that a former process has applied.
    pub fn has_calls_to_repeat(&self, connection: ConnectionId) -> bool {
        self.lock_for_read().replayed_calls.has_calls_of(connection)
    }

    /// Takes over a call that waits since a former process. Returns its answer, if there is one already; otherwise the answer
    /// will be delivered to `inbox` under `slot`. A call that the state does not have is answered with UNAVAILABLE: the journal
    /// has lost it.
    pub fn continue_waiting_call(
        &self,
        job: JobId,
        connection: ConnectionId,
        call: CallId,
        inbox: &Arc<dyn AnswerInbox>,
        slot: u64,
    ) -> Option<CallOutcome> {
        let mut state = self.lock();
        let outcome = state.replayed_calls.take_outcome(call);
        if outcome.is_some() {
            return outcome;
        }
        if !state.durable.coordinator.has_waiting_call(job, connection, call) {
            let text = "The coordination service restarted and has lost this call. Make it again.";
            return Some(Err(Arc::new(Failure::without_details(Code::Unavailable, text))));
        }
        state.waiting.insert(call, WaitingCall { inbox: Arc::clone(inbox), slot });
        None
    }
}
