//! A launch that takes its numbers at once, and gets its transfers later, when their memory is known.
//!
//! The launch takes its number with each peer when it is reserved. For a peer that is not yet a member, it takes the
//! number when the peer becomes one. So the launches of both sides match, even if other launches are requested in the
//! meantime. If the launch is dropped before its transfers are named, its peers are told that it does not come. Begin
//! at [`ReservedLaunch::launch`].

use std::collections::BTreeSet;
use std::sync::{Arc, Mutex};

use super::clique_cache::IsRequestWanted;
use super::prepare::{TransferRequest, prepare_transfers};
use super::prepared_transfers::{LaunchOptions, TransferSpec};
use super::reserved_launch_number::ReservedLaunchNumber;
use super::shared::EngineShared;
use crate::base::buffer_definition::BufferDefinitionEvent;
use crate::base::error::{PrepareError, TransferError};
use crate::base::membership::{MemberId, PeerTask};
use crate::base::sync::lock;
use crate::launch::outcome::Launch;
use crate::launch::transfer::TransferHandle;

/// Returns the current incarnations of those of these tasks that are members. Copies within this task have no place.
pub(super) fn current_members(shared: &EngineShared, peers: &[PeerTask]) -> BTreeSet<MemberId> {
    shared.with_membership(|membership| {
        let members = peers.iter().filter_map(|task| membership.current_member(*task));
        members.filter(|member| *member != shared.here()).collect()
    })
}

/// A launch that has its places in the order of its channel, or those with the peers that are members, and whose
/// transfers are not named yet. If it is dropped before that, the launch fails.
#[must_use = "the launch fails when this is dropped"]
pub struct ReservedLaunch {
    shared: Arc<EngineShared>,
    launch: Arc<Launch>,
    /// The places; none once the launch is over. The thread that takes them passes them on or gives them up.
    tickets: Arc<Mutex<Option<Vec<ReservedLaunchNumber>>>>,
    options: LaunchOptions,
}

impl std::fmt::Debug for ReservedLaunch {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ReservedLaunch").field("count", &self.launch.len()).finish_non_exhaustive()
    }
}

impl ReservedLaunch {
    /// Takes the places of `launch`, which has at least one transfer.
    pub(super) fn new(
        shared: &Arc<EngineShared>,
        launch: Arc<Launch>,
        peers: &BTreeSet<MemberId>,
        options: LaunchOptions,
    ) -> Self {
        launch.start_clock();
        if let Some(peer) = peers.first() {
            launch.set_peer_for_metrics(peer.peer_task());
        }
        let taken = peers.iter().map(|peer| ReservedLaunchNumber::take(shared, *peer, options.channel));
        let tickets = Arc::new(Mutex::new(Some(taken.collect::<Vec<_>>())));
        let given_up = Arc::clone(&tickets);
        // A launch that is cancelled, or too late, before it is launched tells its peers at once.
        let give_up = move |_| {
            let tickets = lock(&given_up).take();
            drop(tickets);
        };
        launch.add_outcome_callback(0, Box::new(give_up));
        if let Some(deadline) = options.deadline {
            shared.schedule_deadline_check(&launch, launch.start_time() + deadline);
        }
        Self { shared: Arc::clone(shared), launch, tickets, options }
    }

    /// Returns the handle of the transfers.
    #[must_use]
    pub fn transfer(&self) -> TransferHandle {
        TransferHandle::new(Arc::clone(&self.launch), self.shared.here().task)
    }

    /// Names the peer of a launch that has no place yet, for metrics and reports.
    pub fn set_peer_for_metrics(&self, peer: PeerTask) {
        self.launch.set_peer_for_metrics(peer);
    }

    /// Takes the place with a peer that has become a member. If the launch is over, the peer is told that it does not
    /// come.
    pub fn add_place(&mut self, peer: PeerTask, channel: u32) {
        self.options.channel = channel;
        let member = current_members(&self.shared, &[peer]).first().copied();
        let taken = member.map(|member| ReservedLaunchNumber::take(&self.shared, member, channel));
        let unused = match lock(&self.tickets).as_mut() {
            Some(tickets) => {
                tickets.extend(taken);
                None
            }
            None => taken,
        };
        // The peer is told without the lock.
        drop(unused);
    }

    /// Launches these transfers, as many as were reserved, when `dependencies` have completed. A launch that is over
    /// stays so.
    pub fn launch(self, dependencies: &[BufferDefinitionEvent], specs: Vec<TransferSpec>) {
        let (given, reserved) = (specs.len(), self.launch.len());
        let request = if given == reserved {
            TransferRequest::new(&self.shared, specs)
        } else {
            Err(PrepareError::Reserved { given, reserved })
        };
        let request = match request {
            Ok(request) => request,
            Err(error) => return self.fail(&error.into()),
        };
        let tickets = lock(&self.tickets).take();
        if let Some(tickets) = tickets {
            let launch = Arc::clone(&self.launch);
            prepare_and_launch(&self.shared, launch, tickets, request, dependencies, self.options);
        }
    }

    /// Fails the transfers.
    pub fn fail(self, error: &TransferError) {
        self.launch.fail_all(error);
    }
}

impl Drop for ReservedLaunch {
    fn drop(&mut self) {
        let tickets = lock(&self.tickets).take();
        if tickets.is_some() {
            self.launch.fail_all(&TransferError::Dropped);
        }
    }
}

/// Prepares the transfers of a launch that has its numbers, and launches them when `dependencies` have completed.
pub(super) fn prepare_and_launch(
    shared: &Arc<EngineShared>,
    launch: Arc<Launch>,
    tickets: Vec<ReservedLaunchNumber>,
    request: TransferRequest,
    dependencies: &[BufferDefinitionEvent],
    options: LaunchOptions,
) {
    let dependencies = dependencies.to_vec();
    let (waiting, asked) = (Arc::clone(&launch), Arc::clone(&launch));
    let wanted: IsRequestWanted = Arc::new(move || asked.awaits_connections());
    prepare_transfers(shared, request, options, &wanted, move |result| match result {
        Ok(prepared) => {
            prepared.launch_with_numbers(launch, &dependencies, tickets);
        }
        Err(error) => launch.fail_all(&error.into()),
    });
    if let Some(deadline) = options.deadline
        && waiting.awaits_connections()
    {
        shared.schedule_deadline_check(&waiting, waiting.start_time() + deadline);
    }
}
