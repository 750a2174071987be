//! Checks whether the settings of a host allow fast transfers.
//!
//! Every check is a function of a [`HostRoot`] (the files of the host) and of [`ProbeResults`] (what a process can do
//! on the host, such as create a sealed memory file). So every check can be tested on any host. The checks do not
//! change the host. `cli/doctor.rs` runs the probes and prints the results. Begin at `check_host`.

mod check_result;
#[cfg(test)]
mod fake_host;
mod gpu;
mod gpu_health;
mod host_root;
mod kernel_log;
mod memory;
mod memory_access;
mod network;
mod processor;

pub use check_result::{CheckState, HostCheck, ProbeResults, ProbedGpu, ProbedGpus};
pub use host_root::HostRoot;

/// Runs all checks.
#[must_use]
pub fn check_host(root: &HostRoot, probed: &ProbeResults) -> Vec<HostCheck> {
    let mut checks = memory::run_checks(root, probed);
    checks.extend(memory_access::run_checks(root, probed));
    checks.extend(network::run_checks(root, probed));
    checks.extend(processor::run_checks(root));
    checks.extend(gpu::run_checks(root, probed));
    checks.extend(gpu_health::run_checks(root, probed));
    checks
}

#[cfg(test)]
pub(super) mod tests {
    use muster_gpu::{GpuHealth, InstalledGpu};

    use super::fake_host::FakeHost;
    use super::*;

    pub(super) fn failed_probe_results() -> ProbeResults {
        let refused = || Err("Operation not permitted".to_owned());
        ProbeResults {
            dev_shm: None,
            memory_file: refused(),
            shared_memory: refused(),
            process_memory: refused(),
            gpu_memory: Err("there is no CUDA driver".to_owned()),
            fabric: Err("libfabric.so.1 cannot be loaded".to_owned()),
            gpu_health: Err("NVML: a library is missing".to_owned()),
            library_path: String::new(),
        }
    }

    #[test]
    fn a_host_that_tells_nothing_is_examined_all_the_same() {
        let host = FakeHost::new(&[]);
        let checks = check_host(host.root(), &failed_probe_results());
        assert!(checks.len() >= 15);
        let mut ids: Vec<_> = checks.iter().map(|check| check.id).collect();
        ids.sort_unstable();
        ids.dedup();
        assert_eq!(ids.len(), checks.len(), "every check has an id of its own");
        for check in checks {
            assert!(!check.found.is_empty() && !check.why.is_empty(), "{check:?}");
            assert_eq!(check.found.lines().count(), 1, "{check:?}");
            let next = (check.fix.is_some(), check.nothing_to_do.is_some());
            let wanted: &[_] = if check.state == CheckState::Good {
                &[(false, false)]
            } else {
                &[(true, false), (false, true)]
            };
            assert!(wanted.contains(&next), "a fix, or why there is none: {check:?}");
        }
    }

    #[test]
    fn absurd_files_are_no_reason_to_fail() {
        let long = "9".repeat(100_000);
        for content in ["", "\0\0", "-1", "max max max", "[", "18446744073709551616", &long] {
            let host = FakeHost::new(&[
                ("sys/kernel/mm/transparent_hugepage/enabled", content),
                ("sys/kernel/mm/transparent_hugepage/shmem_enabled", content),
                ("proc/sys/vm/nr_hugepages", content),
                ("proc/self/limits", content),
                ("proc/self/cgroup", content),
                ("proc/self/status", content),
                ("proc/meminfo", content),
                ("proc/sys/net/core/rmem_max", content),
                ("proc/sys/net/ipv4/tcp_rmem", content),
                ("proc/sys/kernel/yama/ptrace_scope", content),
                ("sys/devices/system/node/online", content),
                ("sys/fs/cgroup/cpu.max", content),
                ("sys/fs/cgroup/memory.max", content),
                ("sys/devices/system/clocksource/clocksource0/current_clocksource", content),
                ("proc/driver/nvidia/version", content),
                ("etc/ld.so.conf", content),
                ("dev/kmsg", content),
            ]);
            let gpu = InstalledGpu { number: 0, health: Ok(GpuHealth::default()) };
            let probed = ProbeResults { gpu_health: Ok(vec![gpu]), ..failed_probe_results() };
            let checks = check_host(host.root(), &probed);
            assert!(checks.iter().any(|check| check.id == "gpu_errors"), "the kernel's log is read");
            assert!(checks.iter().all(|check| check.found.len() < 300));
        }
    }
}
