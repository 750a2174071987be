//! Compares two builds of Muster: the measurements of a pair follow each other, and the first of the two alternates, so that
//! neither build gains from a machine whose speed drifts.

use std::fmt;
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use muster::sample_range::SampleRange;
use serde::Serialize;

use crate::engines::{BinaryPaths, EngineCase, Figure};
use crate::shape::Shape;

/// The two builds.
pub struct Builds<'a> {
    pub new: &'a BinaryPaths,
    pub other: &'a BinaryPaths,
}

/// The name of a figure, and how to get it.
type Measure = (&'static str, fn(&Figure) -> Option<f64>);

/// The figures by which a pair of measurements is compared. Each is a time or a time per byte, so less is better.
const MEASURES: [Measure; 3] = [
    ("time of a byte", |figure| Some(1.0 / figure.gbytes_per_second)),
    ("one way, p50", |figure| figure.p50_us),
    ("processor time", |figure| figure.cpu_us),
];

/// The measurements of both builds.
#[derive(Default, Serialize)]
pub struct Comparison {
    rows: Vec<Row>,
}

#[derive(Serialize)]
struct Row {
    subject: EngineCase,
    shape: Shape,
    /// The measurements of the new build and of the other one.
    pairs: Vec<[Figure; 2]>,
}

impl Builds<'_> {
    /// Measures both builds `repeat` times: those of the wanted subjects that are Muster itself, which run without the
    /// peers' environments.
    pub fn compare(
        &self,
        wanted: &[EngineCase],
        shapes: &[Shape],
        repeat: u32,
        time: Duration,
    ) -> Result<Comparison> {
        const OWN: [EngineCase; 3] =
            [EngineCase::MusterShm, EngineCase::MusterTcp, EngineCase::MusterTcpUnchecked];
        let mut comparison = Comparison::default();
        for subject in OWN.into_iter().filter(|subject| wanted.contains(subject)) {
            for shape in shapes {
                let mut pairs = Vec::new();
                for repetition in 0..repeat {
                    eprintln!("{} of {repeat}: {subject}, {}", repetition + 1, shape.title());
                    let measure = |paths| measure_one(subject, paths, *shape, time);
                    pairs.push(if repetition % 2 == 0 {
                        let new = measure(self.new)?;
                        [new, measure(self.other)?]
                    } else {
                        let other = measure(self.other)?;
                        [measure(self.new)?, other]
                    });
                }
                comparison.rows.push(Row { subject, shape: *shape, pairs });
            }
        }
        Ok(comparison)
    }
}

fn measure_one(subject: EngineCase, paths: &BinaryPaths, shape: Shape, time: Duration) -> Result<Figure> {
    let mut figures = subject.measure(paths, &[shape], time)?;
    let figure = figures.remove(&shape).context("it measured another shape")?;
    ensure!(figure.verified, "{subject}, {}: wrong contents", shape.title());
    Ok(figure)
}

impl Comparison {
    /// Returns all figures as JSON.
    pub fn json(&self) -> Result<String> {
        Ok(serde_json::to_string_pretty(self)?)
    }
}

impl fmt::Display for Comparison {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(
            out,
            "New build / other build, median of the pairs (its 95 % confidence interval); less is better.\n"
        )?;
        let columns = MEASURES.map(|(name, _)| name).join(" | ");
        writeln!(out, "| | | {columns} |\n|---|---|{}", "---|".repeat(MEASURES.len()))?;
        for Row { subject, shape, pairs } in &self.rows {
            write!(out, "| {subject} | {} |", shape.title())?;
            for (_, measure) in MEASURES {
                let ratios = pairs.iter().filter_map(|[new, other]| Some(measure(new)? / measure(other)?));
                match SampleRange::of_median(ratios) {
                    Some(SampleRange { median, min, max }) => {
                        write!(out, " {median:.3} ({min:.3}..{max:.3}) |")?
                    }
                    None => write!(out, " - |")?,
                }
            }
            writeln!(out)?;
        }
        Ok(())
    }
}
