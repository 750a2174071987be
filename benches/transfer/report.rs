//! The results, as tables for people and as JSON for programs.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;
use std::path::Path;

use anyhow::{Context as _, Result, ensure};
use muster::sample_range::SampleRange;
use serde::Serialize;

use crate::engines::{EngineCase, Figure};
use crate::shape::Shape;
use crate::suite::Suite;
use crate::targets;

/// All figures of a run.
pub struct Results<'a> {
    suite: &'a Suite,
    shapes: Vec<Shape>,
    figures: BTreeMap<(EngineCase, Shape), BTreeMap<u32, Figure>>,
    absent: BTreeMap<EngineCase, String>,
}

#[derive(Serialize)]
struct Row<'a> {
    subject: EngineCase,
    shape: Shape,
    repetition: u32,
    figure: &'a Figure,
}

impl<'a> Results<'a> {
    pub fn new(suite: &'a Suite, shapes: &[Shape]) -> Self {
        Self { suite, shapes: shapes.to_vec(), figures: BTreeMap::new(), absent: BTreeMap::new() }
    }

    pub fn add(&mut self, subject: EngineCase, repetition: u32, figures: BTreeMap<Shape, Figure>) {
        for (shape, figure) in figures {
            self.figures.entry((subject, shape)).or_default().insert(repetition, figure);
        }
    }

    pub fn absent(&mut self, subject: EngineCase, why: &str) {
        self.absent.insert(subject, why.to_owned());
    }

    pub fn shapes(&self) -> impl Iterator<Item = Shape> {
        self.shapes.iter().copied()
    }

    /// Returns the verified figures of a subject.
    fn of(&self, shape: Shape, subject: EngineCase) -> impl Iterator<Item = (u32, &Figure)> {
        let all = self.figures.get(&(subject, shape)).into_iter().flatten();
        all.filter(|(_, figure)| figure.verified).map(|(repetition, figure)| (*repetition, figure))
    }

    pub fn spread(
        &self,
        shape: Shape,
        subject: EngineCase,
        figure: impl Fn(&Figure) -> Option<f64>,
    ) -> Option<SampleRange> {
        SampleRange::of(self.of(shape, subject).filter_map(|(_, found)| figure(found)))
    }

    /// Returns the ratio of a subject to the best of `others`, each pair from one repetition.
    pub fn ratio(&self, shape: Shape, subject: EngineCase, others: &[EngineCase]) -> Option<SampleRange> {
        self.ratio_of(shape, subject, shape, others)
    }

    /// As [`ratio`](Self::ratio), of what is moved in batches to what the others move one by one.
    pub fn ratio_to_single(
        &self,
        shape: Shape,
        subject: EngineCase,
        others: &[EngineCase],
    ) -> Option<SampleRange> {
        let single = self.shapes.iter().find(|single| single.size == shape.size && single.batch == 1)?;
        self.ratio_of(shape, subject, *single, others)
    }

    /// Returns `compare` of a figure of a subject and the same figure of another one, each pair from one repetition.
    pub fn compared(
        &self,
        shape: Shape,
        subject: EngineCase,
        other: EngineCase,
        figure: fn(&Figure) -> Option<f64>,
        compare: fn(f64, f64) -> f64,
    ) -> Option<SampleRange> {
        SampleRange::of(self.of(shape, subject).filter_map(|(repetition, own)| {
            let (_, theirs) = self.of(shape, other).find(|(known, _)| *known == repetition)?;
            Some(compare(figure(own)?, figure(theirs)?))
        }))
    }

    fn ratio_of(
        &self,
        shape: Shape,
        subject: EngineCase,
        theirs: Shape,
        others: &[EngineCase],
    ) -> Option<SampleRange> {
        SampleRange::of(self.of(shape, subject).filter_map(|(repetition, figure)| {
            let best = others.iter().filter_map(|other| {
                let mut found = self.of(theirs, *other);
                Some(found.find(|(other, _)| *other == repetition)?.1.gbytes_per_second)
            });
            let best = best.fold(0.0, f64::max);
            (best > 0.0).then(|| figure.gbytes_per_second / best)
        }))
    }

    /// Returns an error if any bytes arrived damaged at Muster. Damage at other engines is only reported.
    pub fn verify(&self) -> Result<()> {
        for ((subject, shape), figures) in &self.figures {
            let right = figures.values().all(|figure| figure.verified);
            ensure!(
                right || !subject.to_string().starts_with("Muster"),
                "{subject}, {}: wrong contents",
                shape.title()
            );
        }
        Ok(())
    }

    pub fn json(&self) -> Result<String> {
        let rows: Vec<_> = self
            .figures
            .iter()
            .flat_map(|((subject, shape), figures)| {
                figures.iter().map(|(repetition, figure)| Row {
                    subject: *subject,
                    shape: *shape,
                    repetition: *repetition,
                    figure,
                })
            })
            .collect();
        Ok(serde_json::to_string_pretty(&rows)?)
    }

    pub fn markdown(&self, repeat: u32, seconds: f64) -> String {
        let mut out = String::new();
        // Writing to a string cannot fail.
        let _ = writeln!(
            out,
            "{repeat} repetitions of {seconds} s each, medians with the least and the most. GB/s are 10^9 bytes a second. One at a \
             time is measured from the sender's call until the bytes are in place, as the receiver saw it, or the sender where the \
             receiver takes no part. A message that only tells the sender is not counted.\n"
        );
        for (title, subjects) in self.suite.tables {
            self.table(&mut out, title, subjects, |found| {
                self.spread(found.0, found.1, |figure| Some(figure.gbytes_per_second))
                    .map(|rate| format_sample_range(&rate))
            });
        }
        let all: Vec<_> = self.suite.shown().collect();
        self.table(&mut out, "One at a time, us until it is there: p50 / p99", &all, |(shape, subject)| {
            let p50 = self.spread(shape, subject, |figure| figure.p50_us)?;
            let p99 = self.spread(shape, subject, |figure| figure.p99_us)?;
            Some(format!("{} / {}", format_sample_range(&p50), format_sample_range(&p99)))
        });
        self.table(&mut out, "Half of a round trip, us: p50 / p99", &all, |(shape, subject)| {
            let p50 = self.spread(shape, subject, |figure| figure.half_round_trip_p50_us)?;
            let p99 = self.spread(shape, subject, |figure| figure.half_round_trip_p99_us)?;
            Some(format!("{} / {}", format_sample_range(&p50), format_sample_range(&p99)))
        });
        self.table(
            &mut out,
            "One at a time, us of processors that both sides work for each",
            &all,
            |found| {
                self.spread(found.0, found.1, |figure| figure.cpu_us).map(|cpu| format_sample_range(&cpu))
            },
        );
        self.table(&mut out, "A call of launch, us: p50", &all, |(shape, subject)| {
            self.spread(shape, subject, |figure| figure.launch_p50_us).map(|call| format_sample_range(&call))
        });
        self.write_prepare_times(&mut out);
        self.write_remarks(&mut out);
        out
    }

    fn table(
        &self,
        out: &mut String,
        title: &str,
        subjects: &[EngineCase],
        cell: impl Fn((Shape, EngineCase)) -> Option<String>,
    ) {
        let rows: Vec<(EngineCase, Vec<Option<String>>)> = subjects
            .iter()
            .map(|subject| (*subject, self.shapes.iter().map(|shape| cell((*shape, *subject))).collect()))
            .filter(|(_, cells): &(_, Vec<_>)| cells.iter().any(Option::is_some))
            .collect();
        if rows.is_empty() {
            return;
        }
        let _ = write!(out, "| {title} |");
        for shape in &self.shapes {
            let _ = write!(out, " {} |", shape.title());
        }
        let _ = writeln!(out, "\n| --- |{}", " --- |".repeat(self.shapes.len()));
        for (subject, cells) in rows {
            let _ = write!(out, "| {subject} |");
            for cell in cells {
                let _ = write!(out, " {} |", cell.unwrap_or_else(|| "-".to_owned()));
            }
            out.push('\n');
        }
        out.push('\n');
    }

    fn write_prepare_times(&self, out: &mut String) {
        for subject in [EngineCase::MusterShm, EngineCase::MusterTcp] {
            let over = |figure: fn(&Figure) -> Option<f64>| {
                SampleRange::of(
                    self.shapes
                        .iter()
                        .flat_map(|shape| self.of(*shape, subject))
                        .filter_map(|(_, found)| figure(found)),
                )
            };
            let (first, p50, most) = (
                over(|figure| figure.prepare_first_us),
                over(|figure| figure.prepare_p50_us),
                over(|figure| figure.prepare_max_us),
            );
            if let (Some(first), Some(p50), Some(most)) = (first, p50, most) {
                let _ = writeln!(
                    out,
                    "- {subject}: the first preparation, which makes the connection, takes {} us; 1,000 more take {} us each at the \
                     median, the slowest of them {} us.",
                    format_sample_range(&first),
                    format_sample_range(&p50),
                    format_sample_range(&most)
                );
            }
        }
    }

    fn write_remarks(&self, out: &mut String) {
        let mut settings = BTreeSet::new();
        for ((subject, shape), figures) in &self.figures {
            for figure in figures.values() {
                if let Some(text) = &figure.settings {
                    settings.insert(format!("- {subject}: {text}."));
                }
                if figure.settings.is_some() && figure.batch != shape.batch {
                    settings.insert(format!("- {subject}, {}: {} a launch.", shape.title(), figure.batch));
                }
                if !figure.verified {
                    settings.insert(format!(
                        "- {subject}, {}: WRONG CONTENTS in some repetition, which is left out.",
                        shape.title()
                    ));
                }
            }
        }
        for line in settings {
            let _ = writeln!(out, "{line}");
        }
        for (subject, why) in &self.absent {
            let some = if self.figures.keys().any(|(other, _)| other == subject) {
                "absent in some repetitions"
            } else {
                "absent"
            };
            let _ = writeln!(out, "- {subject}: {some}: {why}.");
        }
        let verdicts = targets::verdicts(self, self.suite.targets);
        let missed = verdicts.iter().filter(|verdict| !verdict.met).count();
        let _ = writeln!(out, "\nOf {} targets, {missed} are missed:\n", verdicts.len());
        for verdict in verdicts {
            let _ = writeln!(out, "- {}", verdict.text);
        }
    }
}

/// Formats the spread with its significant digits.
fn format_sample_range(spread: &SampleRange) -> String {
    let number = |value: f64| match value {
        value if value >= 100.0 => format!("{value:.0}"),
        value if value >= 10.0 => format!("{value:.1}"),
        value => format!("{value:.2}"),
    };
    format!("{} ({}..{})", number(spread.median), number(spread.min), number(spread.max))
}

/// Replaces the tables between the marks of a file.
pub fn replace_tables_in_file(path: &Path, tables: &str, (begin, end): (&str, &str)) -> Result<()> {
    let text = std::fs::read_to_string(path)?;
    let (before, rest) = text.split_once(begin).context("it has no place for the tables")?;
    let (_, after) = rest.split_once(end).context("the place for the tables has no end")?;
    std::fs::write(path, format!("{before}{begin}\n{tables}\n{end}{after}"))?;
    Ok(())
}
