//! The engine: the interface of programs, and how connections are found, made and ended for them.
//!
//! | file | what it has |
//! | --- | --- |
//! | `handle.rs`, `config.rs` | the engine as programs hold it, and how it is set up |
//! | `shared.rs` | what its threads share |
//! | `request.rs`, `check.rs`, `preparing.rs` | a request, until it is prepared |
//! | `prepared.rs`, `ticket.rs` | prepared transfers, and a launch's place in the order |
//! | `cliques.rs`, `connections.rs` | the cache of connections, and what becomes of each |
//! | `dial.rs`, `accept.rs`, `connect.rs`, `mend.rs` | how connections and lanes are made, and made anew |
//! | `handshake_limits.rs`, `path_backoff.rs`, `thread_pool.rs` | bounds of all that |
//! | `keeper.rs` | the thread that looks after limits |
//! | `session_host.rs` | what connections ask of their engine |
//! | `resharding.rs` | plans, carried out |

mod accept;
mod check;
pub mod cliques;
pub mod config;
mod connect;
mod connections;
mod dial;
pub mod handle;
mod handshake_limits;
mod keeper;
mod mend;
mod path_backoff;
pub mod prepared;
pub mod preparing;
mod request;
pub mod resharding;
mod session_host;
mod shared;
mod thread_pool;
mod ticket;
