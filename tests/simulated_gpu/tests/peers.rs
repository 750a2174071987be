//! The roles of peer processes. Each reads and writes fixed numbers of bytes, as its test does.

use std::ffi::c_void;
use std::io::Write;
use std::os::fd::AsRawFd;
use std::os::unix::net::UnixStream;

use cudarc::driver::sys;
use simulated_gpu::{Counter, Setting};

use crate::driver::{
    Gate, NOT_READY, OK, SHARED, address, allocate, allocate_pinned, contents, copy, fill, free, new_event,
    new_stream, query, record, start, synchronize, wait_event, write_device_bytes,
};
use crate::isolation::{read, wait_until};
use crate::sharing::{
    GRANULE, close_memory, create_physical, event_handle, export, map_anywhere, memory_handle, open_event,
    receive_descriptor, send_descriptor, try_import, try_open_memory,
};
use crate::{bindings, conformance, plugin_libraries, rank_processes};

type Role = fn(UnixStream);

/// The roles by their names.
pub const ROLES: &[(&str, Role)] = &[
    ("leave_stuck_work", leave_stuck_work),
    ("leave_stuck_group", rank_processes::leave_stuck_group),
    ("reduce_and_tell", plugin_libraries::reduce_and_tell),
    ("run_with_library", plugin_libraries::run_with_library),
    ("run_without_plugin", plugin_libraries::run_without_plugin),
    ("read_after_event", read_after_event),
    ("record_behind_gate", record_behind_gate),
    ("own_event_behind_gate", own_event_behind_gate),
    ("invert_memory", invert_memory),
    ("share_memory", share_memory),
    ("import_memory_by_steps", import_memory_by_steps),
    ("map_descriptor", map_descriptor),
    ("send_descriptor", send_new_descriptor),
    ("hold_descriptor", hold_descriptor),
    ("reuse_descriptor", reuse_descriptor),
    ("read_allocation_on_host", |_| {
        read_on_host({
            start();
            allocate(4096)
        })
    }),
    ("read_mapping_on_host", |_| {
        read_on_host({
            start();
            map_anywhere(create_physical(GRANULE), GRANULE)
        })
    }),
    ("read_import_on_host", |mut socket| {
        read_on_host({
            start();
            try_open_memory(read(&mut socket)).unwrap()
        })
    }),
    ("load_by_name", bindings::load_by_name),
    ("unknown_setting", |_| _ = start()),
    ("join_ring", rank_processes::join_ring),
    ("join_and_hang", rank_processes::join_and_hang),
    ("conformance", conformance::run),
    ("conformance_importer", conformance::import),
];

/// Waits until the test closes the socket, or kills this process.
pub fn wait_for_socket_close(mut socket: UnixStream) {
    let _ = std::io::Read::read(&mut socket, &mut [0]);
}

fn say(socket: &mut UnixStream, word: &[u8]) {
    socket.write_all(word).unwrap();
}

fn read_on_host(at: u64) {
    // SAFETY: none: the read is the fault that the test looks for.
    unsafe { (at as *const u8).read_volatile() };
}

fn leave_stuck_work(mut socket: UnixStream) {
    start();
    let stream = new_stream();
    let _gate = Gate::close(stream);
    assert_eq!([fill(allocate(4), 1, 4, stream), query(stream)], [OK, NOT_READY]);
    say(&mut socket, b"stuck");
}

fn read_after_event(mut socket: UnixStream) {
    start();
    let (at, event) = (try_open_memory(read(&mut socket)).unwrap(), open_event(read(&mut socket)));
    let (stream, byte) = (new_stream(), allocate_pinned(1));
    assert_eq!([wait_event(stream, event), copy(address(byte), at + 100, 1, stream)], [OK, OK]);
    assert_eq!((query(stream), byte[0]), (NOT_READY, 0));
    say(&mut socket, b"waits");
    assert_eq!(synchronize(stream), OK);
    say(&mut socket, byte);
}

fn record_behind_gate(mut socket: UnixStream) {
    start();
    let (event, stream) = (open_event(read(&mut socket)), new_stream());
    let gate = Gate::close(stream);
    assert_eq!(record(event, stream), OK);
    say(&mut socket, b"gate");
    assert_eq!(read(&mut socket), *b"open");
    gate.open();
    assert_eq!(synchronize(stream), OK);
}

fn own_event_behind_gate(mut socket: UnixStream) {
    let gpu = start();
    let (event, stream) = (new_event(SHARED), new_stream());
    say(&mut socket, &event_handle(event));
    let _gate = Gate::close(stream);
    assert_eq!(record(event, stream), OK);
    say(&mut socket, b"gate");
    assert_eq!(read(&mut socket), *b"lose");
    gpu.set(Setting::Sticky, 214);
    assert_eq!(synchronize(stream) as i32, 214);
    say(&mut socket, b"lost");
    wait_for_socket_close(socket);
}

/// Replaces each byte by its complement.
fn invert(at: u64, len: usize) {
    let inverted: Vec<u8> = contents(at, len).into_iter().map(|byte| !byte).collect();
    write_device_bytes(at, &inverted);
}

fn invert_memory(mut socket: UnixStream) {
    start();
    let at = try_open_memory(read(&mut socket)).unwrap();
    let mut len: usize = 0;
    // SAFETY: the library writes a number; attribute 12 is the size of the range.
    unsafe {
        let attribute = sys::CUpointer_attribute::CU_POINTER_ATTRIBUTE_RANGE_SIZE;
        sys::cuPointerGetAttribute((&raw mut len).cast::<c_void>(), attribute, at).result().unwrap();
    }
    invert(at, len);
    assert_eq!(close_memory(at), OK);
    say(&mut socket, b"done");
}

fn share_memory(mut socket: UnixStream) {
    start();
    let at = allocate(4096);
    write_device_bytes(at, &[7; 4096]);
    say(&mut socket, &memory_handle(at));
    let mut word = [0; 4];
    if std::io::Read::read_exact(&mut socket, &mut word).is_err() {
        return;
    }
    assert_eq!((word, free(at)), (*b"free", OK));
    say(&mut socket, b"gone");
    assert_eq!(read(&mut socket), *b"fill");
    let (at, stream) = (allocate(4), new_stream());
    assert_eq!([fill(at, 1, 4, stream), synchronize(stream)], [OK, OK]);
    say(&mut socket, b"well");
}

fn import_memory_by_steps(mut socket: UnixStream) {
    let gpu = start();
    let handle = read(&mut socket);
    let mut step = |word: &[u8; 7]| {
        say(&mut socket, word);
        assert_eq!(read(&mut socket), *b"next");
    };
    step(b"started");
    let at = try_open_memory(handle).unwrap();
    step(b"opened ");
    let (stream, to) = (new_stream(), allocate(4096));
    gpu.set(Setting::HoldCopies, 1);
    assert_eq!(copy(to, at, 4096, stream), OK);
    wait_until("the copy is held", || gpu.count(Counter::HeldCopies) == 1);
    step(b"copying");
    gpu.set(Setting::HoldCopies, 0);
    assert_eq!([synchronize(stream), close_memory(at)], [OK, OK]);
    step(b"closed ");
}

fn map_descriptor(mut socket: UnixStream) {
    start();
    let descriptor = receive_descriptor(&socket);
    let handle = try_import(descriptor.as_raw_fd()).unwrap();
    // The caller owns the descriptor, and may close it.
    drop(descriptor);
    let at = map_anywhere(handle, 2 * GRANULE);
    // SAFETY: the handle is checked by the library; the mapping stays.
    assert_eq!(unsafe { sys::cuMemRelease(handle) }, OK);
    invert(at, 2 * GRANULE);
    say(&mut socket, b"done");
}

fn send_new_descriptor(socket: UnixStream) {
    start();
    let handle = create_physical(GRANULE);
    let (at, stream) = (map_anywhere(handle, GRANULE), new_stream());
    assert_eq!([fill(at, 9, GRANULE, stream), synchronize(stream)], [OK, OK]);
    send_descriptor(&socket, &export(handle));
    wait_for_socket_close(socket);
}

fn hold_descriptor(mut socket: UnixStream) {
    start();
    let handle = try_import(receive_descriptor(&socket).as_raw_fd()).unwrap();
    let at = map_anywhere(handle, GRANULE);
    assert_eq!(contents(at, 4), [0; 4]);
    say(&mut socket, b"mapped");
    wait_for_socket_close(socket);
}

fn reuse_descriptor(mut socket: UnixStream) {
    start();
    let old = allocate(4);
    let stale = memory_handle(old);
    assert_eq!(free(old), OK);
    // The kernel gives the lowest free number, so the new memory has the descriptor of the old one.
    let new = allocate(4);
    write_device_bytes(new, &[8; 4]);
    let fresh = memory_handle(new);
    let number = |handle: &[u8; 64]| handle[24..32].to_vec();
    assert_eq!(number(&stale), number(&fresh), "the number is used again");
    say(&mut socket, &stale);
    say(&mut socket, &fresh);
    wait_for_socket_close(socket);
}
