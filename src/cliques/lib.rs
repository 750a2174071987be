//! Cliques of GPUs that send to one another through NCCL, which is loaded at run time.
//!
//! A *clique* is the set of members (task, incarnation, device) that share one communicator. One member, chosen by the caller, makes
//! an id ([`Nccl::new_id`]) and brings it to the others; then every process joins with its members ([`GpuCliqueCache::join`]). NCCL has
//! no failure detection on one host, no order of its own and no cancellation of an operation, so:
//!
//! | file | what it is responsible for |
//! | --- | --- |
//! | `library.rs` | NCCL's functions, found once per process |
//! | `error.rs` | why there is no NCCL, and why a clique has ended |
//! | `key.rs` | which members a clique has, and their ranks |
//! | `operation.rs` | what a batch is made of |
//! | `options.rs` | the limits of a clique, and how it ends |
//! | `clique.rs` | the state of a clique in this process, and its batches |
//! | `member.rs` | one member of this process: its communicator, stream and groups, and its end |
//! | `device_thread.rs` | the thread of a device, which makes all calls of NCCL for it but blocking starts and ends |
//! | `sync.rs` | locks |
//! | `cache.rs` | one clique for each key, and the end of all cliques of a lost member |
//!
//! Rules:
//!
//! 1. The operations of a batch are one group of each communicator. Groups begin in the order of [`GpuClique::run`]. The callers of all
//!    members give batches in one order: NCCL compares neither sizes nor order.
//! 2. Calls do not block, unless [`CliqueOptions::is_blocking`]: a start that waits for a member can be ended at any time.
//! 3. A batch has ended only when no operation of it can touch memory any more: its event has happened, or the clique was revoked or
//!    aborted and the stream is idle afterwards. Until then its listener is not called, however long that takes.
//! 4. A clique that has failed stays so. Another one with the same members needs a new id.
//! 5. No two threads use a communicator at the same time, except that an abort interrupts a blocking call.

mod cache;
mod clique;
mod device_thread;
mod error;
mod key;
mod library;
mod member;
mod operation;
mod options;
mod sync;

pub use cache::GpuCliqueCache;
pub use clique::GpuClique;
pub use error::{CliqueError, NcclError, NcclUnavailable};
pub use key::{CliqueMember, GpuCliqueKey, InvalidCliqueKey, MEMBERS_MAX};
pub use library::{CliqueId, Nccl};
pub use operation::{CliqueOperation, OperationDirection};
pub use options::{CliqueOptions, StopMethod};
