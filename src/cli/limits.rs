//! The limit on open files.

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

/// Raises the soft limit on open files to the hard one: every connection is a file. Returns the old limit, for
/// children that want the usual one.
pub fn raise_open_files() -> Rlimit {
    let old = getrlimit(Resource::Nofile);
    let new = Rlimit { current: old.maximum, maximum: old.maximum };
    if let Err(error) = setrlimit(Resource::Nofile, new) {
        tracing::warn!(%error, limit = ?old.current, "cannot raise the limit on open files");
    }
    old
}

/// Sets the soft limit on open files; as far as the hard one allows.
pub fn set_open_files(soft: u64) {
    let maximum = getrlimit(Resource::Nofile).maximum;
    // A limit that cannot be set leaves the present one, which is higher.
    let _ = setrlimit(Resource::Nofile, Rlimit { current: Some(soft), maximum });
}
