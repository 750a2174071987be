//! Answers `GET /api/v1/server`, `/api/v1/handshakes` and `/version`: version, addresses, and failed handshakes.
//!
//! Health is in `health.rs`. Begin at [`ServerInfo`].

use std::net::{IpAddr, SocketAddr};

use axum::Json;
use axum::extract::State;
use serde::{Deserialize, Serialize};

use super::AppState;
use crate::coordination::JobName;
use crate::tls::HandshakeFailuresPage;

/// A name and a version.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Version {
    /// Always `muster`, by which a client recognizes the server.
    pub name: String,
    /// The version.
    pub version: String,
}

impl Version {
    /// The product name in [`Version`].
    pub const NAME: &str = "muster";

    /// Returns the version of this build.
    #[must_use]
    pub fn current() -> Self {
        Self { name: Self::NAME.into(), version: env!("CARGO_PKG_VERSION").into() }
    }
}

/// A gRPC listener and its jobs.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct GrpcListenerInfo {
    /// Its address.
    pub address: SocketAddr,
    /// The jobs whose tasks connect here.
    pub jobs: Vec<JobName>,
}

/// The version and the addresses of a server.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ServerInfo {
    /// The name and the version.
    #[serde(flatten)]
    pub version: Version,
    /// The address of the HTTP listener.
    pub http: SocketAddr,
    /// The gRPC listeners; the shared one first.
    pub grpc: Vec<GrpcListenerInfo>,
}

impl ServerInfo {
    /// Returns a copy whose listeners carry the jobs in `present`. A job that was created after the start is
    /// on the shared listener, which is the first one; a deleted job is on none.
    #[must_use]
    pub fn with_jobs<'a>(&self, present: impl IntoIterator<Item = &'a JobName>) -> Self {
        let mut about = self.clone();
        let mut present: Vec<JobName> = present.into_iter().cloned().collect();
        for listener in &mut about.grpc {
            listener.jobs.retain(|job| present.contains(job));
            present.retain(|job| !listener.jobs.contains(job));
        }
        if let Some(shared) = about.grpc.first_mut() {
            shared.jobs.append(&mut present);
        }
        about
    }

    /// Returns the address that a task of `job` dials. `host` is the name by which the client reached this
    /// server and replaces an unspecified bind address; without one, the name of this machine does.
    #[must_use]
    pub fn coordinator_address(&self, job: &JobName, host: Option<&str>) -> Option<String> {
        let listener = self.grpc.iter().find(|listener| listener.jobs.contains(job))?;
        let address = listener.address;
        let mut name = match (address.ip(), host) {
            (ip, Some(host)) if ip.is_unspecified() => host.to_owned(),
            (ip, None) if ip.is_unspecified() => machine_name(),
            (IpAddr::V6(ip), _) => format!("[{ip}]"),
            (IpAddr::V4(ip), _) => ip.to_string(),
        };
        // On the shared listener the host name selects the job. A bare address selects the default job, or
        // the only job of the server.
        let shared = self.grpc.first().is_some_and(|first| first.address == address);
        let only = self.grpc.iter().map(|listener| listener.jobs.len()).sum::<usize>() == 1;
        let meant = !shared || only || job.as_str() == JobName::DEFAULT;
        if !meant {
            if address.ip().is_loopback() {
                name = "localhost".into();
            }
            name = format!("{job}.{name}");
        }
        Some(format!("{name}:{}", address.port()))
    }
}

/// Returns the name of this machine.
fn machine_name() -> String {
    rustix::system::uname().nodename().to_string_lossy().into_owned()
}

/// Serves `GET /version`.
pub(super) async fn version() -> Json<Version> {
    Json(Version::current())
}

/// The version of the server and the addresses of its listeners
#[utoipa::path(get, path = "/api/v1/server", operation_id = "server_show", tag = "server",
    responses((status = 200, description = "Version and addresses, with the jobs that each gRPC address serves")))]
pub(super) async fn server(State(site): State<AppState>) -> Json<ServerInfo> {
    Json(site.engine.read(|core, _| site.about.with_jobs(core.jobs().map(|(_, name)| name))))
}

/// The failed TLS handshakes with their reasons, which JAX clients do not report
#[utoipa::path(get, path = "/api/v1/handshakes", operation_id = "handshakes_list", tag = "server",
    responses((status = 200, body = HandshakeFailuresPage, description = "Failed handshakes of both listeners, the latest first, equal ones counted")))]
pub(super) async fn handshakes(State(site): State<AppState>) -> Json<HandshakeFailuresPage> {
    Json(site.handshakes.page())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn about(listeners: &[(&str, &[&str])]) -> ServerInfo {
        let listener = |(address, jobs): &(&str, &[&str])| GrpcListenerInfo {
            address: address.parse().unwrap(),
            jobs: jobs.iter().map(|job| job.parse().unwrap()).collect(),
        };
        ServerInfo {
            version: Version::current(),
            http: ([127, 0, 0, 1], 1).into(),
            grpc: listeners.iter().map(listener).collect(),
        }
    }

    fn address(about: &ServerInfo, job: &str, host: Option<&str>) -> Option<String> {
        about.coordinator_address(&job.parse().unwrap(), host)
    }

    #[test]
    fn tasks_are_sent_where_their_job_is_found() {
        let one = about(&[("127.0.0.1:8476", &["a"])]);
        assert_eq!(address(&one, "a", None).unwrap(), "127.0.0.1:8476");
        assert_eq!(address(&one, "b", None), None);
        let two = about(&[("127.0.0.1:8476", &["a", "default"])]);
        assert_eq!(address(&two, "a", None).unwrap(), "a.localhost:8476");
        assert_eq!(address(&two, "default", None).unwrap(), "127.0.0.1:8476");
        let own = about(&[("0.0.0.0:8476", &["a"]), ("[::1]:9000", &["b"])]);
        assert_eq!(address(&own, "a", Some("host")).unwrap(), "a.host:8476");
        assert_eq!(address(&own, "b", Some("host")).unwrap(), "[::1]:9000");
    }
}
