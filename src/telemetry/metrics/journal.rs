//! Writes the metrics of the journal.
//!
//! `Engine::journal_state` returns the counts. Begin at [`write_journal_samples`].

use super::catalogue as metric;
use super::text_format::ScrapeOutput;
use crate::engine::{DigestComparison, Engine};

/// Writes the samples of the journal of `engine`.
pub(super) fn write_journal_samples(engine: &Engine, page: &mut ScrapeOutput) {
    let state = engine.journal_state();
    page.add_integer_sample(&metric::JOURNAL_ENABLED, &[], u64::from(state.is_some()));
    // Without a journal, all counts are zero.
    let files = state.as_ref().map(|state| state.files.clone()).unwrap_or_default();
    let restored = state.as_ref().map(|state| state.restored.clone()).unwrap_or_default();
    let (restarts, refused) = state.map_or((0, 0), |state| (state.restarts, state.refused_changes));
    page.add_integer_sample(&metric::JOURNAL_RECORDS, &[], files.records);
    page.add_integer_sample(&metric::JOURNAL_BYTES, &[], files.appended_bytes);
    page.add_integer_sample(&metric::JOURNAL_LAG, &[], files.records_not_on_disk());
    page.add_integer_sample(&metric::JOURNAL_DISK, &[], files.disk_bytes);
    page.add_integer_sample(&metric::JOURNAL_SYNCS, &[], files.syncs);
    page.add_integer_sample(&metric::JOURNAL_SNAPSHOTS, &["written"], files.snapshots);
    page.add_integer_sample(&metric::JOURNAL_SNAPSHOTS, &["failed"], files.failed_snapshots);
    page.add_integer_sample(&metric::JOURNAL_SNAPSHOT_BYTES, &[], files.snapshot_bytes);
    page.add_sample(&metric::JOURNAL_SNAPSHOT_TIME, &[], files.snapshot_time.as_secs_f64());
    page.add_integer_sample(&metric::JOURNAL_TROUBLE, &[], u64::from(files.trouble.is_some()));
    page.add_integer_sample(&metric::JOURNAL_LOST, &[], files.lost_records);
    page.add_integer_sample(&metric::JOURNAL_REFUSED, &[], refused);
    page.add_integer_sample(&metric::JOURNAL_RESTARTS, &[], restarts);
    page.add_integer_sample(&metric::JOURNAL_REPLAYED, &[], restored.inputs);
    let differs = restored.digest == DigestComparison::Different;
    page.add_integer_sample(&metric::JOURNAL_STATE_DIFFERS, &[], u64::from(differs));
    let connections = [("continued", restored.continued_connections), ("lost", restored.lost_connections)];
    for (outcome, count) in connections {
        page.add_integer_sample(&metric::JOURNAL_CONNECTIONS, &[outcome], count as u64);
    }
    page.add_sample(&metric::JOURNAL_REPLAY_TIME, &[], restored.took.as_secs_f64());
}
