//! The trait of a connection's socket, with implementations for plaintext and for TLS.
//!
//! Begin at [`ConnectionSocket`].

use std::io;
use std::pin::Pin;
use std::task::Context;
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::TcpStream;

use crate::coordination::ConnectionEnd;
use crate::tls;

/// The socket of a connection.
pub(super) trait ConnectionSocket: AsyncRead + AsyncWrite + Unpin {
    /// Sets the time for which data may stay unacknowledged, or unread by the peer's process.
    fn set_tcp_user_timeout(&self, unacknowledged: Option<Duration>);

    /// Ends both directions, even if another process has a descriptor of the socket.
    fn shut_down(&self) {}

    /// Announces the end of the connection, if the transport has a message for that.
    fn send_close_notify(&mut self, _cx: &mut Context<'_>) {}
}

impl ConnectionSocket for TcpStream {
    fn shut_down(&self) {
        // It may have ended already.
        let _ = socket2::SockRef::from(self).shutdown(std::net::Shutdown::Both);
    }

    fn set_tcp_user_timeout(&self, unacknowledged: Option<Duration>) {
        // On a socket that is already closed the option cannot be set.
        #[cfg(target_os = "linux")]
        let _ = socket2::SockRef::from(self).set_tcp_user_timeout(unacknowledged);
        #[cfg(not(target_os = "linux"))]
        let _ = unacknowledged;
    }
}

impl ConnectionSocket for tls::TlsStream<TcpStream> {
    fn set_tcp_user_timeout(&self, unacknowledged: Option<Duration>) {
        self.get_ref().0.inner_stream().set_tcp_user_timeout(unacknowledged);
    }

    fn send_close_notify(&mut self, cx: &mut Context<'_>) {
        // Unsent bytes may be dropped: the peer sees the end of the connection either way.
        let _ = Pin::new(self).poll_shutdown(cx);
    }
}

/// Returns how the connection ended, by the error of its socket.
pub(super) fn connection_end_from_socket_error(error: &io::Error) -> ConnectionEnd {
    match error.kind() {
        io::ErrorKind::ConnectionReset | io::ErrorKind::BrokenPipe | io::ErrorKind::ConnectionAborted => {
            ConnectionEnd::Reset
        }
        io::ErrorKind::TimedOut => ConnectionEnd::TimedOut,
        io::ErrorKind::UnexpectedEof => ConnectionEnd::Closed,
        _ => ConnectionEnd::Broken(error.to_string()),
    }
}
