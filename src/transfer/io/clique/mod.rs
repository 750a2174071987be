//! The exchange of bytes between the GPUs of two engines through a clique of NCCL.
//!
//! NCCL matches the operations of two members in their order, so both sides run the same batches in one order. The side with
//! the lower task *leads*: it takes the pieces that it wants to receive and those that the other side asks for, puts what is ready
//! into the next batch, tells the other side of the batch by a frame, and runs it. Frames arrive in order, so the other side runs
//! the same batches in the same order. Both directions share batches.
//!
//! A piece that both sides' lists and buffers do not back does not exist: a receiver takes part only in pieces that it asked for,
//! and a sender only in pieces of launches that are matched and whose bytes are defined. If a launch is cancelled after its pieces were put into a
//! batch, its side takes part with other memory, so that the clique survives. Therefore a sender tells of
//! each batch which pieces have the bytes of launches, and a receiver counts no others.
//!
//! The guards of a launch are held until its batch has ended, or the clique has and nothing can move any more. If a
//! clique fails, the exchange is over: receives of which nothing is in a batch are pushed, as are those of later launches.
//! Begin at [`CliqueExchange::fetch_or_request_push`].
//!
//! | file | what it is responsible for |
//! | --- | --- |
//! | `host.rs` | the session, as the exchange calls it |
//! | `fetch.rs` | the receives of one launch, cut into pieces |
//! | `joined.rs` | a clique in use, and the memory with which cancelled launches take part |
//! | `batches.rs` | the batches that were run, and which of their pieces count |
//! | `exchange.rs` | the messages of both sides, and the beginning and the end of cliques |

mod batches;
mod exchange;
mod fetch;
mod host;
mod joined;

pub use exchange::CliqueExchange;
pub use host::CliqueHost;
