//! The execution of a group on its stream.
//!
//! For each peer and direction, a thread moves the messages of the group in their order. A message is a header of the sender,
//! a reply of the receiver, and the contents.

use std::sync::Mutex;

use super::collective::Collective;
use super::communicator::Communicator;
use super::link::{Link, LinkFailure};
use super::operation::{Operation, OperationKind};
use super::profiler::KernelEvents;
use super::rendezvous::RankLinks;
use super::{INVALID_USAGE, NcclError, REMOTE_ERROR};
use crate::device_memory::{UsablePiece, find_usable_pieces};
use crate::error::{Answer, CudaError, ILLEGAL_ADDRESS};
use crate::settings::Setting;
use crate::stream::ExecuteOrDiscard;
use crate::wait::lock;

const HEADER_LEN: usize = 32;
const ACCEPTED: u8 = 1;
const REFUSED: u8 = 0;

/// Why a message did not arrive.
enum MessageFailure {
    Link(LinkFailure),
    /// The asynchronous error of the communicator.
    Nccl(NcclError),
    /// The sticky error of the process.
    Cuda(CudaError),
}

impl From<LinkFailure> for MessageFailure {
    fn from(failure: LinkFailure) -> Self {
        Self::Link(failure)
    }
}

/// One group of one communicator.
struct GroupExecution<'a> {
    communicator: &'a Communicator,
    links: &'a RankLinks,
    batch: &'a [Operation],
    /// For each operation, what each rank contributed to a collective.
    parts: Vec<Mutex<Vec<Vec<u8>>>>,
}

/// Executes a group. A failed group waits until its communicator is revoked or aborted.
pub fn run(batch: &[Operation], number: u64, turn: ExecuteOrDiscard) -> Answer {
    let communicator = &*batch[0].communicator;
    communicator.begin_group(number);
    let mut answer = Ok(());
    if turn == ExecuteOrDiscard::Execute && !communicator.is_stopped() {
        let kernels = KernelEvents::start(batch);
        if Setting::NcclHang.count_use_and_strikes_now() || communicator.has_failed() {
            communicator.wait_for_stop();
        } else if let Some(links) = communicator.links() {
            let parts = batch.iter().map(|_| Mutex::new(vec![Vec::new(); communicator.ranks])).collect();
            match (GroupExecution { communicator, links: &links, batch, parts }.run()) {
                Ok(is_complete) => {
                    if is_complete {
                        kernels.stop(communicator);
                    }
                    if communicator.has_failed() && !communicator.is_stopped() {
                        communicator.wait_for_stop();
                    }
                }
                Err(error) => answer = Err(error),
            }
        }
    }
    communicator.end_group();
    answer
}

/// Returns the bytes of device memory.
fn usable_device_bytes(at: u64, len: usize) -> Result<Vec<UsablePiece>, MessageFailure> {
    if len == 0 {
        return Ok(Vec::new());
    }
    find_usable_pieces(at, len).ok_or(MessageFailure::Cuda(ILLEGAL_ADDRESS))
}

/// Copies device memory to the host.
fn read_device(at: u64, len: usize) -> Result<Vec<u8>, MessageFailure> {
    let mut bytes = Vec::with_capacity(len);
    for piece in usable_device_bytes(at, len)? {
        // SAFETY: the piece is mapped while it is held.
        bytes.extend_from_slice(unsafe { std::slice::from_raw_parts(piece.address as *const u8, piece.len) });
    }
    Ok(bytes)
}

/// Copies from the host to device memory.
fn write_device(at: u64, bytes: &[u8]) -> Result<(), MessageFailure> {
    let mut rest = bytes;
    for piece in usable_device_bytes(at, bytes.len())? {
        let (part, after) = rest.split_at(piece.len);
        // SAFETY: the piece is mapped while it is held.
        unsafe { std::ptr::copy_nonoverlapping(part.as_ptr(), piece.address as *mut u8, part.len()) };
        rest = after;
    }
    Ok(())
}

impl GroupExecution<'_> {
    /// Moves all messages, and returns whether every operation is complete.
    fn run(&self) -> Answer<bool> {
        let outcomes: Vec<Result<(), MessageFailure>> = std::thread::scope(|scope| {
            let peers = || (0..self.communicator.ranks).filter(|peer| *peer != self.communicator.rank);
            let sends = peers().map(|peer| scope.spawn(move || self.note(self.send_all(peer))));
            let receives = peers().map(|peer| scope.spawn(move || self.note(self.receive_all(peer))));
            let threads: Vec<_> = sends.chain(receives).collect();
            threads.into_iter().filter_map(|thread| thread.join().ok()).collect()
        });
        for outcome in outcomes {
            match outcome {
                Err(MessageFailure::Cuda(error)) => return Err(error),
                Err(_) => return Ok(false),
                Ok(()) => {}
            }
        }
        match self.note(self.finish()) {
            Err(MessageFailure::Cuda(error)) => Err(error),
            outcome => Ok(outcome.is_ok()),
        }
    }

    /// Makes a failure the communicator's asynchronous error, as soon as it is met.
    fn note(&self, outcome: Result<(), MessageFailure>) -> Result<(), MessageFailure> {
        match outcome {
            Err(MessageFailure::Link(LinkFailure::PeerGone)) if Setting::NcclSilentDeath.is_on() => {
                self.communicator.wait_for_stop();
            }
            Err(MessageFailure::Link(LinkFailure::PeerGone)) => self.communicator.fail(REMOTE_ERROR),
            Err(MessageFailure::Nccl(error)) => self.communicator.fail(error),
            _ => {}
        }
        outcome
    }

    /// Sends the messages of the group to one peer.
    fn send_all(&self, peer: usize) -> Result<(), MessageFailure> {
        let Some(link) = &self.links.outgoing[peer] else { return Ok(()) };
        for operation in self.batch {
            let part = match operation.kind {
                OperationKind::Send { peer: to } if to == peer => Some(0),
                OperationKind::Collective(collective) => {
                    collective.sent_part(self.communicator.rank, peer, operation.bytes)
                }
                _ => continue,
            };
            let (at, len) = part.map_or((0, 0), |offset| (operation.from + offset as u64, operation.bytes));
            self.send(link, operation, at, len)?;
        }
        Ok(())
    }

    /// Sends device memory as the message of an operation.
    fn send(&self, link: &Link, operation: &Operation, at: u64, len: usize) -> Result<(), MessageFailure> {
        let is_stopped = || self.communicator.is_stopped();
        let pieces = usable_device_bytes(at, len)?;
        link.write(&message_header(operation), &is_stopped)?;
        let mut reply = [REFUSED];
        link.read(&mut reply, &is_stopped)?;
        if reply != [ACCEPTED] {
            return Err(MessageFailure::Nccl(INVALID_USAGE));
        }
        for piece in pieces {
            // SAFETY: the piece is mapped while it is held. Streams may write to it meanwhile, as on a device.
            let bytes = unsafe { std::slice::from_raw_parts(piece.address as *const u8, piece.len) };
            link.write(bytes, &is_stopped)?;
        }
        Ok(())
    }

    /// Receives the messages of the group from one peer.
    fn receive_all(&self, peer: usize) -> Result<(), MessageFailure> {
        let Some(link) = &self.links.incoming[peer] else { return Ok(()) };
        let is_stopped = || self.communicator.is_stopped();
        for (index, operation) in self.batch.iter().enumerate() {
            match operation.kind {
                OperationKind::Receive { peer: from } if from == peer => {
                    let pieces = usable_device_bytes(operation.to, operation.bytes)?;
                    self.check_peer_message_matches(link, operation)?;
                    for piece in pieces {
                        let at = piece.address as *mut u8;
                        // SAFETY: the piece is mapped while it is held. Streams may use it meanwhile, as on a device.
                        link.read(unsafe { std::slice::from_raw_parts_mut(at, piece.len) }, &is_stopped)?;
                    }
                }
                OperationKind::Collective(collective) => {
                    self.check_peer_message_matches(link, operation)?;
                    let is_received = collective.is_received(self.communicator.rank, peer);
                    let mut part = vec![0; if is_received { operation.bytes } else { 0 }];
                    link.read(&mut part, &is_stopped)?;
                    lock(&self.parts[index])[peer] = part;
                }
                _ => {}
            }
        }
        Ok(())
    }

    /// Compares the next message of a peer with an operation.
    fn check_peer_message_matches(&self, link: &Link, operation: &Operation) -> Result<(), MessageFailure> {
        let is_stopped = || self.communicator.is_stopped();
        let mut announced = [0; HEADER_LEN];
        link.read(&mut announced, &is_stopped)?;
        let is_equal = announced == message_header(operation);
        if !is_equal && Setting::NcclLenient.is_on() {
            // The sender waits for a reply that never comes.
            self.communicator.wait_for_stop();
            return Err(MessageFailure::Link(LinkFailure::Stopped));
        }
        link.write(&[if is_equal { ACCEPTED } else { REFUSED }], &is_stopped)?;
        if is_equal { Ok(()) } else { Err(MessageFailure::Nccl(INVALID_USAGE)) }
    }

    /// Does what needs no peer: own messages, and the results of reductions.
    fn finish(&self) -> Result<(), MessageFailure> {
        if self.communicator.is_stopped() {
            return Err(MessageFailure::Link(LinkFailure::Stopped));
        }
        let own = self.communicator.rank;
        let of_kind = |kind| self.batch.iter().filter(move |operation| operation.kind == kind);
        let sends = of_kind(OperationKind::Send { peer: own });
        for (send, receive) in sends.zip(of_kind(OperationKind::Receive { peer: own })) {
            write_device(receive.to, &read_device(send.from, send.bytes)?)?;
        }
        for (operation, parts) in self.batch.iter().zip(&self.parts) {
            if let OperationKind::Collective(collective) = operation.kind {
                let mut parts = lock(parts);
                if let Some(offset) = collective.sent_part(own, own, operation.bytes) {
                    parts[own] = read_device(operation.from + offset as u64, operation.bytes)?;
                }
                if let Some(result) = collective.result(own, operation.datatype, &parts) {
                    write_device(operation.to, &result)?;
                }
            }
        }
        Ok(())
    }
}

/// Returns the properties that sender and receiver must have in common: function, reduction, root, type, size.
fn message_header(operation: &Operation) -> [u8; HEADER_LEN] {
    let (function, reduction, root) = match operation.kind {
        OperationKind::Send { .. } | OperationKind::Receive { .. } => (0, 0, 0),
        OperationKind::Collective(Collective { function, reduction, root }) => {
            (1 + function as u64, reduction as u64, root as u64)
        }
    };
    let kind = function | reduction << 8 | u64::from(operation.datatype) << 16;
    let mut bytes = [0; HEADER_LEN];
    let words = [kind, root, operation.count as u64, operation.bytes as u64];
    bytes.chunks_exact_mut(8).zip(words).for_each(|(to, word)| to.copy_from_slice(&word.to_le_bytes()));
    bytes
}
