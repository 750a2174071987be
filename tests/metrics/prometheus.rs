//! Runs promtool, and a real Prometheus, which ends when its value is dropped.

use std::net::{SocketAddr, TcpListener};
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::time::Duration;

use percent_encoding::{NON_ALPHANUMERIC, utf8_percent_encode};
use serde_json::Value;

use crate::dashboards_folder;
use crate::support::harness::http::{self, JSON};
use crate::support::harness::{Process, run_with_input};

/// Runs promtool in the folder of the rules.
///
/// # Panics
/// If it is not installed, because a skipped test would look like a passed one.
pub fn promtool(arguments: &[&str], stdin: &str) -> Output {
    let mut command = Command::new("promtool");
    run_with_input(command.args(arguments).current_dir(dashboards_folder()), stdin).unwrap_or_else(|error| {
        panic!("promtool cannot be run ({error}): install it with `apt-get install prometheus`, as tests/run does")
    })
}

/// Returns the errors of a run of promtool, if there are any.
pub fn promtool_errors(output: &Output) -> Option<String> {
    let said = [&output.stdout[..], &output.stderr[..]].concat();
    (!output.status.success()).then(|| String::from_utf8_lossy(&said).into_owned())
}

/// A Prometheus that scrapes one server every second. Dropping it ends the process.
pub struct Prometheus {
    _process: Process,
    address: SocketAddr,
    // Fields are dropped in this order: the process ends before its folder is removed.
    place: PrometheusFolder,
}

/// The data folder, which is removed on drop unless the test failed.
struct PrometheusFolder(PathBuf);

impl Prometheus {
    /// Starts Prometheus with the rules of `dashboards/`.
    pub fn start_scraping(target: SocketAddr) -> Self {
        // A free port at an address that no other test uses, so that no other test takes the port.
        let free = TcpListener::bind("127.0.0.3:0").expect("a free port");
        let address = free.local_addr().expect("it is bound");
        drop(free);
        let place = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join(format!("prometheus-{}", address.port()));
        std::fs::create_dir_all(&place).expect("the place can be made");
        let config = place.join("prometheus.yml");
        std::fs::write(&config, configuration_text(target)).expect("the configuration can be written");
        let log = std::fs::File::create(place.join("log")).expect("the log can be written");
        let mut command = Command::new("prometheus");
        command
            .arg(format!("--config.file={}", config.display()))
            .arg(format!("--storage.tsdb.path={}", place.join("data").display()))
            .arg(format!("--web.listen-address={address}"))
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(log);
        let process = Process::spawn(&mut command).unwrap_or_else(|error| {
            panic!("{error:#}: install it with `apt-get install prometheus`, as tests/run does")
        });
        Self { _process: process, address, place: PrometheusFolder(place) }
    }

    /// Waits until a query has a result.
    pub async fn wait_until_result(&self, query: &str) {
        for _ in 0..600 {
            if self.try_get(&query_path(query)).is_ok_and(|found| !sample_values(&found).is_empty()) {
                return;
            }
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
        let log = std::fs::read_to_string(self.place.0.join("log")).unwrap_or_default();
        panic!("{query} never had an answer; Prometheus says:\n{log}");
    }

    /// Returns the present samples of a query.
    pub fn query(&self, query: &str) -> Result<Vec<f64>, String> {
        self.try_get(&query_path(query)).map(|found| sample_values(&found))
    }

    /// Returns the present values of a label in the result of a query; empty where the label is missing.
    pub fn labels(&self, query: &str, label: &str) -> Vec<String> {
        let found = self.try_get(&query_path(query)).unwrap_or_else(|error| panic!("{query}: {error}"));
        let result = found["data"]["result"].as_array().cloned().unwrap_or_default();
        let text = |series: &Value| series["metric"][label].as_str().unwrap_or_default().to_owned();
        result.iter().map(text).collect()
    }

    /// Returns every rule of every group.
    pub fn rules(&self) -> Vec<Value> {
        let found = self.try_get("/api/v1/rules").expect("it tells its rules");
        let groups = found["data"]["groups"].as_array().cloned().unwrap_or_default();
        groups.iter().flat_map(|group| group["rules"].as_array().cloned().unwrap_or_default()).collect()
    }

    fn try_get(&self, path: &str) -> Result<Value, String> {
        let (status, body) = get(self.address, path).map_err(|error| error.to_string())?;
        let value: Value =
            serde_json::from_str(&body).map_err(|error| format!("{status}: {error}: {body}"))?;
        if value["status"] == "success" { Ok(value) } else { Err(format!("{status}: {}", value["error"])) }
    }
}

impl Drop for PrometheusFolder {
    fn drop(&mut self) {
        if !std::thread::panicking() {
            let _ = std::fs::remove_dir_all(&self.0);
        }
    }
}

fn query_path(query: &str) -> String {
    format!("/api/v1/query?query={}", utf8_percent_encode(query, NON_ALPHANUMERIC))
}

fn sample_values(found: &Value) -> Vec<f64> {
    let result = found["data"]["result"].as_array().cloned().unwrap_or_default();
    let number = |value: &Value| value.as_str()?.parse::<f64>().ok();
    match found["data"]["resultType"].as_str() {
        Some("scalar") => number(&found["data"]["result"][1]).into_iter().collect(),
        _ => result.iter().filter_map(|series| number(&series["value"][1])).collect(),
    }
}

fn configuration_text(target: SocketAddr) -> String {
    let rules = dashboards_folder().join("rules");
    let rule = |name: &str| rules.join(name).display().to_string();
    format!(
        "global:\n  scrape_interval: 1s\n  evaluation_interval: 1s\nrule_files: [{:?}, {:?}]\nscrape_configs:\n  - \
         job_name: muster\n    static_configs: [{{ targets: [{:?}] }}]\n",
        rule("recording.yml"),
        rule("alerts.yml"),
        target.to_string()
    )
}

/// Sends a GET request. Returns status and body.
pub fn get(address: SocketAddr, path: &str) -> std::io::Result<(u16, String)> {
    http::get(address, path).map(|answer| (answer.status, answer.body))
}

/// Sends a GET request with this host name.
pub fn get_as(address: SocketAddr, host: &str, path: &str) -> std::io::Result<(u16, String)> {
    let answer = http::send(address, "GET", path, &[&format!("host: {host}")], "");
    answer.map(|answer| (answer.status, answer.body))
}

/// Sends a request with a JSON body.
pub fn send(address: SocketAddr, method: &str, path: &str, body: &str) -> std::io::Result<(u16, String)> {
    http::send(address, method, path, &[JSON], body).map(|answer| (answer.status, answer.body))
}

/// Reads a file of the folder.
pub fn read_dashboards_file(name: impl AsRef<Path>) -> String {
    let path = dashboards_folder().join(name);
    std::fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}
