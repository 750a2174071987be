//! Defines `RequiredAccess`: the role, if any, that a route requires of its callers.
//!
//! `routes.rs` and `pages/mod.rs` declare the required access of each route. Begin at `RequiredAccess`.

use crate::service::AccessRole;

/// The access that a route requires of its callers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RequiredAccess {
    /// None: for probes and the login.
    Public,
    /// At least this role.
    Role(AccessRole),
}

impl RequiredAccess {
    /// At least a viewer.
    pub const VIEWER: Self = Self::Role(AccessRole::Viewer);
    /// At least an operator.
    pub const OPERATOR: Self = Self::Role(AccessRole::Operator);
    /// An admin.
    pub const ADMIN: Self = Self::Role(AccessRole::Admin);
}
