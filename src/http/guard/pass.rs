//! Authorizes each request before its handler runs, in this order: host, identity, origin and role, CSRF proof,
//! rate, audit policy, body.
//!
//! It does not know what a route does. Begin at [`pass`].
//!
//! Everything that the head of a request tells is checked before the first byte of the body is read; the body is
//! read here and nowhere else (`body.rs`). A change that was asked for is in the audit even if no handler
//! understood it: the request carries a mark that its line is written, so nonsense and a lacking role are recorded
//! in one place, once each. A refusal is aggregated by client network (`audit/gathered.rs`).

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
use super::{Guard, How, Need, Role, Visitor, tokens};
use crate::coordination::{Actor, JobName, Means};
use crate::http::actor::{Author, Channel, Peer, means};
use crate::http::hosts::name_of;
use crate::http::problem::wants_page;
use crate::http::{AuditOutcome, BODY_BYTES_MAX, Problem, Site, Source, body};
use crate::telemetry::traces::Parent;

/// The header in which the scripts of a page show their proof.
const PROOF_HEADER: HeaderName = HeaderName::from_static("x-csrf-token");
const SEC_FETCH_SITE: HeaderName = HeaderName::from_static("sec-fetch-site");
/// The field in which forms show it.
const PROOF_FIELD: &str = "csrf";

/// The cookies. Under TLS their names promise that they came by TLS and from this very host.
pub(super) struct Cookies {
    secure: bool,
}

impl Cookies {
    pub fn of(channel: &Channel) -> Self {
        Self { secure: channel.secure }
    }

    /// The name of the cookie of a login.
    pub fn session(&self) -> &'static str {
        if self.secure { "__Host-muster" } else { "muster-session" }
    }

    /// The name of the cookie of a browser that has not logged in.
    pub fn visit(&self) -> &'static str {
        if self.secure { "__Host-muster-visit" } else { "muster-visit" }
    }

    /// The name of the cookie of a browser that has logged in before.
    pub fn browser(&self) -> &'static str {
        if self.secure { "__Host-muster-browser" } else { "muster-browser" }
    }

    /// What sets one; `seconds` is how long it holds, `None`: until the browser ends.
    pub fn set(&self, name: &str, value: &str, seconds: Option<u64>) -> Option<HeaderValue> {
        let secure = if self.secure { "; Secure" } else { "" };
        let age = seconds.map_or_else(String::new, |seconds| format!("; Max-Age={seconds}"));
        format!("{name}={value}; Path=/; HttpOnly; SameSite=Strict{secure}{age}").parse().ok()
    }
}

/// A cookie of a request.
pub(super) fn cookie<'h>(headers: &'h HeaderMap, name: &str) -> Option<&'h str> {
    let all = headers.get_all(header::COOKIE).into_iter().filter_map(|value| value.to_str().ok());
    let mut pairs = all.flat_map(|value| value.split(';')).filter_map(|pair| pair.trim().split_once('='));
    pairs.find(|(found, _)| *found == name).map(|(_, value)| value)
}

/// A field of a form.
pub(super) fn field(form: &[u8], name: &str) -> Option<String> {
    let form = std::str::from_utf8(form).ok()?;
    let value = form.split('&').filter_map(|pair| pair.split_once('=')).find(|(key, _)| *key == name)?.1;
    let value = value.replace('+', " ");
    percent_decode_str(&value).decode_utf8().ok().map(std::borrow::Cow::into_owned)
}

/// What is known of a request before it has passed.
struct Asked {
    source: Source,
    need: Need,
    /// It asks for a change.
    changes: bool,
    /// A browser sends it.
    browser: bool,
    cookies: Cookies,
}

/// What the guard needs to know.
#[derive(Clone)]
pub struct Gate {
    /// What is guarded.
    pub site: Site,
    /// What the route of a method and a path asks of its callers.
    pub need: fn(&Method, Option<&str>) -> Need,
}

/// Lets a request pass, or says why not.
///
/// Everything that the head of a request tells is checked before the first byte of its body is read. The body is read here and
/// nowhere else (`body.rs`): a handler gets one that is in memory, and paid for until the answer is there.
pub async fn pass(State(gate): State<Gate>, request: Request, next: Next) -> Response {
    let Gate { site, need } = gate;
    let (head, wire) = request.into_parts();
    // What follows sees the head alone.
    let request = Request::from_parts(head, Body::empty());
    let guard = &site.guard;
    let extensions = request.extensions();
    let matched = extensions.get::<MatchedPath>().map(MatchedPath::as_str);
    let channel = extensions.get::<Channel>().cloned().unwrap_or_default();
    let (method, headers) = (request.method(), request.headers());
    let cookies = Cookies::of(&channel);
    let asked = Asked {
        source: Source::of_request(extensions),
        need: need(method, matched),
        changes: !matches!(*method, Method::GET | Method::HEAD | Method::OPTIONS),
        browser: headers.contains_key(header::ORIGIN)
            || headers.contains_key(&SEC_FETCH_SITE)
            || cookie(headers, cookies.session()).is_some()
            || cookie(headers, cookies.visit()).is_some(),
        cookies,
    };
    if let Err(problem) = check_host(guard, &request, &asked) {
        write_down(&site, Attempt::of(&site, &request), &asked, None, &problem.detail);
        return problem.into_response();
    }
    guard.refresh().await;
    let visitor = match identify(guard, &request, &asked, &channel) {
        Ok(visitor) => visitor,
        Err(refused) => return unknown(&site, &request, &asked, refused),
    };
    let seen = wants_page(&request).then(|| format!("/login?next={}", next_of(&request)));
    if let Err(problem) = judge(&request, &asked, visitor.as_ref()) {
        if visitor.is_none()
            && !asked.changes
            && let Some(login) = seen
        {
            return Redirect::to(&login).into_response();
        }
        return refuse(&site, &request, &asked, visitor.as_ref(), problem);
    }
    let proof = match prove(guard, &request, &asked, visitor.as_ref()) {
        Ok(proof) => proof,
        Err(problem) => return refuse(&site, &request, &asked, visitor.as_ref(), problem),
    };
    if let Err(problem) = within_rates(guard, &request, &asked, visitor.as_ref()) {
        // The wrong tokens of a stranger are in the audit already.
        if visitor.is_some() {
            let attempt = Attempt { often: true, ..Attempt::of(&site, &request) };
            write_down(&site, attempt, &asked, visitor.as_ref(), &problem.detail);
        }
        return late(problem);
    }
    if asked.changes
        && asked.need != Need::Nothing
        && let Err(why) = site.audit.ready().await
    {
        return refuse(&site, &request, &asked, visitor.as_ref(), Problem::audit_unwritable(&why));
    }
    // A request that changes nothing has no body that anybody reads.
    let limit = match (asked.changes, asked.need) {
        (false, _) => None,
        (true, Need::Nothing) => Some(FORM_BYTES_MAX),
        (true, Need::Role(_)) => Some(BODY_BYTES_MAX),
    };
    let mut body = (Bytes::new(), None);
    if let Some(limit) = limit {
        body = match body::read(&site.bodies, asked.source, wire, limit).await {
            Ok(body) => body,
            Err(problem) => {
                return last(refuse(&site, &request, &asked, visitor.as_ref(), problem));
            }
        };
    }
    let (body, _paid) = body;
    let visit = match proof {
        Proven::InForm(basis) => match field(&body, PROOF_FIELD) {
            Some(shown) if guard.csrf.holds(&basis, &shown) => None,
            _ => return refuse(&site, &request, &asked, visitor.as_ref(), Problem::no_proof()),
        },
        Proven::Already(visit) => visit,
    };
    let attempt = (asked.changes && visitor.is_some()).then(|| Attempt::of(&site, &request));
    let author = visitor.as_ref().map(|visitor| {
        let parent = Parent::of(request.headers());
        Author::new(visitor.actor.clone(), Some(visitor.role), parent)
    });
    let request = request.map(|_| Body::from(body));
    let response = enter(request, next, (visitor.clone(), author.clone()), visit, &channel).await;
    // A change that its handler did not get to, or could not make sense of, was asked for all the same.
    if let (Some(attempt), Some(author)) = (attempt, &author)
        && response.status().is_client_error()
        && !author.is_written()
    {
        let problem = response.extensions().get::<Problem>().map(|problem| &*problem.detail);
        let detail = problem.or(response.status().canonical_reason()).unwrap_or_default();
        write_down(&site, attempt, &asked, visitor.as_ref(), detail);
    }
    if asked.changes {
        site.audit.flushed().await;
    }
    response
}

/// Lets it in, and sees to it that a browser has a cookie from which its proof follows.
async fn enter(
    mut request: Request,
    next: Next,
    (visitor, author): (Option<Visitor>, Option<Author>),
    visit: Option<(String, Arc<str>)>,
    channel: &Channel,
) -> Response {
    let set = visit.and_then(|(value, proof)| {
        request.extensions_mut().insert(Proof(proof));
        let cookies = Cookies::of(channel);
        cookies.set(cookies.visit(), &value, None)
    });
    if let Some(visitor) = visitor {
        if !visitor.csrf.is_empty() {
            request.extensions_mut().insert(Proof(Arc::clone(&visitor.csrf)));
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

/// What the forms of the page that is asked for must carry.
#[derive(Debug, Clone)]
pub(in crate::http) struct Proof(pub Arc<str>);

/// By what name the client has reached this server.
fn host(request: &Request) -> Option<&str> {
    let header = || request.headers().get(header::HOST).and_then(|host| host.to_str().ok());
    request.uri().authority().map(axum::http::uri::Authority::as_str).or_else(header)
}

/// Checks by what name the client has reached this server. A name that could be read in two ways is refused for every request, one
/// that is not this server's for all that show or change anything.
fn check_host(guard: &Guard, request: &Request, asked: &Asked) -> Result<(), Problem> {
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
    if (asked.changes || asked.need != Need::Nothing)
        && !host(request).is_some_and(|host| guard.hosts.allow(host))
    {
        return Err(Problem::wrong_host(host(request).unwrap_or_default()));
    }
    Ok(())
}

/// Whether a change, or a login, is within its rates. Tokens are looked at by the login itself.
fn within_rates(
    guard: &Guard,
    request: &Request,
    asked: &Asked,
    visitor: Option<&Visitor>,
) -> Result<(), Problem> {
    if !asked.changes {
        return Ok(());
    }
    let now = guard.clock.now();
    if let Some(visitor) = visitor
        && !guard.changes.allow(now, format!("{} {}", visitor.actor.who, asked.source))
    {
        return Err(Problem::too_many_changes());
    }
    if asked.need == Need::Nothing {
        let attempt = guard.attempts.by(asked.source, cookie(request.headers(), asked.cookies.browser()));
        if !guard.attempts.may_try(now, &attempt) {
            return Err(Problem::too_many_logins());
        }
    }
    Ok(())
}

fn next_of(request: &Request) -> String {
    let path = request.uri().path_and_query().map_or("/", axum::http::uri::PathAndQuery::as_str);
    utf8_percent_encode(path, NON_ALPHANUMERIC).to_string()
}

/// Who makes the request; `None` for a stranger.
fn identify(
    guard: &Guard,
    request: &Request,
    asked: &Asked,
    channel: &Channel,
) -> Result<Option<Visitor>, Problem> {
    let headers = request.headers();
    let agent = headers.get(header::USER_AGENT).and_then(|agent| agent.to_str().ok()).unwrap_or_default();
    let address = request.extensions().get::<Peer>().map(|peer| peer.0);
    let actor = |who: Arc<str>, means: Means| Actor { who, address, means };
    let Some(tokens) = &guard.tokens else {
        let who = match &channel.certificate {
            Some(name) => format!("certificate:{name}").into(),
            None => Actor::ANONYMOUS.into(),
        };
        let visit = cookie(headers, asked.cookies.visit());
        let csrf = visit.map_or_else(|| "".into(), |visit| guard.csrf.of(visit));
        return Ok(Some(Visitor {
            actor: actor(who, means(agent)),
            role: Role::Admin,
            how: How::Open,
            csrf,
        }));
    };
    if let Some(shown) = headers.get(header::AUTHORIZATION) {
        let token = shown.to_str().ok().and_then(|text| {
            let (scheme, token) = text.split_once(' ')?;
            scheme.eq_ignore_ascii_case("bearer").then(|| token.trim())
        });
        let holder = token.and_then(|token| tokens.holder(token)).ok_or_else(Problem::bad_token)?;
        let means = if means(agent) == Means::Cli { Means::Cli } else { Means::Api };
        let actor = actor(holder.name, means);
        return Ok(Some(Visitor { actor, role: holder.role, how: How::Token, csrf: "".into() }));
    }
    let now = guard.clock.now();
    let session = cookie(headers, asked.cookies.session());
    Ok(session.and_then(|id| {
        let holder = tokens.with_hash(&guard.sessions.token(now, id)?)?;
        let actor = actor(holder.name, Means::Page);
        Some(Visitor { actor, role: holder.role, how: How::Session, csrf: guard.csrf.of(id) })
    }))
}

/// Whether the request may be made, by all that its head says.
fn judge(request: &Request, asked: &Asked, visitor: Option<&Visitor>) -> Result<(), Problem> {
    if asked.changes {
        own_origin(request)?;
    }
    match (asked.need, visitor) {
        (Need::Nothing, _) => {}
        (Need::Role(_), None) => return Err(Problem::no_token()),
        (Need::Role(needed), Some(visitor)) if visitor.role < needed => {
            return Err(Problem::not_allowed(visitor.role, needed));
        }
        (Need::Role(_), Some(_)) => {}
    }
    // What a page of another origin may send without being asked is a form; JSON it may not.
    let simple = *request.method() == Method::POST && asked.changes && !asked.browser;
    if simple && asked.need != Need::Nothing && !is(request, "application/json") {
        return Err(Problem::not_json());
    }
    Ok(())
}

fn is(request: &Request, kind: &str) -> bool {
    let found = request.headers().get(header::CONTENT_TYPE).and_then(|kind| kind.to_str().ok());
    found.is_some_and(|found| {
        found.split(';').next().is_some_and(|found| found.trim().eq_ignore_ascii_case(kind))
    })
}

/// A browser says of every change for which page it asks; only pages of this server may.
fn own_origin(request: &Request) -> Result<(), Problem> {
    let headers = request.headers();
    if let Some(origin) = headers.get(header::ORIGIN) {
        // The scheme is not compared: something before this server may speak TLS for it.
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

/// What the head of a request tells of its proof.
enum Proven {
    /// It holds, or none is wanted. A browser that has no cookie yet gets one, with this value and the proof that follows from it.
    Already(Option<(String, Arc<str>)>),
    /// It must stand in the form, and follow from this cookie.
    InForm(String),
}

/// Wants a proof of a browser that asks for a change. One that asks for a page and has no cookie yet gets one.
fn prove(
    guard: &Guard,
    request: &Request,
    asked: &Asked,
    visitor: Option<&Visitor>,
) -> Result<Proven, Problem> {
    let how = visitor.map(|visitor| visitor.how);
    let by_cookie = how == Some(How::Session);
    let name = if by_cookie { asked.cookies.session() } else { asked.cookies.visit() };
    let basis = cookie(request.headers(), name).map(str::to_owned);
    if !asked.changes {
        if by_cookie || how == Some(How::Token) || !wants_page(request) {
            return Ok(Proven::Already(None));
        }
        let known = basis.unwrap_or_else(tokens::secret);
        let proof = guard.csrf.of(&known);
        return Ok(Proven::Already(Some((known, proof))));
    }
    let wanted = by_cookie || asked.need == Need::Nothing || (how == Some(How::Open) && asked.browser);
    if !wanted {
        return Ok(Proven::Already(None));
    }
    let basis = basis.ok_or_else(Problem::no_proof)?;
    if let Some(shown) = request.headers().get(&PROOF_HEADER) {
        let holds = shown.to_str().is_ok_and(|shown| guard.csrf.holds(&basis, shown));
        return if holds { Ok(Proven::Already(None)) } else { Err(Problem::no_proof()) };
    }
    if is(request, "application/x-www-form-urlencoded") {
        return Ok(Proven::InForm(basis));
    }
    Err(Problem::no_proof())
}

/// A token that is none.
fn unknown(site: &Site, request: &Request, asked: &Asked, problem: Problem) -> Response {
    let guard = &site.guard;
    write_down(site, Attempt::of(site, request), asked, None, &problem.detail);
    let shown = request.headers().get(header::AUTHORIZATION).map_or(&b""[..], HeaderValue::as_bytes);
    let token = tokens::hash(&String::from_utf8_lossy(shown));
    if !guard.attempts.failed_in_header(guard.clock.now(), asked.source, &token) {
        return late(Problem::too_many_logins());
    }
    challenge(problem)
}

/// Makes an answer the last one of its connection: the rest of a body that was not read is in the way of the next request.
fn last(mut response: Response) -> Response {
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

/// Answers with "too often".
pub(super) fn late(problem: Problem) -> Response {
    let mut response = problem.into_response();
    response.headers_mut().insert(header::RETRY_AFTER, HeaderValue::from_static("10"));
    response
}

/// What a request wants, in words for the audit.
struct Attempt {
    /// The job that the path names, if there is one of that name: whoever invents names invents no jobs.
    job: Option<JobName>,
    act: &'static str,
    subject: String,
    peer: Option<SocketAddr>,
    agent: Means,
    /// It comes too often: there will be more of it, so that it is gathered from the start.
    often: bool,
}

impl Attempt {
    fn of(site: &Site, request: &Request) -> Self {
        let mut subject = crate::text::one_line(request.uri().path()).into_owned();
        subject.truncate(subject.floor_char_boundary(200));
        let act = match *request.method() {
            Method::GET | Method::HEAD | Method::OPTIONS => "look",
            Method::DELETE => "delete",
            _ => "change",
        };
        let agent = request.headers().get(header::USER_AGENT).and_then(|agent| agent.to_str().ok());
        let peer = request.extensions().get::<Peer>().map(|peer| peer.0);
        let job =
            job_of(request).filter(|job| site.engine.look_up(|core| core.job_named(job.as_str()).is_some()));
        Self { job, act, subject, peer, agent: means(agent.unwrap_or_default()), often: false }
    }
}

/// What stands in the path where its route has a job.
fn job_of(request: &Request) -> Option<JobName> {
    let route = request.extensions().get::<MatchedPath>()?.as_str();
    let mut pairs = route.split('/').zip(request.uri().path().split('/'));
    let (_, name) = pairs.find(|(place, _)| *place == "{job}")?;
    percent_decode_str(name).decode_utf8().ok()?.parse().ok()
}

/// Says no, and writes down that somebody was refused.
fn refuse(
    site: &Site,
    request: &Request,
    asked: &Asked,
    visitor: Option<&Visitor>,
    problem: Problem,
) -> Response {
    write_down(site, Attempt::of(site, request), asked, visitor, &problem.detail);
    challenge(problem)
}

/// Writes down that somebody was refused. Those who are known have a line each time, up to a rate; strangers, what is
/// beyond the rate and what comes too often are gathered, by where they come from and the job that they mean.
fn write_down(site: &Site, attempt: Attempt, asked: &Asked, visitor: Option<&Visitor>, detail: &str) {
    let guard = &site.guard;
    let now = guard.clock.now();
    let source = asked.source.to_string();
    let author = match visitor {
        Some(visitor) => Author::new(visitor.actor.clone(), Some(visitor.role), None),
        None => Author::new(
            Actor { who: Actor::ANONYMOUS.into(), address: attempt.peer, means: attempt.agent },
            None,
            None,
        ),
    };
    let Attempt { job, act, subject, often, .. } = attempt;
    // A line is about one job, so that whoever asks for the acts upon a job is told of all of them.
    let gathered = format!(
        "{} {source} {} {often}",
        visitor.map_or("", |visitor| &visitor.actor.who),
        job.as_ref().map_or("", JobName::as_str)
    );
    let deed = author.deed(job, act, subject, None);
    if visitor.is_some() && !often && guard.refusals.allow(now, source) {
        site.audit.record(now, deed, AuditOutcome::Refused, detail.to_owned());
    } else {
        site.audit.gather(guard.clock, gathered, deed, detail.to_owned());
    }
}
