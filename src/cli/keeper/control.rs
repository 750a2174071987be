//! The socket by which `muster upgrade` asks a keeper to start another program.
//!
//! It lies in the folder of the journal. Only the user of the keeper, and root, may ask. A request is one line of JSON; the answers are lines of
//! JSON too, the last of which says how it ended. Begin at [`ControlSocket::listen`] and [`request_upgrade`].

use std::fs::Permissions;
use std::io;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::time::Duration;

use serde::{Deserialize, Serialize};
use tokio::io::{AsyncBufReadExt as _, AsyncRead, AsyncReadExt as _, AsyncWriteExt as _, BufReader};
use tokio::net::{UnixListener, UnixStream};
use tokio::sync::mpsc;
use tokio::task::JoinHandle;

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
    pub command: Vec<String>,
}

/// A message of the keeper about an upgrade.
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
    requests: mpsc::Receiver<(UpgradeRequest, UpgradeReply)>,
    accepting: JoinHandle<()>,
    path: PathBuf,
}

/// Where the keeper tells about an upgrade. The other end may have gone.
#[derive(Debug)]
pub struct UpgradeReply(UnixStream);

impl ControlSocket {
    /// Listens in the folder of a journal, as a task of the present runtime.
    ///
    /// # Errors
    /// If the socket cannot be created, as when the path is too long for one.
    pub fn listen(folder: &Path) -> io::Result<Self> {
        let path = folder.join(SOCKET_NAME);
        match std::fs::remove_file(&path) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
            _ => {}
        }
        let listener = UnixListener::bind(&path)?;
        std::fs::set_permissions(&path, Permissions::from_mode(0o600))?;
        let (send, requests) = mpsc::channel(1);
        Ok(Self { requests, accepting: tokio::spawn(accept_requests(listener, send)), path })
    }

    /// Waits for the next request. If this is dropped, no request is lost.
    pub async fn next_request(&mut self) -> Option<(UpgradeRequest, UpgradeReply)> {
        self.requests.recv().await
    }
}

async fn accept_requests(listener: UnixListener, send: mpsc::Sender<(UpgradeRequest, UpgradeReply)>) {
    loop {
        let Ok((stream, _)) = listener.accept().await else {
            // Without descriptors, a pause.
            tokio::time::sleep(REQUEST_TIMEOUT).await;
            continue;
        };
        // One that sends nothing keeps no other one waiting.
        tokio::spawn(receive_request(stream, send.clone()));
    }
}

async fn receive_request(mut stream: UnixStream, send: mpsc::Sender<(UpgradeRequest, UpgradeReply)>) {
    let own = rustix::process::geteuid().as_raw();
    if !stream.peer_cred().is_ok_and(|peer| [own, 0].contains(&peer.uid())) {
        return;
    }
    let line = match tokio::time::timeout(REQUEST_TIMEOUT, read_line(&mut stream)).await {
        Ok(Ok(Some(line))) => line,
        _ => return,
    };
    match serde_json::from_str(&line) {
        // The keeper answers at once.
        Ok(request) => _ = send.send((request, UpgradeReply(stream))).await,
        Err(error) => {
            UpgradeReply(stream).send(&UpgradeNews::Failed(format!("the request cannot be read: {error}")));
        }
    }
}

impl Drop for ControlSocket {
    fn drop(&mut self) {
        self.accepting.abort();
        let _ = std::fs::remove_file(&self.path);
    }
}

impl UpgradeReply {
    /// Sends news to the other end, which may have gone, and is not waited for.
    pub fn send(&self, news: &UpgradeNews) {
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
    mut on_news: impl FnMut(UpgradeNews),
) -> io::Result<()> {
    let mut stream = UnixStream::connect(folder.join(SOCKET_NAME)).await?;
    let mut line = serde_json::to_vec(request)?;
    line.push(b'\n');
    stream.write_all(&line).await?;
    let mut lines = BufReader::new(stream).lines();
    while let Some(line) = lines.next_line().await? {
        let news: UpgradeNews = serde_json::from_str(&line)?;
        let is_last = !matches!(news, UpgradeNews::Step(_));
        on_news(news);
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
