//! Refuses requests: answers with a problem document, and audits the refusal.
//!
//! `middleware.rs` makes the checks. A refused change gets an audit line even if it did not reach a handler. Each
//! request has a flag that tells whether its audit line was written, so no request gets two lines. Refusals of
//! unknown clients, and refusals beyond a rate, share lines (`service/audit/refusal_aggregation.rs`). Begin at
//! [`RequestAuthorizer::refuse`].

use axum::extract::MatchedPath;
use axum::http::header::{self, HeaderValue};
use axum::http::{Method, StatusCode};
use axum::response::{IntoResponse as _, Redirect, Response};
use percent_encoding::percent_decode_str;

use super::request_authorizer::RequestAuthorizer;
use super::tokens;
use crate::coordination::{Actor, JobName};
use crate::http::Problem;
use crate::http::problem::asks_for_html_page;
use crate::http::request_client::actor_origin_from_user_agent;
use crate::service::{ActorContext, AuditOutcome};
use crate::text::percent_encode;

/// A refused request as the audit describes it.
pub(super) struct RefusedRequest {
    /// The job that the path names; it need not exist.
    job: Option<JobName>,
    act: &'static str,
    subject: String,
    /// The refusal is for the rate. More will follow, so it is aggregated from the start.
    is_rate_limited: bool,
}

impl RefusedRequest {
    pub fn from_request(request: &RequestAuthorizer) -> Self {
        let mut subject = crate::text::escape_to_one_line(request.head.uri.path()).into_owned();
        subject.truncate(subject.floor_char_boundary(200));
        let act = match request.head.method {
            Method::GET | Method::HEAD | Method::OPTIONS => "look",
            Method::DELETE => "delete",
            _ => "change",
        };
        Self { job: job_name_in_path(request), act, subject, is_rate_limited: false }
    }
}

/// Returns the job name in the path, if the route has one.
fn job_name_in_path(request: &RequestAuthorizer) -> Option<JobName> {
    let route = request.head.extensions.get::<MatchedPath>()?.as_str();
    let mut pairs = route.split('/').zip(request.head.uri.path().split('/'));
    let (_, name) = pairs.find(|(place, _)| *place == "{job}")?;
    percent_decode_str(name).decode_utf8().ok()?.parse().ok()
}

impl RequestAuthorizer {
    /// Refuses the request and audits the refusal.
    pub fn refuse(&self, problem: Problem) -> Box<Response> {
        self.audit_refusal(RefusedRequest::from_request(self), &problem.detail);
        Box::new(respond_with_www_authenticate(problem))
    }

    /// Refuses an unknown token, and counts it against the limits.
    pub fn refuse_unknown_token(&self, problem: Problem) -> Box<Response> {
        let guard = self.access_control();
        self.audit_refusal(RefusedRequest::from_request(self), &problem.detail);
        let shown = self.head.headers.get(header::AUTHORIZATION).map_or(&b""[..], HeaderValue::as_bytes);
        let token = tokens::hash_secret(&String::from_utf8_lossy(shown));
        if !guard.attempts.record_wrong_header_token(guard.clock.now(), self.source, &token) {
            return Box::new(respond_with_retry_after(Problem::too_many_wrong_tokens()));
        }
        Box::new(respond_with_www_authenticate(problem))
    }

    /// Refuses a request for a lack of access. A browser without credentials that asks for a page is sent to the
    /// login.
    pub fn refuse_or_redirect_to_login(&self, problem: Problem) -> Box<Response> {
        if self.visitor.is_none() && !self.is_change && asks_for_html_page(&self.head.headers, &self.head.uri)
        {
            let path = self.head.uri.path_and_query().map_or("/", |path| path.as_str());
            let next = percent_encode(path.as_bytes());
            return Box::new(Redirect::to(&format!("/login?next={next}")).into_response());
        }
        self.refuse(problem)
    }

    /// Refuses a request beyond the rate.
    pub fn refuse_above_rate_limit(&self, problem: Problem) -> Box<Response> {
        // Wrong tokens of a client without a principal are in the audit already.
        if self.visitor.is_some() {
            let attempt = RefusedRequest { is_rate_limited: true, ..RefusedRequest::from_request(self) };
            self.audit_refusal(attempt, &problem.detail);
        }
        Box::new(respond_with_retry_after(problem))
    }

    /// Refuses a request whose body was not read whole. The response is the last one of its connection: unread
    /// bytes of the body stand before the next request.
    pub fn refuse_and_close_connection(&self, problem: Problem) -> Box<Response> {
        let mut response = self.refuse(problem);
        response.headers_mut().insert(header::CONNECTION, HeaderValue::from_static("close"));
        response
    }

    /// Audits a refusal. A known actor gets one line each, up to a rate. Refusals of unknown clients, refusals
    /// beyond that rate and refusals for the rate of requests are aggregated by client network and job.
    pub fn audit_refusal(&self, attempt: RefusedRequest, detail: &str) {
        let (guard, audit, visitor) =
            (self.access_control(), &self.site.operations.audit, self.visitor.as_ref());
        let now = guard.clock.now();
        let source = self.source.to_string();
        let actor = visitor.map_or_else(
            || Actor {
                who: Actor::ANONYMOUS.into(),
                address: self.peer_address(),
                means: actor_origin_from_user_agent(self.user_agent()),
            },
            |visitor| visitor.actor.clone(),
        );
        let author = ActorContext::new(actor, visitor.map(|visitor| visitor.role), None);
        let RefusedRequest { job, act, subject, is_rate_limited: often } = attempt;
        // A client must not fill the audit with names of jobs that do not exist.
        let engine = &self.site.engine;
        let exists = |job: &JobName| engine.read_under_lock(|core| core.job_named(job.as_str()).is_some());
        let job = job.filter(exists);
        // A line is about one job, so that a query by job finds every refusal.
        let gathered = format!(
            "{} {source} {} {often}",
            visitor.map_or("", |visitor| &visitor.actor.who),
            job.as_ref().map_or("", JobName::as_str)
        );
        let deed = author.create_audit_entry(job, act, subject, None);
        if visitor.is_some() && !often && guard.refusals.take_token(now, source) {
            audit.record(now, deed, AuditOutcome::Refused, detail.to_owned());
        } else {
            audit.record_refusal_aggregated(guard.clock, gathered, deed, detail.to_owned());
        }
    }
}

fn respond_with_www_authenticate(problem: Problem) -> Response {
    let mut response = problem.into_response();
    if response.status() == StatusCode::UNAUTHORIZED {
        let scheme = HeaderValue::from_static("Bearer realm=\"muster\"");
        response.headers_mut().insert(header::WWW_AUTHENTICATE, scheme);
    }
    response
}

/// Turns a problem into a response with the header `retry-after`.
pub(super) fn respond_with_retry_after(problem: Problem) -> Response {
    let mut response = problem.into_response();
    response.headers_mut().insert(header::RETRY_AFTER, HeaderValue::from_static("10"));
    response
}
