//! Writes audit lines to the file on a separate thread.
//!
//! Adding a line does not wait for the disk. Lines go into a bounded queue. The thread writes and syncs the lines in
//! order; if many lines wait, the thread writes many together. The thread repeats a failed write until the write
//! succeeds. If the queue is full, a new line is dropped and counted as lost. Another line, written in place of the
//! lost lines, reports which ones are missing. Begin at [`AuditWriter`].
//!
//! The file is opened without blocking. The thread opens the file again on SIGHUP, and when the path leads to another
//! file (rotation). The path may be a named pipe if a process reads from the pipe. If that process stops reading, the
//! write counts as failed. After a failed sync, the lines of that sync are written again. So a line may be in the
//! file twice, with the same number.

use std::collections::VecDeque;
use std::fs::{File, OpenOptions};
use std::io::{self, ErrorKind, Write as _};
use std::os::unix::fs::{FileTypeExt as _, MetadataExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use rustix::fs::OFlags;
use tokio::sync::watch;

use super::line::{AuditLine, AuditOutcome};
use crate::clock::Clock;
use crate::coordination::{Actor, ActorOrigin, Timestamp};

/// The maximum number of lines in the queue.
const QUEUE_LINES: usize = 4096;
/// The maximum size of the queue, in bytes.
const QUEUE_BYTES: usize = 8 << 20;
/// The maximum number of bytes between two syncs.
const BATCH_BYTES: usize = 256 << 10;
/// The pause after a failed write.
const RETRY_PAUSE: Duration = Duration::from_millis(500);
/// The age of the first queued line from which the disk counts as hanging.
const HANG_AFTER: Duration = Duration::from_secs(1);

/// A target of audit lines. Every method may block for any time.
pub(super) trait AuditSink: Send + 'static {
    /// Opens the present file at the path if it is another one than before, or in any case if `reopen` is
    /// set. Returns whether the file is another one.
    fn reopen_if_moved(&mut self, reopen: bool) -> io::Result<bool>;
    /// Writes a part of `bytes` and returns its length.
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize>;
    /// Returns when everything that was written is on the disk.
    fn sync(&mut self) -> io::Result<()>;
}

/// A file at a path, as the target.
pub(super) struct AuditFileSink {
    path: PathBuf,
    file: File,
}

impl AuditFileSink {
    /// Opens the file at `path`, and creates it if it does not exist.
    ///
    /// # Errors
    /// If it cannot be opened for appending, for example because it is a named pipe without a reader.
    pub fn open(path: &Path) -> io::Result<Self> {
        Ok(Self { path: path.to_owned(), file: open_for_append(path)? })
    }
}

fn open_for_append(path: &Path) -> io::Result<File> {
    let flags = (OFlags::NONBLOCK | OFlags::NOCTTY).bits().cast_signed();
    let opened = OpenOptions::new().create(true).append(true).mode(0o640).custom_flags(flags).open(path);
    opened.map_err(|error| {
        let is_pipe = std::fs::metadata(path).is_ok_and(|data| data.file_type().is_fifo());
        if is_pipe {
            io::Error::new(error.kind(), "it is a named pipe that no process reads: start its reader first")
        } else {
            error
        }
    })
}

impl AuditSink for AuditFileSink {
    fn reopen_if_moved(&mut self, reopen: bool) -> io::Result<bool> {
        let identity = |data: std::fs::Metadata| (data.dev(), data.ino());
        let own = self.file.metadata().map(identity)?;
        let same = std::fs::metadata(&self.path).is_ok_and(|found| identity(found) == own);
        if same && !reopen {
            return Ok(false);
        }
        self.file = open_for_append(&self.path)?;
        Ok(self.file.metadata().map(identity)? != own)
    }

    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.file.write(bytes).map_err(|error| match error.kind() {
            ErrorKind::WouldBlock => {
                io::Error::new(ErrorKind::WouldBlock, "the reader of the pipe does not read")
            }
            _ => error,
        })
    }

    fn sync(&mut self) -> io::Result<()> {
        match self.file.sync_data() {
            // Pipes and devices cannot be synced.
            Err(error) if error.raw_os_error() == Some(rustix::io::Errno::INVAL.raw_os_error()) => Ok(()),
            done => done,
        }
    }
}

/// A line in the queue.
struct QueuedLine {
    number: u64,
    text: Vec<u8>,
    at: Timestamp,
}

#[derive(Default)]
struct WriterState {
    queue: VecDeque<QueuedLine>,
    bytes: usize,
    /// The error of the last write; `None` if it succeeded.
    failing: Option<String>,
    /// A log line about the hanging disk is written.
    hang_logged: bool,
    reopen: bool,
    stop: bool,
    /// Lines that were dropped because the queue was full.
    lost: u64,
    /// The first and the last lost line that no line in the file reports yet.
    unreported: Option<(u64, u64)>,
}

struct WriterShared {
    clock: Clock,
    path: PathBuf,
    state: Mutex<WriterState>,
    work: Condvar,
    /// The number of the last line on the disk.
    durable: watch::Sender<u64>,
}

/// The counters of the writer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(super) struct WriterStats {
    /// Lines in the queue.
    pub queued: usize,
    /// The age of the first line in the queue.
    pub waits: Duration,
    /// Lines that were dropped.
    pub lost: u64,
}

/// The queue of audit lines and the handle of its writer thread.
pub(super) struct AuditWriter(Arc<WriterShared>);

impl AuditWriter {
    /// Starts the thread that writes to `target`; `path` names the target in messages.
    ///
    /// # Errors
    /// If the thread cannot be started.
    pub fn start(mut target: impl AuditSink, path: &Path, clock: Clock) -> io::Result<Self> {
        let shared = Arc::new(WriterShared {
            clock,
            path: path.to_owned(),
            state: Mutex::default(),
            work: Condvar::new(),
            durable: watch::Sender::default(),
        });
        let own = Arc::clone(&shared);
        let thread = std::thread::Builder::new().name("muster-audit".to_owned());
        thread.spawn(move || own.write_queued_lines(&mut target))?;
        Ok(Self(shared))
    }

    /// Queues a line. Never blocks.
    pub fn queue_line(&self, line: &AuditLine) {
        let mut state = self.0.lock_state();
        state.queue_or_drop_line(line, self.0.clock.now());
        let waits = state.oldest_wait(self.0.clock.now());
        if waits > HANG_AFTER && state.failing.is_none() && !state.hang_logged {
            state.hang_logged = true;
            drop(state);
            tracing::error!(file = %self.0.path.display(), ?waits, "the audit file takes no lines: its disk hangs");
        } else {
            drop(state);
        }
        self.0.work.notify_one();
    }

    /// Requests that the file is opened again.
    pub fn request_reopen(&self) {
        self.0.lock_state().reopen = true;
        self.0.work.notify_one();
    }

    /// Returns why lines do not reach the file; `None` if they do.
    pub fn write_error(&self) -> Option<String> {
        let state = self.0.lock_state();
        let (waits, lines) = (state.oldest_wait(self.0.clock.now()), state.queue.len());
        match &state.failing {
            Some(error) => Some(format!("{error}; {lines} lines wait")),
            None if waits > HANG_AFTER => {
                Some(format!("it has taken no line for {} s; {lines} wait", waits.as_secs()))
            }
            None => None,
        }
    }

    /// Waits, for `within` at most, until every line that is queued now is on the disk. Returns whether it
    /// is.
    pub async fn wait_until_lines_durable(&self, within: Duration) -> bool {
        let last = self.0.lock_state().queue.back().map(|queued| queued.number);
        let Some(last) = last else { return true };
        let mut durable = self.0.durable.subscribe();
        let reached = durable.wait_for(|durable| *durable >= last);
        matches!(tokio::time::timeout(within, reached).await, Ok(Ok(_)))
    }

    pub fn stats(&self) -> WriterStats {
        let state = self.0.lock_state();
        let waits = state.oldest_wait(self.0.clock.now());
        WriterStats { queued: state.queue.len(), waits, lost: state.lost }
    }
}

impl Drop for AuditWriter {
    fn drop(&mut self) {
        self.0.lock_state().stop = true;
        self.0.work.notify_one();
    }
}

impl WriterState {
    fn oldest_wait(&self, now: Timestamp) -> Duration {
        self.queue.front().map_or(Duration::ZERO, |first| now.since(first.at))
    }

    fn queue_or_drop_line(&mut self, line: &AuditLine, now: Timestamp) {
        self.queue_loss_notice(now);
        let queued = self.unreported.is_none() && self.queue_line(line, now);
        if !queued {
            self.lost += 1;
            self.unreported = Some((self.unreported.map_or(line.number, |(first, _)| first), line.number));
        }
    }

    fn queue_line(&mut self, line: &AuditLine, now: Timestamp) -> bool {
        let Ok(mut text) = serde_json::to_vec(line) else { return false };
        text.push(b'\n');
        if self.queue.len() >= QUEUE_LINES || self.bytes + text.len() > QUEUE_BYTES {
            return false;
        }
        self.bytes += text.len();
        self.queue.push_back(QueuedLine { number: line.number, text, at: now });
        true
    }

    /// Queues a line that reports the lost lines, if there is room.
    fn queue_loss_notice(&mut self, now: Timestamp) {
        let Some((first, last)) = self.unreported else { return };
        let lost = last - first + 1;
        let line = AuditLine {
            number: last,
            at: now,
            actor: Actor { who: "muster".into(), address: None, means: ActorOrigin::Rule },
            role: None,
            job: None,
            act: "lose-audit-lines".into(),
            subject: format!("lines {first} to {last}"),
            reason: None,
            outcome: AuditOutcome::Refused,
            detail: "the audit file did not take lines in time, and no more could wait".into(),
            times: lost,
        };
        if self.queue_line(&line, now) {
            self.unreported = None;
        }
    }

    /// Returns the bytes of the next lines to write, and their number.
    fn peek_batch(&self) -> (Vec<u8>, usize) {
        let mut bytes = Vec::new();
        let mut lines = 0;
        for queued in &self.queue {
            if lines > 0 && bytes.len() + queued.text.len() > BATCH_BYTES {
                break;
            }
            bytes.extend_from_slice(&queued.text);
            lines += 1;
        }
        (bytes, lines)
    }
}

impl WriterShared {
    fn lock_state(&self) -> MutexGuard<'_, WriterState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn write_queued_lines(&self, target: &mut impl AuditSink) {
        loop {
            let mut state = self.lock_state();
            while state.queue.is_empty() && !state.stop && !state.reopen {
                state.queue_loss_notice(self.clock.now());
                if state.queue.is_empty() {
                    state = self.work.wait(state).unwrap_or_else(PoisonError::into_inner);
                }
            }
            if state.queue.is_empty() && state.stop {
                return;
            }
            let ((bytes, lines), reopen) = (state.peek_batch(), std::mem::take(&mut state.reopen));
            drop(state);
            if !self.write_and_sync_with_retries(target, &bytes, reopen) {
                return;
            }
            let mut state = self.lock_state();
            let state = &mut *state;
            let waited = state.hang_logged;
            (state.failing, state.hang_logged) = (None, false);
            let mut last = None;
            for queued in state.queue.drain(..lines) {
                state.bytes -= queued.text.len();
                last = Some(queued.number);
            }
            if waited {
                tracing::info!(file = %self.path.display(), lost = state.lost, "the audit file takes lines again");
            }
            if let Some(last) = last {
                self.durable.send_replace(last);
            }
        }
    }

    /// Writes and syncs `bytes`, and retries after a failure. Returns whether they are on the disk; `false`
    /// means that the writer must stop.
    fn write_and_sync_with_retries(
        &self,
        target: &mut impl AuditSink,
        bytes: &[u8],
        mut reopen: bool,
    ) -> bool {
        let mut written = 0;
        loop {
            let tried = target.reopen_if_moved(reopen).and_then(|other| {
                if other {
                    // After the file was replaced, the new file gets whole lines.
                    let before = bytes.get(..written).unwrap_or_default();
                    written = before.iter().rposition(|byte| *byte == b'\n').map_or(0, |end| end + 1);
                }
                write_rest_and_sync(target, bytes, &mut written)
            });
            let error = match tried {
                Ok(()) => return true,
                Err(error) => error,
            };
            let mut state = self.lock_state();
            if state.failing.is_none() {
                tracing::error!(file = %self.path.display(), %error, "lines cannot be written to the audit file");
            }
            (state.failing, state.hang_logged) = (Some(error.to_string()), true);
            if !state.stop {
                let waited = self.work.wait_timeout_while(state, RETRY_PAUSE, |state| !state.stop);
                state = waited.unwrap_or_else(PoisonError::into_inner).0;
            }
            if state.stop {
                return false;
            }
            reopen = std::mem::take(&mut state.reopen);
        }
    }
}

fn write_rest_and_sync(target: &mut impl AuditSink, bytes: &[u8], written: &mut usize) -> io::Result<()> {
    while let Some(rest) = bytes.get(*written..).filter(|rest| !rest.is_empty()) {
        match target.write(rest) {
            Ok(0) => return Err(ErrorKind::WriteZero.into()),
            Ok(count) => *written += count,
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    target.sync().inspect_err(|_| *written = 0)
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use super::*;

    /// A disk that answers each write only when the test says how.
    struct ScriptedDisk {
        answers: mpsc::Receiver<io::Result<()>>,
        written: Arc<Mutex<String>>,
    }

    impl AuditSink for ScriptedDisk {
        fn reopen_if_moved(&mut self, _reopen: bool) -> io::Result<bool> {
            Ok(false)
        }

        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            // The sender is gone when the test has ended.
            self.answers.recv().unwrap_or_else(|_| Err(ErrorKind::Other.into()))?;
            self.written.lock().unwrap().push_str(std::str::from_utf8(bytes).unwrap());
            Ok(bytes.len())
        }

        fn sync(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    fn audit_line(number: u64) -> AuditLine {
        AuditLine {
            number,
            at: Timestamp(number),
            actor: Actor { who: "alice".into(), address: None, means: ActorOrigin::Api },
            role: None,
            job: None,
            act: "exclude".into(),
            subject: "task 1".into(),
            reason: None,
            outcome: AuditOutcome::Done,
            detail: String::new(),
            times: 1,
        }
    }

    fn writer_on_hanging_disk() -> (AuditWriter, mpsc::Sender<io::Result<()>>, Arc<Mutex<String>>) {
        let (tell, answers) = mpsc::channel();
        let written = Arc::<Mutex<String>>::default();
        let disk = ScriptedDisk { answers, written: Arc::clone(&written) };
        (AuditWriter::start(disk, Path::new("audit"), Clock::start()).unwrap(), tell, written)
    }

    #[tokio::test]
    async fn a_hung_disk_blocks_no_request_and_losses_are_recorded() {
        let (writer, tell, written) = writer_on_hanging_disk();
        let pushed = QUEUE_LINES as u64 + 100;
        for number in 1..=pushed {
            writer.queue_line(&audit_line(number));
        }
        assert!(!writer.wait_until_lines_durable(Duration::from_millis(10)).await);
        assert_eq!((writer.stats().queued, writer.stats().lost), (QUEUE_LINES, 100));
        tokio::time::sleep(HANG_AFTER).await;
        assert!(
            writer.write_error().is_some_and(|why| why.contains("4096 wait")),
            "{:?}",
            writer.write_error()
        );
        tell.send(Err(io::Error::other("no room"))).unwrap();
        while writer.write_error().is_none_or(|why| !why.contains("no room")) {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
        for _ in 0..QUEUE_LINES {
            tell.send(Ok(())).unwrap();
        }
        while writer.stats().queued > 0 {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
        writer.queue_line(&audit_line(pushed + 1));
        assert!(writer.wait_until_lines_durable(Duration::from_secs(10)).await);
        assert_eq!(writer.write_error(), None);
        let text = written.lock().unwrap().clone();
        let lines: Vec<AuditLine> = text.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
        let numbers: Vec<u64> = lines.iter().map(|line| line.number).collect();
        assert!(numbers.is_sorted(), "{numbers:?}");
        let told = lines.iter().find(|line| line.act == "lose-audit-lines").expect("it tells");
        assert_eq!((told.times, told.number), (100, pushed));
        assert_eq!(told.subject, format!("lines {} to {pushed}", QUEUE_LINES + 1));
        assert_eq!(lines.len(), QUEUE_LINES + 2);
    }

    #[test]
    fn a_pipe_without_a_reader_is_refused_and_a_file_that_was_moved_is_made_again() {
        let folder = std::env::temp_dir().join(format!("muster-audit-writer-{}", std::process::id()));
        let _ = std::fs::remove_dir_all(&folder);
        std::fs::create_dir(&folder).unwrap();
        let pipe = folder.join("pipe");
        rustix::fs::mknodat(
            rustix::fs::CWD,
            &pipe,
            rustix::fs::FileType::Fifo,
            rustix::fs::Mode::from_raw_mode(0o600),
            0,
        )
        .unwrap();
        let refused = AuditFileSink::open(&pipe).err().map(|error| error.to_string()).unwrap_or_default();
        assert!(refused.contains("no process reads"), "{refused}");

        let path = folder.join("audit");
        let mut target = AuditFileSink::open(&path).unwrap();
        let mut written = 0;
        write_rest_and_sync(&mut target, b"one\n", &mut written).unwrap();
        assert!(!target.reopen_if_moved(false).unwrap());
        std::fs::rename(&path, folder.join("audit.1")).unwrap();
        assert!(target.reopen_if_moved(false).unwrap());
        written = 0;
        write_rest_and_sync(&mut target, b"two\n", &mut written).unwrap();
        assert_eq!(std::fs::read_to_string(folder.join("audit.1")).unwrap(), "one\n");
        assert_eq!(std::fs::read_to_string(&path).unwrap(), "two\n");
        std::fs::remove_dir_all(&folder).unwrap();
    }
}
