//! The pages: what people see and do in a browser.
//!
//! A page is made of *parts* ([`part`]): pieces of HTML with a name and a digest. Every page is whole without JavaScript:
//! each view, filter and form is a plain address. With it, a page follows the same parts as they change ([`live`]).
//!
//! | file | |
//! | --- | --- |
//! | `shell.rs` | what every page is given, and how it is answered |
//! | `part.rs`, `times.rs`, `look.rs`, `links.rs` | what pages are made of |
//! | `escape.rs` | what every expression of a template goes through |
//! | `assets.rs` | the static files |
//! | `scene.rs` | a job as its pages see it, made once for all who look |
//! | `overview.rs`, `job.rs`, … | one file a page |
//! | `live.rs`, `patch.rs` | pages that follow what changes, and what they are sent |
//!
//! What a form does is what the REST API does: handlers call the same functions.

mod api;
mod assets;
mod audit;
mod barriers;
mod devices;
mod drain;
mod escape;
mod exclusions;
mod grid;
mod guide;
mod job;
mod keys;
mod links;
mod live;
mod look;
mod needs;
mod overview;
mod part;
mod patch;
mod scene;
mod search;
mod shell;
mod table;
mod task;
#[cfg(test)]
mod tests;
mod timeline;
mod times;
mod transfers;

use axum::Router;
use axum::routing::{get, post};

use super::AppState;

pub use escape::Escape;
pub use live::LiveHubs;
pub(super) use shell::problem_page;
pub use timeline::Timelines;

/// The address of a static file.
pub(super) fn asset(name: &str) -> String {
    assets::Asset::address(name)
}

/// Every page.
pub(super) fn router() -> Router<AppState> {
    Router::new()
        .route("/", get(overview::show))
        .route("/live", get(live::overview))
        .route("/jobs", get(overview::redirect_to_overview))
        .route("/jobs/{job}", get(job::show))
        .route("/jobs/{job}/live", get(live::job))
        .route("/jobs/{job}/timeline", get(timeline::show))
        .route("/jobs/{job}/barriers", get(barriers::show))
        .route("/jobs/{job}/tasks/{task}", get(task::show))
        .route("/jobs/{job}/devices", get(devices::show))
        .route("/jobs/{job}/transfers", get(transfers::of_job))
        .route("/jobs/{job}/keys", get(keys::show))
        .route("/jobs/{job}/keys/value", get(keys::value))
        .route("/jobs/{job}/drain", get(drain::show).post(drain::submit))
        .route("/jobs/{job}/exclusions", get(exclusions::show).post(exclusions::exclude))
        .route("/jobs/{job}/exclusions/{id}/lift", post(exclusions::lift))
        .route("/transfers", get(transfers::show))
        .route("/audit", get(audit::show))
        .route("/search", get(search::show))
        .route("/api", get(api::show))
        .route("/guide", get(guide::first))
        .route("/guide/{page}", get(guide::show))
        .route("/static/{file}", get(assets::show))
        .route("/favicon.ico", get(assets::icon))
}
