//! Authorizes each request before its handler runs, in this order: host, identity, origin and role, CSRF
//! proof, rate, audit policy, body.
//!
//! It does not know what a route does. Begin at [`authorize`].
//!
//! Every check that needs only the head of a request is made before the first byte of the body is read; the
//! body is read here and nowhere else (`body.rs`). A refused change is in the audit even if no handler
//! understood it: the request carries a mark that says whether its line is written, so an invalid request and
//! a lacking role are recorded here, once each. Refusals are aggregated by client network
//! (`audit/aggregate.rs`).

use std::net::SocketAddr;
use std::sync::Arc;

use axum::body::Body;
use axum::extract::{MatchedPath, Request, State};
use axum::http::header::{self, HeaderMap, HeaderName, HeaderValue};
use axum::http::{Method, StatusCode};
use axum::middleware::Next;
use axum::response::{IntoResponse, Redirect, Response};
use bytes::Bytes;
use percent_encoding::{NON_ALPHANUMERIC, percent_decode_str, utf8_percent_encode};

use super::login::FORM_BYTES_MAX;
use super::{Access, AccessControl, AuthMethod, Principal, tokens};
use crate::coordination::{Actor, ActorOrigin, JobName};
use crate::http::actor::{PeerAddress, TransportSecurity, means_of_agent};
use crate::http::hosts::name_of;
use crate::http::problem::accepts_html;
use crate::http::{AppState, BODY_BYTES_MAX, ClientNetwork, Problem, body};
use crate::service::{ActorContext, AuditOutcome, Role};
use crate::telemetry::traces::TraceParent;

/// The header in which scripts of a page send the CSRF proof.
const PROOF_HEADER: HeaderName = HeaderName::from_static("x-csrf-token");
const SEC_FETCH_SITE: HeaderName = HeaderName::from_static("sec-fetch-site");
/// The field in which forms send the CSRF proof.
const PROOF_FIELD: &str = "csrf";

/// The names of the cookies. Under TLS they have the prefix `__Host-`, which browsers accept only over TLS
/// and from this host.
pub(super) struct Cookies {
    secure: bool,
}

impl Cookies {
    pub fn of(channel: &TransportSecurity) -> Self {
        Self { secure: channel.secure }
    }

    /// Returns the name of the session cookie.
    pub fn session(&self) -> &'static str {
        if self.secure { "__Host-muster" } else { "muster-session" }
    }

    /// Returns the name of the cookie of a browser without a session.
    pub fn visit(&self) -> &'static str {
        if self.secure { "__Host-muster-visit" } else { "muster-visit" }
    }

    /// Returns the name of the cookie that marks a browser as one that has logged in.
    pub fn browser(&self) -> &'static str {
        if self.secure { "__Host-muster-browser" } else { "muster-browser" }
    }

    /// Returns the `Set-Cookie` value of a cookie. `seconds` is its lifetime; `None` ends it with the
    /// browser.
    pub fn set(&self, name: &str, value: &str, seconds: Option<u64>) -> Option<HeaderValue> {
        let secure = if self.secure { "; Secure" } else { "" };
        let age = seconds.map_or_else(String::new, |seconds| format!("; Max-Age={seconds}"));
        format!("{name}={value}; Path=/; HttpOnly; SameSite=Strict{secure}{age}").parse().ok()
    }
}

/// Returns the value of a cookie of a request.
pub(super) fn cookie<'h>(headers: &'h HeaderMap, name: &str) -> Option<&'h str> {
    let all = headers.get_all(header::COOKIE).into_iter().filter_map(|value| value.to_str().ok());
    let mut pairs = all.flat_map(|value| value.split(';')).filter_map(|pair| pair.trim().split_once('='));
    pairs.find(|(found, _)| *found == name).map(|(_, value)| value)
}

/// Returns the value of a field of a form.
pub(super) fn field(form: &[u8], name: &str) -> Option<String> {
    let form = std::str::from_utf8(form).ok()?;
    let value = form.split('&').filter_map(|pair| pair.split_once('=')).find(|(key, _)| *key == name)?.1;
    let value = value.replace('+', " ");
    percent_decode_str(&value).decode_utf8().ok().map(std::borrow::Cow::into_owned)
}

/// The facts about a request that the checks use.
struct RequestFacts {
    source: ClientNetwork,
    access: Access,
    /// The method changes state.
    is_change: bool,
    /// A browser sent the request.
    is_browser: bool,
    cookies: Cookies,
}

/// The state of the authorization middleware.
#[derive(Clone)]
pub struct AccessLayerState {
    /// The state that all handlers share.
    pub site: AppState,
    /// Returns the access that the route of a method and a path requires.
    pub access: fn(&Method, Option<&str>) -> Access,
}

/// Authorizes a request and runs its handler, or answers with the reason of the refusal.
///
/// Every check that needs only the head runs before the first byte of the body is read. The body is read here
/// and nowhere else (`body.rs`): the handler receives it in memory, and its memory stays charged to the
/// budget until the response is ready.
pub async fn authorize(State(gate): State<AccessLayerState>, request: Request, next: Next) -> Response {
    let AccessLayerState { site, access: need } = gate;
    let (head, wire) = request.into_parts();
    // The checks below see only the head.
    let request = Request::from_parts(head, Body::empty());
    let guard = &site.guard;
    let extensions = request.extensions();
    let matched = extensions.get::<MatchedPath>().map(MatchedPath::as_str);
    let channel = extensions.get::<TransportSecurity>().cloned().unwrap_or_default();
    let (method, headers) = (request.method(), request.headers());
    let cookies = Cookies::of(&channel);
    let asked = RequestFacts {
        source: ClientNetwork::of_request(extensions),
        access: need(method, matched),
        is_change: !matches!(*method, Method::GET | Method::HEAD | Method::OPTIONS),
        is_browser: headers.contains_key(header::ORIGIN)
            || headers.contains_key(&SEC_FETCH_SITE)
            || cookie(headers, cookies.session()).is_some()
            || cookie(headers, cookies.visit()).is_some(),
        cookies,
    };
    if let Err(problem) = check_host(guard, &request, &asked) {
        audit_refusal(&site, RefusedRequest::of(&site, &request), &asked, None, &problem.detail);
        return problem.into_response();
    }
    guard.refresh().await;
    let visitor = match identify(guard, &request, &asked, &channel) {
        Ok(visitor) => visitor,
        Err(refused) => return reject_unknown_token(&site, &request, &asked, refused),
    };
    let seen = accepts_html(&request).then(|| format!("/login?next={}", login_target(&request)));
    if let Err(problem) = check_access(&request, &asked, visitor.as_ref()) {
        if visitor.is_none()
            && !asked.is_change
            && let Some(login) = seen
        {
            return Redirect::to(&login).into_response();
        }
        return refuse(&site, &request, &asked, visitor.as_ref(), problem);
    }
    let proof = match check_csrf(guard, &request, &asked, visitor.as_ref()) {
        Ok(proof) => proof,
        Err(problem) => return refuse(&site, &request, &asked, visitor.as_ref(), problem),
    };
    if let Err(problem) = within_rates(guard, &request, &asked, visitor.as_ref()) {
        // Wrong tokens of a client without a principal are in the audit already.
        if visitor.is_some() {
            let attempt = RefusedRequest { is_rate_limited: true, ..RefusedRequest::of(&site, &request) };
            audit_refusal(&site, attempt, &asked, visitor.as_ref(), &problem.detail);
        }
        return too_many_requests(problem);
    }
    if asked.is_change
        && asked.access != Access::Public
        && let Err(why) = site.operations.audit.wait_writable().await
    {
        return refuse(&site, &request, &asked, visitor.as_ref(), Problem::audit_unwritable(&why));
    }
    // No handler reads the body of a request that changes nothing.
    let limit = match (asked.is_change, asked.access) {
        (false, _) => None,
        (true, Access::Public) => Some(FORM_BYTES_MAX),
        (true, Access::Role(_)) => Some(BODY_BYTES_MAX),
    };
    let mut body = (Bytes::new(), None);
    if let Some(limit) = limit {
        body = match body::read(&site.bodies, asked.source, wire, limit).await {
            Ok(body) => body,
            Err(problem) => {
                return close_connection_after(refuse(&site, &request, &asked, visitor.as_ref(), problem));
            }
        };
    }
    let (body, _paid) = body;
    let visit = match proof {
        CsrfCheck::InForm(basis) => match field(&body, PROOF_FIELD) {
            Some(shown) if guard.csrf.verifies(&basis, &shown) => None,
            _ => return refuse(&site, &request, &asked, visitor.as_ref(), Problem::no_proof()),
        },
        CsrfCheck::Satisfied(visit) => visit,
    };
    let attempt = (asked.is_change && visitor.is_some()).then(|| RefusedRequest::of(&site, &request));
    let author = visitor.as_ref().map(|visitor| {
        let parent = TraceParent::of(request.headers());
        ActorContext::new(visitor.actor.clone(), Some(visitor.role), parent)
    });
    let request = request.map(|_| Body::from(body));
    let response = call_handler(request, next, (visitor.clone(), author.clone()), visit, &channel).await;
    // A change that its handler rejected as invalid still belongs in the audit.
    if let (Some(attempt), Some(author)) = (attempt, &author)
        && response.status().is_client_error()
        && !author.is_audited()
    {
        let problem = response.extensions().get::<Problem>().map(|problem| &*problem.detail);
        let detail = problem.or(response.status().canonical_reason()).unwrap_or_default();
        audit_refusal(&site, attempt, &asked, visitor.as_ref(), detail);
    }
    if asked.is_change {
        site.operations.audit.wait_durable().await;
    }
    response
}

/// Runs the handler. Sets the cookie from which the CSRF proof is derived if the browser has none.
async fn call_handler(
    mut request: Request,
    next: Next,
    (visitor, author): (Option<Principal>, Option<ActorContext>),
    visit: Option<(String, Arc<str>)>,
    channel: &TransportSecurity,
) -> Response {
    let set = visit.and_then(|(value, proof)| {
        request.extensions_mut().insert(CsrfProof(proof));
        let cookies = Cookies::of(channel);
        cookies.set(cookies.visit(), &value, None)
    });
    if let Some(visitor) = visitor {
        if !visitor.csrf.is_empty() {
            request.extensions_mut().insert(CsrfProof(Arc::clone(&visitor.csrf)));
        }
        request.extensions_mut().insert(visitor);
    }
    if let Some(author) = author {
        request.extensions_mut().insert(author);
    }
    let mut response = next.run(request).await;
    if let Some(set) = set {
        response.headers_mut().append(header::SET_COOKIE, set);
    }
    response
}

/// The CSRF proof that the forms of the requested page carry.
#[derive(Debug, Clone)]
pub(in crate::http) struct CsrfProof(pub Arc<str>);

/// Returns the host name by which the client reached this server.
fn host(request: &Request) -> Option<&str> {
    let header = || request.headers().get(header::HOST).and_then(|host| host.to_str().ok());
    request.uri().authority().map(axum::http::uri::Authority::as_str).or_else(header)
}

/// Checks the host name by which the client reached this server. An ambiguous name is refused for every
/// request; a name that is not this server's is refused for every request that shows or changes anything.
fn check_host(guard: &AccessControl, request: &Request, asked: &RequestFacts) -> Result<(), Problem> {
    let mut named = request.headers().get_all(header::HOST).into_iter();
    let first = named.next();
    if named.next().is_some() {
        return Err(Problem::bad_host("the request has more than one header host"));
    }
    let text = first.map(|host| host.to_str().unwrap_or_default());
    let authority = request.uri().authority().map(axum::http::uri::Authority::as_str);
    if let Some(found) = [text, authority].into_iter().flatten().find(|found| name_of(found).is_none())
        && !found.is_empty()
    {
        return Err(Problem::bad_host("what the request has for a host is none: write NAME or NAME:PORT"));
    }
    if let (Some(text), Some(authority)) = (text, authority)
        && !text.eq_ignore_ascii_case(authority)
    {
        return Err(Problem::bad_host(
            "the request names one host in its first line and another in its header host",
        ));
    }
    if (asked.is_change || asked.access != Access::Public)
        && !host(request).is_some_and(|host| guard.hosts.allow(host))
    {
        return Err(Problem::wrong_host(host(request).unwrap_or_default()));
    }
    Ok(())
}

/// Checks the rate of changes and of logins. The login itself checks the token.
fn within_rates(
    guard: &AccessControl,
    request: &Request,
    asked: &RequestFacts,
    visitor: Option<&Principal>,
) -> Result<(), Problem> {
    if !asked.is_change {
        return Ok(());
    }
    let now = guard.clock.now();
    if let Some(visitor) = visitor
        && !guard.changes.allow(now, format!("{} {}", visitor.actor.who, asked.source))
    {
        return Err(Problem::too_many_changes());
    }
    if asked.access == Access::Public {
        let attempt =
            guard.attempts.attempt_of(asked.source, cookie(request.headers(), asked.cookies.browser()));
        if !guard.attempts.is_allowed(now, &attempt) {
            return Err(Problem::too_many_logins());
        }
    }
    Ok(())
}

fn login_target(request: &Request) -> String {
    let path = request.uri().path_and_query().map_or("/", axum::http::uri::PathAndQuery::as_str);
    utf8_percent_encode(path, NON_ALPHANUMERIC).to_string()
}

/// Returns the principal of the request; `None` if it shows no credentials.
fn identify(
    guard: &AccessControl,
    request: &Request,
    asked: &RequestFacts,
    channel: &TransportSecurity,
) -> Result<Option<Principal>, Problem> {
    let headers = request.headers();
    let agent = headers.get(header::USER_AGENT).and_then(|agent| agent.to_str().ok()).unwrap_or_default();
    let address = request.extensions().get::<PeerAddress>().map(|peer| peer.0);
    let actor = |who: Arc<str>, means: ActorOrigin| Actor { who, address, means };
    let Some(tokens) = &guard.tokens else {
        let who = match &channel.certificate {
            Some(name) => format!("certificate:{name}").into(),
            None => Actor::ANONYMOUS.into(),
        };
        let visit = cookie(headers, asked.cookies.visit());
        let csrf = visit.map_or_else(|| "".into(), |visit| guard.csrf.proof_for(visit));
        return Ok(Some(Principal {
            actor: actor(who, means_of_agent(agent)),
            role: Role::Admin,
            auth_method: AuthMethod::Open,
            csrf,
        }));
    };
    if let Some(shown) = headers.get(header::AUTHORIZATION) {
        let token = shown.to_str().ok().and_then(|text| {
            let (scheme, token) = text.split_once(' ')?;
            scheme.eq_ignore_ascii_case("bearer").then(|| token.trim())
        });
        let holder = token.and_then(|token| tokens.holder(token)).ok_or_else(Problem::bad_token)?;
        let means =
            if means_of_agent(agent) == ActorOrigin::Cli { ActorOrigin::Cli } else { ActorOrigin::Api };
        let actor = actor(holder.name, means);
        return Ok(Some(Principal {
            actor,
            role: holder.role,
            auth_method: AuthMethod::Token,
            csrf: "".into(),
        }));
    }
    let now = guard.clock.now();
    let session = cookie(headers, asked.cookies.session());
    Ok(session.and_then(|id| {
        let holder = tokens.with_hash(&guard.sessions.token(now, id)?)?;
        let actor = actor(holder.name, ActorOrigin::Page);
        Some(Principal {
            actor,
            role: holder.role,
            auth_method: AuthMethod::Session,
            csrf: guard.csrf.proof_for(id),
        })
    }))
}

/// Checks role, content type and origin, as far as the head of the request tells them.
fn check_access(request: &Request, asked: &RequestFacts, visitor: Option<&Principal>) -> Result<(), Problem> {
    if asked.is_change {
        check_origin(request)?;
    }
    match (asked.access, visitor) {
        (Access::Public, _) => {}
        (Access::Role(_), None) => return Err(Problem::no_token()),
        (Access::Role(needed), Some(visitor)) if visitor.role < needed => {
            return Err(Problem::not_allowed(visitor.role, needed));
        }
        (Access::Role(_), Some(_)) => {}
    }
    // A page of another origin can send a form without a preflight request, but not JSON.
    let simple = *request.method() == Method::POST && asked.is_change && !asked.is_browser;
    if simple && asked.access != Access::Public && !has_content_type(request, "application/json") {
        return Err(Problem::not_json());
    }
    Ok(())
}

fn has_content_type(request: &Request, kind: &str) -> bool {
    let found = request.headers().get(header::CONTENT_TYPE).and_then(|kind| kind.to_str().ok());
    found.is_some_and(|found| {
        found.split(';').next().is_some_and(|found| found.trim().eq_ignore_ascii_case(kind))
    })
}

/// Checks the origin: a browser states it with every change, and only pages of this server may ask for one.
fn check_origin(request: &Request) -> Result<(), Problem> {
    let headers = request.headers();
    if let Some(origin) = headers.get(header::ORIGIN) {
        // The scheme is not compared, because a proxy before this server may terminate TLS.
        let origin = origin.to_str().unwrap_or_default();
        let authority = origin.split_once("://").map(|(_, authority)| authority);
        if !authority.is_some_and(|found| host(request).is_some_and(|host| host.eq_ignore_ascii_case(found)))
        {
            return Err(Problem::foreign_origin(origin));
        }
    }
    match headers.get(&SEC_FETCH_SITE).map(HeaderValue::as_bytes) {
        None | Some(b"same-origin" | b"none") => Ok(()),
        Some(_) => Err(Problem::foreign_origin("another site")),
    }
}

/// The result of the CSRF check on the head of a request.
enum CsrfCheck {
    /// The proof holds, or none is required. A browser without a cookie gets one with this value, and the
    /// proof that is derived from it.
    Satisfied(Option<(String, Arc<str>)>),
    /// The proof must be in the form and match this cookie.
    InForm(String),
}

/// Requires a proof of a browser that asks for a change. A browser that asks for a page and has no cookie
/// gets one.
fn check_csrf(
    guard: &AccessControl,
    request: &Request,
    asked: &RequestFacts,
    visitor: Option<&Principal>,
) -> Result<CsrfCheck, Problem> {
    let how = visitor.map(|visitor| visitor.auth_method);
    let by_cookie = how == Some(AuthMethod::Session);
    let name = if by_cookie { asked.cookies.session() } else { asked.cookies.visit() };
    let basis = cookie(request.headers(), name).map(str::to_owned);
    if !asked.is_change {
        if by_cookie || how == Some(AuthMethod::Token) || !accepts_html(request) {
            return Ok(CsrfCheck::Satisfied(None));
        }
        let known = basis.unwrap_or_else(tokens::random_secret);
        let proof = guard.csrf.proof_for(&known);
        return Ok(CsrfCheck::Satisfied(Some((known, proof))));
    }
    let wanted =
        by_cookie || asked.access == Access::Public || (how == Some(AuthMethod::Open) && asked.is_browser);
    if !wanted {
        return Ok(CsrfCheck::Satisfied(None));
    }
    let basis = basis.ok_or_else(Problem::no_proof)?;
    if let Some(shown) = request.headers().get(&PROOF_HEADER) {
        let holds = shown.to_str().is_ok_and(|shown| guard.csrf.verifies(&basis, shown));
        return if holds { Ok(CsrfCheck::Satisfied(None)) } else { Err(Problem::no_proof()) };
    }
    if has_content_type(request, "application/x-www-form-urlencoded") {
        return Ok(CsrfCheck::InForm(basis));
    }
    Err(Problem::no_proof())
}

/// Answers a request with an unknown token: audits it, counts it against the limits, and refuses it.
fn reject_unknown_token(
    site: &AppState,
    request: &Request,
    asked: &RequestFacts,
    problem: Problem,
) -> Response {
    let guard = &site.guard;
    audit_refusal(site, RefusedRequest::of(site, request), asked, None, &problem.detail);
    let shown = request.headers().get(header::AUTHORIZATION).map_or(&b""[..], HeaderValue::as_bytes);
    let token = tokens::hash(&String::from_utf8_lossy(shown));
    if !guard.attempts.failed_in_header(guard.clock.now(), asked.source, &token) {
        return too_many_requests(Problem::too_many_logins());
    }
    challenge(problem)
}

/// Marks a response as the last one of its connection: unread bytes of the body stand before the next
/// request.
fn close_connection_after(mut response: Response) -> Response {
    response.headers_mut().insert(header::CONNECTION, HeaderValue::from_static("close"));
    response
}

fn challenge(problem: Problem) -> Response {
    let mut response = problem.into_response();
    if response.status() == StatusCode::UNAUTHORIZED {
        let scheme = HeaderValue::from_static("Bearer realm=\"muster\"");
        response.headers_mut().insert(header::WWW_AUTHENTICATE, scheme);
    }
    response
}

/// Turns a problem into a response with the header `retry-after`.
pub(super) fn too_many_requests(problem: Problem) -> Response {
    let mut response = problem.into_response();
    response.headers_mut().insert(header::RETRY_AFTER, HeaderValue::from_static("10"));
    response
}

/// A refused request as the audit describes it.
struct RefusedRequest {
    /// The job that the path names, if it exists: a client must not fill the audit with names of jobs that do
    /// not exist.
    job: Option<JobName>,
    act: &'static str,
    subject: String,
    peer: Option<SocketAddr>,
    agent: ActorOrigin,
    /// The refusal is for the rate. More will follow, so it is aggregated from the start.
    is_rate_limited: bool,
}

impl RefusedRequest {
    fn of(site: &AppState, request: &Request) -> Self {
        let mut subject = crate::text::one_line(request.uri().path()).into_owned();
        subject.truncate(subject.floor_char_boundary(200));
        let act = match *request.method() {
            Method::GET | Method::HEAD | Method::OPTIONS => "look",
            Method::DELETE => "delete",
            _ => "change",
        };
        let agent = request.headers().get(header::USER_AGENT).and_then(|agent| agent.to_str().ok());
        let peer = request.extensions().get::<PeerAddress>().map(|peer| peer.0);
        let job = job_of(request)
            .filter(|job| site.engine.read_under_lock(|core| core.job_named(job.as_str()).is_some()));
        Self {
            job,
            act,
            subject,
            peer,
            agent: means_of_agent(agent.unwrap_or_default()),
            is_rate_limited: false,
        }
    }
}

/// Returns the job name in the path, if the route has one.
fn job_of(request: &Request) -> Option<JobName> {
    let route = request.extensions().get::<MatchedPath>()?.as_str();
    let mut pairs = route.split('/').zip(request.uri().path().split('/'));
    let (_, name) = pairs.find(|(place, _)| *place == "{job}")?;
    percent_decode_str(name).decode_utf8().ok()?.parse().ok()
}

/// Refuses a request and audits the refusal.
fn refuse(
    site: &AppState,
    request: &Request,
    asked: &RequestFacts,
    visitor: Option<&Principal>,
    problem: Problem,
) -> Response {
    audit_refusal(site, RefusedRequest::of(site, request), asked, visitor, &problem.detail);
    challenge(problem)
}

/// Audits a refusal. A known actor gets one line each, up to a rate. Refusals of unknown clients, refusals
/// beyond that rate and refusals for the rate of requests are aggregated by client network and job.
fn audit_refusal(
    site: &AppState,
    attempt: RefusedRequest,
    asked: &RequestFacts,
    visitor: Option<&Principal>,
    detail: &str,
) {
    let guard = &site.guard;
    let now = guard.clock.now();
    let source = asked.source.to_string();
    let author = match visitor {
        Some(visitor) => ActorContext::new(visitor.actor.clone(), Some(visitor.role), None),
        None => ActorContext::new(
            Actor { who: Actor::ANONYMOUS.into(), address: attempt.peer, means: attempt.agent },
            None,
            None,
        ),
    };
    let RefusedRequest { job, act, subject, is_rate_limited: often, .. } = attempt;
    // A line is about one job, so that a query by job finds every refusal.
    let gathered = format!(
        "{} {source} {} {often}",
        visitor.map_or("", |visitor| &visitor.actor.who),
        job.as_ref().map_or("", JobName::as_str)
    );
    let deed = author.audit_entry(job, act, subject, None);
    if visitor.is_some() && !often && guard.refusals.allow(now, source) {
        site.operations.audit.record(now, deed, AuditOutcome::Refused, detail.to_owned());
    } else {
        site.operations.audit.record_aggregated(guard.clock, gathered, deed, detail.to_owned());
    }
}
