//! The steps of an upgrade: whether another program can take over, and what becomes of the journal if it cannot.
//!
//! Begin at [`try_program`] and [`JournalCopy::make`].

use std::ffi::OsString;
use std::io;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::Duration;

use anyhow::{Context as _, Result};
use serde::{Deserialize, Serialize};

use super::super::self_command;
use super::program::Program;

/// The hidden flag of a program that only says whether it could take over.
pub const TRIAL_FLAG: &str = "trial";
/// The time that a trial may take.
const TRIAL_TIMEOUT: Duration = Duration::from_secs(120);
/// The characters at the end of a program's output that a failure shows.
const OUTPUT_SHOWN: usize = 2000;

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

/// Starts a program that checks the configuration and reads the journal, changes nothing and ends. Returns the program, and the
/// number of inputs that it has applied.
///
/// # Errors
/// Why it cannot take over.
pub async fn try_program(command: Vec<String>) -> Result<(Program, u64), String> {
    let mut program = Program::open(command.into_iter().map(OsString::from).collect(), 0);
    let name = program.name();
    let spawned = program.spawn(|command| {
        command.args(self_command::arguments()).arg(format!("--{TRIAL_FLAG}"));
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).kill_on_drop(true);
    });
    let process = spawned.map_err(|error| format!("cannot run {name}: {error}"))?;
    let output = match tokio::time::timeout(TRIAL_TIMEOUT, process.wait_with_output()).await {
        Err(_) => return Err(format!("{name} did not read the journal within {TRIAL_TIMEOUT:?}")),
        Ok(Err(error)) => return Err(format!("cannot run {name}: {error}")),
        Ok(Ok(output)) => output,
    };
    if !output.status.success() {
        let said = String::from_utf8_lossy(&output.stderr);
        let said = said.trim();
        let start = said.char_indices().rev().nth(OUTPUT_SHOWN).map_or(0, |(at, _)| at);
        return Err(format!("{name} cannot take over ({}): {}", output.status, &said[start..]));
    }
    let report: TrialReport = serde_json::from_slice(&output.stdout)
        .map_err(|_| format!("{name} is no program that can take over"))?;
    (program.version, program.encoding) = (report.version, report.encoding);
    Ok((program, report.inputs))
}

/// A copy of a journal that nobody writes, for the case that a program of another encoding fails.
#[derive(Debug)]
pub struct JournalCopy {
    folder: PathBuf,
    copy: PathBuf,
}

/// The file without which a folder is no journal.
const IDENTITY: &str = "identity";

impl JournalCopy {
    /// Copies the journal in `folder`, to its folder `before-upgrade`.
    ///
    /// # Errors
    /// If there is no room.
    pub fn make(folder: &Path) -> io::Result<Self> {
        let made = Self { folder: folder.to_owned(), copy: folder.join("before-upgrade") };
        let _ = std::fs::remove_dir_all(&made.copy);
        std::fs::create_dir(&made.copy)?;
        let copied = parts_of_journal(folder)?.into_iter().try_for_each(|name| {
            let target = made.copy.join(&name);
            std::fs::copy(folder.join(&name), &target)?;
            std::fs::File::open(&target)?.sync_all()
        });
        match copied {
            Ok(()) => Ok(made),
            Err(error) => {
                // Others need the space.
                made.forget();
                Err(error)
            }
        }
    }

    /// Puts the copy in place of the journal, which moves to the folder `after-upgrade`. To be called while no process uses the
    /// folder. If this process ends in between, the folder has no identity, and no program takes it for a whole journal.
    ///
    /// # Errors
    /// If the files cannot be moved. Then no program should be started on the folder.
    pub fn restore(self) -> Result<()> {
        let Self { folder, copy } = &self;
        let failed = folder.join("after-upgrade");
        let restore = || -> io::Result<()> {
            let _ = std::fs::remove_dir_all(&failed);
            std::fs::create_dir(&failed)?;
            for name in parts_of_journal(folder)? {
                std::fs::rename(folder.join(&name), failed.join(&name))?;
            }
            for name in parts_of_journal(copy)?.into_iter().rev() {
                std::fs::rename(copy.join(&name), folder.join(&name))?;
            }
            std::fs::File::open(folder)?.sync_all()
        };
        restore().with_context(|| {
            format!(
                "the journal of before the upgrade cannot be restored: move the files of {} to {} yourself, and start the \
                 former version",
                copy.display(),
                folder.display()
            )
        })?;
        self.forget();
        Ok(())
    }

    /// Deletes the copy.
    pub fn forget(&self) {
        let _ = std::fs::remove_dir_all(&self.copy);
    }
}

/// Returns the names of the files of a journal, its identity first.
fn parts_of_journal(folder: &Path) -> io::Result<Vec<String>> {
    let mut names = Vec::new();
    for entry in std::fs::read_dir(folder)? {
        let name = entry?.file_name().into_string().unwrap_or_default();
        if name == IDENTITY || name.starts_with("segment-") || name.starts_with("snapshot-") {
            names.push(name);
        }
    }
    names.sort_by_key(|name| (name != IDENTITY, name.clone()));
    Ok(names)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_program_that_is_none_of_ours_is_refused_with_its_words() {
        let refusal = async |text: &[&str]| {
            try_program(text.iter().map(ToString::to_string).collect()).await.expect_err("it is refused")
        };
        let missing = refusal(&["/nowhere/muster"]).await;
        assert!(missing.contains("cannot run /nowhere/muster"), "{missing}");
        let failing = refusal(&["/bin/sh", "-c", "echo too old >&2; exit 3"]).await;
        assert!(failing.contains("exit status: 3") && failing.ends_with("too old"), "{failing}");
        let other = refusal(&["/bin/echo", "hello"]).await;
        assert!(other.contains("is no program that can take over"), "{other}");
        refusal(&[]).await;
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
        assert_eq!(parts_of_journal(&folder).expect("the folder"), ["identity", "segment-00000001"]);
        assert_eq!(std::fs::read_to_string(folder.join("segment-00000001")).expect("the segment"), "first");
        assert_eq!(
            std::fs::read_to_string(folder.join("after-upgrade/segment-00000001")).expect("kept"),
            "changed"
        );
        assert!(!folder.join("before-upgrade").exists());

        let copy = JournalCopy::make(&folder).expect("a copy");
        std::fs::remove_dir_all(folder.join("before-upgrade")).expect("it is gone");
        let failed = format!("{:#}", copy.restore().expect_err("there is no copy"));
        assert!(failed.contains("move the files"), "{failed}");
        assert!(!folder.join("identity").exists(), "no program takes it for a whole journal");
        let _ = std::fs::remove_dir_all(&folder);
    }
}
