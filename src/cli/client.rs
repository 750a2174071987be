//! Sends requests to a server over HTTP, and turns the problem documents in its answers into errors.
//!
//! `output.rs` prints the answers. Begin at `Client::connect`, then `Client::send_request`.

mod sse;

use std::fmt::Display;
use std::sync::Arc;
use std::time::Duration;

use http::header::{ACCEPT, AUTHORIZATION, CONTENT_TYPE, HOST, HeaderName, HeaderValue, USER_AGENT};
use http::{Method, Request, Response, StatusCode, Uri};
use http_body_util::{BodyExt as _, Full, Limited};
use hyper::body::{Bytes, Incoming};
use hyper::client::conn::http1;
use hyper_util::rt::TokioIo;
use rustls::ClientConfig;
use serde::de::DeserializeOwned;

use super::credentials::CredentialArgs;
use crate::coordination::{JobName, JobSummary, JobView};
use crate::http::api::{
    HostsPage, JobsPage, NO_SUCH_JOB, Problem, ProductVersion, ServerInfo, TaskOwnersPage,
};
use crate::service::collectives::CollectivesView;
use crate::text::UntrustedText;
use crate::tls::{self, DialError, IoStream, TlsClientForHost};
pub use sse::SseEvent;

/// The server URL if none is given.
pub const DEFAULT_SERVER: &str = "http://127.0.0.1:8477";

const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);
const RESPONSE_TIMEOUT: Duration = Duration::from_secs(30);
/// The maximum length of a response. A job of a million tasks takes some hundred megabytes.
const RESPONSE_BYTES_MAX: usize = 1 << 30;

/// The number of items in a page.
const PAGE_ITEMS: usize = 1000;

/// A page of a list.
pub trait ListPage: DeserializeOwned {
    /// Returns the value of `after` for the next page; `None` on the last page.
    fn after_of_next_page(&self) -> Option<impl Display>;

    /// Adds the next page.
    fn append(&mut self, next: Self);
}

impl ListPage for JobsPage {
    fn after_of_next_page(&self) -> Option<impl Display> {
        self.next.as_ref()
    }

    fn append(&mut self, next: Self) {
        self.jobs.extend(next.jobs);
        self.next = next.next;
    }
}

impl ListPage for CollectivesView {
    fn after_of_next_page(&self) -> Option<impl Display> {
        self.next
    }

    fn append(&mut self, next: Self) {
        self.cliques.extend(next.cliques);
        self.next = next.next;
    }
}

impl ListPage for HostsPage {
    fn after_of_next_page(&self) -> Option<impl Display> {
        self.next
    }

    fn append(&mut self, next: Self) {
        self.hosts.extend(next.hosts);
        self.next = next.next;
    }
}

impl ListPage for TaskOwnersPage {
    fn after_of_next_page(&self) -> Option<impl Display> {
        self.next
    }

    fn append(&mut self, next: Self) {
        self.owners.extend(next.owners);
        self.next = next.next;
    }
}

/// The reason why a server gave no usable answer.
#[derive(Debug, thiserror::Error)]
pub enum ClientError {
    /// The URL is invalid.
    #[error("{0:?} is no server: write its HTTP address, such as {DEFAULT_SERVER}")]
    BadUrl(String),
    /// The token or the certificates cannot be used.
    #[error("{0}")]
    Credentials(String),
    /// The address cannot be reached.
    #[error(
        "cannot reach a server at {url}: {error}; is `muster serve` running, and is this its HTTP address (not its \
         gRPC one)? Name it with --server or MUSTER_SERVER"
    )]
    Unreachable {
        /// The URL.
        url: String,
        /// The error of the operating system.
        error: UntrustedText,
    },
    /// The server at the address is no Muster.
    #[error(
        "what answers at {url} is not a Muster: {found}; give the HTTP address that `muster serve` printed"
    )]
    UnexpectedResponse {
        /// The URL.
        url: String,
        /// A description of its answer.
        found: UntrustedText,
    },
    /// The server has no such job.
    #[error("the server at {url} has no job {job:?}; its jobs are: {jobs}")]
    NoSuchJob {
        /// The URL.
        url: String,
        /// The requested job.
        job: UntrustedText,
        /// The existing jobs.
        jobs: String,
    },
    /// The server refused the request.
    #[error("the server at {url} answers {title}: {detail}{}", hint.map(|hint| format!("\n  {hint}")).unwrap_or_default())]
    Refused {
        /// The URL.
        url: String,
        /// The title of the problem.
        title: UntrustedText,
        /// The detail of the problem.
        detail: UntrustedText,
        /// The HTTP status.
        status: u16,
        /// The advice, if there is one for this kind of problem.
        hint: Option<&'static str>,
    },
    /// No job was named, and the server has several.
    #[error("which job? Name one with --job; there are: {0}")]
    AmbiguousJob(String),
}

impl ClientError {
    /// Returns whether a retry may succeed: the server was unreachable or overloaded.
    pub fn is_transient(&self) -> bool {
        match self {
            Self::Unreachable { .. } => true,
            Self::Refused { status, .. } => *status >= 500 || *status == 429,
            _ => false,
        }
    }
}

/// Returns the advice for a problem of this kind.
fn advice_for_problem_kind(kind: &str) -> Option<&'static str> {
    Some(match kind.strip_prefix("/problems/")? {
        "ends-run" => "Look first with --dry-run; add --end-run if the run shall end.",
        "already-excluded" => {
            "See all with: muster exclude; lift one with: muster readmit NUMBER --reason TEXT"
        }
        "no-such-exclusion" | "already-over" => "See those in force with: muster exclude",
        "no-such-task" => "See the tasks with: muster status",
        "not-running" | "drain-under-way" => "See how the run stands with: muster status",
        "tasks-connected" => "See who is connected with: muster status; add --force to do it anyway.",
        "no-token" => {
            "Name a file with a token: --token-file FILE (or MUSTER_TOKEN_FILE), or put it into MUSTER_TOKEN."
        }
        "bad-token" => "Tokens are made with: muster token new",
        "run-in-progress" => "See how the run stands with: muster status; wait for its end.",
        "job-exists" => "See all with: muster job list; change one with: muster job set",
        _ => return None,
    })
}

/// A client of a server that was recognized as a Muster server.
#[derive(Debug)]
pub struct Client {
    endpoint: ServerEndpoint,
    about: ServerInfo,
}

/// The endpoint of a server: address, TLS and token.
#[derive(Debug)]
struct ServerEndpoint {
    url: String,
    host: String,
    port: u16,
    tls: Option<Arc<ClientConfig>>,
    token: Option<String>,
}

impl ServerEndpoint {
    fn new(url: &str, credentials: &CredentialArgs) -> Result<Self, ClientError> {
        let (secure, host, port) = parse_url(url).ok_or_else(|| ClientError::BadUrl(url.into()))?;
        let unusable = |error: anyhow::Error| ClientError::Credentials(format!("{error:#}"));
        let tls = secure.then(|| credentials.tls_config()).transpose().map_err(unusable)?;
        let scheme = if secure { "https" } else { "http" };
        let url = format!("{scheme}://{host}:{port}");
        Ok(Self { url, host, port, tls, token: credentials.read_token().map_err(unusable)? })
    }
}

impl Client {
    /// Connects to the server at `url` and checks that it is a Muster server.
    pub async fn connect(url: &str, credentials: &CredentialArgs) -> Result<Self, ClientError> {
        let way = ServerEndpoint::new(url, credentials)?;
        let not_muster =
            |found: String| ClientError::UnexpectedResponse { url: way.url.clone(), found: found.into() };
        let (status, body) = fetch_response(&way, Method::GET, "/api/v1/server", None).await?;
        if status == StatusCode::UNAUTHORIZED
            && let Ok(problem) = serde_json::from_slice::<Problem>(&body)
        {
            return Err(error_of_problem(&way.url, &problem));
        }
        let version: ProductVersion = serde_json::from_slice(&body)
            .map_err(|_| not_muster(format!("its answer ({status}) does not say who it is")))?;
        if version.name != ProductVersion::NAME {
            return Err(not_muster(format!("it calls itself {:?}", version.name)));
        }
        let about = serde_json::from_slice(&body).map_err(|error| {
            let theirs = &version.version;
            not_muster(format!("it is version {theirs}, which this version cannot read ({error})"))
        })?;
        Ok(Self { endpoint: way, about })
    }

    /// Returns version and addresses of the server.
    pub fn server_info(&self) -> &ServerInfo {
        &self.about
    }

    /// Returns the URL of the server.
    pub fn server_url(&self) -> &str {
        &self.endpoint.url
    }

    /// Returns the host under which the server was reached.
    pub fn server_host(&self) -> &str {
        &self.endpoint.host
    }

    /// Fetches all pages of the list at `path`. `filter` is the rest of the query: empty, or `&name=value` for each
    /// parameter.
    pub async fn fetch_all_pages<P: ListPage>(&self, path: &str, filter: &str) -> Result<P, ClientError> {
        let first = format!("{path}?limit={PAGE_ITEMS}{filter}");
        let mut all: P = self.get(&first).await?;
        loop {
            let next = all.after_of_next_page().map(|after| format!("{first}&after={after}"));
            let Some(next) = next else { return Ok(all) };
            all.append(self.get(&next).await?);
        }
    }

    /// Fetches the summaries of all jobs.
    pub async fn fetch_jobs(&self) -> Result<Vec<JobSummary>, ClientError> {
        let all: JobsPage = self.fetch_all_pages("/api/v1/jobs", "").await?;
        Ok(all.jobs)
    }

    /// Returns the name of the selected job: the named one, or the only one, or `default`.
    pub async fn resolve_job(&self, named: Option<&JobName>) -> Result<JobName, ClientError> {
        if let Some(name) = named {
            return Ok(name.clone());
        }
        let names: Vec<JobName> = self.fetch_jobs().await?.into_iter().map(|job| job.name).collect();
        if let [only] = &names[..] {
            return Ok(only.clone());
        }
        let default = names.iter().find(|name| name.as_str() == JobName::DEFAULT);
        let all = || names.iter().map(JobName::as_str).collect::<Vec<_>>().join(", ");
        default.cloned().ok_or_else(|| ClientError::AmbiguousJob(all()))
    }

    /// Fetches one job.
    pub async fn fetch_job(&self, name: &JobName) -> Result<JobView, ClientError> {
        self.get(&format!("/api/v1/jobs/{name}")).await
    }

    /// Sends a GET request.
    pub async fn get<T: DeserializeOwned>(&self, path: &str) -> Result<T, ClientError> {
        self.send_request(Method::GET, path, None).await
    }

    /// Sends a request; `body` is JSON or empty.
    pub async fn send_request<T: DeserializeOwned>(
        &self,
        method: Method,
        path: &str,
        body: Option<Vec<u8>>,
    ) -> Result<T, ClientError> {
        let (status, body) = fetch_response(&self.endpoint, method, path, body).await?;
        let url = self.endpoint.url.clone();
        if status.is_success() {
            // An empty response is read as JSON's `null`.
            let body = if body.is_empty() { Bytes::from_static(b"null") } else { body };
            return serde_json::from_slice(&body).map_err(|error| ClientError::Refused {
                url,
                title: format!("{path} in a form that this version does not know").into(),
                detail: error.to_string().into(),
                status: status.as_u16(),
                hint: None,
            });
        }
        Err(error_of_response(&url, path, status, &body))
    }
}

/// Returns the error for a response without success.
fn error_of_response(url: &str, path: &str, status: StatusCode, body: &[u8]) -> ClientError {
    let Ok(problem) = serde_json::from_slice::<Problem>(body) else {
        let (title, detail) = (status.to_string().into(), path.into());
        return ClientError::Refused { url: url.into(), title, detail, status: status.as_u16(), hint: None };
    };
    if problem.kind == NO_SUCH_JOB {
        let jobs: Vec<&str> = problem.jobs.iter().map(JobName::as_str).collect();
        let job = path.split(['/', '?']).nth(4).unwrap_or_default().into();
        return ClientError::NoSuchJob { url: url.into(), job, jobs: jobs.join(", ") };
    }
    error_of_problem(url, &problem)
}

fn error_of_problem(url: &str, problem: &Problem) -> ClientError {
    ClientError::Refused {
        url: url.into(),
        title: problem.title.as_str().into(),
        detail: (*problem.detail).into(),
        status: problem.status,
        hint: advice_for_problem_kind(&problem.kind),
    }
}

/// Returns whether a URL uses TLS, its host and its port.
fn parse_url(url: &str) -> Option<(bool, String, u16)> {
    let url = if url.contains("://") { url.to_owned() } else { format!("http://{url}") };
    let uri: Uri = url.parse().ok()?;
    let secure = match uri.scheme_str() {
        Some("http") => false,
        Some("https") => true,
        _ => return None,
    };
    let plain = matches!(uri.path(), "" | "/") && uri.query().is_none();
    let host = uri.host().filter(|host| !host.is_empty())?;
    plain.then(|| (secure, host.to_owned(), uri.port_u16().unwrap_or(if secure { 443 } else { 80 })))
}

async fn open_connection(way: &ServerEndpoint) -> Result<Box<dyn IoStream>, ClientError> {
    let unreachable = |error: String| ClientError::Unreachable { url: way.url.clone(), error: error.into() };
    let client = way.tls.clone().map(|config| TlsClientForHost::new(config, &way.host)).transpose();
    let client = client.map_err(|error| unreachable(error.to_string()))?;
    let dialled = tls::dial((tls::host_without_brackets(&way.host), way.port), client.as_ref());
    let dialled = tokio::time::timeout(CONNECT_TIMEOUT, dialled)
        .await
        .map_err(|_| unreachable(format!("no connection within {} s", CONNECT_TIMEOUT.as_secs())))?;
    dialled.map_err(|error| match error {
        DialError::Connect(error) => unreachable(error.to_string()),
        DialError::Handshake(error) => unreachable(format!(
            "no TLS with it ({error}); is the right authority named with --ca or MUSTER_CA?"
        )),
    })
}

/// Sends a request; `body` is JSON or empty.
async fn send_on_connection<const N: usize>(
    way: &ServerEndpoint,
    sender: &mut http1::SendRequest<Full<Bytes>>,
    method: Method,
    path: &str,
    body: Option<Vec<u8>>,
    headers: [(HeaderName, HeaderValue); N],
) -> anyhow::Result<Response<Incoming>> {
    let mut request = Request::builder()
        .method(method)
        .uri(path)
        .header(HOST, format!("{}:{}", way.host, way.port))
        .header(USER_AGENT, concat!("muster/", env!("CARGO_PKG_VERSION")));
    for (name, value) in headers {
        request = request.header(name, value);
    }
    if let Some(token) = &way.token {
        request = request.header(AUTHORIZATION, format!("Bearer {token}"));
    }
    if body.is_some() {
        request = request.header(CONTENT_TYPE, "application/json");
    }
    let request = request.body(Full::new(Bytes::from(body.unwrap_or_default())))?;
    Ok(sender.send_request(request).await?)
}

async fn fetch_response(
    way: &ServerEndpoint,
    method: Method,
    path: &str,
    body: Option<Vec<u8>>,
) -> Result<(StatusCode, Bytes), ClientError> {
    let url = &way.url;
    let unreachable = |error: String| ClientError::Unreachable { url: url.clone(), error: error.into() };
    let stream = open_connection(way).await?;
    let exchange = async {
        let (mut sender, connection) = http1::handshake(TokioIo::new(stream)).await?;
        let answer = async {
            let accept = [(ACCEPT, HeaderValue::from_static("application/json"))];
            let answer = send_on_connection(way, &mut sender, method, path, body, accept).await?;
            let (head, body) = answer.into_parts();
            let body =
                Limited::new(body, RESPONSE_BYTES_MAX).collect().await.map_err(anyhow::Error::from_boxed)?;
            anyhow::Ok((head.status, body.to_bytes()))
        };
        // The connection moves the bytes. It may end before the response is complete, but must not end this
        // function.
        let mut answer = std::pin::pin!(answer);
        tokio::select! {
            done = answer.as_mut() => done,
            _ = connection => answer.await,
        }
    };
    let answered = tokio::time::timeout(RESPONSE_TIMEOUT, exchange)
        .await
        .map_err(|_| unreachable(format!("no answer within {} s", RESPONSE_TIMEOUT.as_secs())))?;
    answered.map_err(|error| match error.downcast_ref::<hyper::Error>() {
        Some(spoken) if spoken.is_parse() => {
            ClientError::UnexpectedResponse { url: url.clone(), found: "its answer is not HTTP/1".into() }
        }
        _ => unreachable(format!("{error:#}")),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_url_is_a_host_and_a_port() {
        assert_eq!(parse_url("http://a:1"), Some((false, "a".into(), 1)));
        assert_eq!(parse_url("http://a:1/"), Some((false, "a".into(), 1)));
        assert_eq!(parse_url("a:1"), Some((false, "a".into(), 1)));
        assert_eq!(parse_url("http://[::1]:8477"), Some((false, "[::1]".into(), 8477)));
        assert_eq!(parse_url("https://a"), Some((true, "a".into(), 443)));
        assert_eq!(parse_url("ftp://a:1"), None);
        assert_eq!(parse_url("http://a:1/x"), None);
        assert_eq!(parse_url(""), None);
    }
}
