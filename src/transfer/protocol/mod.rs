//! The protocol of two engines, without IO.
//!
//! It reads no socket and no clock. Begin at [`link`].

pub mod frame;
pub mod hello;
pub mod link;
pub mod proof;
