//! Subcommands without a page of their own: exit codes, output and requests.

use std::process::Stdio;

use crate::clients::Clients;
use crate::harness::{MusterServer, Process, Signal, TempFolder, muster, run, wait_until};

/// Waits until this run has this state.
fn wait_for_run_state(server: &MusterServer, run: u64, state: &str) {
    wait_until(&format!("run {run} is {state}"), || {
        let job = server.get("/api/v1/jobs").json()["jobs"][0].clone();
        job["run"] == run && job["state"] == state
    });
}

fn started_drain(server: &MusterServer) -> Process {
    let arguments = ["drain", "--reason", "r", "--wait=60s", "--server", &server.url()];
    let draining = Process::start(&mut muster(arguments));
    wait_until("it is asked for", || server.get("/api/v1/jobs/default/drain").body.contains("\"notice\""));
    draining
}

#[test]
fn a_drain_whose_run_ends_before_its_tasks_agree_has_failed() {
    let server = MusterServer::start(&["--tasks", "2"]);
    let clients = Clients::connect_to(&server);
    clients.register(2);
    let waiting = started_drain(&server);
    clients.fail(1, "out of memory");
    wait_for_run_state(&server, 1, "failed");
    // Whether the next run exists already or not.
    clients.register(2);
    wait_for_run_state(&server, 2, "running");
    let ended = waiting.end();
    assert_eq!(ended.code, Some(1), "{ended:?}");
    assert!(ended.err.contains("run 1 ended before its tasks agreed on a step"), "{ended:?}");
    assert!(!ended.out.contains("Run 2"), "{ended:?}");

    // The drain also ends at once if no task registers again.
    let waiting = started_drain(&server);
    clients.fail(0, "out of memory");
    let ended = waiting.end();
    assert!(ended.code == Some(1) && ended.err.contains("run 2 ended before"), "{ended:?}");
}

#[test]
fn a_drain_whose_tasks_agree_succeeds_even_if_the_next_run_is_there_before_it_looks() {
    let server = MusterServer::start(&["--tasks", "2"]);
    let clients = Clients::connect_to(&server);
    clients.register(2);
    let waiting = started_drain(&server);
    for task in 0..2 {
        clients.insert(&format!("PREEMPTION_CURRENT_COUNTER/{task}"), "7");
    }
    for task in 0..2 {
        clients.wait_at_barrier(task, "PREEMPTION_SYNC_BARRIER", 60_000);
    }
    wait_until("they agree", || server.get("/api/v1/jobs/default/drain").body.contains("\"agreed_step\":8"));
    clients.fail(1, "done");
    wait_for_run_state(&server, 1, "failed");
    clients.register(2);
    wait_for_run_state(&server, 2, "running");
    let ended = waiting.end();
    assert_eq!(ended.code, Some(0), "{ended:?}");
    let seen = ended.out.contains("all tasks save at step 8");
    assert!(ended.out.contains("Run 1 ") && (seen || ended.out.contains("agreed on a step")), "{ended:?}");
}

#[test]
fn events_are_chosen_and_have_their_task_and_their_barrier() {
    let server = MusterServer::start(&["--tasks", "2", "--recoverable"]);
    let clients = Clients::connect_to(&server);
    clients.register(2);
    for task in 0..2 {
        clients.wait_at_barrier(task, "train/step", 60_000);
    }
    // The registration has passed before.
    let passed = || server.get("/api/v1/jobs/default/events").body.matches("barrier-passed").count();
    wait_until("it has passed", || passed() >= 2);
    clients.fail(1, "out of memory");
    let said = |arguments: &[&str]| {
        let ended = run(muster(["events", "--server", &server.url()]).args(arguments));
        assert_eq!((ended.code, ended.err.as_str()), (Some(0), ""), "{arguments:?}: {ended:?}");
        ended.out
    };
    wait_until("it has failed", || said(&[]).contains("task-failed"));
    let passed = said(&["--kind", "barrier-passed,task-failed"]);
    let line = passed.lines().find(|line| line.contains("train/step")).expect("the barrier's");
    let columns: Vec<&str> = line.split_whitespace().collect();
    assert_eq!(
        (columns[2], columns[3], columns[4], columns[5]),
        ("1", "barrier-passed", "-", "train/step"),
        "{line}"
    );
    let (time, millis) = columns[1].rsplit_once('.').expect("milliseconds");
    assert!(time.len() == 19 && millis.len() == 4 && millis.ends_with('Z'), "{line}");
    assert!(
        passed.contains("registration") && passed.lines().all(|line| !line.contains("run-opened")),
        "{passed}"
    );
    let of_task = said(&["--task", "1"]);
    assert!(of_task.lines().count() >= 2 && of_task.lines().all(|line| line.contains(" 1  ")), "{of_task}");
    let of_barrier = said(&["--barrier", "train/step"]);
    assert!(
        of_barrier.contains("barrier-passed") && of_barrier.lines().all(|line| line.contains("train/step")),
        "{of_barrier}"
    );
    assert!(said(&["--barrier", "registration"]).contains("barrier-passed"));
    assert_eq!(said(&["--barrier", "train"]), "", "it is the whole id");
    assert_eq!(said(&["--run", "1"]), said(&[]));
    let unknown = run(&mut muster(["events", "--run", "2", "--server", &server.url()]));
    assert!(unknown.code == Some(1) && unknown.err.contains("has no run 2"), "{unknown:?}");
    let json = said(&["--json", "--barrier", "train/step", "--kind", "barrier-passed"]);
    let event: serde_json::Value = serde_json::from_str(json.trim_end()).expect("one event");
    assert_eq!((&event["barrier"], &event["kind"]), (&"train/step".into(), &"barrier-passed".into()));
    assert_eq!(said(&["--since", "1h"]), said(&[]));
    assert_eq!(said(&["--since", "0s"]), "");
    let wrong = run(&mut muster(["events", "--kind", "exploded", "--server", &server.url()]));
    assert!(wrong.code == Some(1) && wrong.err.contains("task-failed"), "{wrong:?}");
}

#[test]
fn an_exclusion_is_printed_once() {
    let server = MusterServer::start(&["--tasks", "2", "--recoverable"]);
    let clients = Clients::connect_to(&server);
    clients.register(2);
    let body = r#"{"task": 1, "reason": "flaky NIC"}"#;
    assert_eq!(server.send("POST", "/api/v1/jobs/default/exclusions", body).status, 201);
    let ended = run(&mut muster(["status", "--server", &server.url()]));
    assert!(
        ended.out.contains("  EXCLUDED  task 1 since ") && !ended.out.contains("  FAILED  "),
        "{ended:?}"
    );
    let row = ended.out.lines().find(|line| line.trim_start().starts_with("1  ")).expect("a row");
    assert_eq!(row.split_whitespace().nth(1), Some("excluded"), "{ended:?}");
}

#[test]
fn usage_asks_for_nothing_that_the_environment_gives() {
    for arguments in [&["readmit"][..], &["drain"], &["status", "--bogus"], &["job", "create"], &["launch"]] {
        let plain = run(&mut muster(arguments));
        let mut command = muster(arguments);
        command
            .env("MUSTER_SERVER", "http://127.0.0.1:1")
            .env("MUSTER_JOB", "a")
            .env("MUSTER_TOKEN_FILE", "/t");
        let given = run(&mut command);
        let usage = |text: &str| text.lines().find(|line| line.starts_with("Usage:")).map(str::to_owned);
        assert_eq!(given.code, Some(2), "{given:?}");
        assert_eq!(usage(&given.err), usage(&plain.err), "{arguments:?}");
        let usage = usage(&given.err).expect("a usage");
        assert!(usage.contains(&format!("muster {}", arguments[0])), "{usage}");
        for flag in ["--server <", "--job <", "--token-file <"] {
            assert!(!usage.contains(flag), "{usage}");
        }
    }
}

#[test]
fn a_certificate_is_checked_for_what_it_says_that_it_is() {
    let folder = TempFolder::new("check");
    let path = |name: &str| folder.path(&format!("certs/{name}"));
    assert_eq!(run(&mut muster(["tls", "new", &folder.path("certs")])).code, Some(0));
    let check = |arguments: &[&str]| run(muster(["tls", "check", "--ca", &path("ca.pem")]).args(arguments));
    for name in ["client", "server"] {
        let (cert, key) = (path(&format!("{name}.pem")), path(&format!("{name}-key.pem")));
        let ended = check(&["--cert", &cert, "--key", &key]);
        assert_eq!(ended.code, Some(0), "{name}: {ended:?}");
        assert!(ended.out.contains(&format!("it may be used by {name}s")), "{ended:?}");
        let other = if name == "client" { "server" } else { "client" };
        let ended = check(&["--cert", &cert, "--for", other]);
        assert!(ended.code == Some(1) && ended.out.contains("WRONG"), "{name}: {ended:?}");
    }
}

#[test]
fn completions_list_every_subcommand_and_flag() {
    for shell in ["bash", "zsh", "fish"] {
        let ended = run(&mut muster(["completions", shell]));
        assert_eq!((ended.code, ended.err.as_str()), (Some(0), ""), "{shell}");
        for word in ["readmit", "heartbeat-timeout", "dry-run", "completions"] {
            assert!(ended.out.contains(word), "{shell} is not told of {word}");
        }
    }
    let bash = run(&mut muster(["completions", "bash"])).out;
    let mut shell = std::process::Command::new("bash");
    let checked = shell.arg("-n").stdin(Stdio::piped()).spawn().and_then(|mut shell| {
        std::io::Write::write_all(&mut shell.stdin.take().expect("a pipe"), bash.as_bytes())?;
        shell.wait()
    });
    assert!(checked.expect("bash runs").success());
    // The words that bash offers after these.
    for (words, offered) in [
        ("job c", "create"),
        ("events --ba", "--barrier"),
        ("status --w", "--watch"),
        ("comp", "completions"),
    ] {
        let program = format!(
            "source <({} completions bash); COMP_WORDS=(muster {words}); COMP_CWORD=$((${{#COMP_WORDS[@]}} - 1)); \
             _muster muster \"${{COMP_WORDS[COMP_CWORD]}}\" \"${{COMP_WORDS[COMP_CWORD-1]}}\"; echo \"${{COMPREPLY[@]}}\"",
            env!("CARGO_BIN_EXE_muster")
        );
        let ended = run(std::process::Command::new("bash").args(["-c", &program]));
        assert!(ended.out.split_whitespace().any(|word| word == offered), "{words}: {ended:?}");
    }
}

#[test]
fn a_command_without_end_ends_when_its_reader_has_gone() {
    let server = MusterServer::start(&["--tasks", "2", "--recoverable"]);
    for arguments in ["status --watch=20ms", "status --watch=20ms --json", "events --follow"] {
        // `head` goes after the first line; a later event finds no reader.
        let command = format!(
            "timeout 30 {} {arguments} --server {} | head -n 1; exit ${{PIPESTATUS[0]}}",
            env!("CARGO_BIN_EXE_muster"),
            server.url()
        );
        let mut shell = std::process::Command::new("bash");
        let piped = Process::start(shell.args(["-c", &command]));
        for task in [0, 1] {
            let body = format!("{{\"task\": {task}, \"reason\": \"r\"}}");
            std::thread::sleep(std::time::Duration::from_millis(300));
            server.send("POST", "/api/v1/jobs/default/exclusions", &body);
            let id = server.get("/api/v1/jobs/default/exclusions").json()["exclusions"][0]["id"].clone();
            server.send("DELETE", &format!("/api/v1/jobs/default/exclusions/{id}?reason=r"), "");
        }
        let ended = piped.end();
        assert_eq!((ended.code, ended.out.lines().count()), (Some(0), 1), "{arguments}: {ended:?}");
    }
}

#[test]
fn a_watched_status_fits_the_terminal_and_leaves_it_as_it_was() {
    let server = MusterServer::start(&["--job", "a=4", "--job", "b=4", "--job", "c=4"]);
    let watch = format!(
        "stty cols 50 rows 6; timeout --foreground -s INT 1 {} status --watch=50ms --server {}",
        env!("CARGO_BIN_EXE_muster"),
        server.url()
    );
    let mut terminal = std::process::Command::new("script");
    terminal.args(["--quiet", "--return", "--command", &watch, "/dev/null"]).env("TERM", "xterm");
    let ended = run(&mut terminal);
    assert_eq!(ended.code, Some(124), "timeout interrupts it: {ended:?}");
    let (enter, leave) = ("\x1b[?1049h\x1b[?25l", "\x1b[?25h\x1b[?1049l");
    let (shown, after) = ended.out.split_once(leave).expect("it leaves the screen");
    let frames: Vec<&str> = shown.split("\x1b[H").skip(1).collect();
    assert!(shown.contains(enter) && frames.len() > 2, "{ended:?}");
    for frame in &frames {
        assert!(!frame.contains("\x1b[2J"), "the screen is not cleared before it is written: {frame:?}");
        let lines: Vec<&str> = frame.split("\r\n").collect();
        assert!(lines.len() <= 6, "{frame:?}");
        assert!(lines.last().expect("a line").starts_with("… "), "{frame:?}");
    }
    assert!(after.contains("JOB a") && after.contains("JOB c"), "the whole status stays: {after:?}");
}

#[test]
fn a_demo_kills_its_service_and_every_step_holds() {
    let arguments = ["demo", "--kill-service", "--for", "14", "--pause", "100ms"];
    let demo = run(&mut muster(arguments.iter().chain(&["--grpc", "127.0.0.1:0", "--http", "127.0.0.1:0"])));
    assert_eq!(demo.code, Some(0), "{demo:?}");
    assert!(demo.out.contains("was killed: kill -9; another process goes on from its journal"), "{demo:?}");
    assert!(demo.out.contains("all 4 workers step on in the same run"), "{demo:?}");
    assert!(demo.out.contains("the service killed"), "{demo:?}");
}

#[test]
fn a_demo_listens_on_the_given_addresses() {
    let wrong = run(&mut muster(["demo", "--http", "0.0.0.0:0"]));
    assert!(wrong.code == Some(2) && wrong.err.contains("only this machine"), "{wrong:?}");
    let taken = std::net::TcpListener::bind("127.0.0.1:0").expect("a port");
    let address = taken.local_addr().expect("an address").to_string();
    let refused = run(&mut muster(["demo", "--http", &address, "--grpc", "127.0.0.1:0"]));
    assert!(refused.code == Some(1) && refused.err.contains(&address), "{refused:?}");
    drop(taken);
    let mut demo = Process::start(&mut muster(["demo", "--http", &address, "--grpc", "127.0.0.1:0"]));
    let line = demo.out_line("look at");
    assert!(line.contains(&format!("http://{address}/")), "{line}");
    demo.signal(Signal::INT);
    assert_eq!(demo.end().code, Some(130));
}
