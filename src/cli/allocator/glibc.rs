//! Sets the parameters of glibc's allocator, and starts a thread that returns unused memory to the system.
//!
//! Begin at `configure_allocator_and_start_trimming`.

#![allow(unsafe_code)]

use std::hint::black_box;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use tokio::runtime::Handle;

/// The number of free bytes at the end of a heap that are kept. A process has a few heaps.
const TRIM_THRESHOLD: usize = 64 << 20;
/// The free bytes at the end of the heap of each thread of the runtime at first, and after it was trimmed. Without
/// them, the allocator asks the system for every further page of the heap by itself.
const ROOM: usize = 4 << 20;
/// The size above which allocations are mapped from the system and returned to it.
const LARGE: usize = 8 << 20;
/// The number of unused bytes above which memory is returned at once.
const MOST: usize = 256 << 20;
/// Unused memory is returned after [`CHECKS_MIN`] checks in a row that found more than this, and more
/// than a tenth of the memory in use.
const SLACK_BYTES: usize = 2 << 20;
/// The number of checks in a row that must find unused memory.
const CHECKS_MIN: u32 = 3;
/// The time between two checks.
const PAUSE: Duration = Duration::from_secs(2);

/// A thread that frees more than this trims the end of its heap (`FASTBIN_CONSOLIDATION_THRESHOLD` of
/// malloc.c).
const CUTS: usize = 128 << 10;
/// The number of times that a thread with a trimmed heap waits for the others, so that each thread trims
/// its own.
const TURNS: usize = 1 << 10;
/// The time that the threads of the runtime have to trim their heaps.
const CUTTING: Duration = Duration::from_millis(50);

pub(super) fn configure_allocator_and_start_trimming(runtime: Handle) {
    set_allocator_parameters(&[(libc::M_TRIM_THRESHOLD, TRIM_THRESHOLD), (libc::M_MMAP_THRESHOLD, LARGE)]);
    allocate_and_free_on_each_thread(&runtime, ROOM);
    let watch = move || {
        let mut slack = TrimPolicy::default();
        loop {
            std::thread::sleep(PAUSE);
            if resident_private_bytes().is_some_and(|resident_private_bytes| {
                slack.should_trim(resident_private_bytes, allocated_bytes())
            }) {
                trim_free_heap_pages();
                trim_heap_of_each_thread(&runtime);
                slack.record_trim(resident_private_bytes().unwrap_or_default(), allocated_bytes());
            }
        }
    };
    if let Err(error) = std::thread::Builder::new().name("muster-memory".to_owned()).spawn(watch) {
        tracing::warn!(%error, "free memory is not given back to the system when it becomes much");
    }
}

/// Returns the resident private memory of the process, in bytes.
fn resident_private_bytes() -> Option<usize> {
    // Sizes in pages: the whole program, its resident part, and the shared part of that
    // (proc_pid_statm(5)).
    let statm = std::fs::read_to_string("/proc/self/statm").ok()?;
    let mut pages = statm.split(' ').skip(1).map_while(|field| field.parse::<usize>().ok());
    let (resident, shared) = (pages.next()?, pages.next()?);
    Some(resident.saturating_sub(shared) * rustix::param::page_size())
}

/// Returns the allocated bytes that are not freed.
fn allocated_bytes() -> usize {
    // SAFETY: it sums the statistics of the heaps under their locks.
    let heaps = unsafe { libc::mallinfo2() };
    heaps.uordblks + heaps.hblkhd
}

/// Decides when unused memory is returned to the system. All figures are bytes of the process's private
/// memory.
#[derive(Debug, Default)]
struct TrimPolicy {
    /// The resident memory that was not in use after memory was last returned: stacks, and the
    /// allocator's own.
    floor: Option<usize>,
    /// The number of checks in a row that found too much unused memory.
    checks: u32,
}

impl TrimPolicy {
    /// Checks the process once. Freed memory stays resident, so a process can have much unused memory
    /// without growing.
    fn should_trim(&mut self, resident: usize, allocated_bytes: usize) -> bool {
        let slack = resident.saturating_sub(allocated_bytes);
        let unused = slack.saturating_sub(*self.floor.get_or_insert(slack));
        if unused <= SLACK_BYTES.max(allocated_bytes / 10) {
            self.checks = 0;
            return false;
        }
        self.checks += 1;
        self.checks >= CHECKS_MIN || unused > MOST
    }

    /// Records the resident memory after memory was returned.
    fn record_trim(&mut self, resident: usize, allocated_bytes: usize) {
        *self = Self { floor: Some(resident.saturating_sub(allocated_bytes)), checks: 0 };
    }
}

/// Returns every free page to the system, except those at the ends of heaps.
fn trim_free_heap_pages() {
    // SAFETY: only free pages are returned.
    unsafe { libc::malloc_trim(0) };
}

/// Makes each thread of the runtime trim the end of its heap. `malloc_trim` does not, and no other thread
/// can.
fn trim_heap_of_each_thread(runtime: &Handle) {
    set_allocator_parameters(&[(libc::M_TRIM_THRESHOLD, CUTS)]);
    allocate_and_free_on_each_thread(runtime, CUTS);
    std::thread::sleep(CUTTING);
    set_allocator_parameters(&[(libc::M_TRIM_THRESHOLD, TRIM_THRESHOLD)]);
    allocate_and_free_on_each_thread(runtime, ROOM);
}

/// Makes each thread of the runtime allocate this many bytes and free them.
fn allocate_and_free_on_each_thread(runtime: &Handle, bytes: usize) {
    let threads = runtime.metrics().num_workers();
    let done = Arc::new(AtomicUsize::new(0));
    for _ in 0..threads {
        let done = Arc::clone(&done);
        runtime.spawn(async move {
            drop(black_box(Vec::<u8>::with_capacity(bytes)));
            done.fetch_add(1, Ordering::Relaxed);
            // A thread that finished at once could run the task of another thread, too.
            for _ in 0..TURNS {
                if done.load(Ordering::Relaxed) == threads {
                    break;
                }
                std::thread::yield_now();
            }
        });
    }
}

fn set_allocator_parameters(settings: &[(libc::c_int, usize)]) {
    // SAFETY: it sets a parameter of the allocator under the allocator's lock.
    let set = |(what, bytes): &(_, usize)| unsafe { libc::mallopt(*what, *bytes as libc::c_int) == 1 };
    if !settings.iter().all(set) {
        tracing::warn!("the allocator does not take its settings: large values will cost more");
    }
}

#[cfg(test)]
mod tests {
    use std::io::{Read as _, Seek as _, SeekFrom};

    use super::*;
    use crate::isolated_test::run_isolated;

    const MIB: usize = 1 << 20;

    #[test]
    fn memory_is_given_back_when_it_stays_unused() {
        let mut slack = TrimPolicy::default();
        assert!(!slack.should_trim(20 * MIB, 15 * MIB), "5 MiB are the process's own");
        assert!(!slack.should_trim(120 * MIB, 115 * MIB), "all of it is in use");
        for _ in 1..CHECKS_MIN {
            assert!(!slack.should_trim(120 * MIB, 15 * MIB), "it may be used again");
        }
        assert!(slack.should_trim(120 * MIB, 15 * MIB));
        slack.record_trim(21 * MIB, 15 * MIB);
        assert!(!slack.should_trim(22 * MIB, 15 * MIB), "nothing more can be given back");

        // Memory is returned while the process is busy, and freed afterwards: the process does not grow.
        slack.record_trim(206 * MIB, 200 * MIB);
        assert!(!slack.should_trim(206 * MIB, 200 * MIB), "all of it is in use");
        for _ in 1..CHECKS_MIN {
            assert!(!slack.should_trim(206 * MIB, 15 * MIB), "it may be used again");
        }
        assert!(slack.should_trim(206 * MIB, 15 * MIB));
        slack.record_trim(21 * MIB, 15 * MIB);

        for _ in 0..2 * CHECKS_MIN {
            assert!(!slack.should_trim(60 * MIB, 15 * MIB));
            assert!(!slack.should_trim(60 * MIB, 54 * MIB), "it is used again");
        }
        assert!(slack.should_trim(15 * MIB + MOST + 20 * MIB, 15 * MIB), "so much is not kept at all");
    }

    /// Returns how many of the bytes at an address are in memory.
    fn count_resident_bytes(address: usize, bytes: usize) -> usize {
        let page = rustix::param::page_size();
        let mut map = std::fs::File::open("/proc/self/pagemap").unwrap();
        map.seek(SeekFrom::Start((address / page * 8) as u64)).unwrap();
        let mut entries = vec![0; bytes / page * 8];
        map.read_exact(&mut entries).unwrap();
        let (entries, _) = entries.as_chunks::<8>();
        entries.iter().filter(|entry| u64::from_ne_bytes(**entry) >> 63 == 1).count() * page
    }

    #[test]
    fn each_thread_of_the_runtime_gives_back_the_end_of_its_heap() {
        // Alone, because threads of other tests would share the heaps of the runtime's threads.
        run_isolated(&[], || {
            const PARTS: usize = 48;
            set_allocator_parameters(&[
                (libc::M_TRIM_THRESHOLD, TRIM_THRESHOLD),
                (libc::M_MMAP_THRESHOLD, LARGE),
            ]);
            let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).build().unwrap();
            let both = Arc::new(std::sync::Barrier::new(2));
            let fill = || {
                let both = Arc::clone(&both);
                runtime.spawn(async move {
                    // Each value on a thread of its own.
                    both.wait();
                    // Allocated first, because later allocations would lie behind the parts in the heap.
                    let mut places = Vec::with_capacity(PARTS);
                    let parts: Vec<Vec<u8>> = (0..PARTS).map(|n| vec![n as u8 | 1; MIB]).collect();
                    both.wait();
                    places.extend(parts.iter().map(|part| part.as_ptr().addr()));
                    places
                })
            };
            let filled = [fill(), fill()].map(|filled| runtime.block_on(filled).unwrap()).concat();
            let kept = || filled.iter().map(|part| count_resident_bytes(*part, MIB)).sum::<usize>();
            trim_free_heap_pages();
            assert!(kept() > MIB, "the ends of the heaps are kept for what is allocated next");
            // On a busy machine, one thread can run the tasks of both before the other wakes.
            let trimmed = (0..50).any(|_| {
                trim_heap_of_each_thread(runtime.handle());
                kept() < PARTS * MIB / 4
            });
            assert!(trimmed, "{} bytes stay", kept());
        });
    }

    #[test]
    fn memory_held_by_small_allocations_is_returned() {
        run_isolated(&[], || {
            set_allocator_parameters(&[
                (libc::M_TRIM_THRESHOLD, TRIM_THRESHOLD),
                (libc::M_MMAP_THRESHOLD, LARGE),
            ]);
            let before = resident_private_bytes().unwrap();
            let (large, small): (Vec<_>, Vec<_>) =
                (0..500).map(|n| (vec![n as u8 | 1; MIB], vec![1u8; 64])).unzip();
            assert!(resident_private_bytes().unwrap() >= before + 400 * MIB);
            assert!(allocated_bytes() >= 400 * MIB);
            drop(large);
            trim_free_heap_pages();
            let kept = resident_private_bytes().unwrap().saturating_sub(before);
            assert!(kept < 100 * MIB, "{kept} bytes stay");
            assert_eq!(small.len(), 500);
        });
    }
}
