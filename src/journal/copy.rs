//! Copies a journal that no process writes, and puts the copy back. Begin at [`JournalCopy::make`].

use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};

use crate::folder::{IDENTITY_NAME, JournalError, is_part_of_journal};

/// A copy of a journal, for the case that a program of another encoding fails.
#[derive(Debug)]
pub struct JournalCopy {
    folder: PathBuf,
    copy: PathBuf,
}

impl JournalCopy {
    /// Copies the journal in `folder`, to its folder `before-upgrade`.
    ///
    /// # Errors
    /// If there is no room.
    pub fn make(folder: &Path) -> io::Result<Self> {
        let made = Self { folder: folder.to_owned(), copy: folder.join("before-upgrade") };
        let _ = fs::remove_dir_all(&made.copy);
        fs::create_dir(&made.copy)?;
        let copied = parts_of_journal(folder)?.into_iter().try_for_each(|name| {
            let target = made.copy.join(&name);
            fs::copy(folder.join(&name), &target)?;
            File::open(&target)?.sync_all()
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
    pub fn restore(self) -> Result<(), JournalError> {
        match self.move_files() {
            Ok(()) => {
                self.forget();
                Ok(())
            }
            Err(source) => Err(JournalError::NotRestored { copy: self.copy, path: self.folder, source }),
        }
    }

    fn move_files(&self) -> io::Result<()> {
        let Self { folder, copy } = self;
        let failed = folder.join("after-upgrade");
        let _ = fs::remove_dir_all(&failed);
        fs::create_dir(&failed)?;
        for name in parts_of_journal(folder)? {
            fs::rename(folder.join(&name), failed.join(&name))?;
        }
        for name in parts_of_journal(copy)?.into_iter().rev() {
            fs::rename(copy.join(&name), folder.join(&name))?;
        }
        File::open(folder)?.sync_all()
    }

    /// Deletes the copy.
    pub fn forget(&self) {
        let _ = fs::remove_dir_all(&self.copy);
    }
}

/// Returns the names of the files of a journal, its identity first.
fn parts_of_journal(folder: &Path) -> io::Result<Vec<String>> {
    let mut names = Vec::new();
    for entry in fs::read_dir(folder)? {
        let name = entry?.file_name().into_string().unwrap_or_default();
        if is_part_of_journal(&name) {
            names.push(name);
        }
    }
    names.sort_by_key(|name| (name != IDENTITY_NAME, name.clone()));
    Ok(names)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::folder::TestFolder;

    #[test]
    fn a_copy_takes_the_place_of_what_was_written_since() {
        let folder = TestFolder::new();
        let folder = folder.0.as_path();
        let write = |name: &str, text: &str| fs::write(folder.join(name), text).expect("it is written");
        write("identity", "i");
        write("segment-00000001", "first");
        write("lock", "held by a process");
        let copy = JournalCopy::make(folder).expect("a copy");
        write("segment-00000001", "changed");
        write("segment-00000002", "new");
        write("snapshot-0000000000000009", "new");
        copy.restore().expect("it is restored");
        assert_eq!(parts_of_journal(folder).expect("the folder"), ["identity", "segment-00000001"]);
        assert_eq!(fs::read_to_string(folder.join("segment-00000001")).expect("the segment"), "first");
        assert_eq!(
            fs::read_to_string(folder.join("after-upgrade/segment-00000001")).expect("kept"),
            "changed"
        );
        assert!(!folder.join("before-upgrade").exists());

        let copy = JournalCopy::make(folder).expect("a copy");
        fs::remove_dir_all(folder.join("before-upgrade")).expect("it is gone");
        let failed = copy.restore().expect_err("there is no copy").to_string();
        assert!(failed.contains("move the files"), "{failed}");
        assert!(!folder.join("identity").exists(), "no program takes it for a whole journal");
    }
}
