//! The sizes of the transfers that are measured.

use std::fmt;
use std::str::FromStr;

use serde::Serialize;

/// The shape of a workload: a launch moves `batch` buffers of `size` bytes, and `in_flight` launches are in
/// flight at a time.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize)]
pub struct Shape {
    pub size: usize,
    pub batch: usize,
    pub in_flight: usize,
}

impl Shape {
    /// Those of the suite of engines.
    pub const ENGINES: [Self; 6] = [
        Self { size: 4 << 10, batch: 1, in_flight: 16 },
        Self { size: 4 << 10, batch: 256, in_flight: 4 },
        Self { size: 64 << 10, batch: 1, in_flight: 16 },
        Self { size: 1 << 20, batch: 1, in_flight: 4 },
        Self { size: 16 << 20, batch: 1, in_flight: 2 },
        Self { size: 64 << 20, batch: 1, in_flight: 2 },
    ];

    /// Those of the suite of arrays.
    pub const ARRAYS: [Self; 5] = [
        Self { size: 4 << 10, batch: 1, in_flight: 16 },
        Self { size: 64 << 10, batch: 1, in_flight: 16 },
        Self { size: 1 << 20, batch: 1, in_flight: 4 },
        Self { size: 16 << 20, batch: 1, in_flight: 2 },
        Self { size: 256 << 20, batch: 1, in_flight: 2 },
    ];

    /// Returns the bytes of a launch.
    pub const fn bytes(self) -> usize {
        self.size * self.batch
    }

    /// Returns the shape as text for people.
    pub fn title(self) -> String {
        let size = match self.size {
            size if size >= 1 << 20 => format!("{} MiB", size >> 20),
            size if size >= 1 << 10 => format!("{} KiB", size >> 10),
            size => format!("{size} B"),
        };
        if self.batch == 1 { size } else { format!("{} x {size} a launch", self.batch) }
    }
}

impl fmt::Display for Shape {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(out, "{}:{}:{}", self.size, self.batch, self.in_flight)
    }
}

impl FromStr for Shape {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let numbers: Option<Vec<usize>> =
            text.split(':').map(|number| number.parse().ok().filter(|number| *number > 0)).collect();
        match numbers.as_deref() {
            Some(&[size, batch, in_flight]) => Ok(Self { size, batch, in_flight }),
            _ => Err("give SIZE:BATCH:IN_FLIGHT, each at least 1".to_owned()),
        }
    }
}
