//! The access that each route requires.
//!
//! `route_builder.rs` fills the table, and `access/middleware.rs` checks requests by it. Begin at
//! [`RouteAccessTable`].

use std::collections::{BTreeMap, BTreeSet};

use axum::http::Method;

use super::access::RequiredAccess;

/// The access that each route requires.
#[derive(Debug, Default)]
pub struct RouteAccessTable {
    routes: BTreeMap<String, Vec<(Method, RequiredAccess)>>,
    reports: BTreeSet<String>,
}

impl RouteAccessTable {
    /// Adds a route.
    pub(super) fn add_route(&mut self, access: RequiredAccess, method: Method, path: &str) {
        self.routes.entry(path.to_owned()).or_default().push((method, access));
    }

    /// Declares that programs report at this path: their reports are no changes by operators.
    pub(super) fn declare_report_route(&mut self, path: &str) {
        self.reports.insert(path.to_owned());
    }

    /// Adds the routes of another table.
    pub(super) fn merge_table(&mut self, other: Self) {
        for (path, methods) in other.routes {
            self.routes.entry(path).or_default().extend(methods);
        }
        self.reports.extend(other.reports);
    }

    /// Returns whether programs report at this path.
    #[must_use]
    pub fn is_report_route(&self, path: Option<&str>) -> bool {
        path.is_some_and(|path| self.reports.contains(path))
    }

    /// Returns the access that a request requires; `path` is that of its route. Without a route, a request that
    /// changes nothing is for viewers, and any other is for admins.
    #[must_use]
    pub fn required_access(&self, method: &Method, path: Option<&str>) -> RequiredAccess {
        let looks = matches!(*method, Method::GET | Method::HEAD | Method::OPTIONS);
        let (method, otherwise) =
            if looks { (&Method::GET, RequiredAccess::VIEWER) } else { (method, RequiredAccess::ADMIN) };
        let methods = path.and_then(|path| self.routes.get(path));
        let route = methods.into_iter().flatten().find(|(of, _)| of == method);
        route.map_or(otherwise, |(_, access)| *access)
    }

    /// Returns every route: its access, its method and its path.
    pub fn rows(&self) -> impl Iterator<Item = (RequiredAccess, &Method, &str)> {
        self.routes.iter().flat_map(|(path, methods)| {
            methods.iter().map(move |(method, access)| (*access, method, path.as_str()))
        })
    }
}
