//! Bounds the length of source files, so that each has one subject.

use std::path::Path;

/// The greatest number of lines of a file, with its tests.
const LINES_MAX: usize = 600;

#[test]
fn files_are_short() {
    let mut folders = vec![Path::new(env!("CARGO_MANIFEST_DIR")).join("src")];
    let (mut files, mut wrong) = (0, Vec::new());
    while let Some(folder) = folders.pop() {
        for entry in std::fs::read_dir(&folder).expect("the sources can be read") {
            let path = entry.expect("the sources can be read").path();
            if path.is_dir() {
                folders.push(path);
            } else if path.extension().is_some_and(|extension| extension == "rs") {
                files += 1;
                let lines = std::fs::read_to_string(&path).expect("the sources can be read").lines().count();
                if lines > LINES_MAX {
                    wrong.push(format!("{}: {lines} lines", path.display()));
                }
            }
        }
    }
    assert!(files > 100, "{files} files were found");
    assert!(wrong.is_empty(), "files with more than {LINES_MAX} lines:\n{}", wrong.join("\n"));
}
