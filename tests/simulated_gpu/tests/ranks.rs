//! One rank of a communicator, on a thread or in a process.

use std::ffi::c_int;

use crate::driver::{
    CUstream, OK, allocate, contents, fill, new_stream, query, synchronize, use_device, write_device_bytes,
};
use crate::isolation::wait_until;
use crate::nccl::{BYTE, Comm, IN_PROGRESS, UniqueId, config, nccl};
use crate::sharing::pattern;

/// A rank with a stream of its own.
#[derive(Debug)]
pub struct Rank {
    pub comm: Comm,
    pub rank: c_int,
    pub ranks: c_int,
    pub stream: CUstream,
}

// SAFETY: the handles are numbers, which the library looks up.
unsafe impl Send for Rank {}

/// Begins the start of a non-blocking communicator.
pub fn begin_communicator_start(id: UniqueId, rank: c_int, ranks: c_int) -> (Comm, c_int) {
    let (mut comm, mut config) = (std::ptr::null_mut(), config(false));
    // SAFETY: the library writes a handle and reads the settings.
    let answer = unsafe { (nccl().start)(&raw mut comm, ranks, id, rank, &raw mut config) };
    (comm, answer)
}

/// Returns the asynchronous error.
pub fn async_error(comm: Comm) -> c_int {
    let mut state = -1;
    // SAFETY: the library writes a code.
    assert_eq!(unsafe { (nccl().error)(comm, &raw mut state) }, 0);
    state
}

/// Waits until no call is in progress, and returns the asynchronous error.
pub fn wait_for_async_error(comm: Comm) -> c_int {
    wait_until("no call is in progress", || async_error(comm) != IN_PROGRESS);
    async_error(comm)
}

pub fn abort(comm: Comm) -> c_int {
    // SAFETY: the handle is checked by the library.
    unsafe { (nccl().abort)(comm) }
}

impl Rank {
    /// Starts a communicator that does not block, and waits for the others.
    pub fn join(id: UniqueId, rank: c_int, ranks: c_int) -> Self {
        let (comm, answer) = begin_communicator_start(id, rank, ranks);
        assert_eq!((answer, wait_for_async_error(comm)), (IN_PROGRESS, 0));
        Self { comm, rank, ranks, stream: new_stream() }
    }

    /// Starts a communicator that blocks.
    pub fn join_blocking(id: UniqueId, rank: c_int, ranks: c_int) -> Self {
        let mut comm = std::ptr::null_mut();
        // SAFETY: the library writes a handle.
        assert_eq!(unsafe { (nccl().start_blocking)(&raw mut comm, ranks, id, rank) }, 0);
        Self { comm, rank, ranks, stream: new_stream() }
    }

    /// Runs calls in a group, and returns the answer of its end, without the wait for it.
    pub fn group(&self, calls: impl FnOnce()) -> c_int {
        // SAFETY: the calls have no arguments.
        unsafe {
            assert_eq!((nccl().group_start)(), 0);
            calls();
            (nccl().group_end)()
        }
    }

    pub fn send(&self, from: u64, len: usize, peer: c_int) -> c_int {
        // SAFETY: arguments are checked by the library.
        unsafe { (nccl().send)(from, len, BYTE, peer, self.comm, self.stream) }
    }

    pub fn receive(&self, to: u64, len: usize, peer: c_int) -> c_int {
        // SAFETY: arguments are checked by the library.
        unsafe { (nccl().receive)(to, len, BYTE, peer, self.comm, self.stream) }
    }

    /// Enqueues a message to a peer and one from a peer, and waits until they are on the stream.
    pub fn exchange(&self, from: u64, next: c_int, to: u64, previous: c_int, len: usize) -> c_int {
        let end = self.group(|| {
            assert_eq!(self.send(from, len, next), 0);
            assert_eq!(self.receive(to, len, previous), 0);
        });
        if end == IN_PROGRESS { wait_for_async_error(self.comm) } else { end }
    }

    pub fn all_reduce(&self, from: u64, to: u64, count: usize, datatype: c_int, operation: c_int) -> c_int {
        // SAFETY: arguments are checked by the library.
        self.wait_for_launch(unsafe {
            (nccl().all_reduce)(from, to, count, datatype, operation, self.comm, self.stream)
        })
    }

    pub fn all_gather(&self, from: u64, to: u64, count: usize, datatype: c_int) -> c_int {
        // SAFETY: arguments are checked by the library.
        self.wait_for_launch(unsafe {
            (nccl().all_gather)(from, to, count, datatype, self.comm, self.stream)
        })
    }

    pub fn reduce_scatter(&self, from: u64, to: u64, count: usize, datatype: c_int) -> c_int {
        // SAFETY: arguments are checked by the library.
        self.wait_for_launch(unsafe {
            (nccl().reduce_scatter)(from, to, count, datatype, 0, self.comm, self.stream)
        })
    }

    pub fn broadcast(&self, from: u64, to: u64, count: usize, datatype: c_int, root: c_int) -> c_int {
        // SAFETY: arguments are checked by the library.
        self.wait_for_launch(unsafe {
            (nccl().broadcast)(from, to, count, datatype, root, self.comm, self.stream)
        })
    }

    pub fn reduce(&self, from: u64, to: u64, count: usize, datatype: c_int, root: c_int) -> c_int {
        // SAFETY: arguments are checked by the library.
        self.wait_for_launch(unsafe {
            (nccl().reduce)(from, to, count, datatype, 0, root, self.comm, self.stream)
        })
    }

    /// Waits until a call of a non-blocking communicator has put its operation on the stream.
    fn wait_for_launch(&self, answer: c_int) -> c_int {
        if answer == IN_PROGRESS { wait_for_async_error(self.comm) } else { answer }
    }

    /// Sends around a ring and checks what arrives, for each of these sizes.
    pub fn check_ring(&self, sizes: &[usize]) {
        let [next, previous] = [1, self.ranks - 1].map(|step| (self.rank + step) % self.ranks);
        for len in sizes {
            let [from, to] = [allocate(*len), allocate(*len)];
            write_device_bytes(from, &pattern(self.rank as u64, *len));
            assert_eq!(self.exchange(from, next, to, previous, *len), 0);
            assert_eq!(synchronize(self.stream), OK);
            assert!(contents(to, *len) == pattern(previous as u64, *len), "{len} bytes from {previous}");
        }
    }

    /// Enqueues an exchange with a peer that does not end, and returns the destination.
    pub fn hang(&self, peer: c_int, len: usize) -> u64 {
        let [from, to] = [allocate(len), allocate(len)];
        assert_eq!(fill(from, 1, len, self.stream), OK);
        assert_eq!(self.exchange(from, peer, to, peer, len), 0);
        to
    }

    pub fn is_busy(&self) -> bool {
        query(self.stream) == crate::driver::NOT_READY
    }

    /// Ends the communicator in order.
    pub fn finish(self) {
        // SAFETY: the handle is checked by the library.
        unsafe {
            assert!(matches!((nccl().finalize)(self.comm), 0 | IN_PROGRESS));
            assert_eq!(wait_for_async_error(self.comm), 0);
            assert_eq!((nccl().destroy)(self.comm), 0);
        }
    }
}

/// Runs a body for each rank on a thread.
pub fn on_threads<T: Send>(ranks: c_int, body: impl Fn(Rank) -> T + Sync) -> Vec<T> {
    on_threads_of(crate::nccl::new_id(), ranks, Rank::join, body)
}

/// Runs a body for each rank of an id, which joins by a function.
pub fn on_threads_of<T: Send>(
    id: UniqueId,
    ranks: c_int,
    join: fn(UniqueId, c_int, c_int) -> Rank,
    body: impl Fn(Rank) -> T + Sync,
) -> Vec<T> {
    std::thread::scope(|scope| {
        let body = &body;
        let thread = |rank| {
            scope.spawn(move || {
                use_device(0);
                body(join(id, rank, ranks))
            })
        };
        let threads: Vec<_> = (0..ranks).map(thread).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}
