//! A bounded pool of threads for blocking work. Below the bound, each piece of work gets a new thread. At the bound,
//! work waits until a thread is free. A second function runs work for each element of a list on a few threads.
//!
//! Neither depends on what the work does. Begin at [`ThreadPool::run`] and [`for_each_parallel`].

use std::collections::VecDeque;
use std::io;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::thread;

use crate::base::sync::lock;

type PoolTask = Box<dyn FnOnce() + Send>;

#[derive(Default)]
struct ThreadPoolState {
    threads: usize,
    waiting: VecDeque<PoolTask>,
}

/// A bounded pool of threads for blocking work.
#[derive(Clone)]
pub struct ThreadPool {
    name: &'static str,
    most: usize,
    state: Arc<Mutex<ThreadPoolState>>,
}

impl ThreadPool {
    /// Creates a pool of at most `most` threads of this name.
    pub fn new(name: &'static str, most: usize) -> Self {
        Self { name, most, state: Arc::default() }
    }

    /// Runs `work` on a thread: a new one, or the next one that becomes free.
    ///
    /// # Errors
    /// Returns the error of the system if it refuses a thread and the pool has none.
    pub fn run(&self, work: impl FnOnce() + Send + 'static) -> io::Result<()> {
        {
            let mut state = lock(&self.state);
            state.waiting.push_back(Box::new(work));
            if state.threads >= self.most {
                return Ok(());
            }
            state.threads += 1;
        }
        let own = Arc::clone(&self.state);
        let Err(error) =
            thread::Builder::new().name(self.name.to_owned()).spawn(move || run_queued_work(&own))
        else {
            return Ok(());
        };
        let mut state = lock(&self.state);
        state.threads -= 1;
        if state.threads == 0 && state.waiting.pop_back().is_some() {
            return Err(error);
        }
        Ok(())
    }
}

/// Runs queued work until the queue is empty.
fn run_queued_work(state: &Mutex<ThreadPoolState>) {
    loop {
        let work = {
            let mut state = lock(state);
            match state.waiting.pop_front() {
                Some(work) => work,
                None => {
                    state.threads -= 1;
                    return;
                }
            }
        };
        // A panic in one piece of work must not take the thread from the others.
        if std::panic::catch_unwind(std::panic::AssertUnwindSafe(work)).is_err() {
            tracing::error!("a thread of the transfer engine has failed");
        }
    }
}

/// Runs `work` for each of `things`, on up to eight threads including this one. Returns when all is done.
pub fn for_each_parallel<T: Sync>(things: &[T], work: impl Fn(&T) + Sync) {
    const AT_ONCE: usize = 8;
    let next = AtomicUsize::new(0);
    let run = || {
        while let Some(thing) = things.get(next.fetch_add(1, Ordering::Relaxed)) {
            work(thing);
        }
    };
    thread::scope(|scope| {
        for _ in 1..things.len().min(AT_ONCE) {
            // If the system refuses a thread, this one does all the work.
            let _one_more =
                thread::Builder::new().name("muster-parallel".to_owned()).spawn_scoped(scope, run);
        }
        run();
    });
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;
    use std::time::Duration;

    use super::*;

    #[test]
    fn more_work_than_threads_waits_and_all_of_it_is_done() {
        let threads = ThreadPool::new("muster-test", 3);
        let (busy, most) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicUsize::new(0)));
        let (done, all) = mpsc::channel();
        for n in 0..20 {
            let (busy, most, done) = (Arc::clone(&busy), Arc::clone(&most), done.clone());
            let work = move || {
                most.fetch_max(busy.fetch_add(1, Ordering::SeqCst) + 1, Ordering::SeqCst);
                thread::sleep(Duration::from_millis(5));
                busy.fetch_sub(1, Ordering::SeqCst);
                done.send(n).unwrap();
            };
            threads.run(work).unwrap();
        }
        threads.run(|| panic!("on purpose")).unwrap();
        drop(done);
        let mut all: Vec<_> = all.iter().collect();
        all.sort_unstable();
        assert_eq!(all, (0..20).collect::<Vec<_>>());
        assert_eq!(most.load(Ordering::SeqCst), 3);
        while lock(&threads.state).threads > 0 {
            thread::yield_now();
        }
    }
}
