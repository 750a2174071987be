//! Tests of mutual TLS with jaxlib's own settings: a whole job over TLS, and tasks that are refused with a reason.

use std::path::Path;

use muster::coordination::RunState;
use muster::tls::HandshakeFailuresView;
use muster::tls::certificate_authority;

use super::conformance::check;
use super::fixture::JaxFixture;
use super::harness::wait_for;
use super::server::DEFAULT;
use super::{RunSet, Test, http};

pub const TESTS: &[Test] = &[
    (RunSet::Latest, "a_job_over_mutual_tls_conforms", conforms),
    (RunSet::Latest, "a_job_of_one_task_under_tls_and_one_in_plaintext_runs_on_one_port", both_on_one_port),
    (
        RunSet::Latest,
        "a_task_without_the_right_certificate_is_turned_away_and_the_server_says_why",
        turned_away,
    ),
];

/// Issues certificates in a folder of the fixture's, and returns the folder.
fn certificates(scene: &JaxFixture, name: &str) -> String {
    let folder = scene.file(name);
    certificate_authority::write_trial_certificates(
        Path::new(&folder),
        &["localhost".into(), "127.0.0.1".into()],
    )
    .unwrap();
    folder
}

/// Returns the TLS settings of a task.
fn settings(folder: &str, ca: &str) -> [(&'static str, String); 3] {
    [
        ("JAX_MTLS_CERT_FILE", format!("{folder}/client.pem")),
        ("JAX_MTLS_KEY_FILE", format!("{folder}/client-key.pem")),
        ("JAX_MTLS_CA_FILE", format!("{ca}/ca.pem")),
    ]
}

fn serve(scene: &JaxFixture, folder: &str, mode: &str) {
    let file = |name: &str| format!("{folder}/{name}.pem");
    scene.serve(&[
        "--tasks",
        "2",
        "--grpc-tls-cert",
        &file("server"),
        "--grpc-tls-key",
        &file("server-key"),
        "--grpc-tls-client-ca",
        &file("ca"),
        "--grpc-tls-mode",
        mode,
    ]);
}

fn conforms(scene: &JaxFixture) {
    let folder = certificates(scene, "certificates");
    serve(scene, &folder, "required");
    let address = scene.server().grpc().to_string();
    let start = |task| scene.start_with(&address, task, 2, &["conformance.py"], &settings(&folder, &folder));
    let tasks: Vec<_> = (0..2).map(start).collect();
    check(scene, DEFAULT, &tasks);
    assert!(failures(scene).succeeded >= 2);
}

fn both_on_one_port(scene: &JaxFixture) {
    let folder = certificates(scene, "certificates");
    serve(scene, &folder, "optional");
    let address = scene.server().grpc().to_string();
    let program = ["worker.py", "register", "--seconds", "0"];
    let secure = scene.start_with(&address, 0, 2, &program, &settings(&folder, &folder));
    let plain = scene.start(1, 2, &program);
    secure.succeed();
    plain.succeed();
    scene.server().until_run(1, RunState::Completed);
}

fn turned_away(scene: &JaxFixture) {
    let (ours, theirs) = (certificates(scene, "ours"), certificates(scene, "theirs"));
    serve(scene, &ours, "required");
    let address = scene.server().grpc().to_string();
    let program = ["worker.py", "register", "--seconds", "0"];
    let expect = |reason: &str| {
        scene.server().process.text(reason);
        wait_for(reason, || {
            failures(scene).handshakes.iter().any(|failed| failed.reason.contains(reason)).then_some(())
        });
    };
    {
        // Another authority issued its certificate; it trusts ours.
        let _foreign = scene.start_with(&address, 0, 2, &program, &settings(&theirs, &ours));
        expect("no authority that this port trusts has issued it");
        scene.server().process.text("CN=muster-client");
    }
    {
        // It trusts another authority than ours, and closes the connection.
        let _distrustful = scene.start_with(&address, 0, 2, &program, &settings(&ours, &theirs));
        expect("it does not trust this server's certificate and does not say so");
    }
    let _plain = scene.start(0, 2, &program);
    expect("the client speaks plaintext");
    assert!(scene.server().view(DEFAULT).run.tasks.iter().all(|task| task.lives.is_empty()));
}

fn failures(scene: &JaxFixture) -> HandshakeFailuresView {
    http::get(scene.server().about.http, "/api/v1/handshakes")
}
