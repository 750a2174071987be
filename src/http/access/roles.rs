//! Defines `Access`: what a route requires of its callers.
//!
//! It does not assign it to routes (`routes.rs`). Begin at `Access`.

use crate::service::Role;

/// What a route asks of its callers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Access {
    /// Nothing: probes and the login.
    Public,
    /// At least this role.
    Role(Role),
}
