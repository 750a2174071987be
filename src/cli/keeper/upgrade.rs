//! The steps of an upgrade: whether another program can take over, and what becomes of the journal if it cannot.
//!
//! Begin at [`try_program`] and [`JournalCopy::make`].

use std::ffi::OsString;
use std::io;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::Duration;

use serde::{Deserialize, Serialize};
use tokio::process::Command;

use super::super::self_command;

/// The hidden flag of a program that only says whether it could take over.
pub const TRIAL_FLAG: &str = "trial";
/// The time that a trial may take.
const TRIAL_TIMEOUT: Duration = Duration::from_secs(120);
/// The end of a program's words that a failure shows.
const WORDS_MAX: usize = 2000;

/// What a program says that could take over.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct TrialReport {
    /// Its version.
    pub version: String,
    /// The encoding of the journal that it writes.
    pub encoding: u32,
    /// The number of inputs that it has applied to the latest snapshot, while the present process goes on.
    pub inputs: u64,
}

/// Starts a program that checks the configuration and reads the journal, changes nothing and ends.
///
/// # Errors
/// Why it cannot take over.
pub async fn try_program(words: Vec<OsString>) -> Result<TrialReport, String> {
    let Some((program, rest)) = words.split_first() else { return Err("no program is named".to_owned()) };
    let mut command = Command::new(program);
    command.args(rest).args(self_command::arguments()).arg(format!("--{TRIAL_FLAG}"));
    command.stdin(Stdio::null()).kill_on_drop(true);
    let name = Path::new(program).display();
    let output = match tokio::time::timeout(TRIAL_TIMEOUT, command.output()).await {
        Err(_) => return Err(format!("{name} did not read the journal within {TRIAL_TIMEOUT:?}")),
        Ok(Err(error)) => return Err(format!("cannot run {name}: {error}")),
        Ok(Ok(output)) => output,
    };
    let said = String::from_utf8_lossy(&output.stderr);
    let said = said.trim();
    let start = said.char_indices().rev().nth(WORDS_MAX).map_or(0, |(at, _)| at);
    if !output.status.success() {
        return Err(format!("{name} cannot take over ({}): {}", output.status, &said[start..]));
    }
    serde_json::from_slice(&output.stdout).map_err(|_| format!("{name} is no program that can take over"))
}

/// A copy of a journal that nobody writes, for the case that a program of another encoding fails.
#[derive(Debug)]
pub struct JournalCopy {
    folder: PathBuf,
    copy: PathBuf,
}

/// Whether a file of the folder is part of the journal.
fn is_part_of_journal(name: &str) -> bool {
    name == "identity" || name.starts_with("segment-") || name.starts_with("snapshot-")
}

impl JournalCopy {
    /// Copies the journal in `folder`.
    ///
    /// # Errors
    /// If there is no room.
    pub fn make(folder: &Path) -> io::Result<Self> {
        let made = Self { folder: folder.to_owned(), copy: folder.join("before-upgrade") };
        made.remove();
        std::fs::create_dir(&made.copy)?;
        copy_journal(&made.folder, &made.copy)?;
        Ok(made)
    }

    /// Puts the copy in place of the journal. To be called while no process uses the folder.
    ///
    /// # Errors
    /// If the files cannot be written.
    pub fn restore(&self) -> io::Result<()> {
        for entry in std::fs::read_dir(&self.folder)? {
            let entry = entry?;
            if entry.file_name().to_str().is_some_and(is_part_of_journal) {
                std::fs::remove_file(entry.path())?;
            }
        }
        copy_journal(&self.copy, &self.folder)
    }

    /// Deletes the copy.
    pub fn remove(&self) {
        let _ = std::fs::remove_dir_all(&self.copy);
    }
}

fn copy_journal(from: &Path, to: &Path) -> io::Result<()> {
    for entry in std::fs::read_dir(from)? {
        let entry = entry?;
        if entry.file_name().to_str().is_some_and(is_part_of_journal) {
            let target = to.join(entry.file_name());
            std::fs::copy(entry.path(), &target)?;
            std::fs::File::open(&target)?.sync_all()?;
        }
    }
    std::fs::File::open(to)?.sync_all()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_program_that_is_none_of_ours_is_refused_with_its_words() {
        let words = |text: &[&str]| text.iter().map(OsString::from).collect::<Vec<_>>();
        let missing = try_program(words(&["/nowhere/muster"])).await.unwrap_err();
        assert!(missing.contains("cannot run /nowhere/muster"), "{missing}");
        let failing = try_program(words(&["/bin/sh", "-c", "echo too old >&2; exit 3"])).await.unwrap_err();
        assert!(failing.contains("exit status: 3") && failing.ends_with("too old"), "{failing}");
        let other = try_program(words(&["/bin/echo", "hello"])).await.unwrap_err();
        assert!(other.contains("is no program that can take over"), "{other}");
        assert!(try_program(Vec::new()).await.is_err());
    }

    #[test]
    fn a_copy_takes_the_place_of_what_was_written_since() {
        let folder = std::env::temp_dir().join(format!("muster-copy-{:016x}", crate::clock::random_u64()));
        std::fs::create_dir(&folder).expect("a folder");
        let write = |name: &str, text: &str| std::fs::write(folder.join(name), text).expect("it is written");
        write("identity", "i");
        write("segment-00000001", "first");
        write("lock", "held by a process");
        let copy = JournalCopy::make(&folder).expect("a copy");
        write("segment-00000001", "changed");
        write("segment-00000002", "new");
        write("snapshot-0000000000000009", "new");
        copy.restore().expect("it is restored");
        copy.remove();
        let mut names: Vec<_> = std::fs::read_dir(&folder)
            .expect("the folder")
            .filter_map(|entry| entry.ok()?.file_name().into_string().ok())
            .collect();
        names.sort_unstable();
        assert_eq!(names, ["identity", "lock", "segment-00000001"]);
        assert_eq!(std::fs::read_to_string(folder.join("segment-00000001")).expect("the segment"), "first");
        let _ = std::fs::remove_dir_all(&folder);
    }
}
