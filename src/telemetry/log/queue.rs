//! The bounded queue of log lines, and the thread that writes the lines to stderr.
//!
//! A thread that logs never waits for the reader of stderr. While no process reads stderr, lines that do not fit into
//! the queue are dropped. When reading resumes, a line reports how many lines were dropped. Begin at [`LogQueue`].

use std::collections::VecDeque;
use std::fs::File;
use std::io::{self, IsTerminal as _, Write};
use std::os::fd::AsFd as _;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Duration;

use crate::telemetry::metrics::{MetricSource, ScrapeOutput, catalogue as metric};

/// The maximum size of the queue, in bytes.
const QUEUE_BYTES: usize = 1 << 20;
/// The maximum number of bytes in one write.
const BATCH_BYTES: usize = 64 << 10;
/// The pause after a write to a full non-blocking stderr.
const FULL_PAUSE: Duration = Duration::from_millis(50);

/// The queue of this process.
static LOG_QUEUE: OnceLock<Arc<LogQueue>> = OnceLock::new();

/// Returns whether a person reads the lines on a terminal.
pub(super) fn is_stderr_terminal() -> bool {
    io::stderr().is_terminal()
}

/// Starts the writer thread unless it runs already. Returns the sink for lines.
///
/// # Errors
/// The reason why the thread cannot be started.
pub(super) fn start_writer_thread() -> Result<LogSink, String> {
    let lines = Arc::<LogQueue>::default();
    if LOG_QUEUE.set(Arc::clone(&lines)).is_ok() {
        // A file of its own, because std's stderr has a lock that a panicking thread would wait for.
        let stderr = io::stderr().as_fd().try_clone_to_owned().map_err(|error| error.to_string())?;
        let mut stderr = File::from(stderr);
        let thread = std::thread::Builder::new().name("muster-log".to_owned());
        thread.spawn(move || lines.write_lines_forever(&mut stderr)).map_err(|error| error.to_string())?;
    }
    Ok(LogSink(Arc::clone(LOG_QUEUE.get_or_init(Arc::default))))
}

/// Waits, for `within` at most, until the lines so far are written. Called when the process ends.
pub fn flush_log(within: Duration) {
    if let Some(lines) = LOG_QUEUE.get() {
        lines.flush(within);
    }
}

/// The metrics of the log.
pub struct LogMetrics;

impl MetricSource for LogMetrics {
    fn write_samples(&self, page: &mut ScrapeOutput) {
        let dropped = LOG_QUEUE.get().map_or(0, |lines| lines.lock_queue().dropped);
        page.add_integer_sample(&metric::LOG_DROPPED, &[], dropped);
    }
}

#[derive(Default)]
struct LogQueueState {
    lines: VecDeque<Vec<u8>>,
    bytes: usize,
    /// The writer thread is writing lines that it has taken from the queue.
    writing: bool,
    dropped: u64,
    /// The number of dropped lines that no line has reported yet.
    unreported: u64,
}

/// The queue of lines.
#[derive(Default)]
struct LogQueue {
    queue: Mutex<LogQueueState>,
    work: Condvar,
    done: Condvar,
}

impl LogQueue {
    fn lock_queue(&self) -> MutexGuard<'_, LogQueueState> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn push_line(&self, line: &[u8]) {
        let mut queue = self.lock_queue();
        if queue.bytes + line.len() > QUEUE_BYTES {
            queue.dropped += 1;
            queue.unreported += 1;
            return;
        }
        queue.bytes += line.len();
        queue.lines.push_back(line.to_vec());
        drop(queue);
        self.work.notify_one();
    }

    fn write_lines_forever(&self, to: &mut impl Write) {
        loop {
            let mut queue = self.lock_queue();
            queue.writing = false;
            if queue.lines.is_empty() {
                self.done.notify_all();
            }
            while queue.lines.is_empty() {
                queue = self.work.wait(queue).unwrap_or_else(PoisonError::into_inner);
            }
            queue.writing = true;
            let mut bytes = Vec::new();
            while bytes.len() < BATCH_BYTES
                && let Some(line) = queue.lines.pop_front()
            {
                queue.bytes -= line.len();
                bytes.extend_from_slice(&line);
            }
            // They were dropped after every line that is still queued.
            let all = queue.lines.is_empty();
            let untold = if all { std::mem::take(&mut queue.unreported) } else { 0 };
            drop(queue);
            write_all_or_give_up(to, &bytes);
            if untold > 0 {
                tracing::warn!(lines = untold, "log lines were dropped: stderr was not read in time");
            }
        }
    }

    fn flush(&self, within: Duration) {
        let waits = |queue: &mut LogQueueState| queue.writing || !queue.lines.is_empty();
        // Lines that are not written by then are lost.
        drop(self.done.wait_timeout_while(self.lock_queue(), within, waits));
    }
}

/// Writes all bytes, or gives up at the first error: there is nowhere to report it.
fn write_all_or_give_up(to: &mut impl Write, mut bytes: &[u8]) {
    while !bytes.is_empty() {
        match to.write(bytes) {
            Ok(count @ 1..) => bytes = bytes.get(count..).unwrap_or_default(),
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            // Another process has made stderr non-blocking.
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => std::thread::sleep(FULL_PAUSE),
            Ok(_) | Err(_) => return,
        }
    }
}

/// Puts lines into the queue: each write is one line.
#[derive(Clone)]
pub(super) struct LogSink(Arc<LogQueue>);

impl Write for LogSink {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.push_line(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use super::*;

    /// A reader that takes a write when the test says so.
    struct GatedWriter {
        takes: mpsc::Receiver<()>,
        taken: mpsc::Sender<Vec<u8>>,
    }

    impl Write for GatedWriter {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            // The sender is gone when the test has ended.
            let _ = self.takes.recv();
            let _ = self.taken.send(bytes.to_vec());
            Ok(bytes.len())
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    #[test]
    fn unread_log_lines_are_dropped_and_counted_without_blocking() {
        let lines = Arc::<LogQueue>::default();
        let ((take, takes), (taken, seen)) = (mpsc::channel(), mpsc::channel());
        let own = Arc::clone(&lines);
        std::thread::spawn(move || own.write_lines_forever(&mut GatedWriter { takes, taken }));
        let line = [b'x'; 1 << 10];
        for _ in 0..4 * QUEUE_BYTES / line.len() {
            lines.push_line(&line);
        }
        lines.flush(Duration::from_millis(10));
        let dropped = lines.lock_queue().dropped;
        assert!(dropped > 2 * (QUEUE_BYTES / line.len()) as u64, "{dropped}");
        for _ in 0..2 * QUEUE_BYTES / BATCH_BYTES {
            take.send(()).unwrap();
        }
        lines.flush(Duration::from_secs(60));
        assert_eq!(lines.lock_queue().bytes, 0);
        let bytes: usize = seen.try_iter().map(|bytes| bytes.len()).sum();
        assert_eq!(bytes as u64, 4 * QUEUE_BYTES as u64 - dropped * line.len() as u64);
    }
}
