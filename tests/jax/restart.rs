//! Tests of a service that is killed while real JAX processes train, and goes on from its journal.
//!
//! The keeper holds the sockets while no process serves, so that connections go on: also those of a job that holds error polls,
//! whose processes end when their connection does. If the keeper is killed too, connections end and nothing listens until the
//! next start, so the test starts the service at once: a heartbeat that is due meanwhile would end a JAX process.

use std::time::Duration;

use muster::coordination::{EventKind, JobView};
use rustix::process::Signal;

use super::fixture::JaxFixture;
use super::harness::{signal, wait_until};
use super::process::Process;
use super::server::Server;
use super::{RunSet, Test};

pub const TESTS: &[Test] = &[
    (RunSet::Both, "a_job_trains_on_while_its_service_is_killed", |scene| {
        let (job, server) = TrainingJob::start(scene, &["--error-delivery", "cancel"]);
        job.train_on_under_kills(&server);
    }),
    (RunSet::All, "a_job_that_holds_error_polls_trains_on_while_its_service_is_killed", |scene| {
        let (job, server) = TrainingJob::start(scene, &["--error-delivery", "hold"]);
        job.train_on_under_kills(&server);
    }),
    (RunSet::Both, "a_recoverable_job_trains_on_while_its_service_and_the_keeper_are_killed", |scene| {
        let (job, mut server) = TrainingJob::start(scene, &["--recoverable"]);
        for kill in 1..=KILLS {
            job.wait_a_little();
            server.process.signal(Signal::KILL);
            server.process.end();
            server = Server::start_at(&job.address, &job.arguments());
            job.check_goes_on(&server, kill);
        }
        job.finish(&server);
    }),
];

const KILLS: usize = 6;
const TASKS: usize = 3;
const STEPS: &str = "1000";

/// Processes that train, and the service that they use.
struct TrainingJob {
    arguments: Vec<String>,
    address: String,
    processes: Vec<Process>,
    before: JobView,
}

impl TrainingJob {
    fn start(scene: &JaxFixture, settings: &[&str]) -> (Self, Server) {
        let (journal, tasks) = (scene.file("journal"), TASKS.to_string());
        let own = ["--tasks", &tasks, "--data-dir", &journal, "--heartbeat-timeout", "60s"];
        let arguments: Vec<String> = own.iter().chain(settings).map(|&word| word.to_owned()).collect();
        let words: Vec<&str> = arguments.iter().map(String::as_str).collect();
        let server = Server::start(&words);
        let address = server.grpc().to_string();
        let program = ["train.py", "--steps", STEPS, "--step-ms", "10"];
        let processes: Vec<_> =
            (0..TASKS).map(|task| scene.start_at(&address, task, TASKS, &program)).collect();
        processes[0].text("step  100 ");
        let before = server.view("default");
        (Self { arguments, address, processes, before }, server)
    }

    fn arguments(&self) -> Vec<&str> {
        self.arguments.iter().map(String::as_str).collect()
    }

    fn wait_a_little(&self) {
        std::thread::sleep(Duration::from_millis(fastrand::u64(100..700)));
    }

    /// Kills the process that serves again and again, until the processes of the job have ended well.
    fn train_on_under_kills(&self, server: &Server) {
        for kill in 1..=KILLS {
            self.wait_a_little();
            let core = server.process.first_child().expect("a process serves");
            signal(core, Signal::KILL);
            wait_until("another process", || server.process.first_child().is_some_and(|now| now != core));
            self.check_goes_on(server, kill);
        }
        self.finish(server);
    }

    fn check_goes_on(&self, server: &Server, kill: usize) {
        let (after, before) = (server.view("default").run, &self.before.run);
        assert_eq!(
            (after.number, &after.incarnation),
            (before.number, &before.incarnation),
            "after kill {kill}"
        );
        for (after, before) in after.tasks.iter().zip(&before.tasks) {
            assert_eq!(
                after.lives.last().map(|life| &life.incarnation),
                before.lives.last().map(|life| &life.incarnation)
            );
        }
    }

    fn finish(&self, server: &Server) {
        let is_restart = |event: &&muster::http::api::EventLine| event.what == EventKind::ServiceRestarted;
        assert_eq!(server.events("default").iter().filter(is_restart).count(), KILLS);
        for process in &self.processes {
            process.succeed();
        }
        assert_eq!(server.view("default").run.number, self.before.run.number, "one run from begin to end");
    }
}
