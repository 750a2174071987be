//! The socket by which `muster upgrade` asks a keeper to start another program.
//!
//! It lies in the folder of the journal, which only its user can open. A request is one line of JSON; the answers are lines of
//! JSON too, the last of which says how it ended. Begin at [`ControlSocket::next_request`] and [`request_upgrade`].

use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

use serde::{Deserialize, Serialize};
use tokio::io::{AsyncBufReadExt as _, AsyncRead, AsyncReadExt as _, AsyncWriteExt as _, BufReader};
use tokio::net::{UnixListener, UnixStream};

/// The name of the socket in the folder of the journal.
const SOCKET_NAME: &str = "keeper";
/// The longest line.
const LINE_MAX: u64 = 64 << 10;
/// The time in which a request must come.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(5);

/// The request to serve with another program.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct UpgradeRequest {
    /// The program and its first arguments; those of the keeper follow.
    pub words: Vec<String>,
}

/// What the keeper says about an upgrade.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum UpgradeNews {
    /// A step is done.
    Step(String),
    /// The other program serves.
    Done(String),
    /// The upgrade has failed, and the former program serves.
    Failed(String),
}

/// The keeper's end of the socket.
#[derive(Debug)]
pub struct ControlSocket {
    listener: UnixListener,
    path: PathBuf,
}

/// Where the keeper tells about an upgrade. The other end may have gone.
#[derive(Debug)]
pub struct UpgradeReply(UnixStream);

impl ControlSocket {
    /// Listens in the folder of a journal.
    ///
    /// # Errors
    /// If the socket cannot be created, as when the path is too long for one.
    pub fn listen(folder: &Path) -> io::Result<Self> {
        let path = folder.join(SOCKET_NAME);
        match std::fs::remove_file(&path) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
            _ => {}
        }
        Ok(Self { listener: UnixListener::bind(&path)?, path })
    }

    /// Waits for the next request.
    pub async fn next_request(&self) -> (UpgradeRequest, UpgradeReply) {
        loop {
            let Ok((mut stream, _)) = self.listener.accept().await else {
                // Without descriptors, a pause.
                tokio::time::sleep(REQUEST_TIMEOUT).await;
                continue;
            };
            let request = tokio::time::timeout(REQUEST_TIMEOUT, read_line(&mut stream)).await;
            if let Ok(Ok(Some(line))) = request
                && let Ok(request) = serde_json::from_str::<UpgradeRequest>(&line)
            {
                return (request, UpgradeReply(stream));
            }
        }
    }
}

impl Drop for ControlSocket {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.path);
    }
}

impl UpgradeReply {
    /// Tells the other end, which may have gone, and is not waited for.
    pub fn tell(&self, news: &UpgradeNews) {
        if let Ok(mut line) = serde_json::to_vec(news) {
            line.push(b'\n');
            let _ = self.0.try_write(&line);
        }
    }
}

/// Asks the keeper of the journal in `folder` for an upgrade, and passes on what it says, up to the last.
///
/// # Errors
/// If no keeper answers.
pub async fn request_upgrade(
    folder: &Path,
    request: &UpgradeRequest,
    mut hear: impl FnMut(UpgradeNews),
) -> io::Result<()> {
    let mut stream = UnixStream::connect(folder.join(SOCKET_NAME)).await?;
    let mut line = serde_json::to_vec(request)?;
    line.push(b'\n');
    stream.write_all(&line).await?;
    let mut lines = BufReader::new(stream).lines();
    while let Some(line) = lines.next_line().await? {
        let news: UpgradeNews = serde_json::from_str(&line)?;
        let is_last = !matches!(news, UpgradeNews::Step(_));
        hear(news);
        if is_last {
            return Ok(());
        }
    }
    Err(io::Error::new(io::ErrorKind::UnexpectedEof, "the keeper has ended"))
}

async fn read_line(stream: &mut (impl AsyncRead + Unpin)) -> io::Result<Option<String>> {
    let mut line = String::new();
    BufReader::new(stream.take(LINE_MAX)).read_line(&mut line).await?;
    Ok(line.ends_with('\n').then_some(line))
}
