//! Tests of buffers and their reservations.

use super::*;

#[test]
fn readers_share_and_writers_do_not() {
    let buffer = Buffer::foreign(vec![1; 100]);
    let (low, high) = (buffer.range(0..50).unwrap(), buffer.range(50..100).unwrap());
    let reading = low.reserve(AccessKind::Read).unwrap();
    assert!(low.reserve(AccessKind::Read).is_ok());
    assert_eq!(low.reserve(AccessKind::Write).unwrap_err(), MemoryError::Busy { start: 0, end: 50 });
    let writing = high.reserve(AccessKind::Write).unwrap();
    assert!(buffer.with_bytes(|_| ()).is_err(), "a writer is at work");
    drop(writing);
    assert!(buffer.with_bytes(|_| ()).is_ok());
    assert!(buffer.fill(0).is_err(), "a reader is at work");
    drop(reading);
    buffer.fill(3).unwrap();
    assert_eq!(buffer.with_bytes(|bytes| bytes.to_vec()).unwrap(), vec![3; 100]);
}

#[test]
fn an_address_that_is_handed_out_during_a_write_outlives_it_and_forbids_the_next() {
    let buffer = Buffer::foreign(vec![1; 100]);
    assert!(buffer.export_while_written().is_none(), "nothing writes it");
    let writing = buffer.full_span().reserve(AccessKind::Write).unwrap();
    assert!(buffer.export().is_err());
    let export = buffer.export_while_written().unwrap();
    drop(writing);
    let refused = buffer.full_span().reserve(AccessKind::Write).unwrap_err();
    assert_eq!(refused, MemoryError::Exported { exports: 1 });
    drop(export);
    assert!(buffer.full_span().reserve(AccessKind::Write).is_ok() && buffer.export_while_written().is_none());
}

/// An owner that tells on which thread it was dropped.
struct DropThreadReporter(
    std::sync::mpsc::Sender<std::thread::ThreadId>,
    #[expect(unused, reason = "kept")] Vec<u8>,
);

impl Drop for DropThreadReporter {
    fn drop(&mut self) {
        let _is_heard = self.0.send(std::thread::current().id());
    }
}

fn read_only_test_buffer(bytes: Vec<u8>) -> (Buffer, std::sync::mpsc::Receiver<std::thread::ThreadId>) {
    let (tell, told) = std::sync::mpsc::channel();
    let (address, len) = (bytes.as_ptr(), bytes.len());
    // SAFETY: the owner keeps the vector, which nothing writes.
    let buffer = unsafe { Buffer::read_only(address, len, 1, Box::new(DropThreadReporter(tell, bytes))) };
    (buffer.unwrap(), told)
}

#[test]
fn memory_that_is_only_read_is_never_written() {
    let (buffer, _told) = read_only_test_buffer(vec![5; 100]);
    assert!(buffer.is_read_only() && !Buffer::foreign(vec![0]).is_read_only());
    assert_eq!(buffer.with_bytes(|bytes| bytes.to_vec()).unwrap(), vec![5; 100]);
    let half = buffer.range(50..100).unwrap();
    let _reading = half.reserve(AccessKind::Read).unwrap();
    for refused in [
        half.reserve(AccessKind::Write).unwrap_err(),
        buffer.with_bytes_mut(|_| ()).unwrap_err(),
        buffer.fill(0).unwrap_err(),
        buffer.export().unwrap_err(),
        buffer.claim(AccessKind::Write).unwrap_err(),
    ] {
        assert_eq!(refused, MemoryError::ReadOnly);
    }
    assert!(buffer.claim(AccessKind::Read).is_ok());
    assert!(buffer.range(3..3).unwrap().reserve(AccessKind::Write).is_ok(), "nothing is written");
}

#[test]
fn the_owner_of_memory_is_dropped_once_by_the_last_thread_that_lets_go() {
    let (buffer, told) = read_only_test_buffer(vec![7; 10]);
    let span = buffer.range(2..4).unwrap();
    let reading = span.reserve(AccessKind::Read).unwrap();
    drop((buffer, span));
    assert!(told.try_recv().is_err(), "a reader is at work");
    let last = std::thread::spawn(move || drop(reading));
    let thread = last.thread().id();
    last.join().unwrap();
    assert_eq!(told.iter().collect::<Vec<_>>(), [thread]);
}

#[test]
fn addresses_that_cannot_be_memory_are_refused() {
    let words = [0_u64; 4];
    let start = words.as_ptr().cast::<u8>();
    let (tell, told) = std::sync::mpsc::channel();
    let make = |address: *const u8, len: usize, align: usize| {
        // SAFETY: addresses that are not mapped are refused, and the vector outlives the buffers.
        unsafe {
            Buffer::read_only(address, len, align, Box::new(DropThreadReporter(tell.clone(), Vec::new())))
        }
    };
    for (address, len, align, why) in [
        (std::ptr::null(), 8, 1, "null"),
        (start.wrapping_add(1), 8, 8, "aligned"),
        (start, 8, 0, "aligned"),
        (start, usize::MAX, 1, "beyond"),
        (std::ptr::without_provenance(usize::MAX - 3), 8, 1, "beyond"),
    ] {
        let refused = make(address, len, align).unwrap_err();
        assert!(matches!(refused, MemoryError::Foreign { .. }) && refused.to_string().contains(why));
        assert!(told.try_recv().is_ok() && told.try_recv().is_err(), "a refused owner is dropped, too");
    }
    assert_eq!(make(start, 32, 8).unwrap().with_bytes(<[u8]>::len), Ok(32));
    assert_eq!(make(std::ptr::null(), 0, 8).unwrap().with_bytes(<[u8]>::len), Ok(0));
}

#[test]
fn nothing_writes_what_a_program_has_the_address_of() {
    let arena = crate::memory::Arena::new(4096).unwrap();
    let buffer = arena.allocate(100).unwrap();
    buffer.fill(1).unwrap();
    let span = buffer.range(10..20).unwrap();
    let (first, second) = (buffer.export().unwrap(), buffer.export().unwrap());
    assert_eq!(buffer.with_bytes(<[u8]>::as_ptr).unwrap(), first.address());
    assert_eq!(span.reserve(AccessKind::Write).unwrap_err(), MemoryError::Exported { exports: 2 });
    assert_eq!(buffer.fill(0).unwrap_err(), MemoryError::Exported { exports: 2 });
    assert!(buffer.claim(AccessKind::Write).is_err() && buffer.claim(AccessKind::Read).is_ok());
    let reading = span.reserve(AccessKind::Read).unwrap();
    drop(first);
    assert_eq!(buffer.exports(), 1);
    std::thread::spawn(move || drop(second)).join().unwrap();
    assert_eq!(span.reserve(AccessKind::Write).unwrap_err(), MemoryError::Busy { start: 10, end: 20 });
    drop(reading);
    let writing = span.reserve(AccessKind::Write).unwrap();
    assert!(matches!(buffer.export(), Err(MemoryError::Busy { .. })));
    drop(writing);
    // An export keeps the memory.
    let last = buffer.export().unwrap();
    let used = arena.free_bytes();
    drop((buffer, span));
    assert_eq!(arena.free_bytes(), used);
    drop(last);
    assert_eq!(arena.free_bytes(), arena.size());
}

#[test]
fn ranges_are_checked() {
    let buffer = Buffer::foreign(Vec::new());
    assert!(buffer.range(0..0).is_ok());
    assert!(buffer.range(0..1).is_err());
    #[expect(clippy::reversed_empty_ranges, reason = "that is the point")]
    let reversed = buffer.range(1..0);
    assert!(reversed.is_err());
}
