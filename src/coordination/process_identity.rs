//! The identity of a process, which stays the same across restarts and runs: a host, and the number of the process
//! on that host.
//!
//! `agent/cluster_env/process_identity.rs` detects the identity of the present process. Begin at [`ProcessIdentity`].
//!
//! A process publishes its identity in the store of its run, under [`ProcessIdentity::store_key`], and may ask the
//! service for the task id that belongs to this identity (`task_id_claims.rs`).

use std::fmt;
use std::sync::Arc;

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// The directory of the store in which processes publish their identities.
const DIRECTORY: &str = "muster/host";

/// The identity of a process across runs.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize, ToSchema)]
#[serde(try_from = "UncheckedIdentity")]
pub struct ProcessIdentity {
    /// The host, by a name that stays when the host starts again: 1 to 253 visible ASCII characters.
    #[schema(value_type = String)]
    host: Arc<str>,
    /// The number of the process among those of its host.
    local: u32,
}

/// An identity that has not been checked.
#[derive(Deserialize)]
struct UncheckedIdentity {
    host: String,
    #[serde(default)]
    local: u32,
}

impl TryFrom<UncheckedIdentity> for ProcessIdentity {
    type Error = &'static str;

    fn try_from(unchecked: UncheckedIdentity) -> Result<Self, Self::Error> {
        Self::new(&unchecked.host, unchecked.local)
    }
}

impl ProcessIdentity {
    /// The most bytes of a host's identity, as of a name in the DNS.
    pub const HOST_BYTES_MAX: usize = 253;
    /// The greatest number of a process on its host.
    pub const LOCAL_MAX: u32 = 65_535;
    /// The reason for which an identity is refused.
    pub const RULE: &str =
        "the identity of a host has 1 to 253 visible ASCII characters, and a process number up to 65535";

    /// Creates the identity of process `local` of `host`.
    ///
    /// # Errors
    /// Returns [`Self::RULE`] if the identity breaks it.
    pub fn new(host: &str, local: u32) -> Result<Self, &'static str> {
        let is_visible = !host.is_empty() && host.bytes().all(|byte| byte.is_ascii_graphic());
        // Browsers take these out of an address, so that the host would have no page.
        let is_reserved = [".", ".."].contains(&host);
        if !is_visible || is_reserved || host.len() > Self::HOST_BYTES_MAX || local > Self::LOCAL_MAX {
            return Err(Self::RULE);
        }
        Ok(Self { host: host.into(), local })
    }

    /// Returns the host.
    #[must_use]
    pub fn host(&self) -> &str {
        &self.host
    }

    /// Returns the number of the process on its host.
    #[must_use]
    pub const fn local(&self) -> u32 {
        self.local
    }

    /// Returns the key under which `task` publishes its identity.
    #[must_use]
    pub fn store_key(task: u32) -> String {
        format!("{DIRECTORY}/{task}")
    }

    /// Returns the task that publishes its identity under this normalised key, if it is such a key.
    #[must_use]
    pub(super) fn task_of_store_key(key: &str) -> Option<i32> {
        let task = key.strip_prefix(DIRECTORY)?.strip_prefix('/')?;
        task.parse()
            .ok()
            .filter(|number: &i32| *number >= 0 && task.bytes().all(|byte| byte.is_ascii_digit()))
    }

    /// Returns the value that a process publishes: its number on the host, a space, and the host.
    #[must_use]
    pub fn to_store_value(&self) -> String {
        format!("{} {}", self.local, self.host)
    }

    /// Parses a published value; returns `None` if it is no identity.
    #[must_use]
    pub fn from_store_value(value: &[u8]) -> Option<Self> {
        let (local, host) = std::str::from_utf8(value).ok()?.split_once(' ')?;
        Self::new(host, local.parse().ok()?).ok()
    }
}

impl fmt::Display for ProcessIdentity {
    /// Writes the host, and the number of the process unless it is 0.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.local {
            0 => f.write_str(&self.host),
            local => write!(f, "{} process {local}", self.host),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_identity_is_visible_and_short() {
        for good in ["a", "node-3.example", &"x".repeat(253), "~!"] {
            assert!(ProcessIdentity::new(good, 0).is_ok(), "{good}");
        }
        for bad in ["", "a b", "a\n", "ä", "\u{7f}", &"x".repeat(254)] {
            assert!(ProcessIdentity::new(bad, 0).is_err(), "{bad}");
            let json = serde_json::json!({ "host": bad }).to_string();
            assert!(serde_json::from_str::<ProcessIdentity>(&json).is_err(), "{bad}");
        }
        assert!(ProcessIdentity::new("a", 65_536).is_err());
    }

    #[test]
    fn what_is_published_is_read_back() {
        let identity = ProcessIdentity::new("node-3", 7).unwrap();
        assert_eq!(
            ProcessIdentity::from_store_value(identity.to_store_value().as_bytes()),
            Some(identity.clone())
        );
        assert_eq!(identity.to_string(), "node-3 process 7");
        for bad in [&b""[..], b"7", b"7 ", b"x node", b"-1 node", b"1 a b", b"1 \xff"] {
            assert_eq!(ProcessIdentity::from_store_value(bad), None, "{bad:?}");
        }
        assert_eq!(ProcessIdentity::task_of_store_key(&ProcessIdentity::store_key(12)), Some(12));
        for other in ["muster/host", "muster/host/", "muster/host/+1", "muster/host/1/2", "muster/hosts/1"] {
            assert_eq!(ProcessIdentity::task_of_store_key(other), None, "{other}");
        }
    }
}
