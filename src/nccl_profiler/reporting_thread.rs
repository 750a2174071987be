//! The thread that reports the record to the service. Begin at [`start`].

use muster::agent::CollectiveReporter;
use tokio::runtime::{Builder, Runtime};

use crate::plugin_state::plugin_state;

/// Returns the runtime of the thread, or why there is none.
pub(crate) fn create_runtime() -> Result<Runtime, String> {
    Builder::new_current_thread().enable_all().build().map_err(|error| error.to_string())
}

/// Starts the thread, which runs until the process ends. Without a thread, the process only writes its record.
pub(crate) fn start(runtime: Runtime, reporter: CollectiveReporter) {
    let run = move || {
        // The state is being made by the thread that starts this one; this waits for it.
        let state = plugin_state();
        if let Some(record) = state.record() {
            runtime.block_on(reporter.report_periodically(record, |wanted| state.set_timing(wanted)));
        }
    };
    let _ = std::thread::Builder::new().name("muster-nccl".to_owned()).spawn(run);
}
