//! Memory that is freed is kept for what comes next, up to a bound.

/// Tells the allocator to keep what is freed. By itself glibc gives every large value back to the system as soon as it is
/// overwritten or deleted, and asks for new memory for the next one: pages that are cleared and mapped one by one, which
/// costs more than receiving the value does.
pub fn keep_freed() {
    #[cfg(all(target_os = "linux", target_env = "gnu"))]
    glibc::keep_freed();
}

#[cfg(all(target_os = "linux", target_env = "gnu"))]
mod glibc {
    #![allow(unsafe_code)]

    use std::time::Duration;

    /// So much free memory at the end of a heap is kept, of which there are a few.
    const KEPT: usize = 64 << 20;
    /// What is larger is asked of the system, and given back to it.
    const LARGE: usize = 8 << 20;
    /// More than this is not kept free in all, wherever it lies: something small that lives at the end of a heap would
    /// keep all that is free before it.
    const MOST: usize = 256 << 20;
    /// How often that is looked at.
    const PAUSE: Duration = Duration::from_secs(10);

    pub fn keep_freed() {
        set();
        let watch = || {
            loop {
                std::thread::sleep(PAUSE);
                give_back();
            }
        };
        if let Err(error) = std::thread::Builder::new().name("muster-memory".to_owned()).spawn(watch) {
            tracing::warn!(%error, "free memory is not given back to the system when it becomes much");
        }
    }

    fn set() {
        let set = [(libc::M_TRIM_THRESHOLD, KEPT), (libc::M_MMAP_THRESHOLD, LARGE)].map(|(what, bytes)| {
            // SAFETY: it sets a number of the allocator, under its own lock.
            unsafe { libc::mallopt(what, bytes as libc::c_int) == 1 }
        });
        if set.contains(&false) {
            tracing::warn!("the allocator does not take its settings: large values will cost more");
        }
    }

    /// Gives free memory back to the system if there is too much of it.
    fn give_back() {
        // SAFETY: it adds up what the heaps know of themselves, under their locks.
        let free = unsafe { libc::mallinfo2() }.fordblks;
        if free > MOST {
            // SAFETY: only pages that nobody has are given back.
            unsafe { libc::malloc_trim(KEPT) };
        }
    }

    #[cfg(test)]
    mod tests {
        use super::*;

        fn resident() -> usize {
            let pages = std::fs::read_to_string("/proc/self/statm").unwrap();
            pages.split(' ').nth(1).unwrap().parse::<usize>().unwrap() * rustix::param::page_size()
        }

        #[test]
        fn what_small_things_hold_back_is_given_back_when_it_is_much() {
            const MIB: usize = 1 << 20;
            set();
            let before = resident();
            let (large, small): (Vec<_>, Vec<_>) =
                (0..500).map(|n| (vec![n as u8 | 1; MIB], vec![1u8; 64])).unzip();
            assert!(resident() >= before + 400 * MIB);
            drop(large);
            give_back();
            let kept = resident().saturating_sub(before);
            assert!(kept < MOST, "{kept} bytes stay");
            assert_eq!(small.len(), 500);
        }
    }
}
