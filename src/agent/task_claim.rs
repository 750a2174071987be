//! Asks the service which task this process is. The call (a *claim*) states the process identity: the host of this
//! process and its number there.
//!
//! The service answers every claim at once. If the answer tells the process to wait, this module repeats the claim
//! until the caller's deadline. Begin at [`claim_task`].

use std::sync::OnceLock;
use std::time::Duration;

use tonic::{Code, Request, Status};

use super::AgentConfig;
use super::channel;
use super::error::AgentError;
use crate::clock;
use crate::coordination::ProcessIdentity;
use crate::proto::muster::v1 as pb;
use crate::proto::muster::v1::task_claims_client::TaskClaimsClient;

/// The pause after a call that failed in the transport.
const RECONNECT_PAUSE: Duration = Duration::from_millis(200);
/// The bounds on the pause that a service asks for.
const RETRY: (Duration, Duration) = (Duration::from_millis(20), Duration::from_secs(5));

/// The task that a process is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct GrantedTask {
    /// The task.
    pub task: u32,
    /// The number of tasks of the job.
    pub tasks: u32,
}

/// Returns the random number by which the service tells the claims of this process from those of others.
#[must_use]
pub fn own_claimant_id() -> u64 {
    static CLAIMANT: OnceLock<u64> = OnceLock::new();
    *CLAIMANT.get_or_init(clock::random_u64)
}

/// Returns which task the process with this identity is, once the service at `config.service` says so; within `limit`.
///
/// `claimant` is a random number of the process, such as [`own_claimant_id`]. The task of `config` is not used.
///
/// # Errors
/// If the service cannot be reached, refuses the claim, or has not granted it in time; the error says why.
pub async fn claim_task(
    config: &AgentConfig,
    identity: &ProcessIdentity,
    claimant: u64,
    limit: Duration,
) -> Result<GrantedTask, AgentError> {
    config.check()?;
    let (channel, port) = channel::create_service_channel(config)?;
    let mut client = TaskClaimsClient::new(channel);
    let claim = pb::TaskClaim { host: identity.host().to_owned(), local: identity.local(), claimant };
    let until = clock::monotonic() + limit;
    let mut told = String::new();
    loop {
        let left = until.saturating_duration_since(clock::monotonic());
        let mut request = Request::new(claim.clone());
        request.set_timeout(left.max(RECONNECT_PAUSE).min(config.call_limit));
        let (pause, late) = match client.claim(request).await.map(tonic::Response::into_inner) {
            Ok(pb::TaskClaimAnswer { task: Some(task), tasks, .. }) => {
                return Ok(GrantedTask { task, tasks });
            }
            Ok(pending) => {
                let why = crate::text::escape_to_one_line(&pending.why).into_owned();
                if told != pending.pending {
                    tracing::warn!(%identity, "waits for its task id: {why}");
                    told = pending.pending;
                }
                let pause = Duration::from_millis(u64::from(pending.retry_ms)).clamp(RETRY.0, RETRY.1);
                (pause, AgentError::NoTask { identity: identity.to_string(), limit, why })
            }
            Err(status) => match claim_error(&config.service, &port, &status) {
                error if error.is_transient() => (RECONNECT_PAUSE, error),
                error => return Err(error),
            },
        };
        if until.saturating_duration_since(clock::monotonic()) <= pause {
            return Err(late);
        }
        tokio::time::sleep(pause).await;
    }
}

/// Returns the error of a failed claim.
fn claim_error(service: &str, port: &channel::DetectedPortProtocol, status: &Status) -> AgentError {
    const CALL: &str = "claim of a task id";
    let message = crate::text::escape_to_one_line(status.message()).into_owned();
    match status.code() {
        Code::InvalidArgument
        | Code::ResourceExhausted
        | Code::NotFound
        | Code::FailedPrecondition
        | Code::PermissionDenied => AgentError::Refused { call: CALL, code: status.code(), message },
        Code::Unimplemented => AgentError::Refused {
            call: CALL,
            code: Code::Unimplemented,
            message: "it is older than this program and remembers no hosts: give the number of the task"
                .to_owned(),
        },
        _ => {
            let why = port.mismatch_hint().map_or(message, str::to_owned);
            AgentError::Unreachable { service: service.to_owned(), call: CALL, why }
        }
    }
}
