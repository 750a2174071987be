//! Serves `GET /api/v1/journal`: what survives the process of the server, and the state of its journal.
//!
//! The numbers are those of the metrics `muster_journal_*`. Begin at [`show_journal`].

use axum::Json;
use axum::extract::State;

use super::AppState;
use super::api::JournalView;

/// The journal, which survives the process of the server
#[utoipa::path(get, path = "/api/v1/journal", operation_id = "journal_show", tag = "server",
    responses((status = 200, body = JournalView, description = "The state of the journal")))]
pub(super) async fn show_journal(State(site): State<AppState>) -> Json<JournalView> {
    Json(JournalView::new(site.engine.journal_state().as_ref()))
}
