//! One process for each test.

use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

/// No wait of a test takes longer.
const LIMIT: Duration = Duration::from_secs(30);
/// Names the test that a process was started for.
const TEST: &str = "MUSTER_GPU_TEST";

/// Runs the body of a test in a process of its own, with these variables. The caller is the test itself: its name is
/// read from the body's type.
pub fn run_isolated<F: FnOnce()>(variables: &[(&str, &str)], body: F) {
    let path = std::any::type_name::<F>();
    let name =
        path.split_once("::").expect("a path has a crate").1.split("::{{").next().expect("a test has a name");
    if std::env::var(TEST).is_ok_and(|test| test == name) {
        return body();
    }
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--exact", name, "--nocapture", "--test-threads=1"]);
    command.env(TEST, name).envs(variables.iter().copied()).stdin(Stdio::null());
    let output = command.output().unwrap();
    let text = [output.stdout, output.stderr].map(|bytes| String::from_utf8_lossy(&bytes).into_owned());
    assert!(output.status.success() && text[0].contains("1 passed"), "{}: {}", output.status, text.concat());
}

/// Waits until a condition holds.
pub fn wait_until(what: &str, mut condition: impl FnMut() -> bool) {
    let limit = Instant::now() + LIMIT;
    while !condition() {
        assert!(Instant::now() < limit, "in vain: {what}");
        std::thread::sleep(Duration::from_micros(200));
    }
}
