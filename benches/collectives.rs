//! Measures what NCCL's profiler plug-in costs a program: nanoseconds for each collective, without and with times on the GPU.
//!
//! `cargo bench -p muster-nccl-profiler [-- ROUNDS]`. The calls are those that NCCL makes: a collective starts and stops; with
//! times, each channel starts, records its end and stops. Beside it stands what a reading of the clock costs, which is the
//! least that a time costs.

use std::ffi::{c_int, c_void};
use std::hint::black_box;
use std::ptr::null_mut;

use muster_nccl_profiler::abi::{
    COLLECTIVE, CollectiveEvent, EventDescriptor, EventOfKind, KERNEL_CHANNEL, KERNEL_CHANNEL_ENDED,
    KernelChannelEvent,
};
use muster_nccl_profiler::tables::ncclProfiler_v5 as table;

const COLLECTIVES: u64 = 200_000;

/// Makes the calls of one collective.
#[expect(unsafe_code, reason = "calls as NCCL makes them")]
fn run_collective(context: *mut c_void, number: u64, channels: u8, is_timed: bool) {
    let collective = CollectiveEvent {
        sequence_number: number,
        function: c"AllReduce".as_ptr(),
        send_buffer: std::ptr::null(),
        receive_buffer: null_mut(),
        count: 1 << 20,
        root: 0,
        data_type: c"ncclFloat32".as_ptr(),
        channels,
        warps: 4,
        algorithm: c"RING".as_ptr(),
        protocol: c"LL".as_ptr(),
    };
    let event = EventDescriptor {
        kind: COLLECTIVE,
        parent: null_mut(),
        rank: 0,
        of_kind: EventOfKind { collective },
    };
    let (mut handle, mut of_channel) = (null_mut(), null_mut());
    // SAFETY: the descriptors have the fields of their kinds, and the texts are static.
    unsafe {
        (table.start_event)(context, &mut handle, &event);
        (table.stop_event)(handle);
        if !is_timed {
            return;
        }
        for channel in 0..channels {
            let kernel_channel = KernelChannelEvent { channel, gpu_time: number };
            let of_kind = EventOfKind { kernel_channel };
            let event = EventDescriptor { kind: KERNEL_CHANNEL, parent: handle, rank: 0, of_kind };
            (table.start_event)(context, &mut of_channel, &event);
            (table.record_event_state)(of_channel, KERNEL_CHANNEL_ENDED, &(number + 5));
            (table.stop_event)(of_channel);
        }
    }
}

/// Returns the nanoseconds of one call.
fn measure(mut call: impl FnMut(u64)) -> f64 {
    let began = muster::clock::monotonic();
    (0..COLLECTIVES).for_each(&mut call);
    began.elapsed().as_nanos() as f64 / COLLECTIVES as f64
}

#[expect(unsafe_code, reason = "calls as NCCL makes them")]
fn main() {
    let rounds = std::env::args().filter_map(|argument| argument.parse().ok()).next().unwrap_or(15);
    let (mut context, mut mask): (*mut c_void, c_int) = (null_mut(), 0);
    // SAFETY: the pointers are valid; no log function is passed.
    unsafe { (table.init)(&mut context, 7, &mut mask, std::ptr::null(), 1, 2, 0, None) };
    assert!(!context.is_null(), "the record cannot be written");
    let mut number = 0;
    let mut next = || {
        number += 1;
        number - 1
    };
    let mut figures: [(&str, Vec<f64>); 4] = [
        ("a reading of the clock", Vec::new()),
        ("a collective without times", Vec::new()),
        ("a collective of 1 channel, timed", Vec::new()),
        ("a collective of 16 channels, timed", Vec::new()),
    ];
    for _ in 0..rounds {
        figures[0].1.push(measure(|_| {
            black_box(muster_collectives::monotonic_nanos());
        }));
        figures[1].1.push(measure(|_| run_collective(context, next(), 1, false)));
        figures[2].1.push(measure(|_| run_collective(context, next(), 1, true)));
        figures[3].1.push(measure(|_| run_collective(context, next(), 16, true)));
    }
    for (name, times) in &mut figures {
        times.sort_by(f64::total_cmp);
        let (median, least, most) = (times[times.len() / 2], times[0], times[times.len() - 1]);
        println!("{name:<36} {median:>6.0} ns ({least:.0} to {most:.0})");
    }
}
