//! The engine: the interface of programs, and the code that finds, makes and ends connections for them.
//!
//! | file | what it owns |
//! | --- | --- |
//! | `handle.rs`, `config.rs` | the engine as programs use it, and its configuration |
//! | `shared.rs` | the state that its threads share |
//! | `request.rs`, `check.rs`, `preparing.rs` | a request, until it is prepared |
//! | `prepared.rs`, `ticket.rs` | prepared transfers, and the place of a launch in the order |
//! | `cliques.rs`, `connections.rs` | the cache of connections, and their life |
//! | `dial.rs`, `accept.rs`, `connect.rs`, `mend.rs` | making and reconnecting connections and lanes |
//! | `handshake_limits.rs`, `path_backoff.rs`, `thread_pool.rs` | their bounds |
//! | `keeper.rs` | the thread that enforces limits |
//! | `session_host.rs` | the interface for connections |
//! | `resharding/` | the execution of plans |

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
