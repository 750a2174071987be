//! Runs a test in a process of its own, for what concerns a whole process.

use std::process::{Command, Stdio};
use std::sync::mpsc::channel;
use std::time::Duration;

/// No such process lives longer.
const LIMIT: Duration = Duration::from_secs(120);
/// Names the test that a process was started for.
const TEST: &str = "MUSTER_ISOLATED_TEST";

/// Runs the body of a test in a process of its own, with these variables in its environment. The caller is the test itself:
/// its name is read from the body's type.
pub fn run_isolated<F: FnOnce()>(variables: &[(&str, &str)], body: F) {
    let path = std::any::type_name::<F>();
    let name =
        path.split_once("::").expect("a path has a crate").1.split("::{{").next().expect("a test has a name");
    if std::env::var(TEST).is_ok_and(|test| test == name) {
        return body();
    }
    let program = std::env::current_exe().expect("this program has a path");
    let mut command = Command::new(program);
    command.args(["--exact", name, "--nocapture", "--test-threads=1"]);
    command.env(TEST, name).envs(variables.iter().copied()).stdin(Stdio::null());
    let child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("this program starts");
    let pid = child.id();
    let (sender, receiver) = channel();
    std::thread::spawn(move || sender.send(child.wait_with_output()));
    let ended = receiver.recv_timeout(LIMIT).or_else(|_| {
        let _killed = Command::new("kill").args(["-9", &pid.to_string()]).status();
        receiver.recv()
    });
    let output = ended.expect("the process ends").expect("its output is read");
    let text =
        [output.stdout, output.stderr].map(|bytes| String::from_utf8_lossy(&bytes).into_owned()).concat();
    assert!(output.status.success() && text.contains("1 passed"), "{}: {text}", output.status);
}
