//! The gRPC port: the coordination service in both wire generations, health, reflection and transfer reports.
//!
//! It translates and contains no rule: a message becomes a [`Request`](crate::coordination::Request) for the
//! [`Engine`](crate::engine::Engine), and the outcome becomes a reply. Begin at `connection.rs` and
//! `call_table.rs`; `generation_a.rs` and `generation_c.rs` are tables of methods.
//!
//! A request passes `listener.rs` (accept), `transport_detection.rs` (TLS or plaintext, preface), `connection.rs` (one task
//! drives HTTP/2), `call_table.rs` (the calls of the connection), `job_route.rs` (the job), `request_body.rs` and `body_memory.rs`
//! (the message), a generation (decoding), and `call_table/engine_calls.rs` (the engine). A reply passes
//! `mailbox.rs`, `respond.rs`, and `reply_encoder.rs` or `status.rs` (encoding). Every path by which bytes arrive is
//! bounded; `ARCHITECTURE.md` has the table.

mod auxiliary;
mod body_memory;
mod call_counts;
mod call_table;
mod connection;
mod crc32;
mod deadlines;
mod decoded_call;
mod frame;
#[cfg(any(test, feature = "fuzzing"))]
pub(crate) mod fuzzing;
mod generation_a;
mod generation_c;
mod gzip;
mod job_route;
mod limits;
mod listener;
mod mailbox;
mod metrics;
mod peer_progress;
mod prefault;
mod reply_encoder;
mod request_body;
mod request_meta;
mod respond;
mod server;
mod slot_table;
mod status;
mod task_set_cache;
#[cfg(test)]
mod tests;
mod transfers_service;
mod transport_detection;

pub use call_counts::{CallCount, CallTimes, ENDINGS};
pub use job_route::Routing;
pub use limits::GrpcLimits;
pub use listener::bind;
pub use server::{Server, ServerCounters};
