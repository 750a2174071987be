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
use muster::http::api::{ProductVersion, ServerInfo};
use muster::http::{
    AccessControl, AllowedHosts, AppState, NewToken, PeerAddress, TokenFile, TransportSecurity,
    append_token_to_file, router,
};
use muster::service::AccessRole;
use serde_json::Value;
use tower_service::Service as _;

/// The host name of the HTTP port.
pub const HOST: &str = "muster.example";

/// The HTTP port under test.
pub struct InProcessHttpPort {
    pub engine: Arc<Engine>,
    pub tokens: BTreeMap<AccessRole, String>,
    pub file: PathBuf,
    router: Router,
}

/// A response.
#[derive(Debug)]
pub struct HttpPortResponse {
    pub status: StatusCode,
    pub headers: HeaderMap,
    pub body: String,
}

impl HttpPortResponse {
    /// Returns the body as JSON, or `null`.
    pub fn body_as_json(&self) -> Value {
        serde_json::from_str(&self.body).unwrap_or(Value::Null)
    }

    /// Returns the type of the problem.
    pub fn problem_type(&self) -> String {
        self.body_as_json()["type"].as_str().unwrap_or_default().trim_start_matches("/problems/").to_owned()
    }

    /// Returns the cookie that the response sets.
    pub fn set_cookie_pair(&self) -> Option<String> {
        let set = self.headers.get("set-cookie")?.to_str().ok()?;
        Some(set.split(';').next()?.to_owned())
    }
}

impl InProcessHttpPort {
    /// Returns an HTTP port that requires tokens.
    pub fn requiring_tokens(name: &str) -> Self {
        Self::new(name, true, Duration::from_secs(3600))
    }

    /// Returns an HTTP port without access control.
    pub fn without_access_control(name: &str) -> Self {
        Self::new(name, false, Duration::from_secs(3600))
    }

    /// Returns an HTTP port with sessions of this lifetime, which requires tokens if `closed` is set.
    pub fn new(name: &str, closed: bool, session: Duration) -> Self {
        Self::build(name, closed, session, |guard| guard)
    }

    /// Returns an HTTP port that requires tokens and allows this many changes a second for each actor.
    pub fn with_change_rate_limit_of(name: &str, changes: usize) -> Self {
        Self::build(name, true, Duration::from_secs(3600), |guard| guard.with_change_rate_limit(changes))
    }

    fn build(
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
        for role in [AccessRole::Viewer, AccessRole::Operator, AccessRole::Admin] {
            let made = NewToken::generate(&format!("a-{role}"), role).unwrap();
            append_token_to_file(&file, &format!("a-{role}"), &made.line).unwrap();
            tokens.insert(role, made.token);
        }
        let kept = closed.then(|| TokenFile::load(&file, clock).unwrap());
        let guard = AccessControl::without_tokens(clock)
            .with_tokens(kept, session)
            .with_hosts(AllowedHosts::parse(HOST).unwrap());
        let guard = more(guard);
        let about =
            ServerInfo { version: ProductVersion::current(), http: ([127, 0, 0, 1], 1).into(), grpc: vec![] };
        let site = AppState::new(Arc::clone(&engine), Arc::default(), Arc::new(about));
        let router = router(AppState { guard: Arc::new(guard), ..site });
        Self { engine, tokens, file, router }
    }

    /// Returns the state of the engine as bytes.
    pub fn engine_state_bytes(&self) -> Vec<u8> {
        self.engine.read(|core, _| postcard::to_allocvec(core).unwrap())
    }

    /// Sends a request with these headers besides the host.
    pub async fn send(
        &self,
        method: &str,
        path: &str,
        headers: &[(&str, &str)],
        body: &str,
    ) -> HttpPortResponse {
        self.send_over(TransportSecurity::default(), method, path, headers, body).await
    }

    /// Sends a request over a connection of this kind.
    pub async fn send_over(
        &self,
        channel: TransportSecurity,
        method: &str,
        path: &str,
        headers: &[(&str, &str)],
        body: &str,
    ) -> HttpPortResponse {
        self.send_with_body(channel, method, path, headers, Body::from(body.to_owned())).await
    }

    /// Sends a request with any kind of body.
    pub async fn send_with_body(
        &self,
        channel: TransportSecurity,
        method: &str,
        path: &str,
        headers: &[(&str, &str)],
        body: Body,
    ) -> HttpPortResponse {
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
        HttpPortResponse {
            status: head.status,
            headers: head.headers,
            body: String::from_utf8_lossy(&body).into(),
        }
    }

    /// Returns the value of `authorization` for a role.
    pub fn authorization_header(&self, role: AccessRole) -> String {
        format!("Bearer {}", self.tokens[&role])
    }

    /// Logs in. Returns the session cookie and the CSRF proof.
    pub async fn log_in(&self, role: AccessRole) -> (String, String) {
        let page = self.send("GET", "/login", &[("accept", "text/html")], "").await;
        let visit = page.set_cookie_pair().expect("the page sets a cookie");
        let form = format!("csrf={}&token={}&next=%2F", csrf_proof_in_page(&page), self.tokens[&role]);
        let headers = [("content-type", FORM), ("cookie", &*visit)];
        let answer = self.send("POST", "/login", &headers, &form).await;
        assert_eq!(answer.status, StatusCode::SEE_OTHER, "{answer:?}");
        let session = answer.set_cookie_pair().expect("a login sets a cookie");
        // Every page with a form has the proof.
        let page = self.send("GET", "/login", &[("accept", "text/html"), ("cookie", &*session)], "").await;
        (session, csrf_proof_in_page(&page))
    }
}

/// The content type of forms.
pub const FORM: &str = "application/x-www-form-urlencoded";

/// Returns the CSRF proof in a page.
pub fn csrf_proof_in_page(page: &HttpPortResponse) -> String {
    let rest =
        page.body.split("name=\"csrf\" value=\"").nth(1).unwrap_or_else(|| panic!("no form in {page:?}"));
    rest.split('"').next().unwrap().to_owned()
}

impl Drop for InProcessHttpPort {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.file);
    }
}
