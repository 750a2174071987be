//! The protocol of two engines. It does no IO: it reads neither sockets nor clocks.
//!
//! Begin at [`link`].

pub mod frame;
pub mod hello;
pub mod link;
pub mod proof;
