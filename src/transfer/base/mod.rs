//! The nouns that every layer speaks of, and the lock that they share. It knows no other layer.

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
