//! The profiler host: it loads the library that `NCCL_PROFILER_PLUGIN` names, and sends it the events of NCCL.
//!
//! | module | what it owns |
//! | --- | --- |
//! | `plugin` | the search for the library, its loading and unloading |
//! | `table` | the C tables of functions, and the versions of them that an NCCL knows |
//! | `context` | the plug-in of one communicator, from `init` to `finalize`, and the mask of the process |
//! | `descriptor` | the layouts of events |
//! | `calls` | the events of API calls: GroupApi, CollApi, P2pApi |
//! | `launch` | the events of launches and kernels: KernelLaunch, Group, Coll, P2p, KernelCh |
//! | `hash` | the number of a communicator |
//!
//! These rules come from the source of NCCL 2.27.7 and 2.30.7, and of the profiler of a later one, which has table v7.
//!
//! 1. The mask is one variable of the process. An operation reads it once, in its API call; all its events follow that
//!    value. The parents of an event come although they are not in the mask.
//! 2. A plug-in answers a start with a handle, or with null. Null has no stop and no state, and is the parent of children.
//!    NCCL before 2.28 starts no Coll and no P2p if Group has no handle.
//! 3. If a plug-in does not write the handle of a CollApi, its place still holds the handle of the thread's former CollApi.
//!    The handle of that place is stopped after every collective call, also while the mask asks for no CollApi: a stop can
//!    come again.
//! 4. Start and stop of Coll and P2p say that the operation is enqueued. They come on the thread that launches: the caller's,
//!    or NCCL's own if the communicator is non-blocking. Then GroupApi can be stopped before.
//! 5. KernelCh begins when the stream reaches the operation, and ends when the exchange is complete. It comes on the thread of
//!    the stream, once for each channel. An exchange that is revoked, aborted or failed has no end.
//! 6. A collective over one rank or without elements has no events. Coll events of AllGather and Broadcast count bytes, as
//!    `ncclInt8`.
//! 7. ProxyOp, ProxyStep, ProxyCtrl, NetPlugin, CeColl, CeSync, CeBatch and KernelPhase are never sent: no message uses a
//!    network, and kernels have no phases.
//! 8. *Stricter*: the bytes behind a descriptor of the plug-in's version are filled, and the clock of the GPU is not the
//!    host's.
//! 9. *More lenient*: if `init` fails, the plug-in gets no call for that communicator. NCCL goes on, without a context, if
//!    another communicator has loaded the plug-in.

mod calls;
mod context;
mod descriptor;
mod hash;
mod launch;
mod plugin;
mod table;

pub use calls::{finish_group_call, note_group_end, trace_call};
pub use context::ProfilerSlot;
pub use hash::communicator_hash;
pub use launch::{KernelEvents, LaunchEvents};

use std::ffi::c_int;

/// The name that a plug-in gives an event; 0 is null. The host never follows it.
type Handle = usize;

/// The profiler's state of one operation.
#[derive(Debug, Clone, Copy, Default)]
pub struct OperationTrace {
    /// The mask, as it was when the operation was called; 0 if the operation has no events.
    mask: c_int,
    /// The channels that the operation's event announces.
    channels: u8,
    /// The handle of the GroupApi event around the call.
    group_call: Handle,
    /// The handle of the CollApi or P2pApi event.
    call: Handle,
    /// The handle of the Coll or P2p event.
    task: Handle,
}
