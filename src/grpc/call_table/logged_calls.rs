//! The calls of a connection as its log has them: entries, counts, and changes since the log was written.
//!
//! A log can have calls that wait for the driver, and requests whose bodies are arriving. `call_log.rs` makes entries of
//! calls. Begin at [`CallChange`].

use tokio::time::Instant;

use crate::coordination::{CallId, JobId};
use crate::grpc::decoded_call::ReplyFormat;
use crate::http2::StreamId;

/// A call that waits for the driver's answer.
pub(in crate::grpc) struct WaitingCallEntry<'a> {
    pub(in crate::grpc) stream: StreamId,
    pub(in crate::grpc) call: CallId,
    pub(in crate::grpc) job: JobId,
    pub(in crate::grpc) form: &'a ReplyFormat,
    pub(in crate::grpc) due: Option<Instant>,
}

/// A request whose body is arriving.
pub(in crate::grpc) struct ReceivingCallEntry<'a> {
    pub(in crate::grpc) stream: StreamId,
    pub(in crate::grpc) path: &'a str,
    pub(in crate::grpc) job: JobId,
    pub(in crate::grpc) due: Option<Instant>,
    pub(in crate::grpc) compresses: bool,
    /// Whether the peer has ended the request.
    pub(in crate::grpc) is_ended: bool,
    /// The number of received bytes that its stream's window does not have back.
    pub(in crate::grpc) unreleased: usize,
    /// The bytes that have arrived, but for those that the log has.
    pub(in crate::grpc) body: Vec<&'a [u8]>,
}

/// The change of a call.
pub(in crate::grpc) enum CallChange<'a> {
    /// The call of this stream has neither a request nor an answer to wait for.
    Ended(StreamId),
    Waiting(WaitingCallEntry<'a>),
    Receiving(ReceivingCallEntry<'a>),
}

/// The calls as the log of a kept connection has them.
#[derive(Default)]
pub(super) struct LoggedCalls {
    /// The number of calls that wait for the driver.
    pub(super) waiting: usize,
    /// The number of requests whose bodies are arriving.
    pub(super) receiving: usize,
    /// The number of them that the log cannot have.
    pub(super) unloggable: usize,
    /// The changes; `None`: the connection is not kept.
    pub(super) changes: Option<Box<CallChanges>>,
}

#[derive(Default)]
pub(super) struct CallChanges {
    /// The streams of the calls that have ended.
    pub(super) ended: Vec<StreamId>,
    /// The slots of the others that have changed. A slot may be named several times.
    pub(super) changed: Vec<u64>,
}

impl LoggedCalls {
    /// Records that the table has become empty.
    pub(super) fn forget_all(&mut self) {
        *self = Self::default();
    }

    pub(super) fn record_change(&mut self, slot: u64) {
        if let Some(changes) = &mut self.changes
            && changes.changed.last() != Some(&slot)
        {
            changes.changed.push(slot);
        }
    }

    pub(super) fn record_end(&mut self, stream: StreamId) {
        if let Some(changes) = &mut self.changes {
            changes.ended.push(stream);
        }
    }
}
