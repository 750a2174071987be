//! Detects that the journal cannot be written, so that the service refuses changes of every job.
//!
//! Begin at `detect`.

use super::detector::{Detection, Detector, DetectorInput, Severity};

pub(super) static DETECTOR: Detector = Detector {
    id: "journal-not-written",
    title: "The journal cannot be written",
    severity: Severity::Critical,
    means: "The service cannot record changes, because the disk of its journal is full or reports errors. It refuses them: no task \
            can register, arrive at a barrier or write a key. Heartbeats and reads go on, and no task fails.",
    advice: "Make room on the file system of --data-dir. The service goes on by itself when the journal can be written again.",
    detect,
};

fn detect(DetectorInput { job: seen, journal_trouble, .. }: DetectorInput<'_>) -> Option<Detection> {
    let why = journal_trouble?;
    Some(Detection::new(format!("changes are refused: {why}"), seen.seen_at, Vec::new()))
}
