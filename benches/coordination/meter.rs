//! What a piece of work took: the time by the wall, and what both sides used of the processors.

use std::time::{Duration, Instant};

use anyhow::Result;
use serde::Serialize;

use crate::clock::now;
use crate::process::CpuReading;

/// What one server showed for one piece of work in one repetition.
#[derive(Debug, Clone, Serialize)]
pub struct Figure {
    /// The work, for programs.
    pub id: String,
    /// The work, for people.
    pub work: String,
    /// What the processor time is counted by.
    pub per: &'static str,
    /// Each time that it was done.
    pub walls_ms: Vec<f64>,
    /// The server's processor time for each operation.
    pub cpu_us: Option<f64>,
    /// The load generator's.
    pub client_us: Option<f64>,
    pub operations: u64,
    pub memory_mib: Option<f64>,
}

impl Figure {
    /// The most memory that a server had held by some moment.
    pub fn memory(id: String, work: String, mib: f64) -> Self {
        let (walls_ms, per) = (Vec::new(), "");
        Self { id, work, per, walls_ms, cpu_us: None, client_us: None, operations: 0, memory_mib: Some(mib) }
    }
}

/// Measures one piece of work, done once or several times.
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

/// A server may have something left to do after its last answer. It counts.
const SETTLE: Duration = Duration::from_millis(20);

impl CpuMeter {
    /// A meter that runs.
    pub fn start(pid: u32) -> Result<Self> {
        let mut meter = Self::stopped(pid);
        meter.begin_counted()?;
        Ok(meter)
    }

    /// A meter to be run for one lap at a time.
    pub fn stopped(pid: u32) -> Self {
        let nothing = Duration::ZERO;
        Self { pid, running: None, server: nothing, client: nothing, lap: now(), walls: Vec::new() }
    }

    /// Begins a lap before which nothing was counted.
    pub fn begin_counted(&mut self) -> Result<()> {
        let client = CpuReading::take(std::process::id())?;
        self.running = Some(Readings { server: CpuReading::take(self.pid)?, client });
        self.begin();
        Ok(())
    }

    /// Begins a lap, where there was something to do between it and the last.
    pub fn begin(&mut self) {
        self.lap = now();
    }

    /// Ends a lap.
    pub fn lap(&mut self) {
        let end = now();
        self.walls.push(end - self.lap);
        self.lap = end;
    }

    /// Ends a lap in which so many operations were under way together: what each took of it.
    pub fn lap_for_each_of(&mut self, operations: u64) {
        let each = self.lap.elapsed().div_f64(operations as f64);
        self.walls.push(each);
        self.begin();
    }

    /// Counts no more until the next [`Self::begin_counted`].
    pub fn stop(&mut self) -> Result<()> {
        let Some(before) = self.running.take() else { return Ok(()) };
        self.client += CpuReading::take(std::process::id())?.since(&before.client);
        std::thread::sleep(SETTLE);
        self.server += CpuReading::take(self.pid)?.since(&before.server);
        Ok(())
    }

    /// `operations` is how many there were in all laps together.
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
