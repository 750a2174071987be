//! The collective operations of a process: which were enqueued, which began on the GPU, which ended; and what NCCL's own
//! monitoring says of communicators.
//!
//! A *record* holds this for every communicator of the process. It is a file in shared memory, so another process can read it
//! while the process hangs, and after it was killed. The record's writer takes no lock, allocates nothing and makes no
//! system call but for the clock. The crate knows neither NCCL's tables nor the service. Begin at [`Record`], then
//! [`RecordSnapshot`].
//!
//! | file | owns |
//! | --- | --- |
//! | `collective_function.rs` | the functions, and the bytes that each moves over the links |
//! | `data_type.rs` | the types of elements |
//! | `layout.rs` | the layout of the shared memory |
//! | `operation_ring.rs` | the latest operations of a communicator |
//! | `record.rs` | the writer |
//! | `mapped_record.rs` | the memory of a record |
//! | `record_folder.rs` | the folder of records |
//! | `snapshot.rs` | the reader |
//! | `communicator_hash.rs` | the number by which all ranks know a communicator |
//! | `ras/` | the second source: what NCCL's own monitoring says |
//!
//! 1. Everything in the shared memory is an atomic number. A reader of another process may find any value there, and checks
//!    indices and lengths before it uses them.
//! 2. An [`OperationHandle`] is a number, never an address. A handle of an operation that is no longer in the ring has no effect.
//! 3. The collectives of a communicator are numbered from 0 in the order in which the process enqueued them. Programs that
//!    agree have the same function, type, count and root at each number, on every rank; [`Collective::chain`] compares them.
#![warn(clippy::too_many_lines)]

mod collective_function;
mod communicator_hash;
mod data_type;
mod layout;
mod mapped_record;
mod operation_ring;
pub mod ras;
mod record;
mod record_folder;
mod snapshot;

pub use collective_function::CollectiveFunction;
pub use communicator_hash::{UNIQUE_ID_BYTES, clique_name, communicator_hash, parse_clique_name};
pub use data_type::DataType;
pub use layout::{COMMUNICATORS_MAX, LAYOUT_VERSION};
pub use mapped_record::RecordError;
pub use operation_ring::{COLLECTIVES_KEPT, Collective, OperationHandle};
pub use record::{NewCommunicator, Record};
pub use record_folder::{RecordFolder, StoredRecord};
pub use snapshot::{CommunicatorSnapshot, FunctionTotals, OperationSnapshot, RecordSnapshot};

/// Returns the nanoseconds of the host's coarse monotonic clock, in which records count. It moves every 1 to 4 ms, and costs a
/// tenth of the fine one: what records are read for takes seconds.
#[must_use]
#[inline]
pub fn monotonic_nanos() -> u64 {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::MonotonicCoarse);
    now.tv_sec.unsigned_abs() * 1_000_000_000 + now.tv_nsec.unsigned_abs()
}
