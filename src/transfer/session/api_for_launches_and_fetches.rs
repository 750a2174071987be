//! Implements the interfaces by which launches and fetches call a connection.
//!
//! The link decides how a group proceeds; this file passes the calls on to it. Begin at the impls of
//! [`SessionHandle`] and [`FetchHost`].

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Instant;

use muster_fabric::FabricError;
use rustix::io::Errno;

use super::connection::Connection;
use super::ring_session::RingSession;
use crate::base::error::TransferError;
use crate::base::sync::lock;
use crate::base::transport::TransportKind;
use crate::io::clique::{CliqueExchange, CliqueHost};
use crate::io::fabric_reads::FabricReads;
use crate::io::fetch_host::FetchHost;
use crate::io::gpu_copies::CopyFailure;
use crate::io::lane::LaneHost as _;
use crate::io::peer_memory::PeerMemory;
use crate::io::ring::RingOutbox;
use crate::launch::peer_launch::{PeerLaunch, fail_and_tell_peer};
use crate::launch::session_handle::SessionHandle;
use crate::protocol::link::GroupId;
use crate::protocol::link::launch_definition::FetchSource;

impl SessionHandle for Connection {
    fn add_send_waiter(&self) {
        self.count_send_waiter();
    }

    fn remove_send_waiter(&self) {
        self.send_waiters.fetch_sub(1, Ordering::SeqCst);
    }

    fn wake_lanes(&self) {
        for lane in self.lanes() {
            self.pump_on_reactor(&lane);
        }
    }

    fn wake_poller(&self) {
        if let Some(inbox) = &self.inbox {
            inbox.wake_sleeper();
        }
    }

    fn poll_ring_on_this_thread(&self, until: Option<Instant>, soon: bool, done: &dyn Fn() -> bool) -> bool {
        self.poll_ring_until(until, soon, done)
    }

    fn announce_group_ready(&self, at: GroupId) {
        lock(&self.link).announce_buffers_ready(at, true, true);
        self.process_outputs_and_flush();
    }

    fn stop_group_of_launch(&self, at: GroupId, why: &str) -> bool {
        let stopped = self.over.get().is_none() && lock(&self.link).mark_group_cancelled(at, why);
        if stopped {
            self.wake_waiting_lanes();
        }
        stopped
    }

    fn announce_quiescence(&self, at: GroupId) {
        // The launch is dropped without the lock, because dropping it may drop memory.
        let over = lock(&self.link).announce_group_quiescence(at);
        drop(over);
        self.flush_queued_output(0);
    }

    fn end_session(&self, error: TransferError) {
        self.close(error);
    }
}

impl FetchHost for Connection {
    fn readable_peer_pid(&self) -> Option<i32> {
        self.pid
    }

    fn peer_memory(&self, source: FetchSource) -> Option<Arc<PeerMemory>> {
        match source {
            FetchSource::Region(id, _) => lock(&self.shared).get(&id).cloned().flatten(),
            _ => None,
        }
    }

    fn fabric_reads(&self) -> Option<&FabricReads> {
        self.fabric.as_ref()
    }

    fn clique_exchange(&self) -> Option<&Arc<CliqueExchange>> {
        self.exchange.as_ref()
    }

    fn can_fetch(&self) -> bool {
        self.outbox.get().is_some()
    }

    fn fetched_bytes_are_valid(&self) -> bool {
        self.outbox.get().is_some_and(RingOutbox::peer_sources_are_valid) && self.over.get().is_none()
    }

    fn on_fetch_invalidated(&self, launch: &Arc<PeerLaunch>) {
        let how = "its memory was let go of while it was read".to_owned();
        fail_and_tell_peer(launch, TransferError::PeerDead { member: self.peer, how });
    }

    fn on_fetch_failed(
        &self,
        launch: &Arc<PeerLaunch>,
        kind: TransportKind,
        error: Errno,
        nothing_yet: bool,
    ) {
        if nothing_yet && error != Errno::SRCH {
            self.counts.fallbacks.fetch_add(1, Ordering::Relaxed);
            self.request_push(launch);
        } else {
            let why = error.to_string();
            fail_and_tell_peer(launch, TransferError::Transport { transport: kind, member: self.peer, why });
        }
    }

    fn on_device_fetch_failed(&self, launch: &Arc<PeerLaunch>, failure: CopyFailure) {
        self.on_copy_failed(launch, failure);
    }

    fn on_fabric_read_failed(&self, launch: &Arc<PeerLaunch>, error: &FabricError, nothing_yet: bool) {
        // The end of the connection fails the launch, with its own reason.
        if self.fabric.as_ref().is_none_or(FabricReads::is_ending) {
            return;
        }
        self.fabric.iter().for_each(|reads| reads.give_up(error));
        if nothing_yet {
            self.counts.fallbacks.fetch_add(1, Ordering::Relaxed);
            return self.request_push(launch);
        }
        let (transport, why) = (TransportKind::Fabric, error.to_string());
        fail_and_tell_peer(launch, TransferError::Transport { transport, member: self.peer, why });
    }

    fn on_group_fetched_in_part(&self, at: GroupId, bytes: u64) {
        lock(&self.link).announce_fetch_progress(at, bytes);
        self.flush_queued_output(0);
    }
}

impl CliqueHost for Connection {
    fn send_clique_message(&self, message: Vec<u8>) {
        lock(&self.link).send_clique_message(message);
    }

    fn flush_control_frames(&self) {
        self.flush_queued_output(0);
    }

    fn launch_that_sends(&self, at: GroupId) -> Option<Arc<PeerLaunch>> {
        lock(&self.link).launch_that_sends(at)
    }

    fn run_soon(&self, work: Box<dyn FnOnce() + Send>) {
        self.io.fetchers.run_soon(work);
    }

    fn on_clique_failed(&self, launch: &Arc<PeerLaunch>, why: &str, nothing_yet: bool) {
        if nothing_yet {
            self.counts.fallbacks.fetch_add(1, Ordering::Relaxed);
            return self.request_push(launch);
        }
        let (transport, why) = (TransportKind::Nccl, why.to_owned());
        fail_and_tell_peer(launch, TransferError::Transport { transport, member: self.peer, why });
    }

    fn request_push(&self, launch: &Arc<PeerLaunch>) {
        let Some(at) = launch.group_id() else { return };
        lock(&self.link).request_push(at);
        self.process_outputs_and_flush();
    }

    fn on_group_fetched(&self, at: GroupId) {
        lock(&self.link).announce_received(at);
        self.process_outputs_and_flush();
    }

    fn count_received(&self, kind: TransportKind, bytes: u64) {
        self.count_bytes(kind, true, bytes);
    }
}
