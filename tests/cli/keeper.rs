//! The keeper: another process serves in place of one that dies, at the same addresses.

use std::net::TcpStream;
use std::thread;
use std::time::Duration;

use rustix::process::{Pid, kill_process};
use serde_json::Value;

use super::journal::{put_key, read, serve, start_worker};
use crate::harness::process::OutputLine;
use crate::harness::temp_folder::TempFolder;
use crate::harness::time::PATIENCE;
use crate::harness::{MusterServer, Signal, is_alive, muster, signal, wait_until};

/// Sends a signal to the process that serves, and waits until another one does.
#[track_caller]
fn end_core(server: &MusterServer, by: Signal) {
    let core = server.first_child().expect("a process serves");
    signal(core, by);
    wait_until("another process", || server.first_child().is_some_and(|present| present != core));
}

fn journal_state(server: &MusterServer) -> Value {
    server.get("/api/v1/journal").json()
}

fn metric(server: &MusterServer, sample: &str) -> Option<u64> {
    let metrics = server.get("/metrics").body;
    metrics.lines().find_map(|line| line.strip_prefix(sample)?.trim().parse().ok())
}

#[test]
fn another_process_serves_at_the_same_addresses_and_everybody_learns_why() {
    let folder = TempFolder::new("keeper-kill");
    let server = serve(&folder.path("journal"), "127.0.0.1:0", &[]);
    let workers = [start_worker(&server, "0"), start_worker(&server, "1")];
    let step = |line: &OutputLine| line.text.contains(": tasks 0 1;").then_some(());
    workers.iter().for_each(|worker| _ = worker.find(0, PATIENCE, step).expect("a step"));
    assert_eq!(put_key(&server, "checkpoint", "step 100"), 204);
    let before = read(&server, "/runs/1")["incarnation"].clone();
    for kill in 1..=5 {
        end_core(&server, Signal::KILL);
        // The socket of the keeper takes the connection at any time.
        drop(TcpStream::connect(server.grpc).expect("it listens"));
        assert_eq!(read(&server, "/runs/1")["incarnation"], before, "after kill {kill}");
        assert_eq!(read(&server, "/keys/checkpoint")["text"], "step 100");
        for worker in &workers {
            worker.find(worker.mark(), PATIENCE, step).expect("a step after the kill");
        }
        let state = journal_state(&server);
        assert_eq!(
            (&state["restarts"], &state["previous_end"]),
            (&kill.into(), &"the process before this one was killed by SIGKILL".into())
        );
        assert_eq!(metric(&server, "muster_keeper_service_ends_total{cause=\"killed\"}"), Some(kill));
    }
    end_core(&server, Signal::ABORT);
    let events = read(&server, "/events?limit=1000&kind=service-restarted");
    let reasons: Vec<_> =
        events["events"].as_array().into_iter().flatten().map(|event| &event["reason"]).collect();
    let of = |cause: &str| {
        reasons.iter().filter(|reason| reason.as_str().is_some_and(|reason| reason.contains(cause))).count()
    };
    assert_eq!((of("was killed by SIGKILL"), of("crashed with SIGABRT")), (5, 1), "{reasons:?}");
    let page = server.get("/").body;
    assert!(page.contains("the process before this one crashed with SIGABRT"), "{page}");
    assert_eq!(metric(&server, "muster_keeper_enabled"), Some(1));
    let announced =
        server.lines().iter().filter(|line| line.text.contains("Look with: muster status")).count();
    assert_eq!(announced, 1, "the addresses are the same, so they are printed once");
    for worker in workers {
        worker.signal(Signal::TERM);
        assert_eq!(worker.end().code, Some(0));
    }
    server.signal(Signal::TERM);
    let ended = server.end();
    assert_eq!(ended.code, Some(0), "{ended:?}");
}

#[test]
fn a_signal_stops_the_service_in_good_order_and_reloads_its_files() {
    for stop in [Signal::TERM, Signal::INT] {
        let folder = TempFolder::new("keeper-stop");
        let path = folder.path("journal");
        let server = serve(&path, "127.0.0.1:0", &["--audit-file", &folder.path("audit.jsonl")]);
        assert_eq!(put_key(&server, "a", "1"), 204);
        std::fs::rename(folder.path("audit.jsonl"), folder.path("rotated.jsonl")).expect("it can be rotated");
        server.signal(Signal::HUP);
        wait_until("the new audit file", || std::fs::exists(folder.path("audit.jsonl")).unwrap_or(false));
        // A supervisor may send the signal to all processes of the service.
        if let Some(core) = server.first_child().filter(|_| stop == Signal::TERM) {
            signal(core, stop);
        }
        server.signal(stop);
        let ended = server.end();
        assert_eq!(ended.code, Some(0), "{ended:?}");
        let checked = crate::harness::run(&mut muster(["journal", "check", &path, "--json"]));
        let contents: Value = serde_json::from_str(&checked.out).expect("JSON");
        assert_eq!((&contents["inputs"], &contents["has_snapshot"]), (&0.into(), &true.into()), "{contents}");
    }
}

#[test]
fn a_second_signal_to_the_keeper_ends_the_service_at_once_and_one_to_both_processes_does_not() {
    let folder = TempFolder::new("keeper-twice");
    let mut server = serve(&folder.path("journal"), "127.0.0.1:0", &["--stop-timeout", "1h"]);
    let core = server.first_child().expect("a process serves");
    // An incomplete request delays the stop until the timeout is over.
    let mut slow = TcpStream::connect(server.http).expect("it listens");
    std::io::Write::write_all(&mut slow, b"GET /version HTTP/1.1\r\n").expect("it reads");
    signal(core, Signal::TERM);
    server.err_line("stopping");
    server.signal(Signal::TERM);
    signal(core, Signal::TERM);
    thread::sleep(Duration::from_millis(300));
    assert!(server.is_running() && is_alive(core), "the same request came three times");
    server.signal(Signal::TERM);
    assert_eq!(server.end().code, Some(143));
}

#[test]
fn a_service_that_cannot_serve_says_so_once_and_is_not_started_again() {
    let folder = TempFolder::new("keeper-config");
    let taken = std::net::TcpListener::bind("127.0.0.1:0").expect("a free port");
    let address = taken.local_addr().expect("bound").to_string();
    let refused = |further: &[&str]| {
        let journal = folder.path("journal");
        let words = ["serve", "--tasks", "2", "--http", "127.0.0.1:0", "--data-dir", &journal];
        crate::harness::run(&mut muster(words.iter().chain(further)))
    };
    let ended = refused(&["--grpc", &address]);
    assert_eq!(ended.code, Some(1), "{ended:?}");
    assert_eq!(ended.err.matches("choose another address with --grpc").count(), 1, "{ended:?}");
    let ended = refused(&["--grpc", "127.0.0.1:0", "--tokens-file", "/nowhere"]);
    assert_eq!(ended.code, Some(1), "{ended:?}");
    assert_eq!(ended.err.matches("/nowhere").count(), 1, "{ended:?}");
    let by_hand = crate::harness::run(&mut muster(["serve", "--tasks", "2", "--core"]));
    assert!(by_hand.code == Some(1) && by_hand.err.contains("only the keeper starts a core"), "{by_hand:?}");
}

#[test]
fn the_service_dies_with_its_keeper() {
    let folder = TempFolder::new("keeper-dies");
    let server = serve(&folder.path("journal"), "127.0.0.1:0", &[]);
    let (core, grpc) = (server.first_child().expect("a process serves"), server.grpc);
    server.signal(Signal::KILL);
    server.end();
    wait_until("the end of the service", || !is_alive(core) && TcpStream::connect(grpc).is_err());
}

#[test]
fn without_a_keeper_one_process_serves() {
    let folder = TempFolder::new("keeper-none");
    let server = serve(&folder.path("journal"), "127.0.0.1:0", &["--no-keeper"]);
    assert_eq!(server.first_child(), None);
    assert_eq!(metric(&server, "muster_keeper_enabled"), Some(0));
    // A server without a journal has no keeper either: there would be nothing to go on from.
    assert_eq!(MusterServer::start(&["--tasks", "1"]).first_child(), None);
}

#[test]
fn a_service_that_dies_again_and_again_ends() {
    let folder = TempFolder::new("keeper-gives-up");
    let server = serve(&folder.path("journal"), "127.0.0.1:0", &[]);
    // Each process is killed before it has served for long.
    while server.is_running() {
        if let Some(core) = server.first_child().and_then(Pid::from_raw) {
            // It may have ended since.
            let _gone = kill_process(core, Signal::KILL);
        }
        thread::sleep(Duration::from_millis(2));
    }
    let ended = server.end();
    assert_eq!(ended.code, Some(137), "{ended:?}");
    assert!(ended.err.contains("ended again and again"), "{ended:?}");
}

/// Writes a program that does what a shell script says; `$MUSTER` is the program under test.
fn write_program(folder: &TempFolder, name: &str, script: &str) -> String {
    let path = folder.path(name);
    let text = format!("#!/bin/sh\nMUSTER={}\n{script}\n", env!("CARGO_BIN_EXE_muster"));
    std::fs::write(&path, text).expect("it can be written");
    std::fs::set_permissions(&path, std::os::unix::fs::PermissionsExt::from_mode(0o755))
        .expect("it can be run");
    path
}

fn upgrade(journal: &str, program: &str) -> crate::harness::CommandOutput {
    crate::harness::run(&mut muster(["upgrade", "--data-dir", journal, program]))
}

fn program_of(server: &MusterServer) -> String {
    let core = server.first_child().expect("a process serves");
    let words = std::fs::read(format!("/proc/{core}/cmdline")).expect("it runs");
    String::from_utf8_lossy(&words).replace('\0', " ")
}

#[test]
fn another_program_takes_over_and_the_workers_go_on_in_the_same_run() {
    let folder = TempFolder::new("upgrade");
    let journal = folder.path("journal");
    let server = serve(&journal, "127.0.0.1:0", &[]);
    let workers = [start_worker(&server, "0"), start_worker(&server, "1")];
    let step = |line: &OutputLine| line.text.contains(": tasks 0 1;").then_some(());
    workers.iter().for_each(|worker| _ = worker.find(0, PATIENCE, step).expect("a step"));
    assert_eq!(put_key(&server, "checkpoint", "step 100"), 204);
    let before = read(&server, "/runs/1")["incarnation"].clone();
    let other = folder.path("other-muster");
    std::fs::copy(env!("CARGO_BIN_EXE_muster"), &other).expect("a copy");
    for program in [other.as_str(), env!("CARGO_BIN_EXE_muster")] {
        let done = upgrade(&journal, program);
        assert_eq!(done.code, Some(0), "{done:?}");
        assert!(done.out.contains("can read the journal") && done.out.contains("serves,"), "{done:?}");
        assert!(program_of(&server).starts_with(program), "{}", program_of(&server));
        let name = std::fs::read_to_string(format!(
            "/proc/{}/comm",
            server.first_child().expect("a process serves")
        ));
        assert_eq!(name.expect("it runs").trim(), "muster");
        assert_eq!(read(&server, "/runs/1")["incarnation"], before);
        assert_eq!(read(&server, "/keys/checkpoint")["text"], "step 100");
        for worker in &workers {
            worker.find(worker.mark(), PATIENCE, step).expect("a step after the upgrade");
        }
    }
    let events = read(&server, "/events?limit=1000&kind=service-restarted").to_string();
    assert_eq!(events.matches("was stopped for an upgrade").count(), 2, "{events}");
    for worker in workers {
        worker.signal(Signal::TERM);
        assert_eq!(worker.end().code, Some(0));
    }
    server.signal(Signal::TERM);
    assert_eq!(server.end().code, Some(0));
    let absent = upgrade(&journal, &other);
    assert!(absent.code == Some(1) && absent.err.contains("no keeper answers"), "{absent:?}");
}

#[test]
fn a_program_that_cannot_take_over_leaves_the_service_as_it_is() {
    let folder = TempFolder::new("upgrade-refused");
    let journal = folder.path("journal");
    let server = serve(&journal, "127.0.0.1:0", &[]);
    assert_eq!(put_key(&server, "a", "1"), 204);
    let core = server.first_child();
    let wrong = write_program(&folder, "wrong", "echo 'the journal is from the future' >&2; exit 1");
    for (program, why) in [
        ("/nowhere/muster", "cannot run /nowhere/muster"),
        (&wrong, "the journal is from the future"),
        ("/bin/true", "is no program that can take over"),
    ] {
        let refused = upgrade(&journal, program);
        assert!(refused.code == Some(1) && refused.err.contains(why), "{refused:?}");
        assert!(refused.err.replace('\n', " ").contains("goes on as it is"), "{refused:?}");
    }
    assert_eq!(server.first_child(), core, "the same process serves all the time");
    assert_eq!(read(&server, "/keys/a")["text"], "1");
}

#[test]
fn the_former_program_is_back_if_the_other_one_does_not_serve_or_ends_soon() {
    let folder = TempFolder::new("upgrade-back");
    let journal = folder.path("journal");
    let server = serve(&journal, "127.0.0.1:0", &[]);
    assert_eq!(put_key(&server, "a", "1"), 204);
    let trial = "case \"$*\" in *--trial*) exec $MUSTER \"$@\";; esac";

    let never = write_program(&folder, "never", &format!("{trial}\nexit 7"));
    let failed = upgrade(&journal, &never);
    assert!(failed.code == Some(1) && failed.err.contains("exited with code 7"), "{failed:?}");
    wait_until("the former program", || read(&server, "/keys/a")["text"] == "1");
    assert!(!program_of(&server).contains("/never "), "{}", program_of(&server));

    // It writes another encoding, and damages what it finds.
    let script = format!(
        "case \"$*\" in *--trial*) $MUSTER \"$@\" | sed 's/\"encoding\": *[0-9]*/\"encoding\": 99/'; exit;; esac\n\
         for file in {journal}/segment-* {journal}/snapshot-*; do echo damage > $file; done; exit 8"
    );
    let damaging = write_program(&folder, "damaging", &script);
    let failed = upgrade(&journal, &damaging);
    assert!(failed.code == Some(1) && failed.err.contains("exited with code 8"), "{failed:?}");
    wait_until("the former program", || read(&server, "/keys/a")["text"] == "1");

    let dying = write_program(&folder, "dying", &format!("{trial}\nexec $MUSTER \"$@\""));
    let done = upgrade(&journal, &dying);
    assert_eq!(done.code, Some(0), "{done:?}");
    assert_eq!(put_key(&server, "b", "2"), 204);
    end_core(&server, Signal::KILL);
    wait_until("the former program", || read(&server, "/keys/b")["text"] == "2");
    let state = journal_state(&server);
    assert!(state["previous_end"].to_string().contains("the upgrade failed: version"), "{state}");
}
