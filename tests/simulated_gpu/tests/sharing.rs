//! Memory between processes: IPC handles and descriptors, and the death of either side at each step.

use std::io::Read;
use std::mem::MaybeUninit;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::os::unix::net::UnixStream;

use cudarc::driver::sys::{self, CUresult};
use simulated_gpu::{Counter, Setting, SimulatedGpu};

use crate::driver::{
    CUevent, ILLEGAL_ADDRESS, INVALID_HANDLE, INVALID_VALUE, OK, allocate, contents, copy, fill, free,
    new_stream, query, start, synchronize, write_device_bytes,
};
use crate::isolation::{PeerProcess, run_isolated, wait_until};

/// The granularity of physical allocations.
pub const GRANULE: usize = 2 << 20;

fn to_bytes(handle: [std::ffi::c_char; 64]) -> [u8; 64] {
    handle.map(|byte| byte as u8)
}

/// Returns the handle of memory.
pub fn memory_handle(at: u64) -> [u8; 64] {
    let mut handle = sys::CUipcMemHandle { reserved: [0; 64] };
    // SAFETY: the library writes a handle.
    unsafe { sys::cuIpcGetMemHandle(&raw mut handle, at).result().unwrap() };
    to_bytes(handle.reserved)
}

/// Returns the answer to the wish for a handle of memory.
pub fn memory_handle_answer(at: u64) -> CUresult {
    let mut handle = sys::CUipcMemHandle { reserved: [0; 64] };
    // SAFETY: the library writes a handle.
    unsafe { sys::cuIpcGetMemHandle(&raw mut handle, at) }
}

/// Opens memory of another process.
pub fn try_open_memory(handle: [u8; 64]) -> Result<u64, CUresult> {
    let handle = sys::CUipcMemHandle { reserved: handle.map(|byte| byte as std::ffi::c_char) };
    let mut at = 0;
    // SAFETY: the library writes an address.
    let answer = unsafe { sys::cuIpcOpenMemHandle_v2(&raw mut at, handle, 1) };
    if answer == OK { Ok(at) } else { Err(answer) }
}

pub fn close_memory(at: u64) -> CUresult {
    // SAFETY: an address is checked by the library.
    unsafe { sys::cuIpcCloseMemHandle(at) }
}

/// Returns the handle of an event.
pub fn event_handle(event: CUevent) -> [u8; 64] {
    let mut handle = sys::CUipcEventHandle { reserved: [0; 64] };
    // SAFETY: the library writes a handle.
    unsafe { sys::cuIpcGetEventHandle(&raw mut handle, event).result().unwrap() };
    to_bytes(handle.reserved)
}

pub fn try_open_event(handle: [u8; 64]) -> Result<CUevent, CUresult> {
    let handle = sys::CUipcEventHandle { reserved: handle.map(|byte| byte as std::ffi::c_char) };
    let mut event = std::ptr::null_mut();
    // SAFETY: the library writes a handle.
    let answer = unsafe { sys::cuIpcOpenEventHandle(&raw mut event, handle) };
    if answer == OK { Ok(event) } else { Err(answer) }
}

pub fn open_event(handle: [u8; 64]) -> CUevent {
    try_open_event(handle).unwrap()
}

/// Properties of an exportable allocation of device 0.
pub fn properties() -> sys::CUmemAllocationProp {
    // SAFETY: zero is a value of every field that is set next or is a number or a pointer.
    let mut prop: sys::CUmemAllocationProp = unsafe {
        let mut prop = MaybeUninit::<sys::CUmemAllocationProp>::zeroed();
        (&raw mut (*prop.as_mut_ptr()).type_).write(sys::CUmemAllocationType::CU_MEM_ALLOCATION_TYPE_PINNED);
        prop.assume_init()
    };
    prop.requestedHandleTypes = sys::CUmemAllocationHandleType::CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
    prop.location.type_ = sys::CUmemLocationType::CU_MEM_LOCATION_TYPE_DEVICE;
    prop
}

/// Creates a physical allocation.
pub fn create_physical(len: usize) -> u64 {
    let (mut handle, prop) = (0, properties());
    // SAFETY: the library reads the properties and writes a handle.
    unsafe { sys::cuMemCreate(&raw mut handle, len, &raw const prop, 0).result().unwrap() };
    handle
}

/// Reserves addresses.
pub fn reserve(len: usize) -> u64 {
    let mut at = 0;
    // SAFETY: the library writes an address.
    unsafe { sys::cuMemAddressReserve(&raw mut at, len, 0, 0, 0).result().unwrap() };
    at
}

/// Maps a physical allocation.
pub fn map(at: u64, len: usize, handle: u64) -> CUresult {
    // SAFETY: arguments are checked by the library.
    unsafe { sys::cuMemMap(at, len, 0, handle, 0) }
}

/// Makes mappings accessible.
pub fn make_accessible(at: u64, len: usize) -> CUresult {
    let location = properties().location;
    let flags = sys::CUmemAccess_flags::CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
    let description = sys::CUmemAccessDesc { location, flags };
    // SAFETY: the library reads one description.
    unsafe { sys::cuMemSetAccess(at, len, &raw const description, 1) }
}

/// Maps a physical allocation at new addresses.
pub fn map_anywhere(handle: u64, len: usize) -> u64 {
    let at = reserve(len);
    assert_eq!([map(at, len, handle), make_accessible(at, len)], [OK, OK]);
    at
}

/// Exports a physical allocation.
pub fn export(handle: u64) -> OwnedFd {
    let mut descriptor = -1;
    let kind = sys::CUmemAllocationHandleType::CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
    // SAFETY: the library writes a descriptor, which is new.
    unsafe {
        let to = (&raw mut descriptor).cast();
        sys::cuMemExportToShareableHandle(to, handle, kind, 0).result().unwrap();
        OwnedFd::from_raw_fd(descriptor)
    }
}

/// Imports a descriptor.
pub fn try_import(descriptor: i32) -> Result<u64, CUresult> {
    let mut handle = 0;
    let kind = sys::CUmemAllocationHandleType::CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
    // SAFETY: the library writes a handle.
    let answer =
        unsafe { sys::cuMemImportFromShareableHandle(&raw mut handle, descriptor as usize as *mut _, kind) };
    if answer == OK { Ok(handle) } else { Err(answer) }
}

/// Sends a descriptor with one byte.
pub fn send_descriptor(socket: &UnixStream, descriptor: &OwnedFd) {
    let (byte, mut space) = ([1u8], [0u64; 8]);
    let mut part = libc::iovec { iov_base: byte.as_ptr().cast_mut().cast(), iov_len: 1 };
    // SAFETY: the message names memory that lives as long as the call.
    unsafe {
        let mut message: libc::msghdr = std::mem::zeroed();
        (message.msg_iov, message.msg_iovlen) = (&raw mut part, 1);
        (message.msg_control, message.msg_controllen) =
            (space.as_mut_ptr().cast(), libc::CMSG_SPACE(4) as usize);
        let head = libc::CMSG_FIRSTHDR(&raw const message);
        let (level, kind, len) = (libc::SOL_SOCKET, libc::SCM_RIGHTS, libc::CMSG_LEN(4) as usize);
        ((*head).cmsg_level, (*head).cmsg_type, (*head).cmsg_len) = (level, kind, len);
        libc::CMSG_DATA(head).cast::<i32>().write_unaligned(descriptor.as_raw_fd());
        assert_eq!(libc::sendmsg(socket.as_raw_fd(), &raw const message, 0), 1);
    }
}

/// Receives a descriptor.
pub fn receive_descriptor(socket: &UnixStream) -> OwnedFd {
    let (mut byte, mut space) = ([0u8], [0u64; 8]);
    let mut part = libc::iovec { iov_base: byte.as_mut_ptr().cast(), iov_len: 1 };
    // SAFETY: the message names memory that lives as long as the call; the descriptor is new.
    unsafe {
        let mut message: libc::msghdr = std::mem::zeroed();
        (message.msg_iov, message.msg_iovlen) = (&raw mut part, 1);
        (message.msg_control, message.msg_controllen) = (space.as_mut_ptr().cast(), size_of_val(&space));
        assert_eq!(libc::recvmsg(socket.as_raw_fd(), &raw mut message, libc::MSG_CMSG_CLOEXEC), 1);
        let head = libc::CMSG_FIRSTHDR(&raw const message);
        assert!(!head.is_null(), "a descriptor arrived");
        OwnedFd::from_raw_fd(libc::CMSG_DATA(head).cast::<i32>().read_unaligned())
    }
}

/// Returns bytes that depend on a seed.
pub fn pattern(seed: u64, len: usize) -> Vec<u8> {
    let mut random = fastrand::Rng::with_seed(seed);
    std::iter::repeat_with(|| random.u8(..)).take(len).collect()
}

#[test]
fn contents_cross_both_ways_at_any_size() {
    run_isolated("memory=64M", || {
        start();
        let mut random = fastrand::Rng::with_seed(11);
        for seed in 0..6 {
            let len =
                [1, 4095, 4096, 4097, random.usize(5000..100_000), random.usize(1 << 20..4 << 20)][seed];
            let at = allocate(len);
            write_device_bytes(at, &pattern(seed as u64, len));
            let mut peer = PeerProcess::start("invert_memory", "");
            peer.send(&memory_handle(at));
            assert_eq!(peer.receive(), *b"done", "{len} bytes");
            let expected: Vec<u8> = pattern(seed as u64, len).into_iter().map(|byte| !byte).collect();
            assert!(contents(at, len) == expected, "{len} bytes");
            assert!(peer.wait().success());
            assert_eq!(free(at), OK);
        }
    });
}

#[test]
fn a_handle_is_opened_once_and_closed_as_often() {
    run_isolated("", || {
        let gpu = start();
        let mut peer = PeerProcess::start("share_memory", "");
        let handle = peer.receive();
        let [one, two] = [try_open_memory(handle).unwrap(), try_open_memory(handle).unwrap()];
        assert_eq!((one, gpu.count(Counter::Imports)), (two, 1));
        assert_eq!((close_memory(one), contents(one, 4)), (OK, vec![7; 4]));
        assert_eq!(
            [free(one), close_memory(one + 1), close_memory(one), close_memory(one)],
            [INVALID_VALUE, INVALID_VALUE, OK, INVALID_VALUE]
        );
        assert_eq!((gpu.count(Counter::Imports), copy(one, one, 4, new_stream())), (0, INVALID_VALUE));
        let own = memory_handle(allocate(4));
        assert_eq!(try_open_memory(own).unwrap_err(), CUresult::CUDA_ERROR_INVALID_CONTEXT);
    });
}

#[test]
fn the_owner_is_killed_at_each_step() {
    run_isolated("", || {
        let gpu = start();
        // Before the handle is opened.
        let mut peer = PeerProcess::start("share_memory", "");
        let handle = peer.receive();
        peer.kill();
        assert_eq!(try_open_memory(handle).unwrap_err(), INVALID_HANDLE);
        // While it is open.
        let mut peer = PeerProcess::start("share_memory", "");
        let at = try_open_memory(peer.receive()).unwrap();
        peer.kill();
        assert_eq!(contents(at, 4096), [7; 4096]);
        assert_eq!(close_memory(at), OK);
        // While a copy from it is under way.
        let mut peer = PeerProcess::start("share_memory", "");
        let (from, to, stream) = (try_open_memory(peer.receive()).unwrap(), allocate(4096), new_stream());
        gpu.set(Setting::HoldCopies, 1);
        assert_eq!(copy(to, from, 4096, stream), OK);
        wait_until("the copy is held", || gpu.count(Counter::HeldCopies) == 1);
        peer.kill();
        gpu.set(Setting::HoldCopies, 0);
        assert_eq!((synchronize(stream), contents(to, 4096)), (OK, vec![7; 4096]));
    });
}

#[test]
fn the_importer_is_killed_at_each_step() {
    run_isolated("", || {
        let gpu = start();
        let at = allocate(4096);
        write_device_bytes(at, &[3; 4096]);
        for step in ["started", "opened", "copying", "closed"] {
            let mut peer = PeerProcess::start("import_memory_by_steps", "");
            peer.send(&memory_handle(at));
            for reached in ["started", "opened", "copying", "closed"] {
                let word: [u8; 7] = peer.receive();
                assert_eq!(word[..], format!("{reached:7}").as_bytes()[..7]);
                if reached == step {
                    break;
                }
                peer.send(b"next");
            }
            peer.kill();
            assert_eq!(contents(at, 4096), [3; 4096], "{step}");
        }
        assert_eq!((free(at), gpu.count(Counter::DeviceBytes)), (OK, 0));
    });
}

#[test]
fn work_on_memory_that_its_owner_freed_is_a_sticky_error() {
    run_isolated("", || {
        let gpu: &SimulatedGpu = start();
        let mut peer = PeerProcess::start("share_memory", "");
        let handle = peer.receive();
        let (from, to, stream) = (try_open_memory(handle).unwrap(), allocate(4096), new_stream());
        gpu.set(Setting::HoldCopies, 1);
        assert_eq!(copy(to, from, 4096, stream), OK);
        wait_until("the copy is held", || gpu.count(Counter::HeldCopies) == 1);
        peer.send(b"free");
        assert_eq!(peer.receive(), *b"gone");
        assert_eq!(copy(to, from, 4096, new_stream()), INVALID_VALUE);
        assert_eq!(try_open_memory(handle).unwrap_err(), INVALID_HANDLE);
        gpu.set(Setting::HoldCopies, 0);
        assert_eq!([synchronize(stream), query(stream)], [ILLEGAL_ADDRESS; 2]);
        // The owner is another process: it goes on.
        peer.send(b"fill");
        assert_eq!(peer.receive(), *b"well");
    });
}

#[test]
fn a_descriptor_carries_memory_to_another_process() {
    run_isolated("", || {
        let gpu = start();
        let handle = create_physical(2 * GRANULE);
        let at = map_anywhere(handle, 2 * GRANULE);
        write_device_bytes(at, &pattern(5, 2 * GRANULE));
        let mut peer = PeerProcess::start("map_descriptor", "");
        send_descriptor(&peer.socket, &export(handle));
        assert_eq!(peer.receive(), *b"done");
        let expected: Vec<u8> = pattern(5, 2 * GRANULE).into_iter().map(|byte| !byte).collect();
        assert!(contents(at, 2 * GRANULE) == expected);
        assert!(peer.wait().success());
        // The memory stays as long as it is mapped, and no longer.
        // SAFETY: arguments are checked by the library.
        unsafe {
            assert_eq!(sys::cuMemRelease(handle), OK);
            assert_eq!(sys::cuMemRelease(handle), INVALID_VALUE);
            assert_eq!(gpu.count(Counter::DeviceBytes), 2 * GRANULE as i64);
            assert_eq!(sys::cuMemUnmap(at, 2 * GRANULE), OK);
            assert_eq!(sys::cuMemAddressFree(at, 2 * GRANULE), OK);
        }
        assert_eq!(gpu.count(Counter::DeviceBytes), 0);
    });
}

#[test]
fn mapped_memory_outlives_either_process() {
    run_isolated("", || {
        let gpu = start();
        // The owner is killed when the descriptor is on its way, and when it is mapped.
        for is_mapped in [false, true] {
            let mut peer = PeerProcess::start("send_descriptor", "");
            let descriptor = receive_descriptor(&peer.socket);
            if !is_mapped {
                peer.kill_unseen();
            }
            let handle = try_import(descriptor.as_raw_fd()).unwrap();
            drop(descriptor);
            let at = map_anywhere(handle, GRANULE);
            peer.kill();
            assert!(contents(at, GRANULE).iter().all(|byte| *byte == 9));
            // SAFETY: arguments are checked by the library.
            assert_eq!(unsafe { [sys::cuMemUnmap(at, GRANULE), sys::cuMemRelease(handle)] }, [OK, OK]);
        }
        assert_eq!(gpu.count(Counter::Imports), 0);
        // The importer is killed while it has the memory mapped.
        let handle = create_physical(GRANULE);
        let at = map_anywhere(handle, GRANULE);
        let mut peer = PeerProcess::start("hold_descriptor", "");
        send_descriptor(&peer.socket, &export(handle));
        assert_eq!(peer.receive(), *b"mapped");
        peer.kill();
        let stream = new_stream();
        assert_eq!([fill(at, 4, GRANULE, stream), synchronize(stream)], [OK, OK]);
        assert!(contents(at, GRANULE).iter().all(|byte| *byte == 4));
    });
}

#[test]
fn mappings_follow_their_rules() {
    run_isolated("", || {
        start();
        let (handle, at) = (create_physical(GRANULE), reserve(3 * GRANULE));
        let stream = new_stream();
        assert_eq!(at % GRANULE as u64, 0);
        let unsupported = CUresult::CUDA_ERROR_NOT_SUPPORTED;
        assert_eq!(map(at, GRANULE / 2, handle), unsupported, "not granular");
        assert_eq!(map(at, 2 * GRANULE, handle), unsupported, "longer than the allocation");
        assert_eq!(map(at + 3 * GRANULE as u64, GRANULE, handle), INVALID_VALUE, "not reserved");
        assert_eq!(make_accessible(at, GRANULE), INVALID_VALUE, "not mapped");
        assert_eq!(map(at, GRANULE, handle), OK);
        assert_eq!(map(at, GRANULE, handle), INVALID_VALUE, "mapped already");
        assert_eq!(fill(at, 1, 4, stream), INVALID_VALUE, "not accessible yet");
        assert_eq!(make_accessible(at, GRANULE), OK);
        // One physical allocation may be mapped twice, and a copy may span mappings.
        let second = at + GRANULE as u64;
        assert_eq!(
            [map(second, GRANULE, create_physical(GRANULE)), make_accessible(second, GRANULE)],
            [OK, OK]
        );
        let again = map_anywhere(handle, GRANULE);
        write_device_bytes(at + GRANULE as u64 - 3, &[1, 2, 3, 4, 5, 6]);
        assert_eq!(contents(again + GRANULE as u64 - 3, 3), [1, 2, 3]);
        assert_eq!(contents(at + GRANULE as u64 - 3, 6), [1, 2, 3, 4, 5, 6]);
        assert_eq!(fill(second, 1, GRANULE + 1, stream), INVALID_VALUE, "beyond the mapping");
        // SAFETY: arguments are checked by the library.
        unsafe {
            assert_eq!(sys::cuMemAddressFree(at, 3 * GRANULE), INVALID_VALUE, "mapped");
            assert_eq!(sys::cuMemUnmap(at, GRANULE / 2), INVALID_VALUE, "a part of a mapping");
            assert_eq!(sys::cuMemUnmap(at, 3 * GRANULE), INVALID_VALUE, "more than is mapped");
            assert_eq!(sys::cuMemUnmap(at, 2 * GRANULE), OK);
            assert_eq!(sys::cuMemAddressFree(at, GRANULE), INVALID_VALUE, "a part of a reservation");
            assert_eq!(sys::cuMemAddressFree(at, 3 * GRANULE), OK);
            let mut exported = -1;
            let kind = sys::CUmemAllocationHandleType::CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
            let mut prop = properties();
            prop.requestedHandleTypes = sys::CUmemAllocationHandleType::CU_MEM_HANDLE_TYPE_NONE;
            let mut private = 0;
            assert_eq!(sys::cuMemCreate(&raw mut private, GRANULE, &raw const prop, 0), OK);
            let to = (&raw mut exported).cast();
            assert_eq!(
                sys::cuMemExportToShareableHandle(to, private, kind, 0),
                INVALID_VALUE,
                "not for export"
            );
            assert_eq!(sys::cuMemCreate(&raw mut private, GRANULE / 2, &raw const prop, 0), INVALID_VALUE);
        }
        let (socket, _other) = UnixStream::pair().unwrap();
        let refused = [Err(CUresult::CUDA_ERROR_UNKNOWN), Err(INVALID_VALUE)];
        assert_eq!([try_import(socket.as_raw_fd()), try_import(-1)], refused);
    });
}

#[test]
fn a_descriptor_number_that_is_used_again_opens_nothing_else() {
    run_isolated("", || {
        start();
        let mut peer = PeerProcess::start("reuse_descriptor", "");
        let (stale, fresh) = (peer.receive(), peer.receive());
        assert_eq!(try_open_memory(stale).unwrap_err(), INVALID_HANDLE);
        assert_eq!(contents(try_open_memory(fresh).unwrap(), 4), [8; 4]);
        drop(peer.socket.read(&mut []));
    });
}
