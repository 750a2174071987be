//! Asks a server over HTTP.

use std::time::Duration;

use http::header::{ACCEPT, HOST};
use http::{Request, StatusCode, Uri};
use http_body_util::{BodyExt as _, Empty, Limited};
use hyper::body::Bytes;
use hyper::client::conn::http1;
use hyper_util::rt::TokioIo;
use serde::de::DeserializeOwned;
use tokio::net::TcpStream;

use crate::coordination::{JobName, JobView};
use crate::http::{About, JobsPage, NO_SUCH_JOB, Problem, Version};
use crate::text::one_line;

/// Where a server is looked for that is not named.
pub const DEFAULT_SERVER: &str = "http://127.0.0.1:8477";

const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);
const ANSWER_TIMEOUT: Duration = Duration::from_secs(30);
/// A job of a million tasks is shown in some hundred megabytes.
const ANSWER_BYTES_MAX: usize = 1 << 30;

/// Why a server gave no answer.
#[derive(Debug, thiserror::Error)]
pub enum ClientError {
    /// The URL is none.
    #[error("{0:?} is no server: write its HTTP address, such as {DEFAULT_SERVER} (https is not spoken yet)")]
    BadUrl(String),
    /// Nobody answers there.
    #[error(
        "cannot reach a server at {url}: {error}; is `muster serve` running, and is this its HTTP address (not its \
         gRPC one)? Name it with --server or MUSTER_SERVER"
    )]
    Unreachable {
        /// Where.
        url: String,
        /// What the system says.
        error: String,
    },
    /// Somebody else answers there.
    #[error(
        "what answers at {url} is not a Muster: {found}; give the HTTP address that `muster serve` printed"
    )]
    NotMuster {
        /// Where.
        url: String,
        /// What it said instead.
        found: String,
    },
    /// The server has no such job.
    #[error("the server at {url} has no job {job:?}; its jobs are: {jobs}")]
    NoSuchJob {
        /// Where.
        url: String,
        /// What was asked for.
        job: String,
        /// Those that exist.
        jobs: String,
    },
    /// The server refuses.
    #[error("the server at {url} answers {title}: {detail}")]
    Refused {
        /// Where.
        url: String,
        /// In short.
        title: String,
        /// At length.
        detail: String,
    },
}

/// A server that was found to be a Muster.
#[derive(Debug)]
pub struct Client {
    url: String,
    host: String,
    port: u16,
    about: About,
}

impl Client {
    /// Finds the server at `url`.
    pub async fn find(url: &str) -> Result<Self, ClientError> {
        let (host, port) = parse_url(url).ok_or_else(|| ClientError::BadUrl(url.into()))?;
        let url = format!("http://{host}:{port}");
        let not_muster = |found: String| ClientError::NotMuster { url: url.clone(), found };
        let (status, body) = get(&url, &host, port, "/api/v1/server").await?;
        let version: Version = serde_json::from_slice(&body)
            .map_err(|_| not_muster(format!("its answer ({status}) does not say who it is")))?;
        if version.name != Version::NAME {
            return Err(not_muster(format!("it calls itself {:?}", version.name)));
        }
        let about = serde_json::from_slice(&body).map_err(|error| {
            let theirs = one_line(&version.version).into_owned();
            not_muster(format!("it is version {theirs}, which this version cannot read ({error})"))
        })?;
        Ok(Self { url, host, port, about })
    }

    /// What the server says of itself.
    pub fn about(&self) -> &About {
        &self.about
    }

    /// Its URL.
    pub fn url(&self) -> &str {
        &self.url
    }

    /// The host that it was reached at.
    pub fn host(&self) -> &str {
        &self.host
    }

    /// Every job in short.
    pub async fn jobs(&self) -> Result<JobsPage, ClientError> {
        self.get("/api/v1/jobs").await
    }

    /// One job.
    pub async fn job(&self, name: &JobName) -> Result<JobView, ClientError> {
        self.get(&format!("/api/v1/jobs/{name}")).await
    }

    async fn get<T: DeserializeOwned>(&self, path: &str) -> Result<T, ClientError> {
        let (status, body) = get(&self.url, &self.host, self.port, path).await?;
        let url = self.url.clone();
        if status == StatusCode::OK {
            return serde_json::from_slice(&body).map_err(|error| ClientError::Refused {
                url,
                title: format!("{path} in a form that this version does not know"),
                detail: error.to_string(),
            });
        }
        let Ok(problem) = serde_json::from_slice::<Problem>(&body) else {
            return Err(ClientError::Refused { url, title: status.to_string(), detail: path.into() });
        };
        if problem.kind == NO_SUCH_JOB {
            let jobs: Vec<&str> = problem.jobs.iter().map(JobName::as_str).collect();
            let job = path.rsplit('/').next().unwrap_or_default().into();
            return Err(ClientError::NoSuchJob { url, job, jobs: jobs.join(", ") });
        }
        Err(ClientError::Refused {
            url,
            title: one_line(&problem.title).into_owned(),
            detail: one_line(&problem.detail).into_owned(),
        })
    }
}

fn parse_url(url: &str) -> Option<(String, u16)> {
    let url = if url.contains("://") { url.to_owned() } else { format!("http://{url}") };
    let uri: Uri = url.parse().ok()?;
    let plain = uri.scheme_str() == Some("http") && matches!(uri.path(), "" | "/") && uri.query().is_none();
    let host = uri.host().filter(|host| !host.is_empty())?;
    plain.then(|| (host.to_owned(), uri.port_u16().unwrap_or(80)))
}

async fn get(url: &str, host: &str, port: u16, path: &str) -> Result<(StatusCode, Bytes), ClientError> {
    let unreachable = |error: String| ClientError::Unreachable { url: url.into(), error };
    // Brackets are how a URL writes an IPv6 address, not how the system does.
    let bare = host.trim_start_matches('[').trim_end_matches(']');
    let stream = tokio::time::timeout(CONNECT_TIMEOUT, TcpStream::connect((bare, port)))
        .await
        .map_err(|_| unreachable(format!("no connection within {} s", CONNECT_TIMEOUT.as_secs())))?
        .map_err(|error| unreachable(error.to_string()))?;
    let exchange = async {
        let (mut sender, connection) = http1::handshake(TokioIo::new(stream)).await?;
        let request = Request::get(path)
            .header(HOST, format!("{host}:{port}"))
            .header(ACCEPT, "application/json")
            .body(Empty::<Bytes>::new())?;
        let answer = async {
            let (head, body) = sender.send_request(request).await?.into_parts();
            let body =
                Limited::new(body, ANSWER_BYTES_MAX).collect().await.map_err(anyhow::Error::from_boxed)?;
            anyhow::Ok((head.status, body.to_bytes()))
        };
        // The connection moves the bytes; it may end before the answer is put together, but not instead of it.
        let mut answer = std::pin::pin!(answer);
        tokio::select! {
            done = answer.as_mut() => done,
            _ = connection => answer.await,
        }
    };
    let answered = tokio::time::timeout(ANSWER_TIMEOUT, exchange)
        .await
        .map_err(|_| unreachable(format!("no answer within {} s", ANSWER_TIMEOUT.as_secs())))?;
    answered.map_err(|error| match error.downcast_ref::<hyper::Error>() {
        Some(spoken) if spoken.is_parse() => {
            ClientError::NotMuster { url: url.into(), found: "its answer is not HTTP/1".into() }
        }
        _ => unreachable(format!("{error:#}")),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_url_is_a_host_and_a_port() {
        assert_eq!(parse_url("http://a:1"), Some(("a".into(), 1)));
        assert_eq!(parse_url("http://a:1/"), Some(("a".into(), 1)));
        assert_eq!(parse_url("a:1"), Some(("a".into(), 1)));
        assert_eq!(parse_url("http://[::1]:8477"), Some(("[::1]".into(), 8477)));
        assert_eq!(parse_url("https://a:1"), None);
        assert_eq!(parse_url("http://a:1/x"), None);
        assert_eq!(parse_url(""), None);
    }
}
