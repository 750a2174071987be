//! Checks the NVIDIA driver and NCCL by their files.
//!
//! Begin at `checks`.

use super::{Check, Probed, Root, State, Verdict};

pub(super) fn checks(root: &Root, probed: &Probed) -> Vec<Check> {
    vec![
        Check::new(
            "gpu_driver",
            "NVIDIA driver",
            "buffers of GPUs move only where the driver and its library are there; host memory needs neither",
            driver(root, &probed.library_path),
        ),
        Check::new(
            "nccl",
            "NCCL",
            "the fastest way between GPUs of several processes; 2.28.9 and later can give a communicator up in order",
            nccl(root, &probed.library_path),
        ),
    ]
}

/// Where the loader looks, besides what its variable and its configuration name.
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

/// The folders of libraries, in the order of the search. `first` is what `LD_LIBRARY_PATH` holds.
fn folders(root: &Root, first: &str) -> Vec<String> {
    let first = first.split([':', ';']).filter(|folder| folder.starts_with('/') && folder.len() < 4096);
    let mut folders: Vec<String> = first.take(64).map(str::to_owned).collect();
    let mut add = |text: Option<String>| {
        let text = text.unwrap_or_default();
        let lines = text.lines().map(str::trim).filter(|line| line.starts_with('/') && line.len() < 4096);
        folders.extend(lines.take(64).map(str::to_owned));
    };
    add(root.read("/etc/ld.so.conf"));
    for name in root.names("/etc/ld.so.conf.d").into_iter().take(64) {
        add(root.read(&format!("/etc/ld.so.conf.d/{name}")));
    }
    folders.extend(LIBRARIES.map(str::to_owned));
    folders
}

/// The first library whose name begins like this: its path, and what it is a link to or its name.
fn find(root: &Root, first: &str, start: &str) -> Option<(String, String)> {
    folders(root, first).into_iter().find_map(|folder| {
        let name = root.names(&folder).into_iter().rfind(|name| name.starts_with(start))?;
        let path = format!("{folder}/{name}");
        let real = root.link(&path).unwrap_or(name);
        Some((path, real))
    })
}

/// The first word that looks like a version, such as `570.86.15`.
fn version(text: &str) -> Option<String> {
    let digits = |word: &&str| {
        word.contains('.')
            && word.len() < 32
            && word.split('.').all(|part| !part.is_empty() && part.bytes().all(|byte| byte.is_ascii_digit()))
    };
    text.split_whitespace().find(digits).map(str::to_owned)
}

fn driver(root: &Root, first: &str) -> Verdict {
    let running = root
        .read("/proc/driver/nvidia/version")
        .map(|text| version(&text).unwrap_or_else(|| "of unknown version".to_owned()))
        .or_else(|| version(&root.read("/sys/module/nvidia/version")?));
    let library = find(root, first, "libcuda.so.");
    match (running, library) {
        (Some(version), Some((path, _))) => Verdict::good(format!("{version}, {path}")),
        (Some(version), None) => Verdict::missing(
            format!("{version} runs, but libcuda.so.1 is not to be found"),
            "docker run --gpus all ...   # or install the driver's libraries",
        ),
        (None, Some((path, _))) => Verdict::missing(
            format!("{path} is there, but no driver runs"),
            "sudo modprobe nvidia && nvidia-smi",
        ),
        (None, None) if root.has("/dev/nvidia0") => {
            Verdict::missing("a device is there without its driver", "nvidia-smi")
        }
        (None, None) => Verdict::idle(
            State::Missing,
            "none, and no GPU",
            Some("this host has no GPU, and buffers in its memory move without one"),
        ),
    }
}

fn nccl(root: &Root, first: &str) -> Verdict {
    let Some((path, real)) = find(root, first, "libnccl.so.") else {
        return Verdict::missing(
            "not to be found where the loader looks, LD_LIBRARY_PATH included",
            "sudo apt-get install libnccl2   # or the wheel nvidia-nccl-cu13, with its folder on LD_LIBRARY_PATH",
        );
    };
    let numbers: Vec<u32> = real
        .strip_prefix("libnccl.so.")
        .map(|numbers| numbers.split('.').filter_map(|number| number.parse().ok()).collect())
        .unwrap_or_default();
    match numbers[..] {
        [major, minor, ..] if (major, minor) < (2, 28) => Verdict::better(
            format!("{major}.{minor}, {path}"),
            "sudo apt-get install --only-upgrade libnccl2   # 2.28 and later can give up a communicator in order",
        ),
        [_, _, ..] => Verdict::good(format!("{}, {path}", real.trim_start_matches("libnccl.so."))),
        _ => Verdict::good(format!("{path}, of unknown version")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::doctor::root::fake::Fake;

    #[test]
    fn the_driver_needs_its_library_and_the_library_its_driver() {
        let text = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.86.15  Release Build\nGCC version: gcc 12.2.0";
        let (running, library) =
            (("proc/driver/nvidia/version", text), ("usr/lib/x86_64-linux-gnu/libcuda.so.1", ""));
        let driver = |root: &Root| driver(root, "");
        let both = driver(Fake::new(&[running, library]).root());
        assert_eq!(both.state, State::Good);
        assert!(both.found.starts_with("570.86.15, "), "{}", both.found);
        assert_eq!(driver(Fake::new(&[running]).root()).state, State::Missing);
        assert_eq!(driver(Fake::new(&[library]).root()).state, State::Missing);
        let none = driver(Fake::new(&[]).root());
        assert_eq!((none.state, none.fix), (State::Missing, None));
        assert!(none.nothing_to_do.is_some_and(|why| why.contains("no GPU")));
    }

    #[test]
    fn nccl_is_found_where_the_loader_is_told_to_look() {
        let told = ("etc/ld.so.conf.d/nccl.conf", "# ours\n/opt/nccl/lib\n");
        let wheel = ("home/me/nvidia/nccl/lib/libnccl.so.2.28.9", "");
        let old = ("usr/lib/libnccl.so.2.19.3", "");
        let first = nccl(Fake::new(&[wheel, old]).root(), ":relative:/home/me/nvidia/nccl/lib:/nowhere");
        assert_eq!(
            (first.state, first.found.as_str()),
            (State::Good, "2.28.9, /home/me/nvidia/nccl/lib/libnccl.so.2.28.9")
        );
        assert_eq!(nccl(Fake::new(&[wheel]).root(), "").state, State::Missing);
        let nccl = |root: &Root| nccl(root, "");
        let found = nccl(Fake::new(&[told, ("opt/nccl/lib/libnccl.so.2.28.9", "")]).root());
        assert_eq!(
            (found.state, found.found.as_str()),
            (State::Good, "2.28.9, /opt/nccl/lib/libnccl.so.2.28.9")
        );
        let old = nccl(Fake::new(&[told, ("opt/nccl/lib/libnccl.so.2.19.3", "")]).root());
        assert_eq!(old.state, State::CouldBeBetter);
        let nameless = nccl(Fake::new(&[("usr/lib/libnccl.so.2", "")]).root());
        assert!(nameless.found.ends_with("of unknown version"));
        assert_eq!(nccl(Fake::new(&[]).root()).state, State::Missing);
    }
}
