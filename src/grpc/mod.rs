//! The gRPC port: the coordination service in both wire generations, calls about peer jobs, claims of task ids,
//! transfer reports, stacks of workers, health and reflection.
//!
//! The port contains no rule of coordination. It translates a message to a
//! [`Request`](crate::coordination::Request) for the driver ([`Engine`](crate::engine::Engine)), and the outcome to a
//! reply. `generation_a.rs` and `generation_c.rs` have the tables of methods. Begin at `connection.rs` and
//! `call_table.rs`.
//!
//! A request passes these files in order:
//! 1. `listener.rs` accepts the connection.
//! 2. `transport_detection.rs` detects TLS or plaintext, and reads the HTTP/2 preface.
//! 3. `connection.rs` processes HTTP/2 in one tokio task.
//! 4. `call_table.rs` accepts or defers the request, and `job_resolver.rs` finds its job.
//! 5. `request_body.rs` receives the message, in memory that `body_memory.rs` grants.
//! 6. `generation_a.rs` or `generation_c.rs` decodes the message.
//! 7. `call_table/engine_calls.rs` passes the decoded call to the driver.
//!
//! The reply of a waiting call arrives through `mailbox.rs`. `responses.rs` sends every reply, and `reply_encoder.rs`
//! or `status.rs` encodes it. Every path by which bytes arrive has bounds; `ARCHITECTURE.md` has a table of them.

mod auxiliary;
mod body_memory;
mod cached_task_set;
mod call_counts;
mod call_table;
mod collectives_service;
mod connection;
mod connection_keeping;
mod connection_settings;
mod connection_socket;
mod continued_connections;
mod deadlines;
mod decoded_call;
mod dialect;
mod encoded_replies;
mod frame;
#[cfg(any(test, feature = "fuzzing"))]
pub(crate) mod fuzzing;
mod generation_a;
mod generation_c;
mod gzip;
mod job_resolver;
mod kept_log;
mod limits;
mod lingering_close;
mod listener;
mod mailbox;
mod metrics;
mod open_connections;
mod peer_jobs_service;
mod peer_progress;
mod prefault;
mod reply_encoder;
mod request_body;
mod request_meta;
mod responses;
mod server;
mod slot_table;
mod stacks_service;
mod status;
mod task_claims_service;
mod task_set_cache;
#[cfg(test)]
mod tests;
mod thread_buffers;
mod transfers_service;
mod transport_detection;

pub use call_counts::{CallCount, CallDurations, ENDINGS};
pub use connection_keeping::ConnectionKeeper;
pub use continued_connections::ContinuedConnections;
pub use job_resolver::ListenerJobRule;
pub use kept_log::KEPT_CONNECTIONS_VERSION;
pub use limits::GrpcLimits;
pub use listener::bind_listener;
pub use server::{GrpcServer, ServerCounters};
