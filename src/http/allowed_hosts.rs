//! The host names at which the server may be reached.
//!
//! The owner of a foreign web page can make the page's host name resolve to this server's address (DNS rebinding).
//! For the browser, the scripts of the page then have the same origin as this server. The scripts cannot change the
//! `Host` header, so `access/middleware.rs` refuses a request with a host name that is not configured. A host that is
//! an IP address is accepted, because an attacker cannot change where an address leads. Begin at
//! [`AllowedHosts::allows`].

use std::fmt;
use std::net::{IpAddr, Ipv6Addr};

/// The allowed host names, besides those that are always allowed: `localhost`, names below it, and IP addresses.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct AllowedHosts(Vec<String>);

impl AllowedHosts {
    /// Parses names separated by commas, or `none`.
    ///
    /// # Errors
    /// The name that is invalid.
    pub fn parse(text: &str) -> Result<Self, String> {
        if text == "none" {
            return Ok(Self::default());
        }
        let names = text.split(',').map(str::trim).filter(|name| !name.is_empty());
        let names: Vec<String> = names.map(str::to_ascii_lowercase).collect();
        let plain = |name: &str| {
            let rest = name.strip_prefix("*.").unwrap_or(name);
            !rest.is_empty()
                && rest.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"-._".contains(&byte))
        };
        match names.iter().find(|name| !plain(name)) {
            Some(wrong) => {
                Err(format!("{wrong:?} is no name of a host: write it without a scheme and a port"))
            }
            None => Ok(Self(names)),
        }
    }

    /// Returns whether the server may be reached as `host`, which may include a port.
    #[must_use]
    pub fn allows(&self, host: &str) -> bool {
        let Some(name) = host_without_port(host) else { return false };
        let name = name.to_ascii_lowercase();
        let name = name.strip_suffix('.').unwrap_or(&name);
        if name == "localhost" || name.ends_with(".localhost") || name.parse::<IpAddr>().is_ok() {
            return true;
        }
        self.0.iter().any(|known| match known.strip_prefix('*') {
            Some(below) => name.len() > below.len() && name.ends_with(below),
            None => name == known,
        })
    }

    /// Adds a name.
    #[must_use]
    pub fn with_name(mut self, name: &str) -> Self {
        self.0.push(name.to_ascii_lowercase());
        self
    }
}

/// Returns the name or address of a host without its port and without the brackets of an IPv6 address; `None`
/// if it is invalid.
///
/// Only a port may follow the name: `localhost:1@elsewhere` is invalid as a whole, although it begins with a
/// valid name.
pub(super) fn host_without_port(host: &str) -> Option<&str> {
    let (name, port) = match host.strip_prefix('[') {
        Some(rest) => {
            let (address, rest) = rest.split_once(']')?;
            address.parse::<Ipv6Addr>().ok()?;
            (address, if rest.is_empty() { None } else { Some(rest.strip_prefix(':')?) })
        }
        None => {
            let (name, port) = host.split_once(':').map_or((host, None), |(name, port)| (name, Some(port)));
            let plain = |byte: u8| byte.is_ascii_alphanumeric() || b"-._".contains(&byte);
            if name.is_empty() || !name.bytes().all(plain) {
                return None;
            }
            (name, port)
        }
    };
    let is_port = |port: &str| {
        port.is_empty() || (port.bytes().all(|byte| byte.is_ascii_digit()) && port.parse::<u16>().is_ok())
    };
    port.is_none_or(is_port).then_some(name)
}

impl fmt::Display for AllowedHosts {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(if self.0.is_empty() { "none" } else { "" })?;
        f.write_str(&self.0.join(","))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_unconfigured_host_name_is_refused() {
        let hosts = AllowedHosts::parse("Muster.example, *.cluster.local").unwrap();
        for host in [
            "localhost:8477",
            "LOCALHOST",
            "train.localhost:1",
            "127.0.0.1:8477",
            "10.1.2.3",
            "[::1]:8477",
            "muster.example",
            "muster.example.:80",
            "a.cluster.local",
            "a.b.cluster.local:1",
        ] {
            assert!(hosts.allows(host), "{host}");
        }
        for host in [
            "evil.example",
            "muster.example.evil.example",
            "cluster.local",
            ".cluster.local",
            "",
            ":1",
            "localhost.evil.example",
            "localhost:19001@evil",
            "localhost:19001@evil.example:1",
            "user@localhost",
            "localhost:65536",
            "localhost:+1",
            "localhost:1:1",
            "localhost/evil",
            "localhost evil",
            "127.0.0.1, evil",
            "[::1]evil",
            "[::1]:x",
            "[evil]",
            "[::1",
            "::1",
        ] {
            assert!(!hosts.allows(host), "{host}");
        }
        assert!(
            AllowedHosts::parse("http://a").is_err()
                && AllowedHosts::parse("a:1").is_err()
                && AllowedHosts::parse("*").is_err()
        );
        assert_eq!(AllowedHosts::parse(&hosts.to_string()), Ok(hosts));
    }
}
