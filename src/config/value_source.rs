//! The sources of values, which errors and `muster config print` name.
//!
//! `load.rs` decides which source takes precedence. Begin at [`ValueSource`].

use std::fmt;
use std::path::Path;
use std::sync::Arc;

use super::value::SettingValue;

/// The source of a value, weakest first.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub enum ValueSource {
    /// The built-in default.
    Default,
    /// A line of the file.
    File(Arc<Path>, usize),
    /// An environment variable.
    Environment(String),
    /// A flag.
    Flag(String),
}

impl fmt::Display for ValueSource {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Default => f.write_str("default"),
            Self::File(path, line) => write!(f, "{}:{line}", path.display()),
            Self::Environment(name) => write!(f, "environment {name}"),
            Self::Flag(name) => write!(f, "flag {name}"),
        }
    }
}

/// A value as text, with its source.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GivenValue {
    /// The text as written.
    pub text: String,
    /// The source.
    pub source: ValueSource,
}

/// One line of `muster config print`.
#[derive(Debug, Clone)]
pub(super) struct ResolvedValue {
    pub(super) table: String,
    pub(super) key: String,
    pub(super) shown: SettingValue,
    pub(super) source: ValueSource,
}
