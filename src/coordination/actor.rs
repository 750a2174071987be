//! The author of a command (name, address, origin) and the reason that the author states.
//!
//! This module does not authenticate operators; `http::access` does. Begin at [`Actor`].

use std::fmt;
use std::net::SocketAddr;
use std::sync::Arc;

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::text::is_safe_single_line;

/// The channel through which an operator acts.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
#[schema(as = Means)]
pub enum ActorOrigin {
    /// A program, through the REST API.
    Api,
    /// The command line.
    Cli,
    /// A page in a browser.
    Page,
    /// A rule of the server itself, enabled in the settings of the job.
    Rule,
}

impl fmt::Display for ActorOrigin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Api => "the REST API",
            Self::Cli => "the command line",
            Self::Page => "a page",
            Self::Rule => "a rule of this job",
        })
    }
}

/// The identity of an operator.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Actor {
    /// The operator's name; `anonymous` where access control asks for none.
    #[schema(value_type = String)]
    pub who: Arc<str>,
    /// The address from which the operator acts, where it is known.
    #[schema(value_type = Option<String>)]
    pub address: Option<SocketAddr>,
    /// The channel of the command.
    pub means: ActorOrigin,
}

impl Actor {
    /// The name of an operator who did not have to authenticate.
    pub const ANONYMOUS: &str = "anonymous";
}

impl fmt::Display for Actor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} (by {}", self.who, self.means)?;
        match self.address {
            Some(address) => write!(f, " from {})", address.ip()),
            None => f.write_str(")"),
        }
    }
}

/// The stated reason of a command: one line that is safe to show anywhere.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(try_from = "String", into = "String")]
#[schema(as = Reason, value_type = String)]
pub struct CommandReason(Arc<str>);

impl CommandReason {
    /// The greatest length of a reason, in bytes.
    pub const BYTES_MAX: usize = 500;

    /// Returns the reason as text.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl fmt::Display for CommandReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// The error for a text that is not a valid reason.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum InvalidCommandReason {
    /// The text is empty.
    #[error("a reason is required, e.g. bad NIC, TICKET-12")]
    Empty,
    /// The text is too long; holds its length in bytes.
    #[error("the reason has {0} bytes; at most {max} are allowed", max = CommandReason::BYTES_MAX)]
    TooLong(usize),
    /// The text contains characters that would not show as one line.
    #[error("the reason holds control characters; write it as one line of plain text")]
    Unsafe,
}

impl TryFrom<String> for CommandReason {
    type Error = InvalidCommandReason;

    fn try_from(text: String) -> Result<Self, Self::Error> {
        let text = text.trim();
        if text.is_empty() {
            return Err(InvalidCommandReason::Empty);
        }
        if text.len() > Self::BYTES_MAX {
            return Err(InvalidCommandReason::TooLong(text.len()));
        }
        if !is_safe_single_line(text) {
            return Err(InvalidCommandReason::Unsafe);
        }
        Ok(Self(text.into()))
    }
}

impl From<CommandReason> for String {
    fn from(reason: CommandReason) -> Self {
        reason.0.as_ref().into()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_reason_is_one_line_of_text_within_its_length() {
        let reason = |text: &str| CommandReason::try_from(text.to_owned());
        assert_eq!(reason("  flaky NIC, see ticket 12 ").unwrap().as_str(), "flaky NIC, see ticket 12");
        assert_eq!(reason(" \n "), Err(InvalidCommandReason::Empty));
        assert_eq!(reason(&"x".repeat(501)), Err(InvalidCommandReason::TooLong(501)));
        for text in ["a\nb", "a\u{1b}[2Jb", "a\u{202e}b", "a\0b"] {
            assert_eq!(reason(text), Err(InvalidCommandReason::Unsafe), "{text:?}");
        }
    }
}
