//! Registers routes, each with the access that it requires.
//!
//! `routes.rs` and `pages/mod.rs` list the routes, and `access/middleware.rs` checks requests. [`RouteBuilder`] holds
//! the router and the table of accesses. Every function that adds a route takes a [`RequiredAccess`], so a route
//! without a declared access does not compile. The methods and the path of a route under `/api/v1` come from the
//! annotation that also describes it in the OpenAPI document. Begin at [`RouteBuilder`].

use std::sync::Arc;

use axum::handler::Handler;
use axum::http::Method;
use axum::routing::{self, MethodRouter};
use axum::{Extension, Router, middleware};
use utoipa::openapi::extensions::Extensions;
use utoipa_axum::router::{OpenApiRouter, UtoipaMethodRouter};

use super::access::{AccessLayerState, RequiredAccess, authorize_and_call_handler};
use super::openapi::{self, OpenApiDocument};
use super::route_access_table::RouteAccessTable;
use super::{AppState, etag, page_times, problem_rendering};

/// Routes with the access that each requires.
#[derive(Default)]
pub(super) struct RouteBuilder {
    router: OpenApiRouter<AppState>,
    table: RouteAccessTable,
}

impl RouteBuilder {
    /// Adds a route for GET, which has no OpenAPI description.
    pub fn add_get_route<H: Handler<T, AppState>, T: 'static>(
        self,
        access: RequiredAccess,
        path: &str,
        handler: H,
    ) -> Self {
        self.add_route(access, Method::GET, path, routing::get(handler))
    }

    /// Adds a route for POST, which has no OpenAPI description.
    pub fn add_post_route<H: Handler<T, AppState>, T: 'static>(
        self,
        access: RequiredAccess,
        path: &str,
        handler: H,
    ) -> Self {
        self.add_route(access, Method::POST, path, routing::post(handler))
    }

    fn add_route(
        mut self,
        access: RequiredAccess,
        method: Method,
        path: &str,
        handler: MethodRouter<AppState>,
    ) -> Self {
        self.table.add_route(access, method, path);
        Self { router: self.router.route(path, handler), ..self }
    }

    /// Adds the routes of handlers that have an OpenAPI description, which then states the role that they require.
    pub fn add_described_routes(
        mut self,
        access: RequiredAccess,
        mut handlers: UtoipaMethodRouter<AppState>,
    ) -> Self {
        for (path, item) in &mut handlers.1.paths {
            for (method, operation) in openapi::operations_by_method(item) {
                self.table.add_route(access, method, path);
                if let RequiredAccess::Role(role) = access {
                    operation.extensions = Some(Extensions::from_iter([("x-role", role.to_string())]));
                }
            }
        }
        Self { router: self.router.routes(handlers), ..self }
    }

    /// Adds such routes, at which programs report. Reports have no limit on their rate for each actor and no lines in the
    /// audit.
    pub fn add_described_report_routes(
        mut self,
        access: RequiredAccess,
        handlers: UtoipaMethodRouter<AppState>,
    ) -> Self {
        for path in handlers.1.paths.keys() {
            self.table.declare_report_route(path);
        }
        self.add_described_routes(access, handlers)
    }

    /// Adds other routes.
    pub fn merge_routes(mut self, other: Self) -> Self {
        self.table.merge_table(other.table);
        Self { router: self.router.merge(other.router), ..self }
    }

    /// Adds entity tags to the answers of these routes.
    pub fn with_etags(self) -> Self {
        Self { router: self.router.layer(middleware::from_fn(etag::answer_with_etag)), ..self }
    }

    /// Writes the times of the pages of these routes, as each reader has chosen.
    pub fn with_written_times(self) -> Self {
        Self { router: self.router.layer(middleware::from_fn(page_times::write_times_of_page)), ..self }
    }

    /// Adds a value to the requests of these routes, for their handlers.
    pub fn with_extension<E: Clone + Send + Sync + 'static>(self, extension: E) -> Self {
        Self { router: self.router.layer(Extension(extension)), ..self }
    }

    /// Adds the OpenAPI document of these routes to their requests, for the handlers that show it.
    pub fn with_openapi_document(self) -> Self {
        let described = openapi::document_without_paths().merge_from(self.router.get_openapi().clone());
        Self { router: self.router.layer(Extension(OpenApiDocument::new(described))), ..self }
    }

    /// Returns the access that each route requires.
    pub fn into_access_table(self) -> RouteAccessTable {
        self.table
    }

    /// Returns the router, with access control before every route.
    pub fn into_guarded_router(self, site: AppState) -> Router {
        let access = AccessLayerState { site: site.clone(), routes: Arc::new(self.table) };
        let router = with_unknown_path_and_method_problems(self.router.into());
        with_problem_rendering_and_state(
            router.layer(middleware::from_fn_with_state(access, authorize_and_call_handler)),
            site,
        )
    }

    /// Returns the router without access control. Only public routes that read no body may be in it.
    pub fn into_router_without_access_control(self, site: AppState) -> Router {
        debug_assert!(
            self.table
                .rows()
                .all(|(access, method, _)| (access, method) == (RequiredAccess::Public, &Method::GET))
        );
        with_problem_rendering_and_state(with_unknown_path_and_method_problems(self.router.into()), site)
    }
}

/// Answers requests for unknown paths and methods.
fn with_unknown_path_and_method_problems(router: Router<AppState>) -> Router<AppState> {
    router
        .fallback(problem_rendering::answer_unknown_path)
        .method_not_allowed_fallback(problem_rendering::answer_unknown_method)
}

/// Renders problems, and gives the handlers their state.
fn with_problem_rendering_and_state(router: Router<AppState>, site: AppState) -> Router {
    router.layer(middleware::from_fn(problem_rendering::render_problem_and_add_headers)).with_state(site)
}
