//! Defines `RequiredAccess`: the role, if any, that a route requires of its callers.
//!
//! `routes.rs` and `pages/mod.rs` declare the required access of each route. Begin at `RequiredAccess`.

use crate::service::Role;

/// The access that a route requires of its callers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RequiredAccess {
    /// None: for probes and the login.
    Public,
    /// At least this role.
    Role(Role),
}

impl RequiredAccess {
    /// At least a viewer.
    pub const VIEWER: Self = Self::Role(Role::Viewer);
    /// At least an operator.
    pub const OPERATOR: Self = Self::Role(Role::Operator);
    /// An admin.
    pub const ADMIN: Self = Self::Role(Role::Admin);
}
