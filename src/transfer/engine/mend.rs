//! Dials lost lanes again, and finds out whether their peer is dead.
//!
//! It makes no first lanes: [`dial`](super::dial) does. The side that dialled dials again; the other side checks
//! whether the peer still listens. A peer at whose address nothing listens is dead: a killed process is detected in
//! a moment, and a broken path is mended. A chunk lane that cannot be dialled is tried again and again while the
//! connection goes on without it; without control frames a connection cannot go on. Begin at [`mend`].

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

/// A lost lane is dialled at least so often while its connection cannot do without it.
const OFTEN: Duration = Duration::from_millis(250);
/// A lost lane is dialled so often when it could not be made anew for long, and others carry the chunks.
const RARELY: Duration = Duration::from_secs(1);

/// Makes a lost lane anew, on a thread of its own: the side that dialled dials again, the other one finds out whether the
/// peer still listens. A peer that does not is dead.
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
            // A lane that is made anew has a number of its own: what the old one carried is told apart by it.
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
                // The connection goes on with the lanes that it has: only without control frames it cannot.
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
