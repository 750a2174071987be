//! Checks which NVIDIA driver and which NCCL are installed, and whether transfers reach the memory of GPUs.
//!
//! Begin at `run_checks`.

use super::check_result::{CheckState, CheckVerdict, HostCheck, ProbeResults, ProbedGpus};
use super::host_root::HostRoot;
use crate::text::format_bytes;

pub(super) fn run_checks(root: &HostRoot, probed: &ProbeResults) -> Vec<HostCheck> {
    vec![
        HostCheck::new(
            "gpu_driver",
            "NVIDIA driver",
            "buffers of GPUs move only where the driver and its library are there; host memory needs neither",
            check_driver(root, &probed.library_path),
        ),
        HostCheck::new(
            "gpu_memory",
            "Transfers of GPU memory",
            "buffers of GPUs move without a copy by the program, and their memory is page-locked once and not each time",
            check_gpu_memory(root, &probed.gpu_memory),
        ),
        HostCheck::new(
            "nccl",
            "NCCL",
            "the fastest way between GPUs of several processes; 2.28.9 and later can give a communicator up in order",
            check_nccl(root, &probed.library_path),
        ),
    ]
}

/// The folders of the dynamic loader, besides those of its variable and its configuration.
const LIBRARIES: [&str; 8] = [
    "/usr/lib/x86_64-linux-gnu",
    "/usr/lib/aarch64-linux-gnu",
    "/lib/x86_64-linux-gnu",
    "/lib/aarch64-linux-gnu",
    "/usr/lib64",
    "/lib64",
    "/usr/lib",
    "/usr/local/cuda/lib64",
];

/// Returns the folders of libraries, in the order of the search. `first` is the value of `LD_LIBRARY_PATH`.
fn library_folders(root: &HostRoot, first: &str) -> Vec<String> {
    let first = first.split([':', ';']).filter(|folder| folder.starts_with('/') && folder.len() < 4096);
    let mut folders: Vec<String> = first.take(64).map(str::to_owned).collect();
    let mut add = |text: Option<String>| {
        let text = text.unwrap_or_default();
        let lines = text.lines().map(str::trim).filter(|line| line.starts_with('/') && line.len() < 4096);
        folders.extend(lines.take(64).map(str::to_owned));
    };
    add(root.read_text("/etc/ld.so.conf"));
    for name in root.list_names("/etc/ld.so.conf.d").into_iter().take(64) {
        add(root.read_text(&format!("/etc/ld.so.conf.d/{name}")));
    }
    folders.extend(LIBRARIES.map(str::to_owned));
    folders
}

/// Returns the path of the first library whose name begins with `start`, and its link target or its name.
fn find_library(root: &HostRoot, first: &str, start: &str) -> Option<(String, String)> {
    library_folders(root, first).into_iter().find_map(|folder| {
        let name = root.list_names(&folder).into_iter().rfind(|name| name.starts_with(start))?;
        let path = format!("{folder}/{name}");
        let real = root.link_target_name(&path).unwrap_or(name);
        Some((path, real))
    })
}

/// Returns the first word that looks like a version, such as `570.86.15`.
fn version_in_text(text: &str) -> Option<String> {
    let digits = |word: &&str| {
        word.contains('.')
            && word.len() < 32
            && word.split('.').all(|part| !part.is_empty() && part.bytes().all(|byte| byte.is_ascii_digit()))
    };
    text.split_whitespace().find(digits).map(str::to_owned)
}

fn check_driver(root: &HostRoot, first: &str) -> CheckVerdict {
    let running = root
        .read_text("/proc/driver/nvidia/version")
        .map(|text| version_in_text(&text).unwrap_or_else(|| "of unknown version".to_owned()))
        .or_else(|| version_in_text(&root.read_text("/sys/module/nvidia/version")?));
    let library = find_library(root, first, "libcuda.so.");
    match (running, library) {
        (Some(version), Some((path, _))) => CheckVerdict::good(format!("{version}, {path}")),
        (Some(version), None) => CheckVerdict::missing(
            format!("{version} runs, but libcuda.so.1 is not to be found"),
            "docker run --gpus all ...   # or install the driver's libraries",
        ),
        (None, Some((path, _))) => CheckVerdict::missing(
            format!("{path} is there, but no driver runs"),
            "sudo modprobe nvidia && nvidia-smi",
        ),
        (None, None) if root.exists("/dev/nvidia0") => {
            CheckVerdict::missing("a device is there without its driver", "nvidia-smi")
        }
        (None, None) => CheckVerdict::without_fix(
            CheckState::Missing,
            "none, and no GPU",
            Some("this host has no GPU, and buffers in its memory move without one"),
        ),
    }
}

/// Returns whether a driver of NVIDIA runs, or a GPU is there without one.
pub(super) fn has_driver_or_gpu(root: &HostRoot) -> bool {
    root.exists("/proc/driver/nvidia/version") || root.exists("/dev/nvidia0")
}

fn check_gpu_memory(root: &HostRoot, probed: &Result<ProbedGpus, String>) -> CheckVerdict {
    match probed {
        Ok(ProbedGpus { gpus, .. }) => {
            let described: Vec<String> =
                gpus.iter().map(|gpu| format!("{} ({})", gpu.name, format_bytes(gpu.memory))).collect();
            CheckVerdict::good(described.join(", "))
        }
        Err(_) if !has_driver_or_gpu(root) => CheckVerdict::without_fix(
            CheckState::Missing,
            "no GPU",
            Some("this host has no GPU, and buffers in its memory move without one"),
        ),
        Err(error) => CheckVerdict::missing(error.clone(), "nvidia-smi   # says whether the driver works"),
    }
}

fn check_nccl(root: &HostRoot, first: &str) -> CheckVerdict {
    let Some((path, real)) = find_library(root, first, "libnccl.so.") else {
        return CheckVerdict::missing(
            "not to be found where the loader looks, LD_LIBRARY_PATH included",
            "sudo apt-get install libnccl2   # or the wheel nvidia-nccl-cu13, with its folder on LD_LIBRARY_PATH",
        );
    };
    let numbers: Vec<u32> = real
        .strip_prefix("libnccl.so.")
        .map(|numbers| numbers.split('.').filter_map(|number| number.parse().ok()).collect())
        .unwrap_or_default();
    match numbers[..] {
        [major, minor, ..] if (major, minor) < (2, 28) => CheckVerdict::improvable(
            format!("{major}.{minor}, {path}"),
            "sudo apt-get install --only-upgrade libnccl2   # 2.28 and later can give up a communicator in order",
        ),
        [_, _, ..] => CheckVerdict::good(format!("{}, {path}", real.trim_start_matches("libnccl.so."))),
        _ => CheckVerdict::good(format!("{path}, of unknown version")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::host_checks::ProbedGpu;
    use crate::host_checks::fake_host::FakeHost;

    #[test]
    fn the_driver_needs_its_library_and_the_library_its_driver() {
        let text = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.86.15  Release Build\nGCC version: gcc 12.2.0";
        let (running, library) =
            (("proc/driver/nvidia/version", text), ("usr/lib/x86_64-linux-gnu/libcuda.so.1", ""));
        let driver = |root: &HostRoot| check_driver(root, "");
        let both = driver(FakeHost::new(&[running, library]).root());
        assert_eq!(both.state, CheckState::Good);
        assert!(both.found.starts_with("570.86.15, "), "{}", both.found);
        assert_eq!(driver(FakeHost::new(&[running]).root()).state, CheckState::Missing);
        assert_eq!(driver(FakeHost::new(&[library]).root()).state, CheckState::Missing);
        let none = driver(FakeHost::new(&[]).root());
        assert_eq!((none.state, none.fix), (CheckState::Missing, None));
        assert!(none.nothing_to_do.is_some_and(|why| why.contains("no GPU")));
    }

    #[test]
    fn gpus_are_described_if_a_transfer_between_them_succeeds() {
        let (gpu, none) = (FakeHost::new(&[("dev/nvidia0", "")]), FakeHost::new(&[]));
        let probed = ProbedGpu { name: "H100".to_owned(), memory: 80 << 30, peers: Vec::new() };
        let found = Ok(ProbedGpus { gpus: vec![probed.clone(), probed], page_locked: Ok(1 << 20) });
        let good = check_gpu_memory(gpu.root(), &found);
        assert_eq!((good.state, good.found.as_str()), (CheckState::Good, "H100 (80.0 GiB), H100 (80.0 GiB)"));
        let refused = Err("GPU 0: cuMemHostAlloc: CUDA_ERROR_OUT_OF_MEMORY (2)".to_owned());
        let missing = check_gpu_memory(gpu.root(), &refused);
        assert!(missing.found.contains("cuMemHostAlloc") && missing.fix.is_some());
        assert!(check_gpu_memory(none.root(), &refused).nothing_to_do.is_some());
    }

    #[test]
    fn nccl_is_found_on_the_loader_path() {
        let told = ("etc/ld.so.conf.d/nccl.conf", "# ours\n/opt/nccl/lib\n");
        let wheel = ("home/me/nvidia/nccl/lib/libnccl.so.2.28.9", "");
        let old = ("usr/lib/libnccl.so.2.19.3", "");
        let first =
            check_nccl(FakeHost::new(&[wheel, old]).root(), ":relative:/home/me/nvidia/nccl/lib:/nowhere");
        assert_eq!(
            (first.state, first.found.as_str()),
            (CheckState::Good, "2.28.9, /home/me/nvidia/nccl/lib/libnccl.so.2.28.9")
        );
        assert_eq!(check_nccl(FakeHost::new(&[wheel]).root(), "").state, CheckState::Missing);
        let nccl = |root: &HostRoot| check_nccl(root, "");
        let found = nccl(FakeHost::new(&[told, ("opt/nccl/lib/libnccl.so.2.28.9", "")]).root());
        assert_eq!(
            (found.state, found.found.as_str()),
            (CheckState::Good, "2.28.9, /opt/nccl/lib/libnccl.so.2.28.9")
        );
        let old = nccl(FakeHost::new(&[told, ("opt/nccl/lib/libnccl.so.2.19.3", "")]).root());
        assert_eq!(old.state, CheckState::CouldBeBetter);
        let nameless = nccl(FakeHost::new(&[("usr/lib/libnccl.so.2", "")]).root());
        assert!(nameless.found.ends_with("of unknown version"));
        assert_eq!(nccl(FakeHost::new(&[]).root()).state, CheckState::Missing);
    }
}
