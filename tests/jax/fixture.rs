//! The fixture of a test: a server, a folder, and the report of a failure.

use std::cell::{OnceCell, RefCell};
use std::fmt::Write as _;
use std::panic::{AssertUnwindSafe, catch_unwind};

use super::harness::TempFolder;
use super::process::{self, Process};
use super::release::{Release, programs};
use super::server::Server;

/// The server and the folder of one test. Both are removed with it.
pub struct JaxFixture {
    name: String,
    /// The tested release.
    pub release: Release,
    server: OnceCell<Server>,
    folder: OnceCell<TempFolder>,
    figures: RefCell<Vec<String>>,
}

impl JaxFixture {
    /// Returns a fixture without a server.
    pub fn new(name: &str, release: &Release) -> Self {
        Self {
            name: name.to_owned(),
            release: release.clone(),
            server: OnceCell::new(),
            folder: OnceCell::new(),
            figures: RefCell::default(),
        }
    }

    /// Starts the server of this test.
    pub fn serve(&self, arguments: &[&str]) -> &Server {
        self.server.get_or_init(|| Server::start(arguments))
    }

    /// Returns the server.
    pub fn server(&self) -> &Server {
        self.server.get().expect("a server was started")
    }

    /// Starts a task of the default job.
    pub fn start(&self, task: usize, of: usize, program: &[&str]) -> Process {
        self.start_at(&self.server().grpc().to_string(), task, of, program)
    }

    /// Starts a task with its server at `address`.
    pub fn start_at(&self, address: &str, task: usize, of: usize, program: &[&str]) -> Process {
        self.start_with(address, task, of, program, &[])
    }

    /// Starts a task with these additional variables.
    pub fn start_with(
        &self,
        address: &str,
        task: usize,
        of: usize,
        program: &[&str],
        besides: &[(&'static str, String)],
    ) -> Process {
        let bind = ("JAX_COORDINATOR_BIND_ADDRESS", "127.0.0.1:0".to_owned());
        // A program with a `--bind` argument must not need the variable.
        let bind = (!program.contains(&"--bind")).then_some(bind);
        let mut variables = vec![
            ("JAX_COORDINATOR_ADDRESS", address.to_owned()),
            ("MUSTER_PROCESS_ID", task.to_string()),
            ("MUSTER_NUM_PROCESSES", of.to_string()),
        ];
        variables.extend(bind);
        variables.extend_from_slice(besides);
        let label = format!("task {task} ({} of JAX {})", program.join(" "), self.release.name);
        process::start(label, &self.release.python(), &command(program), &variables)
    }

    /// Starts all tasks of the default job with the same program.
    pub fn start_all(&self, count: usize, program: &[&str]) -> Vec<Process> {
        (0..count).map(|task| self.start(task, count, program)).collect()
    }

    /// Starts `muster launch` with these arguments, and a program of this release in each of its processes.
    pub fn launch(&self, arguments: &[&str], program: &[&str]) -> Process {
        let mut all = vec!["launch".to_owned()];
        all.extend(arguments.iter().map(|&argument| argument.to_owned()));
        all.extend(["--".to_owned(), self.release.python().display().to_string()]);
        all.extend(command(program));
        process::start("launch".into(), env!("CARGO_BIN_EXE_muster").as_ref(), &all, &[])
    }

    /// Returns the path of a new file with this name in the test's own folder.
    pub fn file(&self, name: &str) -> String {
        let own = || TempFolder::new(&self.name.replace(|c: char| !c.is_ascii_alphanumeric(), "-"));
        self.folder.get_or_init(own).path(name)
    }

    /// Records a measured figure, which is printed at the end of the test.
    pub fn figure(&self, what: &str, seconds: f64) {
        self.figures.borrow_mut().push(format!("{what} {seconds:.3} s"));
    }

    /// Returns the server's view of its jobs, for a person.
    fn report(&self) -> String {
        let mut text = String::new();
        let Some(server) = self.server.get().filter(|server| server.process.is_running()) else {
            return text;
        };
        for job in server.about.grpc.iter().flat_map(|listener| &listener.jobs) {
            // A second failure here would hide the first.
            let view = catch_unwind(AssertUnwindSafe(|| server.view(job.as_str())));
            let _ = writeln!(text, "--- job {job}: {view:#?}");
        }
        text
    }
}

impl Drop for JaxFixture {
    fn drop(&mut self) {
        let figures = self.figures.borrow().join(", ");
        if !figures.is_empty() {
            // One write for each, because tests run concurrently.
            println!("     {}: {figures}", self.name);
        }
        if std::thread::panicking() {
            eprintln!("=== {} failed\n{}", self.name, self.report());
        }
    }
}

/// Returns a test program and its arguments for the interpreter.
fn command(program: &[&str]) -> Vec<String> {
    let script = programs().join(program[0]).display().to_string();
    std::iter::once(script).chain(program[1..].iter().map(|&argument| argument.to_owned())).collect()
}
