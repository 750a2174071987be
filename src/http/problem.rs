//! Builds the problem documents (RFC 9457) of errors.
//!
//! `api.rs` defines the type, and `problem_rendering.rs` writes a problem into its response. Begin at `Problem`.

use axum::http::{HeaderMap, HeaderValue, StatusCode, Uri, header};
use axum::response::{IntoResponse, Response};
use std::time::Duration;

use super::api::{NO_SUCH_JOB, Problem};
use crate::coordination::{ClaimRefusal, Code, CommandRefusal, JobName};
use crate::engine::DeclareError;
use crate::service::AccessRole;

/// The maximum number of names in a problem.
const NAMES_MAX: usize = 100;

impl Problem {
    /// Returns a problem without jobs.
    pub(super) fn new(status: StatusCode, kind: &str, title: &str, detail: impl Into<Box<str>>) -> Self {
        Self {
            kind: kind.into(),
            title: title.into(),
            status: status.as_u16(),
            detail: detail.into(),
            instance: Box::default(),
            jobs: Vec::new(),
        }
    }

    /// Returns the problem that the server is not ready.
    #[must_use]
    pub fn not_ready(reason: &str) -> Self {
        Self::new(StatusCode::SERVICE_UNAVAILABLE, "/problems/not-ready", "Not ready", reason)
    }

    /// Returns the problem that no job has this name; `jobs` are those that exist.
    #[must_use]
    pub fn no_such_job(name: &str, mut jobs: Vec<JobName>) -> Self {
        jobs.truncate(NAMES_MAX);
        let names: Vec<&str> = jobs.iter().map(JobName::as_str).collect();
        let detail = format!("there is no job named {name:?}; the jobs are: {}", names.join(", "));
        Self { jobs, ..Self::new(StatusCode::NOT_FOUND, NO_SUCH_JOB, "No such job", detail) }
    }

    /// Returns the problem that an object does not exist in the job; `kind` names its kind.
    #[must_use]
    pub(super) fn not_found(kind: &str, detail: impl Into<Box<str>>) -> Self {
        Self::new(StatusCode::NOT_FOUND, &format!("/problems/{kind}"), "Not found", detail)
    }

    /// Returns the problem that the body is unreadable.
    #[must_use]
    pub(super) fn bad_body(status: StatusCode, detail: impl Into<Box<str>>) -> Self {
        Self::new(status, "/problems/bad-body", "Bad body", detail)
    }

    /// Returns the problem that the body exceeds `limit` bytes.
    #[must_use]
    pub(super) fn body_too_long(limit: usize) -> Self {
        let detail = format!("the body has more than {limit} bytes, the most that is read here");
        Self::bad_body(StatusCode::PAYLOAD_TOO_LARGE, detail)
    }

    /// Returns the problem that the body arrives too slowly.
    #[must_use]
    pub(super) fn slow_body(within: Duration, per_second: u64) -> Self {
        let detail =
            format!("the body did not arrive within {within:?}, or at less than {per_second} bytes a second");
        Self::new(StatusCode::REQUEST_TIMEOUT, "/problems/slow-body", "Slow body", detail)
    }

    /// Returns the problem that the memory for bodies is spent.
    #[must_use]
    pub(super) fn body_memory_exhausted() -> Self {
        let detail = "the memory for request bodies is exhausted (setting http-bodies-bytes; one source may use a quarter): send \
                      fewer requests at once";
        Self::new(StatusCode::SERVICE_UNAVAILABLE, "/problems/too-many-bodies", "Too many bodies", detail)
    }

    /// Returns the problem that every connection slot is busy.
    #[must_use]
    pub(super) fn too_many_connections() -> Self {
        let detail = "all HTTP connections are busy (settings http-connections and http-connections-per-source), and only health \
                      is answered: try again";
        Self::new(
            StatusCode::SERVICE_UNAVAILABLE,
            "/problems/too-many-connections",
            "Too many connections",
            detail,
        )
    }

    /// Returns the problem that changes are refused while the audit file cannot be written.
    #[must_use]
    pub(super) fn audit_unwritable(why: &str) -> Self {
        let detail = format!(
            "the audit file cannot be written ({why}), so changes are refused: repair it, or start the server with \
             --audit-failure continue"
        );
        Self::new(StatusCode::SERVICE_UNAVAILABLE, "/problems/audit-unwritable", "Audit unwritable", detail)
    }

    /// Returns the problem that the host of the request is ambiguous or invalid.
    #[must_use]
    pub(super) fn invalid_host_header(wrong: &str) -> Self {
        Self::new(StatusCode::BAD_REQUEST, "/problems/bad-host", "Bad host", wrong)
    }

    /// Returns the problem that the path is unreadable.
    #[must_use]
    pub(super) fn bad_path(detail: impl Into<Box<str>>) -> Self {
        Self::new(StatusCode::BAD_REQUEST, "/problems/bad-path", "Bad path", detail)
    }

    /// Returns the problem that the request is readable but invalid.
    #[must_use]
    pub(super) fn invalid_request(detail: impl Into<Box<str>>) -> Self {
        Self::new(StatusCode::UNPROCESSABLE_ENTITY, "/problems/unusable", "Unusable request", detail)
    }

    /// Returns the problem that every stream is in use.
    #[must_use]
    pub(super) fn too_many_streams(most: usize) -> Self {
        let detail = format!(
            "{most} event streams are open, the limit (setting http-streams): close one, or request pages instead"
        );
        Self::new(StatusCode::SERVICE_UNAVAILABLE, "/problems/too-many-streams", "Too many streams", detail)
    }

    /// Returns the problem that this build has no metrics.
    #[must_use]
    pub(super) fn metrics_not_built() -> Self {
        let detail = "this server was built without the feature metrics, which is on by default";
        Self::new(StatusCode::NOT_IMPLEMENTED, "/problems/no-metrics", "No metrics", detail)
    }

    /// Returns the problem of an internal error.
    #[must_use]
    pub(super) fn internal_error() -> Self {
        let detail = "the server made an error; please report this request with the server's log";
        Self::new(StatusCode::INTERNAL_SERVER_ERROR, "/problems/internal", "Internal error", detail)
    }

    /// Returns the problem that the host of the request is no name of this server.
    #[must_use]
    pub(super) fn unknown_host_name(host: &str) -> Self {
        let host: String = crate::text::escape_to_one_line(host).chars().take(200).collect();
        let detail = format!(
            "this server does not accept the host name {host:?}: use its IP address, or start it with --http-hosts NAME"
        );
        Self::new(StatusCode::MISDIRECTED_REQUEST, "/problems/wrong-host", "Wrong host", detail)
    }

    /// Returns the problem that the token is unknown.
    #[must_use]
    pub(super) fn unknown_token() -> Self {
        let detail = "the token is unknown or revoked";
        Self::new(StatusCode::UNAUTHORIZED, "/problems/bad-token", "Unknown token", detail)
    }

    /// Returns the problem that the request needs a token and has none.
    #[must_use]
    pub(super) fn missing_token() -> Self {
        let detail =
            "authentication required: send the header authorization: Bearer TOKEN, or log in at /login";
        Self::new(StatusCode::UNAUTHORIZED, "/problems/no-token", "Authentication required", detail)
    }

    /// Returns the problem that the request needs another role.
    #[must_use]
    pub(super) fn insufficient_role(has: AccessRole, needed: AccessRole) -> Self {
        let detail = format!("this requires the {needed} role; your role is {has}");
        Self::new(StatusCode::FORBIDDEN, "/problems/not-allowed", "Not allowed", detail)
    }

    /// Returns the problem that a page of another origin asks for a change.
    #[must_use]
    pub(super) fn foreign_origin(origin: &str) -> Self {
        let origin: String = crate::text::escape_to_one_line(origin).chars().take(200).collect();
        let detail = format!("requests from pages of {origin:?} are refused");
        Self::new(StatusCode::FORBIDDEN, "/problems/foreign-origin", "Foreign origin", detail)
    }

    /// Returns the problem that a browser asks for a change without the CSRF proof.
    #[must_use]
    pub(super) fn missing_csrf_proof() -> Self {
        let detail = "the request lacks the proof of its page (the form field csrf or the header x-csrf-token): load the page again";
        Self::new(StatusCode::FORBIDDEN, "/problems/no-proof", "Proof missing", detail)
    }

    /// Returns the problem that the content type of a change could be that of a form on another site.
    #[must_use]
    pub(super) fn not_json() -> Self {
        let detail = "the body must be JSON: send it with the header content-type: application/json";
        Self::bad_body(StatusCode::UNSUPPORTED_MEDIA_TYPE, detail)
    }

    /// Returns the problem that a form does not say from which page it comes.
    #[must_use]
    pub(super) fn form_without_origin() -> Self {
        let detail = "a form must come from a page of this server, and say so with the header origin, as browsers do; programs \
                      send JSON (content-type: application/json) to the REST API, which /api describes";
        Self::bad_body(StatusCode::UNSUPPORTED_MEDIA_TYPE, detail)
    }

    /// Returns the problem that an actor makes too many changes.
    #[must_use]
    pub(super) fn too_many_changes() -> Self {
        let detail = "too many changes by one actor: wait, or raise --http-changes-per-second";
        Self::new(StatusCode::TOO_MANY_REQUESTS, "/problems/too-many-changes", "Too many changes", detail)
    }

    /// Returns the problem that a client tries too many tokens.
    #[must_use]
    pub(super) fn too_many_wrong_tokens() -> Self {
        let detail =
            "too many wrong tokens were tried: try again later, or send a token in the header authorization";
        Self::new(StatusCode::TOO_MANY_REQUESTS, "/problems/too-many-logins", "Too many logins", detail)
    }

    /// Returns the problem that a change has a condition on a strong tag, of which there are none.
    #[must_use]
    pub fn conditional_change_unsupported() -> Self {
        let detail = "If-Match asks for a strong entity tag, and those here are weak: nothing was changed; look again, and ask \
                      without it";
        Self::new(StatusCode::PRECONDITION_FAILED, "/problems/no-strong-tags", "Condition not met", detail)
    }

    /// Returns the problem that the query is invalid.
    #[must_use]
    pub fn bad_query(detail: impl Into<Box<str>>) -> Self {
        Self::new(StatusCode::BAD_REQUEST, "/problems/bad-query", "Bad query", detail)
    }
}

impl Problem {
    /// Returns the response for connections that no router serves. It is the last one of its connection.
    pub(super) fn connection_closing_response(&self) -> Response {
        let mut response = (
            StatusCode::from_u16(self.status).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR),
            // A struct of strings and numbers always serializes.
            serde_json::to_vec(self).unwrap_or_default(),
        )
            .into_response();
        let headers = response.headers_mut();
        headers.insert(header::CONTENT_TYPE, HeaderValue::from_static("application/problem+json"));
        headers.insert(header::CONNECTION, HeaderValue::from_static("close"));
        headers.insert(header::RETRY_AFTER, HeaderValue::from_static("1"));
        super::headers::add_security_headers(headers, false);
        response
    }
}

/// The title of a refusal because the journal cannot be written.
const NOT_RECORDABLE_TITLE: &str = "The journal cannot be written";

impl From<CommandRefusal> for Problem {
    fn from(refusal: CommandRefusal) -> Self {
        let (status, title) = match &refusal {
            CommandRefusal::NoSuchJob => (StatusCode::NOT_FOUND, "No such job"),
            CommandRefusal::NoSuchExclusion(_) => (StatusCode::NOT_FOUND, "No such exclusion"),
            CommandRefusal::NoTaskOwner(_) => (StatusCode::NOT_FOUND, "No task owner"),
            CommandRefusal::NoSuchTask { .. } => (StatusCode::UNPROCESSABLE_ENTITY, "No such task"),
            CommandRefusal::BadSetting(_) => (StatusCode::UNPROCESSABLE_ENTITY, "Bad setting"),
            CommandRefusal::AlreadyExcluded { .. } => (StatusCode::CONFLICT, "Already excluded"),
            CommandRefusal::AlreadyOver(_) => (StatusCode::CONFLICT, "Already ended"),
            CommandRefusal::EndsRun { .. } => (StatusCode::CONFLICT, "This would end the run"),
            CommandRefusal::TooManyExclusions(_) => (StatusCode::CONFLICT, "Too many exclusions"),
            CommandRefusal::NotRunning(_) => (StatusCode::CONFLICT, "No run is running"),
            CommandRefusal::DrainUnderWay(_) => (StatusCode::CONFLICT, "A drain is under way"),
            CommandRefusal::RunInProgress { .. } => (StatusCode::CONFLICT, "A run is in progress"),
            CommandRefusal::BoundsTooLow(_) => (StatusCode::CONFLICT, "Bounds too low"),
            CommandRefusal::TasksConnected(_) => (StatusCode::CONFLICT, "Tasks are connected"),
            CommandRefusal::Store(failure) if failure.code == Code::ResourceExhausted => {
                (StatusCode::INSUFFICIENT_STORAGE, "No room")
            }
            CommandRefusal::Store(_) => (StatusCode::CONFLICT, "Refused by the store"),
            CommandRefusal::NotRecordable(_) => (StatusCode::SERVICE_UNAVAILABLE, NOT_RECORDABLE_TITLE),
        };
        Self::new(status, &format!("/problems/{}", refusal.kind()), title, refusal.to_string())
    }
}

impl From<ClaimRefusal> for Problem {
    fn from(refusal: ClaimRefusal) -> Self {
        let (status, kind, title) = match &refusal {
            ClaimRefusal::NoSuchJob => (StatusCode::NOT_FOUND, "no-such-job", "No such job"),
            ClaimRefusal::TooManyClaims { .. } => {
                (StatusCode::CONFLICT, "too-many-claims", "Too many claims")
            }
            ClaimRefusal::NotRecordable(_) => {
                (StatusCode::SERVICE_UNAVAILABLE, "not-recordable", NOT_RECORDABLE_TITLE)
            }
        };
        Self::new(status, &format!("/problems/{kind}"), title, refusal.to_string())
    }
}

impl From<DeclareError> for Problem {
    fn from(refusal: DeclareError) -> Self {
        let (status, kind, title) = match refusal {
            DeclareError::Exists(_) => (StatusCode::CONFLICT, "job-exists", "Job exists"),
            DeclareError::TooMany(_) => (StatusCode::CONFLICT, "too-many-jobs", "Too many jobs"),
            DeclareError::NotRecordable(_) => {
                (StatusCode::SERVICE_UNAVAILABLE, "not-recordable", NOT_RECORDABLE_TITLE)
            }
        };
        Self::new(status, &format!("/problems/{kind}"), title, refusal.to_string())
    }
}

impl IntoResponse for Problem {
    fn into_response(self) -> Response {
        let status = StatusCode::from_u16(self.status).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
        let mut response = status.into_response();
        // `problem_rendering.rs` writes the body, because it knows what the client accepts.
        response.extensions_mut().insert(self);
        response
    }
}

/// Returns whether a browser asks for a page.
pub(super) fn asks_for_html_page(headers: &HeaderMap, uri: &Uri) -> bool {
    let accepts = headers.get(header::ACCEPT).and_then(|accept| accept.to_str().ok());
    accepts.is_some_and(|accept| accept.contains("text/html")) && !uri.path().starts_with("/api/")
}
