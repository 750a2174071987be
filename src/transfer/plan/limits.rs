//! The bounds of plans and descriptions.
//!
//! Each is checked where it is named.

/// The version of the rules by which plans are made, and of their text. Two programs make the same plans if it is the
/// same.
pub const PLAN_VERSION: u64 = 2;
/// The most dimensions of an array.
pub const MAX_RANK: usize = 32;
/// The most axes of a mesh.
pub const MAX_AXES: usize = 32;
/// The most devices of one mesh.
pub const MAX_DEVICES: usize = 65_536;
/// The most devices that a placement tells of.
pub const MAX_PLACED: usize = 4 * MAX_DEVICES;
/// The most bytes of the name of an axis or of a host.
pub const MAX_NAME: usize = 256;
/// The most steps of a plan. An all-to-all exchange among 8,192 devices has as many.
pub const MAX_STEPS: u64 = 1 << 26;
/// The most bytes that all destination shards have together, copies included.
pub const MAX_BYTES: u64 = 1 << 62;
/// The most bytes of a description as JSON.
pub const MAX_DESCRIPTION_TEXT: usize = 64 << 20;
/// The most bytes of a plan as JSON.
pub const MAX_PLAN_TEXT: usize = 512 << 20;
