//! Starts and stops the threads of an engine that move bytes, reactors and fetchers, and keeps their staging memory.
//!
//! Other modules assign work to the threads. Begin at [`IoThreads::start`].

use std::sync::Arc;
use std::thread::JoinHandle;

use super::fetch::FetchThreadPool;
use super::reactor::Reactor;
use super::staging::StagingPools;

/// The threads that move bytes.
pub struct IoThreads {
    reactors: Vec<Arc<Reactor>>,
    /// The threads that fetch.
    pub fetchers: Arc<FetchThreadPool>,
    /// The page-locked memory through which lanes move bytes of GPUs.
    pub staging: StagingPools,
}

impl IoThreads {
    /// Starts so many of both kinds, at least one of each. `staging_bytes` bounds the page-locked memory.
    ///
    /// # Errors
    /// Returns the error of the system if it refuses a thread.
    pub fn start(
        reactors: usize,
        fetchers: usize,
        staging_bytes: usize,
    ) -> std::io::Result<(Arc<Self>, Vec<JoinHandle<()>>)> {
        // If a thread is refused, those that have started are ended as this is dropped.
        let mut io = Self {
            reactors: Vec::new(),
            fetchers: FetchThreadPool::new(fetchers.max(1)),
            staging: StagingPools::new(staging_bytes),
        };
        let mut threads = io.fetchers.start()?;
        for n in 0..reactors.max(1) {
            let (reactor, thread) = Reactor::start(&format!("muster-io-{n}"))?;
            io.reactors.push(reactor);
            threads.push(thread);
        }
        Ok((Arc::new(io), threads))
    }

    /// Returns the reactor of a lane.
    pub fn reactor_of_lane(&self, lane: u16) -> &Arc<Reactor> {
        &self.reactors[lane as usize % self.reactors.len()]
    }

    /// Ends the threads.
    pub fn request_stop(&self) {
        self.reactors.iter().for_each(|reactor| reactor.request_stop());
        self.fetchers.request_stop();
    }
}

impl Drop for IoThreads {
    fn drop(&mut self) {
        self.request_stop();
    }
}
