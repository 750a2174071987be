//! Serves `/login` and `/logout`: exchanges a token for a session cookie.
//!
//! It does not store sessions (`sessions.rs`). Begin at `enter`.

use askama::Template;
use axum::extract::{Request, State};
use axum::http::StatusCode;
use axum::http::header::{self, HeaderValue};
use axum::http::request::Parts;
use axum::response::{Html, IntoResponse, Redirect, Response};
use bytes::Bytes;

use super::How;
use super::Visitor;
use super::pass::{Cookies, Proof, cookie, field, late};
use super::tokens::{Hash, hash};
use crate::coordination::{Actor, Means};
use crate::http::actor::{Author, Channel, Peer};
use crate::http::{AuditOutcome, Problem, Site, Source, pages};

/// The page that asks for a token.
///
/// The form must carry `csrf`; its other fields are `token` and `next`, the page to go on to.
pub(in crate::http) async fn show(State(site): State<Site>, request: Request) -> Response {
    let next = field(request.uri().query().unwrap_or_default().as_bytes(), "next");
    let next = safe(next.as_deref()).to_owned();
    if site.guard.is_open() {
        return Redirect::to(&next).into_response();
    }
    let proof = request.extensions().get::<Proof>().map(|proof| proof.0.to_string()).unwrap_or_default();
    Html(page(&proof, &next, "")).into_response()
}

/// The longest form of a login.
pub(super) const FORM_BYTES_MAX: usize = 8 << 10;

/// Takes the token.
pub(in crate::http) async fn enter(State(site): State<Site>, head: Parts, form: Bytes) -> Response {
    let channel = head.extensions.get::<Channel>().cloned().unwrap_or_default();
    let peer = head.extensions.get::<Peer>().map(|peer| peer.0);
    let next = field(&form, "next");
    let next = safe(next.as_deref());
    let guard = &site.guard;
    let Some(tokens) = &guard.tokens else { return Redirect::to(next).into_response() };
    let now = guard.clock.now();
    let token = field(&form, "token").unwrap_or_default();
    let holder = tokens.holder(token.trim());
    let deed = |who: &str, role| {
        let actor = Actor { who: who.into(), address: peer, means: Means::Page };
        Author::new(actor, role, None).deed(None, "login", "/login".into(), None)
    };
    let Some(holder) = holder else {
        let source = Source::of_request(&head.extensions);
        let detail = "unknown token".to_owned();
        site.audit.gather(guard.clock, source.to_string(), deed(Actor::ANONYMOUS, None), detail);
        let cookies = Cookies::of(&channel);
        let attempt = guard.attempts.by(source, cookie(&head.headers, cookies.browser()));
        if !guard.attempts.failed(now, attempt, &hash(token.trim())) {
            return late(Problem::too_many_logins());
        }
        let visit = cookie(&head.headers, cookies.visit()).unwrap_or_default();
        let text = page(&guard.csrf.of(visit), next, "Unknown token");
        return (StatusCode::UNAUTHORIZED, Html(text)).into_response();
    };
    let detail = format!("as {}", holder.role);
    site.audit.record(now, deed(&holder.name, Some(holder.role)), AuditOutcome::Done, detail);
    begin(&site, &channel, holder.hash, next)
}

/// How long a browser is remembered as one that has logged in.
const BROWSER_REMEMBERED: u64 = 30 * 24 * 60 * 60;

fn begin(site: &Site, channel: &Channel, token: Hash, next: &str) -> Response {
    let guard = &site.guard;
    let id = guard.sessions.begin(guard.clock.now(), token);
    let cookies = Cookies::of(channel);
    let set = cookies.set(cookies.session(), &id, Some(guard.sessions.timeout().as_secs()));
    let known = cookies.set(cookies.browser(), &guard.attempts.browser_cookie(), Some(BROWSER_REMEMBERED));
    with_cookie(with_cookie(Redirect::to(next).into_response(), set), known)
}

/// Ends the login.
pub(in crate::http) async fn leave(State(site): State<Site>, visitor: Visitor, request: Request) -> Response {
    if visitor.how != How::Session {
        return Redirect::to("/").into_response();
    }
    let channel = request.extensions().get::<Channel>().cloned().unwrap_or_default();
    let cookies = Cookies::of(&channel);
    if let Some(id) = cookie(request.headers(), cookies.session()) {
        site.guard.sessions.end(id);
    }
    with_cookie(Redirect::to("/login").into_response(), cookies.set(cookies.session(), "", Some(0)))
}

fn with_cookie(mut response: Response, set: Option<HeaderValue>) -> Response {
    if let Some(set) = set {
        response.headers_mut().append(header::SET_COOKIE, set);
    }
    response
}

/// A page of this server: what leads elsewhere leads to the first one.
fn safe(next: Option<&str>) -> &str {
    let local = |next: &&str| {
        next.starts_with('/')
            && !next.starts_with("//")
            && next.bytes().all(|byte| byte.is_ascii_graphic() && byte != b'\\')
    };
    next.filter(local).unwrap_or("/")
}

/// It works without styles and scripts.
#[derive(Template)]
#[template(path = "login.html")]
struct LoginPage<'a> {
    style: String,
    proof: &'a str,
    next: &'a str,
    wrong: &'a str,
}

fn page(proof: &str, next: &str, wrong: &str) -> Bytes {
    let page = LoginPage { style: pages::asset("muster.css"), proof, next, wrong };
    // Writing to a string cannot fail.
    page.render().unwrap_or_default().into()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_login_leads_to_pages_of_this_server_only() {
        for next in ["/", "/jobs/a?x=1"] {
            assert_eq!(safe(Some(next)), next);
        }
        for next in ["//evil.example", "/\\evil.example", "https://evil.example", "", "/a\nb", "javascript:x"]
        {
            assert_eq!(safe(Some(next)), "/", "{next:?}");
        }
        assert!(page("\"", "<", "").starts_with(b"<!doctype html>"));
    }
}
