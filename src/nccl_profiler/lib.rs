//! The profiler plug-in that an unmodified program loads into NCCL by `NCCL_PROFILER_PLUGIN=…/libmuster_nccl_profiler.so`.
//!
//! It records how far each communicator of the process has come (crate `muster-collectives`), and a thread of its own reports
//! that to the service (`muster::agent::CollectiveReporter`). It never reads memory through a handle that NCCL gives back, and
//! never makes NCCL wait: the calls of NCCL take no lock, allocate nothing and make no system call but for the clock. Only the
//! opening and the end of a communicator take a lock. Begin at [`tables`], then [`plugin_state::PluginState`].
//!
//! | file | owns |
//! | --- | --- |
//! | `abi.rs` | NCCL's tables and descriptors |
//! | `tables.rs` | the exported tables and their functions |
//! | `plugin_state.rs` | the record of the process, and the events that NCCL is asked for |
//!
//! | variable | meaning |
//! | --- | --- |
//! | `MUSTER_COORDINATOR_ADDRESS`, `JAX_COORDINATOR_ADDRESS`, … | the service, as for every task of a job; without one the process only writes its record |
//! | `MUSTER_JOB` | the job, if the address serves several |
//! | `MUSTER_CA`, `MUSTER_CERT`, `MUSTER_KEY` | the certificates for TLS |
//! | `MUSTER_NCCL_TIMING` | `auto`: times on the GPU while the service asks for them (default); `always`; `never` |
//! | `MUSTER_COLLECTIVES_DIR` | the folder of records, `/dev/shm/muster-collectives-UID` by default |

pub mod abi;
mod plugin_state;
pub mod tables;
