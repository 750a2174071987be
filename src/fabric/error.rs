//! Why a process has no fabric, and what a call of the library answered.

use std::ffi::c_int;

/// The reason why a process has no fabric.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum FabricUnavailable {
    /// The library cannot be loaded.
    #[error("libfabric.so.1 cannot be loaded ({0}): install libfabric (Debian: libfabric1)")]
    Library(String),
    /// The library lacks a function.
    #[error("libfabric.so.1 has no {0}: install libfabric 1.9 or newer")]
    Symbol(&'static str),
    /// The library is too old.
    #[error("libfabric is {major}.{minor}: install 1.9 or newer")]
    Version {
        /// Its version.
        major: u32,
        /// Its version.
        minor: u32,
    },
    /// No provider of the library can do reads of a peer's memory, or none of the wanted name.
    #[error("no provider {provider:?} of libfabric can read a peer's memory here: {why}")]
    Provider {
        /// The wanted provider; empty for any.
        provider: String,
        /// The answer of the library.
        why: String,
    },
    /// A call failed.
    #[error("{0}")]
    Call(#[from] FabricError),
}

/// The failure of a call of the library, or of a read.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{call}: {name} ({code})")]
pub struct FabricError {
    /// The name of the function.
    pub call: &'static str,
    /// The positive error number: of the system, or of the library from 256 on.
    pub code: c_int,
    /// The library's text of the number.
    pub name: String,
}

/// `FI_ECANCELED`.
const CANCELED: c_int = 125;

impl FabricError {
    /// Returns the error of a read whose endpoint was closed.
    pub(crate) fn closed() -> Self {
        Self { call: "fi_read", code: CANCELED, name: "the endpoint was closed".to_owned() }
    }

    /// Returns whether a read ended because its endpoint was closed.
    #[must_use]
    pub const fn is_closed(&self) -> bool {
        self.code == CANCELED
    }
}
