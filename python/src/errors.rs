//! Turns errors of the Rust library into exceptions of `muster.errors`, whose messages say what to do next.
//!
//! Begin at [`agent_error`].

use muster::agent::AgentError;
use muster::agent::cluster_env::ClusterEnvError;
use muster::transfer::{MemoryError, PeerJob, PrepareError, TransferError};
use pyo3::prelude::*;
use pyo3::types::PyDict;

/// An attribute of an exception.
pub type ExceptionAttribute<'a> = (&'a str, &'a str);

/// Returns an exception of this class of `muster.errors`.
pub fn new_exception(
    py: Python<'_>,
    class: &str,
    message: &str,
    attributes: &[ExceptionAttribute<'_>],
) -> PyErr {
    let made = || {
        let keywords = PyDict::new(py);
        for (name, value) in attributes {
            keywords.set_item(name, value)?;
        }
        py.import("muster.errors")?.getattr(class)?.call((message,), Some(&keywords))
    };
    match made() {
        Ok(error) => PyErr::from_value(error),
        Err(error) => error,
    }
}

/// Returns the exception for an error of an agent.
pub fn agent_error(py: Python<'_>, error: &AgentError) -> PyErr {
    let text = replace_flags_by_python_arguments(&error.to_string());
    match error {
        AgentError::ClusterEnv(error) => cluster_env_error(py, error),
        AgentError::Settings(_) => new_exception(py, "SettingsError", &text, &[]),
        AgentError::Tls(_) => {
            let next = "check the paths and contents of ca, cert and key";
            new_exception(py, "SettingsError", &format!("{text}; {next}"), &[])
        }
        AgentError::Unreachable { service, .. } => {
            let next = "start it (`muster serve`), or correct service= or JAX_COORDINATOR_ADDRESS";
            new_exception(py, "ServiceUnreachable", &format!("{text}; {next}"), &[("service", service)])
        }
        AgentError::TimedOut { .. } => {
            let next =
                "`muster status` shows which tasks are missing or waiting; a longer timeout waits longer";
            new_exception(py, "Deadline", &format!("{text}; {next}"), &[])
        }
        AgentError::NoTask { .. } | AgentError::IncompleteLiveSet { .. } => {
            new_exception(py, "Deadline", &text, &[])
        }
        AgentError::PeerJobRefused { job, why } | AgentError::NoSuchPeerJob { job, why } => {
            peer_job_refused(py, *job, why)
        }
        AgentError::EnginesMissing { .. } => {
            let next = "call muster.transfer.attach() in every process, or wait longer; `muster status` shows the tasks";
            new_exception(py, "Deadline", &format!("{} {next}", text.trim_end()), &[])
        }
        AgentError::Refused { code, .. } => {
            let name = grpc_status_name(*code);
            let class = if name == "DEADLINE_EXCEEDED" { "Deadline" } else { "Refused" };
            let text = match advice_for_grpc_code(&name) {
                Some(next) => format!("{text}; {next}"),
                None => text,
            };
            let code: &[ExceptionAttribute<'_>] = if class == "Refused" { &[("code", &name)] } else { &[] };
            new_exception(py, class, &text, code)
        }
        AgentError::RunChanged { .. } | AgentError::LifeEnded { .. } | AgentError::Ended { .. } => {
            let next = "this Agent is of no more use: join again with a new one";
            new_exception(py, "StaleIncarnation", &format!("{text}; {next}"), &[])
        }
        _ => new_exception(py, "MusterError", &text, &[]),
    }
}

/// Returns the exception for a transfer that failed.
pub fn transfer_error(py: Python<'_>, error: &TransferError) -> PyErr {
    const SEE: &str = "`muster status` shows whether the peer lives";
    let (class, next) = match error {
        TransferError::PeerDead { .. } | TransferError::StaleIncarnation { .. } => {
            let class =
                if matches!(error, TransferError::PeerDead { .. }) { "PeerDead" } else { "StaleIncarnation" };
            (class, "transfer again once the task is back and has attached, or leave it out")
        }
        TransferError::Cancelled { .. } => ("Cancelled", "transfer again if it is still wanted"),
        TransferError::Deadline { .. } => {
            ("Deadline", "see whether the peer has launched the same transfer; a longer timeout waits longer")
        }
        TransferError::Stalled { .. } => ("Stalled", SEE),
        TransferError::LayoutMismatch { .. } => {
            ("LayoutMismatch", "give both sides arrays of one shape, dtype and division into shards")
        }
        TransferError::OrderMismatch { .. } => {
            ("OrderMismatch", "threads that launch independently use channels of their own")
        }
        TransferError::JobRefused { job, why } => return peer_job_refused(py, *job, why),
        TransferError::Memory(error) => return memory_error(py, error),
        TransferError::Prepare(refused) => match &**refused {
            PrepareError::Memory(error) => return memory_error(py, error),
            PrepareError::UnknownDevice(_) | PrepareError::UnknownPeerDevice { .. } => ("PeerDead", SEE),
            _ => ("SettingsError", "nothing has moved"),
        },
        TransferError::Closed => ("StaleIncarnation", "attach again in a new process"),
        _ => ("TransferError", SEE),
    };
    let text = replace_flags_by_python_arguments(&format!("{error}; {next}"));
    let reason: &[ExceptionAttribute<'_>] = match class {
        "Deadline" | "StaleIncarnation" | "SettingsError" => &[],
        _ => &[("reason", error.reason_label())],
    };
    new_exception(py, class, &text, reason)
}

/// Returns the exception for a job with which this one may not exchange transfers. The message names a command of `muster`.
fn peer_job_refused(py: Python<'_>, job: PeerJob, why: &str) -> PyErr {
    new_exception(py, "PeerJobRefused", why, &[("job", job.name().unwrap_or_default())])
}

/// Returns the exception for memory that cannot be used.
pub fn memory_error(py: Python<'_>, error: &MemoryError) -> PyErr {
    let next = match error {
        MemoryError::Exported { exports } => {
            return new_exception(
                py,
                "ArrayMemoryError",
                &format!(
                    "the Buffer has {exports} living export{}, and nothing may change what they see: delete the arrays and \
                     views of it (`del`, `array.delete()`), or receive into another Buffer",
                    if *exports == 1 { "" } else { "s" }
                ),
                &[],
            );
        }
        MemoryError::Busy { .. } => "the Buffer can be used again when the transfer is over",
        MemoryError::ReadOnly => "receive into a muster.empty(shape, dtype)",
        MemoryError::Full { .. } | MemoryError::System { .. } => {
            "delete arrays and Buffers that are not needed"
        }
        _ => "copy it first",
    };
    new_exception(py, "ArrayMemoryError", &format!("{error}; {next}"), &[])
}

/// Returns the exception for a place that is unknown.
pub fn cluster_env_error(py: Python<'_>, error: &ClusterEnvError) -> PyErr {
    new_exception(py, "ClusterEnvError", &replace_flags_by_python_arguments(&error.to_string()), &[])
}

/// Replaces the flags of the command line in a message by the arguments of the package.
fn replace_flags_by_python_arguments(text: &str) -> String {
    const ARGUMENTS: [(&str, &str); 15] = [
        ("--host-id", "host_id="),
        ("--tasks", "num_processes="),
        ("--task", "process_id="),
        ("--service", "service="),
        ("--token-file", "token_file="),
        ("--transfer-cert", "cert"),
        ("--transfer-key", "key"),
        ("--transfer-ca", "tls=muster.Tls(ca)"),
        ("--insecure-transfers", "insecure=True"),
        ("--listen", "listen="),
        ("--advertise", "advertise="),
        ("--transfer", "transfer"),
        ("--ca", "tls=muster.Tls(ca=...)"),
        ("--cert", "cert="),
        ("--key", "key="),
    ];
    ARGUMENTS.iter().fold(text.to_owned(), |text, (flag, argument)| text.replace(flag, argument))
}

/// Returns the name of a status, as gRPC writes it.
fn grpc_status_name(code: impl std::fmt::Debug) -> String {
    let mut name = String::new();
    for letter in format!("{code:?}").chars() {
        if letter.is_ascii_uppercase() && !name.is_empty() {
            name.push('_');
        }
        name.push(letter.to_ascii_uppercase());
    }
    name
}

/// Returns the advice for a refusal, unless the service's message has it.
fn advice_for_grpc_code(code: &str) -> Option<&'static str> {
    Some(match code {
        "ALREADY_EXISTS" => "write it with overwrite=True, or read what is there",
        "NOT_FOUND" => "wait for it with get(), or check the name",
        "RESOURCE_EXHAUSTED" => "the setting that bounds it is named by `muster config print`",
        "DEADLINE_EXCEEDED" => "`muster status` shows which tasks are missing; a longer timeout waits longer",
        "CANCELLED" | "ABORTED" => "`muster events` shows the cause",
        _ => return None,
    })
}
