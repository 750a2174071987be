//! Logins and reloads of tokens.

use std::time::Duration;

use http::StatusCode;
use muster::http::{NewToken, TransportSecurity, append_token_to_file};
use muster::service::AccessRole;

use crate::in_process_http_port::{FORM, InProcessHttpPort, csrf_proof_in_page};

async fn status_of_job_list(house: &InProcessHttpPort, headers: &[(&str, &str)]) -> StatusCode {
    house.send("GET", "/api/v1/jobs", headers, "").await.status
}

#[tokio::test]
async fn a_login_gives_a_cookie_and_a_logout_takes_it() {
    let house = InProcessHttpPort::requiring_tokens("login");
    let page = house.send("GET", "/nothing", &[("accept", "text/html")], "").await;
    assert_eq!(
        (page.status, &page.headers["location"]),
        (StatusCode::SEE_OTHER, &"/login?next=%2Fnothing".parse().unwrap())
    );
    let (cookie, proof) = house.log_in(AccessRole::Viewer).await;
    assert_eq!(status_of_job_list(&house, &[("cookie", &cookie)]).await, StatusCode::OK);
    let form = format!("csrf={proof}");
    let headers = [("cookie", &*cookie), ("content-type", FORM)];
    let answer = house.send("POST", "/logout", &headers, &form).await;
    assert_eq!(answer.status, StatusCode::SEE_OTHER, "{answer:?}");
    assert_eq!(status_of_job_list(&house, &[("cookie", &cookie)]).await, StatusCode::UNAUTHORIZED);
}

#[tokio::test]
async fn a_login_needs_the_form_of_this_server_and_is_not_tried_for_ever() {
    let house = InProcessHttpPort::requiring_tokens("forced");
    let token = house.tokens[&AccessRole::Admin].clone();
    let form = format!("token={token}&next=%2F");
    let answer = house.send("POST", "/login", &[("content-type", FORM)], &form).await;
    assert_eq!(answer.problem_type(), "no-proof", "a page elsewhere must not log anybody in");
    let page = house.send("GET", "/login", &[("accept", "text/html")], "").await;
    let (cookie, proof) = (page.set_cookie_pair().unwrap(), csrf_proof_in_page(&page));
    let mut last = StatusCode::OK;
    for _ in 0..20 {
        let headers = [("content-type", FORM), ("cookie", &*cookie)];
        last = house.send("POST", "/login", &headers, &format!("csrf={proof}&token=x")).await.status;
        assert!(matches!(last.as_u16(), 401 | 429), "{last}");
    }
    assert_eq!(last, StatusCode::TOO_MANY_REQUESTS);
}

#[tokio::test]
async fn a_login_ends_with_its_time_and_with_its_token() {
    let house = InProcessHttpPort::new("time", true, Duration::from_millis(50));
    let (cookie, _) = house.log_in(AccessRole::Viewer).await;
    tokio::time::sleep(Duration::from_millis(80)).await;
    assert_eq!(status_of_job_list(&house, &[("cookie", &cookie)]).await, StatusCode::UNAUTHORIZED);

    let house = InProcessHttpPort::requiring_tokens("rotation");
    let (cookie, _) = house.log_in(AccessRole::Viewer).await;
    let old = house.authorization_header(AccessRole::Viewer);
    let new = NewToken::generate("new", AccessRole::Viewer).unwrap();
    std::fs::remove_file(&house.file).unwrap();
    append_token_to_file(&house.file, "new", &new.line).unwrap();
    // The file is checked at most once a second.
    tokio::time::sleep(Duration::from_millis(1100)).await;
    assert_eq!(
        status_of_job_list(&house, &[("authorization", &format!("Bearer {}", new.token))]).await,
        StatusCode::OK
    );
    assert_eq!(status_of_job_list(&house, &[("authorization", &old)]).await, StatusCode::UNAUTHORIZED);
    assert_eq!(status_of_job_list(&house, &[("cookie", &cookie)]).await, StatusCode::UNAUTHORIZED);
    // An invalid file changes nothing.
    std::fs::write(&house.file, "nonsense").unwrap();
    tokio::time::sleep(Duration::from_millis(1100)).await;
    assert_eq!(
        status_of_job_list(&house, &[("authorization", &format!("Bearer {}", new.token))]).await,
        StatusCode::OK
    );
}

#[tokio::test]
async fn cookies_are_kept_from_scripts_other_sites_and_plaintext() {
    let house = InProcessHttpPort::requiring_tokens("cookies");
    let plain = house.send("GET", "/login", &[("accept", "text/html")], "").await;
    let set = plain.headers["set-cookie"].to_str().unwrap();
    assert!(set.contains("HttpOnly") && set.contains("SameSite=Strict") && !set.contains("Secure"), "{set}");
    let secure = TransportSecurity { secure: true, certificate: None };
    let answer = house.send_over(secure, "GET", "/login", &[("accept", "text/html")], "").await;
    let set = answer.headers["set-cookie"].to_str().unwrap();
    assert!(set.starts_with("__Host-") && set.contains("; Secure") && set.contains("Path=/"), "{set}");
}
