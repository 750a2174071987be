//! Starts the server of a command that shows Muster at work on this machine, without access control: `muster demo` and
//! `muster simulate`.
//!
//! `server.rs` assembles the server. Begin at [`start_local_server`].

use std::collections::BTreeMap;
use std::net::{Ipv4Addr, SocketAddr};
use std::time::Duration;

use anyhow::Result;

use super::server::RunningServer;
use crate::config::{CommandLineConfig, JobSelection, ServerProfile, load_config, parse_address};
use crate::coordination::JobName;
use crate::text::parse_duration;

/// The preferred ports: gRPC and HTTP.
const PORTS: [u16; 2] = [8476, 8477];

/// Parses a loopback address: the server has no access control.
pub fn parse_loopback_address(text: &str) -> Result<SocketAddr, String> {
    let address = parse_address(text)?;
    if address.ip().is_loopback() {
        Ok(address)
    } else {
        Err("this server has no access control: use an address that only this machine reaches, such as 127.0.0.1:0"
            .into())
    }
}

/// Parses a duration, or a bare number of seconds.
pub fn parse_duration_or_seconds(text: &str) -> Result<Duration, String> {
    text.parse::<u32>()
        .map_or_else(|_| parse_duration(text), |seconds: u32| Ok(Duration::from_secs(seconds.into())))
}

/// Starts a server with one job. It listens at the addresses that are `given` for gRPC and HTTP, elsewhere at the
/// preferred ports or, if they are taken, at free ones. It ignores the environment of this process, so that the command
/// does the same everywhere.
pub async fn start_local_server(
    given: [Option<SocketAddr>; 2],
    job: &JobName,
    tasks: u32,
    flags: &BTreeMap<&'static str, String>,
) -> Result<RunningServer> {
    start_at_free_ports(given, async |addresses, _| start_at(addresses, job, tasks, flags).await).await
}

/// Calls `start` with the addresses that are `given` for gRPC and HTTP, elsewhere with the preferred ports and, if that fails, with
/// free ones. `start` also learns whether it is called again if it fails.
pub async fn start_at_free_ports<T>(
    given: [Option<SocketAddr>; 2],
    start: impl AsyncFn([SocketAddr; 2], bool) -> Result<T>,
) -> Result<T> {
    let local = |port: u16| SocketAddr::from((Ipv4Addr::LOCALHOST, port));
    let at = |ports: [u16; 2]| [given[0].unwrap_or(local(ports[0])), given[1].unwrap_or(local(ports[1]))];
    let can_move = given.contains(&None);
    match start(at(PORTS), can_move).await {
        // The preferred ports are taken, so free ones are used in place of those that no flag gives.
        Err(_) if can_move => start(at([0, 0]), false).await,
        started => started,
    }
}

async fn start_at(
    [grpc, http]: [SocketAddr; 2],
    job: &JobName,
    tasks: u32,
    flags: &BTreeMap<&'static str, String>,
) -> Result<RunningServer> {
    let mut flags = flags.clone();
    flags.extend([("grpc", grpc.to_string()), ("http", http.to_string())]);
    let jobs = JobSelection::Only { name: job.clone(), tasks };
    let asked = CommandLineConfig { profile: ServerProfile::Launch, file: None, flags, jobs };
    RunningServer::start(&load_config(&asked, &|_| None)?).await
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_bare_number_is_seconds() {
        assert_eq!(parse_duration_or_seconds("20"), Ok(Duration::from_secs(20)));
        assert_eq!(parse_duration_or_seconds("500ms"), Ok(Duration::from_millis(500)));
        assert!(parse_duration_or_seconds("soon").is_err());
    }
}
