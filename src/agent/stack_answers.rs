//! Answers the service's requests for stacks: what the program of this worker is doing, which launches of its transfer engine
//! are in flight, and in what its threads sleep.
//!
//! A request comes with the answer to a transfer report (`transfer_reports.rs`). A stack of return addresses would say little
//! here: most threads of a worker sleep in the same loops. So a frame is a line about an activity. Lines contain no
//! durations, so equal activities of many tasks are equal lines; the age is separate. Begin at [`answer_request`].

use std::fs;
use std::sync::atomic::Ordering;
use std::time::Duration;

use tonic::Code;
use tonic::transport::Channel;

use super::engine_host::EngineHost;
use crate::proto::muster::v1 as pb;
use crate::proto::muster::v1::stacks_client::StacksClient;
use crate::text::{escape_to_one_line, format_bytes};
use crate::transfer::{LaunchInFlight, TransportKind};

/// The maximum number of launches in an answer.
const LAUNCHES_MAX: usize = 64;
/// The maximum number of threads of the process in an answer.
const THREADS_MAX: usize = 96;
const CALL_TIMEOUT: Duration = Duration::from_secs(5);

/// Answers a request, unless it was answered before. If the service cannot be reached, the next report brings the request
/// again.
pub(super) async fn answer_request(host: &EngineHost, channel: Channel, request: u64) {
    if request == 0 || host.answered_stacks.load(Ordering::Relaxed) == request {
        return;
    }
    let here = host.here();
    let answer = pb::StackAnswer {
        request,
        task: here.task.0,
        incarnation: here.incarnation.get(),
        threads: describe_process(host),
    };
    let mut client = StacksClient::new(channel);
    match tokio::time::timeout(CALL_TIMEOUT, client.answer(answer)).await {
        Ok(Err(status)) if status.code() == Code::Unavailable => {}
        Err(_) => {}
        Ok(answered) => {
            // A refused answer is refused again.
            host.answered_stacks.store(request, Ordering::Relaxed);
            if let Err(status) = answered {
                tracing::debug!(%status, "an answer to a request for stacks was refused");
            }
        }
    }
}

/// Returns what this process is doing.
fn describe_process(host: &EngineHost) -> Vec<pb::StackThread> {
    let program = host.activities.describe().into_iter().map(|(frames, age)| pb::StackThread {
        name: "program".to_owned(),
        main: true,
        frames,
        for_ms: age.map(milliseconds),
    });
    let mut threads: Vec<pb::StackThread> = program.collect();
    let launches = host.engine.launches_in_flight();
    threads.extend(launches.iter().take(LAUNCHES_MAX).map(launch_thread));
    let waiting = host.waiting_launches.count.load(Ordering::Acquire);
    if waiting > 0 {
        let text = "launches wait until the engines of their peers are members".to_owned();
        threads.push(engine_thread("transfers", text, None));
    }
    threads.extend(kernel_threads());
    threads
}

fn milliseconds(age: Duration) -> u64 {
    u64::try_from(age.as_millis()).unwrap_or(u64::MAX)
}

fn engine_thread(name: &str, text: String, age: Option<Duration>) -> pb::StackThread {
    let frames = vec!["transfer engine".to_owned(), text];
    pb::StackThread { name: name.to_owned(), main: false, frames, for_ms: age.map(milliseconds) }
}

/// Returns the line about a launch.
fn launch_thread(launch: &LaunchInFlight) -> pb::StackThread {
    let LaunchInFlight { peer, kind, is_matched, bytes_left, age } = launch;
    let peer = peer.peer_task();
    let left = format_bytes(*bytes_left);
    let text = match (kind, is_matched) {
        (TransportKind::Local, true) => format!("copies within this task: {left} left"),
        (TransportKind::Local, false) => "a copy within this task waits for its dependencies".to_owned(),
        (_, true) => format!("moves bytes with task {peer} over {kind}: {left} left"),
        (_, false) => format!("waits for task {peer} to launch, over {kind}"),
    };
    engine_thread("transfers", text, Some(*age))
}

/// Returns the threads of this process as the kernel knows them: the name, the state, and the function of the kernel in which
/// the thread sleeps, if the kernel tells it.
fn kernel_threads() -> Vec<pb::StackThread> {
    let Ok(threads) = fs::read_dir("/proc/self/task") else { return Vec::new() };
    let threads = threads.filter_map(Result::ok).take(THREADS_MAX).filter_map(|thread| {
        let read = |file: &str| fs::read_to_string(thread.path().join(file)).ok();
        let name = escape_to_one_line(read("comm")?.trim_end()).into_owned();
        let state = thread_state(&read("stat")?, read("wchan").as_deref().unwrap_or_default());
        let frames = vec!["thread of the process".to_owned(), state];
        Some(pb::StackThread { name, main: false, frames, for_ms: None })
    });
    threads.collect()
}

/// Returns the state of a thread in words.
fn thread_state(stat: &str, sleeps_in: &str) -> String {
    // The name of the thread, in parentheses, may contain spaces and parentheses.
    let state = stat.rsplit(')').next().and_then(|rest| rest.split_whitespace().next()).unwrap_or_default();
    let state = match state {
        "R" => "runs",
        "S" => "sleeps",
        "D" => "waits for a device or the kernel, and cannot be interrupted",
        "T" | "t" => "is stopped",
        _ => "is in another state",
    };
    match sleeps_in.trim() {
        "" | "0" => state.to_owned(),
        function => format!("{state} in {}", escape_to_one_line(function)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_state_of_a_thread_is_told_in_words() {
        assert_eq!(thread_state("12 (a) b) S 1 2", "futex_wait_queue"), "sleeps in futex_wait_queue");
        assert_eq!(thread_state("12 (tokio) R 1 2", "0"), "runs");
        assert_eq!(thread_state("", ""), "is in another state");
        let own = kernel_threads();
        assert!(!own.is_empty() && own.len() <= THREADS_MAX);
        assert!(
            own.iter().any(|thread| thread.frames.iter().any(|line| line.starts_with("runs"))),
            "{own:?}"
        );
    }
}
