//! The access that each route requires.
//!
//! `route_builder.rs` fills the table, and `access/middleware.rs` checks requests by it. Begin at
//! [`RouteAccessTable`].

use std::collections::BTreeMap;

use axum::http::Method;

use super::access::RequiredAccess;

/// The access that each route requires.
#[derive(Debug, Default)]
pub struct RouteAccessTable(BTreeMap<String, Vec<(Method, RequiredAccess)>>);

impl RouteAccessTable {
    /// Adds a route.
    pub(super) fn add_route(&mut self, access: RequiredAccess, method: Method, path: &str) {
        self.0.entry(path.to_owned()).or_default().push((method, access));
    }

    /// Returns the access that a request requires; `path` is that of its route. Without a route, a request that
    /// changes nothing is for viewers, and any other is for admins.
    #[must_use]
    pub fn required_access(&self, method: &Method, path: Option<&str>) -> RequiredAccess {
        let looks = matches!(*method, Method::GET | Method::HEAD | Method::OPTIONS);
        let (method, otherwise) =
            if looks { (&Method::GET, RequiredAccess::VIEWER) } else { (method, RequiredAccess::ADMIN) };
        let methods = path.and_then(|path| self.0.get(path));
        let route = methods.into_iter().flatten().find(|(of, _)| of == method);
        route.map_or(otherwise, |(_, access)| *access)
    }

    /// Returns every route: its access, its method and its path.
    pub fn rows(&self) -> impl Iterator<Item = (RequiredAccess, &Method, &str)> {
        self.0.iter().flat_map(|(path, methods)| {
            methods.iter().map(move |(method, access)| (*access, method, path.as_str()))
        })
    }
}
