//! The limits of the machine: copies within a process, wake-ups of a thread, and bare TCP on the loopback
//! interface.

use std::hint::black_box;
use std::io::{Read as _, Write as _};
use std::net::{TcpListener, TcpStream};
use std::sync::Barrier;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use rustix::net::sockopt;
use rustix::thread::{CpuSet, futex, sched_getaffinity, sched_setaffinity};

use crate::clock::now;
use crate::shape::Shape;

/// The bytes on each side over which cold copies rotate: far more than any cache holds.
const COLD: usize = 128 << 20;

/// Measures copies from distinct sources to distinct destinations, in 10^9 bytes a second.
///
/// In a warm measurement, `threads` share as many buffers as a transfer has in flight, and copy them
/// repeatedly. In a cold one, they rotate through so many buffers that each has left the caches when its turn
/// comes again. The threads do not wait for one another, as a transfer that splits a buffer must.
///
/// Whole buffers and pieces of them are measured, and the faster result counts: the C library bypasses the
/// caches for large copies.
pub fn measure_memcpy(shape: Shape, threads: usize, cold: bool, time: Duration) -> Result<f64> {
    const PIECE: usize = 256 << 10;
    let whole = measure_memcpy_with_piece_size(shape.bytes(), shape, threads, cold, time / 2)?;
    Ok(if shape.bytes() > PIECE {
        whole.max(measure_memcpy_with_piece_size(PIECE, shape, threads, cold, time / 2)?)
    } else {
        whole
    })
}

fn measure_memcpy_with_piece_size(
    piece: usize,
    shape: Shape,
    threads: usize,
    cold: bool,
    time: Duration,
) -> Result<f64> {
    let bytes = shape.bytes();
    let slots = if cold { (COLD / bytes).max(2) } else { shape.in_flight };
    let each = (slots / threads).max(1);
    let start = Barrier::new(threads);
    let spans: Vec<(Instant, Instant, u64)> = std::thread::scope(|scope| {
        let copying = || copy_until_deadline(bytes, piece, each, time, &start);
        let running: Vec<_> = (0..threads).map(|_| scope.spawn(copying)).collect();
        running.into_iter().map(|thread| thread.join().ok()).collect::<Option<_>>()
    })
    .context("a copying thread failed")?;
    total_rate_of_threads(&spans)
}

fn copy_until_deadline(
    bytes: usize,
    piece: usize,
    slots: usize,
    time: Duration,
    start: &Barrier,
) -> (Instant, Instant, u64) {
    // The buffers are written now, so that no page is allocated while time is measured.
    let sources: Vec<Vec<u8>> = (0..slots).map(|n| vec![n as u8 + 1; bytes]).collect();
    let mut targets: Vec<Vec<u8>> = (0..slots).map(|_| vec![0xff; bytes]).collect();
    start.wait();
    let began = now();
    let mut copied = 0;
    // Few readings of the clock, so that they do not dominate the measurement.
    let between = (1 << 20) / bytes + 1;
    loop {
        for _ in 0..between {
            let at = (copied % slots as u64) as usize;
            let source = black_box(&sources[at]);
            for (to, from) in targets[at].chunks_mut(piece).zip(source.chunks(piece)) {
                to.copy_from_slice(from);
            }
            black_box(&mut targets[at]);
            copied += 1;
        }
        let ended = now();
        if ended - began >= time {
            return (began, ended, copied * bytes as u64);
        }
    }
}

/// Measures the one-way latency of waking a sleeping thread, with two threads that wake each other by a
/// futex: the median and the 99th percentile. No engine whose receivers sleep can be faster. Each thread is
/// pinned to a processor of its own, if there are two, because the scheduler sometimes puts both on one, and
/// then neither has to be woken.
pub fn measure_wake_latency(time: Duration) -> Result<(Duration, Duration)> {
    let words = [AtomicU32::new(0), AtomicU32::new(0)];
    let over = AtomicBool::new(false);
    let sleep = |word: &AtomicU32, known: u32| {
        while word.load(Ordering::Acquire) == known {
            // The word may have changed by now, or a signal may come: the loop checks it in any case.
            let _woken = futex::wait(word, futex::Flags::PRIVATE, known, None);
        }
    };
    let wake = |word: &AtomicU32, value: u32| {
        word.store(value, Ordering::Release);
        futex::wake(word, futex::Flags::PRIVATE, 1)
    };
    let all = sched_getaffinity(None).context("the processors of this thread")?;
    let (mut near, mut far) = (CpuSet::new(), CpuSet::new());
    let allowed: Vec<usize> = (0..CpuSet::MAX_CPU).filter(|cpu| all.is_set(*cpu)).collect();
    near.set(*allowed.first().context("no processor")?);
    far.set(*allowed.last().context("no processor")?);
    sched_setaffinity(None, &near).context("cannot stay on one processor")?;
    let mut ways = std::thread::scope(|scope| -> Result<Vec<Duration>> {
        scope.spawn(|| {
            let _stays_where_the_other_is = sched_setaffinity(None, &far);
            for round in 0.. {
                sleep(&words[0], round);
                // The flag of this round: once the other thread is awake, it may set it for the next.
                let last = over.load(Ordering::Acquire);
                let _asleep_or_not = wake(&words[1], round + 1);
                if last {
                    return;
                }
            }
        });
        let began = now();
        let mut ways = Vec::new();
        for round in 0.. {
            let last = now() - began >= time;
            over.store(last, Ordering::Release);
            let start = now();
            wake(&words[0], round + 1)?;
            sleep(&words[1], round);
            ways.push((now() - start) / 2);
            if last {
                break;
            }
        }
        Ok(ways)
    })?;
    sched_setaffinity(None, &all).context("cannot use all processors again")?;
    ways.sort_unstable();
    let at = |part: usize| ways.get(ways.len() * part / 100).copied().context("nobody was woken");
    Ok((at(50)?, at(99)?))
}

/// Runs `work` on one processor: threads and processes that it starts stay there. If the hypervisor has to
/// wake a sleeping processor, that costs more than the rest of a small message; here no processor sleeps.
pub fn on_one_processor<R>(work: impl FnOnce() -> Result<R>) -> Result<R> {
    let all = sched_getaffinity(None).context("the processors of this thread")?;
    let first = (0..CpuSet::MAX_CPU).find(|cpu| all.is_set(*cpu)).context("no processor")?;
    let mut one = CpuSet::new();
    one.set(first);
    sched_setaffinity(None, &one).context("cannot stay on one processor")?;
    let done = work();
    sched_setaffinity(None, &all).context("cannot use all processors again")?;
    done
}

/// Measures bare TCP: blocking threads, a writer and a reader for each stream, no framing.
///
/// If not `paced`, the sockets have the settings of Muster's lanes within a host.
pub fn measure_tcp(shape: Shape, streams: usize, paced: bool, time: Duration) -> Result<f64> {
    let listener = TcpListener::bind("127.0.0.1:0")?;
    let mut ends = Vec::new();
    for _ in 0..streams {
        let near = TcpStream::connect(listener.local_addr()?)?;
        let far = listener.accept()?.0;
        near.set_nodelay(true)?;
        for end in [&near, &far] {
            ensure!(
                paced || ["cubic", "reno"].iter().any(|name| sockopt::set_tcp_congestion(end, name).is_ok()),
                "neither cubic nor reno"
            );
        }
        ends.push((near, far));
    }
    let start = Barrier::new(2 * streams);
    let slots = (shape.in_flight / streams).max(1);
    let spans: Vec<(Instant, Instant, u64)> = std::thread::scope(|scope| {
        let running: Vec<_> = ends
            .into_iter()
            .map(|(near, far)| {
                let start = &start;
                let writing =
                    scope.spawn(move || write_until_deadline(near, shape.bytes(), slots, time, start));
                let reading = scope.spawn(move || read_stream_to_end(far, shape.bytes(), slots, start));
                (writing, reading)
            })
            .collect();
        running
            .into_iter()
            .map(|(writing, reading)| {
                let began = writing.join().ok()?.ok()?;
                let (ended, bytes) = reading.join().ok()?.ok()?;
                Some((began, ended, bytes))
            })
            .collect::<Option<_>>()
    })
    .context("a stream failed")?;
    total_rate_of_threads(&spans)
}

fn write_until_deadline(
    mut stream: TcpStream,
    bytes: usize,
    slots: usize,
    time: Duration,
    start: &Barrier,
) -> Result<Instant> {
    let sources: Vec<Vec<u8>> = (0..slots).map(|n| vec![n as u8 + 1; bytes]).collect();
    start.wait();
    let began = now();
    for at in (0..slots).cycle() {
        stream.write_all(&sources[at])?;
        if now() - began >= time {
            break;
        }
    }
    Ok(began)
}

/// Reads the stream. Returns the time of the last byte, and the number of bytes.
fn read_stream_to_end(
    mut stream: TcpStream,
    bytes: usize,
    slots: usize,
    start: &Barrier,
) -> Result<(Instant, u64)> {
    let mut targets: Vec<Vec<u8>> = (0..slots).map(|_| vec![0xff; bytes]).collect();
    start.wait();
    let (mut whole, mut ended) = (0, now());
    for at in (0..slots).cycle() {
        match stream.read_exact(&mut targets[at]) {
            Ok(()) => ended = now(),
            Err(error) if error.kind() == std::io::ErrorKind::UnexpectedEof => break,
            Err(error) => return Err(error.into()),
        }
        ensure!(targets[at][bytes - 1] == at as u8 + 1, "bytes of another buffer");
        whole += bytes as u64;
    }
    Ok((ended, whole))
}

/// Returns the rate of all bytes, from the first begin to the last end.
fn total_rate_of_threads(spans: &[(Instant, Instant, u64)]) -> Result<f64> {
    let began = spans.iter().map(|span| span.0).min().context("no threads")?;
    let ended = spans.iter().map(|span| span.1).max().context("no threads")?;
    let bytes: u64 = spans.iter().map(|span| span.2).sum();
    Ok(bytes as f64 / (ended - began).as_secs_f64() / 1e9)
}
