//! The changes of a sender that the log of a kept connection does not have yet ([`SenderChanges`]).

use super::frame::StreamId;

/// The changes since the log was written. A stream may be named several times.
#[derive(Debug, Default)]
pub(crate) struct SenderChanges {
    /// The streams whose send windows the peer has changed.
    pub(crate) windows: Vec<StreamId>,
    /// Whether a setting has changed all send windows.
    pub(crate) all_windows: bool,
    /// The streams whose waiting frames have changed.
    pub(crate) queues: Vec<StreamId>,
}
