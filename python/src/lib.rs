//! The extension module `muster._native`: the parts of the library `muster` that the Python package uses.
//!
//! The module is thin: it has no rule of coordination, and no code that could be written in Python. The package
//! around it (`python/muster/`) has the public names and their documentation. Begin at `agent.rs` and `transfer.rs`.
//!
//! | file | what it does |
//! | --- | --- |
//! | `wait.rs` | the runtime, and how Python threads wait: without the GIL, ended by Ctrl-C |
//! | `errors.rs` | errors of the library as exceptions of `muster.errors` |
//! | `cluster_env.rs` | the task and the identity of this process; which tasks have registered |
//! | `agent.rs` | the native worker |
//! | `epoch.rs` | the service as the members of an epoch use it: task states, keys, the end of collectives |
//! | `gloo.rs` | ends the collectives of this process that run over gloo |
//! | `transfer.rs` | the transfer engine of a task, and transfers in flight |
//! | `launch_request.rs` | converts launch requests of the Python code to transfers of the engine |
//! | `reshard.rs` | arrays that change their sharding across processes |
//! | `command.rs` | the command line |
//! | crate `muster-nccl-profiler` | NCCL's profiler plug-in: this library has its tables |
//! | `buffer.rs`, `buffer_protocol.rs`, `dlpack.rs` | memory of the transfer engine that Python uses as arrays |
//! | `source.rs`, `array_shape.rs` | memory of arrays that transfers read |
//! | `lent_memory.rs` | the thread that returns such memory to its library |
//! | `target.rs` | memory of other objects that transfers write |
//! | `process_owned.rs` | values that a forked child must not use, such as memory and prepared transfers |
//! | `definition.rs` | events that complete when arrays of JAX are defined |
#![warn(clippy::too_many_lines)]

mod agent;
mod cluster_env;
mod command;
mod epoch;
mod errors;
mod gloo;
mod launch_request;
mod reshard;
mod transfer;
mod wait;

mod array_shape;
mod buffer;
mod buffer_protocol;
mod definition;
mod dlpack;
mod lent_memory;
mod process_owned;
mod source;
mod target;

// NCCL finds the plug-in's tables in this library.
use muster_nccl_profiler as _;
use pyo3::prelude::*;

#[pymodule]
fn _native(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add("__version__", env!("CARGO_PKG_VERSION"))?;
    module.add_class::<agent::Agent>()?;
    module.add_class::<epoch::EpochClient>()?;
    module.add_class::<transfer::Engine>()?;
    module.add_class::<transfer::Prepared>()?;
    module.add_class::<transfer::Reserved>()?;
    module.add_class::<transfer::Transfer>()?;
    module.add_function(wrap_pyfunction!(command::run_command_and_exit, module)?)?;
    module.add_function(wrap_pyfunction!(cluster_env::query_admission_refusal, module)?)?;
    module.add_function(wrap_pyfunction!(cluster_env::claim_place, module)?)?;
    module.add_function(wrap_pyfunction!(cluster_env::find_place, module)?)?;
    module.add_function(wrap_pyfunction!(cluster_env::process_identity, module)?)?;
    module.add_function(wrap_pyfunction!(cluster_env::process_identity_key, module)?)?;
    module.add_function(wrap_pyfunction!(cluster_env::list_task_presences, module)?)?;

    module.add("Buffer", buffer_protocol::buffer_class(module.py())?)?;
    module.add_class::<source::Source>()?;
    module.add_class::<target::Target>()?;
    module.add_class::<definition::DefinitionEvent>()?;
    module.add_class::<definition::EventQueue>()?;
    module.add_class::<definition::Token>()?;
    module.add_function(wrap_pyfunction!(array_shape::check_dtype_supported, module)?)?;
    module.add_function(wrap_pyfunction!(definition::is_ready, module)?)?;

    Ok(())
}
