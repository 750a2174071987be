//! Starts `muster worker` processes of a server under test.

use std::fmt::Display;
use std::process::Command;

use crate::harness::{MusterServer, Process, muster};

/// Starts a worker of the job `default` with these further arguments.
pub fn worker(server: &MusterServer, task: u32, arguments: &[&str]) -> Process {
    start_worker_at(server.grpc, task, arguments)
}

/// Starts a worker that finds the service at this address.
pub fn start_worker_at(service: impl Display, task: u32, arguments: &[&str]) -> Process {
    start_worker_command(muster(["worker"]), &service.to_string(), task, arguments)
}

/// Starts a worker on a host whose clock is off by this much, in the syntax of `faketime`: `+90s`.
pub fn start_worker_with_wrong_clock(server: &MusterServer, task: u32, off: &str) -> Process {
    // `faketime` is used only for the path of its library: a worker started by it would be its child, which
    // signals do not reach.
    let asked = Command::new("faketime").args(["-m", "-f", off, "printenv", "LD_PRELOAD"]).output();
    let asked = asked.unwrap_or_else(|error| {
        panic!(
            "faketime cannot be run ({error}): install it with `apt-get install faketime`, as tests/run does"
        )
    });
    let mut command = muster(["worker"]);
    command.env("LD_PRELOAD", String::from_utf8_lossy(&asked.stdout).trim());
    command.env("FAKETIME", off).env("FAKETIME_DONT_FAKE_MONOTONIC", "1");
    start_worker_command(command, &server.grpc.to_string(), task, &[])
}

fn start_worker_command(mut command: Command, service: &str, task: u32, arguments: &[&str]) -> Process {
    let task = task.to_string();
    command.args(["--service", service, "--task", &task]);
    for (name, _) in std::env::vars_os() {
        let text = name.to_string_lossy();
        if ["JAX_", "SLURM_", "OMPI_", "JOB", "KUBERNETES_"].iter().any(|start| text.starts_with(start)) {
            command.env_remove(name);
        }
    }
    Process::start(command.args(arguments))
}

/// Starts a worker that steps with the others.
pub fn start_stepping_worker(server: &MusterServer, task: u32) -> Process {
    worker(server, task, &["--program", "exercise", "--pause", "50ms", "--bytes-max", "200000"])
}
