//! The performance targets of Muster.

use crate::report::Row;

/// A bound on one figure.
#[derive(Debug, Clone, Copy)]
pub enum Bound {
    /// The C++ service uses at least this multiple of the processor time.
    CpuUnderCxx(f64),
    /// Muster uses at most this multiple of the baseline's processor time.
    CpuOverFloor(f64),
    /// The C++ service takes at least this multiple of the wall time.
    FasterThanCxx(f64),
    /// The wall time is at most this, in milliseconds.
    WallMs(f64),
    /// The memory is at most this, in MiB.
    MemoryMib(f64),
}

/// The targets, by the beginning of the figures' ids.
const TARGETS: [(&str, Bound); 17] = [
    ("heartbeat.", Bound::CpuUnderCxx(3.0)),
    ("heartbeat.", Bound::CpuOverFloor(1.4)),
    ("registration.", Bound::CpuUnderCxx(3.0)),
    ("registration.", Bound::CpuOverFloor(1.4)),
    ("barrier.", Bound::CpuUnderCxx(3.0)),
    ("barrier.", Bound::CpuOverFloor(1.4)),
    ("barrier.1024", Bound::FasterThanCxx(2.5)),
    ("barrier.4096", Bound::FasterThanCxx(2.5)),
    ("live-set.4096", Bound::CpuUnderCxx(10.0)),
    ("live-set.4096", Bound::FasterThanCxx(3.0)),
    ("watch.1024", Bound::FasterThanCxx(8.0)),
    ("keys.insert", Bound::CpuUnderCxx(2.5)),
    ("keys.try-get", Bound::CpuUnderCxx(2.5)),
    ("keys.get", Bound::CpuUnderCxx(2.5)),
    ("failure.restart", Bound::WallMs(150.0)),
    ("failure.broken", Bound::WallMs(150.0)),
    ("memory.10000.all", Bound::MemoryMib(350.0)),
];

/// A target and whether it is met.
pub struct Verdict {
    pub text: String,
    pub met: bool,
}

/// Returns the verdicts on a row, for the targets that were measured.
pub fn verdicts(row: &Row) -> Vec<Verdict> {
    let mut verdicts = Vec::new();
    for (start, bound) in TARGETS {
        if !row.id.starts_with(start) {
            continue;
        }
        let (found, met, target) = match bound {
            Bound::CpuUnderCxx(times) => {
                (row.cpu_under_cxx(), at_least(times), format!("CPU, C++ / Muster >= {times}"))
            }
            Bound::CpuOverFloor(times) => {
                (row.cpu_over_floor(), at_most(times), format!("CPU, Muster / floor <= {times}"))
            }
            Bound::FasterThanCxx(times) => {
                (row.faster_than_cxx(), at_least(times), format!("wall, C++ / Muster >= {times}"))
            }
            Bound::WallMs(most) => (row.muster_wall_ms(), at_most(most), format!("wall <= {most} ms")),
            Bound::MemoryMib(most) => {
                (row.muster_memory_mib(), at_most(most), format!("memory < {most} MiB"))
            }
        };
        let Some(found) = found else { continue };
        let met = met(found.median);
        let word = if met { "met" } else { "MISSED" };
        let text = format!(
            "{word}: {}: {target}: {:.2} ({:.2} to {:.2})",
            row.work, found.median, found.min, found.max
        );
        verdicts.push(Verdict { text, met });
    }
    verdicts
}

fn at_least(bound: f64) -> Box<dyn Fn(f64) -> bool> {
    Box::new(move |found| found >= bound)
}

fn at_most(bound: f64) -> Box<dyn Fn(f64) -> bool> {
    Box::new(move |found| found <= bound)
}
