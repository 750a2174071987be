//! Runs the programs against real servers.

use std::path::Path;

use rustix::process::Signal;

use crate::harness::{CommandOutput, MusterServer, Process, TempFolder, run};
use crate::programs::{Compiler, program_command, programs_folder, start_program};

/// Compiles programs with each compiler and calls `scenario` with them.
fn with_each_compiler(names: &[&str], mut scenario: impl FnMut(&[&Path])) {
    for compiler in Compiler::installed() {
        let folder = TempFolder::new(&format!("c-{}-{compiler:?}", names[0]));
        let programs: Vec<_> =
            names.iter().map(|name| compiler.compile(&programs_folder().join(name), &folder)).collect();
        scenario(&programs.iter().map(AsRef::as_ref).collect::<Vec<_>>());
    }
}

/// Waits for the end of a program, which must succeed and say so.
#[track_caller]
fn wait_for_success(program: &Process) -> CommandOutput {
    let done = program.end();
    assert!(done.status.success(), "{}: {}\n{}{}", program.name, done.status, done.out, done.err);
    assert!(done.out.contains("DONE") || done.out.contains("SURVIVED"), "{}", done.out);
    done
}

fn recoverable_server(tasks: &str) -> MusterServer {
    MusterServer::patient(&["--tasks", tasks, "--recoverable"])
}

/// Runs two tasks of the programs to their ends.
fn run_pair(first: &Path, second: &Path) {
    let server = recoverable_server("2");
    let service = server.grpc.to_string();
    let tasks = [start_program(first, &[&service, "0"]), start_program(second, &[&service, "1"])];
    tasks.iter().for_each(|task| _ = wait_for_success(task));
}

#[test]
fn two_tasks_in_c_do_what_the_interface_offers() {
    with_each_compiler(&["two_tasks.c"], |programs| run_pair(programs[0], programs[0]));
}

#[test]
fn two_tasks_in_cxx_do_what_the_interface_offers() {
    with_each_compiler(&["two_tasks.cpp"], |programs| run_pair(programs[0], programs[0]));
}

/// Kills task 1 while it moves memory; task 0 must learn it, by an error, and go on.
fn kill_a_peer(program: &Path, transport: &str) {
    let server = recoverable_server("2");
    let service = server.grpc.to_string();
    let mut survivor = start_program(program, &[&service, "0", transport]);
    let mut victim = start_program(program, &[&service, "1", transport]);
    survivor.out_line("MOVING");
    victim.out_line("MOVING");
    victim.signal(Signal::KILL);
    wait_for_success(&survivor);
}

#[test]
fn the_death_of_a_peer_fails_its_transfers_and_nothing_else() {
    with_each_compiler(&["peer_death.c"], |programs| {
        // The best transport, and TCP, where a write to a dead peer raises SIGPIPE by default.
        for transport in ["0", "4"] {
            kill_a_peer(programs[0], transport);
        }
    });
}

#[test]
fn wrong_use_is_refused_with_a_reason() {
    with_each_compiler(&["misuse.c"], |programs| {
        let server = recoverable_server("1");
        wait_for_success(&start_program(programs[0], &[&server.grpc.to_string()]));
    });
}

#[test]
fn threads_share_handles() {
    with_each_compiler(&["threads.c"], |programs| {
        let server = recoverable_server("2");
        wait_for_success(&start_program(programs[0], &[&server.grpc.to_string()]));
    });
}

#[test]
fn a_cancelled_transfer_is_proven_to_be_over() {
    with_each_compiler(&["cancel.c"], |programs| {
        let server = recoverable_server("2");
        wait_for_success(&start_program(programs[0], &[&server.grpc.to_string()]));
    });
}

#[test]
fn transfers_wait_for_a_task_that_joins_again() {
    with_each_compiler(&["absent_peer.c"], |programs| {
        let server = recoverable_server("2");
        wait_for_success(&start_program(programs[0], &[&server.grpc.to_string()]));
    });
}

#[test]
fn a_forked_process_is_told_so() {
    with_each_compiler(&["fork.c"], |programs| {
        let server = recoverable_server("1");
        wait_for_success(&start_program(programs[0], &[&server.grpc.to_string()]));
    });
}

#[test]
fn a_process_ends_while_its_objects_live_and_a_thread_waits() {
    with_each_compiler(&["globals.cpp"], |programs| {
        let server = recoverable_server("1");
        for how in ["return", "exit"] {
            let done = wait_for_success(&start_program(programs[0], &[&server.grpc.to_string(), how]));
            assert_eq!(done.err, "", "{how}");
        }
    });
}

#[test]
fn the_end_of_the_service_is_an_error_and_no_signal() {
    with_each_compiler(&["service_death.c"], |programs| {
        let server = recoverable_server("1");
        let mut program = start_program(programs[0], &[&server.grpc.to_string()]);
        program.out_line("JOINED");
        server.signal(Signal::KILL);
        wait_for_success(&program);
    });
}

#[test]
fn certificates_and_tokens_work_as_those_of_workers() {
    let folder = TempFolder::new("c-certificates");
    muster::tls::certificate_authority::write_trial_certificates(
        folder.path("certs").as_ref(),
        &["localhost".to_owned()],
    )
    .expect("they can be written");
    let [server_cert, server_key, ca] =
        ["server", "server-key", "ca"].map(|name| folder.path(&format!("certs/{name}.pem")));
    with_each_compiler(&["secure.c"], |programs| {
        let server = MusterServer::patient(&[
            "--tasks",
            "2",
            "--grpc-tls-cert",
            &server_cert,
            "--grpc-tls-key",
            &server_key,
            "--grpc-tls-client-ca",
            &ca,
        ]);
        let service = format!("localhost:{}", server.grpc.port());
        let certs = folder.path("certs");
        let tasks = ["0", "1"].map(|task| start_program(programs[0], &[&service, task, &certs]));
        tasks.iter().for_each(|task| _ = wait_for_success(task));
    });
}

#[test]
fn tasks_that_are_missing_are_named() {
    with_each_compiler(&["missing.c"], |programs| {
        let server = recoverable_server("3");
        wait_for_success(&start_program(programs[0], &[&server.grpc.to_string()]));
    });
}

/// The other tests would be worth little if a leak or a use after free went unnoticed.
#[test]
fn the_sanitizers_find_what_they_are_for() {
    for compiler in Compiler::installed() {
        let folder = TempFolder::new(&format!("c-faults-{compiler:?}"));
        let program = compiler.compile(&programs_folder().join("faults.c"), &folder);
        for (fault, report) in
            [("leak", "LeakSanitizer"), ("use-after-free", "AddressSanitizer"), ("overflow", "runtime error")]
        {
            let done = run(&mut program_command(&program, &[fault]));
            assert!(!done.status.success(), "{compiler:?}: {fault} went unnoticed");
            assert!(done.err.contains(report), "{compiler:?}: {fault}:\n{}", done.err);
        }
        assert!(run(&mut program_command(&program, &["none"])).status.success());
    }
}
