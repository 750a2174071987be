//! The audit lines about authorized and refused requests.

use http::StatusCode;
use muster::service::AccessRole;
use serde_json::{Value, json};

use crate::in_process_http_port::{FORM, InProcessHttpPort, csrf_proof_in_page};

async fn audit_lines(house: &InProcessHttpPort) -> Vec<Value> {
    let viewer = house.authorization_header(AccessRole::Viewer);
    let audit = house.send("GET", "/api/v1/audit", &[("authorization", &viewer)], "").await.body_as_json();
    audit["lines"].as_array().cloned().unwrap_or_else(|| panic!("{audit}"))
}

#[tokio::test]
async fn a_stranger_who_tries_a_hundred_times_fills_one_line_a_kind() {
    let house = InProcessHttpPort::requiring_tokens("audit-strangers");
    for attempt in 0..100 {
        let wrong = format!("Bearer muster_{attempt}");
        let headers = [("authorization", wrong.as_str()), ("content-type", "application/json")];
        let headers = if attempt % 2 == 0 { &headers[..] } else { &headers[1..] };
        let answer = house.send("POST", "/api/v1/jobs", headers, "{}").await;
        assert!(matches!(answer.status.as_u16(), 401 | 429), "{answer:?}");
    }
    let page = house.send("GET", "/login", &[("accept", "text/html")], "").await;
    let headers = [("content-type", FORM), ("cookie", &*page.set_cookie_pair().unwrap())];
    let form = format!("csrf={}&token=x", csrf_proof_in_page(&page));
    assert_ne!(house.send("POST", "/login", &headers, &form).await.status, StatusCode::SEE_OTHER);
    let lines = audit_lines(&house).await;
    // A login is another kind of attempt with a line of its own.
    let [line, login] = &lines[..] else { panic!("{lines:?}") };
    assert_eq!(
        [&login["act"], &login["subject"], &login["times"]],
        [&json!("login"), &json!("/login"), &json!(1)]
    );
    assert_eq!(
        [&line["actor"]["who"], &line["role"], &line["act"], &line["subject"], &line["outcome"]],
        [&json!("anonymous"), &Value::Null, &json!("change"), &json!("/api/v1/jobs"), &json!("refused")]
    );
    assert_eq!(line["actor"]["address"], "10.0.0.5:40000");
}

#[tokio::test]
async fn lines_say_by_which_role_and_changes_that_make_no_sense_have_one_too() {
    let house = InProcessHttpPort::requiring_tokens("audit-roles");
    let (operator, admin) =
        (house.authorization_header(AccessRole::Operator), house.authorization_header(AccessRole::Admin));
    let ask = async |token: &str, method: &str, path: &str, body: &str| {
        let headers = [("authorization", token), ("content-type", "application/json")];
        house.send(method, path, &headers, body).await.status.as_u16()
    };
    let job = json!({"name": "b", "settings": {"tasks": 1}, "reason": "nightly"}).to_string();
    assert_eq!(ask(&admin, "POST", "/api/v1/jobs", &job).await, 201);
    assert_eq!(ask(&operator, "POST", "/api/v1/jobs", &job).await, 403);
    let exclusions = "/api/v1/jobs/a/exclusions";
    assert_eq!(ask(&operator, "POST", exclusions, "{\"task\": 0}").await, 422);
    assert_eq!(ask(&operator, "POST", exclusions, "{\"task\": 9, \"reason\": \"r\"}").await, 422);
    assert_eq!(ask(&operator, "DELETE", "/api/v1/jobs/a/exclusions/x?reason=r", "").await, 400);
    assert_eq!(ask(&admin, "POST", "/api/v1/nothing", "{}").await, 404);
    assert_eq!(
        ask(&admin, "GET", "/api/v1/jobs/nobody", "").await,
        404,
        "who only looks is not written down"
    );
    let lines = audit_lines(&house).await;
    let of = |line: &Value| {
        let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
        [text(&line["actor"]["who"]), text(&line["role"]), text(&line["act"]), text(&line["outcome"])]
    };
    let found: Vec<[String; 4]> = lines.iter().map(of).collect();
    let expected = [
        ["a-admin", "admin", "create-job", "done"],
        ["a-operator", "operator", "change", "refused"],
        ["a-operator", "operator", "change", "refused"],
        // A request that reached its handler has exactly one line, with the name of its action.
        ["a-operator", "operator", "exclude", "refused"],
        ["a-operator", "operator", "delete", "refused"],
        ["a-admin", "admin", "change", "refused"],
    ];
    assert_eq!(found, expected.map(|line| line.map(str::to_owned)), "{lines:#?}");
    assert!(
        lines[2]["detail"].as_str().is_some_and(|why| why.contains("missing field `reason`")),
        "{lines:#?}"
    );
    let events =
        house.send("GET", "/api/v1/jobs/b/events", &[("authorization", &admin)], "").await.body_as_json();
    assert_eq!(events["events"][0]["actor"]["who"], "a-admin", "{events}");
}

#[tokio::test]
async fn the_form_of_a_page_is_written_down_once_whether_it_makes_sense_or_not() {
    let house = InProcessHttpPort::requiring_tokens("audit-forms");
    let (cookie, proof) = house.log_in(AccessRole::Operator).await;
    let headers = [("cookie", &*cookie), ("content-type", FORM)];
    for (place, form) in [("", "task=0"), ("/7/lift", "reason=r"), ("", "task=9&reason=r")] {
        let (path, form) = (format!("/jobs/a/exclusions{place}"), format!("csrf={proof}&{form}"));
        let answer = house.send("POST", &path, &headers, &form).await;
        assert!(answer.status.is_client_error(), "{form}: {answer:?}");
    }
    let lines = audit_lines(&house).await;
    let acts: Vec<&Value> = lines.iter().map(|line| &line["act"]).collect();
    assert_eq!(acts, ["login", "change", "readmit", "change"], "{lines:#?}");
    assert!(lines.iter().all(|line| line["role"] == "operator"), "{lines:#?}");
}

#[tokio::test]
async fn the_audit_of_a_job_has_requests_refused_before_the_handler() {
    let house = InProcessHttpPort::requiring_tokens("audit-jobs");
    let (viewer, operator) =
        (house.authorization_header(AccessRole::Viewer), house.authorization_header(AccessRole::Operator));
    let json = ("content-type", "application/json");
    // A lacking role, a lacking token, a foreign origin, and invalid requests.
    let exclusions = "/api/v1/jobs/a/exclusions";
    house.send("POST", exclusions, &[("authorization", &viewer), json], "{}").await;
    house.send("POST", exclusions, &[json], "{}").await;
    let elsewhere = [("authorization", &*operator), json, ("origin", "https://elsewhere.example")];
    house.send("POST", exclusions, &elsewhere, "{}").await;
    house.send("DELETE", "/api/v1/jobs/%61/exclusions/x?reason=r", &[("authorization", &operator)], "").await;
    house.send("POST", "/api/v1/jobs/b/exclusions", &[("authorization", &viewer), json], "{}").await;
    let path = "/api/v1/audit?job=a&outcome=refused";
    let page = house.send("GET", path, &[("authorization", &viewer)], "").await.body_as_json();
    let of_a = page["lines"].as_array().cloned().unwrap_or_else(|| panic!("{page}"));
    let who: Vec<&Value> = of_a.iter().map(|line| &line["actor"]["who"]).collect();
    assert_eq!(who, ["a-viewer", "anonymous", "a-operator", "a-operator"], "{of_a:#?}");
    let all = audit_lines(&house).await;
    assert_eq!(all.len(), 5, "{all:#?}");
    assert_eq!(all.last().map(|line| &line["job"]), Some(&Value::Null), "there is no such job: {all:#?}");
}

#[tokio::test]
async fn an_unconfigured_host_name_is_audited_once() {
    let house = InProcessHttpPort::requiring_tokens("audit-hosts");
    for _ in 0..10 {
        let headers = [("host", "rebound.example"), ("content-type", "application/json")];
        let answer = house.send("POST", "/api/v1/jobs/a/drain", &headers, "{}").await;
        assert_eq!(answer.status, StatusCode::MISDIRECTED_REQUEST);
    }
    let lines = audit_lines(&house).await;
    let [line] = &lines[..] else { panic!("{lines:#?}") };
    assert!(line["detail"].as_str().is_some_and(|why| why.contains("rebound.example")), "{line}");
    assert_eq!(line["job"], "a");
}

#[tokio::test]
async fn changes_that_come_too_often_fill_one_line_from_the_first_of_them() {
    let house = InProcessHttpPort::with_change_rate_limit_of("audit-often", 1);
    let operator = house.authorization_header(AccessRole::Operator);
    let headers = [("authorization", &*operator), ("content-type", "application/json")];
    let mut late = 0;
    for _ in 0..30 {
        let answer = house.send("POST", "/api/v1/jobs/a/exclusions", &headers, "{}").await;
        late += u32::from(answer.status == StatusCode::TOO_MANY_REQUESTS);
    }
    assert!(late > 20, "{late}");
    let lines = audit_lines(&house).await;
    let often = |line: &&Value| line["detail"].as_str().is_some_and(|why| why.contains("too many changes"));
    let often: Vec<&Value> = lines.iter().filter(often).collect();
    let [line] = &often[..] else { panic!("{lines:#?}") };
    assert_eq!((&line["actor"]["who"], &line["job"]), (&"a-operator".into(), &"a".into()));
}
