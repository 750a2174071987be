//! A simulated host for tests: a folder with the files that a test names.
//!
//! Begin at `FakeHost::new`.

use std::fs;
use std::path::PathBuf;
use std::sync::atomic::{AtomicU32, Ordering};

use super::host_root::{FILE_MAX, HostRoot};

/// A simulated host; its folder is removed when it is dropped.
pub struct FakeHost {
    folder: PathBuf,
    root: HostRoot,
}

impl FakeHost {
    pub fn new(files: &[(&str, &str)]) -> Self {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let name = format!("muster-doctor-{}-{}", std::process::id(), NEXT.fetch_add(1, Ordering::Relaxed));
        let folder = std::env::temp_dir().join(name);
        let fake = Self { root: HostRoot::new(&folder), folder };
        fs::create_dir_all(&fake.folder).unwrap();
        for (path, content) in files {
            let path = fake.folder.join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, content).unwrap();
        }
        fake
    }

    pub fn root(&self) -> &HostRoot {
        &self.root
    }
}

impl Drop for FakeHost {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.folder);
    }
}

#[test]
fn a_missing_file_reads_as_none() {
    let host = FakeHost::new(&[("a/number", " 17\n"), ("a/text", "x\n")]);
    assert_eq!(host.root().read_number("/a/number"), Some(17));
    assert_eq!(host.root().read_number("a/text"), None);
    assert_eq!(host.root().list_names("a"), ["number", "text"]);
    assert_eq!((host.root().read_text("b"), host.root().list_names("b").len()), (None, 0));
}

#[test]
fn no_more_of_a_file_is_read_than_is_sane() {
    let host = FakeHost::new(&[("endless", &"x".repeat(1 << 20))]);
    assert_eq!(host.root().read_text("endless").map(|text| text.len() as u64), Some(FILE_MAX));
}
