//! Decides when to check whether files such as certificates and tokens have changed.
//!
//! This module uses no timer and no signal. The arrival of a client starts a check on a separate thread, at most once
//! a second. That client waits for the check, at most 250 ms; other clients do not wait. The caller reads the files.
//! If a file cannot be used, the caller keeps the former contents. Begin at [`FileCheckSchedule::run_check_if_due`].

use std::os::unix::fs::MetadataExt as _;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use crate::clock::{Clock, Timestamp};

/// The shortest time between two checks.
const CHECK_INTERVAL: Duration = Duration::from_secs(1);
/// The longest time that a client waits for the check that it triggered. A slower check takes effect when it
/// is done.
const REFRESH_TIMEOUT: Duration = Duration::from_millis(250);

/// The modification time and the identity of a file: a name may lead to another file from one moment to the
/// next. A file that cannot be read has a stamp of its own.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FileStamp(Option<(i64, i64, u64, u64)>);

impl FileStamp {
    /// Returns the present stamp of a file.
    #[must_use]
    pub fn of_file(path: &Path) -> Self {
        let data = std::fs::metadata(path).ok();
        Self(data.map(|data| (data.mtime(), data.mtime_nsec(), data.len(), data.ino())))
    }
}

/// The time of the last check of some files, and whether a check runs now.
pub struct FileCheckSchedule {
    clock: Clock,
    checked_at: AtomicU64,
    is_checking: Arc<AtomicBool>,
}

impl FileCheckSchedule {
    /// Creates a watch over files that were read just now.
    #[must_use]
    pub fn new(clock: Clock) -> Self {
        Self { clock, checked_at: AtomicU64::new(clock.now().0), is_checking: Arc::default() }
    }

    /// Runs `look` on a thread of its own if the last check is long enough ago, and waits for it for a
    /// bounded time. At most one check runs at once. Must be called within a runtime.
    pub async fn run_check_if_due(&self, look: impl FnOnce() + Send + 'static) {
        let now = self.clock.now();
        if now.since(Timestamp(self.checked_at.load(Ordering::Relaxed))) < CHECK_INTERVAL
            || self.is_checking.swap(true, Ordering::Acquire)
        {
            return;
        }
        self.checked_at.store(now.0, Ordering::Relaxed);
        let looking = Arc::clone(&self.is_checking);
        let look = tokio::task::spawn_blocking(move || {
            look();
            looking.store(false, Ordering::Release);
        });
        // The result of the check is for all clients, and reaches them without this one.
        let _ = tokio::time::timeout(REFRESH_TIMEOUT, look).await;
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use super::*;

    #[tokio::test]
    async fn a_look_that_hangs_holds_up_its_caller_for_a_moment_and_others_not_at_all() {
        let watch = FileCheckSchedule::new(Clock::start());
        watch.run_check_if_due(|| unreachable!("it is not time yet")).await;
        watch.checked_at.store(0, Ordering::Relaxed);
        let (go_on, hangs) = mpsc::channel::<()>();
        let hang = move || {
            // `recv` also returns when the test drops the sender.
            let _ = hangs.recv();
        };
        assert!(tokio::time::timeout(REFRESH_TIMEOUT * 100, watch.run_check_if_due(hang)).await.is_ok());
        watch.checked_at.store(0, Ordering::Relaxed);
        watch.run_check_if_due(|| unreachable!("somebody looks already")).await;
        drop(go_on);
        while watch.is_checking.load(Ordering::Acquire) {
            tokio::task::yield_now().await;
        }
        let (tell, told) = mpsc::channel();
        watch.run_check_if_due(move || tell.send(()).unwrap()).await;
        assert_eq!(told.recv_timeout(Duration::from_secs(60)), Ok(()));
    }
}
