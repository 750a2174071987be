//! Checks the CPUs, the CPU quota, NUMA, the clock source and idle polling.
//!
//! Begin at `run_checks`.

use super::check_result::{CheckState, CheckVerdict, HostCheck};
use super::host_root::HostRoot;
use super::memory::least_cgroup_limit;

pub(super) fn run_checks(root: &HostRoot) -> Vec<HostCheck> {
    vec![
        HostCheck::new(
            "cores",
            "cores",
            "copying and checking take cores: with one, a transfer's two ends take turns",
            check_cores(root),
        ),
        HostCheck::new(
            "cpu_quota",
            "limit of processor time",
            "whoever has used up a limit stands still for the rest of its period, with all that wait for it",
            check_cpu_quota(root),
        ),
        HostCheck::new(
            "numa",
            "NUMA nodes",
            "copies between memory of different nodes are slower by a third or more",
            check_numa(root),
        ),
        HostCheck::new(
            "clock_source",
            "clock source",
            "the clock is read often; some sources make that a call of the kernel, or slower",
            check_clock_source(root),
        ),
        HostCheck::new(
            "idle_processors",
            "idle processors",
            "whoever waits for a message looks for a moment and then sleeps; in a virtual machine the host wakes a halted \
             processor, which takes longer than all else that a small message costs",
            check_idle_polling(root),
        ),
    ]
}

/// Checks how long an idle processor of a virtual machine polls before it halts.
fn check_idle_polling(root: &HostRoot) -> CheckVerdict {
    const POLLS: &str = "/sys/module/haltpoll/parameters/guest_halt_poll_ns";
    let governor = root.read_text("/sys/devices/system/cpu/cpuidle/current_governor").unwrap_or_default();
    let governor: String = governor.chars().filter(char::is_ascii_graphic).take(40).collect();
    let virtual_machine = root.read_text("/proc/cpuinfo").is_some_and(|text| {
        let mut flags = text.lines().filter(|line| line.starts_with("flags"));
        flags.next().is_some_and(|flags| flags.split_whitespace().any(|flag| flag == "hypervisor"))
    });
    if !virtual_machine {
        return CheckVerdict::good(if governor.is_empty() {
            "not in a virtual machine".to_owned()
        } else {
            governor
        });
    }
    match root.read_number(POLLS).filter(|_| governor == "haltpoll") {
        Some(0) => CheckVerdict::improvable(
            "halted at once: haltpoll looks for work for 0 us",
            format!("echo 200000 | sudo tee {POLLS}   # and haltpoll.guest_halt_poll_ns=200000 at boot"),
        ),
        Some(nanoseconds) => {
            CheckVerdict::good(format!("haltpoll: they look for work for up to {} us", nanoseconds / 1000))
        }
        None => CheckVerdict::improvable(
            "halted at once, as far as can be seen",
            "sudo modprobe cpuidle_haltpoll force=1   # or kvm.halt_poll_ns on the host",
        ),
    }
}

/// Returns the number of elements of a list such as `0-3,8`.
fn cpu_list_length(list: &str) -> Option<u64> {
    list.split(',').map(str::trim).try_fold(0u64, |sum, part| {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        let (first, last): (u64, u64) = (first.parse().ok()?, last.parse().ok()?);
        sum.checked_add(last.checked_sub(first)?.checked_add(1)?)
    })
}

/// Returns the size of a list in the process's status.
fn process_status_list_length(root: &HostRoot, name: &str) -> Option<u64> {
    let text = root.read_text("/proc/self/status")?;
    cpu_list_length(text.lines().find_map(|line| line.strip_prefix(name))?)
}

fn check_cores(root: &HostRoot) -> CheckVerdict {
    let online = root.read_text("/sys/devices/system/cpu/online").and_then(|list| cpu_list_length(&list));
    match (process_status_list_length(root, "Cpus_allowed_list:"), online) {
        (None, _) => CheckVerdict::improvable(
            "not known here",
            "mount -t proc proc /proc   # /proc/self/status tells it, and cannot be read here",
        ),
        (Some(1), Some(2..)) => CheckVerdict::improvable(
            "1, of more",
            "taskset -p $$   # who confined it; or raise the container's --cpuset-cpus",
        ),
        (Some(1), _) => CheckVerdict::without_fix(
            CheckState::CouldBeBetter,
            "1",
            Some("this host has one core: only another host, or a larger virtual machine, has more"),
        ),
        (Some(allowed), Some(online)) if allowed < online => {
            CheckVerdict::good(format!("{allowed} of {online}"))
        }
        (Some(allowed), _) => CheckVerdict::good(allowed.to_string()),
    }
}

fn check_cpu_quota(root: &HostRoot) -> CheckVerdict {
    // In thousandths of a core.
    let limited = least_cgroup_limit(root, "cpu", |root, place| {
        let (quota, period) = match root.read_text(&format!("{place}/cpu.max")) {
            Some(text) => {
                let mut words = text.split_whitespace();
                (words.next()?.parse::<u64>().ok()?, words.next()?.parse::<u64>().ok()?)
            }
            None => (
                root.read_number(&format!("{place}/cpu.cfs_quota_us"))?,
                root.read_number(&format!("{place}/cpu.cfs_period_us"))?,
            ),
        };
        quota.checked_mul(1000)?.checked_div(period)
    });
    let cores = process_status_list_length(root, "Cpus_allowed_list:").unwrap_or(u64::MAX / 1000);
    match limited {
        Some(limit) if limit < cores.saturating_mul(1000) => CheckVerdict::improvable(
            format!("{:.1} cores, though more may be used at once", limit as f64 / 1000.0),
            "docker run without --cpus, or a Kubernetes pod of class Guaranteed with whole cores",
        ),
        Some(limit) => {
            CheckVerdict::good(format!("{:.1} cores, which is all of them", limit as f64 / 1000.0))
        }
        None => CheckVerdict::good("none"),
    }
}

fn check_numa(root: &HostRoot) -> CheckVerdict {
    let Some(nodes) =
        root.read_text("/sys/devices/system/node/online").and_then(|list| cpu_list_length(&list))
    else {
        return CheckVerdict::good("not told: one, as far as anybody can see");
    };
    if nodes <= 1 {
        return CheckVerdict::good("1");
    }
    let memory = process_status_list_length(root, "Mems_allowed_list:").unwrap_or(nodes);
    if memory == 1 {
        return CheckVerdict::good(format!("{nodes}, and this process keeps to one"));
    }
    let fix =
        "numactl --cpunodebind=0 --membind=0 -- PROGRAM   # the node of its GPU or NIC, one task a node";
    CheckVerdict::improvable(format!("{nodes}, and this process uses {memory} of them"), fix)
}

fn check_clock_source(root: &HostRoot) -> CheckVerdict {
    const FOLDER: &str = "/sys/devices/system/clocksource/clocksource0";
    // The clock sources that a process reads without a system call.
    const FAST: [&str; 5] =
        ["tsc", "kvm-clock", "arch_sys_counter", "hyperv_clocksource_tsc_page", "riscv_clocksource"];
    let current = root.read_text(&format!("{FOLDER}/current_clocksource")).unwrap_or_default();
    let current: String = current.chars().filter(char::is_ascii_graphic).take(40).collect();
    if FAST.contains(&current.as_str()) {
        return CheckVerdict::good(current);
    }
    let there = root.read_text(&format!("{FOLDER}/available_clocksource")).unwrap_or_default();
    let found = if current.is_empty() { "not told".to_owned() } else { current };
    match FAST.into_iter().find(|fast| there.split_whitespace().any(|word| word == *fast)) {
        Some(fast) => {
            CheckVerdict::improvable(found, format!("echo {fast} | sudo tee {FOLDER}/current_clocksource"))
        }
        None => CheckVerdict::improvable(
            found,
            "dmesg | grep -i tsc   # why the kernel does not trust the fast one",
        ),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::host_checks::fake_host::FakeHost;

    #[test]
    fn lists_are_counted() {
        assert_eq!(cpu_list_length("0"), Some(1));
        assert_eq!(cpu_list_length("0-3,8,10-11"), Some(7));
        for wrong in ["", "3-1", "a", "0-18446744073709551615", "1,,2"] {
            assert_eq!(cpu_list_length(wrong), None, "{wrong}");
        }
    }

    #[test]
    fn a_quota_below_the_cores_could_be_better_in_both_versions_of_control_groups() {
        let status = ("proc/self/status", "Cpus_allowed_list:\t0-7\nMems_allowed_list:\t0\n");
        let new = FakeHost::new(&[
            status,
            ("proc/self/cgroup", "0::/a"),
            ("sys/fs/cgroup/a/cpu.max", "250000 100000"),
        ]);
        let verdict = check_cpu_quota(new.root());
        assert_eq!(verdict.state, CheckState::CouldBeBetter);
        assert!(verdict.found.starts_with("2.5 cores"), "{}", verdict.found);
        let old = FakeHost::new(&[
            status,
            ("proc/self/cgroup", "3:cpu,cpuacct:/a"),
            ("sys/fs/cgroup/cpu,cpuacct/a/cpu.cfs_quota_us", "400000"),
            ("sys/fs/cgroup/cpu,cpuacct/a/cpu.cfs_period_us", "100000"),
        ]);
        assert_eq!(check_cpu_quota(old.root()).state, CheckState::CouldBeBetter);
        let free =
            FakeHost::new(&[status, ("proc/self/cgroup", "0::/"), ("sys/fs/cgroup/cpu.max", "max 100000")]);
        assert_eq!(check_cpu_quota(free.root()).state, CheckState::Good);
    }

    #[test]
    fn several_nodes_are_fine_for_who_keeps_to_one() {
        let nodes = ("sys/devices/system/node/online", "0-1");
        let both = FakeHost::new(&[nodes, ("proc/self/status", "Mems_allowed_list:\t0-1")]);
        assert_eq!(check_numa(both.root()).state, CheckState::CouldBeBetter);
        let one = FakeHost::new(&[nodes, ("proc/self/status", "Mems_allowed_list:\t1")]);
        assert_eq!(check_numa(one.root()).state, CheckState::Good);
    }

    #[test]
    fn a_slow_clock_source_names_the_fast_one_that_is_there() {
        let folder = "sys/devices/system/clocksource/clocksource0";
        let (current, available) =
            (format!("{folder}/current_clocksource"), format!("{folder}/available_clocksource"));
        let slow = FakeHost::new(&[(&current, "hpet\n"), (&available, "tsc hpet acpi_pm \n")]);
        let verdict = check_clock_source(slow.root());
        assert_eq!(verdict.state, CheckState::CouldBeBetter);
        assert!(verdict.fix.is_some_and(|fix| fix.starts_with("echo tsc ")));
        assert_eq!(check_clock_source(FakeHost::new(&[(&current, "tsc\n")]).root()).state, CheckState::Good);
    }

    #[test]
    fn processors_of_a_virtual_machine_that_halt_at_once_could_be_better() {
        let (machine, metal) = (
            ("proc/cpuinfo", "processor\t: 0\nflags\t\t: fpu hypervisor sse\n"),
            ("proc/cpuinfo", "processor\t: 0\nflags\t\t: fpu sse\n"),
        );
        let governor = ("sys/devices/system/cpu/cpuidle/current_governor", "haltpoll\n");
        let polls = |ns| ("sys/module/haltpoll/parameters/guest_halt_poll_ns", ns);
        for (files, state) in [
            (vec![machine, governor, polls("0\n")], CheckState::CouldBeBetter),
            (vec![machine, governor, polls("200000\n")], CheckState::Good),
            (vec![machine], CheckState::CouldBeBetter),
            (vec![metal, governor, polls("0\n")], CheckState::Good),
            (vec![], CheckState::Good),
        ] {
            let host = FakeHost::new(&files);
            let verdict = check_idle_polling(host.root());
            assert_eq!(verdict.state, state, "{}", verdict.found);
            assert_eq!(verdict.fix.is_some(), state != CheckState::Good);
        }
    }

    #[test]
    fn one_core_of_more_could_be_better() {
        let host = FakeHost::new(&[
            ("proc/self/status", "Cpus_allowed_list:\t3"),
            ("sys/devices/system/cpu/online", "0-3"),
        ]);
        let verdict = check_cores(host.root());
        assert_eq!((verdict.state, verdict.fix.is_some()), (CheckState::CouldBeBetter, true));
    }
}
