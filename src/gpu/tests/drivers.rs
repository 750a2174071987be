//! Tests a process without a driver, or with an unsuitable one.

use muster_gpu::{DeviceFacts, DriverUnavailable, Gpu, device_count, driver_version};
use simulated_gpu::SimulatedGpu;

use crate::isolated_test::run_isolated;

/// The names under which a driver is looked for.
const NAMES: [&str; 8] = [
    "libcuda.so",
    "libcuda.so.1",
    "libcuda.so.9",
    "libcuda.so.10",
    "libcuda.so.11",
    "libcuda.so.12",
    "libcuda64.so",
    "libnvcuda.so",
];

/// Makes a folder whose libraries hide a driver of the system, and returns the value of `LD_LIBRARY_PATH`.
fn folder_with(name: &str, library: &[u8]) -> String {
    let folder = std::env::temp_dir().join(format!("muster-gpu-{name}-{}", std::process::id()));
    std::fs::create_dir_all(&folder).unwrap();
    for name in NAMES {
        std::fs::write(folder.join(name), library).unwrap();
    }
    folder.to_str().unwrap().to_owned()
}

#[test]
fn without_a_driver_every_call_says_so() {
    let folder = folder_with("none", b"no library");
    run_isolated(&[("LD_LIBRARY_PATH", &folder)], || {
        assert_eq!(Gpu::open(0), Err(DriverUnavailable::NotInstalled));
        assert_eq!(device_count(), Err(DriverUnavailable::NotInstalled));
        let text = driver_version().unwrap_err().to_string();
        assert!(text.contains("no CUDA driver") && text.contains("--gpus all"), "{text}");
    });
    let _ = std::fs::remove_dir_all(folder);
}

#[test]
fn a_driver_that_lacks_functions_is_refused_with_their_names() {
    let mut library = std::fs::read(SimulatedGpu::library()).unwrap();
    // A symbol of another name is not found.
    for name in [&b"\0cuMemHostAlloc\0"[..], b"\0cuEventQuery\0"] {
        let places: Vec<usize> = library
            .windows(name.len())
            .enumerate()
            .filter(|(_, bytes)| *bytes == name)
            .map(|(at, _)| at)
            .collect();
        assert!(!places.is_empty());
        places.iter().for_each(|at| library[at + 1] = b'x');
    }
    let folder = folder_with("lacking", &library);
    run_isolated(&[("LD_LIBRARY_PATH", &folder)], || {
        let names = vec!["cuEventQuery", "cuMemHostAlloc"];
        assert_eq!(Gpu::open(0), Err(DriverUnavailable::MissingFunctions { names }));
        let text = device_count().unwrap_err().to_string();
        assert!(text.starts_with("the CUDA driver lacks cuEventQuery, cuMemHostAlloc"), "{text}");
    });
    let _ = std::fs::remove_dir_all(folder);
}

#[test]
fn an_old_driver_is_refused_with_its_version() {
    run_isolated(&[("SIMULATED_GPU", "version=11080")], || {
        SimulatedGpu::load();
        assert_eq!(Gpu::open(0), Err(DriverUnavailable::TooOld { version: 11_080 }));
        assert!(driver_version().unwrap_err().to_string().contains("supports CUDA 11.8, and 12.0 is needed"));
    });
}

#[test]
fn a_device_tells_its_facts_and_unknown_ones_are_refused() {
    run_isolated(&[("SIMULATED_GPU", "devices=3;memory=5G")], || {
        SimulatedGpu::load();
        assert_eq!((driver_version(), device_count()), (Ok(12_000), Ok(3)));
        let gpu = Gpu::open(1).unwrap();
        assert_eq!(gpu, Gpu::open(1).unwrap());
        let all = DeviceFacts::of_all_devices().unwrap();
        let facts = &all[1];
        assert_eq!((all.len(), facts.ordinal), (3, 1));
        assert_eq!((facts.memory, &facts.peers[..]), (5 << 30, &[0, 2][..]), "{facts:?}");
        assert!(facts.uuid.starts_with("GPU-") && facts.uuid.len() == 40, "{facts:?}");
        assert!(!facts.name.is_empty() && facts.pci.contains(':'), "{facts:?}");
        for ordinal in [3, 64, u32::MAX] {
            assert_eq!(Gpu::open(ordinal), Err(DriverUnavailable::NoSuchDevice { ordinal, count: 3 }));
        }
    });
}
