//! The transfer engine: the interface for programs, and the code that finds, makes and ends connections.
//!
//! | file | what it owns |
//! | --- | --- |
//! | `handle.rs`, `config.rs` | the engine as programs use it, and its configuration |
//! | `shared.rs` | the state that the engine's threads share |
//! | `prepare.rs`, `request_check.rs`, `prepare_future.rs` | a request, until it is prepared |
//! | `prepared_transfers.rs` | prepared transfers, and their launches |
//! | `reserved_launch_number.rs` | the number of a launch in the order of its channel |
//! | `reserved_launch.rs` | a launch that has its numbers before its transfers are named |
//! | `clique_cache.rs`, `connections.rs` | the cache of connections, and the requests that wait for one |
//! | `dial.rs`, `accept.rs`, `connect.rs` | new connections and lanes |
//! | `lane_reconnect.rs` | lost lanes, and the detection of dead peers |
//! | `handshake_limits.rs`, `thread_pool.rs` | the bounds on handshakes, and on threads that dial |
//! | `path_backoff.rs` | which paths to a peer have failed |
//! | `local_transfers.rs`, `local_launches.rs` | transfers within this task |
//! | `watchdog.rs` | the thread that enforces time limits |
//! | `session_host.rs` | the functions of the engine that connections call |
//! | `resharding/` | the execution of plans |
//!
//! Begin at [`handle::TransferEngine`].

mod accept;
pub mod clique_cache;
pub mod config;
mod connect;
mod connections;
mod dial;
pub mod handle;
mod handshake_limits;
mod lane_reconnect;
mod local_launches;
mod local_transfers;
mod path_backoff;
mod prepare;
pub mod prepare_future;
pub mod prepared_transfers;
mod request_check;
pub mod reserved_launch;
mod reserved_launch_number;
pub mod resharding;
mod session_host;
mod shared;
mod thread_pool;
mod watchdog;
