//! The gRPC port: the coordination service in both wire generations, health, reflection and transfer reports.
//!
//! It translates and contains no rule: a message becomes a [`Request`](crate::coordination::Request) for the
//! [`Engine`](crate::engine::Engine), and the outcome becomes a reply. Begin at `connection.rs` and
//! `call_table.rs`; `generation_a.rs` and `generation_c.rs` are tables of methods.
//!
//! A request passes `listener.rs` (accept), `greeting.rs` (TLS or plaintext, preface), `connection.rs` (one task
//! drives HTTP/2), `call_table.rs` (the calls of the connection), `route.rs` (the job), `body.rs` and `memory.rs`
//! (the message), a generation (decoding), and `call_table/engine_calls.rs` (the engine). A reply passes
//! `mailbox.rs`, `respond.rs`, and `answer.rs` or `status.rs` (encoding). Every path by which bytes arrive is
//! bounded; `ARCHITECTURE.md` has the table.

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
pub use limits::GrpcLimits;
pub use listener::bind;
pub use route::Routing;
pub use server::{Server, ServerCounters};
