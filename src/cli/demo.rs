//! Implements `muster demo`: runs a server and four workers. The demo kills the workers in turn, one at a time, and
//! starts each of them again.
//!
//! `demo/rounds.rs` controls the sequence, `demo/workers.rs` runs the workers, and `demo/record.rs` decides whether
//! the demo succeeded. Begin at `run`, then `run_demo`.

mod record;
mod rounds;
mod workers;

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context as _, Result};
use clap::Args;

use super::local_server::{parse_duration_or_seconds, parse_loopback_address, start_local_server};
use super::server::RunningServer;
use super::stop_signals::StopSignals;
use super::{allocator, connection_limits};
use crate::coordination::{JobName, TaskId};
use crate::telemetry::log::{self, LogFormat};
use record::DemoRecord;
use rounds::{Demo, print_line};
use workers::{HEARTBEAT_TIMEOUT, WORKERS, WorkerProcesses};

/// The time that the service has to stop.
const STOP_TIMEOUT: Duration = Duration::from_secs(1);

/// Run a demo: a service, four workers, buffers that move, losses and returns
///
/// Starts a service with its pages, at the usual ports if they are free, and four workers of a recoverable
/// job. They register, meet at barriers, move buffers to one another, reshard an array, and check every byte.
/// Then the demo kills one of them, the others continue without it, and it comes back. This repeats until
/// Ctrl-C or the time given by --for. It needs nothing but this program. Operators may exclude workers,
/// readmit them and drain the job meanwhile: the demo adapts to it.
#[derive(Debug, Args)]
pub struct Arguments {
    /// End after about this time, with status 0 only if every content was right and every step held; steps
    /// may fail while a worker is away that the demo itself has killed
    #[arg(long = "for", value_name = "SECONDS", value_parser = parse_duration_or_seconds)]
    length: Option<Duration>,

    /// The pause between two steps of the workers
    #[arg(long, value_name = "DURATION", default_value = "500ms", value_parser = parse_duration_or_seconds)]
    pause: Duration,

    /// The address for workers, on this machine; port 0 picks a free one [default: 127.0.0.1:8476 if it is
    /// free]
    #[arg(long, value_name = "IP:PORT", value_parser = parse_loopback_address)]
    grpc: Option<SocketAddr>,

    /// The address of the pages, on this machine; port 0 picks a free one [default: 127.0.0.1:8477 if it is
    /// free]
    #[arg(long, value_name = "IP:PORT", value_parser = parse_loopback_address)]
    http: Option<SocketAddr>,
}

/// Runs the subcommand.
pub fn run(arguments: &Arguments) -> Result<ExitCode> {
    log::start_logging("error", LogFormat::Human).map_err(anyhow::Error::msg)?;
    connection_limits::raise_open_file_limit();
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build()?;
    allocator::configure_allocator_and_start_trimming(runtime.handle());
    // On this thread, which lives as long as the process: children are tied to the thread that started them.
    let code = runtime.block_on(run_demo(arguments));
    runtime.shutdown_background();
    code
}

async fn start_service(arguments: &Arguments) -> Result<RunningServer> {
    let flags = BTreeMap::from([
        ("recoverable", true.to_string()),
        ("heartbeat-timeout", HEARTBEAT_TIMEOUT.to_owned()),
    ]);
    let name: JobName = JobName::DEFAULT.parse().map_err(anyhow::Error::msg)?;
    start_local_server([arguments.grpc, arguments.http], &name, WORKERS, &flags).await
}

async fn run_demo(arguments: &Arguments) -> Result<ExitCode> {
    let mut stops = StopSignals::listen()?;
    let server = start_service(arguments).await?;
    let http = server.server_info().http;
    let name: JobName = JobName::DEFAULT.parse().map_err(anyhow::Error::msg)?;
    let service = server
        .server_info()
        .coordinator_address(&name, Some("127.0.0.1"))
        .context("the job is not served")?;
    print_line(&format!("Muster demo: a service, and {WORKERS} workers that move buffers to one another"))?;
    print_line(&format!("  look at  http://{http}/"))?;
    print_line(&format!("  or with  muster status --server http://{http} --watch"))?;
    print_line("  end with Ctrl-C")?;
    let engine = Arc::clone(server.engine());
    let excluded = move |task: u32| {
        let view = engine.read(|core, now| core.job_view(core.job_named(JobName::DEFAULT)?, now));
        let task = TaskId(task as i32);
        view.is_some_and(|view| view.run.tasks.iter().any(|of| of.task == task && of.excluded.is_some()))
    };
    let engine = Arc::clone(server.engine());
    let drained = move || {
        let view = engine.read(|core, now| core.job_view(core.job_named(JobName::DEFAULT)?, now));
        view.filter(|view| view.run.preemption.is_some()).map(|view| view.run.number.0)
    };
    let workers = WorkerProcesses::new(service, arguments.pause)?;
    let mut demo = Demo::new(workers, Box::new(excluded), Box::new(drained));
    let ended = tokio::select! {
        played = demo.run_rounds(arguments.length) => played.map(|()| None),
        stop = stops.next() => Ok(Some(stop)),
    };
    let left = demo.end_workers().await;
    server.stop(STOP_TIMEOUT).await;
    let verdict = match (ended, left) {
        (Err(error), _) | (Ok(None), Err(error)) => Err(error),
        (Ok(stop), _) => Ok(stop),
    };
    let DemoRecord { steps, resharded, checked, losses, .. } = &demo.record;
    print_line(&format!(
        "{steps} steps, {resharded} of them with an array resharded, {checked} buffers checked byte for byte, {losses} \
         worker(s) lost and taken back"
    ))?;
    match verdict {
        Ok(None) => {
            let all = WORKERS as usize;
            print_line(
                &demo.record.verdict(all - demo.out.len().min(all), all).map_err(anyhow::Error::msg)?,
            )?;
            Ok(ExitCode::SUCCESS)
        }
        Ok(Some(stop)) => Ok(stop.exit_code()),
        Err(error) => Err(error),
    }
}
