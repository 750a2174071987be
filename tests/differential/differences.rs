//! The list of deliberate differences between Muster and jaxlib's own service. `DIFFERENCES.md` has a row for each.

use std::collections::BTreeSet;

use crate::script::Release;

/// A deliberate difference. A script names the one that it shows; no other is tolerated.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Difference {
    BarrierBeginsAtZero,
    NoNamelessBarrier,
    NegativeCounter,
    ResultStays,
    RepeatedMembers,
    CallerHungUp,
    DesertedInstance,
    Strangers,
    NulInKey,
    SameTopology,
    FutureVersion,
    ErrorWithoutCode,
    NeverAnswered,
    NextRun,
    FencedLife,
    MissedInstance,
    UnsyncedRestart,
    LostConnection,
}

impl Difference {
    pub const ALL: [Self; 18] = [
        Self::BarrierBeginsAtZero,
        Self::NoNamelessBarrier,
        Self::NegativeCounter,
        Self::ResultStays,
        Self::RepeatedMembers,
        Self::CallerHungUp,
        Self::DesertedInstance,
        Self::Strangers,
        Self::NulInKey,
        Self::SameTopology,
        Self::FutureVersion,
        Self::ErrorWithoutCode,
        Self::NeverAnswered,
        Self::NextRun,
        Self::FencedLife,
        Self::MissedInstance,
        Self::UnsyncedRestart,
        Self::LostConnection,
    ];

    /// Returns the name of its row.
    pub fn row_name(self) -> &'static str {
        match self {
            Self::BarrierBeginsAtZero => "barrier-begins-at-zero",
            Self::NoNamelessBarrier => "no-nameless-barrier",
            Self::NegativeCounter => "negative-counter",
            Self::ResultStays => "result-stays",
            Self::RepeatedMembers => "repeated-members",
            Self::CallerHungUp => "caller-hung-up",
            Self::DesertedInstance => "deserted-instance",
            Self::Strangers => "strangers",
            Self::NulInKey => "nul-in-key",
            Self::SameTopology => "same-topology",
            Self::FutureVersion => "future-version",
            Self::ErrorWithoutCode => "error-without-code",
            Self::NeverAnswered => "never-answered",
            Self::NextRun => "next-run",
            Self::FencedLife => "fenced-life",
            Self::MissedInstance => "missed-instance",
            Self::UnsyncedRestart => "unsynced-restart",
            Self::LostConnection => "lost-connection",
        }
    }
}

/// Checks that the rows of `DIFFERENCES.md` are the existing differences, and that a script shows each.
///
/// # Errors
/// In words, if they are not.
pub fn check_rows_and_scripts() -> Result<(), String> {
    let rows: Vec<&str> = include_str!("DIFFERENCES.md")
        .lines()
        .filter_map(|line| line.strip_prefix("| ")?.split(" |").next())
        .filter(|id| !matches!(*id, "difference" | "---"))
        .collect();
    let known = Difference::ALL.map(Difference::row_name);
    if rows != known {
        return Err(format!("DIFFERENCES.md has the rows {rows:?}, the scripts know {known:?}"));
    }
    let scripts = Release::ALL.into_iter().flat_map(crate::scripts::all_scripts);
    let shown: BTreeSet<Difference> = scripts.flat_map(|script| script.differences()).collect();
    match Difference::ALL.into_iter().find(|difference| !shown.contains(difference)) {
        Some(difference) => Err(format!("no script shows {:?}", difference.row_name())),
        None => Ok(()),
    }
}
