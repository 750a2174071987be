//! Authorizes each request before its handler runs. The checks have this order: host, identity, origin and role,
//! CSRF proof, rate, audit policy, body.
//!
//! `refusals.rs` answers and audits refusals. Begin at [`authorize_and_call_handler`], then
//! [`RequestAuthorizer::check_head`].
//!
//! Every check that needs only the head of a request is made before the first byte of the body is read. The CSRF
//! proof of a form is in the body, so it is checked after the body is read. Only this module reads bodies
//! (`body.rs`). The handler receives the body in memory. This memory stays charged to the budget until the response
//! is ready.

use std::sync::Arc;

use axum::body::Body;
use axum::extract::{Request, State};
use axum::http::header::{self, HeaderName, HeaderValue};
use axum::http::uri::Authority;
use axum::http::{HeaderMap, Method};
use axum::middleware::Next;
use axum::response::Response;
use bytes::Bytes;

use super::cookies::cookie_value;
use super::csrf::CsrfProof;
use super::refusals::RefusedRequest;
use super::request_authorizer::{RequestAuthorizer, SEC_FETCH_SITE};
use super::{AuthMethod, Principal, RequiredAccess, tokens};
use crate::coordination::{Actor, ActorOrigin};
use crate::http::allowed_hosts::host_without_port;
use crate::http::body::{self, BODY_BYTES_MAX, BodyPermit, form_field_value};
use crate::http::problem::asks_for_html_page;
use crate::http::request_client::actor_origin_from_user_agent;
use crate::http::route_access_table::RouteAccessTable;
use crate::http::{AppState, Problem};
use crate::service::{AccessRole, ActorContext};
use crate::telemetry::traces::TraceParent;

/// The maximum length of a login form, in bytes.
const FORM_BYTES_MAX: usize = 8 << 10;
const FORM_CONTENT_TYPE: &str = "application/x-www-form-urlencoded";
/// The header in which scripts of a page send the CSRF proof.
const PROOF_HEADER: HeaderName = HeaderName::from_static("x-csrf-token");
/// The field in which forms send the CSRF proof.
const PROOF_FIELD: &str = "csrf";

/// The state of the authorization middleware.
#[derive(Clone)]
pub struct AccessLayerState {
    /// The state that all handlers share.
    pub site: AppState,
    /// The access that each route requires.
    pub routes: Arc<RouteAccessTable>,
}

/// Authorizes a request and runs its handler, or answers with the reason of the refusal.
pub async fn authorize_and_call_handler(
    State(layer): State<AccessLayerState>,
    request: Request,
    next: Next,
) -> Response {
    let (head, wire) = request.into_parts();
    // The checks of the head cannot reach the body.
    let mut request = RequestAuthorizer::new(layer.site, &layer.routes, head);
    match request.authorize_and_read_body(wire).await {
        Ok(admitted) => request.call_handler_and_finish_audit(admitted, next).await,
        Err(refusal) => *refusal,
    }
}

/// The result of a check: the answer to a refused request is its error.
type AuthorizationResult<T> = Result<T, Box<Response>>;

/// The parts of an admitted request for its handler.
struct AdmittedRequest {
    body: Bytes,
    /// The memory of the body.
    permit: Option<BodyPermit>,
    /// The cookie and the CSRF proof of a browser that had none.
    visit: Option<NewVisitorCookieAndProof>,
}

/// The value of a cookie that a browser gets, and the CSRF proof that is derived from it.
type NewVisitorCookieAndProof = (String, Arc<str>);

/// The result of the CSRF check on the head of a request.
enum CsrfCheckOutcome {
    /// The proof holds, or none is required.
    Satisfied(Option<NewVisitorCookieAndProof>),
    /// The proof must be in the form and match this cookie.
    InForm(String),
}

impl RequestAuthorizer {
    /// Checks the head, reads the body, and checks the proof in it.
    async fn authorize_and_read_body(&mut self, wire: Body) -> AuthorizationResult<AdmittedRequest> {
        let proof = self.check_head().await?;
        let (body, permit) = self.read_body(wire).await?;
        let visit = self.check_form_csrf_proof(proof, &body)?;
        Ok(AdmittedRequest { body, permit, visit })
    }

    /// Makes every check that needs only the head.
    async fn check_head(&mut self) -> AuthorizationResult<CsrfCheckOutcome> {
        self.check_host().map_err(|problem| self.refuse(problem))?;
        self.site.guard.reload_changed_tokens().await;
        self.visitor = self.identify_principal().map_err(|problem| self.refuse_unknown_token(problem))?;
        self.check_role_origin_and_content_type()
            .map_err(|problem| self.refuse_or_redirect_to_login(problem))?;
        let proof = self.check_csrf().map_err(|problem| self.refuse(problem))?;
        self.check_change_and_login_rates().map_err(|problem| self.refuse_above_rate_limit(problem))?;
        self.check_audit_writable().await.map_err(|problem| self.refuse(problem))?;
        Ok(proof)
    }

    /// Reads the body. No handler reads the body of a request that changes nothing.
    async fn read_body(&self, wire: Body) -> AuthorizationResult<(Bytes, Option<BodyPermit>)> {
        let limit = match (self.is_change, self.access) {
            (false, _) => return Ok((Bytes::new(), None)),
            (true, RequiredAccess::Public) => FORM_BYTES_MAX,
            (true, RequiredAccess::Role(_)) => BODY_BYTES_MAX,
        };
        let read = body::read_body(&self.site.bodies, self.source, wire, limit).await;
        read.map_err(|problem| self.refuse_and_close_connection(problem))
    }

    /// Checks the CSRF proof in the form, if it must be there.
    fn check_form_csrf_proof(
        &self,
        proof: CsrfCheckOutcome,
        body: &[u8],
    ) -> AuthorizationResult<Option<NewVisitorCookieAndProof>> {
        match proof {
            CsrfCheckOutcome::Satisfied(visit) => Ok(visit),
            CsrfCheckOutcome::InForm(basis) => match form_field_value(body, PROOF_FIELD) {
                Some(shown) if self.access_control().csrf.verifies_proof(&basis, &shown) => Ok(None),
                _ => Err(self.refuse(Problem::missing_csrf_proof())),
            },
        }
    }

    /// Runs the handler, and waits for the audit of a change.
    async fn call_handler_and_finish_audit(mut self, admitted: AdmittedRequest, next: Next) -> Response {
        let is_audited = self.is_change && !self.is_report;
        let attempt = (is_audited && self.visitor.is_some()).then(|| RefusedRequest::from_request(&self));
        let author = self.visitor.as_ref().map(|visitor| {
            let parent = TraceParent::from_headers(&self.head.headers);
            ActorContext::new(visitor.actor.clone(), Some(visitor.role), parent)
        });
        let AdmittedRequest { body, permit: _held, visit } = admitted;
        // The handler gets the head; of a known author the audit needs no more of it.
        let head = std::mem::replace(&mut self.head, Request::new(()).into_parts().0);
        let request = Request::from_parts(head, Body::from(body));
        let mut response =
            next.run(self.attach_author_to_request(request, author.clone(), visit.as_ref())).await;
        if let Some((value, _)) = visit
            && let Some(set) =
                self.cookies.set_cookie_header(self.cookies.visitor_cookie_name(), &value, None)
        {
            response.headers_mut().append(header::SET_COOKIE, set);
        }
        // A change that its handler rejected as invalid still belongs in the audit.
        if let (Some(attempt), Some(author)) = (attempt, &author)
            && response.status().is_client_error()
            && !author.is_audited()
        {
            let problem = response.extensions().get::<Problem>().map(|problem| &*problem.detail);
            let detail = problem.or(response.status().canonical_reason()).unwrap_or_default();
            self.audit_refusal(attempt, detail);
        }
        if is_audited {
            self.site.operations.audit.wait_until_lines_durable().await;
        }
        response
    }

    /// Adds to a request what the handler may know of its author.
    fn attach_author_to_request(
        &self,
        mut request: Request,
        author: Option<ActorContext>,
        visit: Option<&NewVisitorCookieAndProof>,
    ) -> Request {
        let extensions = request.extensions_mut();
        if let Some((_, proof)) = visit {
            extensions.insert(CsrfProof(Arc::clone(proof)));
        }
        if let Some(visitor) = &self.visitor {
            if !visitor.csrf.is_empty() {
                extensions.insert(CsrfProof(Arc::clone(&visitor.csrf)));
            }
            extensions.insert(visitor.clone());
        }
        if let Some(author) = author {
            extensions.insert(author);
        }
        request
    }

    /// Returns the host name by which the client reached this server.
    fn request_host(&self) -> Option<&str> {
        let header = || self.head.headers.get(header::HOST).and_then(|host| host.to_str().ok());
        self.head.uri.authority().map(Authority::as_str).or_else(header)
    }

    /// Checks the host name by which the client reached this server. An ambiguous name is refused for every
    /// request; a name that is not this server's is refused for every request that shows or changes anything.
    fn check_host(&self) -> Result<(), Problem> {
        let mut named = self.head.headers.get_all(header::HOST).into_iter();
        let first = named.next();
        if named.next().is_some() {
            return Err(Problem::invalid_host_header("the request has more than one header host"));
        }
        let text = first.map(|host| host.to_str().unwrap_or_default());
        let authority = self.head.uri.authority().map(Authority::as_str);
        if let Some(found) =
            [text, authority].into_iter().flatten().find(|found| host_without_port(found).is_none())
            && !found.is_empty()
        {
            return Err(Problem::invalid_host_header(
                "what the request has for a host is none: write NAME or NAME:PORT",
            ));
        }
        if let (Some(text), Some(authority)) = (text, authority)
            && !text.eq_ignore_ascii_case(authority)
        {
            return Err(Problem::invalid_host_header(
                "the request names one host in its first line and another in its header host",
            ));
        }
        if (self.is_change || self.access != RequiredAccess::Public)
            && !self.request_host().is_some_and(|host| self.access_control().hosts.allows(host))
        {
            return Err(Problem::unknown_host_name(self.request_host().unwrap_or_default()));
        }
        Ok(())
    }

    /// Returns the principal of the request; `None` if it shows no credentials.
    fn identify_principal(&self) -> Result<Option<Principal>, Problem> {
        let (guard, headers) = (self.access_control(), &self.head.headers);
        let origin = actor_origin_from_user_agent(self.user_agent());
        let actor = |who: Arc<str>, means: ActorOrigin| Actor { who, address: self.peer_address(), means };
        let Some(tokens) = &guard.tokens else {
            let who = match &self.channel.certificate {
                Some(name) => format!("certificate:{name}").into(),
                None => Actor::ANONYMOUS.into(),
            };
            let visit = cookie_value(headers, self.cookies.visitor_cookie_name());
            let csrf = visit.map_or_else(|| "".into(), |visit| guard.csrf.proof_for_cookie(visit));
            let (actor, role) = (actor(who, origin), AccessRole::Admin);
            return Ok(Some(Principal { actor, role, auth_method: AuthMethod::Open, csrf }));
        };
        if let Some(shown) = headers.get(header::AUTHORIZATION) {
            let token = shown.to_str().ok().and_then(|text| {
                let (scheme, token) = text.split_once(' ')?;
                scheme.eq_ignore_ascii_case("bearer").then(|| token.trim())
            });
            let holder =
                token.and_then(|token| tokens.holder_of_token(token)).ok_or_else(Problem::unknown_token)?;
            let means = if origin == ActorOrigin::Cli { ActorOrigin::Cli } else { ActorOrigin::Api };
            let (actor, role) = (actor(holder.name, means), holder.role);
            return Ok(Some(Principal { actor, role, auth_method: AuthMethod::Token, csrf: "".into() }));
        }
        let now = guard.clock.now();
        let session = cookie_value(headers, self.cookies.session_cookie_name());
        Ok(session.and_then(|id| {
            let holder = tokens.holder_with_hash(&guard.sessions.login_token_hash_of_session(now, id)?)?;
            let (actor, role) = (actor(holder.name, ActorOrigin::Page), holder.role);
            Some(Principal {
                actor,
                role,
                auth_method: AuthMethod::Session,
                csrf: guard.csrf.proof_for_cookie(id),
            })
        }))
    }

    /// Checks role, content type and origin, as far as the head of the request tells them.
    fn check_role_origin_and_content_type(&self) -> Result<(), Problem> {
        if self.is_change {
            self.check_origin()?;
        }
        match (self.access, &self.visitor) {
            (RequiredAccess::Public, _) => {}
            (RequiredAccess::Role(_), None) => return Err(Problem::missing_token()),
            (RequiredAccess::Role(needed), Some(visitor)) if visitor.role < needed => {
                return Err(Problem::insufficient_role(visitor.role, needed));
            }
            (RequiredAccess::Role(_), Some(_)) => {}
        }
        // A page of another origin can send a form without a preflight request, but not JSON.
        let simple = self.head.method == Method::POST && !self.is_browser;
        if simple
            && self.access != RequiredAccess::Public
            && !has_content_type(&self.head.headers, "application/json")
        {
            let is_form = has_content_type(&self.head.headers, FORM_CONTENT_TYPE);
            return Err(if is_form { Problem::form_without_origin() } else { Problem::not_json() });
        }
        Ok(())
    }

    /// Checks the origin: a browser states it with every change, and only pages of this server may ask for one.
    fn check_origin(&self) -> Result<(), Problem> {
        if let Some(origin) = self.head.headers.get(header::ORIGIN) {
            // The scheme is not compared, because a proxy before this server may terminate TLS.
            let origin = origin.to_str().unwrap_or_default();
            let authority = origin.split_once("://").map(|(_, authority)| authority);
            let is_own = |found| self.request_host().is_some_and(|host| host.eq_ignore_ascii_case(found));
            if !authority.is_some_and(is_own) {
                return Err(Problem::foreign_origin(origin));
            }
        }
        match self.head.headers.get(&SEC_FETCH_SITE).map(HeaderValue::as_bytes) {
            None | Some(b"same-origin" | b"none") => Ok(()),
            Some(_) => Err(Problem::foreign_origin("another site")),
        }
    }

    /// Requires a proof of a browser that asks for a change. A browser that asks for a page and has no cookie
    /// gets one.
    fn check_csrf(&self) -> Result<CsrfCheckOutcome, Problem> {
        let (guard, headers) = (self.access_control(), &self.head.headers);
        let how = self.visitor.as_ref().map(|visitor| visitor.auth_method);
        let by_cookie = how == Some(AuthMethod::Session);
        let name =
            if by_cookie { self.cookies.session_cookie_name() } else { self.cookies.visitor_cookie_name() };
        let basis = cookie_value(headers, name).map(str::to_owned);
        if !self.is_change {
            if by_cookie || how == Some(AuthMethod::Token) || !asks_for_html_page(headers, &self.head.uri) {
                return Ok(CsrfCheckOutcome::Satisfied(None));
            }
            let known = basis.unwrap_or_else(tokens::random_secret);
            let proof = guard.csrf.proof_for_cookie(&known);
            return Ok(CsrfCheckOutcome::Satisfied(Some((known, proof))));
        }
        let wanted = by_cookie
            || self.access == RequiredAccess::Public
            || (how == Some(AuthMethod::Open) && self.is_browser);
        if !wanted {
            return Ok(CsrfCheckOutcome::Satisfied(None));
        }
        let basis = basis.ok_or_else(Problem::missing_csrf_proof)?;
        if let Some(shown) = headers.get(&PROOF_HEADER) {
            let holds = shown.to_str().is_ok_and(|shown| guard.csrf.verifies_proof(&basis, shown));
            return if holds {
                Ok(CsrfCheckOutcome::Satisfied(None))
            } else {
                Err(Problem::missing_csrf_proof())
            };
        }
        if has_content_type(headers, FORM_CONTENT_TYPE) {
            return Ok(CsrfCheckOutcome::InForm(basis));
        }
        Err(Problem::missing_csrf_proof())
    }

    /// Checks the rate of changes and of logins. The login itself checks the token.
    fn check_change_and_login_rates(&self) -> Result<(), Problem> {
        if !self.is_change || self.is_report {
            return Ok(());
        }
        let guard = self.access_control();
        let now = guard.clock.now();
        if let Some(visitor) = &self.visitor
            && !guard.changes.take_token(now, format!("{} {}", visitor.actor.who, self.source))
        {
            return Err(Problem::too_many_changes());
        }
        if self.access == RequiredAccess::Public {
            let browser = cookie_value(&self.head.headers, self.cookies.known_browser_cookie_name());
            if !guard.attempts.may_try_token(now, &guard.attempts.identify_login_client(self.source, browser))
            {
                return Err(Problem::too_many_wrong_tokens());
            }
        }
        Ok(())
    }

    /// Checks that a change can be audited, if the settings require that.
    async fn check_audit_writable(&self) -> Result<(), Problem> {
        if !self.is_change || self.is_report || self.access == RequiredAccess::Public {
            return Ok(());
        }
        self.site
            .operations
            .audit
            .wait_until_changes_allowed()
            .await
            .map_err(|why| Problem::audit_unwritable(&why))
    }
}

fn has_content_type(headers: &HeaderMap, kind: &str) -> bool {
    let found = headers.get(header::CONTENT_TYPE).and_then(|kind| kind.to_str().ok());
    found.is_some_and(|found| {
        found.split(';').next().is_some_and(|found| found.trim().eq_ignore_ascii_case(kind))
    })
}
