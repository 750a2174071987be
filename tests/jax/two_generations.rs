//! Releases of different wire generations on one server at the same time.

use libtest_mimic::{Completion, Trial};
use muster::coordination::{EventKind, TaskIncarnation};

use super::conformance;
use super::fixture::JaxFixture;
use super::process::Process;
use super::release::{Generation, Release};
use super::server::{DEFAULT, Server};
use super::skip::{Lacking, skip_named};

const NAME: &str = "jobs_of_both_generations_share_a_port_and_are_told_apart_by_the_name_dialled";

/// Returns the newest installed release of each generation; the last of `versions` may be missing on a
/// machine.
fn newest(releases: &[Release], generation: Generation) -> Option<&Release> {
    releases.iter().rev().find(|release| release.generation() == generation && release.is_there())
}

/// Returns the test, which is skipped if one of the generations is missing.
pub fn trial(releases: &[Release]) -> Trial {
    let old = newest(releases, Generation::A).cloned();
    let new = newest(releases, Generation::C).cloned();
    Trial::ignorable_test(NAME, move || {
        let Some((old, new)) = old.zip(new) else {
            let what = "a JAX release of each generation, which tests/jax/setup installs,";
            return Ok(Completion::ignored_with(skip_named(NAME, Lacking::Installation(what))));
        };
        share_a_port(&old, &new);
        Ok(Completion::Completed)
    })
}

/// The first label of the dialled name selects the job of a call. gRPC lets the system resolve names, and the
/// only one that every machine resolves to itself is `localhost`, on some without its subdomains. So one of
/// the jobs has that name, the other is reached at the bare address, and a third has its own listener.
fn share_a_port(old: &Release, new: &Release) {
    let mut scene = JaxFixture::new(NAME, old);
    let jobs = ["--job", "localhost=2", "--job", "default=2", "--job", "own=2@127.0.0.1:0"];
    scene.serve(&jobs);
    let server = scene.server();
    let own = server
        .about
        .grpc
        .iter()
        .find(|listener| listener.jobs[0].as_str() == "own")
        .expect("its listener")
        .address;
    let port = server.grpc().port();

    let start = |scene: &JaxFixture, address: &str| -> Vec<Process> {
        (0..2).map(|task| scene.start_at(address, task, 2, &["conformance.py"])).collect()
    };
    let named = start(&scene, &format!("localhost:{port}"));
    scene.release = new.clone();
    let bare = start(&scene, &format!("127.0.0.1:{port}"));
    let apart = start(&scene, &own.to_string());

    conformance::check(&scene, DEFAULT, &bare);
    conformance::check(&scene, "own", &apart);
    scene.release = old.clone();
    conformance::check(&scene, "localhost", &named);

    let server = scene.server();
    let [one, two, three] = ["localhost", DEFAULT, "own"].map(|job| incarnations(server, job));
    for lives in [&one, &two, &three] {
        assert_eq!(lives.len(), 2);
    }
    assert!(one.iter().all(|life| !two.contains(life) && !three.contains(life)));
    assert!(two.iter().all(|life| !three.contains(life)));
}

/// Returns every incarnation that has registered in a job.
fn incarnations(server: &Server, job: &str) -> Vec<TaskIncarnation> {
    let registered = server.events(job).into_iter().filter_map(|event| match event.what {
        EventKind::TaskRegistering { incarnation, .. } => Some(incarnation),
        _ => None,
    });
    registered.collect()
}
