//! The wire edge: the coordination service as clients speak it, in both of its generations, over HTTP/2.
//!
//! It translates and nothing else. A request becomes a [`Request`](crate::coordination::Request), which
//! goes to the [`Engine`](crate::engine::Engine); the outcome becomes an answer.

mod answer;
mod auxiliary;
mod body;
mod call;
mod call_table;
mod checksum;
mod connection;
mod count;
mod deadlines;
mod frame;
#[cfg(any(test, feature = "fuzzing"))]
pub(crate) mod fuzzing;
mod generation_a;
mod generation_c;
mod greeting;
mod gzip;
mod head;
mod limits;
mod listener;
mod mailbox;
mod memory;
mod prefault;
mod reports;
mod respond;
mod route;
mod server;
mod sets;
mod slots;
mod status;
#[cfg(test)]
mod tests;
mod watched;

pub use count::{CallCount, CallTimes, ENDINGS};
pub use limits::Limits;
pub use listener::bind;
pub use route::Routing;
pub use server::{Figures, Server};
