//! Tests of request bodies: no route reads a body before its checks, and no route waits for a body without a limit.

use std::convert::Infallible;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use axum::body::Body;
use bytes::Bytes;
use futures_util::stream;
use http::StatusCode;
use muster::http::TransportSecurity;
use muster::service::AccessRole;

use crate::every_route::operations_of_all_routes;
use crate::in_process_http_port::{FORM, InProcessHttpPort, csrf_proof_in_page};

/// Returns an endless body of one byte a second, and a flag that tells whether it was read.
fn dribbled_body_and_read_flag() -> (Body, Arc<AtomicBool>) {
    let read = Arc::new(AtomicBool::new(false));
    let told = Arc::clone(&read);
    let bytes = stream::unfold((), move |()| {
        told.store(true, Ordering::Relaxed);
        async {
            tokio::time::sleep(Duration::from_secs(1)).await;
            Some((Ok::<_, Infallible>(Bytes::from_static(b"{")), ()))
        }
    });
    (Body::from_stream(bytes), read)
}

#[tokio::test(start_paused = true)]
async fn no_route_reads_a_body_before_the_head_has_passed_every_check() {
    let house = InProcessHttpPort::requiring_tokens("bodies-unread");
    let (viewer, admin) =
        (house.authorization_header(AccessRole::Viewer), house.authorization_header(AccessRole::Admin));
    let json = ("content-type", "application/json");
    let (mut refused, mut looked) = (0, 0);
    for operation in operations_of_all_routes(&house).await {
        let place = format!("{} {}", operation.method, operation.path);
        let mut wrongs = vec![
            vec![json, ("host", "evil.example"), ("authorization", &*admin)],
            vec![json, ("host", "localhost:19001@evil"), ("authorization", &*admin)],
            vec![json, ("origin", "https://evil.example"), ("authorization", &*admin)],
            vec![json, ("authorization", "Bearer muster_wrong")],
        ];
        if operation.changes_state() && !operation.public {
            wrongs.push(vec![json]);
            // Every role that may read may log out.
            if operation.path != "/logout" && !operation.is_report() {
                wrongs.push(vec![json, ("authorization", &*viewer)]);
            }
        }
        if !operation.changes_state() {
            wrongs.push(vec![("authorization", &*admin)]);
        }
        for headers in wrongs {
            let (body, read) = dribbled_body_and_read_flag();
            let answer = house
                .send_with_body(
                    TransportSecurity::default(),
                    &operation.method,
                    &operation.path,
                    &headers,
                    body,
                )
                .await;
            assert!(!read.load(Ordering::Relaxed), "{place} reads the body of {headers:?}: {answer:?}");
            if operation.changes_state() {
                assert!(answer.status.is_client_error(), "{place} {headers:?}: {answer:?}");
                refused += 1;
            } else {
                looked += 1;
            }
        }
    }
    assert!(refused > 50 && looked > 100, "{refused} {looked}");
}

#[tokio::test(start_paused = true)]
async fn every_route_that_reads_a_body_gives_it_up_when_it_dribbles() {
    let house = InProcessHttpPort::requiring_tokens("bodies-dribbled");
    let admin = house.authorization_header(AccessRole::Admin);
    let before = house.engine_state_bytes();
    let mut given_up = 0;
    for operation in
        operations_of_all_routes(&house).await.iter().filter(|operation| operation.changes_state())
    {
        let place = format!("{} {}", operation.method, operation.path);
        let page = house.send("GET", "/login", &[("accept", "text/html")], "").await;
        let (cookie, proof) = (page.set_cookie_pair().unwrap(), csrf_proof_in_page(&page));
        let login = [("content-type", FORM), ("cookie", &*cookie), ("x-csrf-token", &*proof)];
        let known = [("content-type", "application/json"), ("authorization", &*admin)];
        let headers = if operation.public { &login[..] } else { &known[..] };
        let (body, read) = dribbled_body_and_read_flag();
        let answer = house
            .send_with_body(TransportSecurity::default(), &operation.method, &operation.path, headers, body)
            .await;
        assert!(read.load(Ordering::Relaxed), "{place}");
        assert_eq!(
            (answer.status, &*answer.problem_type()),
            (StatusCode::REQUEST_TIMEOUT, "slow-body"),
            "{place}"
        );
        assert_eq!(answer.headers["connection"], "close", "{place}");
        given_up += 1;
    }
    assert!(given_up > 10, "{given_up}");
    assert_eq!(house.engine_state_bytes(), before);
}

#[tokio::test(start_paused = true)]
async fn a_rate_limited_request_is_refused_before_its_body() {
    let house = InProcessHttpPort::with_change_rate_limit_of("bodies-rates", 1);
    let operator = house.authorization_header(AccessRole::Operator);
    let headers = [("authorization", &*operator), ("content-type", "application/json")];
    for _ in 0..4 {
        house.send("POST", "/api/v1/jobs/a/exclusions", &headers, "{}").await;
    }
    let (body, read) = dribbled_body_and_read_flag();
    let path = "/api/v1/jobs/a/exclusions";
    let answer = house.send_with_body(TransportSecurity::default(), "POST", path, &headers, body).await;
    assert_eq!(answer.status, StatusCode::TOO_MANY_REQUESTS, "{answer:?}");
    assert!(!read.load(Ordering::Relaxed));

    let page = house.send("GET", "/login", &[("accept", "text/html")], "").await;
    let (cookie, proof) = (page.set_cookie_pair().unwrap(), csrf_proof_in_page(&page));
    let form = [("content-type", FORM), ("cookie", &*cookie), ("x-csrf-token", &*proof)];
    for attempt in 0..12 {
        house.send("POST", "/login", &form, &format!("token=wrong{attempt}")).await;
    }
    let (body, read) = dribbled_body_and_read_flag();
    let answer = house.send_with_body(TransportSecurity::default(), "POST", "/login", &form, body).await;
    assert_eq!(answer.status, StatusCode::TOO_MANY_REQUESTS, "{answer:?}");
    assert!(!read.load(Ordering::Relaxed));
    // A valid token in the header still works.
    let answer = house.send("GET", "/api/v1/jobs", &[("authorization", &operator)], "").await;
    assert_eq!(answer.status, StatusCode::OK);
}
