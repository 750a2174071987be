//! The measures that all pictures with rows share: the waterfall of barriers and the states of tasks over time.

/// The height of a row, in units of the picture.
pub(super) const ROW_HEIGHT: usize = 22;
/// The height of the area in a row.
pub(super) const AREA_HEIGHT: usize = 16;
