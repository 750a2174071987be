//! Which job a call is for.

use std::net::IpAddr;

use crate::coordination::{Code, Coordinator, Failure, JobId};
use crate::engine::Engine;

/// Which job the calls to a listener are for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Routing {
    /// The listener belongs to this job.
    Own(JobId),
    /// The first label of the name that the client dialled (`NAME.host:port`) names the job, if there is one of that
    /// name; otherwise it is the default job, or else the one given: the only job that has no listener of its own.
    ByAuthority(Option<JobId>),
}

/// The routing of one connection, which remembers what it found: clients dial one name.
pub(super) struct Route {
    routing: Routing,
    found: Option<(Box<str>, JobId)>,
    /// It has been logged that this connection leads nowhere.
    lost: bool,
}

impl Route {
    pub(super) fn new(routing: Routing) -> Self {
        Self { routing, found: None, lost: false }
    }

    /// The job for a call to `authority`. That there is none is not remembered: it may be declared later.
    pub(super) fn job(&mut self, engine: &Engine, authority: &str) -> Result<JobId, Failure> {
        let only = match self.routing {
            Routing::Own(job) => return Ok(job),
            Routing::ByAuthority(only) => only,
        };
        if let Some((known, job)) = &self.found
            && **known == *authority
        {
            return Ok(*job);
        }
        let named = label(authority);
        let Some(job) = engine.look(|core, _| resolve(core, named)).or(only) else {
            let failure = no_job(authority);
            if !std::mem::replace(&mut self.lost, true) {
                // Clients say nothing of it until they give up, minutes later.
                tracing::warn!(reason = failure.message, "a client dials a name that leads to no job");
            }
            return Err(failure);
        };
        self.found = Some((authority.into(), job));
        Ok(job)
    }
}

fn resolve(core: &Coordinator, named: Option<&str>) -> Option<JobId> {
    named.and_then(|name| core.job_named(name)).or_else(|| core.default_job())
}

fn no_job(authority: &str) -> Failure {
    let shown = authority.get(..authority.floor_char_boundary(200)).unwrap_or_default();
    // Without details, so that clients which register keep trying until the job is there.
    let text = format!(
        "{shown:?} leads to no job: declare a job named {:?}, or dial one that is declared as NAME.HOST:PORT",
        label(shown).unwrap_or("default"),
    );
    Failure::plain(Code::FailedPrecondition, text)
}

/// The first label of an authority's host, unless that is an address.
fn label(authority: &str) -> Option<&str> {
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
            assert_eq!(label(authority), expected, "{authority}");
        }
    }

    #[test]
    fn no_job_is_told_how_to_get_one() {
        let engine = Engine::new(Clock::start());
        let mut route = Route::new(Routing::ByAuthority(None));
        let failure = route.job(&engine, "train.x:1").expect_err("there are no jobs");
        assert!(failure.message.contains("declare a job named \"train\""), "{}", failure.message);
        assert_eq!(failure.service_error, None);
        assert_eq!(Route::new(Routing::Own(JobId(3))).job(&engine, "x"), Ok(JobId(3)));
    }
}
