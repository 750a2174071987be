//! Checks whether processes may access each other's memory.
//!
//! The checks use results of probes (`ProbeResults`); `cli/doctor.rs` runs the probes. Begin at `run_checks`.

use super::check_result::{CheckVerdict, HostCheck, ProbeResults};
use super::host_root::HostRoot;

pub(super) fn run_checks(root: &HostRoot, probed: &ProbeResults) -> Vec<HostCheck> {
    vec![
        HostCheck::new(
            "shared_memory",
            "transfers by shared memory",
            "one copy between two processes, at the speed of memory",
            match &probed.shared_memory {
                Ok(()) => CheckVerdict::good("two processes moved bytes by it"),
                Err(why) => CheckVerdict::missing(
                    format!("two processes could not: {why}"),
                    "muster transfer bench --transport shm --size 1MiB",
                ),
            },
        ),
        HostCheck::new(
            "process_memory",
            "transfers by reading another process's memory",
            "buffers outside of arenas move in one copy; without it they go through a socket, in two",
            check_process_memory(root, &probed.process_memory),
        ),
    ]
}

fn check_process_memory(root: &HostRoot, outcome: &Result<(), String>) -> CheckVerdict {
    // https://www.kernel.org/doc/html/latest/admin-guide/LSM/Yama.html
    let scope = root.read_number("/proc/sys/kernel/yama/ptrace_scope");
    let yama = match scope {
        Some(scope) => format!("kernel.yama.ptrace_scope is {scope}"),
        None => "the kernel has no Yama".to_owned(),
    };
    match (outcome, scope) {
        (Ok(()), _) => CheckVerdict::good(format!("two processes moved bytes by it; {yama}")),
        (Err(why), Some(1..)) => CheckVerdict::missing(
            format!("not permitted: {yama}; {why}"),
            "sudo sysctl kernel.yama.ptrace_scope=0",
        ),
        (Err(why), _) => CheckVerdict::missing(
            format!("not permitted, though {yama}: {why}"),
            "docker run --cap-add SYS_PTRACE ...   # or a seccomp profile that allows process_vm_readv",
        ),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::host_checks::CheckState;
    use crate::host_checks::fake_host::FakeHost;

    #[test]
    fn trying_counts_and_yama_explains() {
        let yama = FakeHost::new(&[("proc/sys/kernel/yama/ptrace_scope", "1\n")]);
        assert_eq!(check_process_memory(yama.root(), &Ok(())).state, CheckState::Good);
        let refused = check_process_memory(yama.root(), &Err("went by unix".to_owned()));
        assert_eq!(refused.state, CheckState::Missing);
        assert_eq!(refused.fix.as_deref(), Some("sudo sysctl kernel.yama.ptrace_scope=0"));
        let elsewhere = check_process_memory(FakeHost::new(&[]).root(), &Err("went by unix".to_owned()));
        assert!(elsewhere.fix.is_some_and(|fix| fix.contains("SYS_PTRACE")));
    }
}
