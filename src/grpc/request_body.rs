//! Receives one request body and returns the message in it. A [`RequestBody`] reads the length prefix, requests
//! memory, tracks the progress of the peer, and inflates compressed messages.
//!
//! A [`RequestBody`] owns the received bytes, and requests memory ([`MemoryPermit`]) before it stores them. The
//! [`CallTable`](super::call_table::CallTable) sets the deadlines and opens the flow-control windows. A short body
//! that arrives whole needs none of this ([`RequestMessage::of_short_body`]). Begin at [`RequestBody::receive_data`].

use std::pin::Pin;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use super::body_memory::{ConnectionQuota, MemoryPermit};
use super::frame::{MessagePrefix, PREFIX_LEN, RequestMessage, message_too_long_failure};
use super::gzip::GzipFile;
use super::prefault;
use super::task_set_cache::TaskSetCache;
use crate::coordination::{Code, Failure};

/// The inflated size up to which the connection's own task inflates a message.
const INFLATED_INLINE: usize = 1 << 20;

/// The failure of a request whose body is invalid.
type BodyError = Failure;

type InflateFuture = Pin<Box<dyn Future<Output = Result<RequestMessage<'static>, Failure>> + Send>>;
type PermitFuture = Pin<Box<dyn Future<Output = Option<MemoryPermit>> + Send>>;

enum BodyStage {
    /// The prefix is incomplete.
    ReadingPrefix([u8; PREFIX_LEN], usize),
    /// The message is assembled as its parts arrive.
    Assembling(MessagePrefix, Vec<u8>, MemoryPermit),
    /// The beginning of the message, and the bytes after it that wait for memory.
    WaitingForMemory(MessagePrefix, Vec<u8>, Vec<u8>, PermitFuture),
    /// The message is complete.
    Complete(MessagePrefix, RequestMessage<'static>, Option<MemoryPermit>),
    /// The message is complete and inflated.
    Inflated(RequestMessage<'static>),
    /// The message is being inflated.
    Inflating(InflateFuture),
    /// The message has been returned.
    Done,
}

/// The bytes of a body that must arrive in each period of
/// [`GrpcLimits::body_stall`](super::GrpcLimits::body_stall), or all missing ones.
const PROGRESS_MIN: usize = 4 << 20;
/// The number of these periods for which a body may wait for memory.
const STARVED_PERIODS_MAX: u32 = 10;
/// The bytes that must arrive in each [`PACE_PERIOD`] of a body that holds memory for which others wait.
const PACE_MIN: usize = 1 << 20;
/// The interval at which [`PACE_MIN`] is checked.
pub(super) const PACE_PERIOD: Duration = Duration::from_secs(2);

/// The body of a request that is being received.
pub(super) struct RequestBody {
    stage: BodyStage,
    /// Whether the request announced compressed messages.
    compresses: bool,
    /// The prefix as it arrived.
    prefix: [u8; PREFIX_LEN],
    /// Whether the peer has ended the request.
    ended: bool,
    received: usize,
    /// The received bytes at the last check of progress.
    seen: usize,
    /// The received bytes at the last check of the pace.
    paced: usize,
    /// The number of periods for which it has waited for memory.
    starved: u32,
    /// The consumed bytes that are not returned to the peer's window yet.
    used: usize,
}

fn malformed_request_failure(text: impl Into<String>) -> BodyError {
    Failure::without_details(Code::Internal, text)
}

impl RequestBody {
    pub(super) fn new(compresses: bool) -> Self {
        let stage = BodyStage::ReadingPrefix([0; PREFIX_LEN], 0);
        let prefix = [0; PREFIX_LEN];
        Self { stage, compresses, prefix, ended: false, received: 0, seen: 0, paced: 0, starved: 0, used: 0 }
    }

    /// Returns whether the request announced compressed messages.
    pub(super) fn compresses(&self) -> bool {
        self.compresses
    }

    /// Returns whether the peer has ended the request.
    pub(super) fn is_ended(&self) -> bool {
        self.ended
    }

    /// Returns all bytes that have arrived; `None` if the message is being inflated.
    pub(super) fn received_bytes(&self) -> Option<[&[u8]; 3]> {
        match &self.stage {
            BodyStage::ReadingPrefix(prefix, filled) => {
                Some([prefix.get(..*filled).unwrap_or_default(), &[], &[]])
            }
            BodyStage::Assembling(_, message, _) => Some([&self.prefix, message, &[]]),
            BodyStage::WaitingForMemory(_, message, held, _) => Some([&self.prefix, message, held]),
            BodyStage::Complete(_, message, _) => Some([&self.prefix, message.assembled_bytes()?, &[]]),
            BodyStage::Inflated(_) | BodyStage::Inflating(_) | BodyStage::Done => None,
        }
    }

    /// Receives bytes of the body.
    pub(super) fn receive_data(
        &mut self,
        bytes: &[u8],
        ended: bool,
        quota: &mut ConnectionQuota,
        sets: &TaskSetCache,
        message_bytes: usize,
    ) -> Result<(), BodyError> {
        self.received += bytes.len();
        self.ended |= ended;
        let BodyStage::ReadingPrefix(prefix, filled) = &mut self.stage else {
            return self.add_message_bytes(bytes, quota);
        };
        let rest = prefix.get_mut(*filled..).unwrap_or_default();
        let count = rest.len().min(bytes.len());
        let (head, bytes) = bytes.split_at(count);
        if let Some(rest) = rest.get_mut(..count) {
            rest.copy_from_slice(head);
        }
        *filled += count;
        let (prefix, filled) = (*prefix, *filled);
        self.prefix = prefix;
        self.used += count;
        if filled < PREFIX_LEN {
            return Ok(());
        }
        let prefix = MessagePrefix::parse(prefix, message_bytes)?;
        if prefix.compressed && !self.compresses {
            return Err(malformed_request_failure(
                "the message is compressed, but no grpc-encoding says how",
            ));
        }
        if bytes.len() > prefix.length {
            return Err(trailing_data_failure());
        }
        if bytes.len() < prefix.length || !ended {
            // The body may take long to arrive, so its memory is taken from the pool.
            self.stage = BodyStage::Assembling(prefix, Vec::new(), quota.empty_permit());
            self.add_message_bytes(bytes, quota)?;
            self.complete_message_if_whole();
            return Ok(());
        }
        let message = bytes;
        self.used += bytes.len();
        let file = if prefix.compressed { Some(GzipFile::parse(message)?) } else { None };
        self.stage = match file {
            Some(file) if file.length <= INFLATED_INLINE.min(message_bytes) => {
                BodyStage::Inflated(sets.inflate_or_look_up(message, &file)?)
            }
            _ => {
                let mut whole =
                    prefault::allocate_prefaulted(message.len()).ok_or_else(out_of_memory_failure)?;
                whole.extend_from_slice(message);
                BodyStage::Complete(prefix, RequestMessage::new(whole), None)
            }
        };
        Ok(())
    }

    fn add_message_bytes(&mut self, bytes: &[u8], quota: &mut ConnectionQuota) -> Result<(), BodyError> {
        if bytes.is_empty() {
            return Ok(());
        }
        match &mut self.stage {
            BodyStage::WaitingForMemory(prefix, message, held, _)
                if message.len() + held.len() + bytes.len() <= prefix.length =>
            {
                held.extend_from_slice(bytes);
                Ok(())
            }
            BodyStage::Assembling(prefix, message, permit)
                if message.len() + bytes.len() <= prefix.length =>
            {
                let needed = message.len() + bytes.len();
                if permit.try_grow(needed, prefix.length) {
                    return self.append_permitted_bytes(bytes);
                }
                let BodyStage::Assembling(prefix, message, permit) =
                    std::mem::replace(&mut self.stage, BodyStage::Done)
                else {
                    return Err(trailing_data_failure());
                };
                // The bytes held back here are not returned to the window before there is memory for them.
                let wait = Box::pin(quota.grow_from_reserve(permit, prefix.length));
                self.stage = BodyStage::WaitingForMemory(prefix, message, bytes.to_vec(), wait);
                Ok(())
            }
            _ => Err(trailing_data_failure()),
        }
    }

    /// Appends bytes for which there is a permit.
    fn append_permitted_bytes(&mut self, bytes: &[u8]) -> Result<(), BodyError> {
        if let BodyStage::Assembling(prefix, message, permit) = &mut self.stage {
            let room = permit.bytes().min(prefix.length);
            if message.capacity() < message.len() + bytes.len() {
                if message.is_empty() {
                    *message = prefault::allocate_prefaulted(room).ok_or_else(out_of_memory_failure)?;
                } else {
                    message.try_reserve_exact(room - message.len()).map_err(|_| out_of_memory_failure())?;
                }
            }
            message.extend_from_slice(bytes);
            self.used += bytes.len();
        }
        self.complete_message_if_whole();
        Ok(())
    }

    fn complete_message_if_whole(&mut self) {
        if let BodyStage::Assembling(prefix, message, _) = &self.stage
            && message.len() == prefix.length
            && let BodyStage::Assembling(prefix, message, mut permit) =
                std::mem::replace(&mut self.stage, BodyStage::Done)
        {
            permit.record_body_arrived();
            self.stage = BodyStage::Complete(prefix, RequestMessage::new(message), Some(permit));
        }
    }

    /// Returns the buffer for the next bytes of the message, and the greatest number of them, once there is
    /// memory for them.
    pub(super) fn body_buffer(&mut self) -> Option<(&mut Vec<u8>, usize)> {
        match &mut self.stage {
            BodyStage::Assembling(prefix, message, permit) => {
                let length = permit.bytes().min(prefix.length).min(message.capacity());
                let room = length.saturating_sub(message.len());
                Some((message, room))
            }
            _ => None,
        }
    }

    /// Records that `bytes` were read into the buffer.
    pub(super) fn record_filled_bytes(&mut self, bytes: usize) {
        self.received += bytes;
        self.used += bytes;
        self.complete_message_if_whole();
    }

    /// Returns the bytes consumed since the last call: the peer may send as many more on this stream.
    pub(super) fn take_consumed_bytes(&mut self) -> usize {
        std::mem::take(&mut self.used)
    }

    /// Returns the number of received bytes that are not consumed.
    pub(super) fn bytes_waiting_for_memory(&self) -> usize {
        match &self.stage {
            BodyStage::WaitingForMemory(_, _, held, _) => held.len(),
            _ => 0,
        }
    }

    /// Returns the message, once it is complete.
    pub(super) fn poll_message(
        &mut self,
        cx: &mut Context<'_>,
        quota: &mut ConnectionQuota,
        message_bytes: usize,
    ) -> Poll<Result<RequestMessage<'static>, BodyError>> {
        loop {
            match &mut self.stage {
                BodyStage::Inflating(work) => return Poll::Ready(Ok(ready!(work.as_mut().poll(cx))?)),
                BodyStage::WaitingForMemory(_, _, _, wait) => {
                    let Some(permit) = ready!(wait.as_mut().poll(cx)) else {
                        return Poll::Ready(Err(out_of_memory_failure()));
                    };
                    let BodyStage::WaitingForMemory(prefix, message, held, _) =
                        std::mem::replace(&mut self.stage, BodyStage::Done)
                    else {
                        return Poll::Ready(Err(out_of_memory_failure()));
                    };
                    self.paced = self.received;
                    self.stage = BodyStage::Assembling(prefix, message, permit);
                    self.append_permitted_bytes(&held)?;
                }
                _ if !self.ended => return Poll::Pending,
                _ => {
                    if let Some(message) = self.finish_body(quota, message_bytes)? {
                        return Poll::Ready(Ok(message));
                    }
                }
            }
        }
    }

    /// Ends the body; returns the message if it is complete and need not be inflated.
    fn finish_body(
        &mut self,
        quota: &mut ConnectionQuota,
        message_bytes: usize,
    ) -> Result<Option<RequestMessage<'static>>, BodyError> {
        match std::mem::replace(&mut self.stage, BodyStage::Done) {
            BodyStage::Complete(prefix, message, claim) if prefix.compressed => {
                self.stage = begin_inflating(message, claim, quota, message_bytes)?;
                Ok(None)
            }
            BodyStage::Complete(_, message, _) | BodyStage::Inflated(message) => Ok(Some(message)),
            BodyStage::ReadingPrefix(_, 0) => Err(malformed_request_failure("the request has no message")),
            BodyStage::ReadingPrefix(..) => {
                Err(malformed_request_failure("the request ends within the prefix of its message"))
            }
            BodyStage::Assembling(prefix, ..) | BodyStage::WaitingForMemory(prefix, ..) => {
                let text =
                    format!("the request ends before the {} bytes of its message are there", prefix.length);
                Err(malformed_request_failure(text))
            }
            BodyStage::Inflating(_) | BodyStage::Done => {
                Err(malformed_request_failure("the request was read already"))
            }
        }
    }

    /// Returns whether enough bytes have arrived since the last call: [`PROGRESS_MIN`], or all missing ones.
    /// While the request waits for the server itself, that counts as progress.
    pub(super) fn has_progressed_since_last_check(&mut self) -> bool {
        let step = match &self.stage {
            BodyStage::WaitingForMemory(..) if self.starved >= STARVED_PERIODS_MAX => usize::MAX,
            BodyStage::WaitingForMemory(..) => {
                self.starved += 1;
                0
            }
            BodyStage::Inflating(_) => 0,
            BodyStage::Assembling(prefix, ..) => {
                (PREFIX_LEN + prefix.length).saturating_sub(self.seen).min(PROGRESS_MIN)
            }
            BodyStage::ReadingPrefix(..) => PREFIX_LEN,
            // Only the end of the request is missing.
            BodyStage::Complete(..) | BodyStage::Inflated(_) | BodyStage::Done => usize::MAX,
        };
        let moved = self.received - self.seen >= step;
        self.seen = self.received;
        moved
    }

    /// Returns whether the message is complete and the peer has not ended the request, which should follow at
    /// once.
    pub(super) fn awaits_only_request_end(&self) -> bool {
        !self.ended && matches!(self.stage, BodyStage::Complete(..) | BodyStage::Inflated(_))
    }

    /// Returns whether it holds memory of the reserve.
    pub(super) fn holds_reserve_memory(&self) -> bool {
        match &self.stage {
            BodyStage::Assembling(_, _, permit) | BodyStage::Complete(_, _, Some(permit)) => {
                permit.holds_reserve_memory()
            }
            _ => false,
        }
    }

    /// Returns whether it holds memory for which others wait, and arrives too slowly.
    pub(super) fn is_too_slow(&mut self, quota: &ConnectionQuota) -> bool {
        let moved = self.received - self.paced >= PACE_MIN;
        self.paced = self.received;
        !moved && self.holds_reserve_memory() && quota.has_waiting_body()
    }
}

fn trailing_data_failure() -> BodyError {
    malformed_request_failure("the request goes on after its message: calls have one message each way")
}

fn out_of_memory_failure() -> BodyError {
    Failure::without_details(Code::ResourceExhausted, "there is no memory for the request")
}

/// Inflates a message: a short one at once, a longer one on a blocking thread when its turn comes.
fn begin_inflating(
    message: RequestMessage<'static>,
    permit: Option<MemoryPermit>,
    quota: &mut ConnectionQuota,
    message_bytes: usize,
) -> Result<BodyStage, BodyError> {
    let file = message.bytes();
    let length = GzipFile::parse(&file)?.length;
    if length > message_bytes {
        return Err(message_too_long_failure(length, message_bytes));
    }
    if length <= INFLATED_INLINE {
        return Ok(BodyStage::Inflated(RequestMessage::new(GzipFile::parse(&file)?.inflate()?)));
    }
    let mut room = quota.empty_permit();
    let wait = if room.try_grow(length, length) {
        None
    } else {
        Some(quota.grow_from_reserve(quota.empty_permit(), length))
    };
    Ok(BodyStage::Inflating(Box::pin(async move {
        // The permit for the compressed bytes is released first: holding one while waiting for another could
        // deadlock all bodies.
        drop(permit);
        let room = match wait {
            None => Some(room),
            Some(wait) => wait.await,
        };
        let inflated = tokio::task::spawn_blocking(move || {
            let _room = room;
            GzipFile::parse(&file)?.inflate()
        });
        let inflated = inflated.await;
        let stopped = |_| Failure::without_details(Code::Internal, "the inflating thread was stopped");
        inflated.map_err(stopped)?.map(RequestMessage::new)
    })))
}
