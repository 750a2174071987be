//! Dials lost lanes again, and detects dead peers.
//!
//! It makes no first lanes: [`dial`](super::dial) does. The side that dialled dials again; the other side
//! checks whether the peer still listens. A peer that refuses the connection at every address is dead, so a
//! killed process is detected in a moment, while a broken path is repaired. A chunk lane that cannot be
//! dialled is tried again and again while the connection goes on without it; a connection cannot go on
//! without control frames. Begin at [`mend`].

use std::io;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::thread;
use std::time::Duration;

use muster_clock as clock;

use super::connect::HELLO_TIMEOUT;
use super::dial::{join, lane_endpoints};
use super::shared::EngineShared;
use crate::base::error::TransferError;
use crate::io::wire::Endpoint;
use crate::protocol::hello::Verdict;
use crate::session::connection::Connection;
use crate::session::handshake::HelloError;

/// The longest pause between two attempts while the connection cannot do without the lane, and at first in
/// any case.
const OFTEN: Duration = Duration::from_millis(250);
/// The pause between two attempts for a chunk lane that could not be reconnected within the dial timeout.
const RARELY: Duration = Duration::from_secs(1);

/// Reconnects a lost lane, on a thread of its own: the side that dialled dials again, the other one checks
/// whether the peer still listens. A peer that does not is dead.
pub fn mend(shared: &EngineShared, connection: &Arc<Connection>, control: bool, how: &str) {
    let (weak, broken, how) = (shared.weak(), Arc::clone(connection), how.to_owned());
    let spawned = shared.diallers.run(move || {
        if let Some(mending) = weak.upgrade() {
            mend_now(&mending, &broken, control, &how);
        }
    });
    if spawned.is_err() {
        let how = "no thread to mend its connection on".to_owned();
        connection.close(TransferError::PeerDead { member: connection.peer, how });
    }
}

fn mend_now(shared: &Arc<EngineShared>, connection: &Arc<Connection>, control: bool, how: &str) {
    let peer = connection.peer;
    let until = clock::monotonic() + shared.config.dial_timeout;
    let mut pause = Duration::from_millis(2);
    let dead = |what: String| connection.close(TransferError::PeerDead { member: peer, how: what });
    loop {
        if connection.over().is_some() || shared.closed.load(Ordering::Acquire) {
            return;
        }
        if control && connection.has_control_lane() {
            return;
        }
        let membership = shared.membership();
        let Some(info) = membership.peers.get(&peer.task).filter(|info| info.incarnation == peer.incarnation)
        else {
            return;
        };
        if connection.dialled {
            // A reconnected lane has a number of its own, by which its chunks are told from those of the lost
            // lane.
            let number = shared.next_lane();
            match join(shared, connection, &info.address, number, control) {
                Ok(()) => {
                    shared.counts.lanes_made.fetch_add(1, Ordering::Relaxed);
                    return;
                }
                Err(HelloError::Refused(Verdict::StaleTarget(_) | Verdict::UnknownConnection)) => {
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
            let endpoints = lane_endpoints(shared, peer, &info.address);
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
        thread::sleep(pause);
        pause = (pause * 2).min(if pause < RARELY { OFTEN } else { RARELY });
    }
}
