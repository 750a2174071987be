//! What the server says of itself.

use std::net::SocketAddr;
use std::sync::Arc;

use axum::Json;
use axum::extract::State;
use serde::{Deserialize, Serialize};

use super::Site;
use crate::coordination::JobName;

/// A name and a version.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Version {
    /// Always `muster`, so that a client knows whom it speaks to.
    pub name: String,
    /// The version.
    pub version: String,
}

impl Version {
    /// The name that a Muster server gives.
    pub const NAME: &str = "muster";

    /// This version.
    #[must_use]
    pub fn this() -> Self {
        Self { name: Self::NAME.into(), version: env!("CARGO_PKG_VERSION").into() }
    }
}

/// A gRPC listener.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Listener {
    /// Where it listens.
    pub address: SocketAddr,
    /// The jobs whose tasks belong here.
    pub jobs: Vec<JobName>,
}

/// What the server says of itself.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct About {
    /// Its name and version.
    #[serde(flatten)]
    pub version: Version,
    /// Where people and tools look.
    pub http: SocketAddr,
    /// Where clients connect; the shared listener first.
    pub grpc: Vec<Listener>,
}

/// `GET /version`
pub(super) async fn version() -> Json<Version> {
    Json(Version::this())
}

/// `GET /api/v1/server`
pub(super) async fn server(State(site): State<Site>) -> Json<Arc<About>> {
    Json(Arc::clone(&site.about))
}
