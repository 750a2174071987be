//! Checks whether the settings of a host allow fast transfers.
//!
//! Every check is a function of a [`HostRoot`] (the files of the host) and of [`ProbeResults`] (what a process can
//! do there, such as create a sealed memory file). So every check can be tested on any host. The checks do not
//! change the host. `cli/doctor.rs` prints the results. Begin at `check_host`.

mod gpu;
mod memory;
mod memory_access;
mod network;
mod processor;
mod root;

use serde::Serialize;

pub use root::HostRoot;

/// The state of a checked item.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum CheckState {
    /// Nothing needs to be done.
    Good,
    /// It works, but not as fast or as safely as possible.
    CouldBeBetter,
    /// It is missing.
    Missing,
}

/// The result of one check.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct HostCheck {
    /// The stable identifier for programs.
    pub id: &'static str,
    /// The title for people.
    pub title: &'static str,
    /// The state.
    pub state: CheckState,
    /// The observed value.
    pub found: String,
    /// The reason why it matters.
    pub why: &'static str,
    /// The command that improves it, if there is one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub fix: Option<String>,
    /// The reason why nothing needs to be or can be done, if it is not good and has no fix.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub nothing_to_do: Option<&'static str>,
}

impl HostCheck {
    fn new(id: &'static str, title: &'static str, why: &'static str, verdict: CheckResult) -> Self {
        let CheckResult { state, found, fix, nothing_to_do } = verdict;
        Self { id, title, state, found, why, fix, nothing_to_do }
    }
}

/// The conclusion of a check.
struct CheckResult {
    state: CheckState,
    found: String,
    fix: Option<String>,
    nothing_to_do: Option<&'static str>,
}

impl CheckResult {
    fn good(found: impl Into<String>) -> Self {
        Self { state: CheckState::Good, found: found.into(), fix: None, nothing_to_do: None }
    }

    fn improvable(found: impl Into<String>, fix: impl Into<String>) -> Self {
        Self { fix: Some(fix.into()), ..Self::without_fix(CheckState::CouldBeBetter, found, None) }
    }

    fn missing(found: impl Into<String>, fix: impl Into<String>) -> Self {
        Self { fix: Some(fix.into()), ..Self::without_fix(CheckState::Missing, found, None) }
    }

    /// Returns a result that no command on this host improves, with the reason.
    fn without_fix(state: CheckState, found: impl Into<String>, because: Option<&'static str>) -> Self {
        Self { state, found: found.into(), fix: None, nothing_to_do: because }
    }
}

/// The results of probes. An error says why the probe failed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ProbeResults {
    /// The size of `/dev/shm` in bytes; `None` if it is not mounted.
    pub dev_shm: Option<u64>,
    /// Whether a sealed memory file of one gibibyte could be created.
    pub memory_file: Result<(), String>,
    /// Whether bytes went from one process to another through shared memory.
    pub shared_memory: Result<(), String>,
    /// Whether bytes went from one process to another by `process_vm_readv`.
    pub process_memory: Result<(), String>,
    /// The folders that the loader searches first: `LD_LIBRARY_PATH` of this process.
    pub library_path: String,
}

/// Runs all checks.
#[must_use]
pub fn check_host(root: &HostRoot, probed: &ProbeResults) -> Vec<HostCheck> {
    let mut checks = memory::run_checks(root, probed);
    checks.extend(memory_access::run_checks(root, probed));
    checks.extend(network::run_checks(root));
    checks.extend(processor::run_checks(root));
    checks.extend(gpu::run_checks(root, probed));
    checks
}

#[cfg(test)]
mod tests {
    use super::root::fake::FakeHost;
    use super::*;

    fn nothing_works() -> ProbeResults {
        let refused = || Err("Operation not permitted".to_owned());
        ProbeResults {
            dev_shm: None,
            memory_file: refused(),
            shared_memory: refused(),
            process_memory: refused(),
            library_path: String::new(),
        }
    }

    #[test]
    fn a_host_that_tells_nothing_is_examined_all_the_same() {
        let host = FakeHost::new(&[]);
        let checks = check_host(host.root(), &nothing_works());
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
            ]);
            assert!(check_host(host.root(), &nothing_works()).iter().all(|check| check.found.len() < 300));
        }
    }
}
