//! The deliberate differences between Muster and jaxlib's own service: one row each, in `DIFFERENCES.md`.

/// A difference that is wanted. Scripts name the one that they show; nothing else is tolerated.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Difference {
    BarrierBeginsAtZero,
    NoNamelessBarrier,
    MistakenBeginning,
    NegativeCounter,
    ResultStays,
    RepeatedMembers,
    CallerHungUp,
    Strangers,
    NulInKey,
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
    pub const ALL: [Self; 17] = [
        Self::BarrierBeginsAtZero,
        Self::NoNamelessBarrier,
        Self::MistakenBeginning,
        Self::NegativeCounter,
        Self::ResultStays,
        Self::RepeatedMembers,
        Self::CallerHungUp,
        Self::Strangers,
        Self::NulInKey,
        Self::FutureVersion,
        Self::ErrorWithoutCode,
        Self::NeverAnswered,
        Self::NextRun,
        Self::FencedLife,
        Self::MissedInstance,
        Self::UnsyncedRestart,
        Self::LostConnection,
    ];

    /// The name of its row.
    pub fn id(self) -> &'static str {
        match self {
            Self::BarrierBeginsAtZero => "barrier-begins-at-zero",
            Self::NoNamelessBarrier => "no-nameless-barrier",
            Self::MistakenBeginning => "mistaken-beginning",
            Self::NegativeCounter => "negative-counter",
            Self::ResultStays => "result-stays",
            Self::RepeatedMembers => "repeated-members",
            Self::CallerHungUp => "caller-hung-up",
            Self::Strangers => "strangers",
            Self::NulInKey => "nul-in-key",
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
