//! The end of a core, and the rules by which the keeper starts another one. Begin at [`CoreEnd`] and
//! [`RestartPolicy`].

use std::fmt;
use std::os::unix::process::ExitStatusExt as _;
use std::process::ExitStatus;
use std::time::Duration;

use rustix::process::Signal;
use serde::{Deserialize, Serialize};

/// A core that served for less than this ended *early*.
const EARLY_END: Duration = Duration::from_secs(1);
/// The pause before the next start after the second early end in a row. It doubles with each further one.
const FIRST_PAUSE: Duration = Duration::from_millis(100);
/// After this many early ends in a row, at least one of them by a signal, the keeper gives up.
const EARLY_ENDS_MAX: u32 = 10;
/// After this many crashes in a row before the core served, the last input of the journal is set aside.
const CRASHES_BEFORE_SET_ASIDE: u32 = 2;
/// After this many early crashes in a row, the connections end.
const CRASHES_BEFORE_CONNECTIONS_END: u32 = 2;

/// How a process ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum CoreEndCause {
    /// It could not be started, for this reason.
    NotStarted(String),
    /// It exited with this code.
    Exited(i32),
    /// This signal ended it, from outside the process: from the kernel, for lack of memory, or from a person.
    Killed(i32),
    /// It crashed, which raised this signal.
    Crashed(i32),
}

impl CoreEndCause {
    /// Returns the cause by the status that the kernel reports.
    pub fn from_status(status: ExitStatus) -> Self {
        const CRASHES: [Signal; 7] =
            [Signal::ABORT, Signal::SEGV, Signal::BUS, Signal::ILL, Signal::FPE, Signal::TRAP, Signal::SYS];
        match (status.signal(), status.code()) {
            (Some(signal), _) if CRASHES.iter().any(|crash| crash.as_raw() == signal) => {
                Self::Crashed(signal)
            }
            (Some(signal), _) => Self::Killed(signal),
            (None, code) => Self::Exited(code.unwrap_or(-1)),
        }
    }

    /// Returns the exit code of a command that ended like this.
    pub fn exit_code(&self) -> u8 {
        let code = match self {
            Self::NotStarted(_) => 1,
            Self::Exited(code) => *code,
            Self::Killed(signal) | Self::Crashed(signal) => 128 + signal,
        };
        u8::try_from(code).unwrap_or(1)
    }
}

impl fmt::Display for CoreEndCause {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NotStarted(why) => write!(f, "could not be started ({why})"),
            Self::Exited(code) => write!(f, "exited with code {code}"),
            Self::Killed(signal) => write!(f, "was killed by {}", SignalName(*signal)),
            Self::Crashed(signal) => write!(f, "crashed with {}", SignalName(*signal)),
        }
    }
}

struct SignalName(i32);

impl fmt::Display for SignalName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let names = [
            (Signal::ABORT, "SIGABRT"),
            (Signal::BUS, "SIGBUS"),
            (Signal::FPE, "SIGFPE"),
            (Signal::HUP, "SIGHUP"),
            (Signal::ILL, "SIGILL"),
            (Signal::INT, "SIGINT"),
            (Signal::KILL, "SIGKILL"),
            (Signal::QUIT, "SIGQUIT"),
            (Signal::SEGV, "SIGSEGV"),
            (Signal::SYS, "SIGSYS"),
            (Signal::TERM, "SIGTERM"),
            (Signal::TRAP, "SIGTRAP"),
        ];
        match names.iter().find(|(signal, _)| signal.as_raw() == self.0) {
            Some((_, name)) => f.write_str(name),
            None => write!(f, "signal {}", self.0),
        }
    }
}

/// The end of a core.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CoreEnd {
    /// How it ended.
    pub cause: CoreEndCause,
    /// How long it had served; zero if it never did.
    pub served: Duration,
    /// Its last panic, which may have had nothing to do with its end.
    pub panic: Option<String>,
}

impl CoreEnd {
    /// Returns the end of a core that could not be started.
    pub fn not_started(error: &anyhow::Error) -> Self {
        Self { cause: CoreEndCause::NotStarted(format!("{error:#}")), served: Duration::ZERO, panic: None }
    }
}

impl fmt::Display for CoreEnd {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "the process before this one {}", self.cause)?;
        match &self.panic {
            Some(panic) => write!(f, "; its last panic: {panic}"),
            None => Ok(()),
        }
    }
}

/// The number of ends of cores, by their cause.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct CoreEndCounts {
    /// Unrequested exits, and starts that failed.
    pub exited: u64,
    /// Ends by a signal from outside.
    pub killed: u64,
    /// Crashes.
    pub crashed: u64,
}

impl CoreEndCounts {
    /// Counts one more.
    pub fn add(&mut self, cause: &CoreEndCause) {
        match cause {
            CoreEndCause::NotStarted(_) | CoreEndCause::Exited(_) => self.exited += 1,
            CoreEndCause::Killed(_) => self.killed += 1,
            CoreEndCause::Crashed(_) => self.crashed += 1,
        }
    }
}

/// The keeper's action after an end.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum NextStep {
    /// It starts another core.
    Start {
        /// The time to wait before.
        after: Duration,
        /// Whether the core does not apply the last input of the journal.
        sets_last_input_aside: bool,
        /// Whether the connections of the former core end.
        ends_connections: bool,
    },
    /// It gives up.
    GiveUp,
}

/// Decides when another core starts: at once as a rule, and ever later while cores end early.
///
/// An input that crashes the process crashes the next one too, when that applies the journal again. The input is the last
/// one of the journal, because it was recorded just before it was applied. So after two crashes in a row before the core
/// serves, the third core does not apply it, though it may have been answered. (An input that only panics is found by the core
/// itself.) Ends that come from outside, as for lack of memory, say nothing about an input.
///
/// Input of a connection that crashes the process crashes the next one too, when that continues the connection. So after two
/// early crashes in a row the connections end.
///
/// A core that exits has said why, such as a full disk. People mend that, so the keeper goes on trying.
#[derive(Debug, Default)]
pub struct RestartPolicy {
    early_ends: u32,
    /// The early ends by a signal among them.
    early_signals: u32,
    crashes_before_serving: u32,
    early_crashes: u32,
}

impl RestartPolicy {
    /// Records an unrequested end; returns what to do.
    pub fn record_end(&mut self, end: &CoreEnd) -> NextStep {
        if end.served < EARLY_END {
            self.early_ends = (self.early_ends + 1).min(EARLY_ENDS_MAX);
            let is_signal = matches!(end.cause, CoreEndCause::Killed(_) | CoreEndCause::Crashed(_));
            self.early_signals += u32::from(is_signal);
        } else {
            (self.early_ends, self.early_signals) = (0, 0);
        }
        let crashed = matches!(end.cause, CoreEndCause::Crashed(_));
        self.early_crashes = if crashed && end.served < EARLY_END { self.early_crashes + 1 } else { 0 };
        let crashed_before_serving = end.served.is_zero() && matches!(end.cause, CoreEndCause::Crashed(_));
        self.crashes_before_serving =
            if crashed_before_serving { self.crashes_before_serving + 1 } else { 0 };
        if self.early_ends >= EARLY_ENDS_MAX && self.early_signals > 0 {
            return NextStep::GiveUp;
        }
        let after = match self.early_ends.checked_sub(2) {
            Some(doublings) => FIRST_PAUSE * 2_u32.pow(doublings),
            None => Duration::ZERO,
        };
        let sets_last_input_aside = self.crashes_before_serving > 0
            && self.crashes_before_serving.is_multiple_of(CRASHES_BEFORE_SET_ASIDE);
        let ends_connections = self.early_crashes >= CRASHES_BEFORE_CONNECTIONS_END;
        NextStep::Start { after, sets_last_input_aside, ends_connections }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn end(cause: CoreEndCause, served: u64) -> CoreEnd {
        CoreEnd { cause, served: Duration::from_millis(served), panic: None }
    }

    fn start(after_ms: u64) -> NextStep {
        let after = Duration::from_millis(after_ms);
        NextStep::Start { after, sets_last_input_aside: false, ends_connections: false }
    }

    #[test]
    fn a_core_that_served_is_followed_at_once_however_often() {
        let mut policy = RestartPolicy::default();
        for _ in 0..1000 {
            assert_eq!(policy.record_end(&end(CoreEndCause::Killed(9), 1500)), start(0));
        }
    }

    #[test]
    fn early_ends_are_followed_ever_later_until_the_keeper_gives_up() {
        let mut policy = RestartPolicy::default();
        let killed = end(CoreEndCause::Killed(9), 10);
        let pauses = [0, 100, 200, 400, 800, 1600, 3200, 6400, 12800];
        for pause in pauses {
            assert_eq!(policy.record_end(&killed), start(pause));
        }
        assert_eq!(policy.record_end(&killed), NextStep::GiveUp);

        let mut policy = RestartPolicy::default();
        let _ = (policy.record_end(&killed), policy.record_end(&killed));
        assert_eq!(policy.record_end(&end(CoreEndCause::Crashed(11), 5000)), start(0));
        assert_eq!(policy.record_end(&killed), start(0), "the count began anew");
    }

    #[test]
    fn a_core_that_says_why_it_ends_is_tried_again_for_ever() {
        let mut policy = RestartPolicy::default();
        let mut last = NextStep::GiveUp;
        for _ in 0..100 {
            last = policy.record_end(&end(CoreEndCause::Exited(1), 0));
        }
        assert_eq!(last, start(25_600));
        assert_eq!(policy.record_end(&CoreEnd::not_started(&anyhow::anyhow!("no memory"))), start(25_600));
        assert_eq!(policy.record_end(&end(CoreEndCause::Exited(1), 2000)), start(0));
    }

    #[test]
    fn an_input_is_set_aside_after_two_crashes_before_serving_and_after_nothing_else() {
        let sets_aside = |ends: &[(CoreEndCause, u64)]| {
            let mut policy = RestartPolicy::default();
            let mut last = NextStep::GiveUp;
            for (cause, served) in ends {
                last = policy.record_end(&end(cause.clone(), *served));
            }
            matches!(last, NextStep::Start { sets_last_input_aside: true, .. })
        };
        let [crash, kill, exit] =
            [CoreEndCause::Crashed(6), CoreEndCause::Killed(9), CoreEndCause::Exited(1)]
                .map(|cause| move || cause.clone());
        // The first crash is the one that the input causes while the core serves.
        assert!(sets_aside(&[(crash(), 5000), (crash(), 0), (crash(), 0)]));
        assert!(!sets_aside(&[(crash(), 5000), (crash(), 0)]));
        assert!(!sets_aside(&[(kill(), 0), (kill(), 0), (kill(), 0)]));
        assert!(!sets_aside(&[(exit(), 0), (exit(), 0)]));
        assert!(!sets_aside(&[(crash(), 0), (kill(), 0), (crash(), 0)]));
        assert!(!sets_aside(&[(crash(), 10), (crash(), 10)]));
        // One input is set aside at a time.
        assert!(!sets_aside(&[(crash(), 0), (crash(), 0), (crash(), 0)]));
        assert!(sets_aside(&[(crash(), 0), (crash(), 0), (crash(), 0), (crash(), 0)]));
    }

    #[test]
    fn connections_end_after_two_early_crashes_in_a_row_and_never_after_kills() {
        let ends_connections = |ends: &[(CoreEndCause, u64)]| {
            let mut policy = RestartPolicy::default();
            let last =
                ends.iter().map(|(cause, served)| policy.record_end(&end(cause.clone(), *served))).last();
            matches!(last, Some(NextStep::Start { ends_connections: true, .. }))
        };
        let [crash, kill] =
            [CoreEndCause::Crashed(11), CoreEndCause::Killed(9)].map(|cause| move || cause.clone());
        assert!(ends_connections(&[(crash(), 5000), (crash(), 20), (crash(), 20)]));
        assert!(!ends_connections(&[(crash(), 5000), (crash(), 20)]));
        assert!(!ends_connections(&[(crash(), 20), (crash(), 5000), (crash(), 20)]));
        assert!(!ends_connections(&[(kill(), 0), (kill(), 20), (kill(), 20), (kill(), 0)]));
    }

    #[test]
    fn ends_are_told_by_their_signals() {
        let of = |raw| CoreEndCause::from_status(ExitStatus::from_raw(raw));
        assert_eq!((of(9), of(9).exit_code()), (CoreEndCause::Killed(9), 137));
        assert_eq!(of(11 | 0x80).to_string(), "crashed with SIGSEGV");
        assert_eq!(of(9).to_string(), "was killed by SIGKILL");
        assert_eq!((of(3 << 8).to_string(), of(3 << 8).exit_code()), ("exited with code 3".to_owned(), 3));
        assert_eq!(of(40).to_string(), "was killed by signal 40");
    }
}
