//! Serves `/login` and `/logout`: exchanges a token for a session cookie.
//!
//! `sessions.rs` stores the sessions. Begin at `log_in`.

use askama::Template;
use axum::extract::{Request, State};
use axum::http::StatusCode;
use axum::http::header::{self, HeaderValue};
use axum::http::request::Parts;
use axum::response::{Html, IntoResponse, Redirect, Response};
use bytes::Bytes;

use super::AuthMethod;
use super::Principal;
use super::cookies::{CookieNames, cookie_value};
use super::csrf::CsrfProof;
use super::refusals::respond_with_retry_after;
use super::tokens::{SecretHash, hash_secret};
use crate::coordination::{Actor, ActorOrigin};
use crate::http::body::form_field_value;
use crate::http::pages::asset_path;
use crate::http::request_client::{PeerAddress, TransportSecurity};
use crate::http::{AppState, ClientNetwork, Problem};
use crate::service::{ActorContext, AuditOutcome};

/// Serves `GET /login`: the page that asks for a token.
///
/// The form must carry `csrf`; its other fields are `token` and `next`, the page to go on to.
pub(in crate::http) async fn show_login_page(State(site): State<AppState>, request: Request) -> Response {
    let next = form_field_value(request.uri().query().unwrap_or_default().as_bytes(), "next");
    let next = local_redirect_path_or_root(next.as_deref()).to_owned();
    if site.guard.has_no_tokens() {
        return Redirect::to(&next).into_response();
    }
    let proof = request.extensions().get::<CsrfProof>().map(|proof| proof.0.to_string()).unwrap_or_default();
    Html(render_login_page(&proof, &next, "")).into_response()
}

/// Serves `POST /login`: exchanges a token for a session.
pub(in crate::http) async fn log_in(State(site): State<AppState>, head: Parts, form: Bytes) -> Response {
    let channel = head.extensions.get::<TransportSecurity>().cloned().unwrap_or_default();
    let peer = head.extensions.get::<PeerAddress>().map(|peer| peer.0);
    let next = form_field_value(&form, "next");
    let next = local_redirect_path_or_root(next.as_deref());
    let guard = &site.guard;
    let Some(tokens) = &guard.tokens else { return Redirect::to(next).into_response() };
    let now = guard.clock.now();
    let token = form_field_value(&form, "token").unwrap_or_default();
    let holder = tokens.holder_of_token(token.trim());
    let deed = |who: &str, role| {
        let actor = Actor { who: who.into(), address: peer, means: ActorOrigin::Page };
        ActorContext::new(actor, role, None).create_audit_entry(None, "login", "/login".into(), None)
    };
    let Some(holder) = holder else {
        let source = ClientNetwork::of_request(&head.extensions);
        let detail = "unknown token".to_owned();
        site.operations.audit.record_refusal_aggregated(
            guard.clock,
            source.to_string(),
            deed(Actor::ANONYMOUS, None),
            detail,
        );
        let cookies = CookieNames::for_transport(&channel);
        let attempt = guard
            .attempts
            .identify_login_client(source, cookie_value(&head.headers, cookies.known_browser_cookie_name()));
        if !guard.attempts.record_wrong_login_token(now, attempt, &hash_secret(token.trim())) {
            return respond_with_retry_after(Problem::too_many_wrong_tokens());
        }
        let visit = cookie_value(&head.headers, cookies.visitor_cookie_name()).unwrap_or_default();
        let text = render_login_page(&guard.csrf.proof_for_cookie(visit), next, "Unknown token");
        return (StatusCode::UNAUTHORIZED, Html(text)).into_response();
    };
    let detail = format!("as {}", holder.role);
    site.operations.audit.record(now, deed(&holder.name, Some(holder.role)), AuditOutcome::Done, detail);
    start_session_and_redirect(&site, &channel, holder.hash, next)
}

/// The lifetime of the cookie that marks a browser as one that has logged in, in seconds.
const BROWSER_COOKIE_SECONDS: u64 = 30 * 24 * 60 * 60;

fn start_session_and_redirect(
    site: &AppState,
    channel: &TransportSecurity,
    token: SecretHash,
    next: &str,
) -> Response {
    let guard = &site.guard;
    let id = guard.sessions.create_session(guard.clock.now(), token);
    let cookies = CookieNames::for_transport(channel);
    let set = cookies.set_cookie_header(
        cookies.session_cookie_name(),
        &id,
        Some(guard.sessions.session_timeout().as_secs()),
    );
    let known = cookies.set_cookie_header(
        cookies.known_browser_cookie_name(),
        &guard.attempts.new_browser_cookie_value(),
        Some(BROWSER_COOKIE_SECONDS),
    );
    with_set_cookie_header(with_set_cookie_header(Redirect::to(next).into_response(), set), known)
}

/// Serves `POST /logout`: ends the session.
pub(in crate::http) async fn log_out(
    State(site): State<AppState>,
    visitor: Principal,
    request: Request,
) -> Response {
    if visitor.auth_method != AuthMethod::Session {
        return Redirect::to("/").into_response();
    }
    let channel = request.extensions().get::<TransportSecurity>().cloned().unwrap_or_default();
    let cookies = CookieNames::for_transport(&channel);
    if let Some(id) = cookie_value(request.headers(), cookies.session_cookie_name()) {
        site.guard.sessions.end_session(id);
    }
    with_set_cookie_header(
        Redirect::to("/login").into_response(),
        cookies.set_cookie_header(cookies.session_cookie_name(), "", Some(0)),
    )
}

fn with_set_cookie_header(mut response: Response, set: Option<HeaderValue>) -> Response {
    if let Some(set) = set {
        response.headers_mut().append(header::SET_COOKIE, set);
    }
    response
}

/// Returns `next` if it is a path of this server, otherwise `/`: an answer must not redirect elsewhere.
pub(in crate::http) fn local_redirect_path_or_root(next: Option<&str>) -> &str {
    let local = |next: &&str| {
        next.starts_with('/')
            && !next.starts_with("//")
            && next.bytes().all(|byte| byte.is_ascii_graphic() && byte != b'\\')
    };
    next.filter(local).unwrap_or("/")
}

/// The login page. It works without styles and scripts.
#[derive(Template)]
#[template(path = "login.html")]
struct LoginPageTemplate<'a> {
    style: String,
    proof: &'a str,
    next: &'a str,
    wrong: &'a str,
}

fn render_login_page(proof: &str, next: &str, wrong: &str) -> Bytes {
    let page = LoginPageTemplate { style: asset_path("muster.css"), proof, next, wrong };
    // Writing to a string cannot fail.
    page.render().unwrap_or_default().into()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_login_leads_to_pages_of_this_server_only() {
        for next in ["/", "/jobs/a?x=1"] {
            assert_eq!(local_redirect_path_or_root(Some(next)), next);
        }
        for next in ["//evil.example", "/\\evil.example", "https://evil.example", "", "/a\nb", "javascript:x"]
        {
            assert_eq!(local_redirect_path_or_root(Some(next)), "/", "{next:?}");
        }
        assert!(render_login_page("\"", "<", "").starts_with(b"<!doctype html>"));
    }
}
