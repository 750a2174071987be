//! The types that every layer uses, and the lock that they share. It imports no other layer.

pub mod counts;
pub mod error;
pub mod event;
pub mod identity;
pub mod key;
pub mod layout;
pub mod meters;
pub mod network;
pub mod sync;
pub mod transport;
