//! Runs scripts that drive a browser. A script prints the next action of its scenario, and is told when the action
//! is done.

use std::path::{Path, PathBuf};
use std::process::Stdio;

use tokio::io::{AsyncBufReadExt as _, AsyncWriteExt as _, BufReader};
use tokio::process::{Child, ChildStdin, ChildStdout, Command};

/// A running script.
pub struct Script {
    child: Child,
    lines: tokio::io::Lines<BufReader<ChildStdout>>,
    tell: ChildStdin,
}

/// Returns the folder of the scripts.
fn scripts_folder() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/browser")
}

/// Returns the path of the browser.
fn browser_path() -> String {
    let named = std::env::var("MUSTER_CHROMIUM").ok();
    let usual = ["/usr/bin/chromium", "/usr/bin/chromium-browser", "/usr/bin/google-chrome"];
    let found = usual.into_iter().find(|path| Path::new(path).exists()).map(str::to_owned);
    named.or(found).expect(
        "the pages are tested in a real browser, and there is none: install Chromium (tests/run does), or name one in \
         MUSTER_CHROMIUM",
    )
}

impl Script {
    /// Starts a script against the server at `address`.
    pub fn start(name: &str, address: std::net::SocketAddr) -> Self {
        Self::start_with_environment(name, address, &[])
    }

    /// Starts a script with these environment variables.
    pub fn start_with_environment(
        name: &str,
        address: std::net::SocketAddr,
        variables: &[(&str, &str)],
    ) -> Self {
        assert!(
            scripts_folder().join("node_modules/playwright-core").exists(),
            "the browser is driven by playwright-core, which is not there: run `npm ci` in tests/browser (tests/run does)"
        );
        let mut child = Command::new("node")
            .arg(scripts_folder().join(name))
            .current_dir(scripts_folder())
            .env("MUSTER_URL", format!("http://{address}"))
            .env("MUSTER_CHROMIUM", browser_path())
            .envs(variables.iter().copied())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::inherit())
            .kill_on_drop(true)
            .spawn()
            .unwrap_or_else(|error| {
                panic!("cannot run node, which drives the browser: {error} (tests/run installs it)")
            });
        let lines = BufReader::new(child.stdout.take().expect("it is piped")).lines();
        let tell = child.stdin.take().expect("it is piped");
        Self { child, lines, tell }
    }

    /// Returns the next action; `None` after the script has ended with success.
    pub async fn next_requested_action(&mut self) -> Option<String> {
        while let Some(line) = self.lines.next_line().await.expect("its output is text") {
            match line.strip_prefix("! ") {
                Some(wanted) => return Some(wanted.to_owned()),
                None => println!("{line}"),
            }
        }
        let status = self.child.wait().await.expect("it ends");
        assert!(status.success(), "the pages are not as they should be; see above");
        None
    }

    /// Tells the script that the action is done.
    pub async fn report_action_done(&mut self) {
        self.tell.write_all(b"done\n").await.expect("it listens");
    }

    /// Tells the script when the action was done, in milliseconds of the wall clock.
    pub async fn report_action_done_at(&mut self, at_ms: u64) {
        self.tell.write_all(format!("done {at_ms}\n").as_bytes()).await.expect("it listens");
    }
}
