//! `GET /transfers`: planned movements of bytes between devices.

use askama::Template;
use axum::extract::State;
use axum::response::Response;

use super::shell::{Guest, Page, Place, answer};
use crate::http::{Problem, Site};

#[derive(Template)]
#[template(path = "transfers.html")]
struct TransfersPage {
    page: Page,
}

pub(super) async fn show(State(site): State<Site>, guest: Guest) -> Result<Response, Problem> {
    let now = site.engine.clock().now();
    answer(&TransfersPage { page: Page::new(guest, Place::Transfers, "Transfers", now) }, now)
}
