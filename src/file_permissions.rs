//! Checks whether other users of the host can read, change or replace a private file.
//!
//! This module does not change permissions: it returns the command that does. Begin at
//! `check_private_file_permissions`.

use std::os::unix::fs::MetadataExt as _;
use std::path::Path;

const OTHERS_READ: u32 = 0o004;
const OTHERS_WRITE: u32 = 0o002;
const GROUP_WRITES: u32 = 0o020;
/// In a folder with this bit, users cannot replace the files of others.
const STICKY: u32 = 0o1000;

/// Checks the permissions of the file at `path`. Returns a recommendation, if there is one.
///
/// # Errors
/// Returns the reason and the remedy if every user of this machine could replace the file's contents. A file
/// whose permissions cannot be read passes: the code that reads the file reports the error.
pub fn check_private_file_permissions(path: &Path) -> Result<Option<String>, String> {
    let Ok(file) = std::fs::metadata(path) else { return Ok(None) };
    let shown = path.display();
    if file.mode() & OTHERS_WRITE != 0 {
        return Err(format!("every user of this machine can write it: chmod o-rwx {shown}"));
    }
    let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
    if let Ok(data) = std::fs::metadata(folder)
        && data.mode() & OTHERS_WRITE != 0
        && data.mode() & STICKY == 0
    {
        let folder = folder.display();
        return Err(format!("every user of this machine can replace it: chmod o-w {folder}"));
    }
    if file.mode() & GROUP_WRITES != 0 {
        return Ok(Some(format!("its group can write it: chmod g-w {shown}")));
    }
    if file.mode() & OTHERS_READ != 0 {
        return Ok(Some(format!("every user of this machine can read it: chmod o-rwx {shown}")));
    }
    Ok(None)
}

#[cfg(test)]
mod tests {
    use std::fs::{Permissions, create_dir, remove_dir_all, set_permissions, write};
    use std::os::unix::fs::PermissionsExt as _;

    use super::*;

    #[test]
    fn writable_files_are_refused_and_readable_ones_reported() {
        let folder = std::env::temp_dir().join(format!("muster-private-{}", std::process::id()));
        let _ = remove_dir_all(&folder);
        create_dir(&folder).unwrap();
        let path = folder.join("file");
        write(&path, "").unwrap();
        let look = |of_folder: u32, of_file: u32| {
            set_permissions(&folder, Permissions::from_mode(of_folder)).unwrap();
            set_permissions(&path, Permissions::from_mode(of_file)).unwrap();
            check_private_file_permissions(&path)
        };
        assert_eq!(look(0o755, 0o600), Ok(None));
        assert_eq!(look(0o755, 0o640), Ok(None));
        assert!(look(0o755, 0o644).unwrap().is_some_and(|why| why.contains("read it")));
        assert!(look(0o755, 0o660).unwrap().is_some_and(|why| why.contains("its group")));
        assert!(look(0o755, 0o602).is_err_and(|why| why.contains("write it")));
        assert!(look(0o777, 0o600).is_err_and(|why| why.contains("replace it")));
        assert_eq!(look(0o1777, 0o600), Ok(None));
        remove_dir_all(&folder).unwrap();
        assert_eq!(check_private_file_permissions(&path), Ok(None));
    }
}
