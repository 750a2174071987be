//! The HTTP port in this process, with a job and tokens of every role.

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
use muster::http::api::{ServerInfo, Version};
use muster::http::{
    AccessControl, AllowedHosts, AppState, NewToken, PeerAddress, TokenFile, TransportSecurity, append_token,
    router,
};
use muster::service::Role;
use serde_json::Value;
use tower_service::Service as _;

/// The host name of the HTTP port.
pub const HOST: &str = "muster.example";

/// The HTTP port under test.
pub struct WebEdge {
    pub engine: Arc<Engine>,
    pub tokens: BTreeMap<Role, String>,
    pub file: PathBuf,
    router: Router,
}

/// A response.
#[derive(Debug)]
pub struct EdgeResponse {
    pub status: StatusCode,
    pub headers: HeaderMap,
    pub body: String,
}

impl EdgeResponse {
    /// Returns the body as JSON, or `null`.
    pub fn json(&self) -> Value {
        serde_json::from_str(&self.body).unwrap_or(Value::Null)
    }

    /// Returns the type of the problem.
    pub fn problem(&self) -> String {
        self.json()["type"].as_str().unwrap_or_default().trim_start_matches("/problems/").to_owned()
    }

    /// Returns the cookie that the response sets.
    pub fn cookie(&self) -> Option<String> {
        let set = self.headers.get("set-cookie")?.to_str().ok()?;
        Some(set.split(';').next()?.to_owned())
    }
}

impl WebEdge {
    /// Returns an HTTP port that requires tokens.
    pub fn closed(name: &str) -> Self {
        Self::new(name, true, Duration::from_secs(3600))
    }

    /// Returns an HTTP port without access control.
    pub fn open(name: &str) -> Self {
        Self::new(name, false, Duration::from_secs(3600))
    }

    /// Returns an HTTP port with sessions of this lifetime, which requires tokens if `closed` is set.
    pub fn new(name: &str, closed: bool, session: Duration) -> Self {
        Self::made(name, closed, session, |guard| guard)
    }

    /// Returns an HTTP port that requires tokens and allows this many changes a second for each actor.
    pub fn patient(name: &str, changes: usize) -> Self {
        Self::made(name, true, Duration::from_secs(3600), |guard| guard.with_change_rate(changes))
    }

    fn made(
        name: &str,
        closed: bool,
        session: Duration,
        more: impl FnOnce(AccessControl) -> AccessControl,
    ) -> Self {
        let clock = Clock::start();
        let engine = Engine::new(clock);
        engine.declare_job("a".parse().unwrap(), JobSettings::new(2)).unwrap();
        let file = std::env::temp_dir().join(format!("muster-guard-{}-{name}.toml", std::process::id()));
        let _ = std::fs::remove_file(&file);
        let mut tokens = BTreeMap::new();
        for role in [Role::Viewer, Role::Operator, Role::Admin] {
            let made = NewToken::generate(&format!("a-{role}"), role).unwrap();
            append_token(&file, &format!("a-{role}"), &made.line).unwrap();
            tokens.insert(role, made.token);
        }
        let kept = closed.then(|| TokenFile::load(&file, clock).unwrap());
        let guard = AccessControl::without_tokens(clock)
            .with_tokens(kept, session)
            .with_hosts(AllowedHosts::parse(HOST).unwrap());
        let guard = more(guard);
        let about =
            ServerInfo { version: Version::current(), http: ([127, 0, 0, 1], 1).into(), grpc: vec![] };
        let site = AppState::new(Arc::clone(&engine), Arc::default(), Arc::new(about));
        let router = router(AppState { guard: Arc::new(guard), ..site });
        Self { engine, tokens, file, router }
    }

    /// Returns the state of the engine as bytes.
    pub fn digest(&self) -> Vec<u8> {
        self.engine.read(|core, _| postcard::to_allocvec(core).unwrap())
    }

    /// Sends a request with these headers besides the host.
    pub async fn ask(&self, method: &str, path: &str, headers: &[(&str, &str)], body: &str) -> EdgeResponse {
        self.ask_by(TransportSecurity::default(), method, path, headers, body).await
    }

    /// Sends a request over a connection of this kind.
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

    /// Sends a request with any kind of body.
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
        // A stream has no end; only its head is needed here.
        let body = tokio::time::timeout(Duration::from_secs(1), body.collect()).await;
        let body = body.map(|body| body.unwrap().to_bytes()).unwrap_or_default();
        EdgeResponse {
            status: head.status,
            headers: head.headers,
            body: String::from_utf8_lossy(&body).into(),
        }
    }

    /// Returns the value of `authorization` for a role.
    pub fn bearer(&self, role: Role) -> String {
        format!("Bearer {}", self.tokens[&role])
    }

    /// Logs in. Returns the session cookie and the CSRF proof.
    pub async fn log_in(&self, role: Role) -> (String, String) {
        let page = self.ask("GET", "/login", &[("accept", "text/html")], "").await;
        let visit = page.cookie().expect("the page sets a cookie");
        let form = format!("csrf={}&token={}&next=%2F", proof(&page), self.tokens[&role]);
        let headers = [("content-type", FORM), ("cookie", &*visit)];
        let answer = self.ask("POST", "/login", &headers, &form).await;
        assert_eq!(answer.status, StatusCode::SEE_OTHER, "{answer:?}");
        let session = answer.cookie().expect("a login sets a cookie");
        // Every page with a form has the proof.
        let page = self.ask("GET", "/login", &[("accept", "text/html"), ("cookie", &*session)], "").await;
        (session, proof(&page))
    }
}

/// The content type of forms.
pub const FORM: &str = "application/x-www-form-urlencoded";

/// Returns the CSRF proof in a page.
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
