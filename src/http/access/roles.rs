//! Defines the roles viewer, operator and admin, and `Access`, which a route requires.
//!
//! It does not assign roles to routes (`routes.rs`) or to tokens (`tokens.rs`). Begin at `Role`.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// A role. Each may do what those before it may.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub enum Role {
    /// Reads everything except the values of keys, by which tasks find and trust one another.
    Viewer,
    /// Controls existing jobs: excludes, readmits, drains, reads and writes keys.
    Operator,
    /// Creates, changes and deletes jobs.
    Admin,
}

/// The access that a route requires of its callers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Access {
    /// None: for probes and the login.
    Public,
    /// At least this role.
    Role(Role),
}

impl fmt::Display for Role {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Viewer => "viewer",
            Self::Operator => "operator",
            Self::Admin => "admin",
        })
    }
}

impl FromStr for Role {
    type Err = &'static str;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        match text {
            "viewer" => Ok(Self::Viewer),
            "operator" => Ok(Self::Operator),
            "admin" => Ok(Self::Admin),
            _ => Err("write viewer, operator or admin"),
        }
    }
}
