//! The transfer engine: moving the bytes of arrays between the devices of tasks. It takes what it needs to know of
//! tasks, hosts and devices as plain values, depends on no other room, and is usable as a library alone.
pub mod plan;
