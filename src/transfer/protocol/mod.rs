//! What two engines say to each other, without IO.

pub mod frame;
pub mod hello;
pub mod link;
pub mod proof;
