//! Serves `GET /times`: keeps how the reader wants to see times, and leads back to the page.
//!
//! The switch is a form in the frame of every page, which works without JavaScript; the script switches in place. The
//! choice is a preference of one browser and changes nothing on the server, so it is a GET. Begin at
//! `choose_time_style`.

use axum::Extension;
use axum::http::header;
use axum::response::{IntoResponse as _, Redirect, Response};
use serde::Deserialize;

use crate::http::TransportSecurity;
use crate::http::access::login::local_redirect_path_or_root;
use crate::http::extractors::QueryParams;
use crate::http::page_times::TimeStyle;

/// The query parameters of the switch.
#[derive(Debug, Deserialize)]
pub(super) struct TimeSwitchQuery {
    to: TimeStyle,
    /// The page from which the reader comes.
    back: Option<String>,
}

/// Serves `GET /times`.
pub(super) async fn choose_time_style(
    channel: Option<Extension<TransportSecurity>>,
    QueryParams(query): QueryParams<TimeSwitchQuery>,
) -> Response {
    let mut response = Redirect::to(local_redirect_path_or_root(query.back.as_deref())).into_response();
    let secure = channel.is_some_and(|channel| channel.secure);
    if let Some(cookie) = query.to.set_cookie_header(secure) {
        response.headers_mut().append(header::SET_COOKIE, cookie);
    }
    response
}
