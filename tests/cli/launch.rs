//! `muster launch`: jobs on this machine.

use std::process::{Command, Stdio};

use crate::harness::{
    CommandOutput, MusterServer, Process, Signal, TempFolder, is_alive, muster, run, wait_until,
};

/// Returns the command that launches a shell script.
fn launch_command(arguments: &[&str], script: &str) -> Command {
    let mut command = muster(["launch"]);
    command.args(arguments).args(["--", "sh", "-c", script]);
    command
}

fn run_launch(arguments: &[&str], script: &str) -> CommandOutput {
    run(&mut launch_command(arguments, script))
}

#[test]
fn every_process_knows_its_place_and_its_lines_carry_its_number() {
    let script = "echo out $MUSTER_PROCESS_ID/$MUSTER_NUM_PROCESSES $JAX_COORDINATOR_ADDRESS \
                  $JAX_COORDINATOR_BIND_ADDRESS; echo err >&2; printf unfinished";
    let ended = run_launch(&["-n", "2"], script);
    assert_eq!(ended.code, Some(0), "{ended:?}");
    for task in 0..2 {
        let line =
            ended.out.lines().find(|line| line.starts_with(&format!("[{task}] out {task}/2 127.0.0.1:")));
        assert!(line.is_some_and(|line| line.ends_with(" 127.0.0.1:0")), "{ended:?}");
        assert!(ended.out.contains(&format!("[{task}] unfinished\n")), "{ended:?}");
        assert!(ended.err.contains(&format!("[{task}] err\n")), "{ended:?}");
    }
    assert!(
        ended.err.contains("2 task(s) ended: 2 with exit code 0; 1 run(s), 0 restart(s)"),
        "{}",
        ended.err
    );
}

#[test]
fn a_process_finds_its_server_and_jax_finds_its_place() {
    let script = "echo $OMPI_COMM_WORLD_RANK/$OMPI_COMM_WORLD_SIZE/$OMPI_COMM_WORLD_LOCAL_RANK/$MUSTER_LOCAL_PROCESS_ID \
                  ${OMPI_MCA_orte_hnp_uri-none} ${OMPI_VERSION-none} $MUSTER_JOB $MUSTER_SERVER";
    let mut command = launch_command(&["-n", "2", "--job", "train"], script);
    let ended = run(command.env("OMPI_VERSION", "5.0.1"));
    for task in 0..2 {
        let place = format!("[{task}] {task}/2/{task}/{task} muster none train http://127.0.0.1:");
        assert!(ended.out.lines().any(|line| line.starts_with(&place)), "{ended:?}");
    }
    let ended = run(launch_command(&["-n", "1"], script).env("MUSTER_JAX_DETECTION", "0"));
    assert!(ended.out.starts_with("[0] ///0 none none default http://"), "{ended:?}");
}

#[test]
fn lines_of_many_processes_are_never_mixed() {
    let script = "for i in $(seq 300); do printf 'aaaaaaaaaaaaaaaaaaaa'; echo \"bbbbbbbbbb $i\"; done";
    let ended = run_launch(&["-n", "4"], script);
    assert_eq!(ended.out.lines().count(), 1200);
    for line in ended.out.lines() {
        let rest = line.get(4..).expect("a line has its number");
        assert!(
            rest.starts_with("aaaaaaaaaaaaaaaaaaaabbbbbbbbbb ") && rest.matches('a').count() == 20,
            "{line}"
        );
    }
}

#[test]
fn the_code_is_that_of_the_first_process_that_failed() {
    let script =
        "case $MUSTER_PROCESS_ID in 1) exit 3;; *) trap 'exit 4' TERM; while :; do sleep 0.1; done;; esac";
    let ended = run_launch(&["-n", "3"], script);
    assert_eq!(ended.code, Some(3), "{ended:?}");
    assert!(ended.err.contains("task 1 failed (exit code 3)"), "{ended:?}");
    assert!(ended.err.contains("2 with exit code 4"), "{ended:?}");
}

#[test]
fn a_process_that_died_of_a_signal_counts_as_128_and_its_number() {
    let ended = run_launch(&["-n", "1"], "kill -KILL $$");
    assert_eq!(ended.code, Some(137), "{ended:?}");
    assert!(ended.err.contains("SIGKILL"), "{ended:?}");
}

#[test]
fn an_unknown_command_is_reported_before_any_start() {
    let ended = run(&mut muster(["launch", "-n", "2", "--", "no-such-command"]));
    assert_eq!((ended.code, ended.out.as_str()), (Some(127), ""), "{ended:?}");
    assert!(ended.err.contains("no-such-command") && ended.err.contains("PATH"), "{ended:?}");
    let ended = run(&mut muster(["launch", "-n", "2", "--", "/etc/passwd"]));
    assert_eq!(ended.code, Some(127), "{ended:?}");
    let ended = run(&mut muster(["launch", "-n", "0", "--", "true"]));
    assert_eq!(ended.code, Some(2), "{ended:?}");
}

/// Returns a file to which each start of a process appends a line.
fn new_start_log(name: &str) -> std::path::PathBuf {
    let path = std::path::PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join(name);
    let _ = std::fs::remove_file(&path);
    path
}

fn logged_starts(path: &std::path::Path) -> Vec<String> {
    let text = std::fs::read_to_string(path).unwrap_or_default();
    let mut starts: Vec<String> = text.lines().map(str::to_owned).collect();
    starts.sort();
    starts
}

#[test]
fn a_failed_run_is_started_again_as_a_whole() {
    let path = new_start_log("again");
    let script = format!(
        "echo $MUSTER_PROCESS_ID >> {0}; sleep 0.2; [ $MUSTER_PROCESS_ID = 0 ] || [ $(wc -l < {0}) -ge 4 ]",
        path.display()
    );
    let ended = run_launch(&["-n", "2", "--max-restarts", "5"], &script);
    assert_eq!(ended.code, Some(0), "{ended:?}");
    assert_eq!(logged_starts(&path), ["0", "0", "1", "1"]);
    assert!(ended.err.contains("starting all 2 again (restart 1 of 5)"), "{ended:?}");
    assert!(ended.err.contains("2 run(s), 1 restart(s)"), "{ended:?}");
}

#[test]
fn only_the_dead_process_of_a_recoverable_job_is_started_again() {
    let path = new_start_log("alone");
    let script = format!(
        "echo $MUSTER_PROCESS_ID >> {0}; [ $MUSTER_PROCESS_ID = 0 ] || [ $(grep -c 1 {0}) -ge 3 ]",
        path.display()
    );
    let ended = run_launch(&["-n", "2", "--recoverable", "--max-restarts", "5"], &script);
    assert_eq!(ended.code, Some(0), "{ended:?}");
    assert_eq!(logged_starts(&path), ["0", "1", "1", "1"]);
    assert!(ended.err.contains("starting it again (restart 2 of 5)"), "{ended:?}");
    assert!(ended.err.contains("1 run(s), 2 restart(s)"), "{ended:?}");
}

#[test]
fn restarts_are_counted() {
    let ended = run_launch(&["-n", "1", "--max-restarts", "2"], "exit 9");
    assert_eq!(ended.code, Some(9), "{ended:?}");
    assert!(ended.err.contains("3 run(s), 2 restart(s)"), "{ended:?}");
    let ended = run_launch(&["-n", "1", "--max-restarts", "2", "--recoverable"], "exit 9");
    assert_eq!(ended.code, Some(9), "{ended:?}");
    assert!(ended.err.contains("no restarts are left"), "{ended:?}");
}

#[test]
fn signals_are_passed_on() {
    let script = "trap 'echo one' USR1; trap 'echo end; exit 0' TERM; echo up; while :; do sleep 0.1; done";
    let mut running = Process::start(&mut launch_command(&["-n", "2"], script));
    running.out_line("up");
    running.out_line("up");
    running.signal(Signal::USR1);
    running.out_line("one");
    running.out_line("one");
    running.signal(Signal::TERM);
    let ended = running.end();
    assert_eq!(ended.code, Some(143), "{ended:?}");
    assert!(ended.out.contains("[0] end") && ended.out.contains("[1] end"), "{ended:?}");
    assert!(ended.err.contains("interrupted by SIGTERM"), "{ended:?}");
}

#[test]
fn the_end_of_the_terminal_is_passed_on_except_under_nohup() {
    let script =
        "trap 'echo hangup; exit 0' HUP; trap 'echo end; exit 0' TERM; echo up; while :; do sleep 0.1; done";
    // The signal may be ignored in the test process, and children inherit that.
    let mut heeding = Command::new("env");
    heeding.args(["--default-signal=HUP", env!("CARGO_BIN_EXE_muster"), "launch", "-n", "1", "--"]);
    let mut running = Process::start(heeding.args(["sh", "-c", script]));
    running.out_line("up");
    running.signal(Signal::HUP);
    let ended = running.end();
    assert!(ended.code == Some(129) && ended.out.contains("hangup"), "{ended:?}");

    let mut nohup = Command::new("sh");
    nohup.args([
        "-c",
        "trap '' HUP; exec \"$@\"",
        "sh",
        env!("CARGO_BIN_EXE_muster"),
        "launch",
        "-n",
        "1",
        "--",
    ]);
    let mut running = Process::start(nohup.args(["sh", "-c", script]));
    running.out_line("up");
    running.signal(Signal::HUP);
    running.signal(Signal::TERM);
    let ended = running.end();
    assert!(ended.code == Some(143) && !ended.out.contains("hangup"), "{ended:?}");
}

#[test]
fn a_process_that_ignores_sigterm_is_killed() {
    let script = "trap '' INT TERM; echo up; while :; do sleep 0.1; done";
    // After the time for the exit is over,
    let mut running = Process::start(&mut launch_command(&["-n", "1", "--kill-after", "100ms"], script));
    running.out_line("up");
    running.signal(Signal::TERM);
    let ended = running.end();
    assert_eq!(ended.code, Some(143), "{ended:?}");
    assert!(ended.err.contains("SIGKILL"), "{ended:?}");
    // or after a second signal.
    let mut running = Process::start(&mut launch_command(&["-n", "1", "--kill-after", "1h"], script));
    running.out_line("up");
    running.signal(Signal::INT);
    running.err_line("passed SIGINT on");
    running.signal(Signal::INT);
    assert_eq!(running.end().code, Some(130));
}

#[test]
fn no_process_outlives_a_launch_that_is_killed() {
    // The shell's own child would survive if only the shell were killed.
    let script = "sleep 1000 & echo $$ $!; wait";
    let mut running = Process::start(&mut launch_command(&["-n", "2"], script));
    let mut pids: Vec<i32> = Vec::new();
    for _ in 0..2 {
        let line = running.out_line("] ");
        pids.extend(line.split(' ').skip(1).filter_map(|word| word.parse::<i32>().ok()));
    }
    assert!(pids.len() == 4 && pids.iter().all(|pid| is_alive(*pid)), "{pids:?}");
    running.signal(Signal::KILL);
    wait_until("every process is gone", || !pids.iter().any(|pid| is_alive(*pid)));
}

#[test]
fn orphans_of_a_task_end_with_it() {
    let ended = run_launch(&["-n", "1"], "sleep 1000 >/dev/null 2>&1 & echo left $!");
    assert_eq!(ended.code, Some(0), "{ended:?}");
    let pid =
        ended.out.trim().rsplit(' ').next().and_then(|pid| pid.parse().ok()).expect("it says its number");
    wait_until("it is gone", || !is_alive(pid));
}

#[test]
fn unread_output_ends_no_launch() {
    let mut command =
        launch_command(&["-n", "1"], "for i in $(seq 20000); do echo line $i; done; echo end >&2");
    let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("it starts");
    drop(child.stdout.take());
    let output = child.wait_with_output().expect("it ends");
    assert!(output.status.success(), "{output:?}");
    assert!(String::from_utf8_lossy(&output.stderr).contains("[0] end"), "{output:?}");
}

#[test]
fn processes_have_the_usual_limit_on_open_files() {
    let mut command = Command::new("sh");
    command.args(["-c", "ulimit -Sn 77; exec \"$@\"", "sh", env!("CARGO_BIN_EXE_muster")]);
    let ended = run(command.args(["launch", "-n", "1", "--", "sh", "-c", "ulimit -Sn"]));
    assert_eq!(ended.out, "[0] 77\n", "{ended:?}");
}

#[test]
fn a_server_that_runs_already_is_used() {
    let server = MusterServer::start(&["--job", "a=2", "--job", "b=3@127.0.0.1:0"]);
    let about = server.get("/api/v1/server").json();
    let own = about["grpc"][1]["address"].as_str().expect("it has an address").to_owned();
    let url = server.url();
    let ended = run_launch(&["-n", "3", "--server", &url, "--job", "b"], "echo at $JAX_COORDINATOR_ADDRESS");
    assert_eq!(ended.code, Some(0), "{ended:?}");
    assert!(ended.out.contains(&format!("[2] at {own}\n")), "{ended:?}");

    let refused = |arguments: &[&str], said: &[&str]| {
        let ended = run_launch(&[&["--server", &url], arguments].concat(), "true");
        assert_eq!(ended.code, Some(125), "{ended:?}");
        for part in said {
            assert!(ended.err.contains(part), "{part:?} is not in {ended:?}");
        }
    };
    refused(&["-n", "2", "--job", "b"], &["3 task(s)", "-n 3", "muster serve --job"]);
    refused(&["-n", "2", "--job", "c"], &["no job \"c\"", "a, b"]);
    refused(&["-n", "2", "--job", "a", "--heartbeat-timeout", "5s"], &["--heartbeat-timeout", "leave"]);
    refused(&["-n", "2", "--job", "a", "--recoverable"], &["recoverable = false"]);
}

#[test]
fn a_launch_shows_a_server_the_token_that_it_asks_for() {
    let folder = TempFolder::new("launch-token");
    let [tokens, token] = ["tokens.toml", "token"].map(|name| folder.path(name));
    let made = run(&mut muster(["token", "new", "--name", "me", "--role", "operator", "--file", &tokens]));
    assert_eq!(made.code, Some(0), "{made:?}");
    let shown = made.out.split_whitespace().find(|word| word.starts_with("muster_")).expect("a token");
    std::fs::write(&token, shown).expect("it can be written");
    let server = MusterServer::start(&["--job", "a=1", "--tokens-file", &tokens]);
    let url = server.url();
    let ended = run_launch(&["-n", "1", "--server", &url, "--job", "a"], "true");
    assert!(ended.code == Some(125) && ended.err.contains("--token-file"), "{ended:?}");
    let ended = run_launch(&["-n", "1", "--server", &url, "--token-file", &token, "--job", "a"], "echo here");
    assert_eq!((ended.code, ended.out.as_str()), (Some(0), "[0] here\n"), "{ended:?}");
}

/// Two launches share a job; each host gets tasks of its own, and the server remembers whose they are.
#[test]
fn launches_on_several_hosts_get_the_tasks_of_their_hosts() {
    let server = MusterServer::start(&["--job", "default=4", "--job", "pair=2"]);
    let script = "echo $MUSTER_PROCESS_ID/$MUSTER_NUM_PROCESSES/$MUSTER_LOCAL_PROCESS_ID/$MUSTER_HOST_ID \
                  $OMPI_COMM_WORLD_RANK/$OMPI_COMM_WORLD_SIZE/$OMPI_COMM_WORLD_LOCAL_RANK";
    let url = server.url();
    let start = |host: &str| {
        let flags = ["-n", "2", "--server", &url, "--claim-ids", "--host-id", host];
        Process::start(&mut launch_command(&flags, script))
    };
    // The host that comes first is the second by its name.
    let launches = [("node-b", start("node-b")), ("node-a", start("node-a"))];
    for (host, launched) in &launches {
        let ended = launched.end();
        assert_eq!(ended.code, Some(0), "{ended:?}");
        let first = if *host == "node-a" { 0 } else { 2 };
        for local in 0..2 {
            let task = first + local;
            let line = format!("[{task}] {task}/4/{local}/{host} {task}/4/{local}");
            assert!(ended.out.lines().any(|said| said == line), "{line:?} is not in {ended:?}");
        }
    }
    let owners = server.get("/api/v1/jobs/default/task-owners").json();
    let told: Vec<String> = owners["owners"]
        .as_array()
        .expect("a list")
        .iter()
        .map(|host| format!("{} {} {} {}", host["task"], host["host"], host["local"], host["run"]))
        .collect();
    assert_eq!(told, [r#"0 "node-a" 0 1"#, r#"1 "node-a" 1 1"#, r#"2 "node-b" 0 1"#, r#"3 "node-b" 1 1"#]);

    let listed = run(&mut muster(["task-owners", "--server", &url]));
    assert_eq!(listed.code, Some(0), "{listed:?}");
    assert!(listed.out.contains("node-a process 1") && listed.out.contains("HELD"), "{listed:?}");
    let forgotten = run(&mut muster(["task-owners", "--server", &url, "--forget", "3", "--reason", "gone"]));
    assert_eq!(forgotten.code, Some(0), "{forgotten:?}");
    let again = server.send("DELETE", "/api/v1/jobs/default/task-owners/3?reason=gone", "");
    assert_eq!(again.status, 404, "{again:?}");

    let claim = |body: &str| server.send("POST", "/api/v1/jobs/pair/task-owners", body);
    let waits = claim(r#"{"host": "node-c", "claimant": "1f"}"#);
    let answer = waits.json();
    assert_eq!((waits.status, &answer["pending"], &answer["tasks"]), (202, &"too-few".into(), &2.into()));
    assert!(answer["retry_ms"].as_u64().is_some_and(|pause| pause > 0), "{answer}");
    let granted = claim(r#"{"host": "node-a", "claimant": "2f"}"#);
    assert_eq!((granted.status, &granted.json()["task"]), (200, &0.into()));
    assert_eq!(claim(r#"{"host": "node-c", "claimant": "1f"}"#).json()["task"], 1);
    for bad in [r#"{"host": "a b", "claimant": "1"}"#, r#"{"host": "a", "claimant": "x"}"#] {
        assert_eq!(claim(bad).status, 422, "{bad}");
    }
    let all = server.send("DELETE", "/api/v1/jobs/default/task-owners?reason=new%20cluster", "");
    assert_eq!(all.status, 204, "{all:?}");
    let audit = server.get("/api/v1/audit").text();
    assert!(audit.contains("forget-task-owners") && !audit.contains("node-c"), "{audit}");
}
