//! The threads of an engine that move bytes: reactors and fetchers.
//!
//! It assigns no work. Begin at [`IoThreads::start`].

use std::sync::Arc;
use std::thread::JoinHandle;

use super::fetch::Fetchers;
use super::reactor::Reactor;

/// The threads that move bytes.
pub struct IoThreads {
    reactors: Vec<Arc<Reactor>>,
    /// The threads that fetch.
    pub fetchers: Arc<Fetchers>,
}

impl IoThreads {
    /// Starts so many of both kinds, at least one of each.
    ///
    /// # Errors
    /// Returns the error of the system if it refuses a thread.
    pub fn start(reactors: usize, fetchers: usize) -> std::io::Result<(Arc<Self>, Vec<JoinHandle<()>>)> {
        let (fetchers, mut threads) = Fetchers::start(fetchers.max(1))?;
        let mut all = Vec::new();
        for n in 0..reactors.max(1) {
            let (reactor, thread) = Reactor::start(&format!("muster-io-{n}"))?;
            all.push(reactor);
            threads.push(thread);
        }
        Ok((Arc::new(Self { reactors: all, fetchers }), threads))
    }

    /// Returns the reactor of a lane.
    pub fn reactor(&self, lane: u16) -> &Arc<Reactor> {
        &self.reactors[lane as usize % self.reactors.len()]
    }

    /// Ends the threads.
    pub fn stop(&self) {
        self.reactors.iter().for_each(|reactor| reactor.stop());
        self.fetchers.stop();
    }
}
