//! A web edge in this process, with a job and tokens of every role.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::body::Body;
use http::header::{HeaderMap, HeaderName, HeaderValue};
use http::{Request, StatusCode};
use http_body_util::BodyExt as _;
use muster::clock::Clock;
use muster::coordination::JobSettings;
use muster::engine::Engine;
use muster::http::{
    AccessControl, AllowedHosts, AppState, NewToken, PeerAddress, ServerInfo, TokenFile, TransportSecurity,
    Version, append_token, router,
};
use muster::service::Role;
use serde_json::Value;
use tower_service::Service as _;

/// The name by which the house is reached.
pub const HOST: &str = "muster.example";

/// A web edge.
pub struct WebEdge {
    pub engine: Arc<Engine>,
    pub tokens: BTreeMap<Role, String>,
    pub file: PathBuf,
    router: Router,
}

/// An answer.
#[derive(Debug)]
pub struct EdgeResponse {
    pub status: StatusCode,
    pub headers: HeaderMap,
    pub body: String,
}

impl EdgeResponse {
    /// The body as JSON, or nothing.
    pub fn json(&self) -> Value {
        serde_json::from_str(&self.body).unwrap_or(Value::Null)
    }

    /// The kind of problem that it is.
    pub fn problem(&self) -> String {
        self.json()["type"].as_str().unwrap_or_default().trim_start_matches("/problems/").to_owned()
    }

    /// The cookie that it sets.
    pub fn cookie(&self) -> Option<String> {
        let set = self.headers.get("set-cookie")?.to_str().ok()?;
        Some(set.split(';').next()?.to_owned())
    }
}

impl WebEdge {
    /// One that asks for tokens.
    pub fn closed(name: &str) -> Self {
        Self::new(name, true, Duration::from_secs(3600))
    }

    /// One where everybody may do everything.
    pub fn open(name: &str) -> Self {
        Self::new(name, false, Duration::from_secs(3600))
    }

    /// One whose logins hold for so long, if it asks for tokens.
    pub fn new(name: &str, closed: bool, session: Duration) -> Self {
        Self::made(name, closed, session, |guard| guard)
    }

    /// One that asks for tokens, and takes so many changes a second of one actor.
    pub fn patient(name: &str, changes: usize) -> Self {
        Self::made(name, true, Duration::from_secs(3600), |guard| guard.with_changes(changes))
    }

    fn made(
        name: &str,
        closed: bool,
        session: Duration,
        more: impl FnOnce(AccessControl) -> AccessControl,
    ) -> Self {
        let clock = Clock::start();
        let engine = Engine::new(clock);
        engine.declare("a".parse().unwrap(), JobSettings::new(2)).unwrap();
        let file = std::env::temp_dir().join(format!("muster-guard-{}-{name}.toml", std::process::id()));
        let _ = std::fs::remove_file(&file);
        let mut tokens = BTreeMap::new();
        for role in [Role::Viewer, Role::Operator, Role::Admin] {
            let made = NewToken::generate(&format!("a-{role}"), role).unwrap();
            append_token(&file, &format!("a-{role}"), &made.line).unwrap();
            tokens.insert(role, made.token);
        }
        let kept = closed.then(|| TokenFile::read(&file, clock).unwrap());
        let guard = AccessControl::open(clock)
            .with_tokens(kept, session)
            .with_hosts(AllowedHosts::parse(HOST).unwrap());
        let guard = more(guard);
        let about =
            ServerInfo { version: Version::current(), http: ([127, 0, 0, 1], 1).into(), grpc: vec![] };
        let site = AppState::new(Arc::clone(&engine), Arc::default(), Arc::new(about));
        let router = router(AppState { guard: Arc::new(guard), ..site });
        Self { engine, tokens, file, router }
    }

    /// Everything that the state machine knows, as bytes.
    pub fn digest(&self) -> Vec<u8> {
        self.engine.read(|core, _| postcard::to_allocvec(core).unwrap())
    }

    /// Asks for something with these headers besides the host.
    pub async fn ask(&self, method: &str, path: &str, headers: &[(&str, &str)], body: &str) -> EdgeResponse {
        self.ask_by(TransportSecurity::default(), method, path, headers, body).await
    }

    /// The same over a connection of this kind.
    pub async fn ask_by(
        &self,
        channel: TransportSecurity,
        method: &str,
        path: &str,
        headers: &[(&str, &str)],
        body: &str,
    ) -> EdgeResponse {
        self.ask_with(channel, method, path, headers, Body::from(body.to_owned())).await
    }

    /// The same with a body that may come in any way.
    pub async fn ask_with(
        &self,
        channel: TransportSecurity,
        method: &str,
        path: &str,
        headers: &[(&str, &str)],
        body: Body,
    ) -> EdgeResponse {
        let mut request = Request::builder().method(method).uri(path).body(body).unwrap();
        request.headers_mut().insert("host", HeaderValue::from_static(HOST));
        for (name, value) in headers {
            request.headers_mut().insert(HeaderName::try_from(*name).unwrap(), value.parse().unwrap());
        }
        request.extensions_mut().insert(PeerAddress(([10, 0, 0, 5], 40_000).into()));
        request.extensions_mut().insert(channel);
        let (head, body) = self.router.clone().call(request).await.unwrap().into_parts();
        // A stream has no end; what it says first is not asked for here.
        let body = tokio::time::timeout(Duration::from_secs(1), body.collect()).await;
        let body = body.map(|body| body.unwrap().to_bytes()).unwrap_or_default();
        EdgeResponse {
            status: head.status,
            headers: head.headers,
            body: String::from_utf8_lossy(&body).into(),
        }
    }

    /// The value of `authorization` for a role.
    pub fn bearer(&self, role: Role) -> String {
        format!("Bearer {}", self.tokens[&role])
    }

    /// Logs in, and gives the cookie and what page forms must carry.
    pub async fn log_in(&self, role: Role) -> (String, String) {
        let page = self.ask("GET", "/login", &[("accept", "text/html")], "").await;
        let visit = page.cookie().expect("the page sets a cookie");
        let form = format!("csrf={}&token={}&next=%2F", proof(&page), self.tokens[&role]);
        let headers = [("content-type", FORM), ("cookie", &*visit)];
        let answer = self.ask("POST", "/login", &headers, &form).await;
        assert_eq!(answer.status, StatusCode::SEE_OTHER, "{answer:?}");
        let session = answer.cookie().expect("a login sets a cookie");
        // Any page that has a form says what it must carry; so far only the login does.
        let page = self.ask("GET", "/login", &[("accept", "text/html"), ("cookie", &*session)], "").await;
        (session, proof(&page))
    }
}

/// What browsers say of forms.
pub const FORM: &str = "application/x-www-form-urlencoded";

/// What the forms of a page must carry.
pub fn proof(page: &EdgeResponse) -> String {
    let rest =
        page.body.split("name=\"csrf\" value=\"").nth(1).unwrap_or_else(|| panic!("no form in {page:?}"));
    rest.split('"').next().unwrap().to_owned()
}

impl Drop for WebEdge {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.file);
    }
}
