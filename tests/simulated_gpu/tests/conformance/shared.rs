//! Handles of memory and events, with another process.

use std::io::Write;
use std::os::unix::net::UnixStream;

use cudarc::driver::sys;

use super::{Answers, REAL, load};
use crate::driver::{
    OK, SHARED, allocate, contents, fill, free, new_event, new_stream, query_event, record, synchronize,
    use_device, wait_event, write_device_bytes,
};
use crate::isolation::{PeerProcess, read};
use crate::sharing::{
    close_memory, event_handle, memory_handle, open_event, try_open_event, try_open_memory,
};

pub fn handles(answers: &mut Answers) {
    answers.section("handles for other processes");
    let at = allocate(4 << 20);
    write_device_bytes(at, &[1; 4096]);
    let (handle, event) = (memory_handle(at), new_event(SHARED));
    answers.note("cuIpcOpenMemHandle of one's own", try_open_memory(handle).map(drop));
    answers.note("cuIpcOpenEventHandle of one's own", try_open_event(event_handle(event)).map(drop));
    // SAFETY: the library writes handles.
    unsafe {
        let (mut memory, mut of_event) = (std::mem::zeroed(), std::mem::zeroed());
        answers.note(
            "cuIpcGetMemHandle of an inner address",
            sys::cuIpcGetMemHandle(&raw mut memory, at + 4096),
        );
        let private = new_event(2);
        answers.note(
            "cuIpcGetEventHandle of a private event",
            sys::cuIpcGetEventHandle(&raw mut of_event, private),
        );
    }
    let real = std::env::var(REAL);
    let mut peer = PeerProcess::start_with("conformance_importer", |command| {
        if let Ok(real) = real { command.env(REAL, real) } else { command }
    });
    peer.send(&handle);
    peer.send(&event_handle(event));
    let mut hear = |what: &str| {
        let len: [u8; 1] = peer.receive();
        let mut text = vec![0; len[0].into()];
        std::io::Read::read_exact(&mut peer.socket, &mut text).unwrap();
        let text = String::from_utf8(text).unwrap();
        answers.note(what, text)
    };
    hear("importer: cuIpcOpenMemHandle with flags 0");
    hear("importer: cuIpcOpenMemHandle again");
    hear("importer: both addresses are the same");
    hear("importer: the contents");
    hear("importer: the memory has a handle");
    hear("importer: cuStreamWaitEvent and the end of the stream");
    hear("importer: cuEventRecord");
    hear("importer: cuIpcCloseMemHandle");
    hear("importer: cuIpcCloseMemHandle again");
    hear("importer: cuIpcCloseMemHandle a third time");
    hear("importer: cuMemFree of memory of another process");
    assert!(peer.wait().success());
    answers.note("the importer's bytes", contents(at, 1));
    answers.note("cuEventQuery after the importer's record", query_event(event));
    answers.note("cuMemFree", free(at));
}

/// The other process.
pub fn import(mut socket: UnixStream) {
    assert!(load());
    // SAFETY: a call without pointers.
    assert_eq!(unsafe { sys::cuInit(0) }, OK);
    use_device(0);
    let (handle, event): ([u8; 64], [u8; 64]) = (read(&mut socket), read(&mut socket));
    let mut say = |text: String| {
        socket.write_all(&[text.len() as u8]).unwrap();
        socket.write_all(text.as_bytes()).unwrap();
    };
    let mut none = 0;
    // SAFETY: the library writes an address.
    let without_flag = unsafe {
        let handle = sys::CUipcMemHandle { reserved: handle.map(|byte| byte as std::ffi::c_char) };
        sys::cuIpcOpenMemHandle_v2(&raw mut none, handle, 0)
    };
    say(format!("{without_flag:?}"));
    if without_flag == OK {
        close_memory(none);
    }
    let (first, second) = (try_open_memory(handle).unwrap(), try_open_memory(handle));
    say(format!("{:?}", second.map(drop)));
    say(format!("{}", second == Ok(first)));
    say(format!("{:?}", contents(first, 2)));
    // SAFETY: the library writes a handle.
    say(format!("{:?}", unsafe {
        let mut handle = std::mem::zeroed();
        sys::cuIpcGetMemHandle(&raw mut handle, first)
    }));
    let (event, stream) = (open_event(event), new_stream());
    say(format!("{:?}", (wait_event(stream, event), synchronize(stream))));
    let filled = fill(first, 2, 1, stream);
    say(format!("{:?}", (filled, record(event, stream), synchronize(stream))));
    for _ in 0..3 {
        say(format!("{:?}", close_memory(first)));
    }
    // The last call: a driver that lets it pass may spoil the memory.
    say(format!("{:?}", try_open_memory(handle).map(free)));
}
