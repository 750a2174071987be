//! Measures transfers of memory of GPUs over the simulated driver: whether copies and lanes overlap, what a transfer between
//! GPUs of one host takes beside a copy between them, and what a launch costs beside its copies.
//!
//! `cargo bench --bench gpu_memory [-- ROUNDS]`. The simulated driver copies in host memory, and adds a known delay to each
//! copy: the figures say how the engine arranges its work, and nothing of the speed of a GPU.
#![allow(unsafe_code, reason = "asks for copies")]
#![allow(clippy::disallowed_methods, reason = "a benchmark reads the clock")]

use std::collections::BTreeMap;
use std::sync::mpsc::channel;
use std::time::{Duration, Instant};

use muster::transfer::{
    Arena, Buffer, DeviceId, EngineConfig, Gpu, Incarnation, LaunchOptions, MemberId, MemberInfo, Membership,
    PreparedTransfers, TaskId, TransferEngine, TransferKey, TransferSpec, TransportChoice,
};
use muster_gpu::{CopyDirection, DeviceMemory, GpuCopy, PageLocked};
use simulated_gpu::{Counter, Setting, SimulatedGpu};

const CHUNK: usize = 4 << 20;
const CHUNKS: usize = 48;
/// The bytes of one copy between GPUs.
const DIRECT_CHUNK: usize = 8 << 20;
const DIRECT_CHUNKS: usize = CHUNK * CHUNKS / DIRECT_CHUNK;

/// Starts two engines that know each other.
fn start_engines(transport: TransportChoice) -> [TransferEngine; 2] {
    let engines = [0u32, 1].map(|task| {
        let incarnation = Incarnation::new(u64::from(task) + 1).expect("it is not 0");
        let here = MemberId::of_own_job(TaskId(task), incarnation);
        let mut config = EngineConfig::new(here, vec![DeviceId(task)]);
        (config.transport, config.chunk, config.lanes) = (transport, CHUNK as u32, 2);
        TransferEngine::start(config).expect("an engine starts")
    });
    let members: BTreeMap<_, _> = engines
        .iter()
        .map(|engine| {
            let MemberId { task, incarnation, .. } = engine.here();
            let devices = vec![DeviceId(task.0)];
            (task, MemberInfo { incarnation, address: engine.address().clone(), devices })
        })
        .collect();
    engines.iter().for_each(|engine| engine.on_membership(Membership::of_own_job(members.clone())));
    engines
}

/// Prepares a transfer of the first `len` bytes of a buffer of the first engine to one of the second engine.
fn prepare(
    engines: &[TransferEngine; 2],
    [source, target]: &[Buffer; 2],
    len: usize,
    key: u64,
) -> [PreparedTransfers; 2] {
    let options =
        LaunchOptions { channel: u32::try_from(key).unwrap_or_default(), ..LaunchOptions::default() };
    let (from, to, key) = (DeviceId(0), DeviceId(1), TransferKey(key));
    let span = |buffer: &Buffer| buffer.range(0..len).expect("it is as long");
    [
        (0, TransferSpec::send(span(source), from, to, key)),
        (1, TransferSpec::receive(span(target), from, to, key)),
    ]
    .map(|(task, spec)| engines[task].prepare(vec![spec], options).wait().expect("the engines meet"))
}

/// Launches once, and returns the time until the receiver has all bytes.
fn launch(prepared: &mut [PreparedTransfers; 2]) -> Duration {
    let began = Instant::now();
    let [sending, receiving] = prepared;
    let (received, sent) = (receiving.launch(&[]), sending.launch(&[]));
    received.wait().expect("the bytes arrive");
    let took = began.elapsed();
    sent.wait().expect("the bytes arrive");
    took
}

/// Returns the time of `count` copies of `len` bytes that are asked of a GPU together.
fn time_copies(
    direction: CopyDirection,
    memory: &DeviceMemory,
    host: &PageLocked,
    len: usize,
    count: usize,
) -> Duration {
    let copy = GpuCopy::with_host(direction, host.base(), memory.address(), len);
    time_copy(memory.gpu(), direction, copy, count)
}

/// Returns how long so many equal copies of a GPU take, one after the other.
fn time_copy(gpu: &Gpu, direction: CopyDirection, copy: GpuCopy, count: usize) -> Duration {
    let (tell, told) = channel();
    let began = Instant::now();
    for _ in 0..count {
        let tell = tell.clone();
        // SAFETY: both memories live until all copies have ended, which this function awaits.
        let asked = unsafe { gpu.copy(direction, &[copy], move |outcome| drop(tell.send(outcome))) };
        asked.expect("the simulated GPU copies");
    }
    for _ in 0..count {
        told.recv().expect("the end is reported").expect("the simulated GPU copies");
    }
    began.elapsed()
}

fn median(mut times: Vec<Duration>) -> Duration {
    times.sort_unstable();
    times[times.len() / 2]
}

fn main() {
    let rounds: usize = std::env::args().filter_map(|word| word.parse().ok()).next().unwrap_or(5);
    let simulated = SimulatedGpu::load();
    simulated.set(Setting::Devices, 2);
    let gpus = [0, 1].map(|ordinal| Gpu::open(ordinal).expect("the simulated GPU opens"));
    let engines = start_engines(TransportChoice::Tcp);
    let len = CHUNK * CHUNKS;
    let (host, memory) = (
        PageLocked::allocate(&gpus[0], CHUNK).expect("there is memory"),
        DeviceMemory::allocate(&gpus[0], CHUNK).expect("there is memory"),
    );
    let on_gpu = [&gpus[0], &gpus[1]]
        .map(|gpu| Arena::on_gpu(gpu, len).and_then(|arena| arena.allocate(len)).expect("there is memory"));
    let on_host =
        [(); 2].map(|()| Arena::new(len).and_then(|arena| arena.allocate(len)).expect("there is memory"));
    let mut lanes = prepare(&engines, &on_host, len, 1);
    let mut staged = prepare(&engines, &on_gpu, len, 2);
    launch(&mut lanes);
    launch(&mut staged);

    println!("{CHUNKS} chunks of 4 MiB from GPU to GPU over two lanes of TCP; medians of {rounds} rounds");
    println!(
        "{:>10} {:>12} {:>12} {:>12} {:>12} {:>8}",
        "delay", "from GPU", "lanes", "to GPU", "transfer", "ratio"
    );
    for delay_us in [0, 1000, 2000, 5000, 10_000] {
        simulated.set(Setting::CopyUs, delay_us);
        let mut times = [const { Vec::new() }; 4];
        for _ in 0..rounds {
            times[0].push(time_copies(CopyDirection::ToHost, &memory, &host, CHUNK, CHUNKS));
            times[1].push(launch(&mut lanes));
            times[2].push(time_copies(CopyDirection::ToDevice, &memory, &host, CHUNK, CHUNKS));
            times[3].push(launch(&mut staged));
        }
        let [from, lane, to, whole] = times.map(median);
        let longest = from.max(lane).max(to);
        println!(
            "{delay_us:>7} us {from:>12.1?} {lane:>12.1?} {to:>12.1?} {whole:>12.1?} {:>8.2}",
            whole.as_secs_f64() / longest.as_secs_f64()
        );
    }
    simulated.set(Setting::CopyUs, 0);

    // More than a launch carries along.
    let small = 16 << 10;
    let mut lanes = prepare(&engines, &on_host, small, 3);
    let mut staged = prepare(&engines, &on_gpu, small, 4);
    let mut times = [const { Vec::new() }; 3];
    for _ in 0..rounds * 200 {
        times[0].push(launch(&mut lanes));
        times[1].push(
            time_copies(CopyDirection::ToHost, &memory, &host, small, 1)
                + time_copies(CopyDirection::ToDevice, &memory, &host, small, 1),
        );
        times[2].push(launch(&mut staged));
    }
    let [lane, copies, whole] = times.map(median);
    println!(
        "a prepared launch of 16 KiB: host {lane:.1?}; from GPU to GPU {whole:.1?}, of which its two copies alone {copies:.1?}"
    );
    measure_direct(simulated, &gpus, &on_gpu, rounds);
    assert_eq!(simulated.count(Counter::PageableCopies), 0, "no copy blocked its caller");
}

/// Measures transfers between GPUs of one host, beside copies between them.
fn measure_direct(simulated: &SimulatedGpu, gpus: &[Gpu; 2], on_gpu: &[Buffer; 2], rounds: usize) {
    let engines = start_engines(TransportChoice::Auto);
    let direction = CopyDirection::BetweenDevices;
    let [from, to] =
        [&gpus[0], &gpus[1]].map(|gpu| DeviceMemory::allocate(gpu, DIRECT_CHUNK).expect("there is memory"));
    let copy = |len| GpuCopy { from: from.address(), to: to.address(), len };
    let mut direct = prepare(&engines, on_gpu, CHUNK * CHUNKS, 5);
    launch(&mut direct);
    println!("{DIRECT_CHUNKS} chunks of 8 MiB between GPUs of one host; medians of {rounds} rounds");
    println!("{:>10} {:>12} {:>12} {:>8}", "delay", "copies", "transfer", "ratio");
    for delay_us in [0, 100, 1000, 5000] {
        simulated.set(Setting::CopyUs, delay_us);
        let mut times = [const { Vec::new() }; 2];
        for _ in 0..rounds {
            times[0].push(time_copy(&gpus[1], direction, copy(DIRECT_CHUNK), DIRECT_CHUNKS));
            times[1].push(launch(&mut direct));
        }
        let [copies, whole] = times.map(median);
        let ratio = whole.as_secs_f64() / copies.as_secs_f64();
        println!("{delay_us:>7} us {copies:>12.1?} {whole:>12.1?} {ratio:>8.2}");
    }
    simulated.set(Setting::CopyUs, 0);
    let small = 16 << 10;
    let mut direct = prepare(&engines, on_gpu, small, 6);
    let mut times = [const { Vec::new() }; 2];
    for _ in 0..rounds * 200 {
        times[0].push(time_copy(&gpus[1], direction, copy(small), 1));
        times[1].push(launch(&mut direct));
    }
    let [alone, whole] = times.map(median);
    println!(
        "a prepared launch of 16 KiB between GPUs of one host: {whole:.1?}, of which its copy alone {alone:.1?}"
    );
}
