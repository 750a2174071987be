//! Tests the library through bindings of the real driver: its names, its symbols, the layers of cudarc.

use std::ffi::CString;
use std::io::Write;
use std::os::unix::net::UnixStream;

use cudarc::driver::{CudaContext, sys};
use simulated_gpu::{Counter, SimulatedGpu};

use crate::driver::{OK, start};
use crate::isolation::{PeerProcess, run_isolated};

/// The entry points of the driver.
const DRIVER: &[&str] = &[
    "cuInit",
    "cuDriverGetVersion",
    "cuGetErrorName",
    "cuGetErrorString",
    "cuDeviceGetCount",
    "cuDeviceGet",
    "cuDeviceGetName",
    "cuDeviceGetUuid",
    "cuDeviceGetUuid_v2",
    "cuDeviceTotalMem_v2",
    "cuDeviceGetAttribute",
    "cuDeviceCanAccessPeer",
    "cuDeviceGetPCIBusId",
    "cuDevicePrimaryCtxRetain",
    "cuDevicePrimaryCtxRelease_v2",
    "cuDevicePrimaryCtxGetState",
    "cuCtxSetCurrent",
    "cuCtxGetCurrent",
    "cuCtxGetDevice",
    "cuCtxGetStreamPriorityRange",
    "cuCtxSynchronize",
    "cuStreamCreate",
    "cuStreamCreateWithPriority",
    "cuStreamGetPriority",
    "cuStreamDestroy_v2",
    "cuStreamQuery",
    "cuStreamSynchronize",
    "cuStreamIsCapturing",
    "cuStreamWaitEvent",
    "cuStreamWriteValue32_v2",
    "cuStreamWaitValue32_v2",
    "cuLaunchHostFunc",
    "cuEventCreate",
    "cuEventDestroy_v2",
    "cuEventRecord",
    "cuEventQuery",
    "cuEventSynchronize",
    "cuEventElapsedTime",
    "cuEventElapsedTime_v2",
    "cuIpcGetMemHandle",
    "cuIpcOpenMemHandle_v2",
    "cuIpcCloseMemHandle",
    "cuIpcGetEventHandle",
    "cuIpcOpenEventHandle",
    "cuMemGetInfo_v2",
    "cuMemAlloc_v2",
    "cuMemFree_v2",
    "cuMemHostAlloc",
    "cuMemFreeHost",
    "cuMemHostRegister_v2",
    "cuMemHostUnregister",
    "cuMemHostGetDevicePointer_v2",
    "cuPointerGetAttribute",
    "cuMemcpyHtoDAsync_v2",
    "cuMemcpyDtoHAsync_v2",
    "cuMemcpyDtoDAsync_v2",
    "cuMemcpy2DAsync_v2",
    "cuMemcpyAsync",
    "cuMemsetD8Async",
    "cuMemGetAllocationGranularity",
    "cuMemCreate",
    "cuMemRelease",
    "cuMemAddressReserve",
    "cuMemAddressFree",
    "cuMemMap",
    "cuMemUnmap",
    "cuMemSetAccess",
    "cuMemExportToShareableHandle",
    "cuMemImportFromShareableHandle",
];

#[test]
fn every_symbol_is_there() {
    run_isolated("", || {
        start();
        // SAFETY: only the addresses are asked for.
        let has = |name: &str| {
            unsafe { sys::culib().get::<*const ()>(CString::new(name).unwrap().as_bytes()) }.is_ok()
        };
        let own = ["simulated_gpu_set", "simulated_gpu_get"];
        let texts = ["ncclGetVersion", "ncclGetErrorString", "ncclGetLastError"];
        let all = DRIVER.iter().chain(crate::nccl::SYMBOLS).chain(&own).chain(&texts);
        let missing: Vec<_> = all.filter(|name| !has(name)).collect();
        assert!(missing.is_empty(), "{missing:?}");
        assert!(!has("cuGraphLaunch"));
    });
}

#[test]
fn the_safe_layer_works() {
    run_isolated("", || {
        let gpu = start();
        let context = CudaContext::new(0).unwrap();
        assert_eq!(context.name().unwrap(), "Simulated GPU");
        let stream = context.new_stream().unwrap();
        let there = stream.clone_htod(&[1u32, 2, 3]).unwrap();
        let zeros = stream.alloc_zeros::<u8>(1000).unwrap();
        assert_eq!(stream.clone_dtoh(&there).unwrap(), [1, 2, 3]);
        assert_eq!(stream.clone_dtoh(&zeros).unwrap(), [0; 1000]);
        drop((there, zeros));
        stream.synchronize().unwrap();
        assert_eq!(gpu.count(Counter::Allocations), 0);
    });
}

/// Loads both libraries by their names, as a program does that knows nothing of the simulation.
pub fn load_by_name(mut socket: UnixStream) {
    use cudarc::nccl::result as nccl;
    // SAFETY: the library is loaded, called and closed; handles are used as the calls return them.
    unsafe {
        assert!(sys::is_culib_present() && cudarc::nccl::sys::is_culib_present());
        cudarc::driver::result::init().unwrap();
        crate::driver::use_device(0);
        assert_eq!(nccl::get_nccl_version().unwrap(), 23_007);
        let (mut comm, id) = (std::mem::MaybeUninit::uninit(), nccl::get_uniqueid().unwrap());
        nccl::comm_init_rank(comm.as_mut_ptr(), 1, id, 0).unwrap();
        assert_eq!(nccl::comm_count(comm.assume_init()).unwrap(), 1);
        nccl::comm_abort(comm.assume_init()).unwrap();
    }
    socket.write_all(b"well").unwrap();
}

#[test]
fn a_child_process_finds_the_library_by_its_names() {
    run_isolated("", || {
        let folder = std::env::temp_dir().join(format!("simulated-gpu-{}", std::process::id()));
        std::fs::create_dir(&folder).unwrap();
        SimulatedGpu::link_into(&folder).unwrap();
        let mut peer =
            PeerProcess::start_with("load_by_name", |command| command.env("LD_LIBRARY_PATH", &folder));
        let answer: [u8; 4] = peer.receive();
        assert!(peer.wait().success());
        std::fs::remove_dir_all(&folder).unwrap();
        assert_eq!(answer, *b"well");
    });
}

#[test]
fn errors_have_names_and_unknown_ones_have_none() {
    run_isolated("", || {
        start();
        let error = cudarc::driver::DriverError(sys::CUresult::CUDA_ERROR_ECC_UNCORRECTABLE);
        assert_eq!(error.error_name().unwrap(), c"CUDA_ERROR_ECC_UNCORRECTABLE");
        assert_eq!(error.error_string().unwrap(), c"uncorrectable ECC error encountered");
        let mut name = std::ptr::null();
        // SAFETY: the library writes an address.
        let answer = unsafe { sys::cuGetErrorName(sys::CUresult::CUDA_ERROR_STUB_LIBRARY, &raw mut name) };
        assert_eq!((answer, name), (crate::driver::INVALID_VALUE, std::ptr::null()));
        // SAFETY: the same.
        let answer = unsafe { sys::cuGetErrorName(OK, &raw mut name) };
        assert!(answer == OK && !name.is_null());
    });
}
