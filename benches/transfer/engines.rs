//! The subjects that the benchmark compares (limits of the machine, Muster, other engines), and the command that
//! measures each subject.

use std::collections::BTreeMap;
use std::fmt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use anyhow::{Context as _, Result, bail, ensure};
use clap::ValueEnum;
use serde::{Deserialize, Serialize};

use crate::limits;
use crate::shape::Shape;

/// A limit of the machine, Muster, or another engine.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, ValueEnum)]
#[value(rename_all = "kebab-case")]
pub enum EngineCase {
    #[value(name = "memcpy-1")]
    Memcpy1,
    #[value(name = "memcpy-2")]
    Memcpy2,
    #[value(name = "memcpy-1-cold")]
    Memcpy1Cold,
    #[value(name = "memcpy-2-cold")]
    Memcpy2Cold,
    Wake,
    WakeBeside,
    MusterShm,
    MusterShmAsleep,
    MusterShmBeside,
    MusterPvm,
    MusterPvmUnprepared,
    ArraysBuffers,
    ArraysPrepared,
    Arrays,
    NixlShm,
    NixlShmPolled,
    #[value(name = "tcp-1")]
    Tcp1,
    #[value(name = "tcp-2")]
    Tcp2,
    #[value(name = "tcp-2-unpaced")]
    Tcp2Unpaced,
    MusterTcp,
    MusterTcpUnchecked,
    NixlTcp,
    NixlTcpPolled,
    Mooncake,
    Gloo,
    Jax,
    DevicePut,
}

impl EngineCase {
    /// The subjects of the suite of engines, in the order in which they are measured.
    pub const ENGINES: [Self; 22] = [
        Self::Memcpy1,
        Self::Memcpy2,
        Self::Wake,
        Self::WakeBeside,
        Self::MusterShm,
        Self::MusterShmAsleep,
        Self::MusterShmBeside,
        Self::NixlShm,
        Self::NixlShmPolled,
        Self::MusterPvm,
        Self::Memcpy1Cold,
        Self::Memcpy2Cold,
        Self::Tcp1,
        Self::Tcp2,
        Self::Tcp2Unpaced,
        Self::MusterTcp,
        Self::MusterTcpUnchecked,
        Self::NixlTcp,
        Self::NixlTcpPolled,
        Self::Mooncake,
        Self::Gloo,
        Self::Jax,
    ];

    /// The subjects on one host, in the order of the tables.
    pub const HERE: [Self; 12] = [
        Self::Memcpy1,
        Self::Memcpy2,
        Self::Memcpy1Cold,
        Self::Memcpy2Cold,
        Self::Wake,
        Self::WakeBeside,
        Self::MusterShm,
        Self::MusterShmAsleep,
        Self::MusterShmBeside,
        Self::MusterPvm,
        Self::NixlShm,
        Self::NixlShmPolled,
    ];

    /// The subjects over TCP on the loopback interface.
    pub const TCP: [Self; 10] = [
        Self::Tcp1,
        Self::Tcp2,
        Self::Tcp2Unpaced,
        Self::MusterTcp,
        Self::MusterTcpUnchecked,
        Self::NixlTcp,
        Self::NixlTcpPolled,
        Self::Mooncake,
        Self::Gloo,
        Self::Jax,
    ];

    /// The subjects of the suite of arrays.
    pub const ARRAYS: [Self; 12] = [
        Self::MusterShm,
        Self::ArraysBuffers,
        Self::MusterPvm,
        Self::ArraysPrepared,
        Self::MusterPvmUnprepared,
        Self::Arrays,
        Self::DevicePut,
        Self::Jax,
        Self::NixlShm,
        Self::NixlShmPolled,
        Self::Mooncake,
        Self::Gloo,
    ];

    /// Measures the subject, for each of the shapes.
    pub fn measure(
        self,
        places: &BinaryPaths,
        shapes: &[Shape],
        time: Duration,
    ) -> Result<BTreeMap<Shape, Figure>> {
        let limit = |of: &dyn Fn(Shape) -> Result<f64>| {
            shapes.iter().map(|shape| Ok((*shape, Figure::rate(of(*shape)?)))).collect()
        };
        let single = |most: usize| -> Vec<Shape> {
            let small = |shape: &&Shape| shape.batch == 1 && shape.size <= most;
            shapes.iter().filter(small).copied().collect()
        };
        match self {
            Self::Memcpy1 => limit(&|shape| limits::measure_memcpy(shape, 1, false, time)),
            Self::Memcpy2 => limit(&|shape| limits::measure_memcpy(shape, 2, false, time)),
            Self::Memcpy1Cold => limit(&|shape| limits::measure_memcpy(shape, 1, true, time)),
            Self::Memcpy2Cold => limit(&|shape| limits::measure_memcpy(shape, 2, true, time)),
            Self::WakeBeside => limits::on_one_processor(|| Self::Wake.measure(places, shapes, time)),
            Self::MusterShmAsleep => {
                places.muster(&single(64 << 10), time, &["--transport", "shm", "--spin", "0s"])
            }
            Self::MusterShmBeside => {
                limits::on_one_processor(|| Self::MusterShm.measure(places, &single(64 << 10), time))
            }
            Self::Wake => {
                let figure = |(p50, p99): (Duration, Duration), shape: Shape| Figure {
                    half_round_trip_p50_us: Some(p50.as_secs_f64() * 1e6),
                    half_round_trip_p99_us: Some(p99.as_secs_f64() * 1e6),
                    ..Figure::rate(shape.bytes() as f64 / p50.as_secs_f64() / 1e9)
                };
                single(4 << 10)
                    .into_iter()
                    .map(|shape| Ok((shape, figure(limits::measure_wake_latency(time)?, shape))))
                    .collect()
            }
            Self::Tcp1 => limit(&|shape| limits::measure_tcp(shape, 1, true, time)),
            Self::Tcp2 => limit(&|shape| limits::measure_tcp(shape, 2, true, time)),
            Self::Tcp2Unpaced => limit(&|shape| limits::measure_tcp(shape, 2, false, time)),
            Self::MusterShm => places.muster(shapes, time, &["--transport", "shm"]),
            Self::MusterPvm => places.muster(shapes, time, &["--transport", "pvm"]),
            Self::MusterPvmUnprepared => places.muster(shapes, time, &["--transport", "pvm", "--unprepared"]),
            Self::MusterTcp => places.muster(shapes, time, &["--transport", "tcp"]),
            Self::MusterTcpUnchecked => {
                places.muster(shapes, time, &["--transport", "tcp", "--checksums", "off"])
            }
            Self::ArraysBuffers => places.arrays("buffers", shapes, time),
            Self::ArraysPrepared => places.arrays("prepared", shapes, time),
            Self::Arrays => places.arrays("arrays", shapes, time),
            Self::NixlShm => places.peer("nixl_peer.py", &[("MUSTER_PEER", "shm")], shapes, time),
            Self::NixlTcp => places.peer("nixl_peer.py", &[("MUSTER_PEER", "tcp")], shapes, time),
            Self::NixlShmPolled => {
                let settings = [("MUSTER_PEER", "shm"), ("NIXL_PROGRESS", "0"), ("NIXL_ERRORS", "none")];
                places.peer("nixl_peer.py", &settings, shapes, time)
            }
            Self::NixlTcpPolled => {
                let settings = [("MUSTER_PEER", "tcp"), ("NIXL_PROGRESS", "0")];
                places.peer("nixl_peer.py", &settings, shapes, time)
            }
            Self::Mooncake => places.peer("mooncake_peer.py", &[], shapes, time),
            Self::Gloo => places.peer("gloo_peer.py", &[], shapes, time),
            Self::Jax => places.peer("jax_peer.py", &[], shapes, time),
            Self::DevicePut => places.peer("device_put_peer.py", &[], shapes, time),
        }
    }
}

impl fmt::Display for EngineCase {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.write_str(match self {
            Self::Memcpy1 => "memcpy, 1 thread",
            Self::Memcpy2 => "memcpy, 2 threads",
            Self::Memcpy1Cold => "memcpy, 1 thread, cold",
            Self::Memcpy2Cold => "memcpy, 2 threads, cold",
            Self::Wake => "waking a thread, one buffer each",
            Self::WakeBeside => "waking a thread on the same processor",
            Self::MusterShm => "Muster, shared memory",
            Self::MusterShmAsleep => "Muster, shared memory, nobody looks before sleeping",
            Self::MusterShmBeside => "Muster, shared memory, both on one processor",
            Self::MusterPvm => "Muster, process memory",
            Self::MusterPvmUnprepared => "Muster, process memory, not prepared",
            Self::ArraysBuffers => "Muster in Python, Buffers, prepared",
            Self::ArraysPrepared => "Muster in Python, arrays of JAX into Buffers, prepared",
            Self::Arrays => "Muster in Python, arrays of JAX, not prepared",
            Self::NixlShm => "NIXL (UCX, CMA)",
            Self::NixlShmPolled => "NIXL (UCX, CMA), polled",
            Self::Tcp1 => "bare TCP, 1 stream",
            Self::Tcp2 => "bare TCP, 2 streams",
            Self::Tcp2Unpaced => "bare TCP, 2 streams, not paced",
            Self::MusterTcp => "Muster, TCP with CRC32C",
            Self::MusterTcpUnchecked => "Muster, TCP without",
            Self::NixlTcp => "NIXL (UCX, TCP)",
            Self::NixlTcpPolled => "NIXL (UCX, TCP), polled",
            Self::Mooncake => "Mooncake, TCP",
            Self::Gloo => "torch gloo",
            Self::Jax => "jax.experimental.transfer",
            Self::DevicePut => "jax.device_put",
        })
    }
}

/// The result of one process of a subject for a shape.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Figure {
    pub gbytes_per_second: f64,
    pub p50_us: Option<f64>,
    pub p99_us: Option<f64>,
    pub half_round_trip_p50_us: Option<f64>,
    pub half_round_trip_p99_us: Option<f64>,
    /// A call of `launch`.
    pub launch_p50_us: Option<f64>,
    /// The part of its time that another Python thread waits for the interpreter while bytes move.
    pub thread_loss: Option<f64>,
    pub cpu_us: Option<f64>,
    pub prepare_first_us: Option<f64>,
    pub prepare_p50_us: Option<f64>,
    pub prepare_max_us: Option<f64>,
    pub verified: bool,
    pub settings: Option<String>,
    /// The batch size, if the subject cannot take the requested one in a launch.
    pub batch: usize,
}

impl Figure {
    fn rate(gbytes_per_second: f64) -> Self {
        Self {
            gbytes_per_second,
            p50_us: None,
            p99_us: None,
            half_round_trip_p50_us: None,
            half_round_trip_p99_us: None,
            launch_p50_us: None,
            thread_loss: None,
            cpu_us: None,
            prepare_first_us: None,
            prepare_p50_us: None,
            prepare_max_us: None,
            verified: true,
            settings: None,
            batch: 1,
        }
    }
}

/// The paths of the programs.
pub struct BinaryPaths {
    muster: PathBuf,
    peers: PathBuf,
    jax: Option<PathBuf>,
}

impl BinaryPaths {
    pub fn new(muster: &Path, peers: &Path, jax: &Path) -> Self {
        Self { muster: muster.to_owned(), peers: peers.to_owned(), jax: newest_jax_environment(jax) }
    }

    fn muster(&self, shapes: &[Shape], time: Duration, how: &[&str]) -> Result<BTreeMap<Shape, Figure>> {
        let mut figures = BTreeMap::new();
        for shape in shapes {
            let mut command = Command::new(&self.muster);
            command.args(["transfer", "bench", "--json", "--repeat", "1"]).args(how);
            command.args(["--size", &shape.size.to_string(), "--batch", &shape.batch.to_string()]);
            command.args(["--in-flight", &shape.in_flight.to_string()]);
            command.args(["--seconds", &time.as_secs_f64().to_string()]);
            figures
                .insert(*shape, run_and_parse_json_lines(&mut command)?.pop().context("it printed nothing")?);
        }
        Ok(figures)
    }

    /// Measures arrays of two JAX processes with the Python package that benches/transfer/setup has installed.
    fn arrays(&self, mode: &str, shapes: &[Shape], time: Duration) -> Result<BTreeMap<Shape, Figure>> {
        let package = self.peers.join("muster");
        ensure!(package.exists(), "benches/transfer/setup has not installed the Python package");
        let package = package.to_str().context("the path of the package is no text")?;
        self.peer("arrays_peer.py", &[("MUSTER_PEER", mode), ("PYTHONPATH", package)], shapes, time)
    }

    fn peer(
        &self,
        program: &str,
        settings: &[(&str, &str)],
        shapes: &[Shape],
        time: Duration,
    ) -> Result<BTreeMap<Shape, Figure>> {
        let python = if ["arrays_peer.py", "device_put_peer.py", "jax_peer.py"].contains(&program) {
            self.jax.as_ref().context("tests/jax/setup has not made an environment")?.join("bin/python")
        } else {
            self.peers.join("bin/python")
        };
        ensure!(python.exists(), "benches/transfer/setup has not made its environment");
        let mut command = Command::new(python);
        command.arg(Path::new(env!("CARGO_MANIFEST_DIR")).join("benches/transfer/peers").join(program));
        command.args(["--seconds", &time.as_secs_f64().to_string()]);
        for shape in shapes {
            command.args(["--shape", &shape.to_string()]);
        }
        command.envs(settings.iter().copied());
        // Libraries of the system that the setup unpacked for the peer.
        if let Ok(libraries) = std::fs::read_to_string(self.peers.join("libraries")) {
            command.env("LD_LIBRARY_PATH", libraries);
        }
        let figures = run_and_parse_json_lines(&mut command)?;
        ensure!(figures.len() == shapes.len(), "it measured {} of {} shapes", figures.len(), shapes.len());
        Ok(shapes.iter().copied().zip(figures).collect())
    }
}

/// Returns the newest JAX environment.
fn newest_jax_environment(folder: &Path) -> Option<PathBuf> {
    let release = |path: &PathBuf| -> Option<Vec<u32>> {
        path.file_name()?.to_str()?.split('.').map(|part| part.parse().ok()).collect()
    };
    let found = std::fs::read_dir(folder).ok()?.filter_map(|entry| Some(entry.ok()?.path()));
    found
        .filter(|path| path.join("bin/python").exists())
        .filter(|path| release(path).is_some())
        .max_by_key(release)
}

/// Runs a program that prints a line of JSON for each shape.
fn run_and_parse_json_lines(command: &mut Command) -> Result<Vec<Figure>> {
    // In seconds: a program that hangs must not stop the run.
    const LIMIT: &str = "300";
    let mut limited = Command::new("timeout");
    // Some programs ignore the signal that asks them to end.
    limited.args(["--kill-after=5", LIMIT]).arg(command.get_program()).args(command.get_args());
    for (name, value) in command.get_envs() {
        if let Some(value) = value {
            limited.env(name, value);
        }
    }
    let done = limited.stdin(Stdio::null()).output()?;
    let out = String::from_utf8_lossy(&done.stdout);
    let figures: Result<Vec<Figure>, _> =
        out.lines().filter(|line| line.starts_with('{')).map(serde_json::from_str).collect();
    let figures = figures.context("what it printed is not understood")?;
    // A program also fails if contents are wrong, which is reported as such.
    if !done.status.success() && figures.iter().all(|figure| figure.verified) {
        let said = String::from_utf8_lossy(&done.stderr);
        bail!("{}: {}", done.status, said.trim().lines().last().unwrap_or("it said nothing"));
    }
    Ok(figures)
}
