//! Finds the job of a call. If the listener serves a single job, the call is for this job. Otherwise the first
//! label of the request's authority names the job. If the authority is an IP address, or no job has this name, the
//! call is for the default job.
//!
//! The default job is the job named `default`, else the only job, else the only job that has no listener of its
//! own. A connection remembers the name of its job, and looks the job up again after any job was created or
//! deleted. The connection therefore finds a job that was deleted and created again, and never confuses a deleted
//! job with another one. Begin at [`ConnectionJobResolver::resolve_job`].

use std::net::IpAddr;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use crate::coordination::{Code, Coordinator, Failure, JobId, JobName};
use crate::engine::Engine;
use crate::telemetry::log_rate_limit::LogRateLimit;

/// The rule that chooses the job for the calls of a listener.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ListenerJobRule {
    /// The job with this name. If it is deleted, calls go to the deleted job and are told so.
    Job(JobName, JobId),
    /// The job named by the first label of the authority (`NAME.host:port`), if there is one; otherwise the
    /// default job, or else the given one: the only job without a listener of its own.
    ByAuthority(Option<JobName>),
}

/// The resolved job of a connection.
struct ResolvedJob {
    /// The authority for which it was resolved; `None` if that does not matter.
    authority: Option<Box<str>>,
    name: JobName,
    job: JobId,
    /// The engine's version of the job table at that time.
    changes: u64,
}

/// The routing of one connection. It caches its result, because a client dials one name.
pub(super) struct ConnectionJobResolver {
    routing: ListenerJobRule,
    found: Option<ResolvedJob>,
    /// Whether it has been logged that this connection's authority leads to no job.
    is_unroutable_logged: bool,
}

impl ConnectionJobResolver {
    pub(super) fn new(routing: ListenerJobRule) -> Self {
        let found = match &routing {
            ListenerJobRule::Job(name, job) => {
                Some(ResolvedJob { authority: None, name: name.clone(), job: *job, changes: u64::MAX })
            }
            ListenerJobRule::ByAuthority(_) => None,
        };
        Self { routing, found, is_unroutable_logged: false }
    }

    /// Returns the job for a call to `authority`. A missing job is not cached, because it may be declared
    /// later. A job that was deleted and created again is found again by its name; until then its connections
    /// are told that it is deleted.
    pub(super) fn resolve_job(
        &mut self,
        engine: &Engine,
        lost: &Mutex<LogRateLimit<()>>,
        authority: &str,
    ) -> Result<JobId, Failure> {
        let changes = engine.job_table_version();
        if let Some(found) = &mut self.found
            && found.authority.as_deref().is_none_or(|known| known == authority)
        {
            if found.changes != changes {
                let present = engine.read_under_lock(|core| core.job_named(found.name.as_str()));
                (found.job, found.changes) = (present.unwrap_or(found.job), changes);
            }
            return Ok(found.job);
        }
        let ListenerJobRule::ByAuthority(only) = &self.routing else { return Err(no_job_failure(authority)) };
        let named = first_host_label(authority);
        let found = engine.read_under_lock(|core| {
            let job = select_job(core, named, only.as_ref())?;
            Some((job, core.job_name(job)?.clone()))
        });
        let Some((job, name)) = found else {
            let failure = no_job_failure(authority);
            if !std::mem::replace(&mut self.is_unroutable_logged, true) {
                // Clients report nothing about it until they give up, minutes later.
                let now = Duration::from_nanos(engine.clock().elapsed_nanos());
                let admitted = lost.lock().unwrap_or_else(PoisonError::into_inner).admit(&(), now);
                if let Some(left_out) = admitted {
                    let reason = failure.message.as_str();
                    tracing::warn!(reason, left_out, "a client dials a name that leads to no job");
                }
            }
            return Err(failure);
        };
        self.found = Some(ResolvedJob { authority: Some(authority.into()), name, job, changes });
        Ok(job)
    }
}

fn select_job(core: &Coordinator, named: Option<&str>, only: Option<&JobName>) -> Option<JobId> {
    let named = named.and_then(|name| core.job_named(name));
    named.or_else(|| core.default_job()).or_else(|| core.job_named(only?.as_str()))
}

fn no_job_failure(authority: &str) -> Failure {
    let shown = authority.get(..authority.floor_char_boundary(200)).unwrap_or_default();
    // Without details, so that registering clients retry until the job exists.
    let text = format!(
        "{shown:?} leads to no job: declare a job named {:?}, or dial one that is declared as NAME.HOST:PORT",
        first_host_label(shown).unwrap_or("default"),
    );
    Failure::without_details(Code::FailedPrecondition, text)
}

/// Returns the first label of an authority's host, unless the host is an address.
fn first_host_label(authority: &str) -> Option<&str> {
    let host = match authority.rsplit_once('@') {
        Some((_, host)) => host,
        None => authority,
    };
    if host.starts_with('[') {
        return None;
    }
    let name = host.split_once(':').map_or(host, |(name, _)| name);
    if name.parse::<IpAddr>().is_ok() {
        return None;
    }
    let first = name.split_once('.').map_or(name, |(first, _)| first);
    (!first.is_empty()).then_some(first)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::clock::Clock;
    use crate::coordination::{Actor, ActorOrigin, CommandReason, JobSettings, OperatorCommand};

    #[test]
    fn labels() {
        for (authority, expected) in [
            ("train.muster.example:8476", Some("train")),
            ("train:8476", Some("train")),
            ("train", Some("train")),
            ("user@train.x", Some("train")),
            ("10.0.0.1:8476", None),
            ("10.0.0.1", None),
            ("[::1]:8476", None),
            ("", None),
            (":8476", None),
            (".x", None),
        ] {
            assert_eq!(first_host_label(authority), expected, "{authority}");
        }
    }

    #[test]
    fn no_job_is_told_how_to_get_one() {
        let engine = Engine::new(Clock::start());
        let mut route = ConnectionJobResolver::new(ListenerJobRule::ByAuthority(None));
        let failure =
            route.resolve_job(&engine, &Mutex::default(), "train.x:1").expect_err("there are no jobs");
        assert!(failure.message.contains("declare a job named \"train\""), "{}", failure.message);
        assert_eq!(failure.service_error, None);
    }

    #[test]
    fn a_job_that_was_deleted_and_made_again_is_found_again_by_its_name() {
        let engine = Engine::new(Clock::start());
        let declare = |name: &str| {
            engine.declare_job(name.parse().expect("a name"), JobSettings::new(1)).expect("there is room")
        };
        let (train, eval) = (declare("train"), declare("eval"));
        let mut own =
            ConnectionJobResolver::new(ListenerJobRule::Job("train".parse().expect("a name"), train));
        let mut shared = ConnectionJobResolver::new(ListenerJobRule::ByAuthority(None));
        let lost = Mutex::default();
        let mut both = || {
            [own.resolve_job(&engine, &lost, "10.0.0.1:1"), shared.resolve_job(&engine, &lost, "train.x:1")]
        };
        assert_eq!(both(), [Ok(train), Ok(train)]);
        let actor = Actor { who: "alice".into(), address: None, means: ActorOrigin::Api };
        let why = CommandReason::try_from("why".to_owned()).expect("a reason");
        engine
            .perform_command(train, actor, why, OperatorCommand::DeleteJob { force: false })
            .expect("it is deleted");
        assert_eq!(both(), [Ok(train), Ok(train)], "it is not taken for another one");
        let again = declare("train");
        assert!(again != train && again != eval);
        assert_eq!(both(), [Ok(again), Ok(again)]);
    }
}
