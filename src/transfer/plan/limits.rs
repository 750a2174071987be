//! The version of plans, and the bounds of plans and descriptions.
//!
//! The code that reads a value checks it against its bound. Begin at [`PLAN_VERSION`].

/// The version of the rules by which plans are made, and of their text. Two programs of the same version make
/// the same plans.
pub const PLAN_VERSION: u64 = 2;
/// The most dimensions of an array.
pub const MAX_RANK: usize = 32;
/// The most axes of a mesh.
pub const MAX_AXES: usize = 32;
/// The most devices of one mesh.
pub const MAX_DEVICES: usize = 65_536;
/// The most devices of a placement.
pub const MAX_PLACED: usize = 4 * MAX_DEVICES;
/// The most bytes of the name of an axis or of a host.
pub const MAX_NAME: usize = 256;
/// The most steps of a plan: as many as those of an all-to-all exchange among 8,192 devices.
pub const MAX_STEPS: u64 = 1 << 26;
/// The most bytes of all destination shards together, copies included.
pub const MAX_BYTES: u64 = 1 << 62;
/// The most bytes of a description as JSON.
pub const MAX_DESCRIPTION_TEXT: usize = 64 << 20;
/// The most bytes of a plan as JSON.
pub const MAX_PLAN_TEXT: usize = 512 << 20;
