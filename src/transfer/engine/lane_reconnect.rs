//! Dials lost lanes again, and detects dead peers.
//!
//! [`dial`](super::dial) makes the first lanes. If a lane is lost, the side that dialled the connection dials the
//! lane again, and the other side checks whether the peer still listens. If the peer's addresses refuse the
//! connection, the peer counts as dead. So a killed process is detected at once, and a broken path is repaired. If a
//! chunk lane cannot be dialled, the connection goes on without it, and the engine keeps trying. If the control lane
//! cannot be dialled within the dial timeout, the connection ends. Begin at [`reconnect_lane`].

use std::io;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use muster_clock as clock;

use super::connect::HELLO_TIMEOUT;
use super::dial::{dial_lane, endpoints_for_further_lanes};
use super::shared::EngineShared;
use crate::base::error::TransferError;
use crate::io::wire::Endpoint;
use crate::protocol::hello::HelloVerdict;
use crate::session::connection::Connection;
use crate::session::handshake::HelloError;

/// The longest pause between two attempts while the connection cannot do without the lane, and at first in
/// any case.
const OFTEN: Duration = Duration::from_millis(250);
/// The pause between two attempts for a chunk lane that could not be reconnected within the dial timeout.
const RARELY: Duration = Duration::from_secs(1);
/// How long the membership may take to say why a peer of another job has ended a connection.
const EXPLANATION_WAIT: Duration = Duration::from_millis(500);

/// Reconnects a lost lane, on a thread of its own: the side that dialled dials again, the other one checks
/// whether the peer still listens. A peer that does not is dead.
pub fn reconnect_lane(shared: &EngineShared, connection: &Arc<Connection>, control: bool, how: &str) {
    let (weak, broken, how) = (shared.weak(), Arc::clone(connection), how.to_owned());
    let spawned = shared.diallers.run(move || {
        if let Some(mending) = weak.upgrade() {
            reconnect_or_close(&mending, &broken, control, &how);
        }
    });
    if spawned.is_err() {
        let how = "no thread to mend its connection on".to_owned();
        connection.close(TransferError::PeerDead { member: connection.peer, how });
    }
}

/// Ends a connection that a peer of another job has ended, on a thread of its own.
pub fn close_lost_connection_in_background(shared: &EngineShared, connection: &Arc<Connection>, how: &str) {
    let (weak, lost, what) = (shared.weak(), Arc::clone(connection), how.to_owned());
    let spawned = shared.diallers.run(move || {
        if let Some(shared) = weak.upgrade() {
            close_lost_connection(&shared, &lost, what);
        }
    });
    if spawned.is_err() {
        connection.close(TransferError::PeerDead { member: connection.peer, how: how.to_owned() });
    }
}

/// Ends a connection whose peer is gone. If jobs may not exchange transfers any more, the peer's engine may hear that
/// first and end the connection; this engine hears it in a moment, and the error says so.
fn close_lost_connection(shared: &EngineShared, connection: &Connection, how: String) {
    let member = connection.peer;
    if !member.job.is_own() {
        shared.wait_before_retry(member, EXPLANATION_WAIT);
        let membership = shared.membership();
        if !membership.has(member) {
            return connection.close(TransferError::of_absent_member(member, &membership));
        }
    }
    connection.close(TransferError::PeerDead { member, how });
}

fn reconnect_or_close(shared: &Arc<EngineShared>, connection: &Arc<Connection>, control: bool, how: &str) {
    let peer = connection.peer;
    let until = clock::monotonic() + shared.config.dial_timeout;
    let mut pause = Duration::from_millis(2);
    let dead = |what: String| close_lost_connection(shared, connection, what);
    loop {
        if connection.end_error().is_some() || shared.closed.load(Ordering::Acquire) {
            return;
        }
        if control && connection.has_control_lane() {
            return;
        }
        let membership = shared.membership();
        let Some(info) = membership.member_info(peer) else { return };
        if connection.dialled {
            // A reconnected lane has a number of its own, by which its chunks are told from those of the lost
            // lane.
            let number = shared.next_lane_number();
            match dial_lane(shared, connection, &info.address, number, control) {
                Ok(()) => {
                    shared.counts.lanes_made.fetch_add(1, Ordering::Relaxed);
                    return;
                }
                Err(HelloError::Refused(HelloVerdict::StaleTarget(_) | HelloVerdict::UnknownConnection)) => {
                    return dead(format!("{how}; it does not know the connection any more"));
                }
                Err(HelloError::Io(error)) if error.kind() == io::ErrorKind::ConnectionRefused => {
                    return dead(format!("{how}; nobody listens at its address"));
                }
                // The connection goes on with the lanes that it has: only the control lane is indispensable.
                Err(error) if clock::monotonic() >= until && !control => {
                    tracing::debug!(%peer, %error, "a lane cannot be made anew, and is tried again");
                    pause = RARELY;
                }
                Err(error) if clock::monotonic() >= until => {
                    return dead(format!("{how}; dialled in vain: {error}"));
                }
                Err(_) => {}
            }
        } else {
            let refused = |endpoint: &dyn Endpoint| {
                let dialled = endpoint.dial(HELLO_TIMEOUT);
                dialled.is_err_and(|error| error.kind() == io::ErrorKind::ConnectionRefused)
            };
            let endpoints = endpoints_for_further_lanes(shared, peer, &info.address);
            if !endpoints.is_empty() && endpoints.iter().all(|endpoint| refused(&**endpoint)) {
                return dead(format!("{how}; nobody listens at its address"));
            }
            if !control {
                return;
            }
            if clock::monotonic() >= until {
                return dead(format!("{how}; it did not come back"));
            }
        }
        shared.wait_before_retry(peer, pause);
        pause = (pause * 2).min(if pause < RARELY { OFTEN } else { RARELY });
    }
}
