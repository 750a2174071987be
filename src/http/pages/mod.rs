//! The pages for people. A page is made of *parts* ([`fragment`]): pieces of HTML with an id and a digest.
//!
//! It holds no state but the hubs of [`live`]. Begin at [`router`], then `job.rs` as the example of a page.
//!
//! - Every page is complete without JavaScript: each view, filter and form is a plain address. With JavaScript a
//!   page follows its parts as they change. Parts are sent as HTML, not as data, so the templates exist once and a
//!   first load and an update cannot differ; the script changes the DOM and knows nothing of jobs.
//! - A handler takes one `JobSnapshot` of its job: the view, the open findings that hold in the same
//!   state, the timeline, the status of each task.
//! - A moment stands in a part as `<time>` with the moment itself; relative times are filled in last (`times.rs`).
//!   So the digest of a part changes only when its content does.
//! - A form calls the function that the REST handler calls.
//! - The grid of a large job is one path for each status, with a rectangle for each run of equal neighbours, so its
//!   size follows the number of problems and not of tasks.
//!
//! | file | contents |
//! | --- | --- |
//! | `frame.rs` | the frame of every page |
//! | `fragment.rs`, `times.rs`, `status.rs`, `links.rs` | parts, times, the status of a task, addresses |
//! | `escape.rs` | the escaping of every template expression |
//! | `assets.rs` | the static files |
//! | `snapshot.rs` | the snapshot of one job that all viewers share |
//! | `overview.rs`, `job.rs`, … | one file a page |
//! | `live.rs`, `patch.rs` | live updates, and line patches between two versions of a part |

mod api;
mod assets;
mod audit;
mod barriers;
mod devices;
mod drain;
mod escape;
mod exclusions;
mod fragment;
mod frame;
mod grid;
mod guide;
mod issues;
mod job;
mod keys;
mod links;
mod live;
mod overview;
mod patch;
mod search;
mod snapshot;
mod status;
mod task;
mod task_table;
#[cfg(test)]
mod tests;
mod timeline;
mod times;
mod transfers;

use axum::Router;
use axum::routing::{get, post};

use super::AppState;

pub use escape::Escape;
pub(super) use frame::problem_page;
pub use live::LiveHubs;
pub use timeline::Timelines;

/// Returns the address of a static file.
pub(super) fn asset(name: &str) -> String {
    assets::Asset::address(name)
}

/// Returns the router of all pages.
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
