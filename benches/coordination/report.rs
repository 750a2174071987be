//! The results, as tables for people and as JSON for programs.

use std::collections::BTreeMap;
use std::fmt::Write as _;

use anyhow::Result;
use muster::sample_range::SampleRange;
use serde::Serialize;

use crate::meter::Figure;
use crate::servers::{JAXLIB, Kind};
use crate::targets;
use crate::workloads::Session;

/// All figures of a run.
pub struct Results {
    servers: Vec<Kind>,
    rows: Vec<Row>,
    notes: Vec<String>,
}

/// One piece of work with the figures of each server, by repetition.
#[derive(Debug, Serialize)]
pub struct Row {
    pub id: String,
    pub work: String,
    per: &'static str,
    figures: BTreeMap<Kind, BTreeMap<u32, Figure>>,
}

impl Row {
    fn figures(&self, kind: Kind) -> impl Iterator<Item = &Figure> {
        self.figures.get(&kind).into_iter().flat_map(BTreeMap::values)
    }

    /// Returns the wall time over all laps of all repetitions.
    fn wall_ms(&self, kind: Kind) -> Option<SampleRange> {
        SampleRange::of(self.figures(kind).flat_map(|figure| figure.walls_ms.iter().copied()))
    }

    fn cpu_us(&self, kind: Kind) -> Option<SampleRange> {
        SampleRange::of(self.figures(kind).filter_map(|figure| figure.cpu_us))
    }

    fn memory_mib(&self, kind: Kind) -> Option<SampleRange> {
        SampleRange::of(self.figures(kind).filter_map(|figure| figure.memory_mib))
    }

    /// Returns the ratio of one server's figure to another's; each pair comes from consecutive lives.
    fn ratio(&self, over: Kind, under: Kind, figure: impl Fn(&Figure) -> Option<f64>) -> Option<SampleRange> {
        SampleRange::of(self.pairs(over, under, figure))
    }

    fn pairs(&self, over: Kind, under: Kind, figure: impl Fn(&Figure) -> Option<f64>) -> Vec<f64> {
        let (Some(over), Some(under)) = (self.figures.get(&over), self.figures.get(&under)) else {
            return Vec::new();
        };
        let pair =
            |(repetition, found): (&u32, &Figure)| Some(figure(found)? / figure(under.get(repetition)?)?);
        over.iter().filter_map(pair).collect()
    }

    pub fn cpu_under_cxx(&self) -> Option<SampleRange> {
        self.ratio(Kind::Cxx, Kind::Muster, |figure| figure.cpu_us)
    }

    pub fn cpu_over_floor(&self) -> Option<SampleRange> {
        self.ratio(Kind::Muster, Kind::Baseline, |figure| figure.cpu_us)
    }

    pub fn cpu_over_other(&self) -> Option<SampleRange> {
        SampleRange::of_median(self.pairs(Kind::Muster, Kind::Against, |figure| figure.cpu_us))
    }

    pub fn faster_than_cxx(&self) -> Option<SampleRange> {
        self.ratio(Kind::Cxx, Kind::Muster, wall_of)
    }

    pub fn muster_wall_ms(&self) -> Option<SampleRange> {
        self.wall_ms(Kind::Muster)
    }

    pub fn muster_memory_mib(&self) -> Option<SampleRange> {
        self.memory_mib(Kind::Muster)
    }

    /// Returns the cells with the figures of the servers and their comparison.
    fn time_cells(&self, servers: &[Kind]) -> Vec<String> {
        let mut cells = vec![self.work.clone()];
        cells.extend(servers.iter().map(|&kind| cell(self.wall_ms(kind), milliseconds)));
        let there = |kind: Kind| servers.contains(&kind);
        cells.extend(there(Kind::Cxx).then(|| cell(self.faster_than_cxx(), times)));
        cells.extend(servers.iter().map(|&kind| cell(self.cpu_us(kind), microseconds)));
        cells.extend(there(Kind::Cxx).then(|| cell(self.cpu_under_cxx(), times)));
        cells.extend(there(Kind::Baseline).then(|| cell(self.cpu_over_floor(), times)));
        cells.extend(there(Kind::Against).then(|| cell(self.cpu_over_other(), exactly)));
        cells.push(self.per.to_owned());
        cells
    }

    fn memory_cells(&self, servers: &[Kind]) -> Vec<String> {
        let mut cells = vec![self.work.clone()];
        cells.extend(servers.iter().map(|&kind| cell(self.memory_mib(kind), |mib| format!("{mib:.0} MiB"))));
        cells
    }

    fn is_memory(&self) -> bool {
        self.figures.values().flat_map(BTreeMap::values).any(|figure| figure.memory_mib.is_some())
    }
}

fn wall_of(figure: &Figure) -> Option<f64> {
    Some(SampleRange::of(figure.walls_ms.iter().copied())?.median)
}

impl Results {
    pub fn new(servers: &[Kind]) -> Self {
        Self { servers: servers.to_vec(), rows: Vec::new(), notes: Vec::new() }
    }

    pub fn add(&mut self, kind: Kind, repetition: u32, figures: Vec<Figure>) {
        for figure in figures {
            let index = self.rows.iter().position(|row| row.id == figure.id).unwrap_or_else(|| {
                let (id, work, per) = (figure.id.clone(), figure.work.clone(), figure.per);
                self.rows.push(Row { id, work, per, figures: BTreeMap::new() });
                self.rows.len() - 1
            });
            self.rows[index].figures.entry(kind).or_default().insert(repetition, figure);
        }
    }

    /// Adds a note about a server in a session.
    pub fn note(&mut self, kind: Kind, session: Session, what: &str) {
        let note = format!("{} and {session}: {what}.", kind.name());
        if !self.notes.contains(&note) {
            self.notes.push(note);
        }
    }

    /// Adds a remark about the whole run.
    pub fn remark(&mut self, text: Option<String>) {
        self.notes.extend(text);
    }

    fn tables(&self) -> Vec<Vec<Vec<String>>> {
        let names = |what: &str| self.servers.iter().map(|kind| format!("{} {what}", kind.name())).collect();
        let (walls, cpus): (Vec<_>, Vec<_>) = (names("wall"), names("CPU"));
        let mut times = vec![vec!["work".to_owned()]];
        times[0].extend(walls);
        let where_there = |kind: Kind, title: &str| self.servers.contains(&kind).then(|| title.to_owned());
        times[0].extend(where_there(Kind::Cxx, "C++ / Muster"));
        times[0].extend(cpus);
        times[0].extend(where_there(Kind::Cxx, "C++ / Muster"));
        times[0].extend(where_there(Kind::Baseline, "Muster / floor"));
        times[0].extend(where_there(Kind::Against, "Muster / other, 95 %"));
        times[0].push("CPU for each".to_owned());
        let mut memory = vec![vec!["work".to_owned()]];
        memory[0].extend(self.servers.iter().map(|kind| kind.name().to_owned()));
        for row in &self.rows {
            if row.is_memory() {
                memory.push(row.memory_cells(&self.servers));
            } else {
                times.push(row.time_cells(&self.servers));
            }
        }
        [times, memory].into_iter().filter(|table| table.len() > 1).collect()
    }

    /// Returns the results for a terminal.
    pub fn text(&self) -> String {
        let mut out = format!("\n{}\n", machine());
        for table in self.tables() {
            out.push('\n');
            let columns = table[0].len();
            let width =
                |column: usize| table.iter().map(|row| row[column].chars().count()).max().unwrap_or(0);
            let widths: Vec<_> = (0..columns).map(width).collect();
            for row in &table {
                for (cell, width) in row.iter().zip(&widths) {
                    let _ = write!(out, "{cell:<width$}  ");
                }
                out.truncate(out.trim_end().len());
                out.push('\n');
            }
        }
        out.push('\n');
        for verdict in self.rows.iter().flat_map(targets::verdicts) {
            let _ = writeln!(out, "{}", verdict.text);
        }
        for note in &self.notes {
            let _ = writeln!(out, "{note}");
        }
        out
    }

    /// Returns the results for BENCHMARKS.md.
    pub fn markdown(&self) -> String {
        let mut out = format!("{}\n\n    {}\n", machine(), command());
        for table in self.tables() {
            out.push('\n');
            for (number, row) in table.iter().enumerate() {
                let _ = writeln!(out, "| {} |", row.join(" | "));
                if number == 0 {
                    let _ = writeln!(out, "|{}", " --- |".repeat(row.len()));
                }
            }
        }
        if !self.notes.is_empty() {
            out.push('\n');
        }
        for note in &self.notes {
            let _ = writeln!(out, "- {note}");
        }
        out
    }

    pub fn json(&self) -> Result<String> {
        let verdicts: Vec<_> = self.rows.iter().flat_map(targets::verdicts).collect();
        let whole = serde_json::json!({
            "machine": machine(),
            "command": command(),
            "rows": self.rows,
            "notes": self.notes,
            "missed": verdicts.iter().filter(|verdict| !verdict.met).map(|verdict| &verdict.text).collect::<Vec<_>>(),
        });
        Ok(serde_json::to_string_pretty(&whole)?)
    }
}

/// Returns the median, with the least and the greatest value if they differ.
fn cell(spread: Option<SampleRange>, show: impl Fn(f64) -> String) -> String {
    let Some(SampleRange { median, min, max }) = spread else { return "-".to_owned() };
    let (middle, least, most) = (show(median), show(min), show(max));
    if least == most { middle } else { format!("{middle} ({least}..{most})") }
}

fn milliseconds(ms: f64) -> String {
    if ms < 1.0 { microseconds(ms * 1e3) } else { format!("{} ms", significant(ms)) }
}

fn microseconds(us: f64) -> String {
    format!("{} us", significant(us))
}

fn times(ratio: f64) -> String {
    significant(ratio)
}

/// Formats a ratio near one, of which the hundredths matter.
fn exactly(ratio: f64) -> String {
    format!("{ratio:.3}")
}

/// Formats a number with its significant decimals.
fn significant(number: f64) -> String {
    match number.abs() {
        0.0..10.0 => format!("{number:.2}"),
        10.0..100.0 => format!("{number:.1}"),
        _ => format!("{number:.0}"),
    }
}

/// Returns the machine and the versions of the run.
fn machine() -> String {
    let read = |path: &str| std::fs::read_to_string(path).unwrap_or_default();
    let cpuinfo = read("/proc/cpuinfo");
    let model = cpuinfo.lines().find_map(|line| line.strip_prefix("model name")?.split_once(": "));
    let model = model.map_or("unknown processor", |(_, name)| name);
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let kernel = read("/proc/sys/kernel/osrelease");
    format!(
        "{cores} cores of {model}, Linux {}, over loopback, load generator on the same cores; Muster {}, jaxlib {JAXLIB}.",
        kernel.trim(),
        env!("CARGO_PKG_VERSION"),
    )
}

fn command() -> String {
    let arguments: Vec<_> = std::env::args().skip(1).filter(|argument| argument != "--bench").collect();
    format!("cargo bench --bench coordination -- {}", arguments.join(" "))
        .trim_end_matches([' ', '-'])
        .to_owned()
}
