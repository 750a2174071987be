//! Measures transfers of memory of GPUs: whether copies and lanes overlap, what a transfer between GPUs of one host takes
//! beside a copy between them, and what a launch costs beside its copies.
//!
//! `cargo bench --bench gpu_memory [-- ROUNDS]` measures over the simulated driver, which copies in host memory and adds a
//! known delay to each copy: the figures say how the engine arranges its work, and nothing of the speed of a GPU.
//! `MUSTER_GPU=real` measures the GPUs of this machine: the first two, or the only one, as both ends.
#![allow(unsafe_code, reason = "asks for copies")]
#![allow(clippy::disallowed_methods, reason = "a benchmark reads the clock")]

use std::collections::BTreeMap;
use std::sync::mpsc::channel;
use std::time::{Duration, Instant};

use muster::transfer::{
    Arena, Buffer, DeviceId, EngineConfig, Gpu, Incarnation, LaunchOptions, MemberId, MemberInfo, Membership,
    PreparedTransfers, TaskId, TransferEngine, TransferKey, TransferSpec, TransportChoice,
};
use muster_gpu::{CopyDirection, DeviceMemory, GpuCopy, PageLocked, report_ended_copies};
use simulated_gpu::{Counter, Setting, SimulatedGpu};

const CHUNK: usize = 4 << 20;
const CHUNKS: usize = 48;
/// The bytes of one copy between GPUs.
const DIRECT_CHUNK: usize = 8 << 20;

/// The delays that the simulated driver adds to a copy, in microseconds, for transfers through host memory and for those
/// between GPUs. A real one adds none.
const STAGED_DELAYS: [i64; 5] = [0, 1000, 2000, 5000, 10_000];
const DIRECT_DELAYS: [i64; 4] = [0, 100, 1000, 5000];

/// The GPUs under measurement.
struct Gpus {
    /// The simulated driver, unless the GPUs are those of this machine.
    simulated: Option<&'static SimulatedGpu>,
    /// Those of the sender and of the receiver.
    pair: [Gpu; 2],
}

impl Gpus {
    fn open() -> Self {
        let simulated = SimulatedGpu::load_if_wanted();
        if let Some(simulated) = simulated {
            simulated.set(Setting::Devices, 2);
        }
        let count = muster_gpu::device_count().expect("there is a driver");
        let pair = [0, 1].map(|ordinal| Gpu::open(ordinal % count).expect("the GPU opens"));
        Self { simulated, pair }
    }

    /// Allocates a buffer on each of the two.
    fn buffers(&self, len: usize) -> [Buffer; 2] {
        let on =
            |gpu| Arena::on_gpu(gpu, len).and_then(|arena| arena.allocate(len)).expect("there is memory");
        self.pair.each_ref().map(on)
    }

    /// Sets the delay of every copy.
    fn set_delay_us(&self, delay_us: i64) {
        if let Some(simulated) = self.simulated {
            simulated.set(Setting::CopyUs, delay_us);
        }
    }

    /// Returns those of the delays that can be set.
    fn delays<'a>(&self, all: &'a [i64]) -> &'a [i64] {
        if self.simulated.is_some() { all } else { &all[..1] }
    }
}

/// Returns the bytes of a launch by the time that it took, in GB/s.
fn rate(bytes: usize, took: Duration) -> f64 {
    bytes as f64 / took.as_secs_f64() / 1e9
}

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
    time_requests(memory.gpu(), direction, &vec![copy; count])
}

/// Returns how long copies of a GPU take, one after the other.
fn time_requests(gpu: &Gpu, direction: CopyDirection, copies: &[GpuCopy]) -> Duration {
    let (tell, told) = channel();
    let began = Instant::now();
    for copy in copies {
        let tell = tell.clone();
        // SAFETY: both memories live until all copies have ended, which this function awaits.
        let asked = unsafe { gpu.copy(direction, &[*copy], move |outcome| drop(tell.send(outcome))) };
        asked.expect("the GPU copies");
    }
    for _ in copies {
        told.recv().expect("the end is reported").expect("the GPU copies");
    }
    began.elapsed()
}

/// Returns how long a GPU takes for one copy, if the thread that asks for it looks itself whether it has ended: what the calls of
/// the driver take.
fn time_own_calls(gpu: &Gpu, direction: CopyDirection, copy: GpuCopy) -> Duration {
    let (tell, told) = channel();
    let began = Instant::now();
    // SAFETY: both memories live until the copy has ended, which this function awaits.
    let asked = unsafe { gpu.copy(direction, &[copy], move |outcome| drop(tell.send(outcome))) };
    asked.expect("the GPU copies");
    loop {
        report_ended_copies();
        if let Ok(outcome) = told.try_recv() {
            outcome.expect("the GPU copies");
            return began.elapsed();
        }
    }
}

fn median(mut times: Vec<Duration>) -> Duration {
    times.sort_unstable();
    times[times.len() / 2]
}

fn main() {
    let rounds: usize = std::env::args().filter_map(|word| word.parse().ok()).next().unwrap_or(5);
    let all = Gpus::open();
    let gpus = &all.pair;
    let engines = start_engines(TransportChoice::Tcp);
    let len = CHUNK * CHUNKS;
    let (host, memory) = (
        PageLocked::allocate(&gpus[0], CHUNK).expect("there is memory"),
        DeviceMemory::allocate(&gpus[0], CHUNK).expect("there is memory"),
    );
    let on_gpu = all.buffers(len);
    let on_host =
        [(); 2].map(|()| Arena::new(len).and_then(|arena| arena.allocate(len)).expect("there is memory"));
    let mut lanes = prepare(&engines, &on_host, len, 1);
    let mut staged = prepare(&engines, &on_gpu, len, 2);
    launch(&mut lanes);
    launch(&mut staged);

    println!("{CHUNKS} chunks of 4 MiB from GPU to GPU over two lanes of TCP; medians of {rounds} rounds");
    println!(
        "{:>10} {:>12} {:>12} {:>12} {:>12} {:>8} {:>10}",
        "delay", "from GPU", "lanes", "to GPU", "transfer", "ratio", "GB/s"
    );
    for delay_us in all.delays(&STAGED_DELAYS) {
        all.set_delay_us(*delay_us);
        let mut times = [const { Vec::new() }; 4];
        for _ in 0..rounds {
            times[0].push(time_copies(CopyDirection::ToHost, &memory, &host, CHUNK, CHUNKS));
            times[1].push(launch(&mut lanes));
            times[2].push(time_copies(CopyDirection::ToDevice, &memory, &host, CHUNK, CHUNKS));
            times[3].push(launch(&mut staged));
        }
        let [from, lane, to, whole] = times.map(median);
        let longest = from.max(lane).max(to);
        let speed = rate(len, whole);
        println!(
            "{delay_us:>7} us {from:>12.1?} {lane:>12.1?} {to:>12.1?} {whole:>12.1?} {:>8.2} {speed:>10.1}",
            whole.as_secs_f64() / longest.as_secs_f64()
        );
    }
    all.set_delay_us(0);

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
    drop((staged, on_gpu));
    measure_direct(&all, rounds);
    if let Some(simulated) = all.simulated {
        assert_eq!(simulated.count(Counter::PageableCopies), 0, "no copy blocked its caller");
    }
}

/// Measures transfers between GPUs of one host, beside copies of the same bytes by the receiver's GPU alone.
fn measure_direct(all: &Gpus, rounds: usize) {
    let engines = start_engines(TransportChoice::Auto);
    let len = if all.simulated.is_some() { CHUNK * CHUNKS } else { 2 << 30 };
    let buffers = all.buffers(len);
    // Simulated copies have a delay each, so the same number of them is the limit; a real GPU is fastest with one.
    let at_once = if all.simulated.is_some() { DIRECT_CHUNK } else { len };
    println!("between GPUs of one host, beside copies alone; medians of {rounds} rounds");
    println!(
        "{:>10} {:>10} {:>12} {:>12} {:>8} {:>10}",
        "delay", "MiB", "copies", "transfer", "ratio", "GB/s"
    );
    let sizes = [len, 256 << 20, 64 << 20, 16 << 20, 1 << 20].into_iter().filter(|size| *size <= len);
    for (key, size) in (10..).zip(sizes) {
        let mut direct = prepare(&engines, &buffers, size, key);
        launch(&mut direct);
        for delay_us in all.delays(&DIRECT_DELAYS) {
            all.set_delay_us(*delay_us);
            let mut times = [const { Vec::new() }; 2];
            for _ in 0..rounds {
                times[0].push(time_copies_between(&buffers, size, at_once));
                times[1].push(launch(&mut direct));
            }
            let [copies, whole] = times.map(median);
            let (ratio, mib) = (whole.as_secs_f64() / copies.as_secs_f64(), size >> 20);
            let speed = rate(size, whole);
            println!("{delay_us:>7} us {mib:>10} {copies:>12.1?} {whole:>12.1?} {ratio:>8.2} {speed:>10.1}");
        }
        all.set_delay_us(0);
    }
    let small = 16 << 10;
    let mut direct = prepare(&engines, &buffers, small, 6);
    let on_host =
        [(); 2].map(|()| Arena::new(small).and_then(|arena| arena.allocate(small)).expect("there is memory"));
    let mut host = prepare(&engines, &on_host, small, 5);
    let gpu = buffers[1].gpu().expect("it is a GPU's");
    let [from, to] = buffers.each_ref().map(|buffer| buffer.device_address().expect("it is a GPU's"));
    let copy = GpuCopy { from, to, len: small };
    // In turns of many of each, because each keeps other threads awake.
    let many = |time: &mut dyn FnMut() -> Duration| median((0..500).map(|_| time()).collect());
    let mut times = [const { Vec::new() }; 3];
    for _ in 0..rounds * 2 {
        times[0].push(many(&mut || time_own_calls(gpu, CopyDirection::BetweenDevices, copy)));
        times[1].push(many(&mut || launch(&mut direct)));
        times[2].push(many(&mut || launch(&mut host)));
    }
    println!(
        "a prepared launch of 16 KiB within the host, medians of {} blocks of 500 (least to most):",
        rounds * 2
    );
    for (name, mut times) in
        ["the driver's own calls", "between GPUs", "in memory of the host"].into_iter().zip(times)
    {
        times.sort_unstable();
        println!(
            "  {name}: {:.1?} ({:.1?} to {:.1?})",
            times[times.len() / 2],
            times[0],
            times[times.len() - 1]
        );
    }
}

/// Returns how long the GPU of the second buffer copies the first `len` bytes of the first one, so many at once.
fn time_copies_between(buffers: &[Buffer; 2], len: usize, at_once: usize) -> Duration {
    let [from, to] = buffers.each_ref().map(|buffer| buffer.device_address().expect("it is a GPU's"));
    let copy = |at: usize| GpuCopy { from: from + at as u64, to: to + at as u64, len: at_once.min(len - at) };
    let copies: Vec<GpuCopy> = (0..len).step_by(at_once).map(copy).collect();
    time_requests(buffers[1].gpu().expect("it is a GPU's"), CopyDirection::BetweenDevices, &copies)
}
