//! A `muster worker` of a server under test.

use crate::process::{Running, muster};
use crate::web::Server;

/// A worker of the job `default`, with these further arguments.
pub fn worker(server: &Server, task: u32, arguments: &[&str]) -> Running {
    let task = task.to_string();
    let mut command = muster(["worker", "--service", &server.grpc, "--task", &task]);
    for (name, _) in std::env::vars_os() {
        let text = name.to_string_lossy();
        if ["JAX_", "SLURM_", "OMPI_", "JOB", "KUBERNETES_"].iter().any(|start| text.starts_with(start)) {
            command.env_remove(name);
        }
    }
    Running::start(command.args(arguments))
}

/// One that steps with the others.
pub fn stepping(server: &Server, task: u32) -> Running {
    worker(server, task, &["--program", "exercise", "--pause", "50ms", "--bytes-max", "200000"])
}
