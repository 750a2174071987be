//! The copies of one chunk by the GPUs that it concerns, and what is done at their end.
//!
//! Begin at [`CopiesByGpu::start`].
#![allow(unsafe_code, reason = "passes on what its callers promise of the memory")]

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, OnceLock};

use muster_gpu::{CopyDirection, Gpu, GpuCopy, GpuError};

use crate::base::sync::lock;

/// The first failure of a copy: the GPU, and its error.
pub type CopyFailure = (u32, GpuError);

/// The copies of a chunk by GPU: almost always one.
pub struct CopiesByGpu {
    direction: CopyDirection,
    by_gpu: Vec<(Gpu, Vec<GpuCopy>)>,
}

/// Takes over what the copies have kept, with the outcome.
type EndOfCopies<K> = Box<dyn FnOnce(K, Result<(), CopyFailure>) + Send>;

/// Copies that GPUs were asked for.
struct StartedCopies<K> {
    /// The GPUs whose end is not reported, plus one until all were asked.
    left: AtomicUsize,
    failure: OnceLock<CopyFailure>,
    end: Mutex<Option<(K, EndOfCopies<K>)>>,
}

impl<K> StartedCopies<K> {
    fn finish_one(&self, outcome: Result<(), CopyFailure>) {
        if let Err(failure) = outcome {
            let _first = self.failure.set(failure);
        }
        if self.left.fetch_sub(1, Ordering::AcqRel) > 1 {
            return;
        }
        let end = lock(&self.end).take();
        if let Some((kept, then)) = end {
            then(kept, self.failure.get().cloned().map_or(Ok(()), Err));
        }
    }
}

impl CopiesByGpu {
    /// Returns no copies yet.
    pub const fn new(direction: CopyDirection) -> Self {
        Self { direction, by_gpu: Vec::new() }
    }

    pub const fn direction(&self) -> CopyDirection {
        self.direction
    }

    /// Adds a copy by a GPU.
    pub fn add(&mut self, gpu: &Gpu, copy: GpuCopy) {
        match self.by_gpu.iter_mut().find(|(other, _)| other == gpu) {
            Some((_, copies)) => copies.push(copy),
            None => self.by_gpu.push((gpu.clone(), vec![copy])),
        }
    }

    /// Asks the GPUs for the copies, and calls `then` with what was kept at the end of all of them: on this thread, or on that
    /// of a GPU.
    ///
    /// # Safety
    /// As of [`Gpu::copy`], for as long as `kept` lives.
    pub unsafe fn start<K: Send + 'static>(
        self,
        kept: K,
        then: impl FnOnce(K, Result<(), CopyFailure>) + Send + 'static,
    ) {
        let then: EndOfCopies<K> = Box::new(then);
        let all = Arc::new(StartedCopies {
            left: AtomicUsize::new(1 + self.by_gpu.len()),
            failure: OnceLock::new(),
            end: Mutex::new(Some((kept, then))),
        });
        for (gpu, copies) in self.by_gpu {
            let (ended, number) = (Arc::clone(&all), gpu.ordinal());
            let report = move |outcome: Result<(), GpuError>| {
                ended.finish_one(outcome.map_err(|error| (number, error)));
            };
            // SAFETY: the caller guarantees the memory while `kept` lives, which is until the last report.
            if let Err(error) = unsafe { gpu.copy(self.direction, &copies, report) } {
                all.finish_one(Err((number, error)));
            }
        }
        all.finish_one(Ok(()));
    }
}
