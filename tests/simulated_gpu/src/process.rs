//! The identity of a process, by which another process can tell that it has ended.

use std::sync::OnceLock;

/// One life of a process: its number, and when it started, since numbers are used again.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ProcessIdentity {
    /// The process number.
    pub pid: u64,
    /// The start time in clock ticks since boot.
    pub started: u64,
}

impl ProcessIdentity {
    /// Returns the identity of this process.
    pub fn own() -> Self {
        static OWN: OnceLock<ProcessIdentity> = OnceLock::new();
        *OWN.get_or_init(|| {
            let pid = std::process::id().into();
            let (_, started) = read_stat(pid).unwrap_or(('R', 0));
            Self { pid, started }
        })
    }

    /// Returns whether the process still runs. A killed process that is not reaped does not.
    pub fn is_alive(self) -> bool {
        self == Self::own()
            || read_stat(self.pid)
                .is_some_and(|(state, started)| started == self.started && !matches!(state, 'Z' | 'X'))
    }
}

/// Returns the state and the start time of a process.
fn read_stat(pid: u64) -> Option<(char, u64)> {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // The second field is the program's name in parentheses, which may contain anything.
    let mut fields = stat[stat.rfind(')')? + 1..].split_whitespace();
    let state = fields.next()?.chars().next()?;
    Some((state, fields.nth(18)?.parse().ok()?))
}
