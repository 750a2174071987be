//! Implements `muster demo`: runs a server and four workers. The demo kills the workers in turn, one at a time, and
//! starts each of them again.
//!
//! `demo/rounds.rs` controls the sequence, `demo/workers.rs` runs the workers, and `demo/record.rs` decides whether
//! the demo succeeded. Begin at `run`, then `run_demo`.

mod demo_output;
mod record;
mod rounds;
mod service;
mod workers;

use std::net::SocketAddr;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Context as _, Result};
use clap::Args;

use super::local_server::{parse_duration_or_seconds, parse_loopback_address};
use super::stop_signals::StopSignals;
use super::{allocator, connection_limits};
use crate::coordination::TaskId;
use crate::telemetry::log::{self, LogFormat};
use demo_output::{DemoOutcome, DemoOutput};
use record::DemoRecord;
use rounds::Demo;
use service::DemoService;
use workers::{WORKERS, WorkerProcesses};

/// Run a demo: a service, four workers, buffers that move, losses and returns
///
/// Starts a service with its pages, at the usual ports if they are free, and four workers of a recoverable
/// job. They register, meet at barriers, move buffers to one another, reshard an array, and check every byte.
/// Then the demo kills one of them, the others continue without it, and it comes back. This repeats until
/// Ctrl-C or the time given by --for. It needs nothing but this program. Operators may exclude workers,
/// readmit them and drain the job meanwhile: the demo adapts to it.
///
/// With --kill-service it kills the service too: another process goes on from the journal, in the same run.
#[derive(Debug, Args)]
pub struct Arguments {
    /// End after about this time, with status 0 only if every content was right and every step held; steps
    /// may fail while a worker is away that the demo itself has killed
    #[arg(long = "for", value_name = "SECONDS", value_parser = parse_duration_or_seconds)]
    length: Option<Duration>,

    /// Kill the service with kill -9 in each round, and show that the job goes on
    #[arg(long)]
    kill_service: bool,

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

    /// Print JSON: a line with the addresses, one for each thing that happens, and one with the outcome
    #[arg(long)]
    json: bool,
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

async fn run_demo(arguments: &Arguments) -> Result<ExitCode> {
    let output = if arguments.json { DemoOutput::Json } else { DemoOutput::Text };
    let mut stops = StopSignals::listen()?;
    let service = DemoService::start([arguments.grpc, arguments.http], arguments.kill_service).await?;
    let [grpc, http] = service.addresses().context("the job is not served")?;
    output.introduce([grpc, http])?;
    let job_view = service.job_view();
    let excluded = move |task: u32| {
        let task = TaskId(task as i32);
        job_view()
            .is_some_and(|view| view.run.tasks.iter().any(|of| of.task == task && of.excluded.is_some()))
    };
    let job_view = service.job_view();
    let drained =
        move || job_view().filter(|view| view.run.preemption.is_some()).map(|view| view.run.number.0);
    let workers = WorkerProcesses::new(grpc.to_string(), arguments.pause)?;
    let mut demo = Demo::new(workers, Box::new(excluded), Box::new(drained), service.killer(), output);
    let ended = tokio::select! {
        played = demo.run_rounds(arguments.length) => played.map(|()| None),
        stop = stops.next() => Ok(Some(stop)),
    };
    let left = demo.end_workers().await;
    service.stop().await;
    let ended = match (ended, left) {
        (Err(error), _) | (Ok(None), Err(error)) => Err(error),
        (Ok(stop), _) => Ok(stop),
    };
    let DemoRecord { steps, resharded, checked, losses, service_kills, .. } = demo.record;
    let all = WORKERS as usize;
    let (verdict, failure) = match &ended {
        Ok(None) => match demo.record.verdict(all - demo.out.len().min(all), all) {
            Ok(verdict) => (Some(verdict), None),
            Err(failure) => (None, Some(failure)),
        },
        Ok(Some(_)) | Err(_) => (None, None),
    };
    let outcome = DemoOutcome { steps, resharded, checked, losses, service_kills, verdict, failure };
    output.conclude(&outcome)?;
    match (ended?, outcome.failure) {
        (Some(stop), _) => Ok(stop.exit_code()),
        (None, Some(failure)) => Err(anyhow::Error::msg(failure)),
        (None, None) => Ok(ExitCode::SUCCESS),
    }
}
