//! Defines `Access`: what a route requires of its callers.
//!
//! It does not assign it to routes (`routes.rs`). Begin at `Access`.

use crate::service::Role;

/// The access that a route requires of its callers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Access {
    /// None: for probes and the login.
    Public,
    /// At least this role.
    Role(Role),
}
