//! The protocol of two engines: its frames, its handshake messages, and the state machine of a link. This layer does
//! no IO and reads no clock.
//!
//! Begin at [`link`].

pub mod clique_message;
pub mod frame;
pub mod hello;
pub mod link;
pub mod proof;
