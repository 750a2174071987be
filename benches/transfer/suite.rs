//! The suites: cases that are measured together and shown in the same tables.

use crate::engines::EngineCase;
use crate::shape::Shape;
use crate::targets::{ARRAY_TARGETS, ENGINE_TARGETS, Target};

/// The subjects that are compared, and how the results are shown.
pub struct Suite {
    /// The subjects in the order in which they are measured: those that are compared are adjacent.
    pub subjects: &'static [EngineCase],
    pub shapes: &'static [Shape],
    /// The titles of the tables of rates, and their subjects.
    pub tables: &'static [(&'static str, &'static [EngineCase])],
    pub targets: &'static [Target],
    /// The lines in a document between which the results are put.
    pub marks: (&'static str, &'static str),
}

impl Suite {
    /// The engine, the limits of the machine, and other engines.
    pub const ENGINES: Self = Self {
        subjects: &EngineCase::ENGINES,
        shapes: &Shape::ENGINES,
        tables: &[
            ("Same host, GB/s", &EngineCase::HERE),
            ("TCP on the loopback interface, GB/s", &EngineCase::TCP),
        ],
        targets: &ENGINE_TARGETS,
        marks: ("<!-- transfers -->", "<!-- end of transfers -->"),
    };

    /// Arrays of Python programs.
    pub const ARRAYS: Self = Self {
        subjects: &EngineCase::ARRAYS,
        shapes: &Shape::ARRAYS,
        tables: &[("Same host, GB/s", &EngineCase::ARRAYS)],
        targets: &ARRAY_TARGETS,
        marks: ("<!-- arrays -->", "<!-- end of arrays -->"),
    };

    /// Returns the subjects of all tables.
    pub fn shown(&self) -> impl Iterator<Item = EngineCase> {
        self.tables.iter().flat_map(|(_, subjects)| subjects.iter().copied())
    }
}
