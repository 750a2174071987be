//! The table of results: a row for each attack, with the targets that the server missed.

use std::fmt::Write as _;

use crate::attack::{Attack, Outcome};
use crate::client::{AttackFigures, Probes};
use crate::server::Memory;

/// The 99th percentile that a heartbeat may take, in milliseconds.
const HEARTBEAT_P99_MS: f64 = 50.0;
/// The growth of memory that is permitted at any moment, in bytes.
const GROWTH_MAX: u64 = 256 << 20;
/// The growth of memory that may remain after the attack, as a fraction of the memory before.
const KEPT_SHARE: f64 = 0.2;
/// The same in bytes, because a server of 20 MiB cannot return to a fifth of that.
const KEPT: u64 = 16 << 20;

const MIB: f64 = (1 << 20) as f64;

/// The result of one attack.
pub struct Row {
    pub attack: &'static Attack,
    pub figures: AttackFigures,
    pub memory: Memory,
    pub told: Outcome,
    /// The exit status of the server, if it ended.
    pub died: Option<String>,
}

impl Row {
    /// Returns the missed targets.
    pub fn misses(&self) -> Vec<String> {
        let mut misses = Vec::new();
        let (figures, memory) = (&self.figures, self.memory);
        if let Some(how) = &self.died {
            misses.push(format!("the server ended: {how}"));
        }
        if figures.p99_ms >= HEARTBEAT_P99_MS || figures.failed_heartbeats > 0 {
            misses.push("heartbeats".to_owned());
        }
        for (name, probes) in figures.probes() {
            if probes.failed > 0 {
                misses.push(name.to_owned());
            }
        }
        if memory.peak - memory.before >= GROWTH_MAX {
            misses.push("peak of memory".to_owned());
        }
        let kept = ((memory.before as f64 * KEPT_SHARE) as u64).max(KEPT);
        if memory.after > memory.before + kept {
            misses.push("memory afterwards".to_owned());
        }
        if let Some(why) = &self.told.broken {
            misses.push(format!("the attacker: {why}"));
        }
        misses
    }

    fn verdict(&self) -> String {
        let misses = self.misses();
        match (self.attack.is_control, misses.is_empty()) {
            (true, _) => "control".to_owned(),
            (false, true) => "held".to_owned(),
            (false, false) => format!("**missed: {}**", misses.join(", ")),
        }
    }

    /// Returns the row in one line, while the others are still to come.
    pub fn short(&self) -> String {
        format!(
            "{:<20} heartbeats {} memory {} told {}: {}",
            self.attack.name,
            self.heartbeats(),
            self.amounts(),
            self.told.text(),
            self.verdict()
        )
    }

    fn heartbeats(&self) -> String {
        let AttackFigures { p50_ms, p99_ms, max_ms, heartbeats, failed_heartbeats, .. } = &self.figures;
        let failed =
            if *failed_heartbeats > 0 { format!(", {failed_heartbeats} failed") } else { String::new() };
        format!("{p50_ms:.1} / {p99_ms:.1} / {max_ms:.0} ({heartbeats}{failed})")
    }

    fn amounts(&self) -> String {
        let Memory { before, peak, after } = self.memory;
        format!("{:.0} / {:.0} / {:.0}", before as f64 / MIB, peak as f64 / MIB, after as f64 / MIB)
    }
}

fn shown(probes: &Probes) -> String {
    match probes {
        Probes { answered: 0, failed: 0, .. } => "-".to_owned(),
        Probes { answered, failed, slowest_ms } => format!("{answered}, {failed} failed, {slowest_ms:.0} ms"),
    }
}

/// Returns all rows, in Markdown.
pub fn table(rows: &[Row], seconds: u64) -> String {
    let mut text = format!(
        "Attacks of {seconds} s each. Heartbeats are those of a well-behaved client, 100 a second, each timed from when it was \
         due. Health is asked for 4 times a second, on a new connection, and failed without an answer within 5 s. Memory is \
         the server's resident memory. Targets: p99 of heartbeats below {HEARTBEAT_P99_MS} ms; every question for health is \
         answered; at most {} MiB more at any moment; at most {:.0} %, or {} MiB, more 10 s after the end.\n\n",
        GROWTH_MAX >> 20,
        KEPT_SHARE * 100.0,
        KEPT >> 20,
    );
    text += "| attack | heartbeats p50 / p99 / max, ms (count) | health over HTTP: answered, failed, slowest | over gRPC | 20 MB stored | memory before / peak / 10 s after, MiB | sent, MB | what the attacker was told | targets |\n";
    text += "| --- | --- | --- | --- | --- | --- | --- | --- | --- |\n";
    for row in rows {
        let _ = writeln!(
            text,
            "| {}: {} | {} | {} | {} | {} | {} | {:.1} | {} | {} |",
            row.attack.name,
            row.attack.what,
            row.heartbeats(),
            shown(&row.figures.http),
            shown(&row.figures.grpc),
            shown(&row.figures.stores),
            row.amounts(),
            row.told.sent as f64 / 1e6,
            row.told.text(),
            row.verdict(),
        );
    }
    text
}
