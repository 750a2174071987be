//! Serves `/helper.py`: the helper that a Python program loads to send its stacks, ready to run against this server.
//!
//! The file is `python/muster/_stacks.py`, which defines one function, followed by a call of this function with the address
//! of this server. The address is the header `Host` of the request, so it must be a host name of this server; otherwise a
//! cache or a proxy could hand out a file that sends stacks elsewhere. The route is public, because a program that
//! loads the file has no token yet, and the file contains nothing secret. Begin at [`serve_helper`].

use axum::Extension;
use axum::extract::State;
use axum::http::header::{self, HeaderMap};
use axum::response::IntoResponse;
use serde::Deserialize;

use super::extractors::QueryParams;
use super::request_client::TransportSecurity;
use super::{AppState, Problem};
use crate::coordination::JobName;

/// The helper.
const HELPER: &str = include_str!("../../python/muster/_stacks.py");

/// The query parameters of the helper's file.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct HelperQuery {
    /// The job of the program; without it, the helper takes `MUSTER_JOB`, or the only job of the server.
    job: Option<JobName>,
}

/// Serves `GET /helper.py`.
pub(super) async fn serve_helper(
    State(site): State<AppState>,
    channel: Option<Extension<TransportSecurity>>,
    QueryParams(query): QueryParams<HelperQuery>,
    headers: HeaderMap,
) -> Result<impl IntoResponse, Problem> {
    let host = headers.get(header::HOST).and_then(|host| host.to_str().ok()).unwrap_or_default();
    if !site.guard.allows_host(host) {
        return Err(Problem::unknown_host_name(host));
    }
    let content =
        [(header::CONTENT_TYPE, "text/x-python; charset=utf-8"), (header::CACHE_CONTROL, "no-store")];
    Ok((content, helper_text(channel.is_some_and(|channel| channel.secure), host, query.job.as_ref())))
}

/// Returns the helper with the call that starts it. The host and the name of a job contain no quotes.
fn helper_text(secure: bool, host: &str, job: Option<&JobName>) -> String {
    let scheme = if secure { "https" } else { "http" };
    let job = job.map_or_else(String::new, |job| format!(", job=\"{job}\""));
    format!("{HELPER}\n\nshow_stacks(\"{scheme}://{host}\"{job})\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_file_ends_with_a_call_that_names_this_server() {
        let call = |secure, host, job: Option<&str>| {
            let text = helper_text(secure, host, job.map(|job| job.parse().unwrap()).as_ref());
            text.lines().last().unwrap_or_default().to_owned()
        };
        assert_eq!(call(false, "10.0.0.7:8477", None), "show_stacks(\"http://10.0.0.7:8477\")");
        assert_eq!(
            call(true, "muster.example", Some("train")),
            "show_stacks(\"https://muster.example\", job=\"train\")"
        );
        assert!(
            HELPER.lines().filter(|line| line.starts_with("def ")).count() == 1,
            "one name in the program"
        );
    }
}
