//! TLS over a wire whose bytes other hosts on the network could read.
//!
//! A TLS wire differs from a socket in two ways. First, it may hold decrypted bytes while the socket has none. So a
//! receive fills the views as far as it can, and reports that nothing is left only if the wire below has nothing
//! left. Second, it may hold encrypted records although the caller has nothing more to send. So an idle wire is
//! flushed whenever the wire below accepts more.
//!
//! A TLS wire sends no close alert. Frames have lengths, and truncated frames are sent again, so the alert is not
//! needed. `certificates.rs` decides which peers are trusted. Begin at [`TlsWire::new`].

use std::io::{self, IoSlice, Read, Write};
use std::os::fd::BorrowedFd;
use std::sync::Mutex;
use std::time::{Duration, Instant};

use rustls::Connection;

use super::blocking::BlockingWire;
use super::certificates::{EngineTlsConfigs, explain_tls_error};
use super::traits::{
    HandshakeRole, PeerProcess, ReceivedCount, Wire, WireCapabilities, WireError, WireWaker,
};
use crate::base::sync::lock;
use crate::base::transport::TransportKind;
use crate::memory::{ReadView, WriteView, total_len_of_views};
use muster_clock as clock;

/// The most bytes that may be encrypted and not yet sent.
const WAITING_MAX: usize = 128 << 10;
/// How long a refused peer has to read the alert.
const DRAIN_TIME: Duration = Duration::from_millis(500);
/// The buffer size for bytes that are decrypted to be discarded.
const WASTE: usize = 16 << 10;

/// A wire under TLS.
pub struct TlsWire {
    below: Box<dyn Wire>,
    connection: Mutex<Connection>,
}

/// The wire below, as the TLS library reads and writes it.
struct WireBelowTls<'a> {
    wire: &'a dyn Wire,
    /// Whether no more bytes arrive before the next edge.
    dry: bool,
}

impl Read for WireBelowTls<'_> {
    fn read(&mut self, buf: &mut [u8]) -> io::Result<usize> {
        if self.dry {
            return Err(io::ErrorKind::WouldBlock.into());
        }
        let received = self.wire.receive(&mut [WriteView::of_slice(buf)])?;
        self.dry = received.dry;
        Ok(received.bytes)
    }
}

impl Write for WireBelowTls<'_> {
    fn write(&mut self, buf: &[u8]) -> io::Result<usize> {
        Ok(self.wire.send(&[ReadView::of_slice(buf)])?)
    }

    fn write_vectored(&mut self, slices: &[IoSlice<'_>]) -> io::Result<usize> {
        let views: Vec<_> = slices.iter().map(|slice| ReadView::of_slice(slice)).collect();
        Ok(self.wire.send(&views)?)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl TlsWire {
    /// Creates the TLS side of this wire. Nothing has been sent yet.
    pub fn new(
        below: Box<dyn Wire>,
        identity: &EngineTlsConfigs,
        side: HandshakeRole,
    ) -> Result<Self, WireError> {
        let mut connection =
            identity.new_connection(side).map_err(|error| WireError::Secure(explain_tls_error(&error)))?;
        connection.set_buffer_limit(Some(WAITING_MAX));
        Ok(Self { below, connection: Mutex::new(connection) })
    }

    fn lower_wire(&self) -> WireBelowTls<'_> {
        WireBelowTls { wire: &*self.below, dry: false }
    }

    /// Sends the buffered records.
    fn send_records(&self, connection: &mut Connection) -> Result<(), WireError> {
        while connection.wants_write() {
            connection.write_tls(&mut self.lower_wire()).map_err(wire_error_from_io)?;
        }
        Ok(())
    }

    /// Reads and discards what the peer still sends: if the socket were closed before, the alert with the
    /// reason would be lost.
    fn discard_until_peer_closes(&self, until: Instant) {
        let mut spoken = BlockingWire::new(&*self.below, until.min(clock::monotonic() + DRAIN_TIME));
        let mut waste = [0; WASTE];
        while let Ok(1..) = spoken.read(&mut waste) {}
    }

    /// Decrypts the received records. If the peer is refused, the alert with the reason is sent if the wire
    /// has room.
    fn decrypt_received(&self, connection: &mut Connection) -> Result<(), WireError> {
        let processed = connection.process_new_packets();
        // An edge reports room for what cannot be sent now.
        match self.send_records(connection) {
            Ok(()) | Err(WireError::Later) => {}
            Err(error) => return processed.map_or_else(|error| Err(refused(&error)), |_| Err(error)),
        }
        processed.map(drop).map_err(|error| refused(&error))
    }
}

fn refused(error: &rustls::Error) -> WireError {
    WireError::Secure(explain_tls_error(error))
}

fn wire_error_from_io(error: io::Error) -> WireError {
    if error.kind() == io::ErrorKind::WouldBlock {
        return WireError::Later;
    }
    if let Some(error) = error.get_ref().and_then(|inner| inner.downcast_ref::<rustls::Error>()) {
        return refused(error);
    }
    match rustix::io::Errno::from_io_error(&error) {
        Some(error) => WireError::System(error),
        None => WireError::Secure(error.to_string()),
    }
}

/// Moves plaintext into the rest of the views after `done` bytes. Returns the new number of bytes; none at
/// the end of the stream.
fn read_plaintext(
    connection: &mut Connection,
    views: &mut [WriteView<'_>],
    mut done: usize,
) -> Result<Option<usize>, WireError> {
    let mut before = 0;
    for view in views {
        let end = before + view.len();
        while done < end {
            let mut left = view.part(done - before, end - done);
            match left.with_bytes_mut(|bytes| connection.reader().read(bytes)) {
                Ok(0) => return Ok(None),
                Ok(some) => done += some,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(Some(done)),
                Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => return Ok(None),
                Err(error) => return Err(wire_error_from_io(error)),
            }
        }
        before = end;
    }
    Ok(Some(done))
}

impl Wire for TlsWire {
    fn kind(&self) -> TransportKind {
        self.below.kind()
    }

    fn capabilities(&self) -> WireCapabilities {
        WireCapabilities { is_exposed: false, is_buffered: true, ..self.below.capabilities() }
    }

    fn peer(&self) -> Option<PeerProcess> {
        self.below.peer()
    }

    fn descriptor(&self) -> BorrowedFd<'_> {
        self.below.descriptor()
    }

    fn perform_handshake(&self, until: Instant) -> Result<(), WireError> {
        let mut connection = lock(&self.connection);
        let finished = connection.complete_io(&mut BlockingWire::new(&*self.below, until));
        finished.map(drop).inspect_err(|_| self.discard_until_peer_closes(until)).map_err(|error| match error
            .kind()
        {
            io::ErrorKind::UnexpectedEof
            | io::ErrorKind::ConnectionReset
            | io::ErrorKind::ConnectionAborted
            | io::ErrorKind::BrokenPipe => WireError::Secure(
                "it hung up in the TLS handshake: give every engine certificates, or none".to_owned(),
            ),
            _ => wire_error_from_io(error),
        })
    }

    fn send(&self, views: &[ReadView<'_>]) -> Result<usize, WireError> {
        let mut connection = lock(&self.connection);
        // No more is encrypted than the wire below has room for.
        self.send_records(&mut connection)?;
        let mut taken = 0;
        for view in views {
            let some =
                view.with_bytes(|bytes| connection.writer().write(bytes)).map_err(wire_error_from_io)?;
            taken += some;
            if some < view.len() {
                break;
            }
        }
        match self.send_records(&mut connection) {
            Ok(()) | Err(WireError::Later) => Ok(taken),
            Err(error) => Err(error),
        }
    }

    fn receive(&self, views: &mut [WriteView<'_>]) -> Result<ReceivedCount, WireError> {
        let total_len_of_views = total_len_of_views(views);
        let mut connection = lock(&self.connection);
        let mut below = self.lower_wire();
        let mut done = 0;
        loop {
            match read_plaintext(&mut connection, views, done)? {
                // The end of the stream; if bytes came before it, the next call reports it.
                None => return Ok(ReceivedCount { bytes: done, dry: false }),
                Some(now) => done = now,
            }
            if done == total_len_of_views {
                return Ok(ReceivedCount { bytes: done, dry: false });
            }
            match connection.read_tls(&mut below).map_err(wire_error_from_io) {
                Ok(_) => self.decrypt_received(&mut connection)?,
                Err(WireError::Later) if done > 0 => return Ok(ReceivedCount { bytes: done, dry: true }),
                Err(_) if done > 0 => return Ok(ReceivedCount { bytes: done, dry: false }),
                Err(error) => return Err(error),
            }
        }
    }

    fn discard(&self, len: usize) -> Result<usize, WireError> {
        let mut waste = [0; WASTE];
        let most = len.min(WASTE);
        Ok(self.receive(&mut [WriteView::of_slice(&mut waste[..most])])?.bytes)
    }

    fn flush(&self) -> Result<(), WireError> {
        self.send_records(&mut lock(&self.connection))
    }

    fn set_waker(&self, waker: WireWaker) {
        self.below.set_waker(waker);
    }

    fn end(&self) {
        self.below.end();
    }
}
