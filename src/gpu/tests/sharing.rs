//! Memory of a device that another process maps. Both sides are in one process here: an import makes no difference.

use std::os::fd::AsFd as _;

use muster_gpu::{
    CopyDirection, DeviceMemory, Gpu, GpuCopy, ImportedMemory, PageLocked, device_memory_bytes,
};
use simulated_gpu::{Counter, SimulatedGpu};

use crate::copying::{bytes_of, copy, copy_whole, wait, wait_until};
use crate::gpu_driver::{open_gpu, run_on_any_gpu, run_on_simulated_gpu};

const MIB: usize = 1 << 20;

#[test]
fn another_device_copies_from_imported_memory_also_after_its_owner_has_freed_it() {
    run_on_any_gpu("devices=2", || {
        let [owner, other] = [0, 1].map(open_gpu);
        let (from, mut host) = (
            DeviceMemory::allocate_shared(&owner, 3 * MIB).unwrap(),
            PageLocked::allocate(&owner, 4 * MIB).unwrap(),
        );
        assert_eq!(
            (from.len(), device_memory_bytes()),
            (4 * MIB, 4 * MIB as u64),
            "the granularity is 2 MiB"
        );
        bytes_of(&mut host).fill_with(|| fastrand::u8(..));
        let all = bytes_of(&mut host).to_vec();
        assert_eq!(copy_whole(&owner, CopyDirection::ToDevice, &host, &from), Ok(()));
        let imported = ImportedMemory::import(&other, from.descriptor().unwrap(), 4 * MIB).unwrap();
        assert_ne!(imported.base(), from.address());
        drop(from);
        assert_eq!(device_memory_bytes(), 0);
        let to = DeviceMemory::allocate(&other, MIB).unwrap();
        for part in 0..4 {
            let start = part * MIB;
            let part = GpuCopy { from: imported.base() + start as u64, to: to.address(), len: MIB };
            assert_eq!(wait(&copy(&other, CopyDirection::BetweenDevices, &[part])), Ok(()));
            bytes_of(&mut host).fill(0);
            assert_eq!(copy_whole(&other, CopyDirection::ToHost, &host, &to), Ok(()));
            assert!(bytes_of(&mut host)[..MIB] == all[start..start + MIB]);
        }
        drop((imported, to, host));
        if let Some(simulated) = SimulatedGpu::load_if_wanted() {
            let left = [Counter::Allocations, Counter::Imports];
            assert_eq!(left.map(|counter| simulated.count(counter)), [0; 2]);
            wait_until("page-locked memory is freed", || simulated.count(Counter::PinnedRanges) == 0);
        }
    });
}

#[test]
fn what_is_no_memory_of_a_device_or_is_too_short_is_not_imported() {
    run_on_any_gpu("devices=2", || {
        let gpu = open_gpu(0);
        let memory = DeviceMemory::allocate_shared(&gpu, MIB).unwrap();
        for len in [5 * MIB, usize::MAX, usize::MAX - (2 << 20)] {
            let refused = ImportedMemory::import(&gpu, memory.descriptor().unwrap(), len);
            assert!(refused.is_err_and(|error| !error.is_sticky()), "{len}");
        }
        let null = std::fs::File::open("/dev/null").unwrap();
        let (reader, _writer) = std::io::pipe().unwrap();
        for descriptor in [null.as_fd(), reader.as_fd()] {
            assert!(ImportedMemory::import(&gpu, descriptor, MIB).is_err());
        }
        assert_eq!(gpu.loss(), None);
        if let Some(simulated) = SimulatedGpu::load_if_wanted() {
            assert_eq!(simulated.count(Counter::Imports), 0, "what was refused leaves nothing behind");
        }
        assert!(ImportedMemory::import(&gpu, memory.descriptor().unwrap(), 2 * MIB).is_ok());
    });
}

#[test]
fn memory_that_is_missing_is_missing_for_shared_memory_too() {
    run_on_simulated_gpu("memory=8M", || {
        let simulated = SimulatedGpu::load();
        let gpu = Gpu::open(0).unwrap();
        let held = DeviceMemory::allocate_shared(&gpu, 6 * MIB).unwrap();
        assert!(DeviceMemory::allocate_shared(&gpu, 4 * MIB).unwrap_err().is_out_of_memory());
        drop(held);
        assert!(DeviceMemory::allocate_shared(&gpu, 8 * MIB).is_ok());
        assert_eq!(simulated.count(Counter::Allocations), 0);
    });
}
