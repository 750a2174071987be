//! The key by which both sides name a transfer.
//!
//! [`crate::plan`] derives the keys of the steps of a plan. A program chooses the keys of its other transfers. Begin
//! at [`TransferKey`].

use std::fmt;

use serde::{Deserialize, Serialize};

/// The name of a transfer, equal on both sides. Two steps of one plan never have the same key. In text: 16
/// hexadecimal digits.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct TransferKey(pub u64);

impl fmt::Display for TransferKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:016x}", self.0)
    }
}

impl fmt::Debug for TransferKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}
