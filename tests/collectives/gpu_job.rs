//! A job of processes with one GPU each, at a real server. Begin at [`GpuJob::start`].

use std::net::{Ipv4Addr, SocketAddr};
use std::process::{Command, Stdio};
use std::time::Duration;

use serde_json::Value;
use socket2::{Domain, Socket, Type};

use crate::harness::{MusterServer, Process, TempFolder, TestInstant, test_arguments, wait_for, wait_until};
use crate::libraries::Libraries;
use crate::rank_program;

/// The wait from which there is a finding. A healthy pause of the tests is shorter.
pub const STUCK_AFTER: Duration = Duration::from_secs(2);
/// The time after that within which the finding must be there: a report and a check come once a second, and the rest is for a
/// loaded machine.
pub const PROMPT: Duration = Duration::from_secs(6);
/// The finding of these tests.
pub const STUCK: &str = "collective-stuck";

/// How a job is set up.
#[derive(Debug, Clone)]
pub struct JobSetup {
    /// The number of tasks, each of one process with one device.
    pub tasks: u32,
    /// `MUSTER_NCCL_TIMING`, if it is set.
    pub timing: Option<&'static str>,
    /// The settings of the simulated NCCL.
    pub nccl: &'static str,
    /// The value of `NCCL_PROFILER_PLUGIN`; the plug-in of this build by default.
    pub plugin: Option<String>,
    /// The service to which the plug-in reports, if it is not that of the job.
    pub reports_to: Option<SocketAddr>,
    /// A task whose process does not load the plug-in.
    pub without_plugin: Option<u32>,
    /// Further arguments of the server.
    pub server: Vec<String>,
}

impl Default for JobSetup {
    fn default() -> Self {
        Self {
            tasks: 4,
            timing: None,
            nccl: "",
            plugin: None,
            reports_to: None,
            without_plugin: None,
            server: Vec::new(),
        }
    }
}

/// A server and the processes of its job. All of them end when the value is dropped.
pub struct GpuJob {
    pub server: MusterServer,
    pub ranks: Vec<Process>,
    /// Where RAS, the simulated NCCL's own monitoring, answers.
    pub ras: RasAddress,
    /// The records of the processes.
    _folder: TempFolder,
}

impl GpuJob {
    /// Starts a server and a job of this setup. The name is that of a folder.
    #[track_caller]
    pub fn start(name: &str, setup: &JobSetup) -> Self {
        let server = start_server(setup);
        let folder = TempFolder::new(&format!("collectives-{name}"));
        let ras = RasAddress::reserve();
        let start = |task| {
            let mut command = rank_command(&server, &folder, task, setup);
            Process::start(command.env("NCCL_RAS_ADDR", ras.to_string()))
        };
        let mut ranks: Vec<Process> = (0..setup.tasks).map(start).collect();
        for rank in &mut ranks {
            rank.out_line("ready");
        }
        Self { server, ranks, ras, _folder: folder }
    }

    /// Starts a server and a job of this setup, with a clique of all tasks that has run a few collectives.
    #[track_caller]
    pub fn start_joined(name: &str, setup: &JobSetup) -> Self {
        let mut job = Self::start(name, setup);
        let ranks: Vec<usize> = (0..job.ranks.len()).collect();
        job.join("0", &ranks);
        job
    }

    /// Gives processes a line, and does not wait for what they do.
    #[track_caller]
    pub fn tell(&self, ranks: &[usize], line: &str) {
        for rank in ranks {
            self.ranks[*rank].say(line).expect("the process reads");
        }
    }

    /// Waits until processes have done a line.
    #[track_caller]
    pub fn wait_done(&mut self, ranks: &[usize], line: &str) {
        for rank in ranks {
            self.ranks[*rank].out_line(&format!("done {line}"));
        }
    }

    /// Lets processes do a line, and waits until they have.
    #[track_caller]
    pub fn run(&mut self, ranks: &[usize], line: &str) {
        self.tell(ranks, line);
        self.wait_done(ranks, line);
    }

    /// Makes a clique of these tasks, and runs a few collectives on it.
    #[track_caller]
    pub fn join(&mut self, clique: &str, ranks: &[usize]) {
        let names: Vec<String> = ranks.iter().map(ToString::to_string).collect();
        self.run(ranks, &format!("join {clique} {}", names.join(",")));
        self.run(ranks, &format!("call {clique} AllReduce 100 3"));
        self.run(ranks, &format!("sync {clique}"));
    }

    /// Returns the open findings about collectives.
    pub fn stuck(&self) -> Vec<Value> {
        let open = self.server.get("/api/v1/jobs/default/findings").json()["open"].take();
        let open = open.as_array().cloned().unwrap_or_default();
        open.into_iter().filter(|finding| finding["id"] == STUCK).collect()
    }

    /// Waits for the finding about collectives. `since` is a moment that the wait cannot precede; the finding must be there
    /// within [`PROMPT`] after the threshold, and not before the threshold.
    #[track_caller]
    pub fn wait_for_stuck(&self, since: TestInstant) -> Value {
        self.wait_for_stuck_after(since, STUCK_AFTER)
    }

    /// Waits for a finding about collectives that is due at this time after a moment.
    #[track_caller]
    pub fn wait_for_stuck_after(&self, since: TestInstant, due: Duration) -> Value {
        let finding = wait_for("a finding about the collective", || self.stuck().pop());
        let took = since.elapsed();
        assert!(took >= due, "{took:?} after the wait began: {finding}");
        assert!(took <= due + PROMPT, "{took:?} after the wait began: {finding}");
        finding
    }

    /// Waits until the finding about collectives is closed, which an event says.
    #[track_caller]
    pub fn wait_for_end_of_stuck(&self) {
        let is_closed = || self.stuck_events().last().is_some_and(|event| event["kind"] == "finding-closed");
        wait_until("the finding is closed", is_closed);
        assert_eq!(self.stuck(), Vec::<Value>::new());
    }

    /// Returns the events about findings of collectives, oldest first.
    pub fn stuck_events(&self) -> Vec<Value> {
        let page = self.server.get("/api/v1/jobs/default/events?limit=1000").json();
        let events = page["events"].as_array().expect("events").clone();
        events.into_iter().filter(|event| event["finding"] == STUCK).collect()
    }

    /// Returns the collectives of the job.
    pub fn collectives(&self) -> Value {
        self.server.get("/api/v1/jobs/default/collectives").json()
    }

    /// Returns one clique with its ranks.
    pub fn clique(&self, hash: &Value) -> Value {
        let hash = hash.as_str().expect("a text");
        self.server.get(&format!("/api/v1/jobs/default/collectives/{hash}")).json()
    }

    /// Waits until a condition holds of the collectives of the job.
    #[track_caller]
    pub fn wait_for_collectives(&self, what: &str, holds: impl Fn(&Value) -> bool) -> Value {
        wait_for(what, || Some(self.collectives()).filter(&holds))
    }

    /// Waits until all ranks of the first clique have reported that they have called this many collectives.
    #[track_caller]
    pub fn wait_for_count(&self, count: u64) -> Value {
        let holds = |view: &Value| {
            let clique = &view["cliques"][0];
            clique["back"] == count && clique["front"] == count && clique["reported"] == clique["ranks"]
        };
        self.wait_for_collectives(&format!("every rank reports {count} collectives"), holds)
    }

    /// Returns a sample of a metric with these labels beside the job's.
    pub fn metric(&self, name: &str, labels: &str) -> f64 {
        let page = self.server.get("/metrics").body;
        let labels = if labels.is_empty() { String::new() } else { format!(",{labels}") };
        let start = format!("{name}{{muster_job=\"default\"{labels}}} ");
        let line = page.lines().find_map(|line| line.strip_prefix(&start));
        line.and_then(|value| value.parse().ok()).unwrap_or_else(|| panic!("there is no sample {start}"))
    }
}

/// An address at which all processes of a job listen. A socket that does not listen keeps it from others.
#[derive(Debug)]
pub struct RasAddress(Socket);

impl RasAddress {
    fn reserve() -> Self {
        let socket = Socket::new(Domain::IPV4, Type::STREAM, None).expect("a socket");
        socket.set_reuse_port(true).expect("an option of sockets");
        socket.bind(&SocketAddr::from((Ipv4Addr::LOCALHOST, 0)).into()).expect("a free port");
        Self(socket)
    }
}

impl std::fmt::Display for RasAddress {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.0.local_addr().expect("the socket is bound").as_socket().expect("of TCP").fmt(f)
    }
}

/// Starts the server of a job.
#[track_caller]
pub fn start_server(setup: &JobSetup) -> MusterServer {
    let tasks = setup.tasks.to_string();
    let stuck_after = format!("{}s", STUCK_AFTER.as_secs());
    let mut arguments = vec!["--tasks", &tasks, "--recoverable", "--collective-stuck-after", &stuck_after];
    arguments.extend(setup.server.iter().map(String::as_str));
    MusterServer::patient(&arguments)
}

/// Returns the command of a task's process. It gets nothing for the plug-in but NCCL's variable and JAX's.
fn rank_command(server: &MusterServer, folder: &TempFolder, task: u32, setup: &JobSetup) -> Command {
    let libraries = Libraries::find();
    let mut command = Command::new(std::env::current_exe().expect("this program has a path"));
    command.args(test_arguments(rank_program::NAME)).stdin(Stdio::piped());
    for (name, _) in std::env::vars_os() {
        let text = name.to_string_lossy();
        let starts = ["MUSTER_", "JAX_", "SLURM_", "OMPI_", "JOB", "KUBERNETES_", "NCCL_", "SIMULATED_GPU"];
        if starts.iter().any(|start| text.starts_with(start)) {
            command.env_remove(name);
        }
    }
    let plugin = setup.plugin.clone().unwrap_or_else(|| libraries.plugin.display().to_string());
    if setup.without_plugin != Some(task) {
        command.env("NCCL_PROFILER_PLUGIN", plugin);
    }
    command.env("JAX_COORDINATOR_ADDRESS", setup.reports_to.unwrap_or(server.grpc).to_string());
    command.env("JAX_PROCESS_ID", task.to_string());
    // A test leaves no record behind, also if it is killed: only the folder is another one.
    command.env("MUSTER_COLLECTIVES_DIR", folder.path("records"));
    command.env("SIMULATED_GPU", setup.nccl);
    command.env(rank_program::SERVICE_VARIABLE, server.grpc.to_string());
    command.env(rank_program::LIBRARY_VARIABLE, &libraries.nccl);
    command.env(rank_program::TASKS_VARIABLE, setup.tasks.to_string());
    if let Some(timing) = setup.timing {
        command.env("MUSTER_NCCL_TIMING", timing);
    }
    command
}
