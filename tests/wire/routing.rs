//! Tests of several jobs on one server.

use crate::second_client::{SecondClient, expect_ok, within};
use crate::support::{Body, Call, Caller, Client, Generation, MusterServer};

#[tokio::test(flavor = "multi_thread")]
async fn the_name_that_a_client_dials_tells_jobs_apart() {
    let server = MusterServer::patient(&["--job", "left=2", "--job", "right=2", "--log", "error"]);
    let left = SecondClient::register(&server, "left").await;
    let right = SecondClient::register(&server, "right").await;
    assert_ne!(left.service_incarnation(), right.service_incarnation(), "each job has a run of its own");
    let (client, caller) = left.task(1);
    expect_ok(&within(client.ask(caller, &Call::insert("k", "of the left"))).await);
    let (client, caller) = right.task(1);
    let answer = within(client.ask(caller, &Call::try_get("k"))).await;
    assert_eq!(answer.code, 5, "stores are apart: {answer:?}");
    // A caller of one job that calls the other is told its service incarnation.
    let strayed = Caller { service: Some(left.service_incarnation()), ..*caller };
    let answer = within(client.ask(&strayed, &Call::try_get("k"))).await;
    assert_eq!(answer.payloads.mismatch, Some(right.service_incarnation()), "{answer:?}");
    // The end of one job does not affect the other.
    let (client, caller) = left.task(0);
    let poll = within(client.ask(caller, &Call::Heartbeat { incarnation: 4711 })).await;
    assert_eq!(poll.code, 10, "{poll:?}");
    right.assert_served().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_address_without_a_job_name_reaches_the_default_job() {
    let server = MusterServer::patient(&["--tasks", "2", "--job", "other=2", "--log", "error"]);
    let witness = SecondClient::register(&server, "default").await;
    for authority in [None, Some("muster.example:8476"), Some("default:1"), Some("10.1.2.3:8476")] {
        let client = Client::to_authority(Generation::C, server.grpc, authority);
        let answer = within(client.ask(&Caller::new(9, 9, 0), &Call::watch(-1))).await;
        assert_eq!(
            answer.payloads.mismatch,
            Some(witness.service_incarnation()),
            "{authority:?}: {answer:?}"
        );
    }
    let client = Client::to_authority(Generation::C, server.grpc, Some("other.muster.example:8476"));
    let answer = within(client.ask(&Caller::new(9, 9, 0), &Call::watch(-1))).await;
    assert_ne!(answer.payloads.mismatch, Some(witness.service_incarnation()), "{answer:?}");
    witness.assert_served().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn the_error_for_an_unknown_job_name_says_how_to_create_it() {
    let server = MusterServer::patient(&["--job", "left=2", "--job", "right=2", "--log", "error"]);
    let witness = SecondClient::register(&server, "left").await;
    let client = Client::to_authority(Generation::C, server.grpc, Some("nowhere.test:1"));
    let call = Call::Register { incarnation: 1, recoverable: false };
    let answer = within(client.ask(&Caller::new(0, 1, 0), &call)).await;
    assert!(!answer.is_ok() && !answer.transport, "{answer:?}");
    // Without the mark of the service's own statements, clients keep trying until the job exists.
    assert_eq!(answer.payloads.service_error, None, "{answer:?}");
    assert_eq!(answer.body, Body::Nothing);
    witness.assert_served().await;
}
