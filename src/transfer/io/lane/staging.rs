//! Chunks with bytes of GPUs: on their way to a slot before a lane sends them, and from a slot after it has received them.
//!
//! A lane keeps several chunks in slots, so that the GPU copies the next ones while the lane sends one. Begin at
//! [`Lane::stage_chunk`] and [`Lane::finish_staged_chunk`].

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use super::input::IncomingFrame;
use super::output::{ChunkBody, OutgoingFrame};
use super::staged_chunks::{StagedChunk, StagedState};
use super::state::{Lane, LaneHost};
use crate::io::staging::{StagingPool, StagingSlot, copy_from_slot, copy_to_slot};
use crate::launch::peer_launch::PeerLaunch;
use crate::memory::SpanStream;
use crate::protocol::frame::{Header, crc32c_of, flag};
use crate::protocol::link::OutgoingChunk;

impl Lane {
    /// Begins the frame of a staged chunk, if one can be sent.
    pub(super) fn begin_staged_frame(&self, host: &dyn LaneHost, output: &mut OutgoingFrame) -> bool {
        if self.staged.is_empty() {
            return false;
        }
        for chunk in self.staged.needing_slots() {
            self.copy_chunk_to_slot(host, &chunk);
        }
        let Some((chunk, slot)) = self.staged.take_ready() else { return false };
        let mut header = chunk.header;
        let len = header.len as usize;
        if self.checks {
            header.flags |= flag::CHECKED;
            header.payload_crc = slot.read_view(0, len).with_bytes(crc32c_of);
        }
        let body = ChunkBody::Staged(Arc::clone(&chunk.launch), slot);
        *output = OutgoingFrame::Chunk { header: header.encode(), body, len, sent: 0 };
        true
    }

    /// Stages a chunk that the link gave to the lane.
    pub(super) fn stage_chunk(&self, host: &dyn LaneHost, push: OutgoingChunk<Arc<PeerLaunch>>) {
        let OutgoingChunk { token, header, start } = push;
        let chunk = self.staged.add(header, start, token);
        self.copy_chunk_to_slot(host, &chunk);
    }

    /// Makes the GPU copy a chunk, if there is a slot for it.
    fn copy_chunk_to_slot(&self, host: &dyn LaneHost, chunk: &Arc<StagedChunk>) {
        let (launch, len) = (&chunk.launch, chunk.header.len as usize);
        let pool = &host.staging().sending;
        let slot = self.take_slot(host, pool, &self.awaits_send_slot, &launch.lists.outbound, launch, len);
        let Some(slot) = slot else { return };
        // The bytes of a launch that was cancelled are not read.
        let Some(guard) = launch.access_owned() else {
            return chunk.set_state(StagedState::Over);
        };
        chunk.set_state(StagedState::Copying);
        let (lane, weak, chunk) = (self.id, self.host.clone(), Arc::clone(chunk));
        copy_to_slot((slot, guard), (chunk.start, len), move |(slot, guard), outcome| {
            drop(guard);
            let failure = outcome.err();
            let is_over = failure.is_some() || chunk.launch.is_closing();
            chunk.set_state(if is_over { StagedState::Over } else { StagedState::Ready(slot) });
            let Some(host) = weak.upgrade() else { return };
            if let Some(failure) = failure {
                host.on_copy_failed(&chunk.launch, failure);
            }
            host.send_staged(lane, &chunk.launch);
        });
    }

    /// Takes a slot for a chunk of a stream. If there is none, the lane is pumped when one was given back, or the launch fails
    /// if its GPU refuses the memory.
    fn take_slot(
        &self,
        host: &dyn LaneHost,
        pool: &Arc<StagingPool>,
        awaits: &Arc<AtomicBool>,
        stream: &SpanStream,
        launch: &Arc<PeerLaunch>,
        len: usize,
    ) -> Option<StagingSlot> {
        let gpu = stream.gpu()?;
        let (lane, weak) = (self.id, self.host.clone());
        let taken = pool.take_with_one_waiter(gpu, len, awaits, move || {
            if let Some(host) = weak.upgrade() {
                host.request_pump(lane);
            }
        });
        match taken {
            Ok(slot) => slot,
            Err(error) => {
                host.on_copy_failed(launch, (gpu.ordinal(), error));
                None
            }
        }
    }

    /// Returns the state in which to receive a chunk with bytes of a GPU.
    pub(super) fn begin_staged_receive(
        &self,
        host: &dyn LaneHost,
        (header, launch, start): (Header, Arc<PeerLaunch>, u64),
    ) -> IncomingFrame {
        let len = header.len as usize;
        let pool = &host.staging().receiving;
        // Before the slot is asked for: from then on a pump looks at the input.
        self.held.store(true, Ordering::SeqCst);
        match self.take_slot(host, pool, &self.awaits_receive_slot, &launch.lists.inbound, &launch, len) {
            _ if launch.is_closing() => {
                self.held.store(false, Ordering::SeqCst);
                host.abandon_chunk_receive(&header);
                IncomingFrame::Discard { left: len }
            }
            Some(slot) => IncomingFrame::Chunk { header, launch, start, got: 0, slot: Some(slot) },
            None => IncomingFrame::AwaitsSlot { header, launch, start },
        }
    }

    /// Makes the GPU copy a received chunk to its destination, and then reports that it is in place.
    pub(super) fn finish_staged_chunk(
        &self,
        host: &dyn LaneHost,
        (header, launch, start): (Header, Arc<PeerLaunch>, u64),
        slot: StagingSlot,
    ) {
        self.held.store(false, Ordering::SeqCst);
        let len = header.len as usize;
        let is_intact =
            !header.has(flag::CHECKED) || slot.read_view(0, len).with_bytes(crc32c_of) == header.payload_crc;
        if !is_intact {
            return host.end_chunk_receive(self.kind, &header, &launch, start, false);
        }
        let Some(guard) = launch.access_owned() else { return host.abandon_chunk_receive(&header) };
        let (weak, kind) = (self.host.clone(), self.kind);
        copy_from_slot((slot, guard), (start, len), move |(slot, guard), outcome| {
            drop(slot);
            let Some(host) = weak.upgrade() else { return };
            match outcome {
                Ok(()) => host.end_chunk_receive(kind, &header, guard.launch(), start, true),
                Err(failure) => {
                    host.abandon_chunk_receive(&header);
                    host.on_copy_failed(guard.launch(), failure);
                }
            }
        });
    }
}
