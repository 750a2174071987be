//! Defines the roles of people and tools: viewer, operator, admin.
//!
//! A token determines the role of its holder (`http/access/tokens.rs`). Begin at `AccessRole`.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// A role. Each includes the permissions of those before it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
#[schema(as = Role)]
pub enum AccessRole {
    /// Reads everything but the values of keys, by which tasks find and authenticate one another.
    Viewer,
    /// Changes existing jobs: excludes, readmits, drains, asks for stacks, reads and writes keys.
    Operator,
    /// Creates, reconfigures and deletes jobs.
    Admin,
}

impl fmt::Display for AccessRole {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Viewer => "viewer",
            Self::Operator => "operator",
            Self::Admin => "admin",
        })
    }
}

impl FromStr for AccessRole {
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
