//! Checks huge pages, `/dev/shm`, locked memory and the memory limit.
//!
//! The checks use results of probes (`ProbeResults`); `cli/doctor.rs` runs the probes. Begin at `run_checks`.

use super::check_result::{CheckVerdict, HostCheck, ProbeResults};
use super::host_root::HostRoot;
use crate::text::format_bytes;

const THP: &str = "/sys/kernel/mm/transparent_hugepage";

/// Google's number as a vendor of PCI devices, and the numbers of its TPUs, as JAX knows them (`jax/_src/hardware_utils.py`).
const GOOGLE: &str = "0x1ae0";
const TPUS: [&str; 7] = ["0x0027", "0x0056", "0x005e", "0x0062", "0x0063", "0x006f", "0x0076"];

/// Returns whether the host has a TPU.
fn has_tpu(root: &HostRoot) -> bool {
    const DEVICES: &str = "/sys/bus/pci/devices";
    root.list_names(DEVICES).iter().take(1024).any(|device| {
        let read = |file| root.read_text(&format!("{DEVICES}/{device}/{file}")).unwrap_or_default();
        read("vendor") == GOOGLE && TPUS.contains(&read("device").as_str())
    })
}

pub(super) fn run_checks(root: &HostRoot, probed: &ProbeResults) -> Vec<HostCheck> {
    // The TPU runtime asks for none, and starts and stops much faster with them.
    let (accepted, wanted): (&[_], _) =
        if has_tpu(root) { (&["always"], "always") } else { (&["always", "madvise"], "madvise") };
    vec![
        HostCheck::new(
            "huge_pages",
            "transparent huge pages",
            "large buffers in ordinary memory take one entry of the TLB for 2 MiB instead of 512: copies are faster",
            check_huge_pages(root, "enabled", accepted, wanted),
        ),
        HostCheck::new(
            "huge_pages_shared",
            "transparent huge pages of shared memory",
            "arenas are shared memory and ask for huge pages: without them a first touch and every copy cost more",
            check_huge_pages(root, "shmem_enabled", &["always", "within_size", "advise", "force"], "advise"),
        ),
        HostCheck::new(
            "huge_pages_reserved",
            "reserved huge pages",
            "Muster uses transparent huge pages: what is reserved for others is memory that nobody else gets",
            check_reserved_huge_pages(root),
        ),
        HostCheck::new(
            "dev_shm",
            "/dev/shm",
            "NCCL and data loaders keep shared memory there (Muster's own arenas do not need it); containers often get 64 MiB",
            check_dev_shm(probed.dev_shm),
        ),
        HostCheck::new(
            "memory_file",
            "sealed memory files",
            "arenas are sealed memory files, which peers map: the fastest way between processes of a host",
            match &probed.memory_file {
                Ok(()) => CheckVerdict::good("1 GiB can be made"),
                Err(why) => CheckVerdict::missing(
                    format!("cannot be made: {why}"),
                    "uname -r   # needs Linux 5.1, and memfd_create allowed by the container's seccomp profile",
                ),
            },
        ),
        HostCheck::new(
            "locked_memory",
            "memory that may be locked",
            "GPU drivers and RDMA lock the memory that they read and write: with too little of it they refuse or copy once more",
            check_locked_memory(root),
        ),
        HostCheck::new(
            "memory_limit",
            "memory",
            "shared memory counts towards the limit of the control group: what exceeds it is killed",
            check_memory_limit(root),
        ),
    ]
}

/// Returns the word in brackets of a file such as `always [madvise] never`.
fn bracketed_word(text: &str) -> Option<&str> {
    text.split_whitespace().find_map(|word| word.strip_prefix('[')?.strip_suffix(']'))
}

fn check_huge_pages(root: &HostRoot, file: &str, good: &[&str], wanted: &str) -> CheckVerdict {
    let path = format!("{THP}/{file}");
    let fix = format!("echo {wanted} | sudo tee {path}");
    let Some(text) = root.read_text(&path) else {
        return CheckVerdict::missing(
            format!("{path} is not there: the kernel has none, or /sys is not mounted"),
            "grep TRANSPARENT_HUGEPAGE /boot/config-$(uname -r)   # not set: boot a kernel that has it; else mount /sys here",
        );
    };
    match bracketed_word(&text) {
        Some(word) if good.contains(&word) => CheckVerdict::good(word),
        Some(word) => CheckVerdict::improvable(truncate_to_line(word), fix),
        None => CheckVerdict::improvable("it says nothing", fix),
    }
}

/// Returns the text of a file, cut to the length of a line.
fn truncate_to_line(text: &str) -> String {
    text.chars().filter(|letter| !letter.is_control()).take(40).collect()
}

fn check_reserved_huge_pages(root: &HostRoot) -> CheckVerdict {
    let pages = root.read_number("/proc/sys/vm/nr_hugepages").unwrap_or(0);
    if pages == 0 {
        return CheckVerdict::good("none");
    }
    let size = read_number_field(root, "/proc/meminfo", "Hugepagesize:").unwrap_or(2048) << 10;
    let found = format!("{pages} pages, {}", format_bytes(pages.saturating_mul(size)));
    CheckVerdict::improvable(found, "sudo sysctl vm.nr_hugepages=0   # unless something else uses them")
}

/// Returns the number after `name` in a file of lines such as `MemTotal: 5 kB`.
pub(super) fn read_number_field(root: &HostRoot, path: &str, name: &str) -> Option<u64> {
    let text = root.read_text(path)?;
    text.lines().find_map(|line| line.strip_prefix(name)?.split_whitespace().next()?.parse().ok())
}

fn check_dev_shm(size: Option<u64>) -> CheckVerdict {
    const ENOUGH: u64 = 1 << 30;
    let fix = "sudo mount -o remount,size=8G /dev/shm   # in a container: docker run --shm-size=8g";
    match size {
        None => CheckVerdict::missing("not mounted", "sudo mount -t tmpfs -o size=8G tmpfs /dev/shm"),
        Some(size) if size < ENOUGH => CheckVerdict::improvable(format_bytes(size), fix),
        Some(size) => CheckVerdict::good(format_bytes(size)),
    }
}

/// Returns the soft and the hard limit of this process; `None` is unlimited.
pub(super) fn read_process_limit(root: &HostRoot, name: &str) -> Option<(Option<u64>, Option<u64>)> {
    let text = root.read_text("/proc/self/limits")?;
    let mut values = text.lines().find_map(|line| line.strip_prefix(name))?.split_whitespace();
    let mut value = || match values.next()? {
        "unlimited" => Some(None),
        number => number.parse().ok().map(Some),
    };
    Some((value()?, value()?))
}

fn check_locked_memory(root: &HostRoot) -> CheckVerdict {
    const ENOUGH: u64 = 1 << 30;
    let fix = "ulimit -l unlimited   # for good: memlock in /etc/security/limits.conf, LimitMEMLOCK= of a unit, docker run --ulimit memlock=-1";
    match read_process_limit(root, "Max locked memory") {
        None => CheckVerdict::improvable("the limit is not known", fix),
        Some((None, _)) => CheckVerdict::good("unlimited"),
        Some((Some(soft), _)) if soft >= ENOUGH => CheckVerdict::good(format_bytes(soft)),
        Some((Some(soft), _)) => CheckVerdict::improvable(format_bytes(soft), fix),
    }
}

/// Returns the least limit of this process's control group and those above it.
pub(super) fn least_cgroup_limit(
    root: &HostRoot,
    controller: &str,
    limit: impl Fn(&HostRoot, &str) -> Option<u64>,
) -> Option<u64> {
    let groups = root.read_text("/proc/self/cgroup")?;
    let mut places = Vec::new();
    for line in groups.lines().take(64) {
        let mut parts = line.splitn(3, ':');
        let (Some(_), Some(controllers), Some(path)) = (parts.next(), parts.next(), parts.next()) else {
            continue;
        };
        let base = if controllers.is_empty() {
            "/sys/fs/cgroup".to_owned()
        } else if controllers.split(',').any(|one| one == controller) {
            format!("/sys/fs/cgroup/{controllers}")
        } else {
            continue;
        };
        // A container may see its host's path, of which only the last part exists, or no path.
        let mut folder = path.trim_end_matches('/').to_owned();
        for _ in 0..64 {
            places.push(format!("{base}{folder}"));
            match folder.rfind('/') {
                Some(at) => folder.truncate(at),
                None => break,
            }
        }
    }
    places.iter().filter_map(|place| limit(root, place)).min()
}

fn check_memory_limit(root: &HostRoot) -> CheckVerdict {
    const ENOUGH: u64 = 4 << 30;
    let total = read_number_field(root, "/proc/meminfo", "MemTotal:").map(|kib| kib.saturating_mul(1 << 10));
    let limited = least_cgroup_limit(root, "memory", |root, place| {
        let limits = [format!("{place}/memory.max"), format!("{place}/memory.limit_in_bytes")];
        limits.iter().find_map(|path| root.read_number(path))
    });
    // Version 1 of control groups writes "no limit" as a huge number.
    let limited = limited.filter(|limit| total.is_none_or(|total| *limit < total));
    let hidden = "mount -t proc proc /proc   # /proc/meminfo tells it, and cannot be read here";
    let fix = "ps -eo rss,args --sort=-rss | head   # who has it; or raise the limit of the container";
    let Some(total) = total else { return CheckVerdict::improvable("its size is not known", hidden) };
    let available = read_number_field(root, "/proc/meminfo", "MemAvailable:")
        .map_or(total, |kib| kib.saturating_mul(1 << 10));
    let found = match limited {
        Some(limit) => {
            format!(
                "{} available of {}, limited to {}",
                format_bytes(available),
                format_bytes(total),
                format_bytes(limit)
            )
        }
        None => format!("{} available of {}, no limit", format_bytes(available), format_bytes(total)),
    };
    if available.min(limited.unwrap_or(u64::MAX)) < ENOUGH {
        CheckVerdict::improvable(found, fix)
    } else {
        CheckVerdict::good(found)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::host_checks::CheckState;
    use crate::host_checks::fake_host::FakeHost;

    #[test]
    fn huge_pages_are_good_when_they_can_be_asked_for() {
        for (text, state) in [
            ("always [madvise] never", CheckState::Good),
            ("[always] madvise never", CheckState::Good),
            ("always madvise [never]", CheckState::CouldBeBetter),
        ] {
            let host = FakeHost::new(&[("sys/kernel/mm/transparent_hugepage/enabled", text)]);
            let verdict = check_huge_pages(host.root(), "enabled", &["always", "madvise"], "madvise");
            assert_eq!(verdict.state, state, "{text}");
            assert_eq!(verdict.fix.is_some(), state != CheckState::Good);
        }
        let none = check_huge_pages(FakeHost::new(&[]).root(), "enabled", &["always"], "always");
        assert_eq!(none.state, CheckState::Missing);
        assert!(none.fix.is_some_and(|fix| fix.contains("boot a kernel") && fix.contains("mount /sys")));
    }

    #[test]
    fn a_host_with_a_tpu_needs_huge_pages_for_all() {
        let of_pci_device = |device| {
            let files = [
                ("sys/kernel/mm/transparent_hugepage/enabled", "always [madvise] never"),
                ("sys/bus/pci/devices/0000:00:05.0/vendor", "0x1ae0\n"),
                ("sys/bus/pci/devices/0000:00:05.0/device", device),
            ];
            let host = FakeHost::new(&files);
            let probed = crate::host_checks::tests::failed_probe_results();
            let checks = run_checks(host.root(), &probed);
            checks.into_iter().find(|check| check.id == "huge_pages").unwrap()
        };
        let with_tpu = of_pci_device("0x0063\n");
        assert_eq!(with_tpu.state, CheckState::CouldBeBetter);
        assert!(with_tpu.fix.is_some_and(|fix| fix.contains("always")));
        assert_eq!(of_pci_device("0x0042").state, CheckState::Good, "a network card of the same vendor");
    }

    #[test]
    fn limits_are_read_from_the_table_of_the_process() {
        let table = "Limit                     Soft Limit           Hard Limit           Units     \n\
                     Max locked memory         8388608              unlimited            bytes     \n\
                     Max open files            1024                 524288               files     \n";
        let host = FakeHost::new(&[("proc/self/limits", table)]);
        assert_eq!(read_process_limit(host.root(), "Max locked memory"), Some((Some(8_388_608), None)));
        assert_eq!(read_process_limit(host.root(), "Max open files"), Some((Some(1024), Some(524_288))));
        assert_eq!(read_process_limit(host.root(), "Max anything"), None);
        assert_eq!(check_locked_memory(host.root()).state, CheckState::CouldBeBetter);
        let free = FakeHost::new(&[("proc/self/limits", "Max locked memory  unlimited unlimited bytes")]);
        assert_eq!(check_locked_memory(free.root()).state, CheckState::Good);
    }

    #[test]
    fn the_tightest_control_group_counts() {
        let meminfo = "MemTotal: 67108864 kB\nMemAvailable: 50000000 kB\n";
        let host = FakeHost::new(&[
            ("proc/meminfo", meminfo),
            ("proc/self/cgroup", "0::/pods/one"),
            ("sys/fs/cgroup/pods/one/memory.max", "max"),
            ("sys/fs/cgroup/pods/memory.max", "2147483648"),
        ]);
        let verdict = check_memory_limit(host.root());
        assert_eq!(verdict.state, CheckState::CouldBeBetter);
        assert!(verdict.found.contains("limited to 2.0 GiB"), "{}", verdict.found);
        let old = FakeHost::new(&[
            ("proc/meminfo", meminfo),
            ("proc/self/cgroup", "4:memory:/\n0::/"),
            ("sys/fs/cgroup/memory/memory.limit_in_bytes", "9223372036854771712"),
        ]);
        assert_eq!(check_memory_limit(old.root()).state, CheckState::Good);
    }

    #[test]
    fn what_is_reserved_and_a_small_dev_shm_could_be_better() {
        let host =
            FakeHost::new(&[("proc/sys/vm/nr_hugepages", "512"), ("proc/meminfo", "Hugepagesize: 2048 kB")]);
        let verdict = check_reserved_huge_pages(host.root());
        assert_eq!(
            (verdict.state, verdict.found.as_str()),
            (CheckState::CouldBeBetter, "512 pages, 1.0 GiB")
        );
        assert_eq!(check_dev_shm(Some(64 << 20)).state, CheckState::CouldBeBetter);
        assert_eq!(check_dev_shm(Some(8 << 30)).state, CheckState::Good);
        assert_eq!(check_dev_shm(None).state, CheckState::Missing);
    }
}
