//! Measures how long it takes to make a plan, to read it, and to copy strided regions. All times are CPU times of
//! the one thread that does the work, so other programs on the machine distort them less.
//!
//!     cargo bench --bench plans -- --repeat 15

use std::time::Duration;

use muster::sample_range::SampleRange;
use muster::transfer::plan::{
    ArrayDescription, BufferRole, DeviceId, Dtype, Mesh, PartitionSpec, Placement, Plan, PlanOptions,
    ShardRegion, Sharding, TaskId, copy_region, pack_runs, unpack_runs,
};
use rustix::time::{ClockId, clock_gettime};

/// How long making a plan for 4,096 devices may take at the median, in seconds.
const TARGET: f64 = 0.1;

/// How long this thread has worked so far.
fn worked() -> Duration {
    Duration::try_from(clock_gettime(ClockId::ThreadCPUTime)).unwrap_or_default()
}

/// The range of several seconds.
fn spread(repeat: usize, work: impl FnMut() -> f64) -> SampleRange {
    SampleRange::of(std::iter::repeat_with(work).take(repeat.max(1))).expect("it was done at least once")
}

fn timed<T>(work: impl FnOnce() -> T) -> f64 {
    let before = worked();
    std::hint::black_box(work());
    (worked() - before).as_secs_f64()
}

fn milliseconds(SampleRange { median, min, max }: SampleRange) -> String {
    format!("{:.2} ms ({:.2}..{:.2})", median * 1e3, min * 1e3, max * 1e3)
}

type Axes<'a> = &'a [(&'a str, u64)];

struct Case {
    name: &'static str,
    source: ArrayDescription,
    destination: ArrayDescription,
}

fn cases() -> Vec<Case> {
    let side = |shape: &[u64], axes: Axes, devices: std::ops::Range<u32>, spec: &[&[&str]]| {
        let sharding = Sharding { mesh: Mesh::new(axes, devices), spec: PartitionSpec::new(spec) };
        ArrayDescription { shape: shape.to_vec(), dtype: Dtype::Bfloat16, sharding }
    };
    let square: &[u64] = &[32768, 16384];
    let grid: Axes = &[("data", 64), ("model", 64)];
    let cube: Axes = &[("a", 16), ("b", 16), ("c", 16)];
    let four: Axes = &[("a", 8), ("b", 8), ("c", 8), ("d", 8)];
    let half: Axes = &[("data", 32), ("model", 64)];
    let all = 0..4096;
    let case = |name, source, destination| Case { name, source, destination };
    vec![
        case(
            "2 axes, P((data, model)) to P(data, model)",
            side(square, grid, all.clone(), &[&["data", "model"]]),
            side(square, grid, all.clone(), &[&["data"], &["model"]]),
        ),
        case(
            "2 axes, P(data, model) to P(model, data)",
            side(square, grid, all.clone(), &[&["data"], &["model"]]),
            side(square, grid, all.clone(), &[&["model"], &["data"]]),
        ),
        case(
            "2 axes, P(data) to P(None, data), 64 copies",
            side(square, grid, all.clone(), &[&["data"]]),
            side(square, grid, all.clone(), &[&[], &["data"]]),
        ),
        case(
            "2 axes, all-gather along model, 64 copies",
            side(square, grid, all.clone(), &[&["data"], &["model"]]),
            side(square, grid, all.clone(), &[&["data"]]),
        ),
        case(
            "3 axes, P((a, b), c) to P(c, (a, b))",
            side(square, cube, all.clone(), &[&["a", "b"], &["c"]]),
            side(square, cube, all.clone(), &[&["c"], &["a", "b"]]),
        ),
        case(
            "4 axes, P((a, b), (c, d)) to P(d, a, b), 8 copies",
            side(&[4096, 4096, 64], four, all.clone(), &[&["a", "b"], &["c", "d"]]),
            side(&[4096, 4096, 64], four, all.clone(), &[&["d"], &["a"], &["b"]]),
        ),
        case(
            "2,048 devices to 2,048 others, P(data, model) to P(model), 32 copies",
            side(square, half, 0..2048, &[&["data"], &["model"]]),
            side(square, half, 2048..4096, &[&["model"]]),
        ),
        case(
            "uneven: 32,003 rows, 64 to 63 parts, of 4,032 to 4,096 devices",
            side(&[32003, 16384], &[("rows", 63), ("columns", 64)], 0..4032, &[&["rows"], &["columns"]]),
            side(&[32003, 16384], grid, all.clone(), &[&["data"], &["model"]]),
        ),
        case(
            "rows to columns, 2,048 devices to 2,048 others",
            side(square, &[("x", 2048)], 0..2048, &[&["x"]]),
            side(square, &[("x", 2048)], 2048..4096, &[&[], &["x"]]),
        ),
        case(
            "rows to columns, 4,096 devices",
            side(square, &[("x", 4096)], all.clone(), &[&["x"]]),
            side(square, &[("x", 4096)], all.clone(), &[&[], &["x"]]),
        ),
        case(
            "two copies of 2,048 rows to 4,096 columns",
            side(square, &[("copy", 2), ("x", 2048)], all.clone(), &[&["x"]]),
            side(square, &[("x", 4096)], all.clone(), &[&[], &["x"]]),
        ),
        case(
            "broadcast from one device to 4,096",
            side(square, &[("one", 1)], 0..1, &[]),
            side(square, &[("all", 4096)], all.clone(), &[]),
        ),
        case(
            "all-gather of 4,096 parts, 4,096 copies",
            side(square, &[("x", 4096)], all.clone(), &[&["x"]]),
            side(square, &[("x", 4096)], all, &[]),
        ),
    ]
}

fn plans(repeat: usize) {
    println!(
        "| 4,096 devices, 8 a task, one task a host | steps | making the plan | its cost | the steps of one task | steps in order, each |"
    );
    println!("| --- | --- | --- | --- | --- | --- |");
    let mut verdicts = Vec::new();
    let placement = Placement::blocks((0..4096).map(DeviceId), 8, 1);
    for Case { name, source, destination } in cases() {
        let make = || {
            Plan::new(source.clone(), destination.clone(), &placement, PlanOptions::default())
                .expect("it makes sense")
        };
        let made = spread(repeat, || timed(make));
        let plan = make();
        let cost = plan.cost();
        assert_eq!(cost.over_minimum, 0, "a plan moves more than it must");
        let costed = spread(repeat, || timed(|| plan.cost()));
        let own = spread(repeat, || timed(|| plan.steps_of_task(TaskId(300)).count()));
        // Looking at sixteen million steps takes seconds.
        let count = plan.len();
        let some = count.min(1 << 20);
        let each = spread(repeat.min(3), || {
            timed(|| plan.steps().take(some).map(|step| step.bytes).sum::<u64>()) / some as f64
        });
        println!(
            "| {name} | {count} | {} | {} | {} | {:.0} ns |",
            milliseconds(made),
            milliseconds(costed),
            milliseconds(own),
            each.median * 1e9
        );
        verdicts.push((name, made.median));
    }
    let missed = verdicts.iter().filter(|(_, made)| *made > TARGET).count();
    println!(
        "\nOf {} rows of 4,096 devices, {missed} miss the {:.0} ms for making the plan:\n",
        verdicts.len(),
        TARGET * 1e3
    );
    for (name, made) in verdicts {
        let word = if made > TARGET { "MISSED" } else { "met" };
        println!("- {word}: {name}: {:.2} ms, at most {:.0} ms", made * 1e3, TARGET * 1e3);
    }
}

/// Copies between two buffers of 64 MiB, beside one plain copy of as many bytes.
fn copies(repeat: usize) {
    println!("\n| copying half of 64 MiB, on both sides in runs of | `copy_region` | `pack` then `unpack` |");
    println!("| --- | --- | --- |");
    let size: u64 = 64 << 20;
    let buffer: Vec<u8> = (0..size).map(|byte| byte as u8).collect();
    let mut into = vec![0; buffer.len()];
    let mut packed = vec![0; buffer.len() / 2];
    let rate = |SampleRange { median, min, max }: SampleRange| {
        let gigabytes = (size / 2) as f64 / 1e9;
        format!("{:.2} GB/s ({:.2}..{:.2})", gigabytes / median, gigabytes / max, gigabytes / min)
    };
    let half = buffer.len() / 2;
    let plain = spread(repeat, || timed(|| into[..half].copy_from_slice(&buffer[..half])));
    println!("| one plain copy of as many bytes | {} | |", rate(plain));
    for run in [2, 4, 16, 64, 256, 1024, 4096, 65536, size / 2] {
        let shape = [size / (2 * run), 2 * run];
        let region = ShardRegion { start: vec![0, run / 2], extent: vec![shape[0], run] };
        let copied = spread(repeat, || {
            timed(|| copy_region(&buffer, &shape, &region, &mut into, &shape, &region, 1).expect("it fits"))
        });
        let runs = region.runs(&shape, 1).expect("it fits");
        let twice = spread(repeat, || {
            timed(|| {
                pack_runs(&buffer, &runs, &mut packed).expect("it fits");
                unpack_runs(&packed, &runs, &mut into).expect("it fits");
            })
        });
        println!("| {run} bytes | {} | {} |", rate(copied), rate(twice));
    }
}

fn main() {
    let arguments: Vec<String> = std::env::args().collect();
    let asked =
        arguments.iter().position(|argument| argument == "--repeat").and_then(|at| arguments.get(at + 1));
    let repeat = asked.and_then(|repeat| repeat.parse().ok()).unwrap_or(15);
    // The first plan also pays for the memory of all of them.
    let small = Mesh::new(&[("x", 1)], [0]);
    let sharding = Sharding { mesh: small, spec: PartitionSpec::default() };
    let array = ArrayDescription { shape: vec![1], dtype: Dtype::Uint8, sharding };
    let plan =
        Plan::new(array.clone(), array, &Placement::blocks([DeviceId(0)], 1, 1), PlanOptions::default());
    assert_eq!(plan.map(|plan| plan.shard_bytes(BufferRole::Destination, DeviceId(0))), Ok(1));
    plans(repeat);
    copies(repeat);
}
