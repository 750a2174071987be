//! The deliberate differences between Muster and jaxlib's own service: one row each, in `DIFFERENCES.md`.

/// A difference that is wanted. Scripts name the one that they show; nothing else is tolerated.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Difference {
    BarrierBeginsAtZero,
    NoNamelessBarrier,
    FutureVersion,
    ErrorWithoutCode,
    CallerHungUp,
    NextRun,
    UnsyncedRestart,
    MissedInstance,
    FencedLife,
    LostConnection,
}

impl Difference {
    pub const ALL: [Self; 10] = [
        Self::BarrierBeginsAtZero,
        Self::NoNamelessBarrier,
        Self::FutureVersion,
        Self::ErrorWithoutCode,
        Self::CallerHungUp,
        Self::NextRun,
        Self::UnsyncedRestart,
        Self::MissedInstance,
        Self::FencedLife,
        Self::LostConnection,
    ];

    /// The name of its row.
    pub fn id(self) -> &'static str {
        match self {
            Self::BarrierBeginsAtZero => "barrier-begins-at-zero",
            Self::NoNamelessBarrier => "no-nameless-barrier",
            Self::FutureVersion => "future-version",
            Self::ErrorWithoutCode => "error-without-code",
            Self::CallerHungUp => "caller-hung-up",
            Self::NextRun => "next-run",
            Self::UnsyncedRestart => "unsynced-restart",
            Self::MissedInstance => "missed-instance",
            Self::FencedLife => "fenced-life",
            Self::LostConnection => "lost-connection",
        }
    }
}
