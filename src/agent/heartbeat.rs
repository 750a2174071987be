//! Sends heartbeats to the service, and holds an error poll. From both, this incarnation learns that it has ended.
//!
//! The service decides which incarnations live. If the service is unreachable for too long, the agent ends its own
//! incarnation. Begin at [`send_heartbeats`].

use std::sync::Arc;

use super::error::AgentError;
use super::shared::AgentShared;

/// Sends heartbeats at half of the timeout, each with that as its limit.
pub(super) async fn send_heartbeats(inner: Arc<AgentShared>) {
    let interval = inner.config.heartbeat_timeout / 2;
    loop {
        tokio::time::sleep(interval).await;
        let heard = inner.retry_while_service_unreachable(|| async {
            // A silent service counts as unreachable: another call may succeed.
            inner.service.heartbeat(interval).await.map_err(|error| match error {
                AgentError::TimedOut { call, limit } => AgentError::Unreachable {
                    service: inner.config.service.clone(),
                    call,
                    why: format!("no answer within {limit:?}"),
                },
                error => error,
            })
        });
        if let Err(error) = heard.await {
            return inner.end_incarnation(error);
        }
    }
}

/// Holds the error poll.
pub(super) async fn poll_for_service_error(inner: Arc<AgentShared>) {
    // If the poll is answered for good, errors arrive with heartbeats and with the watch.
    if let Err(error) = inner.retry_while_service_unreachable(|| inner.service.poll_for_error()).await {
        inner.end_incarnation(error);
    }
}
