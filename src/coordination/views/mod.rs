//! The read models: plain data that is computed on request for the REST API, the pages, the command line, metrics
//! and detectors.
//!
//! Views are made from a copy of the state and change nothing. No rule reads a view. Each file has the types of one
//! subject and the functions that create them. Begin at [`JobReader`]; metrics and detectors begin at
//! [`JobObservation`].

mod barrier;
mod device_comparison;
mod devices;
mod exclusion;
mod host_assignment;
mod hosts;
mod job;
mod job_in_run;
mod observation;
mod preemption;
mod run;
mod run_comparison;
mod store;
mod task;
mod task_owners;
mod task_state;

pub use barrier::{BarrierView, LiveSetRequestView};
pub use device_comparison::{DeviceChange, DeviceComparison, DeviceIdentity, DevicePlaceComparison};
pub use devices::decode_topology_values as decode_devices;
pub use exclusion::ExclusionView;
pub use host_assignment::{HostAssignment, HostIdSource, HostOfTasks, HostOrTask};
pub use hosts::{HostCounts, HostLateness, HostState, HostView};
pub use job::{CurrentIncarnation, JobReader, JobSummary, JobView, TaskIncarnations};
pub use job_in_run::{JobInRun, RunDetail};
pub use observation::*;
pub use preemption::{PREEMPTION_BARRIER, PreemptionView, is_preemption_barrier};
pub use run::{LiveTask, LiveTasksView, RunListItem, RunView};
pub use run_comparison::{ComparedHost, ComparedLateness, ComparedTask, RunComparison};
pub use store::{KeyEntry, StoredValue};
pub use task::{IncarnationView, KeyWait, TaskExclusion, TaskView};
pub use task_owners::{ClaimantView, TaskOwnerView, TaskOwnersView};
pub use task_state::{TaskCounts, TaskPhase, TaskState, barrier_label};
