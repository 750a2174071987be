//! The connection to the service: TCP, or TLS over it.

use std::future::Future;
use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use hyper_util::rt::TokioIo;
use rustls::ClientConfig;
use rustls::pki_types::ServerName;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;
use tonic::transport::{Channel, Endpoint, Uri};

use super::config::Config;
use super::error::AgentError;
use crate::tls;

/// How long making the connection may take.
const CONNECT: Duration = Duration::from_secs(10);
/// How long the service's host may be silent before that is looked into, and how long it may then take.
const KEEP_ALIVE: (Duration, Duration) = (Duration::from_secs(20), Duration::from_secs(10));

/// A channel to the service; the connection is made with the first call, and again when it is lost.
pub fn channel(config: &Config) -> Result<Channel, AgentError> {
    let uri = |address: &str| {
        format!("http://{address}")
            .parse::<Uri>()
            .map_err(|error| AgentError::Settings(format!("{address:?} is no address: {error}")))
    };
    let mut endpoint = Endpoint::from(uri(&config.service)?);
    if let Some(authority) = &config.authority {
        endpoint = endpoint.origin(uri(authority)?);
    }
    let endpoint = endpoint.http2_keep_alive_interval(KEEP_ALIVE.0).keep_alive_timeout(KEEP_ALIVE.1);
    let (host, _) = config
        .service
        .rsplit_once(':')
        .ok_or_else(|| AgentError::Settings(format!("{:?} has no port", config.service)))?;
    let tls = config.tls.as_ref().map(|files| {
        let own = files.own.as_ref().map(|(cert, key)| (cert.as_path(), key.as_path()));
        let mut client = tls::client(&files.ca, own).map_err(|error| AgentError::Tls(error.to_string()))?;
        client.alpn_protocols = vec![b"h2".to_vec()];
        let host = host.trim_matches(['[', ']']).to_owned();
        let name = ServerName::try_from(host).map_err(|error| AgentError::Tls(error.to_string()))?;
        Ok::<_, AgentError>((Arc::new(client), name))
    });
    let dialler = Dialler { address: config.service.clone(), tls: tls.transpose()? };
    Ok(endpoint.connect_with_connector_lazy(dialler))
}

trait Stream: AsyncRead + AsyncWrite + Send + Unpin {}
impl<T: AsyncRead + AsyncWrite + Send + Unpin> Stream for T {}

#[derive(Clone)]
struct Dialler {
    address: String,
    tls: Option<(Arc<ClientConfig>, ServerName<'static>)>,
}

impl Dialler {
    async fn dial(self) -> io::Result<TokioIo<Box<dyn Stream>>> {
        let socket = TcpStream::connect(&self.address).await?;
        socket.set_nodelay(true)?;
        let stream: Box<dyn Stream> = match self.tls {
            None => Box::new(socket),
            Some((client, name)) => Box::new(TlsConnector::from(client).connect(name, socket).await?),
        };
        Ok(TokioIo::new(stream))
    }
}

impl tower_service::Service<Uri> for Dialler {
    type Response = TokioIo<Box<dyn Stream>>;
    type Error = io::Error;
    type Future = Pin<Box<dyn Future<Output = io::Result<Self::Response>> + Send>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, _: Uri) -> Self::Future {
        let dialler = self.clone();
        Box::pin(async move {
            let late = |_| io::Error::new(io::ErrorKind::TimedOut, "no connection in time");
            tokio::time::timeout(CONNECT, dialler.dial()).await.map_err(late)?
        })
    }
}
