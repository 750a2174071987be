//! Log lines, on stderr.

use std::io::IsTerminal as _;

use tracing_subscriber::EnvFilter;
use tracing_subscriber::util::SubscriberInitExt as _;

use crate::config::LogFormat;

/// Checks a filter without using it.
///
/// # Errors
/// What is wrong with it and what to write instead.
pub fn check_filter(filter: &str) -> Result<(), String> {
    EnvFilter::try_new(filter).map(|_| ()).map_err(|error| {
        format!("it is no log filter ({error}): write a level such as info, or target=level")
    })
}

/// Starts to log. A second start in the same process changes nothing.
///
/// # Errors
/// If the filter is none.
pub fn start(filter: &str, format: LogFormat) -> Result<(), String> {
    let filter = EnvFilter::try_new(filter).map_err(|error| error.to_string())?;
    let colours =
        std::io::stderr().is_terminal() && std::env::var_os("NO_COLOR").is_none_or(|it| it.is_empty());
    let lines =
        tracing_subscriber::fmt().with_env_filter(filter).with_writer(std::io::stderr).with_ansi(colours);
    let started = match format {
        LogFormat::Human => lines.finish().try_init(),
        LogFormat::Json => lines.json().flatten_event(true).with_current_span(false).finish().try_init(),
    };
    // Only tests start twice, and they want the first one.
    let _ = started;
    Ok(())
}
