//! A running `muster serve`, and what it shows about its jobs.

use std::net::SocketAddr;
use std::path::Path;
use std::time::Duration;

use muster::coordination::{EventKind, JobView, RunState, TaskId, Timestamp};
use muster::http::api::{EventLine, EventsPage, ServerInfo};

use super::harness::server::{ANY_PORTS, address};
use super::harness::{TestInstant, wait_for};
use super::http;
use super::process::{self, Process};

/// The job of processes that name none.
pub const DEFAULT: &str = "default";

/// A running server, which is killed when this value is dropped.
pub struct Server {
    /// Its process.
    pub process: Process,
    /// Its description of itself.
    pub about: ServerInfo,
}

impl Server {
    /// Starts a server on free ports.
    pub fn start(arguments: &[&str]) -> Self {
        Self::start_at(ANY_PORTS[1], arguments)
    }

    /// Starts a server at this gRPC address.
    pub fn start_at(grpc: &str, arguments: &[&str]) -> Self {
        let ports = [ANY_PORTS[0], grpc, ANY_PORTS[2], ANY_PORTS[3]];
        let all = ["serve"].iter().chain(&ports).chain(arguments);
        let all: Vec<String> = all.map(|&argument| argument.to_owned()).collect();
        let process = process::start("server".into(), Path::new(env!("CARGO_BIN_EXE_muster")), &all, &[]);
        let line = process.text("  HTTP  http://");
        let http = line.split_once("HTTP  ").and_then(|(_, url)| address(url));
        let address = http.expect("the address that it printed");
        Self { process, about: http::get(address, "/api/v1/server") }
    }

    /// Returns the address for the tasks of jobs without their own listener.
    pub fn grpc(&self) -> SocketAddr {
        self.about.grpc[0].address
    }

    /// Returns the view of a job.
    #[track_caller]
    pub fn view(&self, job: &str) -> JobView {
        http::get(self.about.http, &format!("/api/v1/jobs/{job}"))
    }

    /// Waits until the view of the default job matches.
    #[track_caller]
    pub fn until<T>(&self, what: &str, look: impl Fn(&JobView) -> Option<T>) -> T {
        wait_for(what, || look(&self.view(DEFAULT)))
    }

    /// Waits until the default job is in this run and state.
    #[track_caller]
    pub fn until_run(&self, number: u64, state: RunState) -> JobView {
        self.until(&format!("run {number} {state:?}"), |view| {
            (view.run.number.0 == number && view.run.state == state).then(|| view.clone())
        })
    }

    /// Returns all events of a job.
    #[track_caller]
    pub fn events(&self, job: &str) -> Vec<EventLine> {
        let mut events = Vec::new();
        let mut after = 0;
        loop {
            let page: EventsPage =
                http::get(self.about.http, &format!("/api/v1/jobs/{job}/events?after={after}"));
            assert!(!page.gap, "the server has forgotten events");
            let done = page.next == after;
            after = page.next;
            events.extend(page.events);
            if done {
                return events;
            }
        }
    }

    /// Waits for an event of the default job.
    #[track_caller]
    pub fn event(&self, what: &str, which: impl Fn(&EventLine) -> bool) -> EventLine {
        wait_for(what, || self.events(DEFAULT).into_iter().find(&which))
    }

    /// Waits for the `nth` failure of a task, from 1.
    #[track_caller]
    pub fn failure(&self, task: i32, nth: usize) -> EventLine {
        wait_for(&format!("failure {nth} of task {task}"), || {
            let failed = |what: &EventKind| matches!(what, EventKind::TaskFailed { task: id, .. } if *id == TaskId(task));
            self.events(DEFAULT).into_iter().filter(|event| failed(&event.what)).nth(nth - 1)
        })
    }

    /// Waits until the server has just received a heartbeat of the task.
    ///
    /// An action on the task right after that comes well before its next heartbeat.
    #[track_caller]
    pub fn heartbeat(&self, task: i32) {
        let last = |view: &JobView| view.run.tasks[usize::try_from(task).unwrap()].last_heartbeat;
        let before = last(&self.view(DEFAULT));
        self.until("another heartbeat", |view| (last(view) > before).then_some(()));
    }

    /// Reads the server's clock as precisely as possible from outside.
    pub fn clock(&self) -> ServerClock {
        // The quickest of several answers is the most precise.
        let glance = || {
            let before = TestInstant::now();
            let seen = self.view(DEFAULT).seen_at;
            (before, seen, TestInstant::now() - before)
        };
        let glances: Vec<(TestInstant, Timestamp, f64)> = std::iter::repeat_with(glance).take(5).collect();
        let (before, seen, took) =
            glances.into_iter().min_by(|a, b| a.2.total_cmp(&b.2)).expect("five of them");
        ServerClock { at: TestInstant(before.0 + took / 2.0), seen }
    }
}

/// A reading of the server's clock, which runs as fast as this machine's.
#[derive(Debug, Clone, Copy)]
pub struct ServerClock {
    at: TestInstant,
    seen: Timestamp,
}

impl ServerClock {
    /// Returns the moment at which the server's clock shows `at`.
    pub fn moment(&self, at: Timestamp) -> TestInstant {
        TestInstant(self.at.0 + seconds(at.since(self.seen)) - seconds(self.seen.since(at)))
    }
}

fn seconds(duration: Duration) -> f64 {
    duration.as_secs_f64()
}
