//! The pages for people. A page is made of *fragments* ([`fragment`]): pieces of HTML with an id and a digest.
//!
//! The only state of this module is the hubs in [`live`], which send updates. Begin at [`page_routes`], then read
//! `job.rs` as an example of a page.
//!
//! - Every page is complete without JavaScript: each view, filter and form is a plain address. With JavaScript a
//!   page receives its fragments again as they change. Fragments are sent as HTML, not as data. One template
//!   therefore serves first loads and updates, and the two cannot differ. The script replaces parts of the page, and
//!   contains no logic about jobs.
//! - The handler of a job's page takes one `JobSnapshot`, which contains the view, the open findings at the same
//!   moment, the timeline, and the status of each task.
//! - A fragment contains each time as `<time>` with the absolute time. The texts are written last
//!   (`http/page_times.rs`), as the reader has chosen, so the digest of a fragment changes only with its content.
//! - Forms and REST handlers call the same functions.
//! - The grid of the tasks of a large job is an SVG image whose size grows with the number of problems, not with
//!   the number of tasks (`task_grid.rs`).
//!
//! | file | contents |
//! | --- | --- |
//! | `frame.rs` | the frame of every page |
//! | `fragment.rs`, `times.rs`, `amount.rs`, `status.rs`, `links.rs` | fragments, times, amounts, states, addresses |
//! | `time_switch.rs` | how the reader wants to see times |
//! | `escape.rs` | the escaping of every template expression |
//! | `assets.rs` | the static files |
//! | `snapshot.rs` | the snapshot of one job that all viewers share |
//! | `overview.rs`, `job.rs`, … | one file for each page |
//! | `job_head.rs` | the head of every page of a job |
//! | `host_transfers.rs` | the transfers on the page of a host |
//! | `issues.rs`, `named_tasks.rs`, `task_grid.rs`, `task_table.rs` | parts of the page of a job |
//! | `host_map.rs`, `waterfall.rs`, `state_chart.rs` (with `time_window.rs` and `run_moments.rs`), `transfer_map.rs`, `sparkline.rs` | the pictures of hosts, of barriers, of the states of tasks over time, of transfers, and of the last minutes |
//! | `picture_rows.rs` | the measures that pictures with rows share |
//! | `live_page.rs` | the pages that receive live updates, and the addresses of their streams |
//! | `job_page_fragments.rs` | the function that renders the fragments of each of these pages |
//! | `live.rs`, `fragment_patch.rs` | live updates, and line patches between two versions of a fragment |

mod amount;
mod api;
mod assets;
mod audit;
mod barriers;
mod collectives;
mod devices;
mod drain;
mod escape;
mod exclusions;
mod fragment;
mod fragment_patch;
mod frame;
mod guide;
mod host;
mod host_map;
mod host_transfers;
mod hosts;
mod issues;
mod job;
mod job_head;
mod job_page_fragments;
mod keys;
mod links;
mod live;
mod live_page;
mod named_tasks;
mod overview;
mod picture_rows;
mod run;
mod run_comparison;
mod run_moments;
mod search;
mod snapshot;
mod sparkline;
mod stacks;
mod state_chart;
mod status;
mod task;
mod task_grid;
mod task_table;
#[cfg(test)]
mod tests;
mod time_switch;
mod time_window;
mod timeline;
mod times;
mod transfer_map;
mod transfers;
mod waterfall;

use std::sync::Arc;

use super::access::RequiredAccess;
use super::route_builder::RouteBuilder;

pub(super) use assets::asset_path;
pub use escape::HtmlEscaper;
pub(super) use frame::render_problem_page;

/// The beginnings of the addresses of pages that show a run: the present one, and one that the address names.
const RUN_PREFIXES: [&str; 2] = ["/jobs/{job}", "/jobs/{job}/runs/{run}"];

/// Adds the routes of the pages that exist below both prefixes. `ViewedRun` reads the run from the address.
fn add_run_routes(routes: RouteBuilder, prefix: &str) -> RouteBuilder {
    let below = |path: &str| format!("{prefix}{path}");
    routes
        .add_get_route(RequiredAccess::VIEWER, &below("/hosts"), hosts::show_hosts_page)
        .add_get_route(RequiredAccess::VIEWER, &below("/hosts/{host}"), host::show_host_page)
        .add_get_route(RequiredAccess::VIEWER, &below("/timeline"), timeline::show_timeline_page)
        .add_get_route(RequiredAccess::VIEWER, &below("/barriers"), barriers::show_barriers_page)
        .add_get_route(RequiredAccess::VIEWER, &below("/tasks/{task}"), task::show_task_page)
        .add_get_route(RequiredAccess::VIEWER, &below("/tasks/{task}/tip"), task::show_task_tip)
        .add_get_route(RequiredAccess::VIEWER, &below("/transfers"), transfers::show_job_transfers_page)
}

/// Returns the routes of all pages.
pub(super) fn page_routes() -> RouteBuilder {
    let streams = RouteBuilder::default()
        .add_get_route(RequiredAccess::VIEWER, "/live", live::stream_overview_or_audit_updates)
        .add_get_route(RequiredAccess::VIEWER, "/jobs/{job}/live", live::stream_job_page_updates)
        .with_extension(Arc::<live::LiveHubs>::default());
    RUN_PREFIXES
        .into_iter()
        .fold(streams, add_run_routes)
        .add_get_route(RequiredAccess::VIEWER, "/", overview::show_overview_page)
        .add_get_route(RequiredAccess::VIEWER, "/jobs", overview::redirect_to_overview)
        .add_get_route(RequiredAccess::VIEWER, "/jobs/{job}", job::show_job_page)
        .add_get_route(RequiredAccess::VIEWER, "/jobs/{job}/runs/{run}", run::show_run_page)
        .add_get_route(
            RequiredAccess::VIEWER,
            "/jobs/{job}/runs/{run}/comparison",
            run_comparison::show_comparison_page,
        )
        .add_get_route(RequiredAccess::VIEWER, "/jobs/{job}/devices", devices::show_devices_page)
        .add_get_route(RequiredAccess::VIEWER, "/jobs/{job}/keys", keys::show_keys_page)
        .add_get_route(RequiredAccess::OPERATOR, "/jobs/{job}/keys/value", keys::show_value_page)
        .add_get_route(RequiredAccess::VIEWER, "/jobs/{job}/drain", drain::show_drain_page)
        .add_post_route(RequiredAccess::OPERATOR, "/jobs/{job}/drain", drain::submit_drain_form)
        .add_get_route(RequiredAccess::VIEWER, "/jobs/{job}/exclusions", exclusions::show_exclusions_page)
        .add_post_route(RequiredAccess::OPERATOR, "/jobs/{job}/exclusions", exclusions::submit_exclude_form)
        .add_post_route(
            RequiredAccess::OPERATOR,
            "/jobs/{job}/exclusions/{id}/lift",
            exclusions::submit_lift_form,
        )
        .add_get_route(RequiredAccess::VIEWER, "/jobs/{job}/collectives", collectives::show_collectives_page)
        .add_get_route(RequiredAccess::VIEWER, "/jobs/{job}/stacks", stacks::show_stacks_page)
        .add_post_route(RequiredAccess::OPERATOR, "/jobs/{job}/stacks", stacks::submit_stacks_form)
        .add_get_route(RequiredAccess::VIEWER, "/transfers", transfers::show_transfers_page)
        .add_get_route(RequiredAccess::VIEWER, "/audit", audit::show_audit_page)
        .add_get_route(RequiredAccess::VIEWER, "/search", search::show_search_page)
        .add_get_route(RequiredAccess::VIEWER, "/times", time_switch::choose_time_style)
        .add_get_route(RequiredAccess::VIEWER, "/api", api::show_api_page)
        .add_get_route(RequiredAccess::VIEWER, "/guide", guide::redirect_to_first_page)
        .add_get_route(RequiredAccess::VIEWER, "/guide/{page}", guide::show_guide_page)
        .add_get_route(RequiredAccess::Public, "/static/{file}", assets::serve_asset)
        .add_get_route(RequiredAccess::Public, "/favicon.ico", assets::redirect_favicon)
        .with_written_times()
}
