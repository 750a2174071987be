//! The layer that moves bytes: wires, lanes over them, rings of shared memory, and the threads that serve them.
//!
//! It decides nothing: sessions choose what is sent and where received bytes belong. Begin at [`lane`] and
//! [`wire`].

pub mod fetch;
pub mod lane;
pub(crate) mod pump;
pub mod reactor;
pub mod ring;
pub mod sys;
pub mod threads;
pub mod wire;
