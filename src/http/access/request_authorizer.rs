//! The head of a request during its authorization, with the client and the required access.
//!
//! `middleware.rs` makes the checks, and `refusals.rs` answers refused requests. Begin at [`RequestAuthorizer`].

use axum::extract::MatchedPath;
use axum::http::Method;
use axum::http::header::{self, HeaderName};
use axum::http::request::Parts;

use super::cookies::{CookieNames, cookie_value};
use super::{AccessControl, Principal, RequiredAccess};
use crate::http::request_client::{PeerAddress, TransportSecurity};
use crate::http::route_access_table::RouteAccessTable;
use crate::http::{AppState, ClientNetwork};

/// The header by which a browser says whether a page of this server sends the request.
pub(super) const SEC_FETCH_SITE: HeaderName = HeaderName::from_static("sec-fetch-site");

/// A request while it is authorized: its head, and what is known of it.
pub(super) struct RequestAuthorizer {
    pub site: AppState,
    pub head: Parts,
    pub source: ClientNetwork,
    pub access: RequiredAccess,
    /// The method changes state.
    pub is_change: bool,
    /// The request is the report of a program, and not a change by an operator.
    pub is_report: bool,
    /// A browser sent the request.
    pub is_browser: bool,
    pub channel: TransportSecurity,
    pub cookies: CookieNames,
    /// The author; none before they are identified, and without credentials.
    pub visitor: Option<Principal>,
}

impl RequestAuthorizer {
    pub fn new(site: AppState, routes: &RouteAccessTable, head: Parts) -> Self {
        let matched = head.extensions.get::<MatchedPath>().map(MatchedPath::as_str);
        let channel = head.extensions.get::<TransportSecurity>().cloned().unwrap_or_default();
        let cookies = CookieNames::for_transport(&channel);
        Self {
            site,
            source: ClientNetwork::of_request(&head.extensions),
            access: routes.required_access(&head.method, matched),
            is_change: !matches!(head.method, Method::GET | Method::HEAD | Method::OPTIONS),
            is_report: routes.is_report_route(matched),
            is_browser: head.headers.contains_key(header::ORIGIN)
                || head.headers.contains_key(&SEC_FETCH_SITE)
                || cookie_value(&head.headers, cookies.session_cookie_name()).is_some()
                || cookie_value(&head.headers, cookies.visitor_cookie_name()).is_some(),
            channel,
            cookies,
            visitor: None,
            head,
        }
    }

    pub fn access_control(&self) -> &AccessControl {
        &self.site.guard
    }

    /// Returns the address of the client.
    pub fn peer_address(&self) -> Option<std::net::SocketAddr> {
        self.head.extensions.get::<PeerAddress>().map(|peer| peer.0)
    }

    pub fn user_agent(&self) -> &str {
        let agent = self.head.headers.get(header::USER_AGENT).and_then(|agent| agent.to_str().ok());
        agent.unwrap_or_default()
    }
}
