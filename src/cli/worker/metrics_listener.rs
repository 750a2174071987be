//! Serves `/metrics` of a worker.
//!
//! `agent::metrics` collects the metrics. Begin at `MetricsListener::serve`.

use std::net::SocketAddr;
use std::sync::Arc;

use anyhow::{Context as _, Result};
use axum::Router;
use axum::http::{StatusCode, header};
use axum::routing::get;
use tokio::net::TcpListener;
use tokio::sync::watch;

use crate::clock::Clock;
use crate::http;
use crate::tls::{HandshakeFailures, TransportPolicy};

/// The maximum number of connections. Prometheus uses one.
const CONNECTIONS: usize = 16;

/// A bound listener for metrics.
pub struct MetricsListener {
    listener: TcpListener,
    address: SocketAddr,
}

impl MetricsListener {
    /// Binds the listener.
    pub async fn bind(address: SocketAddr) -> Result<Self> {
        let listener = TcpListener::bind(address)
            .await
            .with_context(|| format!("--metrics: cannot listen at {address}; port 0 picks a free one"))?;
        let address = listener.local_addr()?;
        Ok(Self { listener, address })
    }

    /// Returns the URL of the metrics.
    pub fn url(&self) -> String {
        format!("http://{}/metrics", self.address)
    }

    /// Serves the result of `page` for as long as it is polled.
    pub async fn serve(self, page: impl Fn() -> String + Clone + Send + Sync + 'static) {
        let scrape = move || async move {
            ([(header::CONTENT_TYPE, "text/plain; version=0.0.4; charset=utf-8")], page())
        };
        let nothing = || async { (StatusCode::NOT_FOUND, "a worker serves /metrics, and nothing else\n") };
        let router = Router::new().route("/metrics", get(scrape)).fallback(nothing);
        let clock = Clock::start();
        let entrance =
            Arc::new(TransportPolicy::plaintext_only("metrics", Arc::new(HandshakeFailures::new(clock))));
        let traffic = http::ListenerState::new("metrics", clock, http::HttpLimits::new(CONNECTIONS));
        let (_never, stop) = watch::channel(false);
        http::serve(self.listener, entrance, router, traffic, stop).await;
    }
}
