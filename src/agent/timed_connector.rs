//! Opens the connections of a gRPC channel by a function, within a limit of time.
//!
//! Begin at [`TimedConnector`].

use std::future::Future;
use std::io;
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use http::Uri;

/// The connector of a gRPC channel: it calls a function for each connection.
pub(crate) struct TimedConnector<C> {
    limit: Duration,
    connect: C,
}

impl<C> TimedConnector<C> {
    /// Returns the connector that opens connections by `connect`, each within `limit`.
    pub(crate) fn new(limit: Duration, connect: C) -> Self {
        Self { limit, connect }
    }
}

impl<C, F, S> tower_service::Service<Uri> for TimedConnector<C>
where
    C: Fn() -> F,
    F: Future<Output = io::Result<S>> + Send + 'static,
{
    type Response = S;
    type Error = io::Error;
    type Future = Pin<Box<dyn Future<Output = io::Result<S>> + Send>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, _: Uri) -> Self::Future {
        let (limit, connecting) = (self.limit, (self.connect)());
        Box::pin(async move {
            let late = |_| io::Error::new(io::ErrorKind::TimedOut, "no connection in time");
            tokio::time::timeout(limit, connecting).await.map_err(late)?
        })
    }
}
