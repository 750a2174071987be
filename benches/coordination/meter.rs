//! Measures a piece of work: the wall time, and the processor time of the server and of the load generator.

use std::time::{Duration, Instant};

use anyhow::Result;
use serde::Serialize;

use crate::clock::now;
use crate::process::CpuReading;

/// The figures of one server for one piece of work in one repetition.
#[derive(Debug, Clone, Serialize)]
pub struct Figure {
    /// The identifier of the work.
    pub id: String,
    /// The title of the work.
    pub work: String,
    /// The unit by which processor time is counted.
    pub per: &'static str,
    /// The wall time of each lap, in milliseconds.
    pub walls_ms: Vec<f64>,
    /// The server's processor time for each operation, in microseconds.
    pub cpu_us: Option<f64>,
    /// The load generator's processor time for each operation, in microseconds.
    pub client_us: Option<f64>,
    pub operations: u64,
    pub memory_mib: Option<f64>,
}

impl Figure {
    /// Returns the figure of the most memory that a server has held.
    pub fn memory(id: String, work: String, mib: f64) -> Self {
        let (walls_ms, per) = (Vec::new(), "");
        Self { id, work, per, walls_ms, cpu_us: None, client_us: None, operations: 0, memory_mib: Some(mib) }
    }
}

/// Measures one piece of work in one or several laps.
pub struct CpuMeter {
    pid: u32,
    running: Option<Readings>,
    server: Duration,
    client: Duration,
    lap: Instant,
    walls: Vec<Duration>,
}

struct Readings {
    server: CpuReading,
    client: CpuReading,
}

/// The time that a server has for work after its last answer. That work counts.
const SETTLE: Duration = Duration::from_millis(20);

impl CpuMeter {
    /// Returns a running meter.
    pub fn start(pid: u32) -> Result<Self> {
        let mut meter = Self::stopped(pid);
        meter.begin_counted()?;
        Ok(meter)
    }

    /// Returns a stopped meter, which runs for one lap at a time.
    pub fn stopped(pid: u32) -> Self {
        let nothing = Duration::ZERO;
        Self { pid, running: None, server: nothing, client: nothing, lap: now(), walls: Vec::new() }
    }

    /// Begins a lap after a pause that does not count.
    pub fn begin_counted(&mut self) -> Result<()> {
        let client = CpuReading::take(std::process::id())?;
        self.running = Some(Readings { server: CpuReading::take(self.pid)?, client });
        self.begin();
        Ok(())
    }

    /// Begins a lap after a pause whose processor time counts.
    pub fn begin(&mut self) {
        self.lap = now();
    }

    /// Ends a lap.
    pub fn lap(&mut self) {
        let end = now();
        self.walls.push(end - self.lap);
        self.lap = end;
    }

    /// Ends a lap in which `operations` were in progress together, and records the time of each.
    pub fn lap_for_each_of(&mut self, operations: u64) {
        let each = self.lap.elapsed().div_f64(operations as f64);
        self.walls.push(each);
        self.begin();
    }

    /// Stops counting until the next [`Self::begin_counted`].
    pub fn stop(&mut self) -> Result<()> {
        let Some(before) = self.running.take() else { return Ok(()) };
        self.client += CpuReading::take(std::process::id())?.since(&before.client);
        std::thread::sleep(SETTLE);
        self.server += CpuReading::take(self.pid)?.since(&before.server);
        Ok(())
    }

    /// Returns the figure; `operations` is their number in all laps together.
    pub fn finish(
        mut self,
        id: impl Into<String>,
        work: impl Into<String>,
        per: &'static str,
        operations: u64,
    ) -> Result<Figure> {
        self.stop()?;
        let each = |spent: Duration| Some(spent.as_secs_f64() * 1e6 / operations as f64);
        Ok(Figure {
            id: id.into(),
            work: work.into(),
            per,
            walls_ms: self.walls.iter().map(|wall| wall.as_secs_f64() * 1e3).collect(),
            cpu_us: each(self.server),
            client_us: each(self.client),
            operations,
            memory_mib: None,
        })
    }
}
