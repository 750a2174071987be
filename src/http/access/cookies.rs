//! Names, reads and sets the cookies of browsers.
//!
//! `sessions.rs`, `csrf.rs` and `wrong_token_throttle.rs` interpret the values. Begin at [`CookieNames`].

use axum::http::header::{self, HeaderMap, HeaderValue};

use crate::http::request_client::TransportSecurity;

/// The names of the cookies. Under TLS they have the prefix `__Host-`, which browsers accept only over TLS
/// and from this host.
pub(super) struct CookieNames {
    secure: bool,
}

impl CookieNames {
    pub fn for_transport(channel: &TransportSecurity) -> Self {
        Self { secure: channel.secure }
    }

    /// Returns the name of the session cookie.
    pub fn session_cookie_name(&self) -> &'static str {
        if self.secure { "__Host-muster" } else { "muster-session" }
    }

    /// Returns the name of the cookie of a browser without a session.
    pub fn visitor_cookie_name(&self) -> &'static str {
        if self.secure { "__Host-muster-visit" } else { "muster-visit" }
    }

    /// Returns the name of the cookie that marks a browser as one that has logged in.
    pub fn known_browser_cookie_name(&self) -> &'static str {
        if self.secure { "__Host-muster-browser" } else { "muster-browser" }
    }

    /// Returns the `Set-Cookie` value of a cookie. `seconds` is its lifetime; `None` ends it with the
    /// browser.
    pub fn set_cookie_header(&self, name: &str, value: &str, seconds: Option<u64>) -> Option<HeaderValue> {
        let secure = if self.secure { "; Secure" } else { "" };
        let age = seconds.map_or_else(String::new, |seconds| format!("; Max-Age={seconds}"));
        format!("{name}={value}; Path=/; HttpOnly; SameSite=Strict{secure}{age}").parse().ok()
    }
}

/// Returns the value of a cookie of a request.
pub(in crate::http) fn cookie_value<'h>(headers: &'h HeaderMap, name: &str) -> Option<&'h str> {
    let all = headers.get_all(header::COOKIE).into_iter().filter_map(|value| value.to_str().ok());
    let mut pairs = all.flat_map(|value| value.split(';')).filter_map(|pair| pair.trim().split_once('='));
    pairs.find(|(found, _)| *found == name).map(|(_, value)| value)
}
