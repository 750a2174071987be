//! How the allocator treats freed memory: it keeps what is about to be used again, and gives back what is not.

/// Tells the allocator to keep what is freed, and gives back what stays unused.
///
/// By itself glibc returns every large value to the system as soon as the value is overwritten or deleted, and asks for new
/// memory for the next one. Its pages are cleared and mapped one by one, which costs more than receiving the value does.
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
    /// Allocations above this size are mapped from the system and returned to it.
    const LARGE: usize = 8 << 20;
    /// More unused memory than this is given back at once.
    const MOST: usize = 256 << 20;
    /// Unused memory is given back after [`LOOKS`] looks in a row that found more than this, and more than a tenth of what is in use.
    const SLACK: usize = 2 << 20;
    /// How many looks must find unused memory before it is given back.
    const LOOKS: u32 = 3;
    /// The time between two looks.
    const PAUSE: Duration = Duration::from_secs(2);

    pub fn keep_freed() {
        set();
        let watch = || {
            let mut slack = Slack::default();
            loop {
                std::thread::sleep(PAUSE);
                if resident().is_some_and(|resident| slack.should_give_back(resident, in_use())) {
                    give_back();
                    slack.gave_back(resident().unwrap_or_default(), in_use());
                }
            }
        };
        if let Err(error) = std::thread::Builder::new().name("muster-memory".to_owned()).spawn(watch) {
            tracing::warn!(%error, "free memory is not given back to the system when it becomes much");
        }
    }

    /// The resident part of the process's private memory, in bytes.
    fn resident() -> Option<usize> {
        // Sizes in pages: the whole program, its resident part, the part of that which is shared (proc_pid_statm(5)).
        let statm = std::fs::read_to_string("/proc/self/statm").ok()?;
        let mut pages = statm.split(' ').skip(1).map_while(|field| field.parse::<usize>().ok());
        let (resident, shared) = (pages.next()?, pages.next()?);
        Some(resident.saturating_sub(shared) * rustix::param::page_size())
    }

    /// The bytes that are allocated and not freed.
    fn in_use() -> usize {
        // SAFETY: it adds up what the heaps know of themselves, under their locks.
        let heaps = unsafe { libc::mallinfo2() };
        heaps.uordblks + heaps.hblkhd
    }

    /// Decides when unused memory is given back to the system. All figures are private memory of the process, in bytes.
    #[derive(Debug, Default)]
    struct Slack {
        /// What was resident though not in use when memory was last given back: stacks, and the allocator's own.
        floor: Option<usize>,
        /// Looks in a row that found too much unused memory.
        looks: u32,
    }

    impl Slack {
        /// Looks at the process once. Memory that is freed stays resident, so a process that has not grown may have much of it.
        fn should_give_back(&mut self, resident: usize, in_use: usize) -> bool {
            let slack = resident.saturating_sub(in_use);
            let unused = slack.saturating_sub(*self.floor.get_or_insert(slack));
            if unused <= SLACK.max(in_use / 10) {
                self.looks = 0;
                return false;
            }
            self.looks += 1;
            self.looks >= LOOKS || unused > MOST
        }

        /// Notes what is left after memory was given back.
        fn gave_back(&mut self, resident: usize, in_use: usize) {
            *self = Self { floor: Some(resident.saturating_sub(in_use)), looks: 0 };
        }
    }

    /// Gives every free page back to the system.
    fn give_back() {
        // SAFETY: only pages that nobody has are given back.
        unsafe { libc::malloc_trim(0) };
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

    #[cfg(test)]
    mod tests {
        use super::*;

        const MIB: usize = 1 << 20;

        #[test]
        fn memory_is_given_back_when_it_stays_unused() {
            let mut slack = Slack::default();
            assert!(!slack.should_give_back(20 * MIB, 15 * MIB), "5 MiB are the process's own");
            assert!(!slack.should_give_back(120 * MIB, 115 * MIB), "all of it is in use");
            for _ in 1..LOOKS {
                assert!(!slack.should_give_back(120 * MIB, 15 * MIB), "it may be used again");
            }
            assert!(slack.should_give_back(120 * MIB, 15 * MIB));
            slack.gave_back(21 * MIB, 15 * MIB);
            assert!(!slack.should_give_back(22 * MIB, 15 * MIB), "nothing more can be given back");

            // Memory was given back while the process was busy, and is freed afterwards: the process does not grow.
            slack.gave_back(206 * MIB, 200 * MIB);
            assert!(!slack.should_give_back(206 * MIB, 200 * MIB), "all of it is in use");
            for _ in 1..LOOKS {
                assert!(!slack.should_give_back(206 * MIB, 15 * MIB), "it may be used again");
            }
            assert!(slack.should_give_back(206 * MIB, 15 * MIB));
            slack.gave_back(21 * MIB, 15 * MIB);

            for _ in 0..2 * LOOKS {
                assert!(!slack.should_give_back(60 * MIB, 15 * MIB));
                assert!(!slack.should_give_back(60 * MIB, 54 * MIB), "it is used again");
            }
            assert!(
                slack.should_give_back(15 * MIB + MOST + 20 * MIB, 15 * MIB),
                "so much is not kept at all"
            );
        }

        #[test]
        fn what_small_things_hold_back_is_given_back() {
            set();
            let before = resident().unwrap();
            let (large, small): (Vec<_>, Vec<_>) =
                (0..500).map(|n| (vec![n as u8 | 1; MIB], vec![1u8; 64])).unzip();
            assert!(resident().unwrap() >= before + 400 * MIB);
            assert!(in_use() >= 400 * MIB);
            drop(large);
            give_back();
            let kept = resident().unwrap().saturating_sub(before);
            assert!(kept < 100 * MIB, "{kept} bytes stay");
            assert_eq!(small.len(), 500);
        }
    }
}
